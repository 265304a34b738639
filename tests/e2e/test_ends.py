"""How real processes end when one of them is lost, under torchrun or as ``shell`` starts them.

What a request to leave comes to (signals, ``stop``, the wall-time limit) is in
``test_preemption.py``; here nobody asked. Nothing hangs longer than ``peer_timeout_s``, every end
is one line that says what is known, and the same command goes on with the same bits.
"""

from __future__ import annotations

import itertools
import os
import re
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

from mclclip.data.sample_index import SampleIndex
from tests import tiny
from tests.e2e.conftest import Finished, RecordBatches, Send, Shell, Started, state_of
from tests.e2e.started import rows_of
from tests.matrix import SOAK, in_soak, kept

STEPS, CUT_AFTER = 8, 3
LIMIT_S = 6.0  # peer_timeout_s
OPENING_S = 1.5 * LIMIT_S
BUSY_S = 60.0  # on a busy machine: torchrun looks every while, and asks before it kills
OPTIONS = (
    f"base.steps={STEPS}",
    "base.log_every=1",
    "base.checkpoint.every=2",
    "data.num_workers=1",
    "poll_s=0.1",
)


def words(indexed: tuple[Path, Path], run_dir: Path, *options: str) -> list[str]:
    """A training of stage 0 in a copy of the indexed run."""
    if not run_dir.exists():
        shutil.copytree(indexed[1], run_dir)
    config = str(indexed[0])
    return ["train", "--stage", "0", "--config", config, f"run_dir={run_dir}", *options]


# --- under torchrun -----------------------------------------------------------------------------


def start(indexed: tuple[Path, Path], run_dir: Path, *options: str) -> Started:
    """Trains with two ranks, until some steps are done."""
    command = tiny.command(*words(indexed, run_dir, *options), ranks=2)
    run = Started(command, run_dir, run_dir.with_suffix(".log"))
    deadline = time.monotonic() + 240
    while len(rows_of(run_dir)) < CUT_AFTER:
        assert run.launcher.poll() is None and time.monotonic() < deadline, run.log.read_text()
        time.sleep(0.01)
    return run


@in_soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [1, 0])
def test_a_lost_rank_ends_the_others(indexed: Any, tmp_path: Path, number: int, rank: int) -> None:
    """As in ``test_preemption.py``, and under torchrun, where ``test_kill.py`` has kills.

    torchrun kills what stands still 30 s after the others have ended, which only the soak waits
    for.
    """
    run_dir = tmp_path / "run"
    long = ("base.steps=100000", f"peer_timeout_s={LIMIT_S}")
    run = start(indexed, run_dir, *long)
    try:
        ranks = run.workers()
        os.kill(ranks[rank], number)
        deadline = time.monotonic() + LIMIT_S + BUSY_S
        while run.owns(ranks[1 - rank]) and not SOAK:
            assert time.monotonic() < deadline, run.log.read_text()
            time.sleep(0.01)
        if run.owns(ranks[rank]) and not SOAK:
            os.kill(ranks[rank], signal.SIGKILL)
        run.launcher.wait(LIMIT_S + BUSY_S)
        run.gone_after_s()
        log = run.log.read_text()
        assert run.launcher.returncode == 1, log
        if rank:  # the first rank prints
            (line,) = [line for line in log.splitlines() if line.startswith("mclclip: ")]
            assert "another rank has" in line and "in step" in line, line
            assert ("peer_timeout_s" in line) is (number == signal.SIGSTOP)
        state = state_of(run_dir)
        assert (state["state"], state["requeue"]) == ("failed", True)
    finally:
        run.end()


@dataclass(frozen=True)
class Slow:
    """The first rank's part of opening a training takes longer than the limit."""

    def __call__(self) -> None:
        from mclclip.ranks import collectives

        on_main = collectives.on_main

        def slowly(work: Callable[[], Any]) -> Any:
            setattr(collectives, "on_main", on_main)  # noqa: B010
            return on_main(lambda: (time.sleep(OPENING_S), work())[1])

        setattr(collectives, "on_main", slowly)  # noqa: B010


@pytest.mark.slow
def test_the_work_of_one_rank_is_waited_for_without_a_limit(
    shell: Shell, indexed: Any, tmp_path: Path
) -> None:
    since = time.monotonic()
    options = (f"peer_timeout_s={LIMIT_S}", "base.steps=2", "data.num_workers=0")
    shell.ok(*words(indexed, tmp_path / "run", *options), ranks=2, inside=Slow())
    assert time.monotonic() - since > OPENING_S


# --- data that does not come --------------------------------------------------------------------


@dataclass(frozen=True)
class Silence:
    """As the n-th batch is waited for, on ``rank``, the loader's workers are stopped for ever; then
    ``then`` happens."""

    count: int
    rank: int = 0
    then: Callable[[], None] | None = None

    def __call__(self) -> None:
        if int(os.environ.get("RANK", "0")) != self.rank:
            return
        from torch.utils.data import dataloader

        iterator: Any = dataloader._BaseDataLoaderIter
        original, calls = iterator.__next__, itertools.count(1)

        def following(own: Any) -> Any:
            if next(calls) == self.count:
                Send(signal.SIGSTOP, ("workers",))()
                if self.then is not None:
                    threading.Timer(0.5, self.then).start()
            return original(own)

        setattr(iterator, "__next__", following)  # noqa: B010


@pytest.mark.parametrize("ranks", kept([1, 2], 0))
def test_a_worker_that_was_killed_is_one_line_and_the_job_may_start_again(
    shell: Shell, indexed: Any, tmp_path: Path, ranks: int
) -> None:
    """By the kernel, where memory ran out, which is no error of mclclip."""
    run_dir = tmp_path / "run"
    inside = Silence(4, rank=ranks - 1, then=Send(signal.SIGKILL, ("workers",)))
    left = shell(*words(indexed, run_dir), ranks=ranks, inside=inside, timeout_s=100)
    # torch raises wherever the process is: Python reports what it raises within a finaliser.
    ignored = r"(?s)Exception ignored in.*?RuntimeError: DataLoader worker[^\n]*\n"
    told = re.sub(ignored, "", "".join(left.stderrs))
    assert left.code == 1 and "Traceback" not in told, told
    state = state_of(run_dir)
    assert (state["state"], state["exit_code"], state["requeue"]) == ("failed", 1, True)
    assert "memory ran out" in state["reason"] and "data.num_workers" in state["reason"]


@pytest.mark.parametrize("ranks", kept([1, 2], 0))
def test_workers_that_stand_still_end_the_run(
    shell: Shell, indexed: Any, tmp_path: Path, ranks: int
) -> None:
    """Also where they have batches ready, which the run has yet to take from them."""
    run_dir, inside = tmp_path / "run", Silence(4, rank=ranks - 1)
    limit = f"peer_timeout_s={LIMIT_S}"
    left = shell(*words(indexed, run_dir, limit), ranks=ranks, inside=inside, timeout_s=100)
    assert left.code == 1 and "Traceback" not in "".join(left.stderrs), left.stderrs
    assert "peer_timeout_s" in state_of(run_dir)["reason"]


# --- a sample that is left out ------------------------------------------------------------------


@dataclass(frozen=True)
class Undecodable:
    """Decoding the image with this CRC-32 never returns, or (not ``hangs``) finds no picture."""

    crc32: int
    hangs: bool
    then: Callable[[], None]

    def __call__(self) -> None:
        from mclclip.data import samples

        decode = samples.decode

        def meet(data: bytes, *arguments: Any) -> Any:
            if zlib.crc32(data) != self.crc32:
                return decode(data, *arguments)
            while self.hangs:
                time.sleep(0.1)
            raise samples.DecodeError("broken")

        setattr(samples, "decode", meet)  # noqa: B010
        self.then()


@pytest.mark.slow
def test_a_picture_whose_decoding_does_not_end_ends_the_run_which_goes_on_without_it(
    shell: Shell, indexed: Any, tmp_path: Path
) -> None:
    """One line within the limit names step and shard, the log all keys of the batch. What is
    excluded is replaced as a bad sample is."""
    index, sample_id = SampleIndex.open(indexed[1] / "index"), 100
    with open(index.shards[int(index.shard_of[sample_id])].path, "rb") as shard:
        shard.seek(index.image_offset[sample_id])
        crc32 = zlib.crc32(shard.read(index.image_size[sample_id]))
    run_dir, (key,) = tmp_path / "run", index.keys([sample_id])
    first, rest, broken = (RecordBatches(tmp_path / name) for name in ("first", "rest", "broken"))

    def train(run_dir: Path, inside: Undecodable, *options: str) -> Finished:
        return shell(*words(indexed, run_dir, *options), inside=inside)

    ended = train(run_dir, Undecodable(crc32, True, first), f"peer_timeout_s={LIMIT_S}")
    assert ended.code == 1 and key in ended.stderr, ended.stderrs
    assert "Traceback" not in ended.stderr
    state = state_of(run_dir)
    assert (state["state"], state["exit_code"], state["requeue"]) == ("failed", 1, True)
    for part in ("peer_timeout_s", "step ", ".tar"):
        assert part in state["reason"], state
    listed = tmp_path / "keys.txt"
    listed.write_text(f"{key}\n")
    done = train(run_dir, Undecodable(crc32, True, rest), f"data.exclude={listed}")
    assert done.code == 0 and "excluded" in done.stderr, done.stderrs
    assert train(tmp_path / "other", Undecodable(crc32, False, broken)).code == 0
    batches = rest.sample_ids()
    assert 0 < len(batches) < STEPS, "it goes on from a saved step"
    assert sample_id not in batches
    np.testing.assert_array_equal(batches, broken.sample_ids()[-len(batches) :])


def test_a_key_that_the_index_lacks_is_refused(shell: Shell, indexed: Any, tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("nobody/knows\n")
    option = f"data.exclude={tmp_path / 'keys.txt'}"
    assert "data.exclude" in shell.refused(*words(indexed, tmp_path / "run", option))
