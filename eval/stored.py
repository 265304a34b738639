"""Images and captions that lie in tar shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.data.sample_index import join_rows
from mclclip.data.shard_scan import Findings, parse_captions, scan_shard
from mclclip.eval.datasets import ImageTexts


@dataclass(frozen=True)
class StoredImage:
    """An image's place in a shard."""

    path: Path
    key: str
    offset: int
    size: int

    def read_bytes(self) -> bytes:
        """The image member's bytes; OSError where the shard cannot be read."""
        return _read(self.path, self.offset, self.size)

    def __str__(self) -> str:
        return f"{self.key} in {self.path}"


def _read(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), size, offset)


def check_shards(
    directory: Path, captions: str | None = None, attributes: Sequence[str] = ()
) -> None:
    """Raises the errors of ``read_shards`` that the first shard shows, such as a field that the
    samples do not have."""
    _read_shards(_shards(directory)[:1], captions, attributes)


def read_shards(
    directory: Path, captions: str | None = None, attributes: Sequence[str] = ()
) -> tuple[list[StoredImage], Any]:
    """The images of ``directory/*.tar`` and the table of their samples, in order.

    ``captions``: ``txt`` or ``json:FIELD``, None for images that need none. FileNotFoundError where
    there is no shard; ValueError for samples without a caption or without a value of one of the
    ``attributes``, or for shards with damage.
    """
    return _read_shards(_shards(directory), captions, attributes)


def _shards(directory: Path) -> list[Path]:
    shards = sorted(Path(directory).glob("*.tar"))
    if not shards:
        raise FileNotFoundError(f"there is no shard in {directory}: wanted *.tar files")
    return shards


def _read_shards(
    shards: Sequence[Path], captions: str | None, attributes: Sequence[str]
) -> tuple[list[StoredImage], Any]:
    findings, scans = Findings(), []
    for path in shards:
        scan = scan_shard(str(path), "", captions or "txt", attributes)
        findings.merge(scan.findings)
        scans.append(scan.rows)
    table = join_rows(None, 0, scans, findings)
    allowed = () if captions else ("no_caption",)
    wrong = {r: f for r, f in findings.to_json().items() if r not in allowed}
    if wrong or not len(table):
        found = ", ".join(f"{f['count']} {r}" for r, f in wrong.items()) or "no sample"
        wanted = [*([f"a caption ({captions})"] if captions else []), *attributes]
        raise ValueError(
            f"{shards[0].parent} holds {found}: an evaluation wants whole shards in which every "
            f"sample has {', '.join(wanted)}"
        )
    places = zip(
        *(table[c].to_pylist() for c in ("key", "shard", "image_offset", "image_size")), strict=True
    )
    images = [StoredImage(shards[n], key.strip("/"), start, size) for key, n, start, size in places]
    return images, table


def read_captions_of_shards(directory: Path, captions: str) -> ImageTexts:
    """The images and all captions (``txt`` or ``json:FIELD``) of ``directory/*.tar``; raises the
    errors of ``read_shards``."""
    images, table = read_shards(directory, captions)
    texts, owners = [], []
    places = zip(table["text_offset"].to_pylist(), table["text_size"].to_pylist(), strict=True)
    for row, (image, place) in enumerate(zip(images, places, strict=True)):
        own = parse_captions(_read(image.path, *place), captions)
        texts += own
        owners += [row] * len(own)
    return ImageTexts(images, texts, np.array(owners, dtype=np.int64))
