"""Verb ``doctor RUN``: compares the files of a run with the checksums that were recorded.

It reads every file that a manifest or a saved step lists, and compares its SHA-256. Each artifact
gets a line, which names the first file that differs. It writes nothing and takes no lock, so the
run may go on: unfinished artifacts, and files that are replaced or removed while they are read, are
not compared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from mclclip.checkpoint import step_files
from mclclip.data.locations import KIND
from mclclip.data.row_store import IMAGE_ROWS
from mclclip.run.artifacts import INTENT, KINDS, MANIFEST, is_finished, parse_manifest
from mclclip.run.runlog import count_of
from mclclip.util import files
from mclclip.verbs import doctor
from mclclip.verbs.doctor import Finding

MAY_LIE_ELSEWHERE = (KIND, IMAGE_ROWS)
"""Kinds of artifacts whose files a user may move to a store or delete after the training."""


def run(directory: Path) -> int:
    """Prints a line per artifact of a run; returns 0, or 2 if a file differs.

    Raises FileNotFoundError if the folder has no artifact of a run.
    """
    return doctor.show(findings(Path(directory)))


def findings(directory: Path) -> Iterator[Finding]:
    """Yields a line for every artifact and saved step, in the order of their paths."""
    listings = [*_listings(directory)]
    if not listings:
        raise FileNotFoundError(f"there is no run at {directory}: name the folder of a run")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for path in listings:
            place = str(path.parent.relative_to(directory))
            again = _again(path, _kind_at(directory, path.parent))
            if path.exists():
                yield from _compare(path, place, again, pool)
            elif path.parent.exists() and not (path.parent / INTENT).exists():
                what = f"holds files but no {path.name}, so they cannot be compared"
                yield doctor.finding(place, what, f"move it away, and {again}")


def _listings(directory: Path) -> Iterator[Path]:
    """Yields the paths of all lists of files: manifests, those of saved steps, the intents of
    unfinished artifacts, and missing manifests in folders where a run has artifacts. A folder is
    visited once, even if several links lead to it. Hidden folders and those that were moved aside
    (NAME.old-1) are skipped."""
    seen = set()
    for name, below, names in os.walk(directory, followlinks=True):
        folder, real = Path(name), os.path.realpath(name)
        shown = sorted(b for b in below if not b.startswith(".") and ".old-" not in b)
        below[:] = [] if real in seen else shown
        if real in seen:
            continue
        seen.add(real)
        is_step = bool(step_files.parse_steps([folder.name]))
        lists = [n for n in (step_files.STATE if is_step else MANIFEST, INTENT) if n in names]
        if not lists and (shown or names) and (is_step or _kind_at(directory, folder)):
            lists = [step_files.STATE if is_step else MANIFEST]
        yield from (folder / n for n in lists)


def _kind_at(directory: Path, folder: Path) -> str | None:
    """Returns the kind of artifact that a run has in this folder, such as 'export', or None."""
    place = folder.relative_to(directory).as_posix()
    if (directory / "finetune").is_dir() and place in ("data", "pairs"):
        return "shards" if place == "data" else "pairs"
    place = re.sub("^controls/[^/]+/", "", place)
    return next((kind for kind, each in KINDS.items() if re.fullmatch(each.place, place)), None)


def _compare(path: Path, place: str, again: str, pool: ThreadPoolExecutor) -> Iterator[Finding]:
    """Yields the line of the artifact or step whose files ``path`` lists, if it is finished.
    ``again`` says how to make it again, in case that the list itself is damaged."""
    if path.name == INTENT:
        if not is_finished(path.parent):
            yield doctor.finding(place, "is not finished, so there is nothing to compare yet")
        return
    before = _bytes_of(path)
    try:
        if before is None:
            raise ValueError(f"{path.name} cannot be read")
        records, kind = _read_listing(path)
        again, may_be_gone = _again(path, kind), kind in MAY_LIE_ELSEWHERE
        here = {file: r for file, r in records.items() if not may_be_gone or file.exists()}
        differences = pool.map(partial(_difference, path.parent), here, here.values())
        text = next(filter(None, differences), None)
    except (OSError, ValueError, RuntimeError, step_files.Damaged) as error:
        text = files.message_of(error)
    except (TypeError, LookupError) as error:  # a field is missing or of another type
        text = f"{path.name} is damaged ({type(error).__name__}: {files.message_of(error)})"
    if text is None:
        size = sum(record.size_bytes for record in here.values()) / 2**30
        away = f", {len(records) - len(here)} are not here" if len(here) < len(records) else ""
        yield doctor.finding(place, f"{count_of(len(here), 'file')}, {size:.2f} GiB{away}")
    elif not path.exists() or _bytes_of(path) != before:
        yield doctor.finding(place, "was replaced or removed while it was read")
    else:
        yield Finding("FAIL", place, f"{text}: {again}")


def _bytes_of(path: Path) -> bytes | None:
    """Returns the bytes of a file; None if it cannot be read."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


def _again(path: Path, kind: str | None) -> str:
    """Says how to make the step, or the artifact of ``kind``, that ``path`` lists again."""
    if path.name == step_files.STATE:
        return "remove this step's folder, and the same command resumes from the step before"
    if kind not in KINDS:
        return "make it again, or bring it back from a copy"
    if KINDS[kind].by_flags:
        return f"give the same command of {KINDS[kind].verb} again, with --force"
    return f"run 'mclclip {KINDS[kind].verb} --force' to make it again"


def _read_listing(path: Path) -> tuple[dict[Path, files.Record], str]:
    """Returns the files that a manifest or a step lists, with their records, and the artifact's
    kind (of a step '')."""
    folder, kind = path.parent, ""
    if path.name == step_files.STATE:
        records = step_files.read_entries(folder, int(folder.name.removeprefix("step_")))
    else:
        manifest = parse_manifest(path)
        records, kind = manifest.records, manifest.kind
    return {folder / name: record for name, record in records.items()}, kind


def _difference(folder: Path, path: Path, record: files.Record) -> str | None:
    """Says how a file differs from its record; None if it does not."""
    name = os.path.relpath(path, folder)
    try:
        now = files.record_of(path)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    if now.size_bytes != record.size_bytes:
        return f"{name} has {now.size_bytes:,} bytes, {record.size_bytes:,} were written"
    return None if now == record else f"{name} is not what was written (another SHA-256)"
