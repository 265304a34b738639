"""Captions are cut before they are tokenised, and the tokens are those of the whole captions."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip

from mclclip.data.options import DataConfig
from mclclip.data.samples import Sample, TarDataset, tokenize
from mclclip.data.shard_writer import PackedSample, write_shards
from tests.unit.data.test_samples import LIMIT, build_index, png, to_tensor

WORDS = {
    "english": "a photo of two dogs, which play in the park & are happy! 1,024 px".split(),
    "others": "два щенка играют \u4e24\u53ea\u72d7\u5728\u516c\u56ed\u91cc d\u00e9j\u00e0 vu "
    "\U0001f415\U0001f415 \U0001f602\U0001f602\U0001f602 &amp; Donaudampfschifffahrt".split(),
}


class Recording:
    """A tokenizer that notes what it is given."""

    def __init__(self, context_length: int) -> None:
        self.context_length, self.lengths = context_length, list[int]()

    def __call__(self, texts: list[str]) -> torch.Tensor:
        self.lengths += [len(text) for text in texts]
        return torch.zeros(len(texts), self.context_length, dtype=torch.int64)


@pytest.mark.parametrize("context", [77, 248, 600])
@pytest.mark.parametrize("words", WORDS)
def test_long_captions_keep_their_tokens(words: str, context: int) -> None:
    own = open_clip.SimpleTokenizer(context_length=context)
    draw = random.Random(context)
    spaces = [" ", "  ", "\n", "\r\n\t", " " * 40, "\u00a0"]
    texts = [
        "".join(
            part for _ in range(n) for part in draw.choices(WORDS[words]) + draw.choices(spaces)
        )
        for n in (5, 700, 3000)
    ]
    texts.append("x" + " " * 90_000 + texts[-1])
    assert torch.equal(tokenize(own, texts), own(texts))


def test_what_a_tokenizer_is_given_is_bounded() -> None:
    texts = ["a" * 10**7, " x" * 5_000_000, "x" + " " * 10**7 + "y", "a" * 4096, "a b " * 1024]
    recording = Recording(77)
    tokenize(recording, texts)
    assert recording.lengths == [4096, 8192, 100_000, 4096, 4096]
    recording = Recording(1000)
    tokenize(recording, texts)
    assert recording.lengths == [32_000, 64_000, 100_000, 4096, 4096]


def test_a_data_set_cuts_what_it_tokenises(tmp_path: Path) -> None:
    sample = PackedSample("0", png(0), "png", ["a " * 10**6])
    paths = write_shards([sample], tmp_path / "shards", 5)
    index = build_index(tmp_path / "index", paths, "json:captions")
    recording = Recording(77)
    options = DataConfig(max_image_pixels=LIMIT)
    data = TarDataset(index, options, to_tensor, tokenizer=recording)
    assert isinstance(data[0], Sample) and recording.lengths == [8191]
    assert len(data.bytes.captions_of([0])[0][0]) == 2 * 10**6 - 1  # what is not tokenised is whole
