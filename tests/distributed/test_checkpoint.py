"""Checkpoints over ranks: saved on some, loaded on others; a resumed run repeats itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mclclip import checkpoint
from mclclip.parallel import collectives
from mclclip.parallel.engines import Engine
from mclclip.parallel.process_group import Context, seed_everything

Ranks = Callable[..., list[Any]]
State = dict[str, Tensor]


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
    context = Context(collectives.rank(), collectives.world_size())
    model = Model(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.2},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
    )
    return Engine(model, optimizer, context)


def train(engine: Engine, steps: range, *, settled: bool = False) -> None:
    """The loop of training, as far as its order goes: seed, settle once, update."""
    for step in steps:
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        batch = batch + engine.context.rank
        seed_everything(7, step, engine.context.rank)
        if not settled:
            engine.settle(batch)
            settled = True
        engine.update(batch, lr=0.01)


def state_of(engine: Engine) -> State:
    """Weights, buffers and moments of this rank, by name."""
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for number, moments in enumerate(engine.optimizer.state.values()):
        state |= {f"{number}.{name}": value.clone() for name, value in moments.items()}
    return state


def train_and_save(directory: Path, steps: int, save_at: int, keep: int = 2) -> State:
    """Trains from the start, saves on the way, and returns the state at the end."""
    engine = engine_for(seed=0)
    train(engine, range(save_at))
    checkpoint.save(directory, save_at, engine.module, engine.optimizer, keep=keep)
    train(engine, range(save_at, steps), settled=True)
    return state_of(engine)


def load_and_train(directory: Path, steps: int, step: int) -> State:
    """Resumes in a model with other weights and returns the state at the end."""
    engine = engine_for(seed=1)
    checkpoint.load(directory, step, engine.module, engine.optimizer)
    train(engine, range(step, steps))
    return state_of(engine)


def assert_same(a: State, b: State) -> None:
    assert a.keys() == b.keys() and len(a) > 20
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_resuming_is_bit_for_bit(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """With dropout, with the sums of three ranks, and with a buffer that counts forwards."""
    undisturbed = ranks(world_size, train_and_save, tmp_path, 6, 3)
    resumed = ranks(world_size, load_and_train, tmp_path, 6, 3)
    for rank in range(world_size):
        assert_same(undisturbed[rank], resumed[rank])
    assert int(resumed[0]["seen"]) == 6


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 1), (1, 2), (2, 3)])
def test_any_number_of_ranks_loads_what_any_number_saved(
    ranks: Ranks, tmp_path: Path, saved_on: int, loaded_on: int
) -> None:
    saved = ranks(saved_on, train_and_save, tmp_path, 3, 3)[0]
    for loaded in ranks(loaded_on, load_and_train, tmp_path, 3, 3):
        assert_same(saved, loaded)


def test_every_rank_can_have_the_models_state_alone(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(2, train_and_save, tmp_path, 3, 3)[0]
    for state in ranks(2, checkpoint.load_model_state, tmp_path, 3):
        assert state.keys() == Model(0).state_dict().keys()
        assert all(torch.equal(value, saved[name]) for name, value in state.items())


def test_the_number_of_ranks_is_in_no_name_of_a_step(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, train_and_save, tmp_path, 3, 3)
    ranks(1, train_and_save, tmp_path, 4, 4, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


def settle_only() -> tuple[State, State, bool]:
    engine = engine_for(seed=0)
    before = state_of(engine)
    seed_everything(1)
    drawn_before = torch.get_rng_state()
    engine.settle(torch.ones(4, 6))
    same_draws = torch.equal(drawn_before, torch.get_rng_state())
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    assert not gradients
    return before, state_of(engine), same_draws


def test_settling_leaves_no_trace(ranks: Ranks) -> None:
    for before, after, same_draws in ranks(2, settle_only):
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert same_draws


def fail_to_load(directory: Path) -> str:
    engine = engine_for(seed=1)
    try:
        checkpoint.load(directory, 3, engine.module, engine.optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


def test_damage_stops_all_ranks_with_one_line(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, train_and_save, tmp_path, 3, 3)
    path = tmp_path / "step_00000003"
    (path / "__0_0.distcp").write_bytes(b"")
    for line in ranks(2, fail_to_load, tmp_path):
        assert line.startswith(f"the checkpoint {path} cannot be read (") and "\n" not in line


def fail_to_save(directory: Path) -> str:
    """The first rank's disk is full; the others' are not."""
    engine = engine_for(seed=0)
    if collectives.rank() == 0:
        directory = directory / "file" / "below"
        directory.parent.write_text("")
    try:
        checkpoint.save(directory, 3, engine.module, engine.optimizer, keep=1)
    except Exception as error:
        return str(error)
    return ""


def test_a_save_that_fails_on_one_rank_fails_on_all(ranks: Ranks, tmp_path: Path) -> None:
    lines = ranks(2, fail_to_save, tmp_path)
    assert all("file" in line for line in lines), lines
    assert checkpoint.steps(tmp_path) == []
