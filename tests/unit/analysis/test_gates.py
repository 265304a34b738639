"""Gates of classes by hand."""

import numpy as np

from mclclip.analysis.gates import gate_similarity, label_similarity, most_open, subspace_sizes

GATES = np.array([[0.9, 0.8, 0.1, 0.5], [0.7, 0.2, 0.6, 0.1], [0.1, 0.9, 0.9, 0.9]])


def test_sizes_and_open_dimensions() -> None:
    np.testing.assert_allclose(subspace_sizes(GATES), [2.3, 1.6, 2.8])
    assert most_open(GATES, [0, 1], 2).tolist() == [0, 1]
    assert most_open(GATES, [2], 4).tolist() == [1, 2, 3, 0]


def test_similarity_counts_dimensions_that_both_open() -> None:
    assert gate_similarity(GATES).tolist() == [[2, 1, 1], [1, 2, 1], [1, 1, 3]]


def test_label_similarity_is_the_cosine() -> None:
    found = label_similarity([[2.0, 0.0], [3.0, 3.0]])
    np.testing.assert_allclose(found, [[1.0, 0.5**0.5], [0.5**0.5, 1.0]])
