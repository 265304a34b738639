"""Class centers over real gloo processes equal one dense float64 process, and resume on others."""

from __future__ import annotations

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

from mclclip.checkpoint import Checkpoints
from mclclip.objectives.class_centers.rows import HeadOptimizer, ShardedClassCenters, normal_rows
from mclclip.objectives.class_centers.sums import Margin
from mclclip.objectives.mlcd import ClassCenterLoss, NegativeDraw
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from tests.matrix import kept
from tests.slow_heads import SlowLazyAdamW, dense_loss

Ranks = Callable[..., list[Any]]
D, B, L, STEPS, LR, SCALE = 6, 12, 3, 5, 0.05, 8.0


def labels_of(step: int, num_classes: int) -> Tensor:
    """Distinct classes; some rows have fewer, one has none."""
    random = torch.Generator().manual_seed(50 + step)
    labels = torch.stack([torch.randperm(num_classes, generator=random)[:L] for _ in range(B)])
    labels[step % B, 1:] = -1
    labels[(step + 1) % B] = -1
    return labels


def features_of(step: int) -> Tensor:
    random = torch.Generator().manual_seed(step)
    return torch.randn(B, D, generator=random, dtype=torch.float64)


def make(num_classes: int, how: dict[str, Any], dtype: torch.dtype) -> ClassCenterLoss:
    context = Context(collectives.rank(), collectives.world_size())
    centers = ShardedClassCenters(
        num_classes,
        D,
        normal_rows(D, seed=3, deviation=1.0),
        context=context,
        draw=NegativeDraw(num_classes, how.get("rate", 0.5), seed=1),
        rule=how.get("rule", "two_path"),
        optimizer=HeadOptimizer(weight_decay=0.1, lazy=how.get("lazy", False)),
        dtype=dtype,
    )
    margin = Margin(how.get("margin", "arc"), 0.3)
    return ClassCenterLoss(centers, how.get("kind", "mlcd"), scale=SCALE, margin=margin, tile=5)


def one_step(objective: ClassCenterLoss, step: int) -> tuple[dict[str, Tensor], Tensor]:
    """This rank's columns of a global batch: what the loss says, the raw features' gradient."""
    centers = objective.centers
    rows = B // collectives.world_size()
    own = slice(collectives.rank() * rows, (collectives.rank() + 1) * rows)
    raw = features_of(step)[own].to(centers.rows.dtype).requires_grad_()
    centers.zero_grad()
    centers.begin(step)
    output = objective(functional.normalize(raw, dim=1), labels_of(step, centers.num_classes)[own])
    output["loss"].backward()
    assert raw.grad is not None
    return output, raw.grad


def run(num_classes: int, how: dict[str, Any], dtype: str = "float64") -> list[dict[str, Any]]:
    """Five steps: what each rank saw, whole where it is shared."""
    objective = make(num_classes, how, getattr(torch, dtype))
    centers, found = objective.centers, []
    for step in range(STEPS):
        output, grad = one_step(objective, step)
        mean = {n: collectives.gather(v.double()[None]) for n, v in output.items()}
        whole = torch.zeros_like(centers.rows)
        assert centers.grad is not None
        whole[centers.touched] = centers.grad
        norm = float(centers.grad_square()) ** 0.5
        centers.step(LR)
        found.append(
            {
                "parts": {
                    n: float(v.max() if n.startswith("max_") else v.mean()) for n, v in mean.items()
                },
                # Engines average over ranks what the loss's backward has multiplied by them.
                "features": collectives.gather(grad / collectives.world_size()).numpy(),
                "grad": np.concatenate(collectives.gather_objects(whole.numpy())),
                "norm": norm,
                "rows": np.concatenate(collectives.gather_objects(centers.rows.numpy())),
            }
        )
    return found


def dense(num_classes: int, how: dict[str, Any]) -> list[dict[str, Any]]:
    """The same by the definition, with torch's AdamW or a slow lazy one."""
    margin = Margin(how.get("margin", "arc"), 0.3)
    draw = NegativeDraw(num_classes, how.get("rate", 0.5), seed=1)
    rows = normal_rows(D, seed=3, deviation=1.0)(0, num_classes).double().requires_grad_()
    adamw = torch.optim.AdamW([rows], lr=LR, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1)
    slow = SlowLazyAdamW(rows.detach(), (0.9, 0.98), 1e-6, 0.1)
    found = []
    for step in range(STEPS):
        raw, labels = features_of(step).requires_grad_(), labels_of(step, num_classes)
        drawn, positives = draw(step).tolist(), set(labels[labels >= 0].tolist())
        rule = how.get("rule", "two_path")
        if rule == "exclude_positives":
            drawn = [j for j in drawn if j not in positives]
        elif rule == "partial_fc":
            others = [j for j in drawn if j not in positives]
            drawn = [*positives, *others[: max(len(drawn) - len(positives), 0)]]
        rows.grad = None
        loss = dense_loss(how.get("kind", "mlcd"), rows, raw, labels, drawn, SCALE, margin)
        loss.backward()  # type: ignore[no-untyped-call]
        assert raw.grad is not None and rows.grad is not None
        single = how.get("kind") == "single_label"
        used = labels[:, :1] if single else labels
        touched = sorted({*drawn, *used[used >= 0].tolist()})
        grad = rows.grad.clone()
        if how.get("lazy"):
            slow.step(grad, touched, LR)
        else:
            adamw.step()
        found.append(
            {
                "loss": float(loss.detach()),
                "features": raw.grad.numpy(),
                "grad": grad.numpy(),
                "rows": rows.detach().numpy().copy(),
            }
        )
    return found


CASES: list[tuple[int, dict[str, Any]]] = [
    (30, {}),
    (30, {"kind": "mlc", "lazy": True, "margin": "cos"}),
    (30, {"kind": "single_label", "margin": "none", "rate": 1.0}),
    (9, {"rate": 0.3, "lazy": True}),  # 3, 3, 3, 0 rows on four ranks
    (5, {"rate": 0.0, "kind": "mlcd"}),
    (30, {"rule": "partial_fc", "kind": "mlc"}),
    (30, {"rule": "exclude_positives"}),
]


@pytest.mark.parametrize(("num_classes", "how"), CASES, ids=str)
@pytest.mark.parametrize("world_size", kept([1, 2, 3, 4], 2))
def test_ranks_equal_the_dense_process(
    ranks: Ranks, world_size: int, num_classes: int, how: dict[str, Any]
) -> None:
    """Loss, feature gradient, center gradient and centers over five optimizer steps."""
    wanted = dense(num_classes, how)
    for found in ranks(world_size, run, num_classes, how):
        for step, (got, want) in enumerate(zip(found, wanted, strict=True)):
            assert got["parts"]["loss"] == pytest.approx(want["loss"], abs=1e-11), step
            for name in ("features", "grad", "rows"):
                np.testing.assert_allclose(got[name], want[name], atol=1e-10, err_msg=name)
            assert got["norm"] == pytest.approx(np.linalg.norm(want["grad"]), abs=1e-10)


@pytest.mark.parametrize("world_size", [2, 4])
def test_figures_do_not_depend_on_ranks(ranks: Ranks, world_size: int) -> None:
    alone = ranks(1, run, 30, {})[0]
    for found in ranks(world_size, run, 30, {}):
        for got, want in zip(found, alone, strict=True):
            assert got["parts"] == pytest.approx(want["parts"], abs=1e-10)


def test_fp32_ranks_agree(ranks: Ranks) -> None:
    alone, found = ranks(1, run, 30, {}, "float32")[0], ranks(3, run, 30, {}, "float32")[0]
    for got, want in zip(found, alone, strict=True):
        assert got["parts"]["loss"] == pytest.approx(want["parts"]["loss"], rel=1e-5)
        np.testing.assert_allclose(got["rows"], want["rows"], atol=1e-5)


# --- what goes over the wire -------------------------------------------------------------------


def counted_collectives() -> list[tuple[str, tuple[int, ...]]]:
    """The collectives of one forward and backward, with the shape that each rank puts in."""
    objective = make(30, {}, torch.float64)
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

    def __init__(self, how: dict[str, Any]) -> None:
        self.objective = make(30, how, torch.float64)

    def state_dict(self) -> dict[str, Tensor]:
        return self.objective.centers.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.objective.centers.load_state_dict(state)


def curve(directory: Path, how: dict[str, Any], stop: int) -> dict[str, Any]:
    """Goes on to step ``stop`` from what is saved, saves, and returns losses and state."""
    warnings.filterwarnings("ignore")
    head, losses = Head(how), []
    checkpoints = Checkpoints(directory, keep=5)
    start = checkpoints.resume(head)
    for step in range(start, stop):
        output, _ = one_step(head.objective, step)
        head.objective.centers.step(LR)
        losses.append(float(output["loss"].detach()))
    checkpoints.save(stop, head)
    state = {
        n: (v.full_tensor() if isinstance(v, DTensor) else v).numpy().copy()
        for n, v in head.state_dict().items()
    }
    return {"start": start, "losses": losses, "state": state}


@pytest.mark.parametrize("lazy", kept([False, True], 1))
def test_saved_on_four_ranks_resumed_on_others(ranks: Ranks, tmp_path: Path, lazy: bool) -> None:
    how = {"lazy": lazy}
    undisturbed = ranks(1, curve, tmp_path / "whole", how, 8)[0]
    assert undisturbed["state"]["class_centers.rows"].shape == (30, D)
    for count in (4, 3, 2, 1):
        directory = tmp_path / f"from_four_to_{count}"
        first = ranks(4, curve, directory, how, 4)[0]
        second = ranks(count, curve, directory, how, 8)[0]
        assert second["start"] == 4
        np.testing.assert_allclose(
            first["losses"] + second["losses"], undisturbed["losses"], rtol=1e-12
        )
        for name, wanted in undisturbed["state"].items():
            np.testing.assert_allclose(second["state"][name], wanted, atol=1e-12, err_msg=name)
