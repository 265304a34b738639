"""Atomic file writes, documents and paths that others wrote, and digests.

A process may be killed at any instruction. So a file that another process reads is written under a
temporary name and then renamed: readers see either the old file or the complete new one.

All JSON that mclclip reads is parsed here (YAML: ``config/plain_yaml.py``), because a small
document of a stranger can ask for much: one of 5,000 levels exhausts the stack of what walks it.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

import numpy as np

log = logging.getLogger("mclclip")

# Errors of a disk that takes no more.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

MAX_DEPTH = 64
"""Levels of mappings and lists that a document may have."""

MAX_JSON_BYTES = 1 << 28
MAX_MODEL_JSON_BYTES = 1 << 23
_CLOSING = "\"')]},.:;"  # what may follow a url in a sentence

# --- atomic writes ---------------------------------------------------------------------------


@contextmanager
def with_path_in_errors(path: Path) -> Iterator[None]:
    """Adds ``path`` to the errors of a full disk, which name no file if it was already open."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def full_disk_names(directory: Path, option: str) -> Iterator[None]:
    """Changes the error of a full disk below ``directory`` into a ValueError whose remedy is the
    ``option`` that names this folder, instead of another run_dir. All ranks get it."""
    try:
        yield
    except OSError as error:
        path = Path(str(error.filename))
        below = path.is_relative_to(directory) or directory.is_relative_to(path)
        if error.errno not in FULL or not below:
            raise
        raise ValueError(
            f"{error.filename} cannot be written ({error.strerror}): make room there, and the same "
            f"command goes on, or name another disk in {option}"
        ) from error


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write, which replaces ``path`` after the block (fsync, then rename).

    Where the block ends with an error, ``path`` does not change.
    """
    path = Path(path)
    with with_path_in_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # With the host name: processes on two nodes that run containers may have equal numbers.
        temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
        try:
            # The name can be guessed, so whatever lies there is removed, not written through.
            temporary.unlink(missing_ok=True)
            with open(temporary, "xb") as file:
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


@contextmanager
def damaged_if_unreadable(path: Path, again: str) -> Iterator[None]:
    """Turns every error of reading a run's file into RuntimeError: one line with the path and
    ``again``, which says how to make the file again. FileNotFoundError passes."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError) as error:
        what = f"{type(error).__name__}: {message_of(error, 300)}"
        raise RuntimeError(f"{path} is damaged ({what}): {again}") from error


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


def needed(module: str, what: str, install: str) -> Any:
    """A module of an optional package. ValueError, in one line that says that ``what`` needs it and
    how to ``install`` it, where it is not there."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is there, and something that it needs is not
        raise ValueError(
            f"{what} needs the package {package}, which is not installed: {install}"
        ) from None


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = Path(path).absolute()
    return next(above for above in (path, *path.parents) if above.exists())


def check_room(folder: Path, num_bytes: int, done: Iterable[Path], what: str, advice: str) -> None:
    """Raises ValueError if the disk of ``folder`` has no room for ``num_bytes`` without the files
    ``done``, which are there already."""
    gib = (num_bytes - sum(path.stat().st_size for path in done)) / 2**30
    free = shutil.disk_usage(nearest_existing(folder)).free / 2**30
    if gib > free:
        raise ValueError(
            f"{what} needs about {gib:.3g} GiB, the disk of {folder} has {free:.3g} GiB free: "
            f"{advice}"
        )


def move_aside(directory: Path, name: str | None = None) -> Path:
    """Renames a directory to ``NAME.old-N`` with the first free N, logs and returns the new path.

    With ``name`` it becomes the first free one of ``name``, ``name_2``, ``name_3`` ...
    """
    number, stem = 1, f"{name}_" if name else f"{directory.name}.old-"
    aside = directory.with_name(name or f"{stem}1")
    while aside.exists():
        number += 1
        aside = directory.with_name(f"{stem}{number}")
    os.rename(directory, aside)
    log.info("moved %s aside, to %s", directory, aside.name)
    return aside


def remove_leftovers(directory: Path) -> None:
    """Removes temporary files and directories that a killed process left in ``directory``."""
    for path in list(Path(directory).glob(".*.tmp")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def open_own(path: Path, mode: Literal["r", "w"]) -> TextIO:
    """Opens a file of a run that may lie in a folder where others write too, to read or to write
    (``w``: made where it is missing, and emptied).

    Raises RuntimeError, one line, for a symbolic link, for a file of several names when it is
    written, and for what is no file: following what somebody planted would empty another file.
    """
    flags = os.O_RDONLY if mode == "r" else os.O_WRONLY | os.O_CREAT
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK):  # EMLINK: of BSD
            raise
        raise RuntimeError(
            f"{path} is a symbolic link, which is not followed: remove it, or use another run_dir"
        ) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (mode == "w" and status.st_nlink > 1):
        os.close(descriptor)
        raise RuntimeError(
            f"{path} is no file of its own (it is a folder or a device, or has several names): "
            "remove it, or use another run_dir"
        )
    if mode == "w":
        os.ftruncate(descriptor, 0)
    return open(descriptor, mode)


# --- documents -------------------------------------------------------------------------------


class Refused(ValueError):
    """Says what is wrong with a document, without its name, which comes before it."""


def read_json(path: Path, *, unique_keys: bool = False) -> Any:
    """The content of a JSON file; see ``parse_json``, whose errors name the file."""
    return parse_json(read_bounded(path, MAX_JSON_BYTES), str(path), unique_keys=unique_keys)


def read_model_json(path: Path) -> Any:
    """The content of a JSON file in a model's directory, of which most come from others."""
    return parse_json(read_bounded(path, MAX_MODEL_JSON_BYTES), str(path))


def parse_json(data: str | bytes, where: str, *, unique_keys: bool = False) -> Any:
    """The content of a JSON text.

    Raises ValueError, one line that begins with ``where``, for what is not JSON or nested deeper
    than ``MAX_DEPTH`` levels; with ``unique_keys`` also for an object that has a key twice.
    """
    try:
        value = json.loads(data, object_pairs_hook=_unique if unique_keys else None)
        if _is_deeper(value, MAX_DEPTH):
            raise RecursionError
    except Refused as error:
        raise ValueError(f"{where} {error}") from None
    except ValueError as error:  # also text that is not UTF-8, and numbers of 5,000 digits
        reason = str(error)
        if isinstance(error, json.JSONDecodeError) and error.lineno == 1:
            reason = f"{error.msg} at column {error.colno}"  # ``where`` may be a line itself
        raise ValueError(f"{where} is not valid JSON: {reason}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested deeper than {MAX_DEPTH} levels") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise Refused(f"has the key {key!r} twice")
        fields[key] = value
    return fields


def _is_deeper(value: Any, limit: int) -> bool:
    """Returns True if lists and dicts are nested more than ``limit`` levels deep."""
    level = [value]
    for _ in range(limit):
        nested = [item for item in level if isinstance(item, dict | list)]
        if not nested:
            return False
        parts = (item.values() if isinstance(item, dict) else item for item in nested)
        level = [part for several in parts for part in several]
    return any(isinstance(item, dict | list) for item in level)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file; ValueError where they are more than ``max_bytes``."""
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes:,} bytes, which is too much to read")
    return data


# --- text to show, and paths that a table names --------------------------------------------------


def printable(text: str) -> str:
    """Cleans a text, path or url for a message, a log or a report.

    Urls lose what may be secret: user, password and the query of a signed one. A character that
    does not print, such as an escape sequence or the end of a line, is as Python's repr shows it,
    so that a stranger's text neither moves the cursor nor looks like a line of ours.
    """
    if ":/" in text:
        text = re.sub(r":/+[^/?#]*@", "://...@", text)
        text = re.sub(r":/\S*", _without_query, text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _without_query(url: re.Match[str]) -> str:
    """The url up to its query, and what closes the quotation or sentence that it stands in."""
    before, _, query = re.sub("#", "?", url[0], count=1).partition("?")
    secret = query.rstrip(_CLOSING)
    return f"{before}?...{query[len(secret) :]}" if secret else url[0]


def message_of(error: BaseException, most: int = 200) -> str:
    """The message of an error on one line, of which it returns the first ``most`` characters."""
    return " ".join(str(error).split())[:most]


def printable_lines(text: str) -> str:
    """Cleans a text of ours that has several lines."""
    return "\n".join(map(printable, text.split("\n")))


def below(root: Path, name: str, where: str) -> Path:
    """``root / name`` without ``.`` and ``..``, for a name that somebody else's table (``where``)
    gives.

    Raises ValueError, one line, for a name that is absolute or leads upwards out of ``root``. What
    links on the disk lead to is not looked at (see ``Roots``).
    """
    path = os.path.normpath(name)
    if not name or os.path.isabs(path) or path.split(os.sep)[0] == os.pardir or "\0" in name:
        raise ValueError(f"{where} names {name!r}, which is no file below {root}: correct the name")
    return Path(root) / path


class Roots:
    """Folders out of which no file is read, whatever links and names lead there."""

    def __init__(self, *folders: Path) -> None:
        self._real = [os.path.realpath(folder) for folder in folders]

    def real_path(self, path: Path) -> Path | None:
        """A path with all links followed; None where it is not in or below one of the folders."""
        real = os.path.realpath(path)
        inside = any(real == root or real.startswith(f"{root.rstrip('/')}/") for root in self._real)
        return Path(real) if inside else None


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
    return digest_parts(array.dtype, array.shape, [array])


def digest_parts(dtype: np.dtype[Any], shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> str:
    """``digest_array`` of an array whose values come in parts of its dtype, one after another."""
    digest = hashlib.sha256(f"{dtype.str}{shape}".encode())
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)  # no copy: arrays may fill half the memory
    return digest.hexdigest()


def digest_keys(keys: Iterable[str]) -> str:
    """Digest of ordered sample keys: equal digests allow a join by position."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(key.encode())
        digest.update(b"\n")
    return digest.hexdigest()


# --- what a file was when it was written -------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """Size of a file and the SHA-256 of its bytes when it was written. Whoever opens the file
    compares its size (``check_size``); ``mclclip doctor RUN`` compares its bytes."""

    size_bytes: int
    sha256: str


def record_of(path: Path) -> Record:
    """The record of a file; call it right after writing, while the file is in the page cache."""
    return Record(os.path.getsize(path), digest_file(path))


def records_of(directory: Path, *names: str) -> dict[str, Record]:
    """The records of files in a directory, by name."""
    return {name: record_of(Path(directory) / name) for name in names}


def check_size(path: Path, size_bytes: int, again: str) -> None:
    """Raises FileNotFoundError where a file is missing, and RuntimeError where it has another size
    than it was written with; ``again`` says how to make it again."""
    try:
        size = os.path.getsize(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"no {path}: {again}") from None
    if size != size_bytes:
        raise RuntimeError(
            f"{path} is damaged (it has {size:,} bytes, {size_bytes:,} were written): {again}"
        )
