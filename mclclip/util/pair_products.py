"""Products of given pairs of rows, and weighted sums of given rows, by loops in C++ that copy no
row."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional


def pair_products(left: Tensor, right: Tensor, starts: Tensor, ids: Tensor) -> Tensor:
    """Returns products [P] of rows of ``left`` [n, D] with rows ``ids`` [P] of ``right`` [m, D].

    left[i] is multiplied with the rows ids[starts[i]:starts[i + 1]]; ``starts`` is [n + 1]. On a
    CPU each product depends only on its two rows.
    """
    values, size = left.new_zeros(len(ids)), (len(left), len(right))
    places = torch.sparse_csr_tensor(starts, ids, values, size, check_invariants=False)
    products: Tensor = torch.sparse.sampled_addmm(places, left, right.T, beta=0.0).values()
    return products


def starts_of(counts: Tensor) -> Tensor:
    """Returns where each of n runs of these lengths starts, and where the last ends, [n + 1]."""
    return functional.pad(counts.cumsum(0), (1, 0))


def weighted_sums(table: Tensor, ids: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Returns rows i: the sum of ``weights[p] * table[ids[p]]`` for p in starts[i]..starts[i + 1].

    Rows of ``table`` are not copied, and always added in the same order.
    """
    return functional.embedding_bag(
        ids, table, starts, mode="sum", per_sample_weights=weights, include_last_offset=True
    )


with warnings.catch_warnings():
    # torch warns once per process that its sparse tensors may change. This provokes the warning
    # here, where it is ignored, so that it does not appear in a user's log.
    warnings.simplefilter("ignore")
    torch.zeros(1, 1).to_sparse_csr()
