"""One process saves and resumes the same bits, finds damage, and keeps and removes old steps."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import obstore
import pytest
import torch
from torch import Tensor

from mclclip import config
from mclclip.checkpoint import CheckpointConfig, step_files
from mclclip.checkpoint.checkpoints import Checkpoints
from mclclip.run.artifacts import Artifact
from mclclip.util.stores import open_folder
from tests import forks
from tests.shard_server import s3_bucket

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES = {"tail.weight": (17, 5), "tail.bias": (5,), "scale": (), "wide": (64, 33)}


class Source:
    """A state of tensors of many shapes; it counts in ``loads`` how often it was replaced."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.state: dict[str, Tensor] = {"model.seen": torch.tensor(seed)}
        for name, size in SIZES.items():
            self.state[f"model.{name}"] = torch.randn(size, generator=rng).to(dtype)
            self.state[f"optimizer.{name}.exp_avg"] = torch.randn(size, generator=rng)
            self.state[f"optimizer.{name}.step"] = torch.tensor(float(seed))
        self.loads = 0

    def state_dict(self) -> dict[str, Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        assert state.keys() == self.state.keys()
        self.state, self.loads = dict(state), self.loads + 1


def assert_same(a: Source, b: Source) -> None:
    assert a.state.keys() == b.state.keys()
    for name, value in a.state.items():
        assert torch.equal(value, b.state[name]) and value.dtype == b.state[name].dtype, name


def saved(
    directory: Path, *steps: int, identity: dict[str, Any] | None = None, **options: Any
) -> Checkpoints:
    """Saves ``Source(seed=step)`` for each of the steps."""
    checkpoints = Checkpoints(
        directory, CheckpointConfig(**{"keep": 9} | options), identity=identity or {}
    )
    for step in steps:
        checkpoints.save(step, Source(step))
    checkpoints.wait()
    return checkpoints


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sure that caplog gets mclclip's log, whatever other tests have set up."""
    monkeypatch.setattr(logging.getLogger("mclclip"), "propagate", True)
    caplog.set_level(logging.INFO)


# --- round trip --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asynchronous", "dtype"), [(False, torch.float64), (True, torch.bfloat16)]
)
def test_what_is_resumed_is_what_was_saved(
    tmp_path: Path, asynchronous: bool, dtype: torch.dtype
) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=asynchronous))
    checkpoints.save(3, source := Source(3, dtype))
    checkpoints.wait()
    assert files(tmp_path) == ["step_00000003"]
    target = Source(1, dtype)
    assert Checkpoints(tmp_path, CheckpointConfig()).resume(target) == 3
    assert_same(target, source)
    assert target.loads == 1


def test_the_same_step_is_written_once_and_replaced_by_a_later_start(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 3)
    inode = (tmp_path / "step_00000003").stat().st_ino
    checkpoints.save(3, Source(3))
    assert (tmp_path / "step_00000003").stat().st_ino == inode
    Checkpoints(tmp_path, CheckpointConfig(keep=1)).save(3, Source(5))
    assert files(tmp_path) == ["step_00000003"]
    target = Source(1)
    checkpoints.resume(target)
    assert_same(target, Source(5))


# --- the model alone ---------------------------------------------------------------------------


def test_what_a_finished_training_has_left(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run 'mclclip train' first"):
        step_files.trained_state(tmp_path, averaged=False)
    artifact = Artifact(tmp_path, kind="train", config={"stage": 1}, inputs={}).compare(write=True)
    artifact.finish({"steps": 4})
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 4"):
        step_files.trained_state(tmp_path, averaged=False)
    saved(tmp_path / "checkpoints", 4, identity={"stage": 0, "digest": artifact.identity})
    with pytest.raises(RuntimeError, match="stage 0; this one has stage 1"):
        step_files.trained_state(tmp_path, averaged=False)
    identity, source = {"stage": 1, "digest": artifact.identity}, Source(4)
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(), identity=identity)
    source.state["ema.scale"] = torch.tensor(0.5)
    checkpoints.save(4, source)
    assert (
        step_files.trained_state(tmp_path, averaged=False)["scale"] == source.state["model.scale"]
    )
    averaged = step_files.trained_state(tmp_path, averaged=True)
    assert averaged["scale"] == 0.5
    assert torch.equal(averaged["tail.weight"], source.state["model.tail.weight"])


# --- of which training they are ----------------------------------------------------------------

IDENTITY = {"stage": 1, "variant": "mcl", "digest": "abc"}


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"stage": 0}, r"stage 0; this one has stage 1"),
        ({"digest": "def"}, r"other options or inputs"),
    ],
)
def test_one_of_another_training_is_refused_in_one_line(
    tmp_path: Path, other: dict[str, Any], what: str
) -> None:
    """Its tensors fit the model, so only its identity shows that it is another training's."""
    saved(tmp_path, 4, 8, identity=IDENTITY | other)
    target = Source(1)
    with pytest.raises(RuntimeError, match=rf"step_00000008 is of another training.*{what}") as e:
        Checkpoints(tmp_path, CheckpointConfig(), identity=IDENTITY).resume(target)
    assert "\n" not in str(e.value) and target.loads == 0
    assert files(tmp_path) == ["step_00000004", "step_00000008"]
    assert Checkpoints(tmp_path, CheckpointConfig(), identity=IDENTITY | other).resume(target) == 8


# --- which are kept ----------------------------------------------------------------------------


def test_the_newest_are_kept_and_some_for_good(tmp_path: Path) -> None:
    assert step_files.steps(tmp_path / "none yet") == []
    for name in ("step_100000000", "step_old", ".step_00000011.tmp", "steps"):
        (tmp_path / "named" / name).mkdir(parents=True)
    assert step_files.steps(tmp_path / "named") == [100_000_000]
    assert saved(tmp_path / "a", 5, 10, 100, keep=2).steps() == [10, 100]
    steps = range(2, 22, 2)
    assert saved(tmp_path / "b", *steps, keep=2, keep_every=6).steps() == [6, 12, 18, 20]


def finished(folder: Path, *steps: int, counts: dict[str, int]) -> Path:
    """Makes a finished training that has saved ``steps``."""
    Artifact(folder, kind="train", config={}, inputs={}).compare(write=True).finish(counts)
    saved(folder / "checkpoints", *steps, keep=9)
    return folder / "checkpoints"


def test_of_a_finished_training_what_is_read_stays(tmp_path: Path) -> None:
    """The last and the exported step stay, and those of ``keep_every``, after a second call too."""
    folder = finished(tmp_path, 2, 4, 6, 8, 9, counts={"steps": 9, "exported_step": 4})
    for keep_every, left in ((3, [4, 6, 9]), (None, [4, 9]), (None, [4, 9])):
        step_files.keep_finished(tmp_path, keep_every)
        assert step_files.steps(folder) == left


@pytest.mark.parametrize("damaged", [4, 9])
def test_of_a_finished_training_whose_end_is_damaged_all_stay(tmp_path: Path, damaged: int) -> None:
    folder = finished(tmp_path, 2, 4, 9, counts={"steps": 9, "exported_step": 4})
    os.truncate(folder / f"step_{damaged:08d}" / "__0_0.distcp", 100)
    step_files.keep_finished(tmp_path, None)
    assert step_files.steps(folder) == [2, 4, 9]


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["os.rename", "shutil.rmtree"])
def test_a_kill_while_old_steps_are_removed_loses_nothing(tmp_path: Path, moment: str) -> None:
    folder = finished(tmp_path, 2, 4, 9, counts={"steps": 9})

    def killed() -> None:
        owner, name = {"os.rename": (os, "rename"), "shutil.rmtree": (shutil, "rmtree")}[moment]
        setattr(owner, name, die)
        step_files.keep_finished(tmp_path, None)

    assert forks.exit_code(killed) == -signal.SIGKILL
    assert step_files.steps(folder)[-1] == 9
    step_files.keep_finished(tmp_path, None)
    assert files(folder) == ["step_00000009"]


# --- killed saves ------------------------------------------------------------------------------

MOMENTS: dict[str, Any] = {
    "write": (step_files, "write"),
    "publish": (step_files.files, "write_json"),
    "rename": (os, "rename"),
    "remove": (step_files.shutil, "rmtree"),
}


@pytest.mark.parametrize(
    ("moment", "left", "asynchronous"),
    [("write", 3, True), ("publish", 3, False), ("rename", 3, True), ("remove", 4, False)],
)
def test_a_killed_save_leaves_a_whole_checkpoint(
    tmp_path: Path, moment: str, left: int, asynchronous: bool
) -> None:
    saved(tmp_path, 3, keep=1)

    def killed() -> None:
        options = CheckpointConfig(keep=1, asynchronous=asynchronous)
        checkpoints = Checkpoints(tmp_path, options)
        setattr(*MOMENTS[moment], die)
        checkpoints.save(4, Source(4))
        checkpoints.wait()

    assert forks.exit_code(killed) == -signal.SIGKILL
    assert step_files.steps(tmp_path) == [left]
    assert any(name.endswith(".tmp") for name in files(tmp_path))

    target = Source(1)
    assert Checkpoints(tmp_path, CheckpointConfig(keep=1)).resume(target) == left
    assert_same(target, Source(left))
    assert files(tmp_path) == [f"step_{left:08d}"]  # the leftovers are gone


# --- damage ------------------------------------------------------------------------------------


BAD_LIST = "state.json is missing or damaged"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "data cut short": (lambda p: os.truncate(p / "__0_0.distcp", 100), "has 100 bytes, not"),
    "data gone": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "list gone": (lambda p: (p / "state.json").unlink(), BAD_LIST),
    "list of nothing": (lambda p: (p / "state.json").write_text("[]"), BAD_LIST),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_the_one_before_is_used_instead_of_a_damaged_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    saved(tmp_path, 4, 6, 8)
    damage, what = DAMAGE[how]
    damage(tmp_path / "step_00000008")
    damage_of_six, _ = DAMAGE["data gone"]
    damage_of_six(tmp_path / "step_00000006")
    with pytest.raises(RuntimeError, match="step_00000008 cannot be read") as caught:
        step_files.load_model_state(tmp_path, 8)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600

    target = Source(1)
    assert Checkpoints(tmp_path, CheckpointConfig()).resume(target) == 4
    assert_same(target, Source(4))
    (line,) = warnings_of(caplog)
    assert "step 8 (" in line and what in line and "step 6 (" in line and "using step 4" in line
    assert files(tmp_path) == [".damaged_step_00000006", ".damaged_step_00000008", "step_00000004"]
    caplog.clear()
    assert saved(tmp_path, 6, 8, keep=2).steps() == [6, 8]
    assert len(files(tmp_path)) == 4  # the damaged ones are neither counted nor removed
    assert Checkpoints(tmp_path, CheckpointConfig()).resume(target) == 8 and not warnings_of(caplog)


# --- failed saves ------------------------------------------------------------------------------


def break_in(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    owner: Any = {
        "data": (step_files, "write"),
        "list": (step_files.files, "write_json"),
        "rename": (step_files.os, "rename"),
        "folder": (Path, "mkdir"),
    }[where]
    monkeypatch.setattr(*owner, full)


@pytest.mark.parametrize(
    ("where", "asynchronous"),
    [("data", True), ("list", False), ("rename", True), ("folder", False)],
)
def test_a_failed_save_stops_with_one_line(tmp_path: Path, where: str, asynchronous: bool) -> None:
    saved(tmp_path, 3, keep=1)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1, asynchronous=asynchronous))
    with pytest.MonkeyPatch.context() as patch:
        break_in(where, patch)
        with pytest.raises(RuntimeError) as caught:
            checkpoints.save(4, Source(4))
            checkpoints.wait()
    line = str(caught.value)
    assert f"{tmp_path / 'step_00000004'} cannot be written" in line and "\n" not in line
    assert "No space left on device" in line
    assert files(tmp_path) == ["step_00000003"] and checkpoints.saved is None
    checkpoints.save(5, Source(5))
    checkpoints.wait()
    assert checkpoints.steps() == [5] and checkpoints.saved == 5


def test_an_interrupt_is_not_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.torch.save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path, CheckpointConfig(keep=1)).save(3, Source(3))


# --- the mirror --------------------------------------------------------------------------------


@pytest.fixture
def mirror(tmp_path: Path) -> str:
    """Returns an empty mirror."""
    return str(tmp_path / "mirror")


def store_of(mirror: str) -> Any:
    return open_folder(mirror, retries=0, timeout_s=60.0)


def names_at(mirror: str) -> list[str]:
    paths = [entry["path"] for entry in obstore.list(store_of(mirror)).collect()]
    return sorted({path.partition("/")[0] for path in paths})


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_fresh_disk_gets_the_newest_of_the_mirror_in_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "folder":  # a store takes no part below 5 MiB
        monkeypatch.setattr("mclclip.checkpoint.mirror.BLOCK_BYTES", 100)
    with s3_bucket(monkeypatch) if kind == "s3" else nullcontext() as bucket:
        mirror = f"s3://{bucket.name}/runs/mine" if bucket else str(tmp_path / "mirror")
        target = Source(1)
        fresh = Checkpoints(tmp_path / "b", CheckpointConfig(mirror=mirror))
        assert fresh.resume(target) == target.loads == 0 and not (tmp_path / "b").exists()
        saved(tmp_path / "a", *range(2, 14, 2), keep=2, keep_every=4, mirror=mirror)
        assert names_at(mirror) == [f"step_{step:08d}" for step in (4, 8, 10, 12)]
        assert fresh.resume(target) == 12
        fresh.wait()  # no round goes on when the store is closed
    assert_same(target, Source(12))
    (line,) = warnings_of(caplog)
    assert "no checkpoint here, using step 12 of the mirror" in line
    assert Checkpoints(tmp_path / "b", CheckpointConfig()).resume(target) == 12


def test_a_damaged_copy_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mirror: str
) -> None:
    saved(tmp_path / "a", 2, 4, 6, 8, mirror=mirror)
    store, data = store_of(mirror), "step_00000006/__0_0.distcp"
    obstore.delete(store, "step_00000008/state.json")  # a copy that was never finished
    obstore.put(store, data, obstore.get(store, data).bytes().to_bytes()[:-1])
    os.truncate(tmp_path / "a" / "step_00000002" / "__0_0.distcp", 100)
    for step in (4, 6, 8):
        shutil.rmtree(tmp_path / "a" / f"step_{step:08d}")
    target = Source(1)
    checkpoints = Checkpoints(tmp_path / "a", CheckpointConfig(mirror=mirror))
    assert checkpoints.resume(target) == 4
    checkpoints.wait()
    assert_same(target, Source(4))
    (line,) = warnings_of(caplog)
    assert "step 2 (" in line and "step 6 (" in line and "using step 4 of the mirror" in line


def test_a_failing_mirror_is_a_counted_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mirror").write_text("a file where a folder should be")
    checkpoints = saved(tmp_path / "a", 2, 4, mirror=str(tmp_path / "mirror"))
    assert checkpoints.steps() == [2, 4]
    assert checkpoints.mirror is not None and checkpoints.mirror.failures == 2
    assert [f"failure {n}" in line for n, line in enumerate(warnings_of(caplog), 1)] == [True] * 2
    (tmp_path / "mirror").unlink()  # the next round brings over what was missed
    checkpoints.save(6, Source(6))
    checkpoints.wait()
    assert names_at(str(tmp_path / "mirror")) == [f"step_{n:08d}" for n in (2, 4, 6)]


def test_a_training_without_a_checkpoint_does_not_begin_anew_while_its_mirror_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = tmp_path / "mirror"
    mirror.write_text("a file where a folder should be")
    with pytest.raises(RuntimeError, match="mirror"):
        Checkpoints(tmp_path / "a", CheckpointConfig(mirror=str(mirror))).resume(Source(1))
    mirror.unlink()
    saved(tmp_path / "a", 2, mirror=str(mirror))

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no answer")

    fresh = Checkpoints(tmp_path / "b", CheckpointConfig(mirror=str(mirror)))
    with monkeypatch.context() as broken:
        broken.setattr(obstore, "get_range", fails)
        with pytest.raises(RuntimeError, match="mirror"):
            fresh.resume(Source(1))
    assert fresh.steps() == [] and fresh.resume(Source(1)) == 2


def test_a_step_that_the_disk_has_no_room_for_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: str
) -> None:
    saved(tmp_path / "a", 2, mirror=mirror)
    size = sum(path.stat().st_size for path in (tmp_path / "a/step_00000002").iterdir())
    fresh = Checkpoints(tmp_path / "b", CheckpointConfig(mirror=mirror))
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size - 1))
        with pytest.raises(ValueError, match="step 2 of the mirror"):
            fresh.resume(Source(1))
    assert not (tmp_path / "b").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size))
    assert fresh.resume(Source(1)) == 2
    fresh.wait()


def test_a_damaged_step_does_not_keep_others_from_the_mirror(tmp_path: Path, mirror: str) -> None:
    saved(tmp_path / "a", 2, 4)
    os.truncate(tmp_path / "a" / "step_00000004" / "__0_0.distcp", 100)
    copying = Checkpoints(tmp_path / "a", CheckpointConfig(mirror=mirror))
    assert copying.mirror is not None
    copying.mirror.start_round()
    copying.wait()
    assert names_at(mirror) == ["step_00000002"] and copying.mirror.failures == 1


def test_what_a_kill_leaves_of_a_file_in_a_folder_goes_with_the_next_round(tmp_path: Path) -> None:
    for step in (2, 3):
        folder = tmp_path / "mirror" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp#1").write_bytes(b"half")
    (tmp_path / "mirror" / "notes#1").touch()
    saved(tmp_path / "a", 2, mirror=str(tmp_path / "mirror"))
    left = {path.name for path in (tmp_path / "mirror").rglob("*")}
    assert left == {"notes#1", "step_00000002", ".metadata", "__0_0.distcp", "state.json"}


@pytest.mark.parametrize(
    "url",
    ["http://host/run", "hf://datasets/a/b/run", "s3://user:SECRET@b/run", "file:///mnt/run", ""],
)
def test_a_mirror_that_cannot_be_written_to_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="mirror") as refused:
        config.from_tree({"run_dir": "run", "train": {"checkpoint": {"mirror": url}}})
    assert "SECRET" not in str(refused.value)


def test_a_slow_mirror_holds_up_neither_training_nor_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: str
) -> None:
    begun, go_on, original = threading.Event(), threading.Event(), obstore.put

    def slow(*args: Any, **options: Any) -> None:
        begun.set()
        assert go_on.wait(300)
        original(*args, **options)

    monkeypatch.setattr(obstore, "put", slow)
    checkpoints = Checkpoints(tmp_path / "a", CheckpointConfig(keep=1, mirror=mirror))
    checkpoints.save(2, Source(2))
    assert begun.wait(300)
    checkpoints.save(4, Source(4))
    assert checkpoints.steps() == [2, 4]  # 2 is still being read
    go_on.set()
    checkpoints.wait()
    assert checkpoints.steps() == [4] and names_at(mirror) == ["step_00000004"]
