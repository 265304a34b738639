"""Turns the stored bytes of samples into images and captions, by sample_id.

`TarDataset` decodes images and tokenizes captions; instead of either it can read rows on disk
(`row_store.StoredRows`). If a sample's bytes are unusable, the result is a `BadSample`.

`tokenize` cuts off the part of a long text that cannot reach the model. Tokenizers would read it
all before they cut their tokens off at the context length: a text of 10 MB takes more than a
second, and a single word of 30,000 letters a minute.

`draw_sentences` draws some sentences of a caption, after two papers: DreamLIP (Zheng et al., 2024)
trains on sentences of long captions; DeBias-CLIP leaves the first sentence out at random, since it
sums up the others and a training may rest on it alone.
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
from mclclip.data.text_rows import TextRows
from mclclip.util.randomness import mix

Integers = npt.NDArray[np.int64]
View = Callable[[Any], Any]
"""Makes a view of a decoded image, or of a row that stands for one."""
Tokenizer = Callable[[list[str]], Tensor]
log = logging.getLogger("mclclip")
NO_ROW = "no_row"
_MOST_VISIBLE = 4096  # characters, in a context of up to 128 tokens
_LONGEST_TOKEN = 32  # characters, in CLIP's vocabulary
_MOST = 100_000  # characters including spaces, of which tokenizers keep one between words


@dataclass(frozen=True)
class Sample:
    """A decoded sample.

    views          each [C, H, W], or the result of a transform's `draw`
    text           tokens int64 [context], or a row float32 [W] that stands for them, or None
    text_features  float32 [D], or None
    extras         tensors that `Extra`s have added, by name
    """

    sample_id: int
    views: list[Any]
    text: Tensor | None = None
    text_features: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)


class Extra(Protocol):
    """Adds tensors to every sample, which an objective reads by their names."""

    @property
    def reads_text(self) -> bool:
        """True if captions must be read for this, even where text embeddings stand for them."""

    def __call__(
        self, raw: RawSample, captions: Sequence[str], caption_number: int, key: int
    ) -> dict[str, Tensor]:
        """Returns tensors of one sample by name, of the same shapes for all samples.

        captions        all captions that are true of the sample; empty if none are read
        caption_number  the place in ``captions`` of the one that was drawn
        key             64 random bits that depend on seed, stage, epoch and sample only
        """


class TarDataset(Dataset["Sample | BadSample"]):
    """Random access to the samples of an index; item i is sample_id i.

    transform      a `PictureTransform`, or a function from an upright RGB PIL image to a tensor
                   [3, H, W], such as open_clip's
    tokenizer      turns n captions into int64 [n, context]. Without it and ``text_features`` only
                   images are read; with either, a sample without a caption is a `BadSample`
    image_rows     rows that are read instead of images
    text_features  rows that are read instead of captions
    text_rows      rows of the user that stand for tokens; no tokenizer is needed then. A sample
                   whose caption has none is a `BadSample`
    locations      where the bytes of samples lie; None: in the shards of the index
    extras         add more tensors to every sample

    ``dataset[i]`` has one view and the first caption of a sample. Raises the errors of `Bytes`.
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
        text_rows: TextRows | None = None,
        locations: Locations | None = None,
        extras: Sequence[Extra] = (),
    ) -> None:
        self.index, self.options = index, options
        self.transform = as_transform(transform if image_rows is None else None)
        self.tokenizer = tokenizer if text_features is None else None
        self.image_rows, self.text_features, self.extras = image_rows, text_features, tuple(extras)
        self.text_rows = text_rows if text_features is None else None
        reads_text = self.tokenizer is not None or self.text_rows is not None
        self.reads_text = reads_text or any(e.reads_text for e in self.extras)
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
        """Returns samples in the order of ``sample_ids``, a `BadSample` for each that is bad.

        They are read in the order of (shard, offset).
        """
        return [self.decode(raw) for raw in self.read_many(sample_ids)]

    def read_many(self, sample_ids: Sequence[int] | Integers) -> list[RawSample | BadSample]:
        """Reads the members of samples that are needed, undecoded, in the order of ``sample_ids``.

        Raises IndexError for a sample_id outside the index.
        """
        ids = self.index.checked(sample_ids).tolist()
        bad = {i: reason for i in ids if (reason := self._why_unusable(i)) is not None}
        raws = iter(self.bytes.read([i for i in ids if i not in bad], self.members))
        return [BadSample(i, bad[i]) if i in bad else next(raws) for i in ids]

    def _why_unusable(self, sample_id: int) -> str | None:
        """Returns a reason of `BadSample` for a sample that need not be read; None for others."""
        if self.reads_captions and not self.index.num_captions[sample_id]:
            return "no_caption"
        if sample_id in self._excluded:
            return EXCLUDED
        without = self.image_rows is not None and sample_id in self.image_rows.without
        return NO_ROW if without else None

    def decode(
        self,
        raw: RawSample | BadSample,
        caption_number: int = 0,
        views: Sequence[View] | None = None,
        part_of: Callable[[str], str] | None = None,
        key: int = 0,
    ) -> Sample | BadSample:
        """Decodes the image once, makes every view, tokenizes the caption, and adds the extras.

        views    functions that make the views of the decoded image; each seeds the generators that
                 it draws from. None: one view, by the transform
        part_of  returns the part of the drawn caption that is read; None: all of it. Extras then
                 get the whole caption and its sentences as further captions, since they are true of
                 the picture too
        key      the random bits of the extras

        Returns a `BadSample` as it is, and one with the reason "unsuitable" if the transform raises
        ValueError, as it does for an array if it takes pictures only.
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
            # The first view comes last: a tokenizer that draws words goes on from its random state.
            pictures = [view(image) for view in reversed(views or (self.transform,))][::-1]
        except DecodeError as error:
            return BadSample(raw.sample_id, error.reason)
        except ValueError as error:
            detail = f"sample {self.index.keys([raw.sample_id])[0]}: {error}"
            log.debug("%s", detail)
            return BadSample(raw.sample_id, "unsuitable", detail)
        text = text_features = None
        if self.text_rows is not None:
            name = self.index.keys([raw.sample_id])[0] if self.text_rows.by_key else ""
            caption = captions[caption_number]
            if (place := self.text_rows.find_caption(name, caption_number, caption)) is None:
                return BadSample(raw.sample_id, NO_ROW)
            text = self.text_rows.read([place])[0]
        elif self.tokenizer is not None:
            text = tokenize(self.tokenizer, [captions[caption_number]])[0]
        if self.text_features is not None:
            row = self.text_features.get(raw.sample_id, caption_number)
            text_features = torch.from_numpy(row.astype(np.float32))
            if not text_features.any():  # the encoder had nothing to read, as without a text row
                return BadSample(raw.sample_id, NO_ROW)
        extras: dict[str, Tensor] = {}
        for extra in self.extras:
            extras |= extra(raw, captions, caption_number, key)
        return Sample(raw.sample_id, pictures, text, text_features, extras)

    def _image(self, raw: RawSample) -> Any:
        """Returns the decoded image in the form that the transform takes, or the stored row."""
        if self.image_rows is not None:
            return torch.from_numpy(self.image_rows.get(raw.sample_id))
        how = self.transform
        return decode(raw.image, self.options.max_image_pixels, how.reads_arrays, how.reads_pixels)

    def check(self) -> None:
        """Raises ValueError if the transform refuses the first sample that can be decoded.

        An example is a picture with another number of channels than the model has. Loaders only
        count such samples as bad.
        """
        with torch.random.fork_rng(devices=[]):
            for sample_id in range(min(len(self.index), 100)):
                sample = self[sample_id]
                if isinstance(sample, Sample):
                    return
                if sample.reason == "unsuitable":
                    raise ValueError(sample.detail)


# --- captions --------------------------------------------------------------------------------


def tokenize(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Tokenizes N texts: int64 [N, context]. Long texts are cut first, which saves time.

    A text is cut after 4,096 visible characters, or 32 for each token of a longer context: a token
    of CLIP has no more. So the tokens equal those of the uncut text, except for texts written to
    differ (HTML entities, one endless word, 100,000 spaces), and for a tokenizer that draws among
    all tokens of a text (open_clip's ``reduction_mask``).
    """
    context = int(getattr(tokenizer, "context_length", 0))
    most = max(_MOST_VISIBLE, _LONGEST_TOKEN * context)
    return tokenizer([cut_text(text, most) for text in texts])


def cut_text(text: str, most_visible: int = _MOST_VISIBLE) -> str:
    """Cuts a text after ``most_visible`` visible characters, and after 100,000 of any kind."""
    if len(text) <= most_visible:
        return text
    start = text[: max(_MOST, most_visible)]
    match = re.match(rf"(?:\s*\S){{{most_visible}}}", start)
    return start if match is None else match[0]


_END = re.compile(r"[.!?]\s+")


def cut_sentences(text: str) -> list[str]:
    """Cuts a text into its sentences; an empty text is one sentence.

    A sentence ends with . ! or ? before white space and a capital, so that "Dr. Smith" is cut too.
    """
    ends = [end.end() for end in _END.finditer(text) if text[end.end() : end.end() + 1].isupper()]
    return [text[a:b].strip() for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def draw_sentences(text: str, key: int, options: SentencesConfig) -> str:
    """Draws sentences of ``text`` by the random ``key``; joins them in their order by spaces.

    With the probability ``options.leave_out_first`` the first sentence is left out. Of the others
    ``options.number`` are drawn, all sets with equal probability. A single sentence stays as it is.
    """
    sentences = cut_sentences(text)
    if len(sentences) == 1:
        return text
    words = np.asarray(mix(key, np.arange(len(sentences) + 1)))
    if int(words[-1]) < options.leave_out_first * 2.0**64:
        sentences, words = sentences[1:], words[1:]
    if options.number != "all":
        places = np.sort(np.argsort(words[:-1], kind="stable")[: options.number])
        sentences = [sentences[place] for place in places]
    return " ".join(sentences)
