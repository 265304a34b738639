"""Which sample is noted where the limit for waiting ends a process."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mclclip.ranks import data_wait
from mclclip.ranks.failures import LostWorker

ENDLESS_S, LIMIT_S = 60.0, 0.5


@pytest.mark.parametrize(
    ("sample_id", "for_s", "noted"), [(7, 9.0, [7]), (7, -ENDLESS_S, []), (-1, 9.0, [])]
)
def test_only_a_sample_that_took_most_of_the_time_is_noted(
    sample_id: int, for_s: float, noted: list[int]
) -> None:
    """A slow disk, or many samples that together take too long, say nothing about one of them."""
    found: list[int] = []

    def note(sample_id: int) -> str:
        found.append(sample_id)
        return "it is noted"

    place = np.array([3, sample_id, time.monotonic_ns() - int(for_s * 1e9)])
    with data_wait.limited(LIMIT_S), pytest.raises(LostWorker, match="^nothing comes for") as error:
        data_wait.wait_for(lambda: time.sleep(ENDLESS_S), lambda: "nothing comes", note, place)
    assert found == noted
    assert ("(peer_timeout_s); it is noted: " in str(error.value)) is bool(noted)


def test_a_note_that_cannot_be_written_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(sample_id: int) -> str:
        raise OSError("read-only file system")

    monkeypatch.setattr(data_wait, "NOTE_S", 0.2)
    for note in (refuse, lambda _: time.sleep(ENDLESS_S)):
        place = np.array([3, 7, 0])
        with data_wait.limited(LIMIT_S), pytest.raises(LostWorker, match="goes on from what is"):
            data_wait.wait_for(lambda: time.sleep(ENDLESS_S), lambda: "nothing", note, place)
    assert "cannot be noted: read-only file system" in caplog.text
