"""A tokenizer that is fetched when the first text is tokenised, not when its model is built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

log = logging.getLogger("mclclip")


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
            own = self.fetch()
        except FileNotFoundError as error:
            log.warning("%s has no tokenizer: %s", directory, error)
            return  # a later user of the export fetches it by its name
        own.save_pretrained(directory)

    def __deepcopy__(self, memo: Any) -> LazyTokenizer:
        return self  # a tokenizer has no state that changes

    def __getstate__(self) -> dict[str, Any]:
        self.fetch()
        return {"_made": self._made, "_make": None, "context_length": self.context_length}


def fetched(tokenizer: Any) -> Any:
    """The tokenizer itself, fetched now if it was not, so that a failure shows at once.

    Raises FileNotFoundError or ValueError where it cannot be fetched.
    """
    return tokenizer.fetch() if isinstance(tokenizer, LazyTokenizer) else tokenizer
