"""Reads and decodes samples by sample_id; their captions come as tokens or stored embeddings.

`TarDataset` reads ranges of tar shards and turns them into images and captions. If a sample's bytes
are unusable, the result is a `BadSample`; other faults (a missing shard, an I/O error) are raised,
since they say nothing about the sample.

`tokenized` cuts a text to as much of it as can reach the model. Tokenizers read a text as a whole
before they cut their tokens off at the context length: one of 10 MB costs more than a second, and a
single word of 30,000 letters a minute. `draw_sentences` gives some sentences of a paragraph.

Sources of the latter: Zheng et al., "DreamLIP: Language-Image Pre-training with Long Captions"
(2024), which trains on sentences of long captions; DeBias-CLIP, which leaves the first sentence out
with a probability, since it sums up the others and a training may rest on it alone.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

import mclclip.util.torchvision_fix  # noqa: F401
from mclclip.data.decode import DecodeError, decode
from mclclip.data.locations import Locations, Resharded, SampleRanges, TextFeatures, TrunkRows
from mclclip.data.options import DataConfig, SentencesConfig
from mclclip.data.remote import ChangedShard
from mclclip.data.sample_index import EXCLUDED, SampleIndex
from mclclip.data.shard_reader import Range, ShardReader
from mclclip.data.shard_scan import parse_captions
from mclclip.util.files import clean
from mclclip.util.randomness import mix

Integers = npt.NDArray[np.int64]
Transform = Callable[[Any], Tensor]
"""From an upright RGB PIL image, or an array of pixels, to a tensor [C, H, W]."""
View = Callable[[Any], Any]
"""From what a transform takes, or a row of the trunk's cache, to a view of it."""
Tokenizer = Callable[[list[str]], Tensor]
log = logging.getLogger("mclclip")
_MOST_NAMED = 8  # files of a batch
_AT_ONCE = 4096  # captions that are asked for together
_MOST_VISIBLE = 4096  # characters, in a context of up to 128 tokens
_LONGEST_TOKEN = 32  # characters, in CLIP's vocabulary
_MOST = 100_000  # characters with spaces, of which tokenizers make one


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be used, with one short word why: a reason of `decode.DecodeError`;
    ``no_caption``; ``changed``, where its bytes are not those that were indexed; ``unfit``, where
    the model does not take such an image; ``not_cached``, where the trunk's cache has no row; or
    ``excluded``, where ``data.exclude`` lists it. ``detail`` says how it is unfit."""

    sample_id: int
    reason: str
    detail: str = field(default="", compare=False)


@dataclass(frozen=True)
class RawSample:
    """The undecoded members of a sample; ``text`` is the .txt or .json member (empty where it is
    not read, or where there is none). ``image`` may be a row of the trunk's cache instead."""

    sample_id: int
    image: bytes
    text: bytes


@dataclass(frozen=True)
class Sample:
    """Views [C, H, W] each, or what `TrainingBatches` makes them of; text int64 [context] or None;
    text_features float32 [D] or None; extras: what `Extra`s have added, by name."""

    sample_id: int
    views: list[Any]
    text: Tensor | None = None
    text_features: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)


class Extra(Protocol):
    """Adds tensors to every sample, which an objective reads by their names."""

    @property
    def reads_text(self) -> bool:
        """Whether captions are read for it, also where text embeddings stand for them."""

    def __call__(
        self, raw: RawSample, captions: Sequence[str], caption_number: int, key: int
    ) -> dict[str, Tensor]:
        """Tensors of one sample by name, the same shapes for all samples.

        ``captions`` are all that is true of the sample, empty where they are not read, of which
        ``caption_number`` was drawn. ``key``, 64 random bits, depends on seed, stage, epoch and
        sample alone.
        """


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
    extras         further tensors of every sample

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
        extras: Sequence[Extra] = (),
    ) -> None:
        self.index, self.options, self.transform = index, options, transform
        self.tokenizer = tokenizer if text_features is None else None
        self.text_features = text_features
        self.extras = tuple(extras)
        self.reads_text = self.tokenizer is not None or any(e.reads_text for e in self.extras)
        self.reads_captions = self.reads_text or text_features is not None
        self._compares_images = options.verify == "full" and trunk is None
        if self._compares_images and self.index.image_crc32 is None:
            raise ValueError(
                f"data.verify=full compares images with the index, and {self.index.directory} has "
                "no checksums of them: run 'mclclip index' with data.verify=full, which adds them"
            )
        self.locations, self._has_warned = Locations(self.index, resharded, trunk), False
        self.trunk = trunk
        self._excluded = read_excluded(index, options.exclude)
        self.reader = ShardReader(self.locations.files, options)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, sample_id: int) -> Sample | BadSample:
        return self.__getitems__([sample_id])[0]

    def __getitems__(self, sample_ids: Sequence[int]) -> list[Sample | BadSample]:
        """Samples in the order asked, read in the order of (shard, offset); never raises for one
        that is bad, see `BadSample`."""
        return [self.decoded(raw) for raw in self.read_many(sample_ids)]

    def read_many(self, sample_ids: Sequence[int] | Integers) -> list[RawSample | BadSample]:
        """The undecoded members, in the order asked; ``text`` is empty unless it is read.

        A member that ends beyond its shard gives BadSample "truncated".
        Raises IndexError for a sample_id outside the index.
        """
        ids = self.index.checked(sample_ids)
        all_ranges = self.locations.of(ids)
        order = sorted(range(len(ids)), key=lambda k: all_ranges[k])
        self.reader.prefetch(self._wanted(all_ranges))
        found = {k: self._read(int(ids[k]), all_ranges[k]) for k in order}
        return [found[k] for k in range(len(ids))]

    def start_reading(self, sample_ids: Sequence[int] | Integers) -> None:
        """Begins to read what a later `read_many` will be asked for, where it lies behind urls.

        What was begun before and not used is given up. Raises IndexError as that does.
        """
        ranges = self.locations.of(self.index.checked(sample_ids))
        self.reader.start_prefetch(self._wanted(ranges))

    def captions_of(self, sample_ids: Sequence[int]) -> list[list[str]]:
        """All captions of each sample, as ``texts_of``."""
        return [captions for _, captions in self.texts_of(sample_ids)]

    def texts_of(self, sample_ids: Sequence[int]) -> list[tuple[bytes, list[str]]]:
        """The .txt or .json member of each sample and all captions in it, read from its shard;
        nothing for one without captions.

        Raises IndexError for a sample_id outside the index, and RuntimeError where a shard does not
        hold what was indexed.
        """
        ids = [i for i in self.index.checked(sample_ids).tolist() if self.index.num_captions[i]]
        found: dict[int, tuple[bytes, list[str]]] = {}
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            members = [ranges.text for ranges in self.locations.of_index(np.array(some, np.int64))]
            self.reader.prefetch(members)
            for sample_id, member in zip(some, members, strict=True):
                data = self._member(member)
                captions = [] if data is None else self._parse(sample_id, data)
                number = int(self.index.num_captions[sample_id])
                if data is None or len(captions) != number or self._has_changed(sample_id, data):
                    shard = self.index.shards[int(self.index.shard_of[sample_id])].path
                    raise RuntimeError(
                        f"sample {self.index.keys([sample_id])[0]} has {len(captions)} readable "
                        f"captions, the index says {number}, or other ones: its shard "
                        f"{clean(shard)} has changed, put the old one back or run 'mclclip index "
                        "--force'"
                    )
                found[sample_id] = data, captions
        return [found.get(sample_id, (b"", [])) for sample_id in sample_ids]

    def decoded(
        self,
        raw: RawSample | BadSample,
        caption_number: int = 0,
        views: Sequence[View] | None = None,
        part_of: Callable[[str], str] | None = None,
        key: int = 0,
    ) -> Sample | BadSample:
        """Decodes once, makes every view, tokenizes, and adds the extras.

        ``views`` make the sample's views of its image (None: one, by the transform); who needs a
        random state settles it there. The tokenizer runs after the first view. What ``part_of``
        gives stands for the drawn caption (None: all of it is read); extras are given the whole one
        and its sentences behind the sample's captions, since they are true of the picture too.
        ``key`` is what extras draw by. A BadSample passes through; what the transform does not
        take, such as an array where it reads pictures only, gives one with the reason "unfit".
        Raises RuntimeError for a data set without a transform.
        """
        if isinstance(raw, BadSample):
            return raw
        text = text_features = None
        made: list[Any] = []
        captions = self._parse(raw.sample_id, raw.text) if self.reads_text else []
        if self.reads_text and caption_number >= len(captions):
            return BadSample(raw.sample_id, "no_caption")
        if part_of is not None:
            whole = captions[caption_number]
            captions[caption_number] = part_of(whole)
            captions += [whole, *cut_sentences(whole)]
        try:
            row = None if self.trunk is None else self.trunk.decoded(raw.image)
            image = self._image(raw) if row is None else row
        except DecodeError as error:
            return BadSample(raw.sample_id, error.reason)
        except ValueError as error:
            return self._unfit(raw.sample_id, error)
        for view in views or (self._view,):
            try:
                made.append(view(image))
            except ValueError as error:
                return self._unfit(raw.sample_id, error)
            if len(made) > 1:
                continue
            if self.text_features is not None:
                text_features = self.text_features.get(raw.sample_id, caption_number)
            elif self.tokenizer is not None:
                text = tokenized(self.tokenizer, [captions[caption_number]])[0]
        extras: dict[str, Tensor] = {}
        for extra in self.extras:
            extras |= extra(raw, captions, caption_number, key)
        return Sample(raw.sample_id, made, text, text_features, extras)

    def _view(self, image: Any) -> Any:
        return self.transform(image) if self.transform and self.trunk is None else image

    def _image(self, raw: RawSample) -> Any:
        """The decoded image of a sample, as the transform reads it."""
        if self.transform is None:
            raise RuntimeError("this TarDataset has no transform: it reads captions and bytes only")
        arrays = bool(getattr(self.transform, "reads_arrays", False))
        pixels = bool(getattr(self.transform, "reads_pixels", False))
        return decode(raw.image, self.options.max_image_pixels, arrays, pixels)

    def _unfit(self, sample_id: int, error: ValueError) -> BadSample:
        detail = f"sample {self.index.keys([sample_id])[0]}: {error}"
        log.debug("%s", detail)
        return BadSample(sample_id, "unfit", detail)

    def describe(self, name: str, sample_ids: Sequence[int] | Integers) -> tuple[str, list[str]]:
        """``name`` with the files that samples are read from, and the samples' keys."""
        ids = self.index.checked(sample_ids)
        numbers = sorted({ranges.image[0] for ranges in self.locations.of(ids)})
        paths = [clean(self.locations.files[number].path) for number in numbers[:_MOST_NAMED]]
        more = len(numbers) - len(paths)
        files = ", ".join(paths) + (f" and {more} more" if more else "")
        return f"{name} from {files}", self.index.keys(ids)

    def check(self) -> None:
        """Raises ValueError, one line, where the first sample that can be decoded does not fit the
        transform, as with another number of channels; loaders only count such samples as bad.
        """

        def try_some() -> None:
            for sample_id in range(min(len(self.index), 100)):
                sample = self[sample_id]
                if isinstance(sample, Sample):
                    return
                if sample.reason == "unfit":
                    raise ValueError(sample.detail)

        with torch.random.fork_rng(devices=[]):
            try_some()

    def _read(self, sample_id: int, ranges: SampleRanges) -> RawSample | BadSample:
        if self.reads_captions and not self.index.num_captions[sample_id]:
            return BadSample(sample_id, "no_caption")
        if sample_id in self._excluded:
            return BadSample(sample_id, EXCLUDED)
        if not ranges.has_row:
            return BadSample(sample_id, "not_cached")
        try:
            image = self._member(ranges.image)
            text = self._member(ranges.text) if self.reads_text else b""
        except (FileNotFoundError, ChangedShard):
            if ranges.crc32 is None:
                raise
            image = text = None  # somebody has deleted or replaced the copy
        if ranges.crc32 is not None and not _is_copy(image, text, ranges.crc32):
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "the copy of sample %s is not what 'mclclip reshard' wrote: such samples are "
                    "read from the shards of the index, one by one; run 'mclclip reshard --force', "
                    "or upload its shards again", self.index.keys([sample_id])[0],
                )  # fmt: skip
            (original,) = self.locations.of_index(np.array([sample_id], np.int64))
            return self._read(sample_id, original)
        if self.trunk is not None and image is None:
            raise self.trunk.cut_short(int(self.index.shard_of[sample_id]))
        if image is None or text is None:
            return BadSample(sample_id, "truncated")
        if self._has_changed(sample_id, text, image if self._compares_images else None):
            return BadSample(sample_id, "changed")
        return RawSample(sample_id, image, text)

    def _has_changed(self, sample_id: int, text: bytes, image: bytes | None = None) -> bool:
        """Whether what was read differs from its checksums in the index; an empty ``text`` and no
        ``image`` are not compared."""
        read = ((text or None, self.index.text_crc32), (image, self.index.image_crc32))
        return any(
            data is not None and sums is not None and zlib.crc32(data) != sums[sample_id]
            for data, sums in read
        )

    def _wanted(self, all_ranges: Sequence[SampleRanges]) -> Iterator[Range]:
        """The ranges that `_read` reads of samples."""
        for ranges in all_ranges:
            yield ranges.image
            if self.reads_text:
                yield ranges.text

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


def _is_copy(image: bytes | None, text: bytes | None, crc32: tuple[int, int]) -> bool:
    """Whether image and captions are those that reshard copied, and not those of shards that were
    uploaded before, of the same size; captions that were not read pass."""
    if image is None or text is None:
        return False
    return zlib.crc32(image) == crc32[0] and (not text or zlib.crc32(text) == crc32[1])


# --- captions --------------------------------------------------------------------------------


def tokenized(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """N texts -> int64 [N, context], as ``tokenizer`` gives it for the texts as a whole.

    Each text is cut after 4,096 visible characters, or after 32 for each token of a longer context,
    which is as many as tokens stand for. So tokens can differ only for a text that is longer and
    made for it (of html's entities, of one word without an end, of 100,000 spaces), and where a
    tokenizer draws among all tokens of a text (open_clip's ``reduction_mask``).
    """
    context = int(getattr(tokenizer, "context_length", 0))
    most = max(_MOST_VISIBLE, _LONGEST_TOKEN * context)
    return tokenizer([cut_text(text, most) for text in texts])


def cut_text(text: str, most_visible: int = _MOST_VISIBLE) -> str:
    """The text up to its ``most_visible``-th visible character, or its 100,000th one."""
    if len(text) <= most_visible:
        return text
    start = text[: max(_MOST, most_visible)]
    found = re.match(rf"(?:\s*\S){{{most_visible}}}", start)
    return start if found is None else found[0]


_END = re.compile(r"[.!?]\s+")


def cut_sentences(text: str) -> list[str]:
    """Sentences of a text, in their order: it is cut behind . ! ? where white space and a capital
    follow, so that an abbreviation before a name cuts too. An empty text is one sentence."""
    ends = [end.end() for end in _END.finditer(text) if text[end.end() : end.end() + 1].isupper()]
    return [text[a:b].strip() for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def draw_sentences(text: str, key: int, options: SentencesConfig) -> str:
    """The sentences of ``text`` that the ``key`` draws, in their order, joined by single spaces.

    The first one is left out with the probability ``options.leave_out_first`` where there are
    others; then ``options.number`` of those that are left are drawn, all sets equally often.
    A text of one sentence stays as it is.
    """
    sentences = cut_sentences(text)
    if len(sentences) == 1:
        return text
    words = np.asarray(mix(key, np.arange(len(sentences) + 1)))
    if int(words[-1]) < options.leave_out_first * 2.0**64:
        sentences, words = sentences[1:], words[1:]
    if options.number != "all":
        chosen = np.sort(np.argsort(words[:-1], kind="stable")[: options.number])
        sentences = [sentences[place] for place in chosen]
    return " ".join(sentences)
