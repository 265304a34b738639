"""Atomic file writes, and digests.

A process may be killed at any instruction. So a file that another process reads is written under a
temporary name and then renamed: readers see either the old file or the complete new one.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# Errors of a disk that takes no more.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

# --- atomic writes ---------------------------------------------------------------------------


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives the errors of a full disk, which name no file where it was open already, this name."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write, which replaces ``path`` after the block (fsync, then rename).

    Where the block ends with an error, ``path`` does not change.
    """
    path = Path(path)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # With the host name: processes on two nodes that run containers may have equal numbers.
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
    except RecursionError:
        raise ValueError(f"{path} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError too
        raise ValueError(f"{path} is not valid JSON: {error}") from error


@contextmanager
def own(path: Path, again: str) -> Iterator[None]:
    """Reads a file of a run directory: whatever is odd about it is RuntimeError, in one line with
    its path and ``again``, which says how to make it again. FileNotFoundError passes."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError) as error:
        what = " ".join(str(error).split())[:300]
        raise RuntimeError(
            f"{path} is damaged ({type(error).__name__}: {what}): {again}"
        ) from error


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
