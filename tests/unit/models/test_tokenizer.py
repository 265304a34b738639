"""Ids of words that are kept are those of open_clip's own tokenizer."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import string
from typing import Any

import pytest
import torch

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip

from mclclip.models import tokenizer as tokenizers
from mclclip.models.loading import load_towers
from mclclip.models.tokenizer import WordEncoder
from tests import tiny

TEXTS = [
    "a photo of two dogs",
    "A  Photo\tof TWO\ndogs \r\n",
    " Bob's dog, they'll say \"it's 1,024 px!\" (they'd) ...",
    "",
    " ",
    "I",
    "<start_of_text> a <END_OF_TEXT> b <start_of_text>",
    "fish &amp; chips &lt;b&gt; &eacute; AT&T &amp;amp; &",
    "<a href='x'>d\u00e9j\u00e0 vu</a>",
    "sch\u00c3\u00b6n \u201cquoted\u201d \ufb01ne \uff26\uff35\uff2c\uff2c na\u00efve",
    "\x1b[31mred\x1b[0m bell\x07 nul\x00 soft\u00ad",
    "\u4e24\u53ea\u72d7 \u0434\u0432\u0435 \u0441\u043e\u0431\u0430\u043a\u0438",
    "\U0001f415\U0001f415 \u0130stanbul",
    "word " * 100,
]


@functools.cache
def open_clips(clean: str = "lower", **options: Any) -> Any:
    return open_clip.SimpleTokenizer(clean=clean, **options)


def with_words_kept(clean: str = "lower", **options: Any) -> Any:
    tokenizer = copy.copy(open_clips(clean, **options))
    WordEncoder(tokenizer, clean)
    return tokenizer


def texts_of_ascii(count: int) -> list[str]:
    """Random ones of all printable characters, spaces and words that occur often."""
    drawn = random.Random(0)
    parts = [*string.printable, *" " * 60, "the", "'ll", "&amp;", "Dogs", "<end_of_text>"]
    return ["".join(drawn.choices(parts, k=drawn.randrange(60))) for _ in range(count)]


@pytest.mark.parametrize("clean", ["lower", "whitespace", "canonicalize"])
def test_ids_are_open_clips(clean: str) -> None:
    own, kept = open_clips(clean), with_words_kept(clean)
    for texts in (TEXTS, texts_of_ascii(200)):
        wanted = own(texts)
        assert torch.equal(kept(texts), wanted)
        assert torch.equal(kept(texts), wanted)  # now that words are known
        assert torch.equal(torch.cat([kept([text]) for text in texts]), wanted)
    assert torch.equal(kept(TEXTS, 9), own(TEXTS, 9))


def test_ids_are_open_clips_where_it_leaves_some_out() -> None:
    """That draws which ones, from the global generators."""
    options: dict[str, Any] = {"reduction_mask": "random", "context_length": 12}
    found = []
    for tokenizer in (open_clips(**options), with_words_kept(**options)):
        torch.manual_seed(0)
        found.append(tokenizer(TEXTS))
    assert torch.equal(*found)


def test_words_are_forgotten_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "MOST_WORDS", 5)
    kept = with_words_kept()
    assert torch.equal(kept(TEXTS), open_clips()(TEXTS))
    assert 0 < len(kept.encode.words) <= 5


def test_copies_of_a_model_share_it() -> None:
    model = load_towers(tiny.ONE_BLOCK)
    both = copy.deepcopy([model, model])
    assert both[0] is both[1] is not model and both[0].tokenizer is model.tokenizer
    assert both[0].preprocess_val is model.preprocess_val
    for one, other in zip(both[0].parameters(), model.parameters(), strict=True):
        assert one is not other and torch.equal(one, other)


def test_it_travels_with_its_words() -> None:
    kept = with_words_kept()
    wanted = kept(TEXTS)
    for other in (pickle.loads(pickle.dumps(kept)), copy.deepcopy(kept)):
        assert other.encode.tokenizer is other and other.encode.words == kept.encode.words
        assert torch.equal(other(TEXTS), wanted)
