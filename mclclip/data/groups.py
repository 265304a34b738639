"""Groups of samples that have the same pseudo label: sorts any number of samples, and stores them.

Labels are read in blocks. A first pass counts the samples of each group; the coverage of a plan
needs no more. A second pass sorts each block by itself and stores the order in a temporary file.
Then the blocks are merged: ranges of groups that are small enough to be sorted in memory are
collected from all blocks, and a larger group is collected block by block. So the sorted ids come in
order, and are written as they come.

Memory: about 100 bytes per row of a block (50 MiB for the default size), 80 bytes per group while
groups are counted, and at most 1/8 byte per sample. Disk: 4 bytes per sample for the temporary
file, beside the 8 bytes per sample of the result.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mclclip.data.arrays import open_npy, save_npy, write_npy_parts
from mclclip.data.labels import SampleWeights, check_labels, label_space, locate_draws
from mclclip.util.files import Record, read_json, records_of, with_path_in_errors, write_json

Integers = npt.NDArray[np.int64]
ROWS_PER_BLOCK = 2**19  # larger blocks do not fit the processor's cache, and sort slower
DENSE = 2**21  # up to so many possible labels, one array counts all of them
RANGES = 4096  # number of ranges of groups that are merged one after another, or up to twice it
JOINED = 2**18  # most ids of one group that are yielded at once

_HEADER, _KNOWN_BAD = "grouped_index.json", "known_bad.json"
_ARRAYS = ("sample_ids", "group_starts", "group_labels")
_WEIGHTED = ("draws", "weight_sums")  # more arrays, where samples have weights


@dataclass(frozen=True, eq=False)
class GroupSizes:
    """The labels and sizes of G groups; a plan's coverage is counted from them.

    group_starts  int64 [G + 1], group g has group_starts[g + 1] - group_starts[g] samples
    group_labels  int64 [G], the pseudo labels in ascending order
    radices       number of clusters of each stage, the digits of a label; () for a single group
    draws         int64 [G], number of draws of an epoch from each group, where samples have weights
                  (``data.labels``); None: each sample is drawn once
    """

    group_starts: Integers
    group_labels: Integers
    radices: tuple[int, ...]
    draws: Integers | None = field(default=None, kw_only=True)

    @property
    def num_groups(self) -> int:
        return len(self.group_labels)

    @property
    def sizes(self) -> Integers:
        """int64 [G]: number of draws of an epoch from each group."""
        return np.diff(self.group_starts) if self.draws is None else self.draws

    @property
    def num_draws(self) -> int:
        """Number of draws of an epoch; without weights, the number of samples."""
        return int(self.sizes.sum())

    @property
    def num_samples(self) -> int:
        return int(self.group_starts[-1])

    def group_range(self, label: int, prefix_length: int) -> tuple[int, int]:
        """Returns the range [start, stop) of the sorted samples whose label has this prefix.

        ``label`` is the prefix: a label of the first ``prefix_length`` stages.
        """
        width = label_space(self.radices[prefix_length:])
        first, last = np.searchsorted(self.group_labels, [label * width, (label + 1) * width])
        return int(self.group_starts[first]), int(self.group_starts[last])


class LabelBlocks:
    """Pseudo labels [N] of all samples of an index, read in blocks; they may be memory-mapped.

    labels    integers, -1 for samples that no plan uses
    radices   number of clusters of each stage, the digits of a label
    left_out  sorted ids of more samples that are not used
    weights   weights of the samples; samples of weight 0 are not used either
    Raises ValueError for labels that do not fit the radices.
    """

    def __init__(
        self,
        labels: npt.NDArray[np.integer],
        radices: Iterable[int],
        left_out: npt.NDArray[np.integer] | None = None,
        rows_per_block: int = ROWS_PER_BLOCK,
        weights: SampleWeights | None = None,
    ) -> None:
        self.labels = np.asarray(labels)
        self.radices = tuple(int(radix) for radix in radices)
        self.left_out = np.zeros(0, np.int64) if left_out is None else left_out
        self.rows_per_block, self.weights = rows_per_block, weights
        check_labels(self.labels, label_space(self.radices), "pseudo labels")

    def __iter__(self) -> Iterator[tuple[int, Integers]]:
        """Yields for each block the id of its first sample and its labels, a new int64 array.

        Labels are -1 for all samples that are not used.
        """
        for first in range(0, len(self.labels), self.rows_per_block):
            block = np.array(self.labels[first : first + self.rows_per_block], dtype=np.int64)
            here = np.searchsorted(self.left_out, [first, first + len(block)])
            block[self.left_out[slice(*here)] - first] = -1
            if self.weights is not None:
                block[self.weights.units(np.arange(first, first + len(block))) == 0] = -1
            yield first, block

    def _amounts(self) -> Iterator[tuple[Integers, Integers]]:
        """Yields for each block the labels [n] of its used samples, and the amounts int64 [k, n].

        Amounts are added up by label: ones for the number of samples, and the weights if there are.
        """
        for first, block in self:
            rows = np.flatnonzero(block >= 0)
            ones = np.ones((1, len(rows)), np.int64)
            if self.weights is None:
                yield block[rows], ones
            else:
                yield block[rows], np.concatenate([ones, self.weights.units(first + rows)[None]])

    def sizes(self) -> GroupSizes:
        """Counts the samples and the draws of each group."""
        space = label_space(self.radices)
        if space <= min(DENSE, len(self.labels)):
            sums = np.zeros((1 if self.weights is None else 2, space), np.int64)
            for labels, amounts in self._amounts():
                sums[0] += np.bincount(labels, minlength=space)
                for total, amount in zip(sums[1:], amounts[1:], strict=True):
                    # Sums of a block stay far below 2^53, up to which float64 is exact.
                    total += np.bincount(labels, amount, space).astype(np.int64)
            present = np.flatnonzero(sums[0])
            sums = sums[:, present]
        else:
            present, sums = _add_sparse(self._amounts(), 1 if self.weights is None else 2)
        draws = None if self.weights is None else self.weights.draws(sums[1])
        return GroupSizes(np.append(0, np.cumsum(sums[0])), present, self.radices, draws=draws)

    def sorted_ids(self, sizes: GroupSizes, runs: BufferedRandom) -> Iterator[Integers]:
        """Yields the ids of the samples, sorted by label and then by id, in parts of any size.

        ``sizes`` is the result of `sizes`; ``runs`` an empty file, which will take 4 bytes per
        sample.
        """
        most = max(1, len(self.labels) // RANGES)
        cuts = _cut(sizes.group_starts, most)
        bounds = self._sort_blocks(sizes.group_labels[cuts[:-1]], runs)
        for number, num_groups in enumerate(np.diff(cuts)):
            ranges = bounds[:, number], bounds[:, number + 1]
            for ids in self._collect(runs, *ranges, max(most, JOINED)):
                # A range of several groups has at most ``most`` rows, which come in one part.
                yield ids[np.argsort(self.labels[ids], kind="stable")] if num_groups > 1 else ids

    def _sort_blocks(self, edges: Integers, runs: BufferedRandom) -> Integers:
        """Writes the row numbers of each block to ``runs``, sorted by label.

        ``edges`` has the first label of each range. Returns int64 [blocks, ranges + 1]: where the
        rows of each range begin in ``runs``.
        """
        bounds, offset = [np.zeros((0, len(edges) + 1), np.int64)], 0
        for _, block in self:
            rows = np.flatnonzero(block >= 0).astype(np.int32)
            inside = block[rows] if len(rows) < len(block) else block
            order = np.argsort(inside, kind="stable")
            starts = np.searchsorted(inside, edges, sorter=order)
            bounds.append(offset + np.append(starts, len(rows))[None])
            runs.write(rows[order].data)
            offset += len(rows)
        return np.concatenate(bounds)

    def _collect(
        self, runs: BufferedRandom, starts: Integers, stops: Integers, most: int
    ) -> Iterator[Integers]:
        """Yields the ids of one range of groups, which lie at [starts, stops) of ``runs``.

        ``starts`` and ``stops`` have an entry for each block. The ids of several blocks are yielded
        together if they are at most ``most``.
        """
        ends, first = np.append(0, np.cumsum(stops - starts)), 0
        while first < len(starts):
            last = int(np.searchsorted(ends, ends[first] + most, side="right")) - 1
            last = max(last, first + 1)
            lengths = stops[first:last] - starts[first:last]
            rows, at = np.empty(lengths.sum(), np.int32), 0
            view = rows.view(np.uint8).data
            for start, length in zip(starts[first:last].tolist(), lengths.tolist(), strict=True):
                if length:
                    runs.seek(4 * start)
                    at += runs.readinto(view[at : at + 4 * length])
            yield rows + np.repeat(np.arange(first, last) * self.rows_per_block, lengths)
            first = last


def _add_sparse(
    blocks: Iterable[tuple[Integers, Integers]], num_amounts: int
) -> tuple[Integers, Integers]:
    """Adds up amounts by label: the labels [G] that occur, ascending, and their sums [k, G].

    Sums of blocks are merged as in a binary counter, so that each is copied only a few times.
    """
    nothing = np.zeros(0, np.int64), np.zeros((num_amounts, 0), np.int64)
    parts: list[tuple[Integers, Integers]] = [nothing]
    for block in blocks:
        parts.append(_add_parts([block]))
        while len(parts) > 1 and len(parts[-2][0]) <= 2 * len(parts[-1][0]):
            parts[-2:] = [_add_parts(parts[-2:])]
    return _add_parts(parts)


def _add_parts(parts: list[tuple[Integers, Integers]]) -> tuple[Integers, Integers]:
    labels = np.concatenate([labels for labels, _ in parts])
    amounts = np.concatenate([amounts for _, amounts in parts], axis=1)
    if not len(labels):
        return labels, amounts
    order = np.argsort(labels, kind="stable")
    labels, amounts = labels[order], amounts[:, order]
    firsts = np.flatnonzero(np.append(True, labels[1:] != labels[:-1]))
    return labels[firsts], np.add.reduceat(amounts, firsts, axis=1)


def _cut(group_starts: Integers, most: int) -> list[int]:
    """Cuts the groups into ranges: numbers of the groups at which they begin, and G at the end.

    A range has one group, or several with at most ``most`` samples together.
    """
    cuts, num_groups = [0], len(group_starts) - 1
    while cuts[-1] < num_groups:
        end = group_starts[cuts[-1]] + most
        fits = int(np.searchsorted(group_starts, end, side="right")) - 1
        cuts.append(min(max(fits, cuts[-1] + 1), num_groups))
    return cuts


# --- on disk ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GroupedIndex(GroupSizes):
    """The sample ids of each group, as `StageGroups` writes them. It pickles as its path.

    group_starts, group_labels, radices, draws  see `GroupSizes`
    sample_ids   int64 [M], sorted by pseudo label and then by id; those of group g are
                 sample_ids[group_starts[g] : group_starts[g + 1]]
    weight_sums  int64 [M], running sums of their weights in the same order; None without weights
    """

    sample_ids: Integers
    directory: Path
    weight_sums: Integers | None = None

    def locate_draws(
        self, group: Integers, number: Integers, keys: npt.NDArray[np.uint64]
    ) -> tuple[Integers, Integers | None]:
        """Returns the places in sample_ids, int64 [B], of draw ``number`` [B] of each group.

        Also returns the occurrence, which tells draws of one sample apart (`labels.locate_draws`).
        It is None without weights: then draw n of a group is its sample n. ``keys`` [B] are the
        keys of the groups' random numbers.
        """
        starts = self.group_starts[group]
        if self.weight_sums is None or self.draws is None:
            return starts + number, None
        ranges = np.stack([starts, self.group_starts[group + 1]], axis=1)
        return locate_draws(self.weight_sums, ranges, self.draws[group], number, keys)

    def positions(self, sample_ids: Integers, labels: Integers) -> Integers:
        """Returns the places of samples in ``self.sample_ids``: int64 [n], -1 if in no group.

        ``labels`` [n] are their full labels. Reads only a few of the ids.
        """
        result = np.full(len(sample_ids), -1, dtype=np.int64)
        for label in np.unique(labels):
            start, stop = self.group_range(int(label), len(self.radices))
            rows = np.flatnonzero(labels == label)
            at = start + np.searchsorted(self.sample_ids[start:stop], sample_ids[rows])
            rows, at = rows[at < stop], at[at < stop]
            inside = self.sample_ids[at] == sample_ids[rows]
            result[rows[inside]] = at[inside]
        return result

    @classmethod
    def open(cls, directory: str | Path, verb: str = "train") -> GroupedIndex:
        """Opens a grouped index that ``verb`` wrote, memory-mapped and read-only.

        Raises FileNotFoundError if it is not finished, RuntimeError if its files do not fit each
        other.
        """
        directory = Path(directory)
        header = _read(directory / _HEADER, ("radices", "num_samples", "num_groups"), verb)
        names = [f"{n}.npy" for n in _ARRAYS + (_WEIGHTED if header.get("weighted") else ())]
        arrays = [open_npy(directory / name, verb) for name in names]
        num_samples, num_groups = header["num_samples"], header["num_groups"]
        sizes = [num_samples, num_groups + 1, num_groups, num_groups, num_samples][: len(names)]
        if (got := [len(array) for array in arrays]) != sizes:
            raise RuntimeError(
                f"grouped index {directory}: its arrays have {got} rows, its header says {sizes}: "
                f"run 'mclclip {verb} --force' to make it again"
            )
        ids, starts, labels = arrays[:3]
        draws, sums = (np.asarray(arrays[3]), arrays[4]) if arrays[3:] else (None, None)
        plain = np.asarray(starts), np.asarray(labels), tuple(header["radices"])
        return cls(*plain, ids, directory, sums, draws=draws)

    def __reduce__(self) -> tuple[Callable[..., GroupedIndex], tuple[Any, ...]]:
        # Loader workers map the files instead of copying them.
        return GroupedIndex.open, (self.directory,)


def _read(path: Path, names: tuple[str, ...], verb: str = "train") -> dict[str, Any]:
    """Reads a JSON file that ``verb`` wrote; RuntimeError if it lacks one of the ``names``."""
    try:
        fields: dict[str, Any] = read_json(path)
        if missing := [name for name in names if name not in fields]:
            raise ValueError(f"it has no {missing[0]}")
        return fields
    except (ValueError, TypeError) as error:
        raise RuntimeError(
            f"{path} is damaged ({error}): run 'mclclip {verb} --force' to make it again"
        ) from error


class StageGroups:
    """The grouped index of one training on disk. It is written once, and a resumed run reads it.

    A sample that is found to be undecodable during the training stays in the plan and is replaced
    in its batches, so that a resumed run has the same order. Later stages leave it out.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)

    @property
    def is_written(self) -> bool:
        """True if the grouped index is complete on disk."""
        return all((self.directory / name).exists() for name in (_HEADER, _KNOWN_BAD))

    def records(self) -> dict[str, Record]:
        """Returns the records (size and digest) of its files, by names such as 'FOLDER/FILE'."""
        names = sorted(path.name for path in self.directory.iterdir() if path.is_file())
        return records_of(self.directory.parent, *(f"{self.directory.name}/{n}" for n in names))

    def damage(self) -> str | None:
        """Says why the grouped index cannot be read; None if it can, or is not written yet."""
        try:
            if self.is_written:
                self.read()
        except (RuntimeError, ValueError, OSError) as error:
            return str(error)
        return None

    def write(self, labels: LabelBlocks, sizes: GroupSizes, bad_ids: np.ndarray) -> None:
        """Writes the grouped index of ``labels``, whose groups have ``sizes``, and the ``bad_ids``.

        ``bad_ids`` are the undecodable samples that are left out. The header is written last, and
        marks the grouped index as complete.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with with_path_in_errors(self.directory):
            (self.directory / _HEADER).unlink(missing_ok=True)
            header = self._write_arrays(labels, sizes)
            write_json(self.directory / _KNOWN_BAD, {"known_bad": [int(i) for i in bad_ids]})
            write_json(self.directory / _HEADER, header)

    def _write_arrays(self, labels: LabelBlocks, sizes: GroupSizes) -> dict[str, Any]:
        """Writes the .npy files, the ids and weights part by part; returns the header."""
        directory, weights = self.directory, labels.weights
        small = {"group_starts": sizes.group_starts, "group_labels": sizes.group_labels}
        small |= {} if sizes.draws is None else {"draws": sizes.draws}
        total = 0
        with tempfile.TemporaryFile(dir=directory) as runs, ExitStack() as stack:
            write = partial(write_npy_parts, shape=(sizes.num_samples,), dtype=np.int64)
            append = stack.enter_context(write(directory / "sample_ids.npy"))
            if weights is not None:
                append_sums = stack.enter_context(write(directory / "weight_sums.npy"))
            for ids in labels.sorted_ids(sizes, runs):
                append(ids)
                if weights is not None and len(ids):
                    sums = total + np.cumsum(weights.units(ids))
                    append_sums(sums)
                    total = int(sums[-1])
        for name, array in small.items():
            save_npy(directory / f"{name}.npy", array)
        return {
            "radices": list(sizes.radices),
            "num_samples": sizes.num_samples,
            "num_groups": sizes.num_groups,
            **({} if weights is None else {"weighted": True}),
        }

    def read(self) -> tuple[GroupedIndex, np.ndarray]:
        """Returns the grouped index (memory-mapped) and the ids that were left out of it."""
        known_bad = _read(self.directory / _KNOWN_BAD, ("known_bad",))["known_bad"]
        return GroupedIndex.open(self.directory), np.asarray(known_bad, dtype=np.int64)
