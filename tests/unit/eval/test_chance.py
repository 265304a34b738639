"""What protocols call chance, against figures of encoders whose features say nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.eval.classification import LabelledFeatures, accuracy_figures
from mclclip.eval.features import Extractor
from mclclip.eval.protocols import mmvp, retrieval, zeroshot
from mclclip.eval.results import Figure


def check(measure: Callable[[int], list[Figure]], repeats: int, metrics: int) -> None:
    """The mean over random encoders is within four standard errors of the chance of each metric."""
    found = [{figure.metric: figure for figure in measure(seed)} for seed in range(repeats)]
    assert len(found[0]) == metrics
    for name, first in found[0].items():
        values = np.array([figures[name].value for figures in found])
        error = values.std(ddof=1) / len(values) ** 0.5
        assert abs(values.mean() - first.protocol["chance"]) < max(4 * error, 0.01), name
        assert error < 4.0


@pytest.fixture
def random_extractor(planted: Any) -> Callable[[int], Extractor]:
    return lambda seed: Extractor(planted("random", 40, dim=16, seed=seed))


def test_of_retrieval(tmp_path: Path, draw: Any, random_extractor: Any) -> None:
    """With one, two or three captions per image."""
    lines = ["filepath,title"]
    for number in range(12):
        draw(tmp_path / f"{number}.png", number)
        lines += [f"{number}.png,caption {number * 3 + i}" for i in range(1 + number % 3)]
    (tmp_path / "captions.csv").write_text("\n".join(lines))
    options = {"captions": "captions.csv", "ks": (1, 5, 30)}
    check(lambda seed: retrieval.evaluate(random_extractor(seed), tmp_path, **options), 60, 6)


@pytest.mark.parametrize(("metric", "metrics"), [("accuracy", 3), ("mean_of_top1_and_top5", 4)])
def test_of_zero_shot(
    tmp_path: Path, draw: Any, random_extractor: Any, metric: Any, metrics: int
) -> None:
    for label in range(7):
        for number in range(1 + label % 2):
            draw(tmp_path / f"class_{label}" / f"{number}.png", 7 * number + label)
    check(
        lambda seed: zeroshot.evaluate(random_extractor(seed), tmp_path, metric=metric), 60, metrics
    )


def test_of_minimal_pairs(tmp_path: Path, draw: Any, random_extractor: Any) -> None:
    lines = ["Question ID,Type,Statement"]
    for number in range(1, 31):
        draw(tmp_path / "MLLM_VLM Images" / "Color" / f"{number}.png", number)
        lines.append(f"{number},Color,statement {number}")
    (tmp_path / "Questions.csv").write_text("\n".join(lines))
    for direction in mmvp.DIRECTIONS:

        def measure(seed: int, direction: str = direction) -> list[Figure]:
            return mmvp.evaluate(random_extractor(seed), tmp_path, directions=[direction])

        check(measure, 40, 3)


def test_of_classifiers_is_the_most_frequent_class() -> None:
    train, test = np.array([0, 1, 1, 1, 2]), np.array([0, 1, 1, 2])
    empty = np.zeros((0, 1), dtype=np.float32)
    data = LabelledFeatures(empty, train, empty, test, {}, [*"abcd"])
    figures = {f.metric: f for f in accuracy_figures(np.ones(4, dtype=np.int64), data, {})}
    assert figures["accuracy"].value == figures["accuracy"].protocol["chance"] == 50.0
    chance = figures["mean_per_class"].protocol["chance"]
    assert figures["mean_per_class"].value == pytest.approx(chance, abs=0.01)
