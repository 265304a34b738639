"""Ranks of queries among candidates by cosine, over any number of processes."""

from __future__ import annotations

import numpy as np
import torch

from mclclip.eval.features import Features, over_ranks
from mclclip.eval.metrics import IntArray, ranks_with_ties
from mclclip.ranks.process_group import SINGLE, Context

CHUNK_BYTES = 128 * 2**20
"""Size of the float32 similarity block that is held at once, without a few working copies."""


def rank_queries(
    queries: Features,
    query_image: IntArray,
    candidates: Features,
    candidate_image: IntArray,
    *,
    context: Context = SINGLE,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[IntArray, IntArray]:
    """Rank of each query's best candidate of the same image, in bounded memory.

    queries [Q, E], candidates [C, E]; ``query_image`` [Q] and ``candidate_image`` [C] say which
    image each row is or describes. Returns ranks with ties against and for the model (see
    ``ranks_with_ties``), equal to those of the whole matrix for any ``chunk_bytes``: similarities
    are summed in float64 and rounded to float32, so that equal features tie exactly wherever they
    stand in a block. The ranks of ``context`` divide the queries.
    """
    step = max(1, chunk_bytes // (4 * len(candidates)))

    def of_share(own: slice) -> IntArray:
        ranks = np.empty((2, own.stop - own.start), dtype=np.int64)
        for start in range(own.start, own.stop, step):
            chunk = slice(start, min(start + step, own.stop))
            near = similarity(queries[chunk], candidates, context.device)
            positive = query_image[chunk, None] == candidate_image[None, :]
            ranks[:, start - own.start : chunk.stop - own.start] = ranks_with_ties(near, positive)
        return ranks

    strict, optimistic = np.concatenate(over_ranks(context, len(queries), of_share), axis=1)
    return strict, optimistic


def similarity(
    queries: Features, candidates: Features, device: torch.device | None = None, block: int = 8192
) -> Features:
    """Dot products float32 [q, C], by blocks of candidates, whose float64 copies take memory."""
    out = np.empty((len(queries), len(candidates)), dtype=np.float32)
    left = torch.from_numpy(queries).to(device, torch.float64)
    for start in range(0, len(candidates), block):
        right = torch.from_numpy(candidates[start : start + block]).to(device, torch.float64)
        out[:, start : start + block] = (left @ right.T).float().cpu().numpy()
    return out
