"""kNN beside its definition written out; ties, copies, layouts."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.eval.classification import LabelledFeatures, accuracy_figures
from mclclip.eval.features import Extractor
from mclclip.eval.images import read_parts
from mclclip.eval.protocols import knn
from mclclip.util import search
from tests.unit.test_search import unit_rows


def few_directions(count: int, seed: int) -> np.ndarray:
    """Unit rows among which many are equal, at similarities that are exact."""
    return np.eye(4, dtype=np.float32)[np.random.default_rng(seed).integers(0, 4, count)]


def by_definition(
    queries: np.ndarray, train: np.ndarray, labels: np.ndarray, k: int, weights: str
) -> list[int]:
    """Slow: sorts (similarity, row), adds votes in dictionaries, compares tuples."""
    answers = []
    for query in queries:
        similarity = [float(np.float32(query.astype(float) @ row.astype(float))) for row in train]
        near = sorted(range(len(train)), key=lambda row: (-similarity[row], row))[:k]
        votes: dict[int, float] = {}
        sums: dict[int, float] = {}
        for row in near:
            vote = math.exp(similarity[row] / 0.07) if weights == "similarity" else 1.0
            label = int(labels[row])
            votes[label] = votes.get(label, 0.0) + vote
            sums[label] = sums.get(label, 0.0) + similarity[row]
        answers.append(max(votes, key=lambda label: (votes[label], sums[label], -label)))
    return answers


@pytest.mark.parametrize("weights", ["majority", "similarity"])
@pytest.mark.parametrize("make", [unit_rows, few_directions])
@pytest.mark.parametrize("k", [1, 10])
def test_answers_are_the_definition_s(
    make: Callable[..., np.ndarray], weights: Any, k: int
) -> None:
    train, queries = make(30, seed=3), make(12, seed=4)
    labels = np.random.default_rng(5).integers(0, 5, 30)
    similarity, rows = search.nearest(queries, train, k)
    answers = knn.vote(similarity, labels[rows], 5, weights)
    assert answers.tolist() == by_definition(queries, train, labels, k, weights)


@pytest.fixture
def folders(tmp_path: Path, draw: Callable[[Path, int], None]) -> Path:
    """Three classes; image n of class c spells 10 c + n: 0 to 4 in train, 5 and 6 in test."""
    for label in range(3):
        for number in range(7):
            part = "train" if number < 5 else "test"
            draw(tmp_path / part / f"class_{label}" / f"{number}.png", 10 * label + number)
    return tmp_path


def run(encoder: Any, root: Path, **options: Any) -> dict[str, Any]:
    figures = knn.evaluate(Extractor(encoder, batch_size=4), root, **options)
    return {figure.metric: figure for figure in figures}


def by_class(planted: Any) -> Any:
    """An encoder that sees the class only."""
    encoder = planted("perfect", 30)
    encoder.image_table = encoder.image_table[[10 * (n // 10) for n in range(30)]]
    return encoder


def test_bad_input_gets_one_clear_line(
    folders: Path, planted: Any, draw: Callable[[Path, int], None]
) -> None:
    encoder = by_class(planted)
    for options, message in (
        ({"k": 16}, "k is 16, wanted 1 to 15"),
        ({"feature": "pooled"}, "no pooled features: use feature=projected"),
    ):
        with pytest.raises(ValueError, match=message):
            run(encoder, folders, **options)
    with pytest.raises(ValueError, match="k is 16.* has 15 images"):
        knn.check(folders, k=16)
    draw(folders / "test" / "new" / "1.png", 1)
    with pytest.raises(ValueError, match="such as 'new', which train lacks"):
        run(encoder, folders)
    with pytest.raises(FileNotFoundError, match="no folder .*train: wanted train/ and test/"):
        run(encoder, folders / "train")
    for label in (1, 2):
        shutil.rmtree(folders / "train" / f"class_{label}")
    with pytest.raises(ValueError, match="images of 1 classes in train .* wanted at least 2"):
        run(encoder, folders)


def test_the_chance_of_equally_frequent_classes_is_their_mean() -> None:
    train, empty = np.array([0, 0, 1, 1, 2]), np.zeros((0, 1), dtype=np.float32)
    data = LabelledFeatures(empty, train, empty, np.array([0, 1, 1, 1, 2]), {}, [*"abcde"])
    figures = accuracy_figures(np.ones(5, dtype=np.int64), data, {})
    chance = {figure.metric: figure.protocol["chance"] for figure in figures}
    assert chance == {"accuracy": 40.0, "mean_per_class": pytest.approx(100 / 3, abs=0.01)}


def test_a_folder_val_is_valid(folders: Path, draw: Callable[[Path, int], None]) -> None:
    (folders / "val").mkdir()
    shutil.move(folders / "train" / "class_0", folders / "val" / "class_0")
    parts = read_parts(folders)
    assert {part: len(data.images) for part, data in parts.items()} == {
        "train": 10, "valid": 5, "test": 6,
    }  # fmt: skip
    # ImageNet's val, which a link calls test, is no set to choose by.
    shutil.rmtree(folders / "val")
    shutil.move(folders / "test", folders / "val")
    (folders / "test").symlink_to("val")
    draw(folders / "train" / "class_0" / "0.png", 0)
    assert read_parts(folders).keys() == {"train", "test"}
    (folders / "valid").symlink_to("val")
    with pytest.raises(ValueError, match="leave one out"):
        read_parts(folders)


@pytest.mark.parametrize("test", [[0, 1, 1, 2], [0, 2, 2, 2]])
def test_chance_is_the_most_frequent_class_as_every_answer(test: list[int]) -> None:
    """Also where the test images have none of it: then it is 0, of both figures."""
    train, empty = np.array([0, 1, 1, 1, 2]), np.zeros((0, 1), dtype=np.float32)
    data = LabelledFeatures(empty, train, empty, np.array(test), {}, [*"abcd"])
    figures = {f.metric: f for f in accuracy_figures(np.ones(4, dtype=np.int64), data, {})}
    assert figures["accuracy"].protocol["chance"] == 25.0 * test.count(1)
    for figure in figures.values():
        assert figure.value == pytest.approx(figure.protocol["chance"], abs=0.01)


def test_a_small_temperature_gives_the_nearest_ones_class() -> None:
    similarity = np.array([[0.99, 0.80, 0.79, 0.78]], np.float32)
    labels = np.array([[2, 1, 1, 1]])
    for temperature in (0.07, 0.002, 0.001, 1e-6):
        assert knn.vote(similarity, labels, 3, "similarity", temperature).tolist() == [2]
