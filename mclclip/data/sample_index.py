"""The sample index: a memory-mapped table with one row for every image of all shards.

``samples.arrow`` holds key, shard and byte ranges of every sample, in the order of
``shards.json``; ``sample_id`` is the row number. webdataset reads shards only in sequence; this
table gives random access. Captions are optional: code that needs them asks
`SampleIndex.without_caption` which samples to leave out.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mclclip.data.index_tables import (
    INDEX_AGAIN,
    SAMPLES,
    map_table,
    read_shards,
    read_values,
)
from mclclip.data.shard_reader import ShardReader
from mclclip.data.shard_scan import ATTRIBUTE, IMAGE_CRC, PER_FIELD, RANGES, TEXT_CRC
from mclclip.data.shard_writer import packed_from, with_file
from mclclip.run.artifacts import Manifest, read_manifest, verb_of
from mclclip.run.runlog import count_of
from mclclip.util.files import (
    damaged_if_unreadable,
    digest_array,
    digest_json,
    read_json,
    write_json,
)
from mclclip.util.options import brief
from mclclip.util.randomness import mix

log = logging.getLogger("mclclip")
KIND = "index"
_AT_ONCE = 256  # so many bad samples are read at once from urls
BAD_SAMPLES = "bad_samples.json"
EXCLUDED, DAMAGED_COPY = "excluded", "damaged_copy"
REASONS_OF_ONE_READER = ("unsuitable", "no_caption", "no_row", EXCLUDED, DAMAGED_COPY)
"""Reasons why one verb cannot use a sample that another may use: the sample itself is not bad."""


class SampleIndex:
    """A finished index of N samples. Its arrays are memory-mapped: they take memory once read.

    image_offset, image_size, text_offset, text_size  int64 [N], the bytes of a sample in its shard;
                  the text is the ``.txt`` or ``.json`` member with the captions
    shard_of      int32 [N], the number of its shard
    num_captions  int32 [N]; a sample may have no caption
    text_crc32, image_crc32  uint32 [N], CRC-32 of the text and of the image when they were indexed;
                  None: not recorded
    shards        the shards; the samples of each are rows [start, stop)

    All arrays are read-only. The index pickles as its directory, so that processes get it cheaply.
    """

    image_offset: npt.NDArray[np.int64]
    image_size: npt.NDArray[np.int64]
    text_offset: npt.NDArray[np.int64]
    text_size: npt.NDArray[np.int64]
    num_captions: npt.NDArray[np.int32]
    shard_of: npt.NDArray[np.int32]
    text_crc32: npt.NDArray[np.uint32] | None
    image_crc32: npt.NDArray[np.uint32] | None

    def __init__(self, directory: Path, digest: str) -> None:
        self.directory = Path(directory)
        self.digest = digest
        self.shards = read_shards(self.directory)
        with damaged_if_unreadable(self.directory / SAMPLES, INDEX_AGAIN):
            table = map_table(self.directory)
        self._listed: dict[str, dict[str, str]] = {}
        self._still_bad: dict[int, dict[str, str]] = {}
        self._keys: pa.Array = table["key"].chunk(0)
        others = table.drop_columns("key")
        columns: dict[str, Any] = {n: others[n].chunk(0).to_numpy() for n in others.column_names}
        for name in (*RANGES, "num_captions"):
            setattr(self, name, columns[name])
        self.shard_of = columns["shard"]
        self.text_crc32, self.image_crc32 = columns.get(TEXT_CRC), columns.get(IMAGE_CRC)
        self._codes: dict[str, npt.NDArray[np.int32]] = {
            name.removeprefix(ATTRIBUTE): codes
            for name, codes in columns.items()
            if name.startswith(ATTRIBUTE)
        }

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> SampleIndex:
        """Opens a finished index, and compares the sizes of its files with what was written.

        Raises FileNotFoundError if ``mclclip index`` did not finish, and RuntimeError if a file has
        another size. Processes that get the index pickled do not compare again.
        """
        manifest = read_manifest(Path(directory), KIND)
        manifest.check(Path(directory))
        return cls(Path(directory), manifest.digest)

    def __len__(self) -> int:
        return len(self._keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleIndex, (self.directory, self.digest)

    def manifest_of(self, directory: Path, kind: str) -> Manifest:
        """Reads the manifest of a finished artifact with one row per sample of this index.

        Raises RuntimeError if it was made of another index, and the errors of ``read_manifest``.
        """
        manifest = read_manifest(directory, kind)
        if manifest.inputs["index"] != self.digest:
            raise RuntimeError(
                f"{kind} at {directory} has {manifest.counts['samples']:,} rows, the index has "
                f"{len(self):,} (and other sample keys): run 'mclclip {verb_of(kind)} "
                "--force' after 'mclclip index'"
            )
        return manifest

    @cached_property
    def caption_start(self) -> npt.NDArray[np.int64]:
        """int64 [N+1]: sample i has the captions [caption_start[i], caption_start[i+1])."""
        start = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.num_captions, out=start[1:])
        return start

    def keys(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> list[str]:
        """Returns the keys ``source/key`` of samples; IndexError for an id outside the index."""
        keys: list[str] = self._keys.take(pa.array(self.checked(ids))).to_pylist()
        return keys

    def names(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> list[str]:
        """Returns keys for messages, such as ``cats/0007 (photos/tom.jpg)``: with the file that
        ``mclclip pack`` made the sample of, if it did."""
        return [*map(with_file, self.keys(ids), self.files(ids))]

    def files(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> list[str]:
        """Returns the file that ``mclclip pack`` made each sample of, such as ``photos/tom.jpg``.

        It is in the sample's ``.json``, which is read; other samples have an empty text.
        """
        reader = ShardReader([shard.stored for shard in self.shards])
        rows = self.checked(ids)
        columns = (
            column[rows].tolist() for column in (self.shard_of, self.text_offset, self.text_size)
        )
        ranges = [*zip(*columns, strict=True)]
        with suppress(OSError):  # of a store that fails
            reader.prefetch(ranges)
        files = [""] * len(ranges)
        for place, (shard, offset, size) in enumerate(ranges):
            with suppress(OSError, ValueError):  # of a shard that is not there now
                files[place] = packed_from(reader.read(shard, offset, size))
        return files

    def ids_of(self, keys: Sequence[str]) -> npt.NDArray[np.int64]:
        """Returns the ids int64 [n] of samples by their keys ``source/key``.

        Raises ValueError, which names a few, if the index lacks some of the keys.
        """
        if not len(keys):
            return np.zeros(0, np.int64)
        looked_up = pa.array(keys, pa.large_string())
        # This hashes the few keys of the call, not the many of the index.
        rows = np.flatnonzero(pc.is_in(self._keys, value_set=looked_up.unique()))
        place = pc.index_in(looked_up, value_set=self._keys.take(pa.array(rows)))
        if place.null_count:
            missing = looked_up.filter(place.is_null())
            raise ValueError(
                f"{len(missing)} of {len(keys)} keys are not in the index at {self.directory}, "
                f"such as {', '.join(map(brief, missing[:3].to_pylist()))}: keys are 'source/key' "
                "as in data.sources"
            )
        return np.asarray(rows[place.to_numpy()], np.int64)

    def draw_captions(
        self, ids: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """Draws a caption of each sample by its random key: the captions' numbers, int64 [n].

        All captions of a sample are equally likely. If they come from several fields, first a field
        is drawn by its probability, among those that the sample has.
        """
        most = np.maximum(self.num_captions[ids], 1).astype(np.uint64)
        numbers: npt.NDArray[np.int64] = (keys % most).astype(np.int64)
        if PER_FIELD not in self._codes:
            return numbers
        draws = (np.asarray(mix(keys, 1), np.uint64) >> np.uint64(11)) * 2.0**-53
        codes, values = self.attribute(PER_FIELD)
        for code in np.unique(codes[ids]):
            if code < 0:  # of another source, or without a caption
                continue
            pairs = np.array([pair.split("x") for pair in values[code].split(" ")], np.float64)
            counts, ends = pairs[:, 0].astype(np.int64), np.cumsum(pairs[:, 1])
            mine = codes[ids] == code
            field = np.searchsorted(ends[:-1], draws[mine] * ends[-1], side="right")
            place = (keys[mine] % counts[field].astype(np.uint64)).astype(np.int64)
            numbers[mine] = (np.cumsum(counts) - counts)[field] + place
        return numbers

    # --- samples without captions ---

    def without_caption(self, reader: str) -> npt.NDArray[np.int64]:
        """Returns the sorted ids of the samples that have no caption.

        ``reader`` says in messages what reads captions, such as 'train.objective.kind=info_nce'.
        Raises ValueError if no sample has a caption.
        """
        ids = np.flatnonzero(self.num_captions == 0).astype(np.int64)
        if len(ids) == len(self):
            raise ValueError(
                f"{reader} reads captions, and none of the {len(self)} samples of the index at "
                f"{self.directory} has one: set data.sources.NAME.captions to where they are and "
                "index again, or train with an objective that reads none"
            )
        return ids

    def left_out(
        self, reader: str, *, captions: bool, attribute: str | None = None
    ) -> npt.NDArray[np.int64]:
        """Returns the sorted ids of the samples that lack a caption, or a value of an attribute.

        Raises the errors of ``without_caption`` and ``without_attribute``.
        """
        nothing = np.zeros(0, np.int64)
        bare = self.without_caption(reader) if captions else nothing
        unknown = nothing if attribute is None else self.without_attribute(attribute, reader)
        return np.union1d(bare, unknown)

    # --- attributes ---

    def attribute(self, name: str) -> tuple[npt.NDArray[np.int32], list[str]]:
        """Returns the codes int32 [N] of an attribute, memory-mapped, and the value of each code.

        Code -1 means no value. The values are sorted, whole numbers first and by their size. Raises
        ValueError if no source has such an attribute.
        """
        if name not in self._codes:
            raise ValueError(
                f"the index at {self.directory} has no attribute {name!r}, it has "
                f"{self.attributes or 'none'}: name it in "
                "data.sources.NAME.attributes, and run 'mclclip index --force'"
            )
        return self._codes[name], self._values[name]

    @property
    def attributes(self) -> list[str]:
        """The sorted names of the attributes."""
        return sorted({*self._codes} - {PER_FIELD})

    @cached_property
    def pictures_digest(self) -> str:
        """Digest of the pictures' sizes in bytes. It changes if other pictures have the same keys;
        pictures of equal sizes are not told apart. ``digest`` does not depend on it, so that labels
        of samples fit copies of their pictures too."""
        return digest_array(self.image_size)

    @cached_property
    def captions_digest(self) -> str:
        """Digest of the captions and of the fields that they are read from. It changes if other
        captions have the same keys."""
        places = sorted({(shard.source, shard.captions) for shard in self.shards})
        texts = [] if self.text_crc32 is None else [digest_array(self.text_crc32)]
        return digest_json([places, digest_array(self.num_captions), *texts])

    @cached_property
    def _values(self) -> dict[str, list[str]]:
        return read_values(self.directory)

    def without_attribute(self, name: str, reader: str) -> npt.NDArray[np.int64]:
        """Returns the sorted ids of the samples that have no value of an attribute.

        ``reader`` says in messages what reads it, such as 'train.objective.kind=supcon'. Raises
        ValueError if there is no such attribute, or it has fewer than two values.
        """
        codes, values = self.attribute(name)
        if len(values) < 2:
            there = f"the same value {values[0]!r}" if values else "no value"
            raise ValueError(
                f"{reader} reads the attribute {name!r}, and all {len(self)} samples of the index "
                f"at {self.directory} have {there} or lack it: name an attribute with several "
                "values, which are strings or integers in the samples' .json"
            )
        return np.flatnonzero(codes < 0).astype(np.int64)

    # --- samples that cannot be decoded ---

    def mark_bad(self, reasons: Mapping[int, str]) -> dict[int, dict[str, str]]:
        """Makes an entry ``{"reason": ..., "bytes": ...}`` of each bad sample {sample_id: reason}.

        ``bytes`` is a mark such as '5120+43:9f8e21ac': the sizes of image and text, and the CRC-32
        of both, which are read; 'missing' if the shard is not there.
        """
        reader, entries = ShardReader([shard.stored for shard in self.shards]), {}
        ids = self.checked([*reasons])
        columns = (getattr(self, name)[ids].tolist() for name in ("shard_of", *RANGES))
        # Of image and text.
        ranges = [((n, *of[:2]), (n, *of[2:])) for n, *of in zip(*columns, strict=True)]
        for number, sample_id in enumerate(ids.tolist()):
            if number % _AT_ONCE == 0:
                reader.prefetch(itertools.chain(*ranges[number : number + _AT_ONCE]))
            try:
                image, text = itertools.starmap(reader.read, ranges[number])
                mark = f"{len(image)}+{len(text)}:{zlib.crc32(text, zlib.crc32(image)):08x}"
            except FileNotFoundError:
                mark = "missing"
            entries[sample_id] = {"reason": reasons[sample_id], "bytes": mark}
        return entries

    def still_bad(self, entries: Mapping[int, dict[str, str]]) -> dict[int, dict[str, str]]:
        """Returns the entries of ``mark_bad`` whose samples have the same bytes now: a shard may
        have been restored since."""
        now = self.mark_bad({i: entry["reason"] for i, entry in entries.items()})
        return {i: entry for i, entry in entries.items() if entry == now[i]}

    def bad_samples(self) -> dict[int, dict[str, str]]:
        """Returns the entries of the undecodable samples so far that are ``still_bad``, by id.

        The bytes of these samples are read once for each content of ``bad_samples.json``.
        """
        path = self.directory / BAD_SAMPLES
        with damaged_if_unreadable(path, "take it away: what cannot be decoded is found again"):
            listed: dict[str, dict[str, str]] = read_json(path) if path.exists() else {}
            if not all({"reason", "bytes"} <= {*entry} for entry in listed.values()):
                raise ValueError("an entry lacks its reason or its bytes")
        if listed != self._listed:
            ids = self.ids_of(list(listed)).tolist()
            self._still_bad = self.still_bad(dict(zip(ids, listed.values(), strict=True)))
            self._listed = listed
        return self._still_bad

    def bad_ids(self) -> npt.NDArray[np.int64]:
        """Returns the sorted ids of ``bad_samples``."""
        return np.array(sorted(self.bad_samples()), np.int64)

    def add_bad(self, reasons: Mapping[int, str]) -> None:
        """Adds ``{sample_id: reason}`` to ``bad_samples.json``; a sample keeps its first reason.

        `REASONS_OF_ONE_READER` do not count. Only rank 0 may call this: two processes that replace
        the file at once would lose entries.
        """
        new = {i: reason for i, reason in reasons.items() if reason not in REASONS_OF_ONE_READER}
        if new:
            entries = {**self.mark_bad(new), **self.bad_samples()}
            by_key = zip(self.keys([*entries]), entries.values(), strict=True)
            write_json(self.directory / BAD_SAMPLES, dict(sorted(by_key)))

    def check_bad_fraction(self, reasons: Mapping[int, object], max_bad_fraction: float) -> None:
        """Raises ValueError if more than the share ``max_bad_fraction`` of all samples are bad.

        ``reasons`` are the bad samples by id; those that ``data.exclude`` lists do not count.
        """
        bad = [sample_id for sample_id, reason in reasons.items() if reason != EXCLUDED]
        if len(bad) > max_bad_fraction * len(self):
            least = math.ceil(1000 * len(bad) / len(self)) / 1000
            raise ValueError(
                f"{len(bad)} of {len(self)} samples cannot be used, such as "
                f"{', '.join(self.names(sorted(bad)[:3]))}, and data.max_bad_fraction="
                f"{max_bad_fraction} allows {int(max_bad_fraction * len(self))}: repair or remove "
                f"them, or set data.max_bad_fraction={least:g} or more"
            )

    def checked(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Returns the ids as int64 [n]. Raises IndexError for one outside the index, and ValueError
        for a mask and other numbers that are not whole."""
        array = np.asarray(ids)
        if array.dtype == bool and array.size:
            raise ValueError("sample_ids are a mask, wanted whole numbers: np.flatnonzero(mask)")
        numbers = array.astype(np.int64)
        if array.dtype.kind not in "iu" and not np.array_equal(array, numbers):
            raise ValueError("sample_ids are not whole numbers")
        if (outside := numbers[(numbers < 0) | (numbers >= len(self))]).size:
            raise IndexError(f"sample_id {outside[0]}, the index has 0..{len(self) - 1}")
        return numbers


class SharedBadSamples:
    """The bad samples of an index, known to all ranks. Making one is a collective."""

    def __init__(self, index: SampleIndex, max_bad_fraction: float) -> None:
        from mclclip.ranks import collectives  # torch, which readers of an index do without

        self.index = index
        self.max_bad_fraction = max_bad_fraction
        # One process reads them for all: it may have to read all keys of the index.
        self.reasons = dict.fromkeys(collectives.on_main(index.bad_ids).tolist(), "")

    def add(self, reasons: Mapping[int, str]) -> int:
        """Tells all ranks the bad samples of this rank, {sample_id: reason}; returns their number.

        The number includes those of all ranks and of earlier calls. A collective: every rank calls
        it. Rank 0 adds new ones to the index's ``bad_samples.json`` and logs some of them. Raises
        ValueError on all ranks if more than ``max_bad_fraction`` of the samples are bad.
        """
        from mclclip.ranks import collectives

        everywhere = {
            i: r for part in collectives.gather_objects(dict(reasons)) for i, r in part.items()
        }
        new = {i: reason for i, reason in everywhere.items() if i not in self.reasons}
        self.reasons |= new
        if new and collectives.rank() == 0:
            self.index.add_bad(new)
            keys = self.index.names(sorted(new)[:5])
            examples = [f"{key} ({new[i]})" for i, key in zip(sorted(new)[:5], keys, strict=True)]
            log.warning("%s cannot be used: %s", count_of(len(new), "sample"), ", ".join(examples))
        self.index.check_bad_fraction(self.reasons, self.max_bad_fraction)
        return len(self.reasons)
