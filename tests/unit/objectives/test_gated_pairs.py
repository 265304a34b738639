"""Losses of gated pairs: the definition with loops, gradients, and memory linear in the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.models.memory import StepMeter
from mclclip.objectives.gated_pairs import (
    ClassPairs,
    LabelFilter,
    Pairing,
    closest_classes,
    draw_partners,
    gate_penalty,
    gated_queries,
    pair_losses,
)
from mclclip.util.randomness import mix

SCALE = 6.0


def draw(
    seed: int, rows: int, columns: int, classes: int = 3, groups: int = 1, dim: int = 5
) -> tuple[Tensor, Tensor, Tensor, ClassPairs]:
    """Rows, gates and candidates with gradient, and pairs; samples occur in rows and columns."""
    rng = np.random.default_rng(seed)
    features = [torch.tensor(rng.normal(size=(n, dim))) for n in (rows, columns)]
    gates = torch.tensor(rng.uniform(0.05, 1.0, size=(rows, dim)))
    of_sample = torch.tensor(rng.integers(0, classes, size=(40,)))
    ids, all_ids = (torch.tensor(rng.integers(0, 40, size=n)) for n in (rows, columns))
    partners = torch.tensor(rng.integers(-1, classes, size=rows))
    own, every = (torch.tensor(rng.integers(0, groups, size=n)) for n in (rows, columns))
    pairs = ClassPairs(of_sample[ids], partners, ids, own, of_sample[all_ids], all_ids, every)
    leaves = [x.requires_grad_() for x in (features[0], gates, features[1])]
    return leaves[0], leaves[1], leaves[2], pairs


def found(
    rows: Tensor, gates: Tensor, keys: Tensor, pairs: ClassPairs, score: str, tile: int = 100
) -> tuple[Tensor, Tensor, Tensor]:
    weights: Tensor | None = None
    if score == "exact":
        queries, weights = gated_queries(rows, gates)
    else:
        queries, keys = functional.normalize(rows) * gates.square(), functional.normalize(keys)
    output: tuple[Tensor, Tensor, Tensor] = pair_losses(SCALE * queries, weights, keys, pairs, tile)
    return output


def close(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("score", ["exact", "code"])
def test_lengths_do_not_matter(score: str) -> None:
    """Of rows and candidates; with the exact score, of gates too."""
    rows, gates, keys, pairs = draw(1, 6, 9)
    gate_scale = 1e-15 if score == "exact" else 1.0
    expected = found(rows, gates, keys, pairs, score)[0]
    lengths = torch.linspace(0.1, 50.0, 6, dtype=torch.float64)[:, None]
    close(found(rows * lengths, gates * gate_scale, keys * 3.0, pairs, score)[0], expected)
    assert score == "code" or not torch.allclose(
        found(rows, 0.5 * gates, keys, pairs, "code")[0], found(rows, gates, keys, pairs, "code")[0]
    )


def test_large_scores_stay_finite() -> None:
    rows, gates, keys, pairs = draw(4, 6, 9)
    queries, weights = gated_queries(rows.float(), gates.float())
    losses, _, _ = pair_losses(1e4 * queries, weights, keys.float(), pairs, 4)
    gradients = torch.autograd.grad(losses.sum(), (rows, gates, keys))
    assert torch.isfinite(losses).all() and losses.max() > 100.0
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_memory_is_linear_in_the_batch() -> None:
    """Counted in bytes, forward and backward; the tensor [B, B, D] would be 0.8 MiB and 13 MiB."""

    def measured(batch: int) -> int:
        rows, gates, keys, pairs = draw(7, batch, batch, dim=64)

        def run() -> None:
            found(rows, gates, keys, pairs, "exact", tile=16)[0].sum().backward()

        run()  # gradients are there from now on
        leaves = [rows, gates, keys]
        with StepMeter([*leaves, *(x.grad for x in leaves if x.grad is not None)]) as meter:
            run()
        return meter.peak

    small, large = measured(40), measured(160)
    assert large < 4.2 * small
    assert large < 160 * 160 * 8 * 5  # not five matrices [B, B], let alone [B, B, D]


# --- partners -----------------------------------------------------------------------------------

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


PRESENT = {2, 4, 7, 9}
ALLOWED: dict[Pairing, Callable[[int], set[int]]] = {
    "arbitrary": lambda own: PRESENT,
    "identical": lambda own: {own},
    "distinct": lambda own: PRESENT - {own},
    "n_closest": {2: {2, 4}, 4: {4, 2}, 7: {7, 9}, 9: {9, 7}}.__getitem__,
}


@pytest.mark.parametrize("pairing", ALLOWED)
def test_a_partner_is_uniform_over_the_allowed_classes_of_the_batch(pairing: Pairing) -> None:
    for own, column in zip(CLASSES, draws(pairing).T, strict=True):
        found, allowed = shares(column), ALLOWED[pairing](int(own))
        assert found.keys() == allowed
        bound = 0.09 if len(allowed) == 4 else 0.1  # four deviations
        assert all(abs(share - 1 / len(allowed)) < bound for share in found.values())


def test_distinct_has_no_partner_where_the_batch_has_one_class() -> None:
    found = draw_partners(np.full(4, 5), np.arange(4), mix(0), "distinct")
    assert (found == -1).all()


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


# --- the label filter -----------------------------------------------------------------------------


def made(seed: int = 0) -> LabelFilter:
    return LabelFilter(6, 8, label_dim=5, hidden_dim=7, seed=seed).double()


def test_layers_are_those_of_the_papers_table() -> None:
    shapes = {n: tuple(p.shape) for n, p in LabelFilter(10, 256).named_parameters()}
    assert shapes["labels.weight"] == (10, 512)
    assert [s for n, s in shapes.items() if n.endswith("weight") and len(s) == 2][1:] == [
        (1024, 512),
        (256, 1024),
    ]


@pytest.mark.parametrize("training", [True, False])
def test_gates_are_symmetric_and_one_class_is_a_pair_with_itself(training: bool) -> None:
    label_filter = made().train(training)
    first, second = torch.tensor([0, 1, 2, 3]), torch.tensor([3, 1, 5, 4])
    gates = label_filter(first, second)
    assert torch.equal(label_filter(second, first), gates)
    assert ((gates > 0.0) & (gates < 1.0)).all() and gates.shape == (4, 8)
    before = {name: value.clone() for name, value in label_filter.state_dict().items()}
    of_classes = label_filter.of_classes()
    assert label_filter.training == training  # it leaves the filter as it is
    for name, value in label_filter.state_dict().items():
        assert torch.equal(value, before[name]), name
    label_filter.eval()
    assert torch.equal(label_filter(first, first), of_classes[first])


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = made().state_dict()
    number = torch.rand(())
    torch.manual_seed(1)
    assert torch.rand(()) == number  # the global generator is left alone
    second, other = made().state_dict(), made(1).state_dict()
    assert all(torch.equal(second[name], value) for name, value in first.items())
    assert not torch.equal(other["labels.weight"], first["labels.weight"])


def test_penalties_by_hand() -> None:
    gates = torch.tensor([[0.5, 1.0], [0.25, 0.0]], dtype=torch.float64)
    g_log_g = (0.5 * math.log(0.5) + 0.25 * math.log(0.25)) / 4
    other = (0.5 * math.log(0.5) + 0.75 * math.log(0.75)) / 4
    assert float(gate_penalty(gates, "paper")) == pytest.approx(g_log_g)
    assert float(gate_penalty(gates, "neg_glog")) == pytest.approx(-g_log_g)
    assert float(gate_penalty(gates, "bernoulli")) == pytest.approx(-g_log_g - other)
    random = torch.rand(20, 30)
    assert -1 / math.e <= float(gate_penalty(random, "paper")) <= 0.0
