"""Which samples meet in which step: an epoch as a pure function of the step (MCL, Algorithm 1).

`EpochPlan` turns (grouped index, global batch, policy, order, seed, stage, epoch) and a step into
sample ids. It holds no sampler state, sees neither rank nor world size (a rank takes its columns of
the batch), and its memory grows with groups and steps, never with samples.

Groups form a tree: level j holds the leaves (full labels), level L the prefixes of length L, level
0 the root. A leaf makes floor(n_c / B) pure batches; a policy says what becomes of its leftovers:

    drop      never used in this epoch (the authors' released sampler)
    backoff   pooled by the parent, whose leftovers go to its parent, up to the root, which leaves
              fewer than B out, others in every epoch
    mask      pooled over all groups, unshuffled, so that batches hold long runs of one group
    wrap      one more batch, filled up with earlier samples of the same group
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from mclclip.data.pseudo_labels import GroupedIndex, label_space, size_statistics, truncate
from mclclip.randomness import mix, permute

__all__ = ["Coverage", "EpochPlan", "GroupedIndex", "check_coverage", "coverage_report"]

Integers = npt.NDArray[np.int64]
Policy = Literal["drop", "backoff", "mask", "wrap"]
Order = Literal["round_robin", "proportional"]
_SAMPLES, _GROUP_ORDER, _STEP_ORDER = 1, 2, 3  # purposes of the randomness, part of its key
logger = logging.getLogger("mclclip")


@dataclass(frozen=True, eq=False)
class _Level:
    """All nodes of one level of the tree. Element (node, position) of a level is a leaf's sample or
    an element that a node of the level below could not place."""

    prefix_length: int  # the length at which its batches are masked
    labels: Integers  # [n]
    sizes: Integers  # [n] elements of each node
    batches: Integers  # [n] global batches made from them
    leftovers: Integers  # [n] elements for the level above
    first_child: Integers  # [n] into the level below (leaves: into sample_ids)


def _levels(grouped: GroupedIndex, global_batch: int, policy: Policy) -> list[_Level]:
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
        return [_Level(length, labels, sizes, batches, np.zeros_like(sizes), level.first_child)]
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
) -> _Level:
    batches, leftovers = np.divmod(sizes, global_batch)
    return _Level(prefix_length, labels, sizes, batches, leftovers, first_child.astype(np.int64))


def _has_stuck(levels: list[_Level]) -> bool:
    """Whether a group has no batch of its own nor a share in one of any node above it."""
    stuck = (levels[0].batches == 0) & (levels[0].sizes > 0)
    for level in levels[1:] if len(stuck) else []:
        stuck = (level.batches == 0) & np.logical_or.reduceat(stuck, level.first_child)
    return bool(stuck.any())


def _lend_batch(levels: list[_Level], global_batch: int) -> None:
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


def _num_scheduled(levels: list[_Level], global_batch: int, policy: Policy) -> int:
    """Distinct samples of an epoch."""
    if policy == "wrap":
        return int(levels[0].sizes.sum())
    return global_batch * int(sum(level.batches.sum() for level in levels))


def _require_steps(levels: list[_Level], global_batch: int, policy: Policy) -> int:
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


class EpochPlan:
    """The global batches of one epoch (MCL, Algorithm 1 and section 3).

    global_batch  samples per step over all ranks
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
        self._levels = _levels(grouped, global_batch, policy)
        self.steps_per_epoch = _require_steps(self._levels, global_batch, policy)
        self.scheduled = _num_scheduled(self._levels, global_batch, policy)
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

    def _shuffle(self, level: _Level, node: Integers, position: Integers) -> Integers:
        key = mix(*self._key, _SAMPLES, level.prefix_length, level.labels[node])
        return permute(position, level.sizes[node], key)


@dataclass(frozen=True)
class Coverage:
    """What a plan will use of the data; known before training, equal for every epoch."""

    policy: Policy
    global_batch: int
    num_samples: int
    groups: dict[str, float]  # pseudo_labels.size_statistics
    groups_below_batch: int
    share_below_batch: float  # of the samples
    label_space: int  # K^j, to be compared with M / B (Eq. 4)
    steps: int
    scheduled: int  # distinct samples per epoch
    remainder: int  # samples left out of an epoch, others in every epoch
    steps_by_prefix: dict[int, int]  # prefix length of the mask -> steps
    mixed_steps: int  # steps with rows of several groups at that length

    @property
    def bound(self) -> float:
        """Eq. 4: how many labels leave a full batch to each, M / B."""
        return self.num_samples / self.global_batch

    @property
    def within_bound(self) -> bool:
        return self.label_space * self.global_batch <= self.num_samples

    def text(self) -> str:
        """The report, several lines."""
        groups, percent = self.groups, 100 / max(self.num_samples, 1)
        prefixes = ", ".join(
            f"{100 * steps / max(self.steps, 1):.1f} % at prefix length {length}"
            for length, steps in sorted(self.steps_by_prefix.items(), reverse=True)
        )
        repeats = self.steps * self.global_batch - self.scheduled
        unused = "too small groups always, the others" if self.policy == "drop" else "others"
        return "\n".join(
            (
                f"coverage of one epoch, policy {self.policy}, global batch {self.global_batch:,}",
                f"  groups     {groups['num_groups']:,} of {self.num_samples:,} samples, effective "
                f"{groups['effective_groups']:.1f}, max share {100 * groups['max_share']:.1f} %",
                f"  sizes      smallest {groups['smallest']:,}, median {groups['median']:,.0f}, "
                f"largest {groups['largest']:,}",
                f"  too small  {self.groups_below_batch:,} groups below the global batch, with "
                f"{100 * self.share_below_batch:.1f} % of the samples",
                f"  Eq. 4      {self.label_space:,} possible labels, samples / global batch = "
                f"{self.bound:,.1f}: {'within' if self.within_bound else 'BEYOND'} the bound",
                f"  steps      {self.steps:,}: {prefixes}; {self.mixed_steps:,} of mixed groups",
                f"  samples    {self.scheduled:,} scheduled, {self.remainder:,} left out "
                f"({self.remainder * percent:.1f} %, {unused} in turn), {repeats:,} repeated",
            )
        )


def coverage_report(grouped: GroupedIndex, global_batch: int, policy: Policy) -> Coverage:
    """Counts what a plan will use; raises ValueError for an unknown policy only."""
    levels = _levels(grouped, global_batch, policy)
    sizes, scheduled = levels[0].sizes, _num_scheduled(levels, global_batch, policy)
    small = sizes[sizes < global_batch]
    by_prefix = dict.fromkeys((level.prefix_length for level in levels), 0)
    for level in levels:
        by_prefix[level.prefix_length] += int(level.batches.sum())
    return Coverage(
        policy=policy,
        global_batch=global_batch,
        num_samples=grouped.num_samples,
        groups=size_statistics(sizes),
        groups_below_batch=int((small > 0).sum()),
        share_below_batch=float(small.sum() / max(sizes.sum(), 1)),
        label_space=label_space(grouped.radices),
        steps=sum(by_prefix.values()),
        scheduled=scheduled,
        remainder=grouped.num_samples - scheduled,
        steps_by_prefix=by_prefix,
        mixed_steps=int(levels[-1].batches.sum()) if policy == "mask" else 0,
    )


def check_coverage(grouped: GroupedIndex, global_batch: int, policy: Policy) -> Coverage:
    """The report, logged; to be called before training.

    Beyond Eq. 4's bound (K^j > M / B) raises ValueError under "drop" and warns otherwise, and so do
    groups too small for a batch of their own. No step at all is a ValueError under any policy.
    """
    report = coverage_report(grouped, global_batch, policy)
    _require_steps(_levels(grouped, global_batch, policy), global_batch, policy)
    beyond = (
        f"{report.label_space:,} possible labels are beyond Eq. 4's bound of {report.bound:,.1f} "
        f"({report.num_samples:,} samples / global batch {global_batch:,})"
    )
    if policy == "drop" and not report.within_bound:
        raise ValueError(
            f"{beyond}, and policy 'drop' would leave {report.remainder:,} samples out: use policy "
            "'backoff', fewer clusters or a smaller global batch"
        )
    logger.info("%s", report.text())
    if not report.within_bound:
        logger.warning("%s: see the coverage above", beyond)
    elif policy == "drop" and report.groups_below_batch:
        logger.warning("policy 'drop' never uses %s groups, see above", report.groups_below_batch)
    return report
