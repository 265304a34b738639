"""Products of chosen pairs of rows, by one loop in C++ that copies no row."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def pair_products(left: Tensor, right: Tensor, starts: Tensor, ids: Tensor) -> Tensor:
    """[P]: at p from starts[i] to starts[i + 1], the product of left[i] and right[ids[p]].

    On a CPU each depends on its two rows alone.
    """
    values, size = left.new_zeros(len(ids)), (len(left), len(right))
    wanted = torch.sparse_csr_tensor(starts, ids, values, size, check_invariants=False)
    found: Tensor = torch.sparse.sampled_addmm(wanted, left, right.T, beta=0.0).values()
    return found


with warnings.catch_warnings():
    # torch says once per process that its sparse tensors may change: now, and not in a user's log.
    warnings.simplefilter("ignore")
    torch.zeros(1, 1).to_sparse_csr()
