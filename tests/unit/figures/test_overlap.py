"""Cosines within and between classes: loops, planted classes, chosen dimensions."""

import numpy as np
import pytest

from mclclip.figures import overlap
from mclclip.figures.overlap import (
    class_overlap,
    class_similarity,
    pair_overlap,
    quietest_dimensions,
)


def planted(noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three orthogonal classes of 20 in dimensions 0 to 2; 3 to 5 are noise."""
    rng, labels = np.random.default_rng(seed), np.arange(60) % 3
    return np.hstack([np.eye(3)[labels], noise * rng.normal(size=(60, 3))]), labels


def test_overlap_of_separate_and_of_equal_classes() -> None:
    features, labels = planted(0.05)
    found = class_overlap(features, labels)
    assert found.overlap == 0.0
    assert found.within[found.edges[1:] > 0.9].sum() == pytest.approx(1.0)
    rng = np.random.default_rng(1)
    assert class_overlap(features, rng.permutation(labels)).overlap > 0.9
    assert class_overlap(np.ones((6, 2)), [0, 0, 0, 1, 1, 1]).overlap == 1.0


def test_chosen_dimensions_decide() -> None:
    features, labels = planted(5.0)
    assert class_overlap(features, labels).overlap > 0.7
    assert class_overlap(features[:, :3], labels).overlap == 0.0
    assert class_overlap(features[:, 3:], labels).overlap > 0.7


def test_histograms_are_those_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_TILE", 7)
    features, labels = planted(0.8)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    cosines: dict[bool, list[float]] = {True: [], False: []}
    for i in range(60):
        for j in range(i):
            cosines[bool(labels[i] == labels[j])].append(float(unit[i] @ unit[j]))
    found = class_overlap(features, labels, bins=10)
    for same, shares in ((True, found.within), (False, found.between)):
        counts = np.histogram(cosines[same], found.edges)[0]
        np.testing.assert_allclose(shares, counts / counts.sum())
        assert shares.sum() == pytest.approx(1.0)


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


def test_quietest_dimensions() -> None:
    features, labels = planted(1.0)
    features[labels != 2, 4] = 7.0  # shared by classes 0 and 1, and by nobody else
    assert set(quietest_dimensions(features, labels, (0, 1), 2)) == {2, 4}
    with pytest.raises(ValueError, match="no sample is of class 8 or 9"):
        quietest_dimensions(features, labels, (8, 9), 2)


def test_two_classes_taken_for_alike_are_compared_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SimLAP's Fig. 1b, by loops: in the dimensions that they share they look like one class."""
    monkeypatch.setattr(overlap, "_TILE", 7)
    features, labels = planted(1.0)
    features[:, 4] = np.where(labels == 2, -7.0, 7.0)
    few = quietest_dimensions(features, labels, (0, 1), 2)
    for rows in (features[:, few], features):
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        numbers = [np.flatnonzero(labels == label) for label in range(3)]
        alike = [unit[i] @ unit[j] for i in numbers[0] for j in numbers[1]]
        unlike = [unit[i] @ unit[j] for i in [*numbers[0], *numbers[1]] for j in numbers[2]]
        found = pair_overlap(rows, labels, (0, 1), bins=10)
        for shares, cosines in ((found.within, alike), (found.between, unlike)):
            counts = np.histogram(np.clip(cosines, -1, 1), found.edges)[0]
            np.testing.assert_allclose(shares, counts / counts.sum())
    assert pair_overlap(features[:, few], labels, (0, 1)).overlap == 0.0
    with pytest.raises(ValueError, match="400 pairs of one class and 0 of two"):
        pair_overlap(features[labels < 2], labels[labels < 2], (0, 1))


def test_pairs_of_both_kinds_are_wanted() -> None:
    with pytest.raises(ValueError, match="3 pairs of one class and 0 of two"):
        class_overlap(np.eye(3), [1, 1, 1])
    with pytest.raises(ValueError, match="0 pairs of one class and 3 of two"):
        class_overlap(np.eye(3), [1, 2, 3])
