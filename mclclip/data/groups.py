"""Groups of samples with one pseudo label: on disk, and as the tree that a plan schedules.

The tree's leaves are the groups (full labels); above them are nodes for ever shorter prefixes of
the label, and at the top the root, whose prefix is empty. A leaf of n samples makes floor(n / B)
batches of its own, B being the global batch. The policy decides what happens to its leftovers:

    drop      not used in this epoch (the authors' released sampler)
    backoff   pooled by the parent, whose leftovers go to its parent, up to the root, which leaves
              out fewer than B samples, other ones in every epoch
    mask      pooled over all groups, unshuffled, so that batches hold long runs of one group
    wrap      one more batch, filled up with earlier samples of the same group
    carry     used first in the group's next epoch, so that over epochs all samples of a group come
              equally often; groups with fewer than B samples are never used
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from mclclip.data.arrays import open_npy, save_npy, write_npy_parts
from mclclip.data.grouping import GroupSizes, Integers, LabelBlocks
from mclclip.data.options import Policy
from mclclip.data.sample_weights import SampleWeights, drawn_rows
from mclclip.files import (
    Record,
    digest_array,
    digest_json,
    digest_parts,
    naming,
    read_json,
    records_of,
    sealed,
    unsealed,
    write_json,
)

_ARRAYS = ("sample_ids", "group_starts", "group_labels")
_WEIGHTED = ("draws", "weight_sums")  # further arrays where samples have weights
ALONE = ("drop", "carry")  # policies that never put leftovers of two groups into one batch


@dataclass(frozen=True, eq=False)
class GroupedIndex(GroupSizes):
    """Sample ids by group. Pickles as its path when it was opened from one.

    group_starts, group_labels, radices  see ``GroupSizes``
    sample_ids  int64 [M], sorted by pseudo label, ties by id; those of group g are
                sample_ids[group_starts[g] : group_starts[g + 1]]
    weight_sums  int64 [M], running sums of their weights in the same order; None without weights
    """

    sample_ids: Integers
    directory: Path | None = None
    weight_sums: Integers | None = None

    @classmethod
    def build(
        cls,
        labels: npt.NDArray[np.integer],
        radices: tuple[int, ...],
        weights: SampleWeights | None = None,
    ) -> GroupedIndex:
        """In memory, from the pseudo labels int64 [N] of all samples; -1 is left out.

        Raises ValueError for labels beyond the radices.
        """
        blocks = LabelBlocks(labels, radices, weights=weights)
        sizes = blocks.sizes()
        with tempfile.TemporaryFile() as runs:
            ids = np.concatenate([np.zeros(0, np.int64), *blocks.sorted_ids(sizes, runs)])
        sums = None if weights is None else np.cumsum(weights.units(ids))
        plain = sizes.group_starts, sizes.group_labels, sizes.radices
        return cls(*plain, ids, weight_sums=sums, draws=sizes.draws)

    def rows(
        self, group: Integers, number: Integers, keys: npt.NDArray[np.uint64]
    ) -> tuple[Integers, Integers | None]:
        """Where the samples of these draws lie in sample_ids, int64 [B], and their occurrence.

        The occurrence tells draws of one sample apart (``drawn_rows``). It is None without weights,
        where draw n of a group is its sample n. ``keys`` are those of the groups' random numbers.
        """
        starts = self.group_starts[group]
        if self.weight_sums is None or self.draws is None:
            return starts + number, None
        ranges = np.stack([starts, self.group_starts[group + 1]], axis=1)
        return drawn_rows(self.weight_sums, ranges, self.draws[group], number, keys)

    @cached_property
    def digest(self) -> str:
        """Digest of the contents; read from disk when the index was opened from there."""
        if self.directory is not None:
            return str(_read_header(self.directory)["digest"])
        arrays = [getattr(self, name) for name in (*_ARRAYS, *_WEIGHTED)]
        return digest_json([self.radices, *(digest_array(a) for a in arrays if a is not None)])

    def position(self, sample_id: int, start: int, stop: int) -> int:
        """Where a sample lies in sample_ids, in [start, stop), which are whole groups.

        Searches all of them at once by bisection: their ids ascend, and few of them are read.
        Raises LookupError where it is in none.
        """
        first, last = np.searchsorted(self.group_starts, [start, stop])
        low, ends = self.group_starts[first:last], self.group_starts[first + 1 : last + 1]
        high = ends
        while (searched := low < high).any():
            middle = np.minimum((low + high) // 2, stop - 1)
            before = self.sample_ids[middle] < sample_id
            low = np.where(searched & before, middle + 1, low)
            high = np.where(searched & ~before, middle, high)
        low = low[low < ends]
        return int(low[np.flatnonzero(self.sample_ids[low] == sample_id)[0]])

    def positions(self, sample_ids: Integers, labels: Integers) -> Integers:
        """Where samples of these full labels lie in sample_ids: int64 [n], -1 for those that are in
        no group. Reads few of the ids."""
        found = np.full(len(sample_ids), -1, dtype=np.int64)
        for label in np.unique(labels):
            start, stop = self.group_range(int(label), len(self.radices))
            rows = np.flatnonzero(labels == label)
            at = start + np.searchsorted(self.sample_ids[start:stop], sample_ids[rows])
            rows, at = rows[at < stop], at[at < stop]
            inside = self.sample_ids[at] == sample_ids[rows]
            found[rows[inside]] = at[inside]
        return found

    def save(self, directory: str | Path) -> None:
        """Writes the index as ``write_grouped`` does."""
        write_grouped(Path(directory), self, [(self.sample_ids, self.weight_sums)])

    @classmethod
    def open(cls, directory: str | Path, verb: str = "train") -> GroupedIndex:
        """Memory-mapped, read only; ``verb`` wrote it. FileNotFoundError where there is no finished
        index, RuntimeError where its files do not fit each other or are not what was written.

        All of them is read once, for this comparison. A process that the index is handed to maps
        the files without it.
        """
        return cls.mapped(Path(directory), compare=True, verb=verb)

    @classmethod
    def mapped(cls, directory: Path, compare: bool = False, verb: str = "train") -> GroupedIndex:
        """As ``open``, without the comparison where ``compare`` is false."""
        header = _read_header(directory, verb)
        records = header.get("records", {}) if compare else {}
        known = {name: Record(**entry) for name, entry in records.items()}
        names = _arrays(bool(header.get("weighted")))
        arrays = [
            open_npy(directory / f"{name}.npy", verb, known.get(f"{name}.npy")) for name in names
        ]
        num_samples, num_groups = header["num_samples"], header["num_groups"]
        wanted = [num_samples, num_groups + 1, num_groups, num_groups, num_samples][: len(names)]
        if (got := [len(array) for array in arrays]) != wanted:
            raise RuntimeError(
                f"grouped index {directory}: its arrays have {got} rows, its header says {wanted}: "
                f"run 'mclclip {verb} --force' to make it again"
            )
        ids, starts, labels = arrays[:3]
        draws, sums = (np.asarray(arrays[3]), arrays[4]) if arrays[3:] else (None, None)
        plain = np.asarray(starts), np.asarray(labels), tuple(header["radices"])
        return cls(*plain, ids, directory, sums, draws=draws)

    def __reduce__(self) -> tuple[Callable[..., GroupedIndex], tuple[Any, ...]]:
        if self.directory is not None:  # loader workers map the files instead of copying them
            return GroupedIndex.mapped, (self.directory,)
        weighted = partial(GroupedIndex, weight_sums=self.weight_sums, draws=self.draws)
        return weighted, (self.group_starts, self.group_labels, self.radices, self.sample_ids)


def _arrays(weighted: bool) -> tuple[str, ...]:
    return (*_ARRAYS, *(_WEIGHTED if weighted else ()))


Parts = Iterable[tuple[Integers, Integers | None]]
"""Sample ids int64 [n] of a grouped index in order, and the running sums int64 [n] of their weights
(None without weights)."""


def _with_sums(parts: Iterable[Integers], weights: SampleWeights | None) -> Parts:
    total = np.zeros(1, np.int64)
    for ids in parts:
        sums = None if weights is None else total[-1] + np.cumsum(weights.units(ids))
        yield ids, sums
        total = total if sums is None or not len(sums) else sums


def write_grouped(directory: Path, sizes: GroupSizes, parts: Parts) -> None:
    """Writes a grouped index: .npy files, then grouped_index.json, without which none counts.

    Each of the ``parts`` is written, and added to the digest, as it comes.
    """
    (directory / "grouped_index.json").unlink(missing_ok=True)
    shape, weighted = (sizes.num_samples,), sizes.draws is not None
    with ExitStack() as stack:
        opened = partial(write_npy_parts, shape=shape, dtype=np.int64)
        append = stack.enter_context(opened(directory / "sample_ids.npy"))
        append_sums = None
        if weighted:
            append_sums = stack.enter_context(opened(directory / "weight_sums.npy"))

        def written() -> Iterator[Integers]:
            for ids, sums in parts:
                append(ids)
                if append_sums is not None and sums is not None:
                    append_sums(sums)
                yield ids

        ids_digest = digest_parts(np.dtype(np.int64), shape, written())
    others = [sizes.group_starts, sizes.group_labels]
    others += [] if sizes.draws is None else [sizes.draws]
    for name, array in zip(_arrays(weighted)[1:4], others, strict=True):
        save_npy(directory / f"{name}.npy", array)
    if weighted:
        others.append(open_npy(directory / "weight_sums.npy", "train"))
    header: dict[str, Any] = {
        "radices": list(sizes.radices),
        "digest": digest_json([sizes.radices, ids_digest, *map(digest_array, others)]),
        "num_samples": sizes.num_samples,
        "num_groups": sizes.num_groups,
    }
    header |= {"weighted": True} if weighted else {}
    records = records_of(directory, *(f"{name}.npy" for name in _arrays(weighted)))
    header["records"] = {name: asdict(records[name]) for name in records}
    write_json(directory / "grouped_index.json", sealed(header))


def _read_header(directory: Path, verb: str = "train") -> dict[str, Any]:
    path = directory / "grouped_index.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} not found: no finished grouped index in that directory")
    return _unsealed(path, "radices", verb, required=False)  # older versions did not seal it


def _unsealed(
    path: Path, wanted: str, verb: str = "train", *, required: bool = True
) -> dict[str, Any]:
    """The fields of a sealed file, which has the field ``wanted``."""
    try:
        found = read_json(path)
        fields = unsealed(found, path, required=required or "records" in found)
        if wanted not in fields:
            raise ValueError(f"it has no {wanted}")
        return fields
    except (ValueError, AttributeError, TypeError) as error:
        raise RuntimeError(
            f"{path} is damaged ({error}): run 'mclclip {verb} --force' to make it again"
        ) from error


@dataclass(frozen=True, eq=False)
class Level:
    """All nodes of one level of the tree. The elements of a leaf are its samples, or its draws
    where samples have weights; those of another node are the leftovers of its children."""

    prefix_length: int  # the length at which its batches are masked
    labels: Integers  # [n]
    sizes: Integers  # [n] elements of each node
    batches: Integers  # [n] global batches made from them
    leftovers: Integers  # [n] elements for the level above
    first_child: Integers  # [n] into the level below (leaves: into sample_ids)


def build_levels(grouped: GroupSizes, global_batch: int, policy: Policy) -> list[Level]:
    """The tree, leaves first; nothing in it depends on the epoch."""
    if policy not in get_args(Policy):
        raise ValueError(f"policy is {policy!r}: wanted one of {', '.join(get_args(Policy))}")
    if global_batch < 1:
        raise ValueError(f"global_batch is {global_batch}: wanted at least 1")
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
    if len(levels) > 1 and not levels[-1].batches.any() and _has_stuck(levels):
        _lend_batch(levels, global_batch)
    return levels


def _level(
    prefix_length: int, labels: Integers, sizes: Integers, global_batch: int, first_child: Integers
) -> Level:
    batches, leftovers = np.divmod(sizes, global_batch)
    return Level(prefix_length, labels, sizes, batches, leftovers, first_child.astype(np.int64))


def _has_stuck(levels: list[Level]) -> bool:
    """Whether some group has neither a batch of its own nor a share in one of a node above it."""
    stuck = (levels[0].batches == 0) & (levels[0].sizes > 0)
    for level in levels[1:] if len(stuck) else []:
        stuck = (level.batches == 0) & np.logical_or.reduceat(stuck, level.first_child)
    return bool(stuck.any())


def _lend_batch(levels: list[Level], global_batch: int) -> None:
    """Moves one batch of samples from a lower node to a root that cannot fill a batch.

    Otherwise the samples that reach the root would never be used, always those of the same small
    groups. The batch comes from a node with the most batches, on the level nearest to the root that
    has any. The root then makes one batch, and other samples are left out in every epoch.
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
    """Number of distinct samples of an epoch (under "carry" an upper bound, see ``epoch_plan``), or
    of draws where samples have weights."""
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
    most = sizes.max() if policy in ALONE else sizes.sum()
    raise ValueError(
        f"global_batch is {global_batch:,}, but {sizes.sum():,} samples in {len(sizes):,} groups "
        f"(largest {sizes.max():,}) fill no batch under policy {policy!r}: wanted at "
        f"most {most:,}; lower the global batch, or cluster into fewer groups"
    )


class StageGroups:
    """The grouped index of one training, written once: a resumed run uses what it began with.

    Samples found undecodable meanwhile stay in the plan of a begun stage (and are replaced), so
    that the resumed run's order is the first run's; they are outside the plans of later stages.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)

    @property
    def written(self) -> bool:
        """True where the grouped index is whole on disk."""
        return (self.directory / "known_bad.json").exists()

    def damage(self) -> str | None:
        """Why the grouped index cannot be read; None where it can, or is not written yet."""
        try:
            if self.written:
                self.read()
        except (RuntimeError, ValueError, OSError) as error:
            return str(error)
        return None

    def write(self, labels: LabelBlocks, sizes: GroupSizes, bad_ids: np.ndarray) -> None:
        """Groups the samples, whose groups have ``sizes``, on disk; and saves the undecodable
        ``bad_ids`` that were left out."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with naming(self.directory), tempfile.TemporaryFile(dir=self.directory) as runs:
            parts = _with_sums(labels.sorted_ids(sizes, runs), labels.weights)
            write_grouped(self.directory, sizes, parts)
        # Last: marks the grouped index as whole.
        known_bad = sealed({"known_bad": [int(i) for i in bad_ids]})
        write_json(self.directory / "known_bad.json", known_bad)

    def read(self) -> tuple[GroupedIndex, np.ndarray]:
        """The grouped index (memory-mapped) and the ids that were left out of it."""
        path = self.directory / "known_bad.json"
        found = read_json(path)
        # Older versions wrote the list alone.
        known_bad = found if isinstance(found, list) else _unsealed(path, "known_bad")["known_bad"]
        return GroupedIndex.open(self.directory), np.asarray(known_bad, dtype=np.int64)
