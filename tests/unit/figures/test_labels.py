"""Histogram of labels and label recall at l, by hand and by loops."""

import numpy as np
import pytest

from mclclip.figures.pseudo_labels import histogram
from mclclip.figures.recall import dominant_classes, label_recall


def test_histogram_by_hand() -> None:
    found = histogram([3, 1, 3, -1, 8, 3, 1, -1])
    assert found["counts"] == [3, 2, 1] and found["share"] == 0.5
    assert found["effective"] == pytest.approx(2**0.5 * 3 ** (1 / 3) * 6 ** (1 / 6))
    assert histogram(np.arange(7))["effective"] == pytest.approx(7.0)
    with pytest.raises(ValueError, match="no sample has a label"):
        histogram([-1, -1])


def test_a_cluster_stands_for_most_of_its_samples() -> None:
    labels, classes = [0, 0, 0, 5, 5, -1], [2, 1, 2, 7, 4, 4]
    assert dominant_classes(labels, classes) == {0: 2, 5: 4}  # a tie goes to the smaller class


def test_recall_by_hand() -> None:
    nearest = [[0, 1], [0, 1], [1, 0], [1, -1], [1, 0]]
    classes = [3, 3, 6, 6, 3]  # cluster 0 stands for 3, cluster 1 for 6
    assert label_recall(nearest, classes).tolist() == [0.8, 1.0]


def test_recall_is_the_definition_and_never_falls() -> None:
    rng = np.random.default_rng(0)
    nearest = np.stack([rng.permutation(12)[:5] for _ in range(80)])
    classes = rng.integers(0, 4, size=80)
    dominant = dominant_classes(nearest[:, 0], classes)
    found = label_recall(nearest, classes)
    for length in range(1, 6):
        hits = [
            any(dominant.get(int(c)) == own for c in row[:length])
            for row, own in zip(nearest, classes, strict=True)
        ]
        assert found[length - 1] == pytest.approx(np.mean(hits))
    assert (np.diff(found) >= 0.0).all()


def test_clusters_that_are_the_classes_are_recalled_at_once() -> None:
    classes = np.arange(30) % 5
    assert label_recall(((classes + 2) % 5)[:, None], classes).tolist() == [1.0]


def test_shapes_are_checked() -> None:
    with pytest.raises(
        ValueError, match=r"nearest \[3\] and classes \[3\]: wanted \[N, L\], \[N\]"
    ):
        label_recall([1, 2, 3], [1, 2, 3])
