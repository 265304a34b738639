"""What is not finite on one rank alone ends the training on all of them alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mclclip.checkpoint import CheckpointConfig
from mclclip.checkpoint.checkpoints import Checkpoints
from mclclip.objectives.class_centers import ShardedClassCenters, normal_rows
from mclclip.ranks import collectives
from mclclip.run.recorder import NotFinite, Recorder
from tests.distributed.conftest import here

Ranks = Callable[..., list[Any]]


class Saved:
    """Weights that all ranks hold, and class centers of which each holds some rows."""

    def __init__(self, classes: int) -> None:
        context = here()
        self.head = ShardedClassCenters(classes, 4, normal_rows(4, seed=1), context=context)
        self.weights = {f"model.p{n}": torch.full((n + 1,), 1.0) for n in range(6)}

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights | self.head.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weights = {name: state[name] for name in self.weights}
        self.head.load_state_dict(state)


def spoil(source: Saved, what: str) -> None:
    """A row or a moment of one rank's class centers, or the weights, as DDP keeps them, of all."""
    if what == "weights":
        source.weights["model.p2"][1] = float("inf")
    elif collectives.rank() == 1:
        getattr(source.head, what)[-1, 2] = float("nan")


def save(directory: Path, what: str, asynchronous: bool) -> tuple[str, int, list[str]]:
    """Saves a state and then a spoiled one: what was raised, and what a resume finds."""
    options: dict[str, Any] = {"keep": 1, "asynchronous": asynchronous}
    checkpoints, source, line = Checkpoints(directory, CheckpointConfig(**options)), Saved(7), ""
    checkpoints.save(1, source)
    spoil(source, what)
    try:
        checkpoints.save(2, source)
    except NotFinite as error:
        line = str(error)
    checkpoints.wait()
    step, found = (
        Checkpoints(directory, CheckpointConfig(keep=1)).resume(again := Saved(7)),
        again.head.rows,
    )
    assert bool(torch.isfinite(found).all())
    collectives.barrier()
    return line, step, sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("what", ["rows", "exp_avg", "weights"])
def test_no_rank_saves_what_is_not_finite(
    ranks: Ranks, tmp_path: Path, what: str, asynchronous: bool
) -> None:
    first, *others = ranks(3, save, tmp_path / "checkpoints", what, asynchronous)
    name = "model.p2" if what == "weights" else f"class_centers.{what}"
    assert first == (f"what was trained ({name}) is not finite after step 2", 1, ["step_00000001"])
    assert others == [first, first]


def record(directory: Path, ahead: bool) -> list[str]:
    """Rows every four steps; the last rank's loss is infinite in its sixth step alone."""
    context = here()
    recorder = Recorder(
        directory, context, name="stage 1", global_batch=8, start=0, total=12, steps_per_epoch=12,
        log_every=4, share_bad=lambda found: 0, track=[], config={},
    )  # fmt: skip
    raised = []
    for done in range(1, 9):
        bad = done == 6 and context.rank == context.world_size - 1
        parts = {"loss": torch.tensor(float("inf") if bad else 1.0), "grad_norm": torch.tensor(2.0)}
        try:
            recorder.take(done, parts, lr=0.1)
            if ahead and done == 7:  # as where a checkpoint is due between two rows
                recorder.raise_if_diverged(done)
        except NotFinite as error:
            raised.append(f"{done}: {error}")
    recorder.close()
    return raised


@pytest.mark.parametrize("ahead", [False, True])
def test_one_rank_alone_stops_all(ranks: Ranks, tmp_path: Path, ahead: bool) -> None:
    line = "the loss or its gradient is not finite since step 6"
    expected = ([f"7: {line}"] if ahead else []) + [f"8: {line}"]
    assert ranks(3, record, tmp_path, ahead) == [expected] * 3
