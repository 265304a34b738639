"""Turns stored members of samples into images and captions, by sample_id.

`TarDataset` decodes images and tokenizes captions; rows on disk may stand for either
(`row_store.StoredRows`). If a sample's bytes are unusable, the result is a `BadSample`.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

import mclclip.util.torchvision_fix  # noqa: F401
from mclclip.data.bytes import BadSample, Bytes, RawSample, read_excluded
from mclclip.data.decode import DecodeError, decode
from mclclip.data.locations import CAPTION, PICTURE, Locations
from mclclip.data.options import DataConfig, SentencesConfig
from mclclip.data.picture_transform import as_transform
from mclclip.data.row_store import StoredRows
from mclclip.data.sample_index import EXCLUDED, SampleIndex
from mclclip.util.randomness import mix

Integers = npt.NDArray[np.int64]
View = Callable[[Any], Any]
"""From what a transform takes, or a row that stands for an image, to a view of it."""
Tokenizer = Callable[[list[str]], Tensor]
log = logging.getLogger("mclclip")
_MOST_VISIBLE = 4096  # characters, in a context of up to 128 tokens
_LONGEST_TOKEN = 32  # characters, in CLIP's vocabulary
_MOST = 100_000  # characters with spaces, of which tokenizers make one


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
        """True where captions are read, also where text embeddings stand for them."""

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
                   true takes pictures as arrays only (`models.transforms`)
    tokenizer      a list of captions -> int64 [n, context]. Without it and ``text_features`` a
                   sample is an image alone, and caption members are not read; with either, a sample
                   without a caption is a `BadSample`.
    image_rows     rows that stand for images: views are these, and no image is read
    text_features  rows that stand for captions
    locations      where samples are read (default: in the shards of the index)
    extras         further tensors of every sample

    Through `__getitem__` and `__getitems__` a sample comes with one view and its first caption.
    Raises the errors of `Bytes`.
    """

    def __init__(
        self,
        index: SampleIndex,
        options: DataConfig,
        transform: Callable[[Any], Tensor] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        image_rows: StoredRows | None = None,
        text_features: StoredRows | None = None,
        locations: Locations | None = None,
        extras: Sequence[Extra] = (),
    ) -> None:
        self.index, self.options = index, options
        self.transform = as_transform(transform if image_rows is None else None)
        self.tokenizer = tokenizer if text_features is None else None
        self.image_rows, self.text_features, self.extras = image_rows, text_features, tuple(extras)
        self.reads_text = self.tokenizer is not None or any(e.reads_text for e in self.extras)
        self.reads_captions = self.reads_text or text_features is not None
        self.members = [] if image_rows is not None else [PICTURE]
        self.members += [CAPTION] if self.reads_text else []
        self.bytes = Bytes(index, options, locations)
        self._excluded = read_excluded(index, options.exclude)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, sample_id: int) -> Sample | BadSample:
        return self.__getitems__([sample_id])[0]

    def __getitems__(self, sample_ids: Sequence[int]) -> list[Sample | BadSample]:
        """Samples in the order asked, read in the order of (shard, offset); never raises for one
        that is bad, see `BadSample`."""
        return [self.decoded(raw) for raw in self.read_many(sample_ids)]

    def read_many(self, sample_ids: Sequence[int] | Integers) -> list[RawSample | BadSample]:
        """The members that are read of samples, undecoded, in the order asked.

        Raises IndexError for a sample_id outside the index.
        """
        ids = self.index.checked(sample_ids).tolist()
        bad = {i: reason for i in ids if (reason := self._unusable(i)) is not None}
        raws = iter(self.bytes.read([i for i in ids if i not in bad], self.members))
        return [BadSample(i, bad[i]) if i in bad else next(raws) for i in ids]

    def _unusable(self, sample_id: int) -> str | None:
        """Why a sample is not read; None where it is."""
        if self.reads_captions and not self.index.num_captions[sample_id]:
            return "no_caption"
        if sample_id in self._excluded:
            return EXCLUDED
        without = self.image_rows is not None and sample_id in self.image_rows.without
        return "no_row" if without else None

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
        random state settles it there. What ``part_of`` gives stands for the drawn caption (None:
        all of it is read); extras are given the whole one and its sentences behind the sample's
        captions, since they are true of the picture too.
        ``key`` is what extras draw by. A BadSample passes through; what the transform does not
        take, such as an array where it reads pictures only, gives one with the reason "unfit".
        """
        if isinstance(raw, BadSample):
            return raw
        captions = self.bytes.captions_in(raw) if self.reads_text else []
        if self.reads_text and caption_number >= len(captions):
            return BadSample(raw.sample_id, "no_caption")
        if part_of is not None:
            whole = captions[caption_number]
            captions[caption_number] = part_of(whole)
            captions += [whole, *cut_sentences(whole)]
        try:
            image = self._image(raw)
            # The first one last: a tokenizer that draws words goes on from its random state.
            made = [view(image) for view in reversed(views or (self.transform,))][::-1]
        except DecodeError as error:
            return BadSample(raw.sample_id, error.reason)
        except ValueError as error:
            detail = f"sample {self.index.keys([raw.sample_id])[0]}: {error}"
            log.debug("%s", detail)
            return BadSample(raw.sample_id, "unfit", detail)
        text = text_features = None
        if self.tokenizer is not None:
            text = tokenized(self.tokenizer, [captions[caption_number]])[0]
        if self.text_features is not None:
            row = self.text_features.get(raw.sample_id, caption_number)
            text_features = torch.from_numpy(row.astype(np.float32))
        extras: dict[str, Tensor] = {}
        for extra in self.extras:
            extras |= extra(raw, captions, caption_number, key)
        return Sample(raw.sample_id, made, text, text_features, extras)

    def _image(self, raw: RawSample) -> Any:
        """The decoded image, as the transform reads it, or the row that stands for it."""
        if self.image_rows is not None:
            return torch.from_numpy(self.image_rows.get(raw.sample_id))
        how = self.transform
        return decode(raw.image, self.options.max_image_pixels, how.reads_arrays, how.reads_pixels)

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
