"""Images of a benchmark: files that tables name, parts of them, and members of tar shards.

Loaders of data sets begin here: they import no torch, and raise FileNotFoundError for what is
missing and ValueError for wrong content, in one line. Names and links do not lead out of a folder.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mclclip.data.shard_check import join_rows
from mclclip.data.shard_scan import Findings, scan_shard
from mclclip.files import MAX_JSON_BYTES, Roots, parse_json, read_bounded

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


class Readable(Protocol):
    """An image file, or a part of another file; ``str`` of it names it in messages."""

    def read_bytes(self) -> bytes:
        """The bytes of the image; OSError where they cannot be read."""
        ...


@dataclass(frozen=True)
class Region:
    """A part of an image file, which is encoded like an image of its own.

    box: left, top, right and bottom edge in pixels; what lies outside of the picture is black.
    """

    path: Path
    box: tuple[int, int, int, int]

    def read_bytes(self) -> bytes:
        """The bytes of the whole image; OSError where they cannot be read."""
        return self.path.read_bytes()

    def __str__(self) -> str:
        return f"{self.path} cut to {self.box}"


@dataclass(frozen=True)
class StoredImage:
    """The byte range of an image in a shard."""

    path: Path
    key: str
    offset: int
    size: int

    def read_bytes(self) -> bytes:
        """The image member's bytes; OSError where the shard cannot be read."""
        return read_range(self.path, self.offset, self.size)

    def __str__(self) -> str:
        return f"{self.key} in {self.path}"


def image_items(images: Iterable[Any], root: Path) -> list[str]:
    """A name for each image in the outcomes: a file's path below ``root``, the key of an image in a
    shard, otherwise ``str(image)``."""
    return [
        path.relative_to(root).as_posix()
        if isinstance(path, Path) and path.is_relative_to(root)
        else getattr(path, "key", str(path))
        for path in images
    ]


# --- tables and lines --------------------------------------------------------------------------


def read_rows(path: Path, columns: Sequence[str], what: str) -> list[tuple[int, list[str]]]:
    """The line and the cells under ``columns`` of every row of a CSV (or .tsv) with a header.

    Blanks after a delimiter are ignored. ``what`` names the file in the FileNotFoundError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no {what} at {path}")
    delimiter = "\t" if path.suffix == ".tsv" else ","
    with open(path, newline="", encoding="utf-8-sig") as file:
        try:
            reader = csv.DictReader(file, delimiter=delimiter, skipinitialspace=True)
            reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
            if missing := [name for name in columns if name not in reader.fieldnames]:
                raise ValueError(
                    f"{path} has the columns {reader.fieldnames}, missing {missing}: its first "
                    f"line must name them, such as '{delimiter.join(columns)}'"
                )
            return [(reader.line_num, [row[name] or "" for name in columns]) for row in reader]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} does not parse: {error}") from None


def read_lines(
    path: Path, *, unique_keys: bool = False, max_bytes: int = MAX_JSON_BYTES
) -> list[tuple[str, Any]]:
    """The name and the JSON value of every line of a file that is not blank; ValueError for a file
    of more than ``max_bytes``."""
    lines = read_bounded(path, max_bytes).split(b"\n")
    named = [(f"{path} line {n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    return [(name, parse_json(line, name, unique_keys=unique_keys)) for name, line in named]


# --- links -------------------------------------------------------------------------------------


def check_inside(paths: Iterable[Path], folder: Path, *others: Path) -> None:
    """Raises ValueError for a path that leads by a link out of a benchmark's ``folder`` and of
    ``others``.

    A snapshot in the Hub's cache consists of links to the blobs beside all snapshots, which are
    allowed.
    """
    above = next((path for path in folder.resolve().parents if path.name == "snapshots"), None)
    roots = Roots(folder, *others, *([above.with_name("blobs")] if above else []))
    if outside := next((path for path in paths if roots.real_path(path) is None), None):
        raise ValueError(
            f"{outside} leads to {outside.resolve()}, which is not below {folder}: benchmarks "
            "are read from their own folder only, copy the images there"
        )


# --- shards ------------------------------------------------------------------------------------


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Reads at most ``size`` bytes of a file from ``offset`` on. Raises OSError."""
    with open(path, "rb") as file:
        return os.pread(file.fileno(), size, offset)


def read_shards(
    directory: Path,
    captions: str | None = None,
    attributes: Sequence[str] = (),
    *,
    first_only: bool = False,
) -> tuple[list[StoredImage], Any]:
    """The images of ``directory/*.tar`` and the table of their samples, in order.

    ``captions``: ``txt`` or ``json:FIELD``, None for images that need none. ``first_only``: of the
    first shard, which shows mistakes such as a field that the samples do not have.
    FileNotFoundError where there is no shard; ValueError for samples without a caption or without a
    value of one of the ``attributes``, or for shards with damage.
    """
    shards = sorted(Path(directory).glob("*.tar"))
    if not shards:
        raise FileNotFoundError(f"there is no shard in {directory}: wanted *.tar files")
    findings, scans = Findings(), []
    for path in shards[:1] if first_only else shards:
        scan = scan_shard(str(path), "", captions or "txt", attributes)
        findings.merge(scan.findings)
        scans.append(scan.rows)
    table = join_rows(None, 0, scans, findings)
    allowed = () if captions else ("no_caption",)
    wrong = {r: f for r, f in findings.to_json().items() if r not in allowed}
    if wrong or not len(table):
        got = ", ".join(f"{f['count']} {r}" for r, f in wrong.items()) or "no sample"
        wanted = [*([f"a caption ({captions})"] if captions else []), *attributes]
        raise ValueError(
            f"{directory} holds {got}: an evaluation wants whole shards in which every "
            f"sample has {', '.join(wanted)}"
        )
    columns = (table[c].to_pylist() for c in ("key", "shard", "image_offset", "image_size"))
    images = [
        StoredImage(shards[shard], key.strip("/"), offset, size)
        for key, shard, offset, size in zip(*columns, strict=True)
    ]
    return images, table
