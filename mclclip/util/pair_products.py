"""Computes products of given pairs of rows by one C++ loop, which copies no row."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def pair_products(left: Tensor, right: Tensor, starts: Tensor, ids: Tensor) -> Tensor:
    """Returns products [P] of rows of ``left`` [n, D] with rows ``ids`` [P] of ``right`` [m, D].

    left[i] is multiplied with the rows ids[starts[i]:starts[i + 1]]; ``starts`` is [n + 1]. On a
    CPU each product depends only on its two rows.
    """
    values, size = left.new_zeros(len(ids)), (len(left), len(right))
    places = torch.sparse_csr_tensor(starts, ids, values, size, check_invariants=False)
    products: Tensor = torch.sparse.sampled_addmm(places, left, right.T, beta=0.0).values()
    return products


with warnings.catch_warnings():
    # torch warns once per process that its sparse tensors may change. This provokes the warning
    # here, where it is ignored, so that it does not appear in a user's log.
    warnings.simplefilter("ignore")
    torch.zeros(1, 1).to_sparse_csr()
