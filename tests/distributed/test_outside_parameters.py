"""Parameters outside of what engines wrap: half precision and steps that are left out.

That they train the same on any number of ranks is in ``contracts/test_objectives.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.ranks import collectives
from tests.contracts.test_objectives import columns, make_engine, run
from tests.distributed.test_engines import whole
from tests.matrix import in_soak, kept

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize("micro_batch", kept([None, 4], 1))
@pytest.mark.parametrize("name", kept(["ddp", "fsdp"], 1))
@in_soak
def test_fp16_leaves_class_centers_unscaled(
    ranks: Ranks, name: str, micro_batch: int | None
) -> None:
    """They move as far as under bf16, which rounds the trunk as much and has no loss scale."""
    clipped = {"clip_grad_norm": 1.0}
    figures, state = ranks(1, run, "mlcd", "ddp", "bf16", clipped)[0]
    options = clipped | {"micro_batch": micro_batch}
    got_figures, got = ranks(2, run, "mlcd", name, "fp16", options)[0]
    for parts, wanted in zip(got_figures, figures, strict=True):
        assert parts["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
        assert parts["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-2)
    rows = "class_centers.rows"
    assert np.linalg.norm(state[rows] - got[rows]) < 0.1 * np.linalg.norm(state[rows])


@pytest.mark.parametrize("name", kept(["ddp", "fsdp"], 0))
@in_soak
def test_fp16_leaves_the_adversary_unscaled(ranks: Ranks, name: str) -> None:
    """The gradients of the adversary are those under fp32, but for rounding."""
    found = {}
    for precision, engine in (("fp32", "ddp"), ("fp16", name)):
        figures, state = ranks(2, run, "feature_dropout", engine, precision, {})[0]
        moments = [
            v.ravel() for n, v in sorted(state.items()) if n.startswith("adversary.exp_avg_sq.")
        ]
        found[precision] = figures[0]["grad_norm"], float(np.concatenate(moments).sum())
    np.testing.assert_allclose(found["fp16"], found["fp32"], rtol=0.2)


def run_one_bad(name: str, options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The states before and after a step in which one rank's pixels are infinite, and after one
    more good step."""
    engine = make_engine("mlc", name, "fp16", **options)  # lazy: steps are counted by class
    states = []
    for step in range(3):
        batch = columns("mlc", step, torch.float32)
        if step == 1 and collectives.rank() == 0:
            batch.views[0][0] = float("inf")
        engine.update(batch, lr=1e-3)
        states.append(whole(engine.state_dict()))
    return tuple(states)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ddp", {"clip_grad_norm": 1.0}),
        ("ddp", {"micro_batch": 4}),
        ("fsdp", {"clip_grad_norm": 1.0}),
        ("deepspeed", {"zero_stage": 2}),
    ],
    ids=str,
)
def test_a_step_that_is_left_out_leaves_the_head(
    ranks: Ranks, name: str, options: dict[str, Any]
) -> None:
    """Neither trunk nor class centers, nor their moments and counts, move by what overflowed."""
    if name == "deepspeed":
        pytest.importorskip("deepspeed", reason="deepspeed cannot be installed here")
    before, after, later = ranks(2, run_one_bad, name, options)[0]
    for key in (key for key in before if not key.startswith("scaler")):
        np.testing.assert_array_equal(after[key], before[key], err_msg=key)
    assert not np.array_equal(later["class_centers.rows"], before["class_centers.rows"])
    assert later["class_centers.steps"].max() == 2
