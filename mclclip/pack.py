"""Verb: images + a CSV or TSV that names them -> tar shards in img2dataset's layout.

Images are stored byte for byte. Keys are running numbers in the order in which the table first
names each image; several rows of one image are several captions of one sample. Captions are
optional: an image without any is packed without a ``.txt`` member.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mclclip.data.shard_scan import IMAGE_EXTENSIONS, Findings, split_member_name
from mclclip.data.shard_writer import PackedSample, check_foreign, write_shards
from mclclip.files import Roots, digest_file
from mclclip.run.artifacts import Artifact, Manifest
from mclclip.run.runlog import progress

log = logging.getLogger("mclclip")
KIND = "shards"
_DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
_CAPTION_COLUMN = "title"  # where the table has it and no other is named
_KEY_DIGITS = 9
_REASONS = {
    "no_path": "rows without an image path, left out",
    "empty_caption": "rows with an empty caption, which does not count",
    "outside_folder": "images that lie in none of the folders of --images and --allow-root, with "
    "all links followed, left out",
    "missing_image": "images that are not in the folder, left out",
    "zero_byte_image": "images of zero bytes, left out",
    "unsupported_extension": f"images that are not {', '.join(IMAGE_EXTENSIONS)}, left out",
    "no_caption": "images without any caption, packed without one",
}


@dataclass
class _Entry:
    """One image of the table: its captions in the order of the rows, and its first row's other
    columns. ``file`` is where its image lies, with all links followed."""

    file: Path = Path()
    captions: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)


def pack(
    table: Path,
    images: Path,
    out: Path,
    *,
    path_column: str = "filepath",
    caption_column: str | None = None,
    samples_per_shard: int = 10_000,
    delimiter: str | None = None,
    key_prefix: str = "",
    allow_roots: Sequence[Path] = (),
    force: bool = False,
) -> Manifest:
    """Packs the images that ``table`` names (relative to the folder ``images``) into ``out``.

    Shards are given to others, and a table or a link may name any file of the machine: only images
    that lie below ``images`` or one of ``allow_roots``, with all links followed, are packed.

    ``delimiter`` None: chosen by the table's suffix. ``caption_column`` None: ``title`` if the
    table has that column, else no image gets a caption. Other columns of an image's first row are
    kept in its ``.json``. Rows and images that cannot be used, and images without a caption, are
    counted by reason, in the log and in the manifest. A finished ``out`` of the same table and
    options is skipped; one of others is an error, unless ``force`` moves it aside. The table's text
    is held in memory.

    Raises FileNotFoundError for a missing table or folder, ValueError for a missing column, a
    table that does not parse or yields no sample, and an ``out`` that holds foreign shards.
    """
    table, images, out = Path(table), Path(images), Path(out)
    folders = [images, *allow_roots]
    delimiter = _check(table, folders, out, samples_per_shard, key_prefix, delimiter)
    caption_column = _checked_columns(table, delimiter, path_column, caption_column)
    settings: dict[str, Any] = {
        "images": os.path.abspath(images),
        "path_column": path_column,
        "caption_column": caption_column,
        "samples_per_shard": samples_per_shard,
        "delimiter": delimiter,
        "key_prefix": key_prefix,
    }
    if allow_roots:
        settings["allow_roots"] = [os.path.abspath(folder) for folder in allow_roots]
    inputs = {"table": digest_file(table)}
    opened: dict[str, Any] = {"kind": KIND, "config": settings, "inputs": inputs}
    # Nothing is written yet: a table without usable rows must leave nothing behind.
    done = Artifact.open(out, **opened, force=force, write=False).manifest
    if done is not None:
        log.info("pack: %s is finished, nothing to do", out)
        return done
    findings = Findings()
    entries = _read_table(table, delimiter, path_column, caption_column, findings)
    entries = _usable(entries, images, Roots(images, *allow_roots), findings)
    if not entries:
        raise ValueError(
            f"no usable image in {table}: {'; '.join(findings.lines(_REASONS)) or 'it has no rows'}"
        )
    artifact = Artifact.open(out, **opened, force=force)
    samples = _samples(entries, key_prefix, path_column)
    return _write(artifact, samples, entries, samples_per_shard, findings)


def _write(
    artifact: Artifact,
    samples: Iterator[PackedSample],
    entries: dict[str, _Entry],
    samples_per_shard: int,
    findings: Findings,
) -> Manifest:
    out = artifact.directory
    shown = progress(samples, total=len(entries), description="pack")
    shards = write_shards(shown, out, samples_per_shard)
    counts = {
        "samples": len(entries),
        "captions": sum(len(entry.captions) for entry in entries.values()),
        "shards": len(shards),
        "findings": findings.to_json(),
    }
    log.info("pack: %d samples with %d captions in %d shards", *list(counts.values())[:3])
    if any(len(entry.captions) > 1 for entry in entries.values()):
        log.info(
            "pack: some have several captions; sources that read all have captions: json:captions"
        )
    for line in findings.lines(_REASONS):
        log.warning("pack: %s", line)
    return artifact.finish(counts)


def _check(
    table: Path,
    folders: Sequence[Path],
    out: Path,
    samples_per_shard: int,
    key_prefix: str,
    delimiter: str | None,
) -> str:
    """Returns the delimiter, by the table's suffix where none was given. Raises the errors of
    ``pack`` for what can be known before the table is read."""
    if not table.is_file():
        raise FileNotFoundError(f"no table at {table}")
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder of images at {folder}")
    check_foreign(out, "pack")
    if samples_per_shard < 1:
        raise ValueError(f"samples_per_shard is {samples_per_shard}, expected at least 1")
    if split_member_name(f"{key_prefix}0.jpg") != (f"{key_prefix}0", "jpg"):
        raise ValueError(f"key_prefix is {key_prefix!r}: keys are cut at a dot, use none")
    delimiter = _DELIMITERS.get(table.suffix.lower()) if delimiter is None else delimiter
    if delimiter is None:
        raise ValueError(
            f"{table} ends in {table.suffix!r}, expected .csv or .tsv: give the delimiter"
        )
    if len(delimiter) != 1:
        raise ValueError(f"delimiter is {delimiter!r}, expected one character")
    return delimiter


def _checked_columns(
    table: Path, delimiter: str, path_column: str, caption_column: str | None
) -> str | None:
    """The column of captions: the one given, else ``title`` if the table has it, else None, with a
    warning. Raises ValueError where the table lacks a column."""
    with open(table, encoding="utf-8-sig", newline="") as file:
        try:
            found = next(csv.reader(file, delimiter=delimiter), [])
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{table} line 1 does not parse: {error}") from None
    for name in (path_column, *([caption_column] if caption_column else [])):
        if name not in found:
            raise ValueError(
                f"{table} has no column {name!r}, it has {found}: name the columns of image path "
                "and caption"
            )
    if caption_column or _CAPTION_COLUMN in found:
        return caption_column or _CAPTION_COLUMN
    log.warning(
        "pack: %s has no column %r, it has %s: its images are packed without captions; name the "
        "column with --caption-column if one of these holds them",
        table, _CAPTION_COLUMN, found,
    )  # fmt: skip
    return None


def _read_table(
    table: Path, delimiter: str, path_column: str, caption_column: str | None, findings: Findings
) -> dict[str, _Entry]:
    """Images by their normalised path, in the order in which the table first names them."""
    entries: dict[str, _Entry] = {}
    with open(table, encoding="utf-8-sig", newline="") as file:
        # Cells that a short row lacks are empty.
        reader = csv.DictReader(file, delimiter=delimiter, restkey="", restval="")
        try:
            for row in reader:
                line = reader.line_num
                row.pop("", None)  # cells beyond the header, and columns without a name
                if not row[path_column].strip():
                    findings.add("no_path", f"{table.name} line {line}")
                    continue
                path = os.path.normpath(row.pop(path_column).strip())
                caption = row.pop(caption_column).strip() if caption_column else None
                entry = entries.setdefault(path, _Entry(metadata=row))
                if caption:
                    entry.captions.append(caption)
                elif caption is not None:
                    findings.add("empty_caption", f"{table.name} line {line}: {path}")
        except (csv.Error, UnicodeDecodeError) as error:
            at = reader.line_num + 1
            raise ValueError(f"{table} line {at} does not parse: {error}") from None
    return entries


def _usable(
    entries: dict[str, _Entry], images: Path, roots: Roots, findings: Findings
) -> dict[str, _Entry]:
    usable = {}
    for path, entry in entries.items():
        if Path(path).suffix.lower().removeprefix(".") not in IMAGE_EXTENSIONS:
            findings.add("unsupported_extension", path)
        elif "\0" in path or (file := roots.real_path(images / path)) is None:
            findings.add("outside_folder", path)
        elif not file.is_file():
            findings.add("missing_image", path)
        elif file.stat().st_size == 0:
            findings.add("zero_byte_image", path)
        else:
            usable[path] = replace(entry, file=file)
            if not entry.captions:
                findings.add("no_caption", path)
    return usable


def _samples(
    entries: dict[str, _Entry], key_prefix: str, path_column: str
) -> Iterator[PackedSample]:
    for number, (path, entry) in enumerate(entries.items()):
        data = entry.file.read_bytes()
        facts = {path_column: path, "sha256": hashlib.sha256(data).hexdigest()}
        yield PackedSample(
            key=f"{key_prefix}{number:0{_KEY_DIGITS}d}",
            image=data,
            extension=Path(path).suffix.lower().removeprefix("."),
            captions=entry.captions,
            metadata={**entry.metadata, **facts},
        )
