"""Atomic file writes, and digests.

A process may be killed at any instruction. So a file that another process reads is written under a
temporary name and then renamed: readers see either the old file or the complete new one.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# --- atomic writes ---------------------------------------------------------------------------


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write, which replaces ``path`` after the block (fsync, then rename).

    Where the block ends with an error, ``path`` does not change.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # With the host name, since processes on two nodes that run containers may have equal numbers.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file atomically: readers see the old file or the complete new one."""
    with whole_file(path) as file:
        file.write(data)


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON, atomically; converts paths and numpy numbers."""
    write_bytes(path, (json.dumps(value, indent=2, default=_plain) + "\n").encode())


def _plain(value: Any) -> Any:
    """Converts what JSON cannot hold: a path to text, a numpy number to a number."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not fit into JSON: {value!r}")


def read_json(path: Path) -> Any:
    """Reads a JSON file; ValueError names the file when it is not JSON."""
    try:
        return json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def as_json(value: Any) -> Any:
    """``value`` after a round trip through JSON: lists for tuples, text for paths."""
    return json.loads(json.dumps(value, default=_plain))


def fsync_directory(directory: Path) -> None:
    """Makes a rename in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def now() -> str:
    """The time in UTC in ISO format, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = Path(path).absolute()
    return next(above for above in (path, *path.parents) if above.exists())


def move_aside(directory: Path, name: str | None = None) -> Path:
    """Renames a directory to ``NAME.old-N`` with the first free N and returns the new path.

    With ``name`` it becomes the first free one of ``name``, ``name_2``, ``name_3`` ...
    """
    number, stem = 1, f"{name}_" if name else f"{directory.name}.old-"
    aside = directory.with_name(name or f"{stem}1")
    while aside.exists():
        number += 1
        aside = directory.with_name(f"{stem}{number}")
    os.rename(directory, aside)
    return aside


def remove_leftovers(directory: Path) -> None:
    """Removes temporary files and directories that a killed process left in ``directory``."""
    for path in list(Path(directory).glob(".*.tmp")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


# --- digests ---------------------------------------------------------------------------------


def digest_json(value: Any) -> str:
    """Digest of a JSON-able value; the order of mapping keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_file(path: Path) -> str:
    """Digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_array(array: np.ndarray) -> str:
    """Digest of an array's dtype, shape and values."""
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)  # no copy: arrays may fill half the memory
    return digest.hexdigest()


def digest_keys(keys: Iterable[str]) -> str:
    """Digest of ordered sample keys: equal digests allow a join by position."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(key.encode())
        digest.update(b"\n")
    return digest.hexdigest()


# --- what a file was when it was written -------------------------------------------------------

BLOCK_BYTES = 2**20
_DIGITS = 16  # of the digest of a block, in base 16: 64 bits, which find damage, not forgery
SEAL = "checksum"


@dataclass(frozen=True)
class Record:
    """Size of a file, and the digests of its blocks of ``BLOCK_BYTES`` one after another."""

    size_bytes: int
    digests: str

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the last one may be shorter."""
        return len(self.digests) // _DIGITS

    def digest(self, number: int) -> str:
        """The digest of a block."""
        return self.digests[number * _DIGITS : (number + 1) * _DIGITS]


def _digest_block(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()[:_DIGITS]


def record_of(path: Path) -> Record:
    """The record of a file; call it right after writing, while the file is in the page cache."""
    with open(path, "rb") as file:
        digests = [_digest_block(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]
        return Record(file.tell(), "".join(digests))


def records_of(directory: Path, *names: str) -> dict[str, Record]:
    """The records of files in a directory, by name."""
    return {name: record_of(Path(directory) / name) for name in names}


class Checked:
    """A file that is compared with its record block by block, each block once, when it is read.

    Without a record (None) nothing is compared. ``again`` says in errors how to make the file
    again. Raises RuntimeError where the file has another size than its record.
    """

    def __init__(self, path: Path, record: Record | None, again: str) -> None:
        self.path, self.record, self.again = Path(path), record, again
        self._good: set[int] = set()
        if record is not None and (size := os.path.getsize(path)) != record.size_bytes:
            raise RuntimeError(
                f"{path} is damaged (it has {size:,} bytes, {record.size_bytes:,} were written): "
                f"{again}"
            )

    def check(self, start: int = 0, stop: int | None = None) -> None:
        """Compares the blocks that hold the bytes [start, stop), by default all of the file.

        Raises RuntimeError, one line, where one is not what was written.
        """
        if self.record is None:
            return
        stop = self.record.size_bytes if stop is None else min(stop, self.record.size_bytes)
        wanted = range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        missing = [number for number in wanted if number not in self._good]
        if not missing:
            return
        with open(self.path, "rb") as file:
            for number in missing:
                file.seek(number * BLOCK_BYTES)
                if _digest_block(file.read(BLOCK_BYTES)) != self.record.digest(number):
                    raise RuntimeError(
                        f"{self.path} is damaged (from byte {number * BLOCK_BYTES:,} on it is not "
                        f"what was written): {self.again}"
                    )
                self._good.add(number)


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """``value`` as JSON holds it, with a digest of itself, which ``unsealed`` compares."""
    plain: dict[str, Any] = as_json(value)
    return plain | {SEAL: digest_json(plain)}


def unsealed(value: Mapping[str, Any], path: Path, *, required: bool = True) -> dict[str, Any]:
    """What ``sealed`` was given; ``path`` is where it was read.

    A value without a seal, as older versions wrote it, is returned as it is where none is
    ``required``. Raises ValueError where the value has changed since it was sealed.
    """
    plain = {name: item for name, item in value.items() if name != SEAL}
    try:
        intact = value[SEAL] == digest_json(plain) if required or SEAL in value else True
    except (KeyError, RecursionError):
        intact = False
    if not intact:
        raise ValueError(f"{path} is damaged: it has changed since it was written")
    return plain
