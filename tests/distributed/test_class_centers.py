"""Class centers over real gloo processes: what they send, and that they resume on other ranks.

That they train the same on any number of ranks is in ``contracts/test_objectives.py``.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from mclclip.checkpoint import CheckpointConfig
from mclclip.checkpoint.checkpoints import Checkpoints
from mclclip.objectives.class_centers import Margin, ShardedClassCenters, normal_rows
from mclclip.objectives.mlcd import ClassCenterLoss, negative_draw
from mclclip.ranks import collectives
from tests.contracts import test_objectives as contract
from tests.distributed.conftest import here
from tests.distributed.test_engines import DECAY, assert_close, whole
from tests.objective_loops import parts_of

Ranks = Callable[..., list[Any]]
K, D, B, L = 30, 6, 12, 3


def labels_of(step: int) -> Tensor:
    """Distinct classes; some rows have fewer, one has none."""
    random = torch.Generator().manual_seed(50 + step)
    labels = torch.stack([torch.randperm(K, generator=random)[:L] for _ in range(B)])
    labels[step % B, 1:] = -1
    labels[(step + 1) % B] = -1
    return labels


def make() -> ClassCenterLoss:
    centers = ShardedClassCenters(
        K,
        D,
        normal_rows(D, seed=3, deviation=1.0),
        context=here(),
        draw=negative_draw(K, 0.5, seed=1),
        weight_decay=0.1,
        lazy=True,
        dtype=torch.float64,
    )
    return ClassCenterLoss(centers, scale=8.0, margin=Margin("arc", 0.3), tile=5)


def one_step(objective: ClassCenterLoss, step: int) -> float:
    """The loss of this rank's columns of a global batch, pulled back."""
    centers = objective.centers
    rows = B // collectives.world_size()
    own = slice(collectives.rank() * rows, (collectives.rank() + 1) * rows)
    random = torch.Generator().manual_seed(step)
    raw = torch.randn(B, D, generator=random, dtype=torch.float64)[own].requires_grad_()
    centers.zero_grad()
    centers.begin(step)
    features = functional.normalize(raw, dim=1)
    loss = parts_of(objective, image_features=features, classes=labels_of(step)[own])["loss"]
    loss.backward()
    return float(loss.detach())


def test_a_rank_may_hold_no_class(ranks: Ranks) -> None:
    """Five classes lie on four ranks as two, two, one and none; other numbers of ranks are in
    ``contracts/test_objectives.py``."""
    figures, state = ranks(1, contract.run, "mlc", "ddp", "float64", {})[0]
    assert len(state["class_centers.rows"]) == 5
    for got_figures, got in ranks(4, contract.run, "mlc", "ddp", "float64", {}):
        for parts, wanted in zip(got_figures, figures, strict=True):
            assert parts == pytest.approx(wanted, rel=1e-9, abs=1e-9)
        assert_close(state, got, 1e-9)


# --- what goes over the wire -------------------------------------------------------------------


def counted_collectives() -> list[tuple[str, tuple[int, ...]]]:
    """The collectives of one forward and backward, with the shape that each rank puts in."""
    objective = make()
    calls: list[tuple[str, tuple[int, ...]]] = []
    names = [n for n in dir(dist) if n.split("_")[0] in ("all", "reduce", "broadcast", "barrier")]
    originals = {n: getattr(dist, n) for n in names if callable(getattr(dist, n))}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            tensors = [a for a in args if isinstance(a, Tensor)]
            calls.append((name, tuple(tensors[-1].shape) if tensors else ()))
            return originals[name](*args, **options)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        one_step(objective, 0)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return calls


def test_one_sum_of_two_numbers_per_row_forward_and_one_reduction_backward(ranks: Ranks) -> None:
    for calls in ranks(3, counted_collectives):
        assert calls == [
            ("all_gather", (B // 3, L)),
            ("all_gather", (B // 3, D)),
            ("all_reduce", (B, 2)),
            ("all_reduce", (B, D)),  # gloo's stand-in for a reduce-scatter
        ]


# --- checkpoints -------------------------------------------------------------------------------


class Head:
    """What an engine does for the class centers, without a trunk."""

    def __init__(self) -> None:
        self.objective = make()

    def state_dict(self) -> dict[str, Tensor]:
        return self.objective.centers.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.objective.centers.load_state_dict(state)


def curve(directory: Path, stop: int) -> dict[str, Any]:
    """Goes on to step ``stop`` from what is saved, saves, and returns losses and state."""
    warnings.filterwarnings("ignore")
    head, losses = Head(), []
    checkpoints = Checkpoints(directory, CheckpointConfig(keep=5))
    start = checkpoints.resume(head)
    for step in range(start, stop):
        losses.append(one_step(head.objective, step))
        head.objective.centers.step(0.05)
    checkpoints.save(stop, head)
    state = {
        n: (v.full_tensor() if isinstance(v, DTensor) else v).numpy().copy()
        for n, v in head.state_dict().items()
    }
    return {"start": start, "losses": losses, "state": state}


def test_saved_on_four_ranks_resumed_on_others(ranks: Ranks, tmp_path: Path) -> None:
    undisturbed = ranks(1, curve, tmp_path / "whole", 8)[0]
    assert undisturbed["state"]["class_centers.rows"].shape == (K, D)
    first = ranks(4, curve, tmp_path / "four", 4)[0]
    for count in (4, 3, 1):
        directory = shutil.copytree(tmp_path / "four", tmp_path / f"from_four_to_{count}")
        second = ranks(count, curve, directory, 8)[0]
        assert second["start"] == 4
        np.testing.assert_allclose(
            first["losses"] + second["losses"], undisturbed["losses"], rtol=1e-12
        )
        for name, wanted in undisturbed["state"].items():
            np.testing.assert_allclose(second["state"][name], wanted, atol=1e-12, err_msg=name)


# --- steps that are left out -------------------------------------------------------------------


def run_one_bad(name: str, options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The states before and after a step in which one rank's pixels are infinite, and after one
    more good step."""
    engine = contract.make_engine("mlc", name, "fp16", start_decay=DECAY, **options)
    states = []
    for step in range(3):
        batch = contract.columns("mlc", step, torch.float32)
        if step == 1 and collectives.rank() == 0:
            batch.views[0][0] = float("inf")
        engine.update(batch, lr=1e-3)
        states.append(whole(engine.state_dict()) | {"scale": engine.scaler.get_scale()})
    return tuple(states)


def assert_left_out(before: dict[str, Any], after: dict[str, Any], later: dict[str, Any]) -> None:
    """Neither trunk nor class centers, nor their moments and counts, move by what overflowed."""
    assert after["scale"] == 0.5 * before["scale"]
    for key in (key for key in before if not key.startswith("scale")):
        np.testing.assert_array_equal(after[key], before[key], err_msg=key)
    for key in ("class_centers.rows", "model.model.clip.visual.proj"):
        assert not np.array_equal(later[key], before[key])
    assert later["class_centers.steps"].max() == 2


@pytest.mark.parametrize(
    ("name", "options"), [("ddp", {"micro_batch": 4, "clip_grad_norm": 1.0}), ("fsdp", {})], ids=str
)
def test_a_step_that_overflows_anywhere_is_left_out_everywhere(
    ranks: Ranks, name: str, options: dict[str, Any]
) -> None:
    for result in ranks(2, run_one_bad, name, options):
        assert_left_out(*result)
