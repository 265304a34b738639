"""Errors of a disk that takes no more: a limit on the size of files stands for it."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from mclclip.data.arrays import save_npy
from mclclip.models import weights
from mclclip.ranks import failures
from mclclip.run.lock import write_state
from mclclip.util import files


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes (errno EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_arrow(path: Path) -> None:
    table = pa.table({"x": np.arange(1000)})
    with files.whole_file(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: files.write_bytes(path, bytes(5000)),
        lambda path: save_npy(path, np.zeros(1000)),
        lambda path: weights.write_tensors(path, {"w": torch.zeros(1000)}),
        write_arrow,
    ],
    ids=["bytes", "array", "weights", "arrow"],
)
def test_the_error_names_the_file_and_what_to_do(tmp_path: Path, write: object) -> None:
    path = tmp_path / "artifact"
    with at_most(1000), pytest.raises(OSError) as caught:
        write(path)  # type: ignore[operator]
    line = failures.line_of(caught.value)
    assert line.startswith(f"{path} cannot be written (File too large): make room there"), line
    assert failures.is_for_the_user(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_error_of_another_file_keeps_its_name(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match="elsewhere"),
        files.with_path_in_errors(tmp_path / "written"),
    ):
        (tmp_path / "elsewhere").read_bytes()


def test_the_state_is_written_over_the_one_before(tmp_path: Path) -> None:
    """A full disk has room for it, since it always has one length."""
    write_state(tmp_path, "finished", verb="index", exit_code=0, requeue=False, reason="")
    path = tmp_path / "run_state.json"
    number, size = path.stat().st_ino, path.stat().st_size
    reason = "no room " * 1000
    write_state(tmp_path, "failed", verb="train", exit_code=2, requeue=False, reason=reason)
    record = json.loads(path.read_text())
    assert (record["state"], record["verb"]) == ("failed", "train")
    assert path.stat().st_size == size
    assert path.stat().st_ino == number
