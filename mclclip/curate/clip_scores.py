"""CLIP scores: how well captions fit their images, and which samples have the highest ones.

Source: Schuhmann et al., LAION-400M (2021) and LAION-5B (NeurIPS 2022), which left out pairs whose
cosine is below 0.3 or 0.28; DataComp (Gadre et al., NeurIPS 2023), whose baseline keeps the 30 % of
the samples with the highest scores. Both score the one caption of a sample. Here it may have
several, of which training draws one: the score is that of the caption that fits best.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mclclip.curate.near import cuts
from mclclip.run import runlog
from mclclip.search import Floats, Rows, cosines


def clip_scores(
    images: Rows, texts: Rows, num_captions: NDArray[np.integer]
) -> NDArray[np.float32]:
    """float32 [N]: the largest cosine of a sample's image with its captions; NaN without a caption.

    images        rows [N, D], which need not have unit length
    texts         rows [T, D], all captions of a sample after each other
    num_captions  [N], which add up to T

    Computed in float64, each from its two rows alone, so that blocks change no bit. Raises
    RuntimeError, one line, for a row that is not finite, and for widths that differ.
    """
    scores = np.full(len(num_captions), -np.inf, np.float32)
    first = 0
    for block in progress(len(num_captions)):
        rows = finite(images, block, "image embeddings")
        owners = np.repeat(np.arange(len(rows)), num_captions[block])
        best = np.full(len(rows), -np.inf)
        for cut in cuts(len(owners)):
            texts_here = finite(texts, slice(first + cut.start, first + cut.stop), "captions")
            if texts_here.shape[1] != rows.shape[1]:
                raise RuntimeError(
                    f"image embeddings have {rows.shape[1]} numbers and those of captions "
                    f"{texts_here.shape[1]}: embed both again with embed.feature=projected"
                )
            np.maximum.at(best, owners[cut], cosines(rows[owners[cut]], texts_here))
        scores[block] = best
        first += len(owners)
    scores[np.isneginf(scores)] = np.nan
    return scores


def progress(num_samples: int) -> Iterator[slice]:
    """Blocks of samples, in order, whose embeddings are read; shows how many are done."""
    blocks = cuts(num_samples)
    return runlog.progress(blocks, total=len(blocks), description="filter, embeddings")


def finite(rows: Rows, cut: slice, what: str) -> Floats:
    """The rows of a cut. Raises RuntimeError, one line, for the first row that is not finite."""
    block = np.asarray(rows[cut])
    # A sum is finite only where all its numbers are; float64 sums of float32 do not overflow.
    bad = np.flatnonzero(~np.isfinite(block.sum(axis=1, dtype=np.float64)))
    if len(bad):
        raise RuntimeError(
            f"row {cut.start + int(bad[0]):,} of {what} is not finite ({len(bad)} of these "
            f"{len(block)}): the encoder has diverged, export another one and embed again"
        )
    return block


def top_share(scores: NDArray[np.floating], share: float) -> NDArray[np.bool_]:
    """bool [N]: the ``share`` of the samples with a score that has the highest ones, rounded to
    whole samples (at least one), ties by the lower row."""
    known = np.flatnonzero(np.isfinite(scores))
    count = min(len(known), max(1, round(share * len(known))))
    chosen = np.zeros(len(scores), bool)
    chosen[known[np.argsort(-scores[known], kind="stable")[:count]]] = True
    return chosen
