"""The tree of groups that a plan schedules: what each node can fill, and what it passes up.

Groups form a tree: level j holds the leaves (full labels), level L the prefixes of length L, level
0 the root. A leaf makes floor(n_c / B) pure batches; a policy says what becomes of its leftovers:

    drop      never used in this epoch (the authors' released sampler)
    backoff   pooled by the parent, whose leftovers go to its parent, up to the root, which leaves
              fewer than B out, others in every epoch
    mask      pooled over all groups, unshuffled, so that batches hold long runs of one group
    wrap      one more batch, filled up with earlier samples of the same group
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from mclclip.data.pseudo_labels import GroupedIndex

Integers = npt.NDArray[np.int64]
Policy = Literal["drop", "backoff", "mask", "wrap"]


@dataclass(frozen=True, eq=False)
class Level:
    """All nodes of one level of the tree. Element (node, position) of a level is a leaf's sample or
    an element that a node of the level below could not place."""

    prefix_length: int  # the length at which its batches are masked
    labels: Integers  # [n]
    sizes: Integers  # [n] elements of each node
    batches: Integers  # [n] global batches made from them
    leftovers: Integers  # [n] elements for the level above
    first_child: Integers  # [n] into the level below (leaves: into sample_ids)


def build_levels(grouped: GroupedIndex, global_batch: int, policy: Policy) -> list[Level]:
    """The tree, leaves first; nothing in it depends on the epoch."""
    if policy not in get_args(Policy):
        raise ValueError(f"policy is {policy!r}: wanted one of {', '.join(get_args(Policy))}")
    if global_batch < 1:
        raise ValueError(f"global_batch is {global_batch}: wanted at least 1")
    length, labels = len(grouped.radices), np.asarray(grouped.group_labels)
    sizes = np.diff(grouped.group_starts)
    level = _level(length, labels, sizes, global_batch, np.asarray(grouped.group_starts[:-1]))
    if policy == "wrap":
        batches = -(-sizes // global_batch)
        return [Level(length, labels, sizes, batches, np.zeros_like(sizes), level.first_child)]
    levels = [level]
    if policy == "mask":
        pool, zero = np.array([level.leftovers.sum()]), np.zeros(1, dtype=np.int64)
        levels.append(_level(length, zero, pool, global_batch, zero))
    while policy == "backoff" and length > 0:
        length, children = length - 1, levels[-1]
        labels, first_child = np.unique(
            children.labels // grouped.radices[length], return_index=True
        )
        sizes = np.add.reduceat(children.leftovers, first_child) if len(labels) else labels
        levels.append(_level(length, labels, sizes, global_batch, first_child))
    if len(levels) > 1 and not levels[-1].batches.any() and _has_stuck(levels):
        _lend_batch(levels, global_batch)
    return levels


def _level(
    prefix_length: int, labels: Integers, sizes: Integers, global_batch: int, first_child: Integers
) -> Level:
    batches, leftovers = np.divmod(sizes, global_batch)
    return Level(prefix_length, labels, sizes, batches, leftovers, first_child.astype(np.int64))


def _has_stuck(levels: list[Level]) -> bool:
    """Whether a group has no batch of its own nor a share in one of any node above it."""
    stuck = (levels[0].batches == 0) & (levels[0].sizes > 0)
    for level in levels[1:] if len(stuck) else []:
        stuck = (level.batches == 0) & np.logical_or.reduceat(stuck, level.first_child)
    return bool(stuck.any())


def _lend_batch(levels: list[Level], global_batch: int) -> None:
    """Passes one batch of a node up to a root that cannot fill any, where groups would be stuck.

    Fewer than global_batch samples reach the root then, always with the same small groups among
    them; with a batch lent by the node nearest to the root (the one that has most) the root makes
    one batch and its remainder is drawn anew every epoch.
    """
    lender = max((n for n, level in enumerate(levels) if level.batches.any()), default=None)
    if lender is None:
        return  # fewer samples than one global batch
    node = int(levels[lender].batches.argmax())
    levels[lender].batches[node] -= 1
    levels[lender].leftovers[node] += global_batch
    for level in levels[lender + 1 :]:
        node = int(np.searchsorted(level.first_child, node, side="right")) - 1
        level.sizes[node] += global_batch
        level.leftovers[node] += global_batch
    levels[-1].batches[0] += 1
    levels[-1].leftovers[0] -= global_batch


def num_scheduled(levels: list[Level], global_batch: int, policy: Policy) -> int:
    """Distinct samples of an epoch."""
    if policy == "wrap":
        return int(levels[0].sizes.sum())
    return global_batch * int(sum(level.batches.sum() for level in levels))


def require_steps(levels: list[Level], global_batch: int, policy: Policy) -> int:
    """The number of steps of an epoch; ValueError where there is none."""
    steps, sizes = int(sum(level.batches.sum() for level in levels)), levels[0].sizes
    if steps:
        return steps
    if not sizes.sum():
        raise ValueError("no sample has a pseudo label: check the index, then 'mclclip cluster'")
    most = sizes.max() if policy == "drop" else sizes.sum()
    raise ValueError(
        f"global_batch is {global_batch:,}, but {sizes.sum():,} samples in {len(sizes):,} groups "
        f"(largest {sizes.max():,}) fill no batch under policy {policy!r}: wanted at "
        f"most {most:,}; lower the global batch, or cluster into fewer groups"
    )
