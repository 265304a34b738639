"""The words that tell the captions of a group from those of others.

A word's weight is p log(p / q), its part of the Kullback-Leibler divergence between the shares of
captions that hold it: p in the group, q outside. This is tf-idf's idea, with a group in the place
of a document: common everywhere counts nothing, and rare everywhere counts little.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_WORD = re.compile(r"[^\W\d_](?:[\w'-]*\w)?|\d+")
# Function words of English alone. Numbers and places ("two", "left", "behind"), which usual lists
# hold, are kept: they are what an encoder may have been blind to.
STOP_WORDS = frozenset(
    "a an and are as at be been being but by can could did do does for from had has have he her "
    "his how i if in into is it its may me my of on or our she should so some such than that the "
    "their them then there these they this those to was we were what when where which while who "
    "will with would you your".split()
)
_LONGEST = 40  # characters of a word; longer ones are none
_FEWEST = 3  # captions of a group that hold a word
_ERRORS = 3.0  # standard errors by which the shares inside and outside differ: hundreds are tried
_UNSEEN = 0.5  # captions that stand for none outside, so that the ratio is finite


@dataclass(frozen=True)
class Word:
    """A word, and the share of the captions that hold it: ``inside`` the group and ``outside``."""

    text: str
    inside: float
    outside: float


def words_of(caption: str) -> set[str]:
    """The words of a caption in lower case, without stop words and what is too long for a word."""
    found = _WORD.findall(caption.lower())
    return {word for word in found if word not in STOP_WORDS and len(word) <= _LONGEST}


def dominant_words(groups: Mapping[int, Sequence[str]], count: int) -> dict[int, list[Word]]:
    """For each group of captions at most ``count`` words that tell it from the others, best first.

    A word is held by at least three captions of its group, and more often there than outside by
    three standard errors, so that groups drawn at random have hardly any. Empty captions do not
    count. Of equal weights the word that comes first in the alphabet goes first.
    """
    held = {name: _counts(captions) for name, captions in groups.items()}
    sizes = {name: sum(1 for text in captions if text) for name, captions in groups.items()}
    every: Counter[str] = sum(held.values(), Counter())
    total = sum(sizes.values())
    found = {}
    for name, counts in held.items():
        others = max(total - sizes[name], 1)
        words = [
            Word(word, number / sizes[name], (every[word] - number) / others)
            for word, number in counts.items()
            if number >= _FEWEST
        ]
        weighed = [
            (_weight(word, others), word) for word in words if _differs(word, sizes[name], others)
        ]
        weighed.sort(key=lambda pair: (-pair[0], pair[1].text))
        found[name] = [word for _, word in weighed[:count]]
    return found


def _counts(captions: Iterable[str]) -> Counter[str]:
    return Counter(word for text in captions for word in words_of(text))


def _differs(word: Word, inside: int, outside: int) -> bool:
    """Whether a word is more frequent in ``inside`` captions than in ``outside`` others beyond
    chance, by the normal approximation of two shares."""
    share = (word.inside * inside + word.outside * outside) / (inside + outside)
    error = math.sqrt(share * (1 - share) * (1 / inside + 1 / outside))
    return word.inside - word.outside > _ERRORS * error


def _weight(word: Word, others: int) -> float:
    return word.inside * math.log(word.inside / max(word.outside, _UNSEEN / others))
