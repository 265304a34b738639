"""A disk that really is full: a small tmpfs where the checkpoints go."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mclclip.checkpoint import step_files
from mclclip.run import artifacts
from tests import tiny
from tests.e2e.conftest import Shell, state_of
from tests.matrix import in_soak

Disk = Callable[[Path, int], Path]


@pytest.fixture
def disk() -> Iterator[Disk]:
    """``disk(folder, mib)`` makes ``folder`` a disk of its own, or gives that another size."""
    mounted: list[Path] = []

    def mount(folder: Path, mib: int) -> Path:
        again = folder in mounted
        folder.mkdir(parents=True, exist_ok=True)
        options = f"{'remount,' if again else ''}size={mib}m"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command here")
        if done.returncode:
            pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
        if not again:
            mounted.append(folder)
        return folder

    try:
        yield mount
    finally:
        for folder in mounted:
            subprocess.run(["umount", str(folder)], check=True)
            assert not folder.is_mount()


@in_soak
def test_a_training_on_a_full_disk(shell: Shell, disk: Disk, data: Path, tmp_path: Path) -> None:
    """One checkpoint fits, a second does not; with room the same command ends the training."""
    run_dir = tmp_path / "run"
    config = tiny.write_config(tmp_path / "config.yaml", run_dir, data)
    shell.ok("index", "--config", config)
    directory = run_dir / "stage_0/train/checkpoints"
    disk(directory, 16)
    command = ("train", "--stage", "0", "--config", config)
    complaint = shell.refused(*command, ranks=2)
    assert f"{directory}/step_00000004 cannot be written (" in complaint
    assert "No space left on device" in complaint
    assert [path.name for path in directory.iterdir()] == ["step_00000002"]
    assert not artifacts.is_finished(run_dir / "stage_0/train")

    disk(directory, 64)
    shell.ok(*command, ranks=2)
    assert step_files.steps(directory) == [6]
    assert artifacts.is_finished(run_dir / "stage_0/train")


# The folder that gets a disk of its own, and the verb that fills it.
FILLED = {
    "index": ("index", ("index",)),
    "embed": ("stage_0/embeddings", ("embed", "--stage", "0")),
    "cluster": ("stage_0/clusters", ("cluster", "--stage", "0")),
    "export": ("stage_0/export", ("export", "--stage", "0")),
    "join": ("exports", ("export",)),
}


@pytest.fixture(scope="module")
def whole(shell: Shell, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A configuration, and a whole run of one stage."""
    folder = tmp_path_factory.mktemp("full_disk")
    options = ("num_stages=1", "embed.batch_size=16", "base.steps=2", "train.steps=2")
    config = tiny.write_config(folder / "config.yaml", folder / "run", data, *options)
    shell.ok("run", "--config", config)
    return config, folder / "run"


@in_soak
@pytest.mark.parametrize("verb", FILLED)
def test_a_verb_on_a_full_disk(
    shell: Shell, whole: tuple[Path, Path], disk: Disk, tmp_path: Path, verb: str
) -> None:
    """One line with the path and what to do; the state is right; with room the command goes on."""
    config, finished = whole
    folder, words = FILLED[verb]
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    shutil.rmtree(run_dir / folder)
    fill(disk(run_dir / folder, 1))
    command = [*words, "--config", config, f"run_dir={run_dir}"]
    line = shell.refused(*command, ranks=2)
    assert f"{run_dir / folder}" in line and "No space left on device" in line, line
    assert "make room" in line
    state = state_of(run_dir)
    assert (state["state"], state["exit_code"], state["requeue"]) == ("failed", 2, False)
    disk(run_dir / folder, 64)
    (run_dir / folder / "filling").unlink()
    shell.ok(*command, ranks=2)


def test_a_run_directory_on_a_full_disk(
    shell: Shell, disk: Disk, data: Path, tmp_path: Path
) -> None:
    """Not even the state has room: it is written over the one before, which was of a finish."""
    run_dir = disk(tmp_path / "run", 4)
    config = tiny.write_config(tmp_path / "config.yaml", run_dir, data)
    shell.ok("index", "--config", config)
    fill(run_dir)
    line = shell.refused("train", "--stage", "0", "--config", config)
    assert str(run_dir) in line and "No space left on device" in line and "make room" in line
    state = state_of(run_dir)
    assert (state["state"], state["verb"], state["exit_code"]) == ("failed", "train", 2), state


def fill(folder: Path) -> None:
    """Leaves no byte."""
    with open(folder / "filling", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
