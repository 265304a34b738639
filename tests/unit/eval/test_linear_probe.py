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

from mclclip.eval.classification import extract
from mclclip.eval.features import Extractor
from mclclip.eval.images import read_parts
from mclclip.eval.protocols import BenchmarkConfig, knn, linear_probe
from mclclip.models.encoder import Encoder
from mclclip.models.loading import load_towers
from mclclip.verbs import eval as evaluation
from tests import tiny
from tests.benchmarks import class_folders

CONFIGS = tiny.ROOT / "tests" / "configs"
pytestmark = pytest.mark.usefixtures("few_draws")


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


def fitted(rows: Any, truth: Any, strength: float) -> LogisticRegression:
    """The minimum by another solver, for rows [N, E] of length sqrt(E)."""
    model = LogisticRegression(C=1 / strength, tol=1e-10, max_iter=10000, solver="newton-cg")
    return model.fit(rows, truth)


def best_strength(score: Callable[[float], float]) -> float:
    """The strength that the search finds where strengths are tried by hand."""

    def scores(positions: Sequence[int]) -> dict[int, float]:
        return {p: score(linear_probe.strength_at(p)) for p in positions}

    return linear_probe.strength_at(linear_probe.search(scores))


@pytest.mark.parametrize("valid", [False, True])
def test_figures_are_those_of_the_steps_by_hand(
    folders: Path, planted: Any, draw: Callable[[Path, int], None], valid: bool
) -> None:
    """Every strength of the search is tried by scikit-learn alone, on a share of train or on the
    folder ``valid``; the classifier then learns from both. kNN takes train alone."""
    encoder = by_class(planted, 2.0)
    parts = [range(10), range(14, 20) if valid else range(0), range(10, 14)]
    train, more, test = ([20 * c + n for c in range(3) for n in part] for part in parts)
    for number in more:
        draw(folders / "valid" / f"class_{number // 20}" / f"{number}.png", number)
    table = encoder.image_table / encoder.image_table.norm(dim=1, keepdim=True)
    rows, truth = 3 * table.double().numpy(), np.arange(60) // 20
    held = np.isin(train + more, more)
    if not valid:
        held = linear_probe.held_out(truth[train], 0.3, 7)
    learnt = np.array(train + more)

    def score(strength: float) -> float:
        model = fitted(rows[learnt[~held]], truth[learnt[~held]], strength)
        return float(model.score(rows[learnt[held]], truth[learnt[held]]))

    best = best_strength(score)
    found = run(encoder, folders, validation_share=0.3, seed=7)["accuracy"]
    assert found.protocol["strength"] == best and found.protocol["num_train"] == len(learnt)
    chosen_by = "the data set's own split" if valid else "0.3 of train"
    assert found.protocol["strength_from"] == f"validation on {chosen_by}"
    wanted = fitted(rows[learnt], truth[learnt], best).score(rows[test], truth[test])
    assert found.value == pytest.approx(100 * wanted) and 30 < found.value < 100
    neighbours = knn.evaluate(Extractor(encoder, batch_size=7), folders)
    assert neighbours[0].protocol["num_train"] == 30


def test_what_did_not_converge_is_said(
    folders: Path, planted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mclclip"):
        figures = run(by_class(planted, 2.0), folders, strength=1e-4, max_iterations=2)
    assert not figures["accuracy"].protocol["converged"]
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "gradient" in warning and "max_iterations" in warning


def test_a_real_tower_through_the_suite(tmp_path: Path) -> None:
    """Even random weights keep colours apart; pooled features are wider than projected ones."""
    root = class_folders.rendered(tmp_path / "data", 6, 3, attribute="background")
    encoder = Encoder([load_towers(CONFIGS / "tiny_vit.json", seed=1)])
    suite = {
        "pooled": BenchmarkConfig("linear_probe", str(root), {"feature": "pooled"}),
        "fixed": BenchmarkConfig(
            "linear_probe", str(root), {"strength": "1e0"}
        ),  # a text, as YAML reads it
        "knn": BenchmarkConfig("knn", str(root), {"feature": "pooled", "weights": "similarity"}),
    }
    rows = evaluation.SuiteJudge(suite).measure(encoder, tmp_path / "results.jsonl", "random")
    assert [(row.benchmark, row.metric) for row in rows] == [
        (name, metric) for name in suite for metric in ("accuracy", "mean_per_class")
    ]
    assert all(row.count == 8 * 3 and row.value > 40 for row in rows)  # chance: 12.5
    assert {row.protocol["strength_from"] for row in rows if row.benchmark == "fixed"} == {"set"}


def test_pooled_features_are_the_tower_s_and_a_resnet_has_none(tmp_path: Path) -> None:
    root = class_folders.rendered(tmp_path / "data", 2, 1, attribute="size")
    encoder = Encoder([load_towers(CONFIGS / "tiny_vit.json", seed=1)])
    data = extract(Extractor(encoder, batch_size=3), root, "pooled", read_parts(root))
    images = sorted((root / "train").glob("*/*.png"))
    inputs = torch.stack([encoder.preprocess_val(Image.open(image)) for image in images])
    assert data.train.shape == (4, 64) and encoder.embed_dim != 64
    np.testing.assert_allclose(data.train, encoder.encode_pooled(inputs).numpy(), atol=1e-5)
    assert data.protocol["feature"] == "pooled" and data.train_labels.tolist() == [0, 0, 1, 1]
    resnet = Encoder([load_towers(CONFIGS / "tiny_resnet.json", seed=1)])
    with pytest.raises(ValueError, match="pool is its projection, so it has no features before"):
        linear_probe.evaluate(Extractor(resnet), root, feature="pooled")


# --- metrics other than accuracy, beside scikit-learn -------------------------------------------


@pytest.fixture
def numbers(tmp_path: Path, draw: Callable[[Path, int], None]) -> Path:
    """Images 0 to 119, each of which spells its number."""
    for number in range(120):
        draw(tmp_path / "images" / f"{number:03d}.png", number)
    return tmp_path


PARTS = np.repeat(["train", "valid", "test"], [50, 30, 40])


def noisy(planted: Any, truth: Any) -> tuple[Any, Any]:
    """An encoder that sees ``truth`` [120, K] through noise, and its features in float64 as the
    solver takes them."""
    encoder = planted("random", 120, dim=truth.shape[1] + 4, seed=3)
    encoder.image_table[:, : truth.shape[1]] += 0.2 * torch.from_numpy(truth.astype(np.float32))
    rows = torch.nn.functional.normalize(encoder.image_table, dim=1).double().numpy()
    return encoder, rows * rows.shape[1] ** 0.5


def write_table(root: Path, labels: Sequence[Sequence[str]]) -> None:
    """A row for each label of an image."""
    lines = [
        f"images/{number:03d}.png,{label},{PARTS[number]}"
        for number, found in enumerate(labels) for label in found
    ]  # fmt: skip
    (root / "labels.csv").write_text("\n".join(["filepath,label,split", *lines]))


def precision_by_definition(truth: Any, scores: Any) -> float:
    """The mean over recalls 0, 0.1 ... 1 of the best precision at that recall or a higher one."""
    from sklearn.metrics import precision_recall_curve

    precision, recall, _ = precision_recall_curve(truth, scores)
    levels = np.arange(11) / 10
    return float(np.mean([precision[:-1][recall[:-1] >= level - 1e-9].max() for level in levels]))


def test_several_labels_have_the_precision_of_a_classifier_per_class(
    numbers: Path, planted: Any
) -> None:
    """The 11-point precision of scikit-learn's curve, its strength chosen on the set's split."""
    truth = np.random.default_rng(5).random((120, 3)) < [0.5, 0.3, 0.2]
    truth[~truth.any(axis=1), 0] = True  # a table names images by their labels
    encoder, rows = noisy(planted, truth)
    write_table(numbers, [[f"class {k}" for k in np.flatnonzero(row)] for row in truth])
    options: dict[str, Any] = {"labels": "labels.csv", "metric": "map_11_point"}

    def wanted(fit_on: Any, asked: Any, strength: float) -> float:
        scores = [
            fitted(rows[fit_on], column[fit_on], strength).decision_function(rows[asked])
            for column in truth.T
        ]
        pairs = zip(truth[asked].T, scores, strict=True)
        return float(np.mean([precision_by_definition(*pair) for pair in pairs]))

    best = best_strength(lambda strength: wanted(PARTS == "train", PARTS == "valid", strength))
    (found,) = run(encoder, numbers, **options).values()
    assert found.metric == "map_11_point" and found.protocol["level"] == "headline"
    assert found.protocol["strength"] == best and found.protocol["num_ranked_classes"] == 3
    assert found.protocol["strength_from"] == "validation on the data set's own split"
    assert found.protocol["num_train"] == 80 and found.count == 3 * 40
    value = 100 * wanted(PARTS != "test", PARTS == "test", best)
    assert found.value == pytest.approx(value) and 50 < value < 95
    assert found.ci_low < found.value < found.ci_high


def test_pascal_vocs_lists_give_the_same_figures(numbers: Path, planted: Any) -> None:
    """Also the row that is too difficult: it is left out of its class, in train as in test."""
    truth = np.random.default_rng(6).random((120, 2)) < 0.4
    truth[:, 0] |= ~truth.any(axis=1)
    encoder, rows = noisy(planted, truth)
    write_table(numbers, [[f"class {k}" for k in np.flatnonzero(row)] for row in truth])
    main = numbers / "ImageSets" / "Main"
    main.mkdir(parents=True)
    (numbers / "images").rename(numbers / "JPEGImages")
    for image in (numbers / "JPEGImages").iterdir():
        image.rename(image.with_suffix(".jpg"))
    signs = np.where(truth, 1, -1)

    def write_lists() -> None:
        for part, ending in {"train": "train", "valid": "val", "test": "test"}.items():
            for label in range(2):
                lines = [f"{n:03d} {signs[n, label]:2d}" for n in np.flatnonzero(PARTS == part)]
                (main / f"class {label}_{ending}.txt").write_text("\n".join(lines))

    write_lists()
    metric: dict[str, Any] = {"metric": "map_11_point", "strength": 1.0}
    (of_lists,) = run(encoder, numbers, labels="ImageSets/Main", **metric).values()
    table = numbers / "labels.csv"
    table.write_text(table.read_text().replace("images/", "JPEGImages/").replace(".png", ".jpg"))
    (of_table,) = run(encoder, numbers, labels="labels.csv", **metric).values()
    assert of_lists.value == of_table.value and of_lists.count == of_table.count == 80
    signs[[3, 119], 0] = 0
    write_lists()
    (judged,) = run(encoder, numbers, labels="ImageSets/Main", **metric).values()
    values = []
    for label, known, asked in (
        (0, (PARTS != "test") & (np.arange(120) != 3), slice(80, 119)),
        (1, PARTS != "test", slice(80, 120)),
    ):
        model = fitted(rows[known], truth[known, label], 1.0)
        scores = model.decision_function(rows[asked])
        values.append(precision_by_definition(truth[asked, label], scores))
    assert judged.count == 79 and judged.value == pytest.approx(100 * np.mean(values))


def test_two_classes_have_scikit_learns_area_under_the_curve(numbers: Path, planted: Any) -> None:
    from sklearn.metrics import roc_auc_score

    truth = np.random.default_rng(9).random(120) < 0.35
    encoder, rows = noisy(planted, truth[:, None])
    write_table(numbers, [[str(int(one))] for one in truth])
    learnt, held = PARTS == "train", PARTS == "valid"

    def score(strength: float) -> float:
        margins = fitted(rows[learnt], truth[learnt], strength).decision_function(rows[held])
        return float(roc_auc_score(truth[held], margins))

    best = best_strength(score)
    figures = run(encoder, numbers, labels="labels.csv", metric="roc_auc")
    assert list(figures) == ["roc_auc", "accuracy", "mean_per_class"]
    found = figures["roc_auc"]
    assert found.protocol["strength"] == best and found.protocol["chance"] == 50.0
    scores = fitted(rows[:80], truth[:80], best).decision_function(rows[80:])
    value = 100 * roc_auc_score(truth[80:], scores)
    assert found.value == pytest.approx(value) and 55 < value < 95
    levels = {name: figure.protocol.get("level") for name, figure in figures.items()}
    assert levels == {"roc_auc": "headline", "accuracy": None, "mean_per_class": None}


def test_the_mean_of_top_1_and_top_5_is_scikit_learns(numbers: Path, planted: Any) -> None:
    from sklearn.metrics import top_k_accuracy_score

    truth = np.random.default_rng(8).permutation(np.arange(120) % 8)
    encoder, rows = noisy(planted, np.eye(8)[truth])
    write_table(numbers, [[f"class {one}"] for one in truth])
    options: dict[str, Any] = {"labels": "labels.csv", "strength": 2.0}
    figures = run(encoder, numbers, metric="mean_of_top1_and_top5", **options)
    scores = fitted(rows[:80], truth[:80], 2.0).decision_function(rows[80:])
    first, fifth = (top_k_accuracy_score(truth[80:], scores, k=k) for k in (1, 5))
    found = figures["mean_of_top1_and_top5"]
    assert found.value == pytest.approx(100 * (first + fifth) / 2) and first < fifth < 1
    assert figures["accuracy"].value == pytest.approx(100 * first)
    frequent = np.argsort(-np.bincount(truth[:80]), kind="stable")
    shares = [np.isin(truth[80:], frequent[:k]).mean() for k in (1, 5)]
    assert found.protocol["chance"] == pytest.approx(100 * np.mean(shares), abs=0.01)
    per_class = run(encoder, numbers, metric="mean_per_class", **options)
    assert [f.protocol.get("level") for f in per_class.values()] == [None, "headline"]


LISTS = {
    "a_train.txt": "0 1\n1 -1", "b_train.txt": "0 -1\n1 1", "a_val.txt": "2 1", "b_val.txt": "2 -1",
    "a_test.txt": "3 1\n4 0", "b_test.txt": "3 -1\n4 1",
}  # fmt: skip


WRONG_LISTS: list[tuple[dict[str, str | None], str]] = [
    ({"b_val.txt": None}, "b_val.txt"),
    ({"b_test.txt": "3 -1\n3 1\n4 1"}, "b_test.txt"),
    ({f"{label}_train.txt": LISTS[f"{label}_test.txt"] for label in "ab"}, "3.jpg"),
]


@pytest.mark.parametrize("changes, message", WRONG_LISTS)
def test_wrong_lists_of_pascal_voc_get_one_line(
    tmp_path: Path, changes: dict[str, str | None], message: str
) -> None:
    """Each class has a list of each part, and an image stands in one list of a class, once."""
    for name, text in (LISTS | changes).items():
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_parts(tmp_path, ".", several=True)


def test_labels_and_metrics_that_do_not_fit_get_one_line(numbers: Path, planted: Any) -> None:
    encoder = planted("random", 120)
    several: dict[str, Any] = {"metric": "map_11_point", "strength": 1}

    def refused(message: str, lines: Sequence[str], **options: Any) -> None:
        (numbers / "labels.csv").write_text("\n".join(["filepath,label,split", *lines]))
        with pytest.raises(ValueError, match=message):
            run(encoder, numbers, labels="labels.csv", **options)

    rows = [f"images/{n:03d}.png,{n % 2},{('train', 'test')[n // 4]}" for n in range(8)]
    refused("line 10 .*'dev'.*a split of train, valid, test", [*rows, "x.png,1,dev"])
    refused(
        "labels.csv has images .* such as '7', which train lacks",
        [*rows, "images/009.png,7,test"],
    )
    refused("of 0 in test", rows[:4])
    for name in ("images/000.png", "x/../images//000.png"):  # one image has one path
        in_two = "has 1 images in more than one of train, valid and test, such as .*/images/000.png"
        refused(in_two, [*rows, f"{name},0,test"])
        refused(in_two, [*rows, f"{name},1,valid"], **several)
    refused("images of 1 classes", [row for row in rows if ",1," not in row])
    shown = ["000.png,a,train", "001.png,a,train", "001.png,b,train", "002.png,b,test"]
    refused(
        "1 classes have no train image .* such as 'a'", [f"images/{o}" for o in shown], **several
    )
    refused("wants more than 5 classes, got 2", rows, metric="mean_of_top1_and_top5")
