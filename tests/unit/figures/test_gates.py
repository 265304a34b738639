"""Gates of classes by hand."""

import numpy as np

from mclclip.figures.class_likeness import gate_similarity
from mclclip.figures.gate_pairs import most_open
from mclclip.figures.gates import unlike_pairs

GATES = np.array([[0.9, 0.8, 0.1, 0.5], [0.7, 0.2, 0.6, 0.1], [0.1, 0.9, 0.9, 0.9]])


def test_open_dimensions() -> None:
    assert most_open(GATES, [0, 1], 2).tolist() == [0, 1]
    assert most_open(GATES, [2], 4).tolist() == [1, 2, 3, 0]


def test_similarity_counts_dimensions_that_both_open() -> None:
    assert gate_similarity(GATES).tolist() == [[2, 1, 1], [1, 2, 1], [1, 1, 3]]


def test_pairs_go_from_the_least_to_the_most_similar_gates() -> None:
    gates = [[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.5, 0.5]]
    assert unlike_pairs(gates, 1).tolist() == [[0, 2], [0, 1]]
    every = unlike_pairs(gates, 3).tolist()
    assert every[0] == [0, 2] and every[-1] == [0, 1]
    assert sorted(every) == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    assert unlike_pairs(gates[:1], 3).shape == (0, 2)
