"""Samples whose decoding kept a process busy until the limit for waiting ended the job.

The same command would meet such a sample again and end again, so every end is noted beside the
index, and a sample that was noted twice counts as undecodable (`SampleIndex.bad_samples`)::

    INDEX/timeouts/  4f0c1a9be2d3507a.1.json  4f0c1a9be2d3507a.2.json   {"key": ..., "bytes": ...}

Any rank writes these files, each as a whole. Like other bad samples these count while their bytes
are what they were. Without the folder all are tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mclclip.files import digest_json, own, read_json, write_json

FOLDER = "timeouts"
_FILE = "{}.{}.json"


class _Index(Protocol):
    """What is needed of a `SampleIndex`."""

    directory: Path

    def keys(self, ids: Sequence[int]) -> list[str]:
        """Keys of samples."""
        ...

    def ids_of(self, keys: Sequence[str]) -> npt.NDArray[np.int64]:
        """Samples of keys."""
        ...

    def bytes_of(self, ids: Sequence[int]) -> dict[int, str]:
        """What tells the bytes of samples from others."""
        ...


def note(index: _Index, sample_id: int) -> str:
    """Notes that a limit ended this process while it decoded a sample; returns the sample's key and
    what becomes of it, as a part of the message."""
    (key,) = index.keys([sample_id])
    entry = {"key": key, "bytes": index.bytes_of([sample_id])[sample_id]}
    name = digest_json(entry)[:16]
    again = (index.directory / FOLDER / _FILE.format(name, 1)).exists()
    write_json(index.directory / FOLDER / _FILE.format(name, 2 if again else 1), entry)
    becomes = "it is left out from now on" if again else "it is left out if that happens again"
    return f"sample {key} was being decoded, {becomes}"


def noted_twice(directory: Path) -> dict[str, dict[str, str]]:
    """The samples that were noted twice in the index at ``directory``, by key, as entries of
    ``bad_samples.json`` with the reason "timeout"; their bytes may have changed since."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted((directory / FOLDER).glob(_FILE.format("*", 2))):
        with own(path, "take it away: the sample is tried again"):
            entry: dict[str, Any] = read_json(path)
            found[str(entry["key"])] = {"reason": "timeout", "bytes": str(entry["bytes"])}
    return found


def to_leave_out(index: _Index) -> frozenset[int]:
    """The samples that were noted twice and have not changed since: whoever decodes one of them may
    wait for ever."""
    listed = noted_twice(index.directory)
    ids = index.ids_of(list(listed)).tolist() if listed else []
    now = index.bytes_of(ids)
    return frozenset(
        i for i, entry in zip(ids, listed.values(), strict=True) if entry["bytes"] == now[i]
    )
