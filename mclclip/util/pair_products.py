"""Scalar products of chosen pairs of rows, by one loop in C++ that copies no row."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def pair_products(left: Tensor, right: Tensor, starts: Tensor, ids: Tensor) -> Tensor:
    """[P]: the products of rows of ``left`` [n, D] with the rows ``ids`` [P] of ``right`` [m, D].

    The ids that belong to left[i] are those from ``starts[i]`` to ``starts[i + 1]`` (``starts``
    [n + 1]). On a CPU each product depends on its two rows alone.
    """
    values, size = left.new_zeros(len(ids)), (len(left), len(right))
    places = torch.sparse_csr_tensor(starts, ids, values, size, check_invariants=False)
    products: Tensor = torch.sparse.sampled_addmm(places, left, right.T, beta=0.0).values()
    return products


with warnings.catch_warnings():
    # torch warns once per process that its sparse tensors may change. It does so here, where the
    # warning is filtered, and not in a user's log.
    warnings.simplefilter("ignore")
    torch.zeros(1, 1).to_sparse_csr()
