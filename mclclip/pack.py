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
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
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
_REST = "train"  # the folder of what is not held out
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
    held_out: Mapping[str, float] = MappingProxyType({}),
    force: bool = False,
) -> Manifest:
    """Packs the images that ``table`` names (relative to the folder ``images``) into ``out``.

    Shards are given to others: only images that lie below ``images`` or one of ``allow_roots``,
    with all links followed, are packed. ``held_out`` has shares of the pictures by the folder of
    ``out`` that gets them, by their bytes, so that copies stay together; the rest is ``out/train``.

    ``delimiter`` None: chosen by the table's suffix. ``caption_column`` None: ``title`` if the
    table has that column, else no image gets a caption. Other columns of an image's first row are
    kept in its ``.json``. Rows and images that cannot be used, and images without a caption, are
    counted by reason, in the log and in the manifest. A finished ``out`` of the same table and
    options is skipped; one of others is an error, unless ``force`` moves it aside.

    Raises FileNotFoundError for a missing table or folder, ValueError for a missing column, a
    table that does not parse or yields no sample, and an ``out`` that holds foreign shards.
    """
    table, images, out = Path(table), Path(images), Path(out)
    delimiter = _check(table, [images, *allow_roots], samples_per_shard, key_prefix, delimiter)
    _check_held_out(held_out, out)
    caption_column = _checked_columns(table, delimiter, path_column, caption_column)
    settings: dict[str, Any] = {
        "images": os.path.abspath(images),
        "path_column": path_column,
        "caption_column": caption_column,
        "samples_per_shard": samples_per_shard,
        "delimiter": delimiter,
        "key_prefix": key_prefix,
    }
    roots = [os.path.abspath(folder) for folder in allow_roots]
    further = {"allow_roots": roots, "held_out": dict(held_out)}
    settings |= {name: value for name, value in further.items() if value}
    opened: Any = {"kind": KIND, "config": settings, "inputs": {"table": digest_file(table)}}
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
    samples = _samples(entries, key_prefix, path_column, held_out)
    return _write(artifact, samples, len(entries), samples_per_shard, findings)


def _write(
    artifact: Artifact,
    samples: Iterator[PackedSample],
    total: int,
    samples_per_shard: int,
    findings: Findings,
) -> Manifest:
    held_out = artifact.config.get("held_out")
    shares: dict[str, dict[str, int]] = {
        folder: {"samples": 0, "captions": 0, "shards": 0}
        for folder in ([*held_out, _REST] if held_out else [""])
    }
    several = 0

    def counted() -> Iterator[PackedSample]:
        nonlocal several
        for sample in progress(samples, total=total, description="pack"):
            share = shares[sample.folder]
            share["samples"] += 1
            share["captions"] += len(sample.captions)
            several += len(sample.captions) > 1
            yield sample

    out = artifact.directory
    for path in write_shards(counted(), out, samples_per_shard):
        shares["" if path.parent == out else path.parent.name]["shards"] += 1
    counts: dict[str, Any] = {
        name: sum(share[name] for share in shares.values())
        for name in ("samples", "captions", "shards")
    }
    if held_out:
        counts["shares"] = shares
    log.info(
        "pack: %d samples with %d captions in %d shards",
        counts["samples"], counts["captions"], counts["shards"],
    )  # fmt: skip
    if several:
        log.info(
            "pack: some have several captions; sources that read all have captions: json:captions"
        )
    for line in findings.lines(_REASONS):
        log.warning("pack: %s", line)
    return artifact.finish({**counts, "findings": findings.to_json()})


def _check_held_out(held_out: Mapping[str, float], out: Path) -> None:
    for name, share in held_out.items():
        if not re.fullmatch(r"\w+", name) or name == _REST or not 0 < share < 1:
            raise ValueError(
                f"held_out has {name!r}: {share}: wanted the name of a folder other than "
                f"{_REST!r}, and a share of the pictures between 0 and 1"
            )
    if sum(held_out.values()) >= 1:
        raise ValueError(f"held_out is {dict(held_out)}: nothing is left for {_REST!r}")
    check_foreign(out, "pack", *held_out, *([_REST] if held_out else []))


def _check(
    table: Path,
    folders: Sequence[Path],
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
    entries: dict[str, _Entry], key_prefix: str, path_column: str, held_out: Mapping[str, float]
) -> Iterator[PackedSample]:
    for number, (path, entry) in enumerate(entries.items()):
        data = entry.file.read_bytes()
        digest = hashlib.sha256(data)
        facts = {path_column: path, "sha256": digest.hexdigest()}
        yield PackedSample(
            key=f"{key_prefix}{number:0{_KEY_DIGITS}d}",
            image=data,
            extension=Path(path).suffix.lower().removeprefix("."),
            captions=entry.captions,
            metadata={**entry.metadata, **facts},
            folder=_folder(digest.digest(), held_out),
        )


def _folder(digest: bytes, held_out: Mapping[str, float]) -> str:
    """The folder of a picture: its digest as a number in [0, 1) falls into one of the intervals
    that the shares make, one after another from 0 on, or into the rest."""
    place, end = int.from_bytes(digest[:8], "big") / 2**64, 0.0
    for name, share in held_out.items():
        end += share
        if place < end:
            return name
    return _REST if held_out else ""
