"""SimLAP's second labels: uniform over the batch's classes, by mode, the same on every rank."""

import numpy as np
import pytest
import torch

from mclclip.objectives.label_pairs import Pairing, closest_classes, draw_partners
from mclclip.randomness import mix

CLASSES = np.array([7, 2, 7, 9, 2, 4, 7], dtype=np.int64)
IDS = np.arange(100, 107, dtype=np.int64)
# Of 2, 4, 7 and 9, in order; 5 and 6 are not in the batch.
CLOSEST = np.array([[4, 5], [2, 5], [6, 9], [6, 7]], dtype=np.int64)


def draws(pairing: Pairing, times: int = 400) -> np.ndarray:
    """[times, 7]."""
    closest = CLOSEST if pairing == "n_closest" else None
    every = [draw_partners(CLASSES, IDS, mix(3, step), pairing, closest) for step in range(times)]
    return np.stack(every)


def shares(drawn: np.ndarray) -> dict[int, float]:
    values, counts = np.unique(drawn, return_counts=True)
    return {int(v): count / drawn.size for v, count in zip(values, counts, strict=True)}


def test_arbitrary_is_uniform_over_the_classes_of_the_batch() -> None:
    for column in draws("arbitrary").T:
        found = shares(column)
        assert found.keys() == {2, 4, 7, 9}
        assert all(abs(share - 0.25) < 0.09 for share in found.values())  # four deviations


def test_identical_is_the_own_class() -> None:
    assert (draws("identical", 3) == CLASSES).all()


def test_distinct_is_uniform_over_the_others() -> None:
    for own, column in zip(CLASSES, draws("distinct").T, strict=True):
        found = shares(column)
        assert found.keys() == {2, 4, 7, 9} - {int(own)}
        assert all(abs(share - 1 / 3) < 0.1 for share in found.values())


def test_distinct_has_no_partner_where_the_batch_has_one_class() -> None:
    found = draw_partners(np.full(4, 5), np.arange(4), mix(0), "distinct")
    assert (found == -1).all()


def test_n_closest_is_the_own_class_or_a_close_one_of_the_batch() -> None:
    allowed = {2: {2, 4}, 4: {4, 2}, 7: {7, 9}, 9: {9, 7}}
    for own, column in zip(CLASSES, draws("n_closest").T, strict=True):
        found = shares(column)
        assert found.keys() == allowed[int(own)]
        assert all(abs(share - 0.5) < 0.11 for share in found.values())


def test_no_closest_is_identical_and_all_closest_is_arbitrary() -> None:
    key, present = mix(1, 2), np.unique(CLASSES)
    none = np.zeros((4, 0), dtype=np.int64)
    assert (draw_partners(CLASSES, IDS, key, "n_closest", none) == CLASSES).all()
    every = np.stack([np.delete(np.arange(12), c) for c in present])
    expected = draw_partners(CLASSES, IDS, key, "arbitrary")
    assert (draw_partners(CLASSES, IDS, key, "n_closest", every) == expected).all()


@pytest.mark.parametrize("pairing", ["arbitrary", "distinct"])
def test_a_draw_belongs_to_key_and_sample(pairing: Pairing) -> None:
    first = draw_partners(CLASSES, IDS, mix(1, 2), pairing)
    assert (draw_partners(CLASSES, IDS, mix(1, 2), pairing) == first).all()
    order = np.array([3, 0, 6, 1, 2, 5, 4])
    moved = draw_partners(CLASSES[order], IDS[order], mix(1, 2), pairing)
    assert (moved == first[order]).all()
    others = [draw_partners(CLASSES, IDS, mix(1, step), pairing) for step in range(3, 9)]
    assert any((other != first).any() for other in others)


def test_closest_classes_by_hand() -> None:
    vectors = torch.tensor([[1.0, 0.0], [5.0, 1.0], [0.0, 2.0], [-3.0, 0.1]])
    assert closest_classes(vectors, torch.tensor([0, 2]), 1).tolist() == [[1], [1]]
    assert closest_classes(vectors, torch.arange(4), 3).tolist() == [
        [1, 2, 3],
        [0, 2, 3],
        [1, 3, 0],
        [2, 1, 0],
    ]
