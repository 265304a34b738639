"""Verb ``doctor RUN``: whether the files of a run are what was written.

Every file that a manifest or a saved step lists is read once and compared with its SHA-256. One
line per artifact names the first file that differs. Nothing is written and no lock is taken, so
that a run may go on meanwhile: what is not finished is not compared, and neither is what is
replaced or removed while it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from mclclip import doctor, files
from mclclip.checkpoint import step_files
from mclclip.data.locations import KIND, TRUNK_CACHE
from mclclip.data.row_store import all_notes
from mclclip.doctor import Finding
from mclclip.run.artifacts import INTENT, MANIFEST, is_finished, parse_manifest, verb_of
from mclclip.run.runlog import count_of

MAY_LIE_ELSEWHERE = (KIND, TRUNK_CACHE)
"""Kinds of artifacts whose files a user may move to a store, or remove after the training."""


def run(directory: Path) -> int:
    """Prints a line per artifact of a run; returns 0, or 2 where a file differs.

    Raises FileNotFoundError where the folder has no artifact of a run.
    """
    return doctor.show(findings(Path(directory)))


def findings(directory: Path) -> Iterator[Finding]:
    """The line of every artifact and of every saved step, in the order of their paths."""
    names = (MANIFEST, INTENT, f"step_*/{step_files.STATE}")
    listings = sorted(path for name in names for path in directory.rglob(name))
    if not listings:
        raise FileNotFoundError(f"there is no run at {directory}: name the folder of a run")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for path in listings:
            place = path.parent.relative_to(directory)
            if not any(".old-" in part or part.startswith(".") for part in place.parts):
                yield from _compare(path, str(place), pool)


def _compare(path: Path, place: str, pool: ThreadPoolExecutor) -> Iterator[Finding]:
    """The line of the artifact or step whose files ``path`` lists."""
    if path.name == INTENT:
        if not is_finished(path.parent):
            yield doctor.finding(place, "is not finished, so there is nothing to compare yet")
        return
    try:
        before = path.read_bytes()
        records, again, may_lie_elsewhere = _read_listing(path)
        here = {file: r for file, r in records.items() if not may_lie_elsewhere or file.exists()}
        differences = pool.map(partial(_difference, path.parent), here, here.values())
        text = next(filter(None, differences), None)
    except (OSError, ValueError, RuntimeError, step_files.Damaged) as error:
        text, again = str(error), "make it again, or bring it back from a copy"
    if text is None:
        size = sum(record.size_bytes for record in here.values()) / 2**30
        away = f", {len(records) - len(here)} are not here" if len(here) < len(records) else ""
        yield doctor.finding(place, f"{count_of(len(here), 'file')}, {size:.2f} GiB{away}")
    elif not path.exists() or path.read_bytes() != before:
        yield doctor.finding(place, "was replaced or removed while it was read")
    else:
        yield Finding("FAIL", place, f"{text}: {again}")


def _read_listing(path: Path) -> tuple[dict[Path, files.Record], str, bool]:
    """The files that a manifest or a step lists, with their records; how to make them again; and
    whether they may lie elsewhere."""
    folder = path.parent
    if path.name == step_files.STATE:
        step = int(folder.name.removeprefix("step_"))
        entries = step_files.read_entries(folder, step)
        again = "remove this step's folder, and the same command resumes from the step before"
        return {folder / name: record for name, record in entries.items()}, again, False
    manifest = parse_manifest(path)
    records = {folder / name: record for name, record in manifest.records.items()}
    if manifest.kind == TRUNK_CACHE:
        rows = Path(manifest.counts["rows"] or folder / "rows")
        if any(rows.glob("*")):  # they may be removed, also from a folder that stays
            notes = all_notes(rows, int(manifest.counts["shards"]))
            records |= {rows / name: note.record for name, note in notes.items()}
    again = f"run 'mclclip {verb_of(manifest.kind)} --force' to make it again"
    return records, again, manifest.kind in MAY_LIE_ELSEWHERE


def _difference(folder: Path, path: Path, record: files.Record) -> str | None:
    """What is wrong with a file, in words; None where it is what was written."""
    name = os.path.relpath(path, folder)
    try:
        now = files.record_of(path)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    if now.size_bytes != record.size_bytes:
        return f"{name} has {now.size_bytes:,} bytes, {record.size_bytes:,} were written"
    return None if now == record else f"{name} is not what was written (another SHA-256)"
