"""Reads the stored bytes of samples from files and urls, and parses the captions in them.

If a sample's bytes are not those that were indexed or copied, the result is a `BadSample`. Other
faults (a missing shard, an I/O error) raise, since they say nothing about the sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mclclip.data.locations import CAPTION, PICTURE, Locations
from mclclip.data.options import DataConfig
from mclclip.data.sample_index import DAMAGED_COPY, SampleIndex
from mclclip.data.shard_reader import Range, ShardReader
from mclclip.data.shard_scan import parse_captions
from mclclip.util.files import printable

Integers = npt.NDArray[np.int64]
BOTH = (PICTURE, CAPTION)
_MOST_NAMED = 8  # files of a batch that a message names
_AT_ONCE = 4096  # samples whose captions are read together


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be used. ``reason`` is a reason of `decode.DecodeError` or one of these:

    no_caption           it has no caption
    truncated, changed   its bytes are not those that were indexed
    damaged_copy         its bytes are not those that ``relocate`` copied
    unsuitable           the model does not take such an image; ``detail`` says why
    no_row               stored rows are read instead of images or captions, and it has none
    excluded             ``data.exclude`` lists it
    """

    sample_id: int
    reason: str
    detail: str = field(default="", compare=False)


@dataclass(frozen=True)
class RawSample:
    """The stored bytes of a sample: its image, and its .txt or .json member.

    A member is empty if it is not read, or if the sample has none.
    """

    sample_id: int
    image: bytes
    text: bytes


class Bytes:
    """Reads the stored bytes of samples from files or urls.

    ``locations`` say where they lie (None: in the shards of the index). If they have a checksum of
    a member, it is compared. The index has checksums of captions, and with ``data.verify=full`` of
    images; copies of ``relocate`` have both. Raises ValueError for ``data.verify=full`` if the
    index has no checksums of images.
    """

    def __init__(
        self, index: SampleIndex, options: DataConfig, locations: Locations | None = None
    ) -> None:
        self.index, self.options = index, options
        self.locations = locations or Locations(index)
        self.reader = ShardReader(self.locations.files, options)
        if options.verify == "full" and index.image_crc32 is None:
            raise ValueError(
                f"data.verify=full compares images with the index, and {index.directory} has "
                "no checksums of them: run 'mclclip index' with data.verify=full, which adds them"
            )

    def read(
        self, sample_ids: Sequence[int] | Integers, members: Sequence[int] = BOTH
    ) -> list[RawSample | BadSample]:
        """Reads the ``members`` of samples; returns them in the order of ``sample_ids``.

        They are read in the order in which they lie. Raises IndexError for an id outside the index.
        """
        ids = self.index.checked(sample_ids)
        places = self.locations.of(ids)[:, list(members)].tolist()
        self.reader.prefetch(_ranges(places))
        order = sorted(range(len(ids)), key=places.__getitem__)
        read = {k: self._read(int(ids[k]), members, places[k]) for k in order}
        return [read[k] for k in range(len(ids))]

    def start(self, sample_ids: Sequence[int] | Integers, members: Sequence[int] = BOTH) -> None:
        """Begins to read samples from urls, for a later ``read`` of the same arguments.

        An earlier start whose result was not read is cancelled.
        """
        places = self.locations.of(self.index.checked(sample_ids))[:, list(members)].tolist()
        self.reader.start_prefetch(_ranges(places))

    def _read(
        self, sample_id: int, members: Sequence[int], places: Sequence[Sequence[int]]
    ) -> RawSample | BadSample:
        both = [b"", b""]
        for member, (file, offset, size, crc32) in zip(members, places, strict=True):
            data = self.reader.read(file, offset, size) if size else b""
            if len(data) != size or (crc32 >= 0 and zlib.crc32(data) != crc32):
                reason = "truncated" if len(data) < size else "changed"
                is_copy = file >= len(self.index.shards)
                return BadSample(sample_id, DAMAGED_COPY if is_copy else reason)
            both[member] = data
        return RawSample(sample_id, *both)

    def captions_in(self, raw: RawSample) -> list[str]:
        """Parses the captions of a sample; none if its text was not read."""
        shard = self.index.shards[int(self.index.shard_of[raw.sample_id])]
        try:
            return parse_captions(raw.text, shard.captions)
        except ValueError:
            return []  # the index says how many captions there should be; callers compare

    def captions_of(self, sample_ids: Sequence[int]) -> list[list[str]]:
        """Reads all captions of each sample; raises the errors of ``texts_of``."""
        return [captions for _, captions in self.texts_of(sample_ids)]

    def texts_of(self, sample_ids: Sequence[int]) -> list[tuple[RawSample, list[str]]]:
        """Reads each sample without its image, and all its captions.

        Raises IndexError for an id outside the index, and RuntimeError if a sample's captions are
        not those that were indexed.
        """
        texts: list[tuple[RawSample, list[str]]] = []
        for start in range(0, len(sample_ids), _AT_ONCE):
            for raw in self.read(sample_ids[start : start + _AT_ONCE], [CAPTION]):
                captions = [] if isinstance(raw, BadSample) else self.captions_in(raw)
                number = int(self.index.num_captions[raw.sample_id])
                if isinstance(raw, BadSample) or len(captions) != number:
                    shard = self.index.shards[int(self.index.shard_of[raw.sample_id])].path
                    raise RuntimeError(
                        f"sample {self.index.keys([raw.sample_id])[0]} has {len(captions)} "
                        f"readable captions, the index says {number}, or other ones: its shard "
                        f"{printable(shard)} has changed, put the old one back or run 'mclclip "
                        "index --force'"
                    )
                texts.append((raw, captions))
        return texts

    def describe(self, name: str, sample_ids: Sequence[int] | Integers) -> tuple[str, list[str]]:
        """Describes a batch for messages: ``name`` with the files of its samples, and their keys.

        An example is ('step 17 from /data/00001.tar, /data/00007.tar', ['web/0001', ...]).
        """
        ids = self.index.checked(sample_ids)
        numbers = sorted({*self.locations.of(ids)[:, PICTURE, 0].tolist()})
        paths = [printable(self.locations.files[number].path) for number in numbers[:_MOST_NAMED]]
        more = len(numbers) - len(paths)
        files = ", ".join(paths) + (f" and {more} more" if more else "")
        return f"{name} from {files}", self.index.keys(ids)


def _ranges(places: Iterable[Iterable[Sequence[int]]]) -> Iterator[Range]:
    """Yields (file, offset, size) of all members of several samples, without empty ones."""
    return ((file, at, size) for members in places for file, at, size, _ in members if size)


def read_excluded(index: SampleIndex, path: str | None) -> frozenset[int]:
    """Returns the ids of the samples that the file of ``data.exclude`` lists.

    Raises ValueError for an unknown key, and the errors of ``excluded_keys``.
    """
    keys = excluded_keys(path)
    try:
        return frozenset(index.ids_of(keys).tolist())
    except ValueError as error:
        raise ValueError(f"data.exclude={path}: {error}") from error


def excluded_keys(path: str | None) -> list[str]:
    """Reads the keys in the file of ``data.exclude``; ValueError if it cannot be read."""
    if path is None:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ValueError(
            f"data.exclude={path} cannot be read ({reason}): name a file with a key 'source/key' "
            "on each line"
        ) from error
    return [key for line in lines if (key := line.strip())]
