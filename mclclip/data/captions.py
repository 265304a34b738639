"""Texts -> tokens, of so much of a text as can reach the model.

Tokenizers read a text as a whole before they cut their tokens off at the context length: one of
10 MB costs more than a second, and a single word of 30,000 letters a minute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from torch import Tensor

_MOST_VISIBLE = 4096  # characters, in a context of up to 128 tokens
_LONGEST_TOKEN = 32  # characters, in CLIP's vocabulary
_MOST = 100_000  # characters with spaces, of which tokenizers make one


def tokenized(tokenizer: Callable[[list[str]], Tensor], texts: Sequence[str]) -> Tensor:
    """N texts -> int64 [N, context], as ``tokenizer`` gives it for the texts as a whole.

    Each text is cut after 4,096 visible characters, or after 32 for each token of a longer context,
    which is as many as tokens stand for. So tokens can differ only for a text that is longer and
    made for it (of html's entities, of one word without an end, of 100,000 spaces), and where a
    tokenizer draws among all tokens of a text (open_clip's ``reduction_mask``).
    """
    context = int(getattr(tokenizer, "context_length", 0))
    most = max(_MOST_VISIBLE, _LONGEST_TOKEN * context)
    return tokenizer([_cut(text, most) for text in texts])


def _cut(text: str, most_visible: int) -> str:
    if len(text) <= most_visible:
        return text
    start = text[: max(_MOST, most_visible)]
    found = re.match(rf"(?:\s*\S){{{most_visible}}}", start)
    return start if found is None else found[0]
