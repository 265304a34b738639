"""Reads and decodes samples by sample_id.

`TarDataset` reads ranges of tar shards and turns them into images and captions. If a sample's bytes
are unusable, the result is a `BadSample`; other faults (a missing shard, an I/O error) are raised,
since they say nothing about the sample.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

import mclclip.torchvision_fix  # noqa: F401
from mclclip.data.captions import TextFeatures, Tokenizer, tokenized
from mclclip.data.decode import DecodeError, decode
from mclclip.data.locations import Locations, Resharded, SampleRanges
from mclclip.data.options import DataConfig
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_reader import Range, ShardReader
from mclclip.data.shard_scan import parse_captions
from mclclip.data.trunk_rows import TrunkRows
from mclclip.files import shown
from mclclip.ranks import collectives, data_wait

Integers = npt.NDArray[np.int64]
Transform = Callable[[Any], Tensor]
"""From an upright RGB PIL image, or an array of pixels, to a tensor [C, H, W]."""
log = logging.getLogger("mclclip")
_AT_ONCE = 4096  # captions that are asked for together


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be used, with one short word why: a reason of `decode.DecodeError`;
    ``no_caption``; ``changed``, where its bytes are not those that were indexed; ``unfit``, where
    the model does not take such an image; ``not_cached``, where the trunk's cache has no row; or
    ``timeout``, where decoding it has ended a process twice (`SampleIndex.note_slow`)."""

    sample_id: int
    reason: str


@dataclass(frozen=True)
class RawSample:
    """The undecoded members of a sample; ``text`` is the .txt or .json member (empty where it is
    not read, or where there is none). ``image`` may be a row of the trunk's cache instead."""

    sample_id: int
    image: bytes
    text: bytes


@dataclass(frozen=True)
class Sample:
    """Views [C, H, W] each; text int64 [context] or None; text_features float32 [D] or None."""

    sample_id: int
    views: list[Tensor]
    caption_number: int
    text: Tensor | None = None
    text_features: Tensor | None = None


class _Unfit(ValueError):
    """A sample can be decoded, and the transform does not take it."""

    def __init__(self, sample_id: int, key: str, error: ValueError) -> None:
        super().__init__(f"sample {key}: {error}")
        self.sample_id = sample_id


class TarDataset(Dataset["Sample | BadSample"]):
    """Random access to the samples of an index; item i is sample_id i.

    transform      takes an upright RGB PIL image to a tensor [3, H, W] (open_clip's own train or
                   validation transform). One with an attribute ``reads_arrays`` that is true takes
                   uint8 [H, W, C] as well (`models.transforms`), and one whose ``reads_pixels`` is
                   true takes pictures as arrays only (`models.transforms`). None: `captions` and
                   `read_many` alone are wanted.
    tokenizer      a list of captions -> int64 [n, context]. Without it and ``text_features`` a
                   sample is an image alone, and caption members are not read; with either, a sample
                   without a caption is a `BadSample`.
    text_features  where text embeddings are looked up in the place of tokens
    resharded      copies of samples, which are read in the place of those of the index
    trunk          rows that stand for images; views are these, and no ``transform`` is needed

    Captions are compared with their checksums in the index always, images where ``options.verify``
    is ``full``. Through `__getitem__` and `__getitems__` a sample comes with one view and its first
    caption. Raises ValueError where images are to be compared and the index has no checksums of
    them.
    """

    def __init__(
        self,
        index: SampleIndex,
        options: DataConfig,
        transform: Transform | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        text_features: TextFeatures | None = None,
        resharded: Resharded | None = None,
        trunk: TrunkRows | None = None,
    ) -> None:
        self.index, self.options, self.transform = index, options, transform
        self.tokenizer = tokenizer if text_features is None else None
        self.text_features = text_features
        self.reads_captions = tokenizer is not None or text_features is not None
        self._compares_images = options.verify == "full" and trunk is None
        if self._compares_images and self.index.image_crc32 is None:
            raise ValueError(
                f"data.verify=full compares images with the index, and {self.index.directory} has "
                "no checksums of them: run 'mclclip index' with data.verify=full, which adds them"
            )
        self.locations, self._has_warned = Locations(self.index, resharded, trunk), False
        self.trunk = trunk
        self._too_slow = index.slow_ids()
        self.reader = ShardReader(self.locations.files, options)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, sample_id: int) -> Sample | BadSample:
        return self.__getitems__([sample_id])[0]

    def __getitems__(self, sample_ids: Sequence[int]) -> list[Sample | BadSample]:
        """Samples in the order asked, read in the order of (shard, offset); never raises for one
        that is bad, see `BadSample`."""
        return [self.prepare(raw) for raw in self.read_many(sample_ids)]

    def read_many(self, sample_ids: Sequence[int] | Integers) -> list[RawSample | BadSample]:
        """The undecoded members, in the order asked; ``text`` is empty unless it is tokenized.

        A member that ends beyond its shard gives BadSample "truncated".
        Raises IndexError for a sample_id outside the index.
        """
        ids = self._checked(sample_ids)
        all_ranges = self.locations.of(np.asarray(ids, np.int64))
        order = sorted(range(len(ids)), key=lambda k: all_ranges[k])
        self.reader.prefetch(wanted for ranges in all_ranges for wanted in self._wanted(ranges))
        found = {k: self._read(ids[k], all_ranges[k]) for k in order}
        return [found[k] for k in range(len(ids))]

    def start_reading(self, sample_ids: Sequence[int] | Integers) -> None:
        """Begins to read what a later `read_many` will be asked for, where it lies behind urls.

        What was begun before and not used is given up. Raises IndexError as that does.
        """
        all_ranges = self.locations.of(np.asarray(self._checked(sample_ids), np.int64))
        self.reader.start_prefetch(w for ranges in all_ranges for w in self._wanted(ranges))

    def captions(self, sample_id: int) -> list[str]:
        """All captions of one sample; see ``captions_of``."""
        return self.captions_of([sample_id])[0]

    def captions_of(self, sample_ids: Sequence[int]) -> list[list[str]]:
        """All captions of each sample, read from its shard; none for one without captions.

        Raises IndexError for a sample_id outside the index, and RuntimeError where a shard does not
        hold what was indexed.
        """
        ids = [i for i in self._checked(sample_ids) if self._has_caption(i)]
        found: dict[int, list[str]] = {}
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            all_ranges = self.locations.of_index(np.asarray(some, np.int64))
            texts = [ranges.text for ranges in all_ranges]
            self.reader.prefetch(texts)
            found |= {i: self._captions(i, text) for i, text in zip(some, texts, strict=True)}
        return [found.get(sample_id, []) for sample_id in sample_ids]

    def _captions(self, sample_id: int, member: Range) -> list[str]:
        data = self._member(member)
        captions = [] if data is None else self._parse(sample_id, data)
        number = int(self.index.num_captions[sample_id])
        if data is None or len(captions) != number or self._has_changed(sample_id, text=data):
            shard = self.index.shards[int(self.index.shard_of[sample_id])].path
            raise RuntimeError(
                f"sample {self.index.keys([sample_id])[0]} has {len(captions)} readable captions, "
                f"the index says {number}, or other ones: its shard {shown(shard)} has changed, "
                "put the old one back or run 'mclclip index --force'"
            )
        return captions

    def prepare(
        self,
        raw: RawSample | BadSample,
        caption_number: int = 0,
        contexts: Sequence[AbstractContextManager[object]] = (nullcontext(),),
    ) -> Sample | BadSample:
        """Decodes once, transforms once per view, and tokenizes.

        ``contexts`` has one entry per view. A view is transformed inside its entry, where the
        caller settles the random state; the tokenizer runs inside the first, after the transform.
        A BadSample passes through; what the transform does not take, such as an array where it
        reads pictures only, gives one with the reason "unfit". Raises RuntimeError for a data set
        without a transform.
        """
        try:
            with data_wait.decoding(raw.sample_id):
                return self._prepared(raw, caption_number, contexts)
        except _Unfit as error:
            log.debug("%s", error)
            return BadSample(error.sample_id, "unfit")

    def _prepared(
        self,
        raw: RawSample | BadSample,
        caption_number: int,
        contexts: Sequence[AbstractContextManager[object]],
    ) -> Sample | BadSample:
        """As ``prepare``, but a sample that the transform does not take raises."""
        if isinstance(raw, BadSample):
            return raw
        try:
            view = self._views_of(raw)
        except DecodeError as error:
            if (good := self._otherwise_in_store(raw)) is None:
                return BadSample(raw.sample_id, error.reason)
            raw, view = good
        text = text_features = None
        with contexts[0]:
            views = [view()]
            if self.text_features is not None:
                text_features = self.text_features.get(raw.sample_id, caption_number)
            elif self.tokenizer is not None:
                captions = self._parse(raw.sample_id, raw.text)
                if caption_number >= len(captions):
                    return BadSample(raw.sample_id, "no_caption")
                text = tokenized(self.tokenizer, [captions[caption_number]])[0]
        for context in contexts[1:]:
            with context:
                views.append(view())
        return Sample(raw.sample_id, views, caption_number, text, text_features)

    def _views_of(self, raw: RawSample) -> Callable[[], Tensor]:
        """Returns a function that gives a view [C, H, W] at each call; decodes the image once."""
        if self.trunk is not None:
            return partial(self.trunk.decoded, raw.image)
        if self.transform is None:
            raise RuntimeError("this TarDataset has no transform: it reads captions and bytes only")
        return partial(self._view, raw, self._decode(raw, self.transform), self.transform)

    def _otherwise_in_store(self, raw: RawSample) -> tuple[RawSample, Callable[[], Tensor]] | None:
        """A sample that cannot be decoded, and its views, where its store has other bytes that can.

        So what is noted as bad is so in its shard, whose bytes the note is compared with later.
        """
        (ranges,) = self.locations.of(np.array([raw.sample_id], np.int64))
        image = self.reader.read_in_store(*ranges.image)
        if image is None or image == raw.image:
            return None
        found = replace(raw, image=image)
        try:
            return found, self._views_of(found)
        except DecodeError:
            return None

    def _decode(self, raw: RawSample, transform: Transform) -> Any:
        arrays = bool(getattr(transform, "reads_arrays", False))
        pixels = bool(getattr(transform, "reads_pixels", False))
        try:
            return decode(raw.image, self.options.max_image_pixels, arrays, pixels)
        except DecodeError:
            raise
        except ValueError as error:
            raise _Unfit(raw.sample_id, self._key(raw.sample_id), error) from None

    def _view(self, raw: RawSample, image: Any, transform: Transform) -> Tensor:
        try:
            return transform(image)
        except ValueError as error:
            raise _Unfit(raw.sample_id, self._key(raw.sample_id), error) from None

    def check(self) -> None:
        """Raises ValueError, one line, where the first sample that can be decoded does not fit the
        transform, as with another number of channels; loaders only count such samples as bad.
        """

        def try_some() -> None:
            for sample_id in range(min(len(self.index), 100)):
                (raw,) = self.read_many([sample_id])
                with data_wait.decoding(sample_id):
                    if isinstance(self._prepared(raw, 0, [nullcontext()]), Sample):
                        return

        with torch.random.fork_rng(devices=[]):
            # All ranks try the same samples, so that one of them notes what takes too long.
            note = self.index.note_slow if collectives.rank() == 0 else data_wait.nothing
            data_wait.wait_for(
                try_some, lambda: "the first sample has not been decoded by this process", note
            )

    def _key(self, sample_id: int) -> str:
        return self.index.keys([sample_id])[0]

    def _read(self, sample_id: int, ranges: SampleRanges) -> RawSample | BadSample:
        if self.reads_captions and not self._has_caption(sample_id):
            return BadSample(sample_id, "no_caption")
        if sample_id in self._too_slow:
            return BadSample(sample_id, "timeout")
        if ranges.row_crc32 == -1:
            return BadSample(sample_id, "not_cached")
        try:
            image = self._member(ranges.image)
            text = self._member(ranges.text) if self.tokenizer is not None else b""
        except FileNotFoundError:
            if ranges.crc32 is None:
                raise
            image = text = None  # a copy that somebody has deleted
        if ranges.crc32 is not None and not _is_copy(image, text, ranges.crc32):
            self._warn_of_copy(sample_id)
            (original,) = self.locations.of_index(np.array([sample_id], np.int64))
            return self._read(sample_id, original)
        if self.trunk is not None and (image is None or zlib.crc32(image) != ranges.row_crc32):
            shard = int(self.index.shard_of[sample_id])
            raise self.trunk.damaged(self._key(sample_id), shard)
        if image is None or text is None:
            return BadSample(sample_id, "truncated")
        if self._has_changed(sample_id, text, image if self.trunk is None else None):
            return BadSample(sample_id, "changed")
        return RawSample(sample_id, image, text)

    def _has_changed(self, sample_id: int, text: bytes, image: bytes | None = None) -> bool:
        """Whether what was read (no ``text`` is empty) differs from its checksums in the index."""
        of_text = self.index.text_crc32
        if text and of_text is not None and zlib.crc32(text) != of_text[sample_id]:
            return True
        of_image = self.index.image_crc32 if self._compares_images else None
        return (
            image is not None
            and of_image is not None
            and (zlib.crc32(image) != of_image[sample_id])
        )

    def _has_caption(self, sample_id: int) -> bool:
        return bool(self.index.num_captions[sample_id])

    def _wanted(self, ranges: SampleRanges) -> tuple[Range, ...]:
        """The ranges that `_read` reads of a sample."""
        return (ranges.image,) if self.tokenizer is None else (ranges.image, ranges.text)

    def _warn_of_copy(self, sample_id: int) -> None:
        """Says once in a process that copies are damaged, and what is read instead."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the copy of sample %s is not what 'mclclip reshard' wrote: such samples are read "
                "from the shards of the index, one by one; run 'mclclip reshard --force', or "
                "upload its shards again", self._key(sample_id),
            )  # fmt: skip

    def _member(self, wanted: Range) -> bytes | None:
        """The bytes of a member; None where the shard ends before it does."""
        data = self.reader.read(*wanted)
        return data if len(data) == wanted[2] else None

    def _parse(self, sample_id: int, data: bytes) -> list[str]:
        shard = self.index.shards[int(self.index.shard_of[sample_id])]
        try:
            return parse_captions(data, shard.captions)
        except ValueError:
            return []  # it parsed when it was indexed; callers handle the missing captions

    def _checked(self, sample_ids: Sequence[int] | Integers) -> list[int]:
        ids = [int(sample_id) for sample_id in sample_ids]
        for sample_id in ids:
            if not 0 <= sample_id < len(self.index):
                raise IndexError(f"sample_id {sample_id}, the index has 0..{len(self.index) - 1}")
        return ids


def _is_copy(image: bytes | None, text: bytes | None, crc32: tuple[int, int]) -> bool:
    """Whether a copy has the checksums of what was written; captions that are not read have."""
    if image is None or text is None:
        return False
    return zlib.crc32(image) == crc32[0] and (not text or zlib.crc32(text) == crc32[1])
