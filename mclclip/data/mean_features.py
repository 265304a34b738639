"""Rows that say what a sample's image and caption say together: unit(unit(image) + unit(text)).

What UNICOM clusters (the mean of both features). A sample without a caption has its image alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mclclip.clustering.rows import ROWS_PER_BLOCK, BlockLayout, Floats, NpyBlocks


class MeanBlocks(NpyBlocks):
    """Blocks of float32 rows [n, D], made when they are read and never all in memory.

    ``images``: .npy files of rows [n, D], one row per sample; ``texts``: as many files, one row per
    caption, all captions of a sample after each other (of several the first counts).
    ``num_captions`` [N] of all samples, in the order of the files. Raises ValueError where images
    and texts differ in width, and RuntimeError where there are not as many texts as captions.
    """

    def __init__(
        self,
        images: Sequence[Path],
        texts: Sequence[Path],
        num_captions: npt.NDArray[np.integer],
        rows_per_block: int = ROWS_PER_BLOCK,
    ) -> None:
        super().__init__(images, rows_per_block)
        self._texts = NpyBlocks(texts)
        starts = np.cumsum([0, *self.num_rows])
        self._num_captions = [
            num_captions[first:stop] for first, stop in zip(starts[:-1], starts[1:], strict=True)
        ]
        wanted = [int(captions.sum()) for captions in self._num_captions]
        if self._texts.num_rows != wanted:
            raise RuntimeError(
                f"text embeddings have {sum(self._texts.num_rows):,} rows, the index has "
                f"{sum(wanted):,} captions (compared per shard): run 'mclclip embed --text' again "
                "after 'mclclip index'"
            )
        widths = {shape for blocks in (self, self._texts) for shape in blocks.row_shapes()}
        if len(widths) > 1:
            raise ValueError(
                f"cluster.feature=mean: image and text embeddings have the widths {sorted(widths)}:"
                " wanted one; embed with embed.feature=projected"
            )

    def layouts(self) -> list[BlockLayout]:
        """Shape and type of each block, without reading it."""
        return [(shape, np.dtype(np.float32)) for shape, _ in super().layouts()]

    def read(self, file: int, cut: slice) -> Floats:
        """A block: the joint rows of samples ``cut`` of a file."""
        rows = _unit(super().read(file, cut))
        captions = self._num_captions[file]
        first = int(captions[: cut.start].sum())
        here = captions[cut]
        with_caption = here > 0
        places = first + np.cumsum(here) - here
        if with_caption.any():
            texts = self._texts.read(file, slice(first, first + int(here.sum())))
            rows[with_caption] += _unit(texts[places[with_caption] - first])
        return _unit(rows)


def _unit(rows: Floats) -> npt.NDArray[np.float32]:
    """float32 rows of length 1; zeros stay zeros."""
    wide: npt.NDArray[np.float32] = np.asarray(rows, dtype=np.float32)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    scaled: npt.NDArray[np.float32] = wide / np.maximum(norms, 1e-12)
    return scaled
