"""A tokenizer that is fetched when a text is tokenised, not when its model is built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

log = logging.getLogger("mclclip")


class LazyTokenizer:
    """Makes a tokenizer at first use: a model encodes images without it.

    `make` raises one line where the tokenizer cannot be had. A copy in another process, such as a
    loader's worker, is sent with the tokenizer in it.
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
        """Writes the tokenizer's files beside an export, where it can be had."""
        try:
            own = self.fetch()
        except FileNotFoundError as error:
            log.warning("%s has no tokenizer: %s", directory, error)
            return  # who loads the export and tokenises a text fetches it by its name
        own.save_pretrained(directory)

    def __deepcopy__(self, memo: Any) -> LazyTokenizer:
        return self  # nothing ever changes in it

    def __getstate__(self) -> dict[str, Any]:
        self.fetch()
        return {"_made": self._made, "_make": None, "context_length": self.context_length}


def fetched(tokenizer: Any) -> Any:
    """The tokenizer, made now if it was not: for who sends it to workers or would find out late.

    Raises FileNotFoundError or ValueError where it cannot be had.
    """
    return tokenizer.fetch() if isinstance(tokenizer, LazyTokenizer) else tokenizer
