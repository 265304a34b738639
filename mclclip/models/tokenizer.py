"""Tokenizers: fetched when the first text is tokenised, with the ids of words kept, and checked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mclclip.util import files

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("mclclip")
MOST_WORDS = 2**16  # about 15 MB of them in a process
PROBES = ("", "A photo of 2 dogs: the quick brown fox jumps over the lazy dog. " * 200)
"""Texts that a tokenizer beside a model is tried with: none, and more than any context."""


class LazyTokenizer:
    """A tokenizer that is made by `make` at its first use; encoding images does not need it.

    `make` raises an error of one line where the tokenizer cannot be fetched. Pickling, such as for
    a loader worker, makes the tokenizer first.
    """

    def __init__(self, make: Callable[[], Any], context_length: int) -> None:
        self._make, self._made = make, None
        self.context_length = context_length

    def fetch(self) -> Any:
        """The tokenizer itself; raises FileNotFoundError or ValueError where there is none."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def __call__(self, texts: str | list[str], context_length: int | None = None) -> Tensor:
        """N strings -> int64 [N, context]."""
        tokens: Tensor = self.fetch()(texts, context_length)
        return tokens

    def save_pretrained(self, directory: str) -> None:
        """Writes the tokenizer's files into ``directory``; warns where it cannot be fetched."""
        try:
            tokenizer = self.fetch()
        except FileNotFoundError as error:
            log.warning("%s has no tokenizer: %s", directory, error)
            return  # a later user of the export fetches it by its name
        tokenizer.save_pretrained(directory)

    def __deepcopy__(self, memo: Any) -> LazyTokenizer:
        return self  # a tokenizer has no state that changes

    def __getstate__(self) -> dict[str, Any]:
        self.fetch()
        return {"_made": self._made, "_make": None, "context_length": self.context_length}


def fetch_tokenizer(tokenizer: Any) -> Any:
    """Returns the tokenizer itself, fetched now if it was not, so that a failure shows at once.

    Raises FileNotFoundError or ValueError where it cannot be fetched.
    """
    return tokenizer.fetch() if isinstance(tokenizer, LazyTokenizer) else tokenizer


class WordEncoder:
    """`encode` of open_clip's SimpleTokenizer, which keeps the ids of words: the same ids in a
    sixth of the time. It takes the place of the ``tokenizer``'s own.

    ``clean`` is the tokenizer's cleaning. With "lower", printable ASCII without html's entities
    has nothing that ftfy mends: cleaning then only joins its words by single spaces and lowers
    them.
    """

    def __init__(self, tokenizer: Any, clean: str) -> None:
        self.tokenizer, self._lowers = tokenizer, clean == "lower"
        self.words: dict[str, list[int]] = {}
        tokenizer.encode = self

    def __call__(self, text: str) -> list[int]:
        """The ids of a text, without those of its start and its end."""
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


# --- tokenizers of strangers ----------------------------------------------------------------------


def tokens_of(
    tokenize: Callable[[], Any], num_texts: int, context_length: int, vocabulary: int, where: str
) -> Any:
    """The tokens [num_texts, context_length] that ``tokenize`` makes by a stranger's tokenizer.

    Raises ValueError, one line, where it fails, or its tokens have another shape or ids outside of
    the ``vocabulary`` of the text tower, which would end in an index error.
    """
    try:
        tokens = tokenize()
    except BaseException as error:
        # A panic of the library, which is written in Rust, is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"the tokenizer {where} fails on a text ({files.printable(reason)[:300]})"
        ) from error
    if tuple(tokens.shape) != (num_texts, context_length):
        raise ValueError(
            f"the tokenizer {where} makes tokens of shape {list(tokens.shape)}, wanted "
            f"{[num_texts, context_length]}: it is of another model"
        )
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise ValueError(
            f"the tokenizer {where} makes ids from {int(tokens.min()):,} to "
            f"{int(tokens.max()):,}, the text tower knows those below {vocabulary:,}: it is of "
            "another model"
        )
    return tokens
