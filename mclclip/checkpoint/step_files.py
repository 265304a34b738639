"""The directory of a saved step: its name, its list of files, checks, publishing and removal."""

from __future__ import annotations

import logging
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mclclip import __version__, files

log = logging.getLogger("mclclip")

STATE = "state.json"
METADATA = ".metadata"
SCHEMA_VERSION = 3
_BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Entry:
    """One file of a step, as listed in its state.json."""

    size_bytes: int
    crc32: int


Entries = dict[str, Entry]
Identity = Mapping[str, Any]
"""Of which training a step is: its stage, its variant, and the digest of all else that its weights
depend on."""


class Damaged(Exception):
    """A step on disk is not what was saved; the message names the difference."""


# --- names -------------------------------------------------------------------------------------


def steps(directory: Path) -> list[int]:
    """Steps saved in ``directory``, ascending (unfinished and damaged ones have other names)."""
    return parse_steps(path.name for path in Path(directory).glob("step_*"))


def parse_steps(names: Iterable[str]) -> list[int]:
    """The steps among names of directories, ascending."""
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step_\d+", name))


def path_of(directory: Path, step: int) -> Path:
    """Directory of the checkpoint of ``step``."""
    return Path(directory) / f"step_{step:08d}"


def temporary_of(directory: Path, step: int) -> Path:
    """Directory in which ``step`` is written; leftovers are removed at the next start."""
    return Path(directory) / f".step_{step:08d}.tmp"


# --- whole or damaged --------------------------------------------------------------------------


def checksum(path: Path) -> int:
    """CRC-32 of a file: finds bit rot and incomplete writes, not forgery."""
    crc, block = 0, memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            crc = zlib.crc32(block[:count], crc)
    return crc


def describe(paths: Iterable[Path]) -> Entries:
    """Size and checksum of files by their names."""
    return {path.name: Entry(path.stat().st_size, checksum(path)) for path in paths}


def read_entries(path: Path, step: int) -> Entries:
    """The files listed in the state.json of ``step``, checked for presence and size.

    Raises Damaged where they do not match, and RuntimeError where a newer mclclip wrote the step.
    """
    try:
        state = files.read_json(path / STATE)
        if not isinstance(state, dict) or state["step"] != step:
            raise Damaged(f"its {STATE} is not of step {step}")
        schema = int(state["schema_version"])
        if schema <= SCHEMA_VERSION:
            files.unsealed(state, path / STATE)
        entries = {name: Entry(**entry) for name, entry in state.get("files", {}).items()}
    except FileNotFoundError as error:
        raise Damaged(f"it has no {STATE}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise Damaged(f"its {STATE} cannot be read") from error
    if schema > SCHEMA_VERSION:
        raise RuntimeError(
            f"the checkpoint {path} has schema {schema}, this mclclip {__version__} reads up to "
            f"{SCHEMA_VERSION}: update mclclip"
        )
    if METADATA not in entries:
        raise Damaged(f"its {STATE} lists no {METADATA}")
    check_sizes(path, entries)
    return entries


def check_identity(path: Path, identity: Identity) -> None:
    """Raises RuntimeError where the intact step at ``path`` is of another training."""
    saved = files.read_json(path / STATE).get("identity", {})
    fields = [name for name in identity if saved.get(name) != identity[name]]
    if not fields:
        return
    what = ", ".join(f"{name} {saved.get(name)!r}" for name in fields if name != "digest")
    here = ", ".join(f"{name} {identity[name]!r}" for name in fields if name != "digest")
    raise RuntimeError(
        f"the checkpoint {path} is of another training ("
        + (f"{what}; this one has {here}" if what else "other options or inputs")
        + "): put the checkpoints of this one back, or remove it"
    )


def check_sizes(path: Path, entries: Entries) -> None:
    """Raises Damaged where a listed file is not there or has another size."""
    for name, entry in entries.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise Damaged(f"{name} is missing") from error
        if size != entry.size_bytes:
            raise Damaged(f"{name} has {size} bytes, not {entry.size_bytes}")


def check_contents(path: Path, entries: Entries) -> None:
    """Raises Damaged where the content of a listed file is not what was written."""
    for name, entry in entries.items():
        try:
            crc32 = checksum(path / name)
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from error
        if crc32 != entry.crc32:
            raise Damaged(f"the checksum of {name} is wrong")


# --- published, kept, removed ------------------------------------------------------------------


def publish(
    directory: Path,
    step: int,
    entries: Entries,
    world_size: int,
    identity: Identity,
) -> None:
    """Writes the list of files of a step that all ranks have written, and renames it.

    Raises OSError where a listed file is missing or cannot be written.
    """
    temporary, final = temporary_of(directory, step), path_of(directory, step)
    try:
        check_sizes(temporary, entries)
    except Damaged as error:
        raise OSError(f"{error}: do all nodes see the same {directory}?") from error
    state: dict[str, Any] = {
        "step": step,
        "world_size": world_size,
        "schema_version": SCHEMA_VERSION,
        "package_version": __version__,
        "files": {name: asdict(entries[name]) for name in sorted(entries)},
        "identity": dict(identity),
    }
    files.write_json(temporary / STATE, files.sealed(state))
    files.fsync_directory(temporary)
    if final.exists():  # the same step of an earlier start
        remove(final, f".{final.name}.replaced.tmp")
    os.rename(temporary, final)
    files.fsync_directory(Path(directory))


def superfluous(saved: Iterable[int], newest: int, keep: int, keep_every: int | None) -> list[int]:
    """Steps up to ``newest`` that are neither among the last ``keep`` nor kept for good."""
    old = sorted(step for step in saved if step <= newest)
    return [step for step in old[:-keep] if keep_every is None or step % keep_every]


def prune(
    directory: Path, newest: int, keep: int, keep_every: int | None, spare: Collection[int] = ()
) -> None:
    """Removes the ``superfluous`` steps but those in ``spare``; warns where one cannot be."""
    for step in superfluous(steps(directory), newest, keep, keep_every):
        if step in spare:
            continue
        try:
            remove(path_of(directory, step))
        except OSError as error:
            log.warning("the old checkpoint %s cannot be removed (%s)", error.filename, error)


def remove(path: Path, name: str | None = None) -> None:
    """Removes a step; renames it first, so that a kill leaves nothing that looks complete."""
    doomed = path.with_name(name or f".{path.name}.tmp")
    os.rename(path, doomed)
    shutil.rmtree(doomed)
