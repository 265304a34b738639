"""The samples of the batch of each step: a pure function of the step (MCL, Algorithm 1).

`EpochPlan` turns (grouped index, global batch, policy, order, seed, stage, epoch) and a step into
sample ids and their labels. It holds no sampler state, sees neither rank nor world size (a rank
takes its columns of the batch), and its memory grows with groups and steps, never with samples.

It schedules a tree. The leaves are the groups (full labels); above them are nodes for ever shorter
prefixes of the label, and at the top the root, whose prefix is empty. With B samples in a global
batch, a leaf of n samples makes floor(n / B) batches of its own. The policy decides what happens to
its leftovers:

    drop      they are not used in this epoch (as in the authors' released sampler)
    backoff   the parent node makes batches of its children's leftovers, and passes its own on to
              its parent; the root leaves out fewer than B samples, other ones in every epoch
    mask      all groups' leftovers are joined, unshuffled, so that batches hold long runs of one
              group
    wrap      they make one more batch, filled up with earlier samples of the same group
    carry     the group's next epoch uses them first, so that over epochs all samples of a group
              come equally often; groups with fewer than B samples are never used
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mclclip.data.groups import GroupedIndex, GroupSizes, Integers
from mclclip.data.labels import truncate
from mclclip.data.options import Order, Policy
from mclclip.util.randomness import mix, permute

ALONE = ("drop", "carry")  # policies that never put leftovers of two groups into one batch
# Each kind of random draw has its own number in the key, so that draws are independent.
_SAMPLES, _GROUP_ORDER, _STEP_ORDER, _DRAW, _TURN = 1, 2, 3, 4, 5

_FEWEST_BLOCKS = 8  # of a group; blocks of small groups are smaller


@dataclass(frozen=True, eq=False)
class Level:
    """The n nodes of one level of the tree.

    The elements of a leaf are its samples, or its draws where samples have weights. The elements of
    another node are the leftovers of its children.
    """

    prefix_length: int  # number of stages whose labels its batches are masked by
    labels: Integers  # [n] the label of each node, of prefix_length digits
    sizes: Integers  # [n] number of elements of each node
    batches: Integers  # [n] number of global batches made from them
    leftovers: Integers  # [n] number of elements left for the level above
    first_child: Integers  # [n] into the level below; of leaves: into sample_ids


def build_levels(grouped: GroupSizes, global_batch: int, policy: Policy) -> list[Level]:
    """Builds the tree, leaves first. It does not depend on the epoch."""
    length, labels = len(grouped.radices), np.asarray(grouped.group_labels)
    sizes = grouped.sizes
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
    if len(levels) > 1 and not levels[-1].batches.any():
        _lend_batch(levels, global_batch)
    return levels


def _level(
    prefix_length: int, labels: Integers, sizes: Integers, global_batch: int, first_child: Integers
) -> Level:
    batches, leftovers = np.divmod(sizes, global_batch)
    return Level(prefix_length, labels, sizes, batches, leftovers, first_child.astype(np.int64))


def _lend_batch(levels: list[Level], global_batch: int) -> None:
    """Lends a root that cannot fill a batch one batch of samples of a lower node.

    Without it the leftovers that reach the root would never be used, and in every epoch these are
    samples of the same small groups. So this is done only if some group is in no batch at all. The
    lender is the node with the most batches on the level nearest to the root that has any. The root
    then makes one batch, and each epoch leaves out other samples.
    """
    stuck = (levels[0].batches == 0) & (levels[0].sizes > 0)
    for level in levels[1:] if len(stuck) else []:
        stuck = (level.batches == 0) & np.logical_or.reduceat(stuck, level.first_child)
    lender = max((n for n, level in enumerate(levels) if level.batches.any()), default=None)
    if lender is None or not stuck.any():
        return  # or there are fewer samples than one global batch
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
    """Returns the number of distinct samples of an epoch, or of draws where samples have weights.

    Under "carry" it is an upper bound, since a batch may hold a sample twice.
    """
    if policy == "wrap":
        return int(levels[0].sizes.sum())
    return global_batch * int(sum(level.batches.sum() for level in levels))


def require_steps(steps: int, sizes: Integers, global_batch: int, policy: Policy) -> None:
    """Raises ValueError if an epoch over groups of these ``sizes`` has no step."""
    if steps:
        return
    if not sizes.sum():
        raise ValueError("no sample has a pseudo label: check the index, then 'mclclip cluster'")
    most = sizes.max() if policy in ALONE else sizes.sum()
    raise ValueError(
        f"global_batch is {global_batch:,}, but {sizes.sum():,} samples in {len(sizes):,} groups "
        f"(largest {sizes.max():,}) fill no batch under policy {policy!r}: wanted at "
        f"most {most:,}; lower the global batch, or cluster into fewer groups"
    )


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """One planned global batch, in a fixed order; B = global_batch.

    ids            sample ids int64 [B]
    positions      int64 [B], their places in ``GroupedIndex.sample_ids``
    group_ids      int64 [B], the pseudo label of each, truncated at the prefix length
    prefix_length  number of leading stages whose labels the Eq. 3 mask of this step compares
    group_size     number of samples that a row is compared with, itself included; the mean over
                   rows. It is B except in the mixed batches of "mask", where rows differ in prefix.
    occurrence     int64 [B], the number of this draw among those of the sample in the epoch; the
                   repetitions of "wrap" and "carry" do not count. None without weights
    """

    ids: Integers
    positions: Integers
    group_ids: Integers
    prefix_length: int
    group_size: int
    occurrence: Integers | None = None


def _starts(sizes: Integers) -> Integers:
    """Returns [n + 1]: where n concatenated runs of these sizes start, and where the last ends."""
    return np.append(0, np.cumsum(sizes))


class EpochPlan:
    """The global batches of one epoch (MCL, section 4.1 and Algorithm 1).

    global_batch  samples per step over all ranks
    policy        how samples are used that fill no batch of their own group (head of this file)
    order         round_robin (the paper: groups take turns until they have no batch left) or
                  proportional (all batches in a random order)
    seed, stage, epoch  the key of all randomness
    block         number of neighbours in a group that stay together (`shuffle_positions`)

    steps_per_epoch, scheduled, remainder, levels, and depth (int64 [steps], the level of each
    batch) are equal for every epoch. `of_epoch` makes the plan of another epoch, which shares them.
    Raises ValueError if not a single batch can be made.
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
        block: int = 1,
    ) -> None:
        self.grouped, self.global_batch, self.seed, self.stage = grouped, global_batch, seed, stage
        self._policy, self._order, self._block = policy, order, block
        self.levels = build_levels(grouped, global_batch, policy)
        self.steps_per_epoch = int(sum(level.batches.sum() for level in self.levels))
        require_steps(self.steps_per_epoch, grouped.sizes, global_batch, policy)
        self.scheduled = num_scheduled(self.levels, global_batch, policy)
        self.remainder = grouped.num_draws - self.scheduled
        # Per level: where each node's leftovers start if those of all its nodes are concatenated.
        self._pools = [_starts(level.leftovers) for level in self.levels]
        # Level, node and number within the node of every batch of an epoch: int64 [steps] each.
        # A unit is a node: first the leaves in label order, then the levels above, the root last.
        # Batches are listed unit by unit; under "round_robin" the first batches of all units come
        # first, then the second ones, and so on.
        batches = np.concatenate([level.batches for level in self.levels])
        level = np.repeat(np.arange(len(self.levels)), [len(x.batches) for x in self.levels])
        node = np.concatenate([np.arange(len(x.batches)) for x in self.levels])
        unit = np.repeat(np.arange(len(batches)), batches)
        number = np.arange(len(unit)) - np.repeat(np.cumsum(batches) - batches, batches)
        if order == "round_robin":
            visit = np.argsort(number, kind="stable")
            unit, number = unit[visit], number[visit]
        self.depth, self._node, self._number = level[unit], node[unit], number
        self._key, self.epoch = (seed, stage, epoch), epoch
        self._mixed: tuple[Integers, Integers] | None = None

    def of_epoch(self, epoch: int) -> EpochPlan:
        """Makes the plan of another epoch of the same stage."""
        other = copy.copy(self)
        other._key, other.epoch, other._mixed = (*self._key[:2], epoch), epoch, None
        return other

    def batch(self, step: int) -> PlannedBatch:
        """Returns the global batch of a step of this epoch."""
        assert 0 <= step < self.steps_per_epoch, f"step {step} of {self.steps_per_epoch}"
        turn = step
        if self._order == "proportional":
            key = mix(*self._key, _STEP_ORDER)
            turn = int(permute(step, self.steps_per_epoch, key))
        depth = int(self.depth[turn])
        leaf, number = self._draws_of(depth, int(self._node[turn]), int(self._number[turn]))
        grouped, length = self.grouped, self.levels[depth].prefix_length
        group_ids = truncate(grouped.group_labels[leaf], grouped.radices, length)
        group_size = self.global_batch
        if self._policy == "mask" and depth > 0:
            counts = np.unique(group_ids, return_counts=True)[1]
            group_size = round(float((counts**2).sum()) / self.global_batch)
        keys = mix(*self._key, _DRAW, grouped.group_labels[leaf])
        positions, occurrence = grouped.locate_draws(leaf, number, np.asarray(keys))
        ids = np.asarray(grouped.sample_ids[positions], dtype=np.int64)
        return PlannedBatch(ids, positions, group_ids, length, group_size, occurrence)

    def _draws_of(self, depth: int, node: int, number: int) -> tuple[Integers, Integers]:
        """Returns for batch ``number`` of a node at level ``depth``: (leaf, number of the draw).

        Both are int64 [global_batch]. All elements of the batch walk down the tree at once.
        """
        size, leaves = self.global_batch, self.levels[0]
        nodes = np.full(size, node, dtype=np.int64)
        position = number * size + np.arange(size, dtype=np.int64)
        if self._policy == "carry":
            return nodes, self._carried(node, position)
        if self._policy == "wrap":
            position %= leaves.sizes[node]
        elif self._policy == "mask" and depth > 0:
            nodes, position = self._draws_of_mixed(position)
        for above in range(depth, 0, -1) if self._policy == "backoff" else ():
            # The position is shuffled within the node, and then counts along the leftovers of its
            # children, which are the last positions of each child.
            parents, children = self.levels[above], self.levels[above - 1]
            pool = self._pools[above - 1]
            position = self._shuffle(parents, nodes, position) + pool[parents.first_child[nodes]]
            nodes = np.searchsorted(pool, position, side="right") - 1
            position = position - pool[nodes] + children.batches[nodes] * size
        return nodes, self._shuffle(leaves, nodes, position)

    def _draws_of_mixed(self, position: Integers) -> tuple[Integers, Integers]:
        """Returns (leaf, position in it) for positions in the pool of policy "mask".

        The pool holds the leftovers of all leaves. Their order is drawn for every epoch, when the
        first mixed batch is made.
        """
        leaves = self.levels[0]
        if self._mixed is None:
            num_groups, key = self.grouped.num_groups, mix(*self._key, _GROUP_ORDER)
            order = permute(np.arange(num_groups), num_groups, key)
            self._mixed = order, _starts(leaves.leftovers[order])
        order, pool = self._mixed
        slot = np.searchsorted(pool, position, side="right") - 1
        used = leaves.batches[order[slot]] * self.global_batch
        return order[slot], position - pool[slot] + used

    def _carried(self, leaf: int, position: Integers) -> Integers:
        """Returns positions in a leaf under "carry": an epoch goes on where the last one ended.

        The leaf's samples form an endless sequence of rounds. Each round holds all of them in
        another random order, and epochs take their batches from the sequence one after the other.
        A batch that crosses the end of a round may hold a sample twice.
        """
        level = self.levels[0]
        num_used = self.epoch * int(level.batches[leaf]) * self.global_batch
        rounds, position = np.divmod(num_used + position, level.sizes[leaf])
        key = mix(*self._key[:2], rounds, _SAMPLES, level.prefix_length, level.labels[leaf])
        return shuffle_positions(position, level.sizes[leaf], key, self._block)

    def _shuffle(self, level: Level, node: Integers, position: Integers) -> Integers:
        key = mix(*self._key, _SAMPLES, level.prefix_length, level.labels[node])
        return shuffle_positions(position, level.sizes[node], key, self._block)


def shuffle_positions(
    position: Integers, size: Integers, key: npt.NDArray[np.uint64] | np.uint64, block: int
) -> Integers:
    """Shuffles sequences: returns int64 [n], the old places of the elements now at ``position``.

    ``size`` and ``key`` are the length and the random key of each element's sequence. With
    ``block`` > 1 the sequence is rotated by a random number of places and cut into blocks of that
    many neighbours, and the blocks are shuffled; the rest after the last whole block comes last. So
    neighbours stay together and can be read in one piece (`mclclip relocate`). A block is at most
    an eighth of a sequence, since a sequence of one block would not be shuffled.
    """
    if block == 1:
        return permute(position, size, key)
    size = np.broadcast_to(np.asarray(size, dtype=np.int64), np.shape(position))
    blocks = np.clip(size // _FEWEST_BLOCKS, 1, block)
    number, within = np.divmod(position, blocks)
    whole = size // blocks
    is_whole = number < whole
    moved = permute(np.where(is_whole, number, 0), np.maximum(whole, 1), key)
    turned = np.where(is_whole, moved * blocks + within, position)
    turn = mix(key, _TURN) % size.astype(np.uint64)
    return np.asarray((turned + turn.astype(np.int64)) % size, dtype=np.int64)


def total_steps(steps: int | None, epochs: float, steps_per_epoch: int) -> int:
    """Returns the steps of a training: ``steps``, or for None those of ``epochs``, at least 1."""
    return steps or max(1, round(epochs * steps_per_epoch))


def check_samples(
    name: str,
    global_batch: int,
    policy: Policy,
    num_clusters: int,
    num_samples: int,
    lacking: int = 0,
    draws: int | None = None,
) -> None:
    """Raises ValueError if a batch, or the clusters, need more samples than there are.

    name     the training's option in the message, such as 'train'
    lacking  number of samples that are clustered, but left out of batches, since they lack the
             caption or the attribute that this training reads
    draws    draws of an epoch; None: samples have no weights, and an epoch draws each once
    """
    usable = num_samples - lacking
    if policy != "wrap" and global_batch > (usable if draws is None else draws):
        there = f"the index's {usable:,} samples" if draws is None else f"the {draws:,} draws"
        raise ValueError(
            f"{name}.global_batch={global_batch:,} is more than {there}"
            f"{' that have what is read' if lacking and draws is None else ''}"
            f"{'' if draws is None else ' of an epoch'}: lower it, or set "
            f"{name}.plan.policy=wrap"
        )
    if num_clusters > num_samples:
        raise ValueError(
            f"cluster.num_clusters={num_clusters:,} is more than the index's {num_samples:,} "
            "samples: lower it"
        )


def steps_per_epoch(
    num_samples: int, global_batch: int, policy: Policy, max_groups: int = 1
) -> tuple[int, int]:
    """Returns the fewest and the most steps of an epoch, for 1 to ``max_groups`` groups.

    Under ``backoff`` and ``mask`` both are equal, since less than one batch is left over.
    """
    whole = num_samples // global_batch
    groups = min(max_groups, num_samples)
    lost = groups * (global_batch - 1)  # most samples that fill no batch of their groups
    if policy in ALONE:
        return max(0, -(-(num_samples - lost) // global_batch)), whole
    if policy == "wrap":
        return -(-num_samples // global_batch), (num_samples + lost) // global_batch
    return whole, whole
