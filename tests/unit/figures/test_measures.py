"""What figures measure, against closed forms and definitions by loops: labels, singular
values, cosines within and between classes, places on a plane."""

import math

import numpy as np
import pytest

from mclclip.figures import overlap
from mclclip.figures import singular_values as spread
from mclclip.figures.inputs import unit_rows
from mclclip.figures.overlap import class_overlap, class_similarity, quietest_dimensions
from mclclip.figures.pseudo_labels import histogram
from mclclip.figures.recall import dominant_classes, label_recall
from mclclip.figures.singular_values import effective_rank, singular_values, uniformity
from mclclip.figures.tsne import layout


def test_histogram_by_hand() -> None:
    found = histogram([3, 1, 3, -1, 8, 3, 1, -1])
    assert found["counts"] == [3, 2, 1] and found["share"] == 0.5
    assert found["effective"] == pytest.approx(2**0.5 * 3 ** (1 / 3) * 6 ** (1 / 6))
    assert histogram(np.arange(7))["effective"] == pytest.approx(7.0)


def test_a_cluster_stands_for_most_of_its_samples() -> None:
    labels, classes = [0, 0, 0, 5, 5, -1], [2, 1, 2, 7, 4, 4]
    assert dominant_classes(labels, classes) == {0: 2, 5: 4}  # a tie goes to the smaller class


def test_recall_by_hand() -> None:
    nearest = [[0, 1], [0, 1], [1, 0], [1, -1], [1, 0]]
    classes = [3, 3, 6, 6, 3]  # cluster 0 stands for 3, cluster 1 for 6
    assert label_recall(nearest, classes).tolist() == [0.8, 1.0]


def random(count: int, dim: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim))


def test_values_are_squares_of_the_centred_features_singular_values() -> None:
    rows = random(20, 6, seed=1)
    expected = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False) ** 2 / 20
    np.testing.assert_allclose(singular_values(rows), expected)
    turn = np.linalg.qr(np.random.default_rng(2).normal(size=(6, 6)))[0]
    np.testing.assert_allclose(singular_values(rows @ turn + 3.0), expected)
    far = singular_values(rows + 1e6)  # a far mean must not cancel
    np.testing.assert_allclose(far, expected, atol=1e-8)


def test_effective_rank_by_hand() -> None:
    assert effective_rank([1.0, 1.0, 1.0, 1.0]) == pytest.approx(4.0)
    assert effective_rank([5.0, 0.0, 0.0]) == pytest.approx(1.0)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert effective_rank([30.0, 10.0]) == pytest.approx(math.exp(entropy))
    assert effective_rank([0.0, 0.0]) == 0.0


def test_uniformity_is_the_mean_over_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random(11)
    unit = unit_rows(rows)
    pairs = [
        math.exp(-2.0 * float(np.square(unit[i] - unit[j]).sum()))
        for i in range(11)
        for j in range(i)
    ]
    expected = math.log(sum(pairs) / len(pairs))
    assert uniformity(rows) == pytest.approx(expected)
    monkeypatch.setattr(spread, "TILE", 4)
    assert uniformity(3.0 * rows[::-1]) == pytest.approx(expected)
    assert uniformity(rows + 10.0) > expected  # a narrow cone is less uniform


def planted(noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three orthogonal classes of 20 in dimensions 0 to 2; 3 to 5 are noise."""
    rng, labels = np.random.default_rng(seed), np.arange(60) % 3
    return np.hstack([np.eye(3)[labels], noise * rng.normal(size=(60, 3))]), labels


def test_histograms_are_those_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "TILE", 7)
    features, labels = planted(0.8)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    cosines: dict[bool, list[float]] = {True: [], False: []}
    for i in range(60):
        for j in range(i):
            cosines[bool(labels[i] == labels[j])].append(float(unit[i] @ unit[j]))
    edges, found = class_overlap(features, labels)
    for same, kind in ((True, "within"), (False, "between")):
        counts = np.histogram(cosines[same], edges)[0]
        np.testing.assert_allclose(found[kind], counts / counts.sum())
    smaller = np.minimum(found["within"], found["between"])
    assert 0 < found["overlap"] == pytest.approx(smaller.sum())


def test_class_similarity_is_the_mean_over_pairs() -> None:
    features, labels = planted(0.7)
    labels = np.where(np.arange(60) == 59, 9, labels)  # a class of one sample
    classes, found = class_similarity(features, labels)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    assert classes.tolist() == [0, 1, 2, 9] and np.isnan(found[3, 3])
    for i, a in enumerate(classes):
        for j, b in enumerate(classes):
            pairs = [
                unit[p] @ unit[q]
                for p in np.flatnonzero(labels == a)
                for q in np.flatnonzero(labels == b)
                if p != q
            ]
            if pairs:
                assert found[i, j] == pytest.approx(np.mean(pairs))


def test_two_classes_taken_for_alike_are_compared_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SimLAP's Fig. 1b, by loops: in the dimensions that they share they look like one class."""
    monkeypatch.setattr(overlap, "TILE", 7)
    features, labels = planted(1.0)
    features[:, 4] = np.where(labels == 2, -7.0, 7.0)
    few = quietest_dimensions(features, labels, (0, 1), 2)
    for rows in (features[:, few], features):
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        numbers = [np.flatnonzero(labels == label) for label in range(3)]
        alike = [unit[i] @ unit[j] for i in numbers[0] for j in numbers[1]]
        unlike = [unit[i] @ unit[j] for i in [*numbers[0], *numbers[1]] for j in numbers[2]]
        edges, found = class_overlap(rows, labels, (0, 1))
        for kind, cosines in (("within", alike), ("between", unlike)):
            counts = np.histogram(np.clip(cosines, -1, 1), edges)[0]
            np.testing.assert_allclose(found[kind], counts / counts.sum())
    assert class_overlap(features[:, few], labels, (0, 1))[1]["overlap"] == 0.0


def test_near_rows_stay_near() -> None:
    """Rows around three directions; nearest neighbours on the plane are of the same one."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    rows = rng.uniform(0.5, 2.0, (60, 1)) * (np.eye(6)[labels] + rng.normal(0, 0.1, (60, 6)))
    places = layout(rows, seed=1)
    assert places.shape == (60, 2)
    distance = np.linalg.norm(places[:, None] - places, axis=2) + np.diag(np.full(60, np.inf))
    assert (labels[distance.argmin(axis=1)] == labels).mean() > 0.95


def test_few_rows_and_one_dimension() -> None:
    assert np.isfinite(layout(np.random.default_rng(0).normal(size=(5, 3)), seed=0)).all()
    assert layout(np.array([[1.0], [2.0], [-1.0], [3.0], [-2.0], [1.5]]), seed=0).shape == (6, 2)
