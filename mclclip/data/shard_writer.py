"""Writes samples as WebDataset shards in img2dataset's layout.

``00000.tar`` holds ``KEY.jpg KEY.json KEY.txt`` for each sample; ``.txt`` is the first caption,
``.json`` has all captions and the metadata. An array of any number of channels is ``KEY.npy``,
uint8 [H, W, C]. The same samples give the same bytes: times are 0, owners fixed.
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
from mclclip.data.shard_scan import ARRAY_EXTENSION, parse_attributes, split_member_name
from mclclip.run.artifacts import is_finished, read_identity
from mclclip.util.files import Record, printable, record_of, remove_leftovers, whole_file

PACKED_FROM = "packed_from"
"""Field of a sample's ``.json``: the file, or the row of a table, that ``pack`` made it of."""

_OWNER = "mclclip"
_MAGIC = {
    b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"\x93NUMPY": ARRAY_EXTENSION, b"RIFF": "webp",
    b"GIF8": "gif", b"II*\0": "tif", b"MM\0*": "tif", b"BM": "bmp",
    b"\0\0\0\x0cjP  ": "jp2", b"\xff\x4f\xff\x51": "j2k",
}  # fmt: skip
_OWN_NAME = re.compile(r"\d{5,}\.tar")


def packed_from(text: bytes) -> str:
    """Returns the file that ``pack`` made a sample of, as its ``.json``, ``text``, says; or ""."""
    return parse_attributes(text, [PACKED_FROM])[0] or ""


def with_file(key: str, file: str) -> str:
    """Returns a sample's key with the file it was made of, if known: ``0007 (photos/tom.jpg)``."""
    return f"{key} ({printable(file)})" if file else key


@dataclass(frozen=True)
class PackedSample:
    """One sample to be written.

    image      the bytes of the image, which are stored unchanged
    extension  its kind, such as 'jpg'
    folder     the folder of its shard, below that of all shards; "" for the latter itself
    """

    key: str
    image: bytes
    extension: str
    captions: list[str]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""

    def members(self) -> dict[str, Any]:
        """Returns the tar members by extension, as webdataset's writer takes them.

        ``key``, ``caption`` and ``captions`` replace metadata of these names. A sample without
        captions has no ``.txt``. Raises ValueError for a key with a dot, which readers would cut.
        """
        if split_member_name(f"{self.key}.{self.extension}") != (self.key, self.extension):
            raise ValueError(
                f"key {self.key!r} with extension {self.extension!r}: a key needs a name without "
                f"dots, or readers cut it at the first one"
            )
        assert self.extension in (*IMAGE_EXTENSIONS, ARRAY_EXTENSION), self.extension
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
    """Writes shards ``00000.tar``, ``00001.tar``, ... in each folder that samples name.

    Returns their paths. A shard has a temporary name until it is complete, so that a killed writer
    leaves none that looks finished. Existing shards of the same number are replaced, and those of
    higher numbers, which an earlier writer left, are removed. ``records`` gets the record (size and
    digest) of each shard by its name below ``directory``. Raises ValueError for a key that occurs
    twice. Memory: the set of keys.
    """
    if samples_per_shard < 1:
        raise ValueError(f"samples_per_shard is {samples_per_shard}, expected at least 1")
    from webdataset.writer import TarWriter  # imports torch, which takes a second

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
        for sample_number, sample in enumerate(samples):
            earlier = seen.setdefault(sample.key, sample_number)
            if earlier != sample_number:
                raise ValueError(
                    f"samples {earlier} and {sample_number} (counted from 0) have the same key "
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
    """Returns the extension of an image by its first bytes; None if shards do not hold its kind."""
    extension = next((name for magic, name in _MAGIC.items() if data.startswith(magic)), None)
    extension = "avif" if data[4:12] in (b"ftypavif", b"ftypavis") else extension
    return extension if extension in (*IMAGE_EXTENSIONS, ARRAY_EXTENSION) else None


def check_foreign(out: Path, verb: str, *folders: str) -> None:
    """Raises ValueError if ``out`` is a file, or if it, or one of the ``folders`` in it, holds
    shards of somebody else.

    They would be mixed with ours, or replaced. A folder is ours if a verb began or finished there.
    """
    out = Path(out)
    if out.is_file():
        raise ValueError(f"--out {out} is a file: give a new folder")
    places = [out, *(out / folder for folder in folders)]
    shard = next((path for place in places for path in sorted(place.glob("*.tar"))), None)
    if shard is not None and not read_identity(out):
        raise ValueError(
            f"{shard.parent} holds shards that 'mclclip {verb}' did not write, such as "
            f"{shard.name}: use another folder"
        )


def refuse_unfinished(paths: Iterable[str | Path]) -> None:
    """Raises ValueError if one of the files lies in a folder, or in a part of it such as ``train``,
    in which a verb was to write shards and was not finished.

    Each of its shards is whole, but samples are missing.
    """
    folders = {Path(path).parent for path in paths}
    for folder in sorted(folders | {folder.parent for folder in folders}):
        try:
            kind = "" if is_finished(folder) else read_identity(folder).get("kind", "")
        except ValueError:
            kind = ""  # somebody else's file of this name
        if kind in ("shards", "dataset"):
            raise ValueError(
                f"{folder} is not finished, since what writes it was ended or still runs: type "
                "that command again"
            )
