"""Checkpoints over ranks: saved on some, loaded on others; whatever fails, fails on all alike."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mclclip.checkpoint import CheckpointConfig, step_files
from mclclip.checkpoint.checkpoints import Checkpoints
from mclclip.checkpoint.step_files import load_model_state, steps
from mclclip.engines.engine import Engine
from mclclip.ranks import collectives
from mclclip.ranks.process_group import seed_everything
from tests.distributed.conftest import here

Ranks = Callable[..., list[Any]]
State = dict[str, Tensor]
SIZES = [(17, 6), (17,), (5, 17), (1,), (40, 3), (8, 8), (31,)]


class Source:
    """A state that all ranks hold whole; or, ``sharded``, of which each has its shards."""

    def __init__(self, seed: int, *, sharded: bool = False) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.module = nn.ParameterDict(
            {
                f"p{n}": nn.Parameter(torch.randn(size, generator=rng))
                for n, size in enumerate(SIZES)
            }
        )
        self.moment = torch.randn(9, 4, generator=rng)
        self.count = torch.tensor(float(seed))
        if sharded:
            fully_shard(self.module, mesh=init_device_mesh("cpu", (collectives.world_size(),)))

    def state_dict(self) -> State:
        state = {f"model.{name}": value for name, value in self.module.state_dict().items()}
        return state | {"optimizer.p0.exp_avg": self.moment, "optimizer.p0.step": self.count}

    def load_state_dict(self, state: State) -> None:
        self.moment, self.count = (state.pop(f"optimizer.p0.{n}") for n in ("exp_avg", "step"))
        self.module.load_state_dict({n.removeprefix("model."): v for n, v in state.items()})

    def values(self) -> State:
        """Full tensors, by name."""
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in self.state_dict().items()
        }


def save(directory: Path, *saved: int, sharded: bool = False, **options: Any) -> State:
    """Saves ``Source(step)`` for every step; returns the last one's values."""
    checkpoints = Checkpoints(directory, CheckpointConfig(**{"keep": 9, **options}))
    for step in saved:
        checkpoints.save(step, source := Source(step, sharded=sharded))
    checkpoints.wait()
    return source.values()


def save_sharded(directory: Path, step: int) -> State:
    return save(directory, step, sharded=True)


def save_asynchronously(directory: Path, step: int, sharded: bool) -> None:
    """Overwrites everything, and uses the ranks' group, while the write waits."""
    write, trained = step_files.write, threading.Event()

    def late(*args: Any, **options: Any) -> None:
        assert trained.wait(300)
        write(*args, **options)

    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=True))
    source = Source(step, sharded=sharded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_files, "write", late)
        checkpoints.save(step, source)
        for value in source.state_dict().values():
            value.detach().fill_(7)
        assert checkpoints.steps() == []
        trained.set()
        for number in range(50):
            assert int(collectives.all_reduce_sum(torch.tensor(number))) == (
                number * collectives.world_size()
            )
        checkpoints.wait()
    assert checkpoints.steps() == [step]


def load(directory: Path, sharded: bool = False) -> tuple[int, State, list[str]]:
    """Resumes into a state of other values; also returns this rank's warnings."""
    target = Source(99, sharded=sharded)
    with Heard() as heard:
        step = Checkpoints(directory, CheckpointConfig()).resume(target)
    return step, target.values(), heard.lines


class Heard(logging.Handler):
    """Collects the warnings of a block."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Heard:
        logging.getLogger("mclclip").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("mclclip").removeHandler(self)


def assert_same(a: State, b: State) -> None:
    assert a.keys() == b.keys() and len(a) == len(SIZES) + 2
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


# --- any number of ranks, any way of holding the state -----------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_any_number_of_ranks_loads_what_four_or_one_have_saved(
    ranks: Ranks, tmp_path: Path, sharded: bool
) -> None:
    saved = ranks(4, save_sharded if sharded else save, tmp_path / "four", 3)[0]
    for loaded_on in (3, 1):
        for as_shards in (False, True):
            for step, loaded, lines in ranks(loaded_on, load, tmp_path / "four", as_shards):
                assert step == 3 and not lines
                assert_same(saved, loaded)
    for state in ranks(2, load_model_state, tmp_path / "four", 3):
        assert len(state) == len(SIZES)
        assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in state.items())
    ranks(1, save, tmp_path / "one", 3)
    for step, loaded, _ in ranks(3, load, tmp_path / "one", sharded):
        assert step == 3
        assert_same(saved, loaded)


@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_written_later_is_what_was_saved(
    ranks: Ranks, tmp_path: Path, sharded: bool
) -> None:
    ranks(3, save_asynchronously, tmp_path / "later", 3, sharded)
    saved = ranks(1, save, tmp_path / "at once", 3)[0]
    for step, loaded, _ in ranks(2, load, tmp_path / "later"):
        assert step == 3
        assert_same(saved, loaded)


def save_big(directory: Path) -> None:
    checkpoints = Checkpoints(directory, CheckpointConfig())
    source = Source(1)
    source.module = nn.ParameterDict({f"p{n}": torch.ones(1000 + n, 25) for n in range(16)})
    checkpoints.save(1, source)


def test_plain_tensors_are_written_once_and_by_all_ranks_alike(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(4, save_big, tmp_path)
    sizes = [path.stat().st_size for path in tmp_path.glob("step_00000001/*.distcp")]
    written = 16 * 1000 * 25 * 4
    assert len(sizes) == 4 and written < sum(sizes) < 1.1 * written
    assert max(sizes) < 1.1 * min(sizes)
    state = json.loads((tmp_path / "step_00000001" / "state.json").read_text())
    assert state["world_size"] == 4 and len(state["files"]) == 5


# --- a training goes on as if nothing had been -------------------------------------------------


class Model(nn.Module):
    """A frozen layer, dropout, a buffer; several trained layers of different sizes."""

    seen: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Linear(6, 6).requires_grad_(False)
        self.tail = nn.Sequential(
            nn.Linear(6, 17), nn.GELU(), nn.Dropout(0.5), nn.Linear(17, 5), nn.Linear(5, 3)
        )
        self.scale = nn.Parameter(torch.tensor(2.6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        self.seen.add_(1)
        return {"loss": (self.tail(self.trunk(batch)) * self.scale).square().mean()}


def engine_for(seed: int) -> Engine:
    """A model on this rank, with the optimizer and groups of training."""

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in module.parameters() if p.requires_grad]
        return torch.optim.AdamW(
            [
                {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.2},
                {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
            ]
        )

    return Engine(Model(seed), optimizer, here())


def train(engine: Engine, steps: range) -> None:
    """The loop of training, as far as its order goes: seed, update."""
    for step in steps:
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        batch = batch + engine.context.rank
        seed_everything(7, step, engine.context.rank)
        engine.update(batch, lr=0.01)


def train_and_save(directory: Path, total: int, save_at: int) -> State:
    """Trains from the start, saves on the way, and returns the state at the end."""
    engine = engine_for(0)
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=True))
    train(engine, range(save_at))
    checkpoints.save(save_at, engine)
    train(engine, range(save_at, total))
    checkpoints.wait()
    return {name: value.clone() for name, value in engine.state_dict().items()}


def load_and_train(directory: Path, total: int) -> State:
    """Resumes in a model with other weights and returns the state at the end."""
    engine = engine_for(1)
    train(engine, range(Checkpoints(directory, CheckpointConfig()).resume(engine), total))
    return {name: value.clone() for name, value in engine.state_dict().items()}


def test_resuming_is_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    """With dropout, with the sums of three ranks, and with a buffer that counts forwards: fixing
    the order of the sums, before the first step of each process, leaves no trace in them."""
    undisturbed = ranks(3, train_and_save, tmp_path, 6, 3)
    resumed = ranks(3, load_and_train, tmp_path, 6)
    for before, after in zip(undisturbed, resumed, strict=True):
        assert before.keys() == after.keys() and len(before) > 20
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert int(resumed[0]["model.seen"]) == 6


# --- damage ------------------------------------------------------------------------------------


def test_damage_of_any_file_is_seen_by_all_ranks_and_told_by_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    saved = ranks(3, save, tmp_path, 3)[0]
    ranks(3, save, tmp_path, 5)
    os.truncate(tmp_path / "step_00000005" / "__2_0.distcp", 100)
    results = ranks(3, load, tmp_path)
    for step, loaded, _ in results:
        assert step == 3
        assert_same(saved, loaded)
    (line,), *others = [lines for *_, lines in results]
    assert "step 5 (__2_0.distcp has 100 bytes" in line
    assert "using step 3" in line and not any(others)
    names = sorted(p.name for p in tmp_path.glob("*step_*"))
    assert names == [".damaged_step_00000005", "step_00000003"]
    os.truncate(tmp_path / "step_00000003" / "__1_0.distcp", 100)
    first, *others = ranks(3, fail_to_load, tmp_path)
    assert others == [first, first] and first.startswith("no intact checkpoint is left")


def fail_to_load(directory: Path) -> str:
    try:
        load(directory)
    except RuntimeError as error:
        return str(error)
    return ""


# --- failed saves ------------------------------------------------------------------------------


def save_with_failure(
    directory: Path, where: str, failing: int, asynchronous: bool
) -> tuple[str, int | None]:
    """Step 5 fails on one rank; returns the error, and what a next save leaves."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    owner: Any = {
        "data": (torch, "save"),
        "records": (step_files.files, "record_of"),
        "list": (step_files.files, "write_json"),
        "copy": (step_files, "select_local_part"),
        "writer": (step_files, "Writer"),
    }[where]
    config, line = CheckpointConfig(asynchronous=asynchronous), ""
    checkpoints = Checkpoints(directory, config)
    with pytest.MonkeyPatch.context() as patch:
        if collectives.rank() == failing:
            patch.setattr(*owner, full)
        try:
            checkpoints.save(5, Source(5))
            checkpoints.wait()
        except RuntimeError as error:
            line = str(error)
    checkpoints.save(7, Source(7))
    checkpoints.wait()
    return line, checkpoints.saved


@pytest.mark.parametrize(
    ("where", "failing", "asynchronous"),
    [
        ("data", 0, True),
        ("data", 1, False),
        ("records", 1, True),
        ("list", 0, False),
        ("copy", 1, True),
        ("writer", 0, True),
    ],
)
def test_what_one_rank_cannot_write_none_has_written(
    ranks: Ranks, tmp_path: Path, where: str, failing: int, asynchronous: bool
) -> None:
    ranks(1, save, tmp_path, 3)
    results = ranks(2, save_with_failure, tmp_path, where, failing, asynchronous)
    (line, saved), (other, other_saved) = results
    assert line == other
    assert "step_00000005 cannot be written (" in line and "No space left" in line
    assert steps(tmp_path) == [3, 7] and saved == other_saved == 7
    assert not list(tmp_path.glob(".*"))


# --- the mirror --------------------------------------------------------------------------------


def load_from_mirror(directory: Path, mirror: str) -> tuple[int, State]:
    target = Source(99)
    return Checkpoints(directory, CheckpointConfig(mirror=mirror)).resume(target), target.values()


def save_to_mirror(directory: Path, mirror: str) -> State:
    return save(directory, 3, 5, 7, mirror=mirror, keep=2, asynchronous=True)


def test_other_ranks_on_a_fresh_disk_go_on_from_the_mirror(ranks: Ranks, tmp_path: Path) -> None:
    mirror = str(tmp_path / "mirror")
    saved = ranks(3, save_to_mirror, tmp_path / "a", mirror)[0]
    assert steps(tmp_path / "mirror") == [5, 7]
    for step, loaded in ranks(2, load_from_mirror, tmp_path / "b", mirror):
        assert step == 7
        assert_same(saved, loaded)
