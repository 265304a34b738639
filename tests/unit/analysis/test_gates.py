"""Gates of classes by hand."""

import numpy as np

from mclclip.analysis.gates import (
    gate_similarity,
    label_similarity,
    most_open,
    subspace_sizes,
    unlike_pairs,
)

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


def test_pairs_go_from_the_least_to_the_most_similar_gates() -> None:
    gates = [[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.5, 0.5]]
    assert unlike_pairs(gates, 1).tolist() == [[0, 2], [0, 1]]
    every = unlike_pairs(gates, 3).tolist()
    assert every[0] == [0, 2] and every[-1] == [0, 1]
    assert sorted(every) == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    assert unlike_pairs(gates[:1], 3).shape == (0, 2)
