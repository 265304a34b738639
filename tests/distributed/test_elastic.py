"""Saved on four ranks, resumed on another number and under another engine: the same training.

Same samples, same augmentation at every step; losses within 1e-5 relative over the next 20 steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip import config
from mclclip.checkpoint import step_files
from mclclip.data.batches import Batch
from mclclip.engines.engine import Engine
from mclclip.ranks.signals import Preempted
from mclclip.verbs import index, train
from tests import tiny
from tests.distributed.conftest import here
from tests.distributed.test_deepspeed import zero
from tests.matrix import in_soak, kept

Ranks = Callable[..., list[Any]]
STEPS = 24  # saved after at most 4, so at least 20 follow
Seen = dict[int, dict[int, str]]  # step -> sample_id -> digest of its pixels

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp": {"name": "fsdp"},
    "cached": {"name": "ddp", "micro_batch": 2},
    "zero1": {"name": "deepspeed", "zero_stage": 1},
    "zero3": {"name": "deepspeed", "zero_stage": 3},
}


@contextlib.contextmanager
def recorded(seen: Seen) -> Iterator[None]:
    """Notes what every update of this rank trains on."""
    original = Engine.update

    def update(engine: Engine, batch: Batch, lr: float) -> Any:
        seen[batch.step] = {
            int(number): hashlib.sha256(image.numpy().tobytes()).hexdigest()
            for number, image in zip(batch.sample_id, batch.views[0], strict=True)
        }
        return original(engine, batch, lr)

    setattr(Engine, "update", update)  # noqa: B010
    try:
        yield
    finally:
        setattr(Engine, "update", original)  # noqa: B010


def train_here(options: dict[str, Any]) -> Seen:
    """Index and stage 0 on this rank, until the end or until it is asked to leave."""
    torch.set_num_threads(1)
    context = here()
    settled = config.from_tree(options)
    index.run(settled, context)
    seen: Seen = {}
    with recorded(seen), contextlib.suppress(Preempted):
        train.run(settled, context, stage=0)
    return seen


def run(ranks: Ranks, world_size: int, options: dict[str, Any]) -> Seen:
    """Samples and pixels of each step, of all ranks together."""
    merged: Seen = {}
    call: tuple[Any, ...] = (train_here, options)
    if options["base"]["engine"].get("zero_stage") == 3:
        call = (zero, *call)
    for seen in ranks(world_size, *call):
        for step, samples in seen.items():
            merged.setdefault(step, {}).update(samples)
    return merged


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in tiny.rows(run_dir / "stage_0/train/metrics.jsonl")]


def options_for(data: Path, run_dir: Path, engine: str) -> dict[str, Any]:
    tree = tiny.tree(run_dir, data)
    tree["base"] |= {"steps": STEPS, "log_every": 1, "engine": ENGINES[engine]}
    tree["base"] |= {"checkpoint": {"every": 100}}
    return tree | {"poll_s": 0.001}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("data"), num_samples=120)


@pytest.fixture(scope="module")
def alone(
    ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Seen, list[float]]:
    """The undisturbed training of a single process."""
    run_dir = tmp_path_factory.mktemp("alone")
    return run(ranks, 1, options_for(data, run_dir, "ddp")), losses(run_dir)


@pytest.fixture(scope="module")
def left(
    ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Seen]]:
    """A run directory that four ranks under an engine have left, and what they saw."""
    found: dict[str, tuple[Path, Seen]] = {}

    def leave(engine: str) -> tuple[Path, Seen]:
        if engine not in found:
            run_dir = tmp_path_factory.mktemp(f"left_{engine}")
            (run_dir / "stop").touch()
            found[engine] = run_dir, run(ranks, 4, options_for(data, run_dir, engine))
        return found[engine]

    return leave


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "world_size", "resumed"),
    kept(
        [
            ("fsdp", 2, "zero3"),
            ("ddp", 1, "cached"),
            ("fsdp", 3, "ddp"),
            ("zero3", 3, "fsdp"),
            ("zero1", 1, "ddp"),
        ],
        0,
    ),
)
def test_the_same_training_goes_on(
    ranks: Ranks, data: Path, alone: Any, left: Any, tmp_path: Path,
    saved: str, world_size: int, resumed: str,
) -> None:  # fmt: skip
    if "zero" in saved + resumed and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    run_dir, before = left(saved)
    shutil.copytree(run_dir, tmp_path / "run")
    after = run(ranks, world_size, options_for(data, tmp_path / "run", resumed))
    assert 2 <= len(before) <= 4 and STEPS - len(before) >= 20
    assert sorted(before) + sorted(after) == list(range(STEPS))
    assert before | after == alone[0]
    np.testing.assert_allclose(losses(tmp_path / "run"), alone[1], rtol=1e-5)


@in_soak
def test_the_same_ranks_end_bit_for_bit(
    ranks: Ranks, data: Path, left: Any, tmp_path: Path
) -> None:
    """Four ranks, where the order of DDP's sums must be the settled one from the start."""
    run(ranks, 4, options_for(data, tmp_path / "undisturbed", "ddp"))
    shutil.copytree(left("ddp")[0], tmp_path / "resumed")
    run(ranks, 4, options_for(data, tmp_path / "resumed", "ddp"))
    assert states(tmp_path / "undisturbed") == states(tmp_path / "resumed")
    assert losses(tmp_path / "undisturbed") == losses(tmp_path / "resumed")


def states(run_dir: Path) -> dict[str, bytes]:
    """The last checkpoint's weights and moments."""
    directory = run_dir / "stage_0/train/checkpoints"
    return {
        part + name: tensor.numpy().tobytes()
        for part in ("model.", "optimizer.")
        for name, tensor in step_files.load_model_state(directory, STEPS, part[:-1]).items()
    }
