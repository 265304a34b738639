"""Wraps tokenizers: one is fetched at its first text, and one caches the ids of words."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("mclclip")
MOST_WORDS = 2**16  # in the cache of `WordEncoder`: about 15 MB in a process


class LazyTokenizer:
    """A tokenizer that `make` fetches at its first use, so that encoding images never needs it.

    `make` raises an error of one line if that fails. Pickling, for example for a loader worker,
    fetches the tokenizer first.
    """

    def __init__(self, make: Callable[[], Any], context_length: int) -> None:
        self._make, self._tokenizer = make, None
        self.context_length = context_length

    def fetch(self) -> Any:
        """Returns the tokenizer itself; raises FileNotFoundError or ValueError if that fails."""
        if self._tokenizer is None:
            self._tokenizer = self._make()
        return self._tokenizer

    def __call__(self, texts: str | list[str], context_length: int | None = None) -> Tensor:
        """N strings -> int64 [N, context]."""
        tokens: Tensor = self.fetch()(texts, context_length)
        return tokens

    def save_pretrained(self, directory: str) -> None:
        """Writes the tokenizer's files into ``directory``, or warns that it cannot be fetched."""
        try:
            tokenizer = self.fetch()
        except FileNotFoundError as error:
            log.warning("%s has no tokenizer: %s", directory, error)
            return  # whoever uses the export fetches the tokenizer by its name
        tokenizer.save_pretrained(directory)

    def __getstate__(self) -> dict[str, Any]:
        tokenizer = self.fetch()
        return {"_tokenizer": tokenizer, "_make": None, "context_length": self.context_length}


def fetch_tokenizer(tokenizer: Any) -> Any:
    """Fetches a `LazyTokenizer` and returns the tokenizer itself; returns others unchanged.

    Raises FileNotFoundError or ValueError if that fails.
    """
    return tokenizer.fetch() if isinstance(tokenizer, LazyTokenizer) else tokenizer


class WordEncoder:
    """Replaces `encode` of open_clip's SimpleTokenizer: the same ids, in a sixth of the time.

    It caches the ids of words. ``clean`` is the tokenizer's option: with "lower", printable ASCII
    without HTML entities needs no repair by ftfy, and its words are only joined by single spaces
    and turned into lower case.
    """

    def __init__(self, tokenizer: Any, clean: str) -> None:
        self.tokenizer, self._lowers = tokenizer, clean == "lower"
        self.words: dict[str, list[int]] = {}
        tokenizer.encode = self

    def __call__(self, text: str) -> list[int]:
        """Returns the ids of a text, without those of its start and its end."""
        if self._lowers and text.isascii() and text.isprintable() and "&" not in text:
            text = " ".join(text.split()).lower()
        else:
            text = self.tokenizer.clean_fn(text)
        words, ids = self.words, []
        for word in self.tokenizer.pat.findall(text):
            ids += words[word] if word in words else self._add(word)
        return ids

    def _add(self, word: str) -> list[int]:
        tokenizer = self.tokenizer
        letters = "".join(tokenizer.byte_encoder[byte] for byte in word.encode())
        ids = [tokenizer.encoder[part] for part in tokenizer.bpe(letters).split(" ")]
        if len(self.words) >= MOST_WORDS:
            self.words.clear()
        self.words[word] = ids
        return ids
