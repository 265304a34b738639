"""Stage 0's stored embeddings, which come with every sample."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.data.row_store import RowStore
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import RawSample, TextFeatures
from mclclip.run.artifacts import read_manifest
from mclclip.run.layout import Layout


class BaseFeatures:
    """An `Extra`: ``base_image_features`` of a sample and ``base_text_features`` of the caption
    that was drawn, float32 [D], unit length.

    ``read`` names them, ``images`` and ``texts``; other names add nothing. Images were embedded
    from the centre crop. Raises FileNotFoundError, which names the verb, where they are missing.
    """

    reads_text = False

    def __init__(self, layout: Layout, index: SampleIndex, read: Collection[str]) -> None:
        self._images = self._texts = None
        if "images" in read:
            directory = layout.embeddings(0)
            manifest = read_manifest(directory, "embeddings")
            self._images = RowStore.of_samples("stage 0", directory, manifest, index)
        if "texts" in read:
            self._texts = TextFeatures(layout.text_embeddings, index)

    def __call__(
        self, raw: RawSample, captions: Sequence[str], caption_number: int, key: int
    ) -> dict[str, Tensor]:
        """The embeddings of one sample."""
        found = {}
        if self._images is not None:
            row = self._images[np.array([raw.sample_id])][0]
            found["base_image_features"] = torch.from_numpy(row.astype(np.float32))
        if self._texts is not None:
            found["base_text_features"] = self._texts.get(raw.sample_id, caption_number)
        return {name: functional.normalize(row, dim=0) for name, row in found.items()}
