"""Sentences of a paragraph, of which a training draws some.

Sources: Zheng et al., "DreamLIP: Language-Image Pre-training with Long Captions" (2024), which
trains on sentences of long captions; DeBias-CLIP, which leaves the first sentence out with a
probability, since it sums up the others and a training may rest on it alone.
"""

from __future__ import annotations

import re

import numpy as np

from mclclip.data.options import SentencesConfig
from mclclip.randomness import mix

_END = re.compile(r"[.!?]\s+")


def cut(text: str) -> list[str]:
    """Sentences of a text, in their order: it is cut behind . ! ? where white space and a capital
    follow, so that an abbreviation before a name cuts too. An empty text is one sentence."""
    ends = [end.end() for end in _END.finditer(text) if text[end.end() : end.end() + 1].isupper()]
    return [text[a:b].strip() for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def draw(text: str, key: int, options: SentencesConfig) -> str:
    """The sentences of ``text`` that the ``key`` draws, in their order, joined by single spaces.

    The first one is left out with the probability ``options.leave_out_first`` where there are
    others; then ``options.number`` of those that are left are drawn, all sets equally often.
    A text of one sentence stays as it is.
    """
    sentences = cut(text)
    if len(sentences) == 1:
        return text
    words = np.asarray(mix(key, np.arange(len(sentences) + 1)))
    if int(words[-1]) < options.leave_out_first * 2.0**64:
        sentences, words = sentences[1:], words[1:]
    if options.number != "all":
        chosen = np.sort(np.argsort(words[:-1], kind="stable")[: options.number])
        sentences = [sentences[place] for place in chosen]
    return " ".join(sentences)
