"""Writes samples as WebDataset shards in img2dataset's layout.

``00000.tar`` holds ``KEY.jpg KEY.json KEY.txt`` per sample; ``.txt`` is the first caption,
``.json`` has all of them and the metadata. An image of other than three channels is ``KEY.npy``:
uint8 [H, W, C] as ``numpy.save`` writes it, without pickle. The same samples give the same bytes:
times are 0, owners fixed.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mclclip.data.decode import IMAGE_EXTENSIONS
from mclclip.data.shard_scan import ARRAY_EXTENSION, split_member_name
from mclclip.run.artifacts import read_identity
from mclclip.util.files import Record, record_of, remove_leftovers, whole_file

PACKED_FROM = "packed_from"
"""Field of a sample's ``.json`` with the file, or the row of a table, that ``pack`` read."""

_OWNER = "mclclip"
_MAGIC = {
    b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"\x93NUMPY": ARRAY_EXTENSION, b"RIFF": "webp",
    b"GIF8": "gif", b"II*\0": "tif", b"MM\0*": "tif", b"BM": "bmp",
    b"\0\0\0\x0cjP  ": "jp2", b"\xff\x4f\xff\x51": "j2k",
}  # fmt: skip
_OWN_NAME = re.compile(r"\d{5,}\.tar")


@dataclass(frozen=True)
class PackedSample:
    """One image, byte for byte as it is stored, with its captions (the first goes to ``.txt``).

    ``folder``: its shard lies in this folder of that of all shards; "" is the latter itself.
    """

    key: str
    image: bytes
    extension: str
    captions: list[str]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""

    def members(self) -> dict[str, Any]:
        """The tar members by extension, as webdataset's writer takes them.

        ``key``, ``caption`` and ``captions`` replace metadata of these names. A sample without
        captions gets no ``.txt``. Raises ValueError for a key or extension that a reader would
        split in another way.
        """
        if split_member_name(f"{self.key}.{self.extension}") != (self.key, self.extension):
            raise ValueError(
                f"key {self.key!r} with extension {self.extension!r}: a key needs a name without "
                f"dots, or readers cut it at the first one"
            )
        if self.extension not in (known := (*IMAGE_EXTENSIONS, ARRAY_EXTENSION)):
            raise ValueError(
                f"sample {self.key!r} has the extension {self.extension!r}, expected one of "
                f"{', '.join(known)}"
            )
        first = self.captions[0] if self.captions else None
        facts = {**self.metadata, "key": self.key, "caption": first, "captions": self.captions}
        text = json.dumps(facts, ensure_ascii=False, sort_keys=True)
        members = {"__key__": self.key, self.extension: self.image, "json": text.encode()}
        return members if first is None else {**members, "txt": first.encode()}


def write_shards(
    samples: Iterable[PackedSample],
    directory: Path,
    samples_per_shard: int,
    records: dict[str, Record] | None = None,
) -> list[Path]:
    """Writes ``{shard:05d}.tar`` files of ``samples_per_shard`` samples, one series for each folder
    that samples name; returns them in the order in which they were begun.

    A shard has a temporary name until it is whole, so that a killed writer leaves none that looks
    finished. Existing shards of the same number are replaced, and those of higher numbers, which a
    killed writer of more samples left, are removed. Raises ValueError for a key that occurs twice
    (naming both samples by number, counted from 0). Memory: one set of keys. ``records`` gets the
    record of each shard by its name below ``directory``, made while the page cache holds it.
    """
    if samples_per_shard < 1:
        raise ValueError(f"samples_per_shard is {samples_per_shard}, expected at least 1")
    from webdataset.writer import TarWriter  # imports torch: what is refused does not wait for it

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory)
    paths: list[Path] = []
    records = {} if records is None else records
    seen: dict[str, int] = {}  # the number of the sample with each key
    counts: Counter[str] = Counter()
    writers: dict[str, TarWriter] = {}
    shards: dict[str, ExitStack] = {}  # closed: the shard is whole; left by an error: it is removed
    with ExitStack() as every:
        for own, sample in enumerate(samples):
            if (earlier := seen.setdefault(sample.key, own)) != own:
                raise ValueError(
                    f"samples {earlier} and {own} (counted from 0) have the same key "
                    f"{sample.key!r}: keys must be unique"
                )
            folder = sample.folder
            number, place = divmod(counts[folder], samples_per_shard)
            if place == 0:
                if number == 0:
                    remove_leftovers(directory / folder)
                    shards[folder] = every.enter_context(ExitStack())
                paths.append(directory / folder / f"{number:05d}.tar")
                file = shards[folder].enter_context(whole_file(paths[-1]))
                tar = TarWriter(file, user=_OWNER, group=_OWNER, mtime=0, encoder=False)
                writers[folder] = shards[folder].enter_context(tar)
            writers[folder].write(sample.members())
            counts[folder] += 1
            if place == samples_per_shard - 1:
                shards[folder].close()
                name = os.path.join(folder, f"{number:05d}.tar")
                records[name] = record_of(directory / name)
    for name in {str(path.relative_to(directory)) for path in paths} - records.keys():
        records[name] = record_of(directory / name)
    for within in {directory, *(path.parent for path in paths)}:
        for stale in {*within.glob("*.tar")} - {*paths}:
            if _OWN_NAME.fullmatch(stale.name):
                stale.unlink()
    return paths


def image_extension(data: bytes) -> str | None:
    """The extension of an image of a kind that shards hold, by its first bytes; None of another."""
    found = next((name for magic, name in _MAGIC.items() if data.startswith(magic)), None)
    found = "avif" if data[4:12] in (b"ftypavif", b"ftypavis") else found
    return found if found in (*IMAGE_EXTENSIONS, ARRAY_EXTENSION) else None


def check_foreign(out: Path, verb: str, *folders: str) -> None:
    """Raises ValueError where ``out``, or one of these folders in it, holds shards and no record
    that a verb began or finished there: they would be mixed with others, or replaced."""
    out = Path(out)
    places = [out, *(out / folder for folder in folders)]
    found = next((path for place in places for path in sorted(place.glob("*.tar"))), None)
    if found is not None and not read_identity(out):
        raise ValueError(
            f"{found.parent} holds shards that 'mclclip {verb}' did not write, such as "
            f"{found.name}: use another folder"
        )
