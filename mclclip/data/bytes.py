"""Reads the members of samples as they are stored, wherever they lie, and the captions in them.

If a sample's bytes are not those that were indexed or copied, the result is a `BadSample`; other
faults (a missing shard, an I/O error) are raised, since they say nothing about the sample.
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
_MOST_NAMED = 8  # files of a batch
_AT_ONCE = 4096  # captions that are asked for together


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be used, with one short word why: a reason of `decode.DecodeError`;
    ``no_caption``; ``truncated`` or ``changed``, where its bytes are not those that were indexed;
    ``damaged_copy``, where they are not those that ``relocate`` copied; ``unfit``, where the model
    does not take such an image; ``no_row``, where rows stand for images and it has none; or
    ``excluded``, where ``data.exclude`` lists it. ``detail`` says how it is unfit."""

    sample_id: int
    reason: str
    detail: str = field(default="", compare=False)


@dataclass(frozen=True)
class RawSample:
    """The undecoded members of a sample, each empty where it is not read; ``text`` is the .txt or
    .json member, empty where there is none."""

    sample_id: int
    image: bytes
    text: bytes


class Bytes:
    """Reads the members of samples: of files, or of urls.

    Every member is compared with its checksum in ``locations`` (default: those of the index) if
    that has one: the index has those of captions, and of images with ``data.verify=full``; copies
    have both. Raises ValueError where images are to be compared and the index has no checksums.
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
        """The ``members`` of samples, in the order asked, read in the order in which they lie.

        Raises IndexError for a sample_id outside the index.
        """
        ids = self.index.checked(sample_ids)
        places = self.locations.of(ids)[:, list(members)].tolist()
        self.reader.prefetch(_ranges(places))
        order = sorted(range(len(ids)), key=places.__getitem__)
        read = {k: self._read(int(ids[k]), members, places[k]) for k in order}
        return [read[k] for k in range(len(ids))]

    def start(self, sample_ids: Sequence[int] | Integers, members: Sequence[int] = BOTH) -> None:
        """Begins to read what a later ``read`` will be asked for, where it lies behind urls.

        What was begun before and not used is given up. Raises IndexError as that does.
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
        """The captions in the member with captions; none where it is not read."""
        shard = self.index.shards[int(self.index.shard_of[raw.sample_id])]
        try:
            return parse_captions(raw.text, shard.captions)
        except ValueError:
            return []  # it parsed when it was indexed; callers handle the missing captions

    def captions_of(self, sample_ids: Sequence[int]) -> list[list[str]]:
        """All captions of each sample, as ``texts_of``."""
        return [captions for _, captions in self.texts_of(sample_ids)]

    def texts_of(self, sample_ids: Sequence[int]) -> list[tuple[RawSample, list[str]]]:
        """Each sample without its image, and all its captions; none for one without captions.

        Raises IndexError for a sample_id outside the index, and RuntimeError where a shard does not
        hold what was indexed.
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
        """``name`` with the files that samples are read from, and the samples' keys."""
        ids = self.index.checked(sample_ids)
        numbers = sorted({*self.locations.of(ids)[:, PICTURE, 0].tolist()})
        paths = [printable(self.locations.files[number].path) for number in numbers[:_MOST_NAMED]]
        more = len(numbers) - len(paths)
        files = ", ".join(paths) + (f" and {more} more" if more else "")
        return f"{name} from {files}", self.index.keys(ids)


def _ranges(places: Iterable[Iterable[Sequence[int]]]) -> Iterator[Range]:
    """The ranges of several samples, without empty ones."""
    return ((file, at, size) for own in places for file, at, size, _ in own if size)


def read_excluded(index: SampleIndex, path: str | None) -> frozenset[int]:
    """Ids of the samples whose keys the file of ``data.exclude`` lists, one a line; none without a
    file. Raises ValueError, one line, for an unknown key, and the errors of ``excluded_keys``."""
    keys = excluded_keys(path)
    try:
        return frozenset(index.ids_of(keys).tolist())
    except ValueError as error:
        raise ValueError(f"data.exclude={path}: {error}") from error


def excluded_keys(path: str | None) -> list[str]:
    """The keys that the file of ``data.exclude`` lists; ValueError where it cannot be read."""
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
