"""Linear probe beside scikit-learn; the search beside the whole grid; a real image tower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression

from mclclip.config import BenchmarkConfig
from mclclip.eval import linear_probe
from mclclip.eval import run as evaluation
from mclclip.eval.features import Extractor
from mclclip.eval.labelled_features import extract
from mclclip.models.clip import load_clip
from mclclip.models.encoder import SingleEncoder
from mclclip.pack import pack
from tests import tiny
from tests.benchmarks import class_folders

CONFIGS = tiny.ROOT / "tests" / "configs"


def test_held_out_is_a_seeded_share_of_every_class() -> None:
    labels = np.repeat([5, 1, 3, 2], [100, 10, 2, 1])
    held = linear_probe.held_out(labels, 0.2, 0)
    assert {n: int(held[labels == n].sum()) for n in (5, 1, 3, 2)} == {5: 20, 1: 2, 3: 1, 2: 0}
    assert np.array_equal(held, linear_probe.held_out(labels, 0.2, 0))
    assert not np.array_equal(held, linear_probe.held_out(labels, 0.2, 1))
    assert not linear_probe.held_out(labels, 0.99, 0)[labels == 1].all()
    with pytest.raises(ValueError, match="every class has one train image.*set strength"):
        linear_probe.held_out(np.arange(5), 0.2, 0)


def test_search_finds_any_peak_of_the_grid_in_15_fits() -> None:
    for peak in range(-48, 49):
        asked: list[int] = []

        def score(positions: Sequence[int], peak: int = peak, to: list[int] = asked) -> Any:
            to.extend(positions)
            return {position: -abs(position - peak) for position in positions}

        assert linear_probe.search(score) == peak
        assert len(asked) == len(set(asked)) <= 15
        assert asked[:7] == [-48, -32, -16, 0, 16, 32, 48]  # 1e-6, 1e-4, ... 1e6


def test_equal_scores_go_to_the_strongest() -> None:
    assert linear_probe.search(lambda positions: dict.fromkeys(positions, 1.0)) == 48
    assert linear_probe.strength_at(48) == pytest.approx(1e6)
    assert linear_probe.strength_at(-48) == pytest.approx(1e-6)
    assert linear_probe.strength_at(1) / linear_probe.strength_at(0) == pytest.approx(10**0.125)


@pytest.fixture
def folders(tmp_path: Path, draw: Callable[[Path, int], None]) -> Path:
    """Three classes of 10 train and 4 test images; image n of class c spells 20 c + n."""
    for label in range(3):
        for number in range(14):
            part = "train" if number < 10 else "test"
            draw(tmp_path / part / f"class_{label}" / f"{number:02d}.png", 20 * label + number)
    return tmp_path


def by_class(planted: Any, noise: float) -> Any:
    """An encoder that sees the class through noise."""
    encoder = planted("random", 60, dim=9)
    seen = np.eye(9)[[n // 20 for n in range(60)]]
    encoder.image_table = noise * encoder.image_table + encoder.image_table.new_tensor(seen)
    return encoder


def run(encoder: Any, root: Path, **options: Any) -> dict[str, Any]:
    figures = linear_probe.evaluate(Extractor(encoder, batch_size=7), root, **options)
    return {figure.metric: figure for figure in figures}


def test_perfect_encoder_scores_100(folders: Path, planted: Any) -> None:
    figures = run(by_class(planted, 0.0), folders, strength=1)
    assert {m: (f.value, f.count) for m, f in figures.items()} == {
        "accuracy": (100.0, 12), "mean_per_class": (100.0, 12),
    }  # fmt: skip
    protocol = figures["accuracy"].protocol
    assert protocol["strength"] == 1 and protocol["strength_from"] == "set"
    assert protocol["num_train"] == 30 and protocol["num_classes"] == 3 and protocol["converged"]


def test_figures_are_those_of_the_steps_by_hand(folders: Path, planted: Any) -> None:
    """Every strength of the search tried by scikit-learn alone; then train and validation."""
    encoder = by_class(planted, 2.0)
    table = encoder.image_table / encoder.image_table.norm(dim=1, keepdim=True)
    numbers = [[20 * c + n for c in range(3) for n in part] for part in (range(10), range(10, 14))]
    train, test = (3 * table[part].double().numpy() for part in numbers)
    labels, truth = np.repeat(np.arange(3), 10), np.repeat(np.arange(3), 4)
    held = linear_probe.held_out(labels, 0.3, 7)

    def model(position: int) -> LogisticRegression:
        return LogisticRegression(
            C=1 / linear_probe.strength_at(position), tol=1e-10, max_iter=10000, solver="newton-cg"
        )

    def score(positions: Sequence[int]) -> dict[int, float]:
        fits = {p: model(p).fit(train[~held], labels[~held]) for p in positions}
        return {p: fit.score(train[held], labels[held]) for p, fit in fits.items()}

    best = linear_probe.search(score)
    figures = run(encoder, folders, validation_share=0.3, seed=7)
    protocol = figures["accuracy"].protocol
    assert protocol["strength"] == linear_probe.strength_at(best)
    assert protocol["strength_from"] == "validation on 0.3 of train"
    wanted = model(best).fit(train, labels).score(test, truth)
    assert figures["accuracy"].value == pytest.approx(100 * wanted)
    assert 30 < figures["accuracy"].value < 100


def test_what_did_not_converge_is_said(
    folders: Path, planted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mclclip"):
        figures = run(by_class(planted, 2.0), folders, strength=1e-4, max_iterations=2)
    assert not figures["accuracy"].protocol["converged"]
    assert "L2 strength 0.0001: trained on train and validation, did not converge" in caplog.text


@pytest.mark.parametrize(
    "options, message",
    [
        ({"strength": 0.0}, "strength is 0.0, wanted a number above 0"),
        ({"strength": float("nan")}, "strength is nan, wanted a number above 0"),
        ({"validation_share": 1.0}, "validation_share is 1.0, wanted between 0 and 1"),
        ({"max_iterations": 0}, "max_iterations is 0, wanted at least 1"),
        ({"feature": "pooled"}, "no pooled features: use feature=projected"),
    ],
)
def test_bad_options_get_one_clear_line(
    folders: Path, planted: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(by_class(planted, 0.0), folders, **options)


def test_a_real_tower_through_the_suite(tmp_path: Path) -> None:
    """Even random weights keep colours apart; pooled features are wider than projected ones."""
    root = class_folders.rendered(tmp_path / "data", 24, 12, attribute="background")
    encoder = SingleEncoder(load_clip(CONFIGS / "tiny_vit.json", seed=1))
    suite = {
        "pooled": BenchmarkConfig("linear_probe", str(root), {"feature": "pooled"}),
        "fixed": BenchmarkConfig("linear_probe", str(root), {"strength": 1}),
        "knn": BenchmarkConfig("knn", str(root), {"feature": "pooled", "weights": "similarity"}),
    }
    rows = evaluation.run_suite(encoder, suite, tmp_path / "results.jsonl", "random")
    assert [(row.benchmark, row.metric) for row in rows] == [
        (name, metric) for name in suite for metric in ("accuracy", "mean_per_class")
    ]
    assert all(row.count == 8 * 12 and row.value > 40 for row in rows)  # chance: 12.5


def test_pooled_features_are_the_tower_s_and_a_resnet_has_none(tmp_path: Path) -> None:
    root = class_folders.rendered(tmp_path / "data", 2, 1, attribute="size")
    encoder = SingleEncoder(load_clip(CONFIGS / "tiny_vit.json", seed=1))
    data = extract(Extractor(encoder, batch_size=3), root, "pooled")
    images = sorted((root / "train").glob("*/*.png"))
    inputs = torch.stack([encoder.preprocess_val(Image.open(image)) for image in images])
    assert data.train.shape == (4, 64) and encoder.embed_dim != 64
    np.testing.assert_allclose(data.train, encoder.encode_pooled(inputs).numpy(), atol=1e-5)
    assert data.protocol["feature"] == "pooled" and data.train_labels.tolist() == [0, 0, 1, 1]
    resnet = SingleEncoder(load_clip(CONFIGS / "tiny_resnet.json", seed=1))
    with pytest.raises(ValueError, match="pool is its projection, so it has no features before"):
        linear_probe.evaluate(Extractor(resnet), root, feature="pooled")


def test_the_table_of_train_images_can_be_packed(tmp_path: Path) -> None:
    root = class_folders.rendered(tmp_path / "data", 3, 1, attribute="size")
    manifest = pack(root / "train.csv", root, tmp_path / "shards")
    assert manifest.counts["samples"] == manifest.counts["captions"] == 6


@pytest.mark.real_data
def test_real_class_folders(tmp_path: Path, shared_data: Path) -> None:
    caltech = class_folders.caltech101(shared_data, tmp_path / "caltech101")
    cifar = class_folders.cifar10(shared_data, tmp_path / "cifar10", 3, 2)
    counts = [len(list(r.glob(f"{p}/*/*"))) for r in (caltech, cifar) for p in ("train", "test")]
    assert counts == [1010, 505, 30, 20]
