"""Data that never comes: who waits for it hears, is told what it waits for, and leaves.

Loader workers are stopped (SIGSTOP) in the midst of a run, or a read never returns.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip import checkpoint
from mclclip.data.sample_index import SampleIndex
from tests.e2e.conftest import Finished, RecordBatches, Send, Shell, Touch, state_of
from tests.matrix import in_soak, kept

LIMIT_S = 240.0  # of a command that would never end, on a busy machine
OPTIONS = ("base.steps=8", "base.checkpoint.every=2", "base.log_every=1", "poll_s=0.1")


@dataclass(frozen=True)
class Silence:
    """As the n-th batch is waited for, on ``rank``, reading stops for ever; then ``then`` happens.

    With workers these are stopped; without, a read waits for a pipe into which nobody writes.
    """

    count: int
    rank: int = 0
    then: Callable[[], None] | None = None
    after_s: float = 0.5

    def __call__(self) -> None:
        from mclclip.ranks import data_wait
        from mclclip.train import parts

        setattr(data_wait, "PATIENCE_S", 0.5)  # noqa: B010
        setattr(parts, "STARTED", time.monotonic())  # noqa: B010
        if int(os.environ.get("RANK", "0")) != self.rank:
            return
        from torch.utils.data import dataloader

        iterator: Any = dataloader._BaseDataLoaderIter
        original, calls = iterator.__next__, itertools.count(1)

        def following(own: Any) -> Any:
            if next(calls) == self.count:
                self._silence(own._num_workers)
            return original(own)

        setattr(iterator, "__next__", following)  # noqa: B010

    def _silence(self, num_workers: int) -> None:
        if num_workers:
            Send(signal.SIGSTOP, ("workers",))()
        else:
            read, _ = os.pipe()
            setattr(os, "pread", lambda *_: os.read(read, 1))  # noqa: B010
        if self.then is not None:
            threading.Timer(self.after_s, self.then).start()


def train(
    shell: Shell, indexed: tuple[Path, Path], run_dir: Path, *options: str, **call: Any
) -> tuple[Finished, float]:
    """Trains in a copy of the indexed run; how it ended, and after how many seconds."""
    if not run_dir.exists():
        shutil.copytree(indexed[1], run_dir)
    start = time.monotonic()
    words = ("train", "--stage", 0, "--config", indexed[0], f"run_dir={run_dir}", *options)
    finished = shell(*words, **call)
    return finished, time.monotonic() - start


def saved(run_dir: Path) -> list[int]:
    return checkpoint.steps(run_dir / "stage_0/train/checkpoints")


@pytest.mark.parametrize(
    ("how", "workers"),
    kept(
        [
            (how, workers)
            for how in ("SIGTERM", "SIGHUP", "stop", "wall_time")
            for workers in (1, 0)
        ],
        0,
    ),
)
def test_a_rank_that_waits_hears_a_request(
    shell: Shell, indexed: Any, tmp_path: Path, how: str, workers: int
) -> None:
    """One rank is between two steps, so that it saves what it has done."""
    run_dir = tmp_path / "run"
    then = Touch(run_dir / "stop") if how == "stop" else None
    if how.startswith("SIG"):
        then = Send(getattr(signal, how))
    options = [f"data.num_workers={workers}"] + (["wall_time_s=10"] if how == "wall_time" else [])
    inside = Silence(4, then=then)
    left, took = train(shell, indexed, run_dir, *options, inside=inside, timeout_s=LIMIT_S)
    assert left.code == 85, left.stderrs
    assert "Traceback" not in left.stderr and took < LIMIT_S
    reasons = {"stop": "the file 'stop'", "wall_time": "the wall-time limit"}
    state = state_of(run_dir)
    assert (state["state"], state["reason"]) == ("preempted", reasons.get(how, how))
    assert state["requeue"] is (how != "stop") and not (run_dir / "stop").exists()
    # Batches that a worker had read in advance are trained on before the silence is felt.
    assert saved(run_dir)[-1] in ((3,) if not workers else (3, 4, 5, 6))


@pytest.mark.parametrize("workers", kept([1, 0], 0))
def test_the_limit_names_worker_and_shard(
    shell: Shell, indexed: Any, tmp_path: Path, workers: int
) -> None:
    options = [f"data.num_workers={workers}", "peer_timeout_s=6"]
    left, took = train(
        shell, indexed, tmp_path / "run", *options, inside=Silence(4), timeout_s=LIMIT_S
    )
    assert left.code == 1 and took < LIMIT_S, left.stderrs
    (line,) = left.complaints()
    who = "loader worker 0 (process " if workers else "this process"
    assert who in line and ".tar" in line and "for 6 s (peer_timeout_s)" in line, line
    assert ("stopped" in line) is bool(workers) and "Traceback" not in left.stderr
    state = state_of(tmp_path / "run")
    assert (state["state"], state["exit_code"], state["requeue"]) == ("failed", 1, True)


@pytest.mark.parametrize("how", kept(["stop", "SIGTERM", "limit"], 0))
def test_the_others_leave_with_the_rank_that_waits(
    shell: Shell, indexed: Any, tmp_path: Path, how: str
) -> None:
    """They wait for it in a collective, where they hear nothing."""
    run_dir = tmp_path / "run"
    then = {"SIGTERM": Send(signal.SIGTERM), "stop": Touch(run_dir / "stop"), "limit": None}[how]
    options = ["data.num_workers=1"] + (["peer_timeout_s=6"] if how == "limit" else [])
    left, took = train(
        shell,
        indexed,
        run_dir,
        *options,
        ranks=2,
        inside=Silence(4, rank=1, then=then),
        timeout_s=LIMIT_S,
    )
    state = state_of(run_dir)
    assert "Traceback" not in "".join(left.stderrs) and took < LIMIT_S
    assert state["requeue"] is (how != "stop"), (state, left.stderrs)
    if how == "limit":
        assert left.code == 1, left.stderrs
        assert state["state"] == "failed" and "loader worker 0 (process " in state["reason"], state
    else:
        assert left.code == 85, left.stderrs
        assert state["state"] == "preempted" and how in state["reason"]
    assert saved(run_dir)[-1] % 2 == 0  # nothing new: the other rank was in the midst of a step


@dataclass(frozen=True)
class Undecodable:
    """Decoding the image with this CRC-32 never returns, or (not ``hangs``) finds no picture."""

    crc32: int
    hangs: bool = True
    then: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        from mclclip.data import samples

        decode = samples.decode

        def meeting(data: bytes, *arguments: Any) -> Any:
            if zlib.crc32(data) != self.crc32:
                return decode(data, *arguments)
            while self.hangs:
                time.sleep(0.1)
            raise samples.DecodeError("broken")

        setattr(samples, "decode", meeting)  # noqa: B010
        self.then()


@pytest.mark.parametrize(
    ("ranks", "workers", "first"),
    kept([(1, 1, False), (2, 1, False), (1, 0, False), (1, 1, True)], 0),
)
def test_a_sample_that_ends_two_starts_is_left_out_of_the_third(
    shell: Shell, indexed: Any, tmp_path: Path, ranks: int, workers: int, first: bool
) -> None:
    """``first``: it is the index's first one, which is decoded before the training begins."""
    index = SampleIndex.open(indexed[1] / "index")
    sample_id = 0 if first else 100
    place = index.image_offset[sample_id], index.image_size[sample_id]
    with open(index.shards[int(index.shard_of[sample_id])].path, "rb") as shard:
        shard.seek(place[0])
        crc32 = zlib.crc32(shard.read(place[1]))
    key, run_dir, option = (
        index.keys([sample_id])[0],
        tmp_path / "run",
        f"data.num_workers={workers}",
    )
    ends = []
    for start in range(8):  # a busy machine may reach the limit of three seconds elsewhere too
        batches = RecordBatches(tmp_path / f"start_{start}")
        limit = f"peer_timeout_s={3 if sum(key in line for line in ends) < 2 else 600}"
        left, took = train(
            shell,
            indexed,
            run_dir,
            option,
            limit,
            ranks=ranks,
            inside=Undecodable(crc32, then=batches),
            timeout_s=LIMIT_S,
        )
        assert took < LIMIT_S and "Traceback" not in "".join(left.stderrs), left.stderrs
        if left.code == 0:
            break
        assert left.code == 1 and state_of(run_dir)["requeue"] is True
        ends.append(state_of(run_dir)["reason"])
    noted = [line for line in ends if f"sample {key} was being decoded" in line]
    assert len(noted) == 2 and left.code == 0, (ends, left.stderrs)
    assert "left out if that happens again" in noted[0] and "from now on" in noted[1], noted
    assert SampleIndex.open(run_dir / "index").bad_samples()[key]["reason"] == "timeout"
    broken = RecordBatches(tmp_path / "broken")
    inside = Undecodable(crc32, hangs=False, then=broken)
    train(shell, indexed, tmp_path / "other", option, inside=inside)
    wanted = broken.sample_ids()
    np.testing.assert_array_equal(
        batches.sample_ids(ranks), wanted[len(wanted) - len(batches.sample_ids(ranks)) :]
    )
    assert first or sample_id not in wanted


@in_soak
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("verb", ["embed", "eval"])
def test_embedding_and_evaluation_wait_in_the_same_way(
    shell: Shell, indexed: Any, tmp_path: Path, verb: str, ranks: int
) -> None:
    run_dir = tmp_path / "run"
    done, _ = train(shell, indexed, run_dir)
    assert done.code == 0
    shell.ok("export", "--stage", 0, "--config", indexed[0], f"run_dir={run_dir}")
    words = ["embed", "--stage", 0] if verb == "embed" else ["eval"]
    options = ["data.num_workers=1", "embed.batch_size=8", "eval.batch_size=2", "peer_timeout_s=6"]
    left = shell(
        *words,
        "--config",
        indexed[0],
        f"run_dir={run_dir}",
        *options,
        ranks=ranks,
        inside=Silence(2, rank=ranks - 1),
        timeout_s=LIMIT_S,
    )
    assert left.code == 1, left.stderrs
    state = state_of(run_dir)
    assert state["requeue"] is True and "loader worker 0 (process " in state["reason"], state
    assert "Traceback" not in "".join(left.stderrs)


@pytest.mark.parametrize("ranks", kept([1, 2], 0))
def test_a_worker_that_was_killed_is_named(
    shell: Shell, indexed: Any, tmp_path: Path, ranks: int
) -> None:
    """By the kernel, where memory ran out: no error of mclclip, and the job may start again."""
    run_dir = tmp_path / "run"
    inside = Silence(4, rank=ranks - 1, then=Send(signal.SIGKILL, ("workers",)))
    left, took = train(
        shell, indexed, run_dir, "data.num_workers=1", ranks=ranks, inside=inside, timeout_s=LIMIT_S
    )
    assert left.code == 1 and took < LIMIT_S, left.stderrs
    assert "Traceback" not in "".join(left.stderrs)
    state = state_of(run_dir)
    assert (state["state"], state["exit_code"], state["requeue"]) == ("failed", 1, True)
    reason = state["reason"]
    assert "loader worker " in reason and "(SIGKILL)" in reason, reason
    assert "memory ran out" in reason
    assert "data.num_workers" in reason
    again, _ = train(shell, indexed, run_dir, "data.num_workers=1", ranks=ranks)
    assert again.code == 0, again.stderrs
