"""Which samples meet in which step: an epoch as a pure function of the step (MCL, Algorithm 1).

`EpochPlan` turns (grouped index, global batch, policy, order, seed, stage, epoch) and a step into
sample ids. It holds no sampler state, sees neither rank nor world size (a rank takes its columns of
the batch), and its memory grows with groups and steps, never with samples.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from mclclip.data.groups import (
    GroupedIndex,
    Integers,
    Level,
    Policy,
    build_levels,
    num_scheduled,
    require_steps,
)
from mclclip.data.labels import truncate
from mclclip.randomness import mix, permute

Order = Literal["round_robin", "proportional"]
_SAMPLES, _GROUP_ORDER, _STEP_ORDER = 1, 2, 3  # purposes of the randomness, part of its key


class EpochPlan:
    """The global batches of one epoch (MCL, Algorithm 1 and section 3).

    global_batch  samples per step over all ranks
    policy        what becomes of samples that fill no batch of their own group (see groups)
    order         round_robin (the paper: groups in turn, exhausted ones skipped) or proportional
                  (steps shuffled, so that a group comes up in proportion to its batches)
    seed, stage, epoch  the key of all randomness

    steps_per_epoch, scheduled and remainder are equal for every epoch.
    Raises ValueError where not a single batch can be made.
    """

    def __init__(
        self,
        grouped: GroupedIndex,
        global_batch: int,
        policy: Policy,
        order: Order,
        seed: int,
        stage: int,
        epoch: int,
    ) -> None:
        if order not in get_args(Order):
            raise ValueError(f"order is {order!r}: wanted one of {', '.join(get_args(Order))}")
        self._grouped, self._global_batch, self._policy = grouped, global_batch, policy
        self._key = (seed, stage, epoch)
        self._levels = build_levels(grouped, global_batch, policy)
        self.steps_per_epoch = require_steps(self._levels, global_batch, policy)
        self.scheduled = num_scheduled(self._levels, global_batch, policy)
        self.remainder = grouped.num_samples - self.scheduled
        self._leaf_order = np.arange(grouped.num_groups)
        if policy == "mask":
            key = mix(*self._key, _GROUP_ORDER)
            self._leaf_order = permute(self._leaf_order, grouped.num_groups, key)
        # All pools above a level laid end to end: where the leftovers of each of its nodes start.
        leftovers = [level.leftovers for level in self._levels]
        leftovers[0] = leftovers[0][self._leaf_order]
        self._pools = [np.append(0, np.cumsum(left)) for left in leftovers]
        self._make_schedule(order)

    def batch(self, step: int) -> Integers:
        """Sample ids int64 [global_batch] of a step of this epoch, in a fixed order."""
        leaf, position = self._resolve(step)
        ids = self._grouped.sample_ids[self._grouped.group_starts[leaf] + position]
        return np.asarray(ids, dtype=np.int64)

    def prefix_length(self, step: int) -> int:
        """At how many leading stages the Eq. 3 mask of this step compares labels."""
        return self._levels[int(self._step_level[self._check_step(step)])].prefix_length

    def labels_at(self, step: int) -> Integers:
        """Labels int64 [global_batch] of the batch, truncated at the step's prefix length."""
        labels = self._grouped.group_labels[self._resolve(step)[0]]
        return truncate(labels, self._grouped.radices, self.prefix_length(step))

    def group_size(self, step: int) -> int:
        """Rows that a row of the batch is compared with, itself included: their mean over the rows.
        The global batch wherever all rows share the prefix, that is in all but mixed batches."""
        if self._policy != "mask" or self._step_level[self._check_step(step)] == 0:
            return self._global_batch
        counts = np.unique(self.labels_at(step), return_counts=True)[1]
        return round(float((counts**2).sum()) / self._global_batch)

    def _make_schedule(self, order: Order) -> None:
        """Which level, node and batch of the node each step takes: int64 [steps] each.

        Units are the leaves in label order, then the nodes above, the root last.
        """
        batches = np.concatenate([level.batches for level in self._levels])
        level = np.repeat(np.arange(len(self._levels)), [len(x.batches) for x in self._levels])
        node = np.concatenate([np.arange(len(x.batches)) for x in self._levels])
        unit = np.repeat(np.arange(len(batches)), batches)
        number = np.arange(len(unit)) - np.repeat(np.cumsum(batches) - batches, batches)
        if order == "round_robin":
            visit = np.argsort(number, kind="stable")  # all first batches, all second ones, ...
        else:
            visit = permute(np.arange(len(unit)), len(unit), mix(*self._key, _STEP_ORDER))
        self._step_level, self._step_node = level[unit[visit]], node[unit[visit]]
        self._step_number = number[visit]

    def _check_step(self, step: int) -> int:
        if not 0 <= step < self.steps_per_epoch:
            raise ValueError(f"step is {step}: wanted 0 <= step < {self.steps_per_epoch}")
        return step

    def _resolve(self, step: int) -> tuple[Integers, Integers]:
        """(leaf, position in the shuffled leaf), int64 [global_batch] each.

        Walks down the tree with all elements at once: a position of a node is shuffled, then found
        among the leftovers of its children, which are the last positions of each child.
        """
        step = self._check_step(step)
        depth = int(self._step_level[step])
        node = np.full(self._global_batch, self._step_node[step], dtype=np.int64)
        first = int(self._step_number[step]) * self._global_batch
        position = first + np.arange(self._global_batch, dtype=np.int64)
        if self._policy == "wrap":
            position %= self._levels[0].sizes[node]
        for number in range(depth, 0, -1):
            level, below = self._levels[number], self._levels[number - 1]
            if self._policy != "mask":
                position = self._shuffle(level, node, position)
            pool = self._pools[number - 1]
            position = position + pool[level.first_child[node]]
            slot = np.searchsorted(pool, position, side="right") - 1
            node = self._leaf_order[slot] if number == 1 else slot
            position = position - pool[slot] + below.batches[node] * self._global_batch
        return node, self._shuffle(self._levels[0], node, position)

    def _shuffle(self, level: Level, node: Integers, position: Integers) -> Integers:
        key = mix(*self._key, _SAMPLES, level.prefix_length, level.labels[node])
        return permute(position, level.sizes[node], key)


def total_steps(steps: int | None, epochs: float, steps_per_epoch: int) -> int:
    """Steps of a training: as given, or of ``epochs`` whole plans."""
    return steps or max(1, round(epochs * steps_per_epoch))


def check_ranks(name: str, global_batch: int, num_ranks: int) -> None:
    """Raises ValueError, with the numbers that would do, where ranks cannot share a batch.

    ``name`` is the training's option, ``base`` or ``train``.
    """
    if global_batch % num_ranks:
        near = range(1, max(2 * num_ranks, 128) + 1)
        fits = [number for number in near if global_batch % number == 0]
        raise ValueError(
            f"{name}.global_batch={global_batch} cannot be cut over {num_ranks} ranks: use one of "
            f"{fits} ranks, or a multiple of {num_ranks} as {name}.global_batch"
        )


def check_samples(
    name: str, global_batch: int, policy: Policy, num_clusters: int, num_samples: int
) -> None:
    """Raises ValueError where a batch, or the clusters, need more samples than there are."""
    if policy != "wrap" and global_batch > num_samples:
        raise ValueError(
            f"{name}.global_batch={global_batch:,} is more than the index's {num_samples:,} "
            f"samples: lower it, or set {name}.plan.policy=wrap"
        )
    if num_clusters > num_samples:
        raise ValueError(
            f"cluster.num_clusters={num_clusters:,} is more than the index's {num_samples:,} "
            "samples: lower it"
        )


def steps_per_epoch(
    num_samples: int, global_batch: int, policy: Policy, max_groups: int = 1
) -> tuple[int, int]:
    """Fewest and most steps of an epoch over ``num_samples`` in 1 to ``max_groups`` groups.

    Under ``backoff`` and ``mask`` leftovers are pooled until fewer than a batch are left, so that
    both are equal (see ``groups``).
    """
    whole = num_samples // global_batch
    groups = min(max_groups, num_samples)
    lost = groups * (global_batch - 1)  # at most so many do not fill a batch of their groups
    if policy == "drop":
        return max(0, -(-(num_samples - lost) // global_batch)), whole
    if policy == "wrap":
        return -(-num_samples // global_batch), (num_samples + lost) // global_batch
    return whole, whole
