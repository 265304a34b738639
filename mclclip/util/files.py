"""Writes files atomically, reads documents and paths that strangers wrote, and computes digests.

A process may be killed at any instruction. So a file that another process reads is written under a
temporary name and then renamed: readers see either the old file or the complete new one.

All JSON is parsed here (YAML in ``config/plain_yaml.py``), because even a small document of a
stranger can do harm: code that walks lists nested 5,000 levels deep exhausts its stack.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

log = logging.getLogger("mclclip")

# Error numbers that mean that a disk cannot be written: full, over quota, too large, read-only.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

MAX_DEPTH = 64
"""Mappings and lists of a document may be nested so many levels deep."""

MAX_JSON_BYTES = 1 << 28
MAX_MODEL_JSON_BYTES = 1 << 23
_CLOSING = "\"')]},.:;"  # characters that may follow a url in a sentence

# --- atomic writes ---------------------------------------------------------------------------


@contextmanager
def with_path_in_errors(path: Path) -> Iterator[None]:
    """Adds ``path`` to errors of a full disk: the system names no file if it was already open."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write. After the block it replaces ``path`` (fsync, then rename).

    If the block raises an error, ``path`` stays as it was.
    """
    path = Path(path)
    with with_path_in_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The host is part of the name, since processes in containers on two nodes can have the same
        # number.
        temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
        try:
            # Somebody may have put a link there, since the name can be guessed: remove it.
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


def refuse_folder(path: Path | None, option: str) -> None:
    """Raises ValueError if ``path``, the file that an ``option`` names, is a folder."""
    if path is not None and path.is_dir():
        raise ValueError(f"{option} {path} is a folder: give a file")


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON, atomically; converts paths and numpy numbers."""
    write_bytes(path, (json.dumps(value, indent=2, default=_plain) + "\n").encode())


def _plain(value: Any) -> Any:
    """Converts a path to text and a numpy number to a number, since JSON cannot hold them."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r} does not fit into JSON")


@contextmanager
def damaged_if_unreadable(path: Path, again: str) -> Iterator[None]:
    """Turns errors in reading a run's file into a RuntimeError that names ``path``.

    ``again`` tells the user how to make the file again: "run 'mclclip embed --force'". A
    FileNotFoundError is not changed.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except (
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError,
        NotImplementedError,  # as pyarrow says of types that it does not know
    ) as error:  # fmt: skip
        what = f"{type(error).__name__}: {message_of(error, 300)}"
        raise RuntimeError(f"{path} is damaged ({what}): {again}") from error


def as_json(value: Any) -> Any:
    """``value`` after a round trip through JSON: tuples become lists, paths become text."""
    return json.loads(json.dumps(value, default=_plain))


def fsync_directory(directory: Path) -> None:
    """Makes a rename in ``directory`` survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def now() -> str:
    """The time in UTC, such as 2026-11-27T13:41:47+00:00."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def needed(module: str, what: str, install: str) -> Any:
    """Imports a module of an optional package.

    If the package is missing, raises a ValueError that says what needs it (``what``, for example
    'a picture') and how to install it (``install``, for example "pip install 'mclclip[analyse]'").
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is installed; another package, which it needs, is missing
        raise ValueError(
            f"{what} needs the package {package}, which is not installed: {install}"
        ) from None


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = Path(path).absolute()
    return next(above for above in (path, *path.parents) if above.exists())


def check_room(folder: Path, num_bytes: int, done: Iterable[Path], what: str, advice: str) -> None:
    """Raises ValueError if the disk of ``folder`` has no room for ``num_bytes``, of which the files
    ``done`` are already written.

    ``what`` names the files, and ``advice`` says what to do, both for the message.
    """
    gib = (num_bytes - sum(path.stat().st_size for path in done)) / 2**30
    free = shutil.disk_usage(nearest_existing(folder)).free / 2**30
    if gib > free:
        raise ValueError(
            f"{what} needs about {gib:.3g} GiB, the disk of {folder} has {free:.3g} GiB free: "
            f"{advice}"
        )


def move_aside(directory: Path, name: str | None = None) -> Path:
    """Renames a directory out of the way; logs and returns the new path.

    ``train`` becomes ``train.old-1``, or the next free number. With ``name`` it becomes the first
    free one of ``name``, ``name_2``, ``name_3`` ...
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


# --- documents -------------------------------------------------------------------------------


class Refused(ValueError):
    """Says what is wrong with a document, such as "has the key 'a' twice". Its reader catches it
    and puts the name of the document before it."""


def read_json(path: Path, *, unique_keys: bool = False) -> Any:
    """Reads a JSON file; ``parse_json`` describes the errors, which name the file."""
    return parse_json(read_bounded(path, MAX_JSON_BYTES), str(path), unique_keys=unique_keys)


def read_model_json(path: Path) -> Any:
    """Reads a JSON file of a model's directory. Most of these come from strangers, so the largest
    size allowed is smaller than for ``read_json``."""
    return parse_json(read_bounded(path, MAX_MODEL_JSON_BYTES), str(path))


def parse_json(data: str | bytes, where: str, *, unique_keys: bool = False) -> Any:
    """Parses a JSON text.

    Raises ValueError if it is not JSON or is nested deeper than ``MAX_DEPTH`` levels, or, with
    ``unique_keys``, if an object has a key twice. The message begins with ``where``, for example
    'items.jsonl line 3'.
    """
    try:
        value = json.loads(data, object_pairs_hook=_unique if unique_keys else None)
        if not _is_deeper(value, MAX_DEPTH):
            return value
        reason = f"is nested deeper than {MAX_DEPTH} levels"
    except RecursionError:
        reason = f"is nested deeper than {MAX_DEPTH} levels"
    except Refused as error:
        reason = str(error)
    except ValueError as error:  # also text that is not UTF-8, and numbers of 5,000 digits
        reason = f"is not valid JSON: {error}"
        if isinstance(error, json.JSONDecodeError) and error.lineno == 1:
            # ``where`` may name a line already, so the message must not say "line 1".
            reason = f"is not valid JSON: {error.msg} at column {error.colno}"
    raise ValueError(f"{where} {reason}")


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
    """Reads a whole file; ValueError if it has more than ``max_bytes``."""
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes:,} bytes, which is too much to read")
    return data


# --- text to show, and paths that a table names --------------------------------------------------


def printable(text: str) -> str:
    """Cleans a text, path or url for a message, a log or a report.

    Removes what may be secret from urls: user, password, and the query of a signed url. Characters
    that do not print are written as in Python's repr (a newline as ``\\n``), so that a stranger's
    text can neither control the terminal nor look like another line of ours.
    """
    if ":/" in text:
        text = re.sub(r":/+[^/?#]*@", "://...@", text)
        text = re.sub(r":/\S*", _without_query, text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _without_query(url: re.Match[str]) -> str:
    """Replaces the query of a url by "?...", but keeps a closing quote or full stop behind it."""
    before, _, query = re.sub("#", "?", url[0], count=1).partition("?")
    secret = query.rstrip(_CLOSING)
    return f"{before}?...{query[len(secret) :]}" if secret else url[0]


def message_of(error: BaseException, most: int = 200) -> str:
    """The first ``most`` characters of an error's message, on one line."""
    return " ".join(str(error).split())[:most]


def printable_lines(text: str) -> str:
    """Applies ``printable`` to each line of a text, for a text of our own with several lines."""
    return "\n".join(map(printable, text.split("\n")))


def below(root: Path, name: str, where: str) -> Path:
    """Returns ``root / name`` with ``.`` and ``..`` resolved, for a name from a stranger's table.

    Raises ValueError if the name is absolute or leads out of ``root``; the message begins with
    ``where``, for example 'labels.csv line 3'. Symbolic links are not checked here (see ``Roots``).
    """
    path = os.path.normpath(name)
    if not name or os.path.isabs(path) or path.split(os.sep)[0] == os.pardir or "\0" in name:
        raise ValueError(f"{where} names {name!r}, which is no file below {root}: correct the name")
    return Path(root) / path


class Roots:
    """The folders that may be read. It finds paths that lead out of them by symbolic links."""

    def __init__(self, *folders: Path) -> None:
        self._real = [os.path.realpath(folder) for folder in folders]

    def real_path(self, path: Path) -> Path | None:
        """Follows all links of a path; returns None if it leads out of the folders."""
        real = os.path.realpath(path)
        inside = any(real == root or real.startswith(f"{root.rstrip('/')}/") for root in self._real)
        return Path(real) if inside else None


# --- digests ---------------------------------------------------------------------------------


def digest_json(value: Any) -> str:
    """Digest of a value that JSON can hold; the order of keys in mappings does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_file(path: Path) -> str:
    """Digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_64_bits(data: bytes) -> int:
    """Digest of bytes as a signed number of 64 bits."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def digest_array(array: np.ndarray) -> str:
    """Digest of an array's dtype, shape and values."""
    return digest_parts(array.dtype, array.shape, [array])


def digest_parts(dtype: np.dtype[Any], shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> str:
    """``digest_array`` of an array that is passed in parts, in order, all of this dtype."""
    digest = hashlib.sha256(f"{dtype.str}{shape}".encode())
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)  # ``.data``: a copy may not fit into memory
    return digest.hexdigest()


def digest_keys(keys: Iterable[str]) -> str:
    """Digest of sample keys in their order. Arrays with equal digests have the same sample in the
    same row."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(key.encode())
        digest.update(b"\n")
    return digest.hexdigest()


# --- sizes and digests of files, recorded when they are written ---------------------------------


@dataclass(frozen=True)
class Record:
    """The size and the SHA-256 of a file, recorded when it was written. Whoever opens the file
    compares its size (``check_size``); ``mclclip doctor RUN`` compares its digest."""

    size_bytes: int
    sha256: str


def record_of(path: Path) -> Record:
    """The record of a file. Call it right after writing, while the file is in memory anyway."""
    return Record(os.path.getsize(path), digest_file(path))


def records_of(directory: Path, *names: str) -> dict[str, Record]:
    """The records of files in a directory, by name."""
    return {name: record_of(Path(directory) / name) for name in names}


def check_size(path: Path, size_bytes: int, again: str) -> None:
    """Raises FileNotFoundError if a file is missing, and RuntimeError if its size is not the
    recorded one. ``again`` tells the user how to make the file again."""
    try:
        size = os.path.getsize(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"no {path}: {again}") from None
    if size != size_bytes:
        raise RuntimeError(
            f"{path} is damaged (it has {size:,} bytes, {size_bytes:,} were written): {again}"
        )
