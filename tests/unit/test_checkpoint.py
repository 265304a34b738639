"""Checkpoints in one process: bit for bit, whole or not there, one line when damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mclclip import checkpoint


class Model(nn.Module):
    """A trained layer, a frozen one, a buffer, a 0-dim and a 1-element parameter."""

    seen: Tensor

    def __init__(self, seed: int = 0, *, frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tail = nn.Linear(4, 3)
        self.trunk = nn.Linear(4, 4).requires_grad_(not frozen)
        self.scale = nn.Parameter(torch.tensor(2.6))
        self.shift = nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        out: Tensor = self.tail(self.trunk(x)) * self.scale + self.shift
        return out


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Two groups, as in training: with and without weight decay; frozen parameters in neither."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.2},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-6)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def trained(steps: int = 3, seed: int = 0) -> tuple[Model, torch.optim.AdamW]:
    model = Model(seed)
    optimizer = adamw(model)
    train(model, optimizer, range(steps))
    return model, optimizer


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- round trip --------------------------------------------------------------------------------


def test_a_resumed_training_repeats_the_undisturbed_one_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = trained(3)
    path = checkpoint.save(tmp_path, 3, model, optimizer, keep=2)
    assert path == checkpoint.path_of(tmp_path, 3) == tmp_path / "step_00000003"
    train(model, optimizer, range(3, 6))

    resumed = Model(seed=1)
    other = adamw(resumed)
    checkpoint.load(tmp_path, 3, resumed, other)
    train(resumed, other, range(3, 6))
    assert_same_state(model, resumed)
    for a, b in zip(optimizer.param_groups, other.param_groups, strict=True):
        for p, q in zip(a["params"], b["params"], strict=True):
            for name, value in optimizer.state[p].items():
                assert torch.equal(value, other.state[q][name]), name


def test_loading_brings_the_optimizers_options_too(tmp_path: Path) -> None:
    model, optimizer = trained()
    for group in optimizer.param_groups:
        group["lr"] = 0.125
    checkpoint.save(tmp_path, 3, model, optimizer, keep=2)
    resumed = Model(seed=1)
    other = adamw(resumed)
    checkpoint.load(tmp_path, 3, resumed, other)
    assert [group["lr"] for group in other.param_groups] == [0.125, 0.125]
    assert [group["weight_decay"] for group in other.param_groups] == [0.2, 0.0]


def test_saving_changes_nothing(tmp_path: Path) -> None:
    (saved, optimizer), (plain, other) = trained(), trained()
    checkpoint.save(tmp_path, 3, saved, optimizer, keep=2)
    train(saved, optimizer, range(3, 6))
    train(plain, other, range(3, 6))
    assert_same_state(saved, plain)


def test_a_training_can_be_saved_before_its_first_step(tmp_path: Path) -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoint.save(tmp_path, 0, model, adamw(model), keep=2)
    resumed = Model(seed=1)
    checkpoint.load(tmp_path, 0, resumed, adamw(resumed))
    for name, value in before.items():
        assert torch.equal(value, model.state_dict()[name]), name
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_frozen_parameters_come_along_and_stay_frozen(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path, 3, model, optimizer, keep=2)
    resumed = Model(seed=1)
    checkpoint.load(tmp_path, 3, resumed, adamw(resumed))
    assert torch.equal(model.trunk.weight, resumed.trunk.weight)
    assert not resumed.trunk.weight.requires_grad and resumed.tail.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_number_formats_survive(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    checkpoint.save(tmp_path, 1, model, torch.optim.AdamW(model.parameters()), keep=1)
    state = checkpoint.load_model_state(tmp_path, 1)
    assert state["weight"].dtype == dtype and torch.equal(state["weight"], model.weight)


# --- the model alone ---------------------------------------------------------------------------


def test_the_models_state_can_be_had_alone(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path, 3, model, optimizer, keep=2)
    state = checkpoint.load_model_state(tmp_path, 3)
    fresh = Model(seed=1)
    fresh.load_state_dict(state)  # strict: the same names, nothing of the optimizer
    assert_same_state(model, fresh)


# --- the newest few ----------------------------------------------------------------------------


def test_the_newest_are_kept(tmp_path: Path) -> None:
    model, optimizer = trained()
    assert checkpoint.steps(tmp_path / "none yet") == []
    for step in (5, 10, 15, 100):
        checkpoint.save(tmp_path, step, model, optimizer, keep=2)
    assert checkpoint.steps(tmp_path) == [15, 100]
    assert files(tmp_path) == ["step_00000015", "step_00000100"]


def test_steps_are_numbers_and_other_names_are_not_steps(tmp_path: Path) -> None:
    for name in ("step_00000010", "step_100000000", "step_old", ".step_00000011.tmp", "steps"):
        (tmp_path / name).mkdir()
    assert checkpoint.steps(tmp_path) == [10, 100_000_000]


def test_no_fewer_than_one_is_kept(tmp_path: Path) -> None:
    model, optimizer = trained()
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.save(tmp_path, 1, model, optimizer, keep=0)
    assert files(tmp_path) == []


# --- killed saves ------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from mclclip import artifacts, checkpoint
from tests.unit.test_checkpoint import trained

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

model, optimizer = trained(4)
where = {"write": (checkpoint.state_dict_saver, "save"), "publish": (artifacts, "write_json"),
         "rename": (os, "rename"), "remove": (checkpoint.shutil, "rmtree")}[sys.argv[2]]
setattr(*where, die)
checkpoint.save(Path(sys.argv[1]), 4, model, optimizer, keep=1)
"""


@pytest.mark.parametrize(
    ("moment", "left"), [("write", [3]), ("publish", [3]), ("rename", [3]), ("remove", [4])]
)
def test_a_killed_save_leaves_a_whole_checkpoint(
    tmp_path: Path, moment: str, left: list[int]
) -> None:
    model, optimizer = trained(3)
    checkpoint.save(tmp_path, 3, model, optimizer, keep=1)
    command = [sys.executable, "-c", KILLED, str(tmp_path), moment]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert checkpoint.steps(tmp_path) == left
    assert any(name.endswith(".tmp") for name in files(tmp_path))

    resumed = Model(seed=1)
    other = adamw(resumed)
    checkpoint.load(tmp_path, left[0], resumed, other)
    assert_same_state(resumed, trained(left[0])[0])
    checkpoint.save(tmp_path, 5, resumed, other, keep=1)
    assert files(tmp_path) == ["step_00000005"]  # the leftovers are gone


# --- damage ------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    data = next(path.glob("*.distcp"))
    if how == "cut short":
        os.truncate(data, data.stat().st_size // 2)
    elif how == "emptied":
        os.truncate(data, 0)
    elif how == "file gone":
        data.unlink()
    elif how == "overwritten":
        data.write_bytes(b"\xff" * data.stat().st_size)
    elif how == "metadata gone":
        (path / ".metadata").unlink()
    elif how == "metadata cut short":
        os.truncate(path / ".metadata", 20)


@pytest.mark.parametrize(
    "how",
    ["cut short", "emptied", "file gone", "overwritten", "metadata gone", "metadata cut short"],
)
def test_damage_is_one_line_that_names_the_directory(tmp_path: Path, how: str) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 3, model, optimizer, keep=2)
    damage(path, how)
    resumed = Model(seed=1)
    other = adamw(resumed)
    for read in (
        lambda: checkpoint.load(tmp_path, 3, resumed, other),
        lambda: checkpoint.load_model_state(tmp_path, 3),
    ):
        with pytest.raises(RuntimeError) as caught:
            read()
        line = str(caught.value)
        assert line.startswith(f"the checkpoint {path} cannot be read (") and "\n" not in line
        assert len(line) < 600 and "Traceback" not in line
        assert "remove that directory to resume from the one before" in line


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    with pytest.raises(RuntimeError, match=r"the checkpoint .*step_00000007 cannot be read"):
        checkpoint.load(tmp_path, 7, model, optimizer)


def test_a_checkpoint_of_another_model_does_not_fit(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    checkpoint.save(tmp_path, 1, model, torch.optim.AdamW(model.parameters()), keep=1)
    for other in (nn.Linear(4, 5), Model()):
        with pytest.raises(RuntimeError, match=r"step_00000001 (cannot be read|does not fit)"):
            checkpoint.load(tmp_path, 1, other, adamw(other))


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path, 3, model, optimizer, keep=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.torch.save", full)
    with pytest.raises(RuntimeError) as caught:
        checkpoint.save(tmp_path, 4, model, optimizer, keep=1)
    line = str(caught.value)
    assert str(tmp_path / "step_00000004") in line and "No space left on device" in line
    assert "\n" not in line and checkpoint.steps(tmp_path) == [3]
