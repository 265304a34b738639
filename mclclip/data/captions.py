"""Captions as the model reads them: tokens, or embeddings that are stored.

`tokenized` cuts a text to as much of it as can reach the model. Tokenizers read a text as a whole
before they cut their tokens off at the context length: one of 10 MB costs more than a second, and a
single word of 30,000 letters a minute.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mclclip.data.arrays import open_npy
from mclclip.data.row_store import rows_path
from mclclip.data.sample_index import SampleIndex
from mclclip.files import Checked
from mclclip.run.artifacts import MANIFEST, Manifest, read_manifest

Tokenizer = Callable[[list[str]], Tensor]

_MOST_VISIBLE = 4096  # characters, in a context of up to 128 tokens
_LONGEST_TOKEN = 32  # characters, in CLIP's vocabulary
_MOST = 100_000  # characters with spaces, of which tokenizers make one


def tokenized(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
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


class TextFeatures:
    """Text embeddings on disk, one row per caption, looked up by (sample_id, caption number).

    ``directory`` holds one array per shard of the index, named by the shard's number: ``00007.npy``
    [captions in the shard, D] float16 or float32, rows in index order, all captions of a sample
    after each other (row = ``caption_start[sample_id] + caption_number``, counted from the shard's
    first caption). Arrays are memory-mapped when first needed, at most ``max_open_files`` at once.
    The blocks of a file that hold a row are compared with the artifact's records before the row is
    given out, each once in a process.
    """

    def __init__(
        self, directory: str | os.PathLike[str], index: SampleIndex, max_open_files: int = 64
    ) -> None:
        self._directory = Path(directory)
        self._index = index
        self._max_open_files = max_open_files
        self._arrays: OrderedDict[int, npt.NDArray[np.floating]] = OrderedDict()
        self._checked: dict[int, Checked] = {}
        self._data_offsets: dict[int, int] = {}
        if not self._directory.is_dir():
            raise FileNotFoundError(
                f"no text embeddings at {self._directory}: run 'mclclip embed --text' first"
            )
        self._manifest: Manifest | None = None
        if (self._directory / MANIFEST).exists():
            self._manifest = read_manifest(self._directory, "text_embeddings")

    def get(self, sample_id: int, caption_number: int) -> Tensor:
        """The text embedding, float32 [D].

        Raises IndexError for a caption that the sample does not have, FileNotFoundError for a shard
        without text embeddings, ValueError for an array that does not fit the index.
        """
        num_captions = int(self._index.num_captions[sample_id])
        if not 0 <= caption_number < num_captions:
            raise IndexError(
                f"caption {caption_number} of sample {sample_id} was asked for, it has "
                f"{num_captions}"
            )
        shard = int(self._index.shard_of[sample_id])
        # Not by the index's caption_start, which would take an array [N + 1] in every worker.
        before = self._index.num_captions[self._index.shards[shard].start : sample_id]
        row = int(before.sum()) + caption_number
        array = self._array(shard)
        first = self._data_offsets[shard] + row * (size := array.dtype.itemsize * array.shape[1])
        self._checked[shard].check(first, first + size)
        return torch.from_numpy(array[row].astype(np.float32))

    def _array(self, shard: int) -> npt.NDArray[np.floating]:
        if shard in self._arrays:
            self._arrays.move_to_end(shard)
            return self._arrays[shard]
        while len(self._arrays) >= max(self._max_open_files, 1):
            self._arrays.popitem(last=False)
        path = rows_path(self._directory, shard)
        if shard not in self._checked:
            record = None if self._manifest is None else self._manifest.record(path.name)
            again = "run 'mclclip embed --text --force' to make it again"
            self._checked[shard] = Checked(path, record, again)
            self._checked[shard].check(0, 1)  # the header
        array: npt.NDArray[np.floating] = open_npy(path, "embed --text")
        here = self._index.shards[shard]
        wanted = int(self._index.num_captions[here.start : here.stop].sum())
        if array.ndim != 2 or len(array) != wanted or array.dtype not in (np.float16, np.float32):
            raise ValueError(
                f"{path} holds {array.dtype} {list(array.shape)}, the index wants float16 or "
                f"float32 [{wanted}, D]: run 'mclclip embed --text --force' after 'mclclip index'"
            )
        self._arrays[shard], self._data_offsets[shard] = array, int(getattr(array, "offset", 0))
        return array

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array pickles as its content.
        return {**self.__dict__, "_arrays": OrderedDict(), "_checked": {}}
