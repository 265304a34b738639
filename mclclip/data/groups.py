"""Groups of samples that have the same pseudo label: sorts all samples by label, and stores them.

Memory while they are sorted: up to 42 bytes per sample, and 75 with weights. What is stored has 8
bytes per sample, and is memory-mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mclclip.data.arrays import open_npy, save_npy
from mclclip.data.labels import SampleWeights, label_space, locate_draws
from mclclip.util.files import (
    Record,
    damaged_if_unreadable,
    read_json,
    records_of,
    with_path_in_errors,
    write_json,
)

Integers = npt.NDArray[np.int64]

_HEADER = "grouped_index.json"
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


@dataclass(frozen=True, eq=False)
class GroupedIndex(GroupSizes):
    """The sample ids of each group, in memory or as `StageGroups` wrote them.

    group_starts, group_labels, radices, draws  see `GroupSizes`
    sample_ids   int64 [M], sorted by pseudo label and then by id; those of group g are
                 sample_ids[group_starts[g] : group_starts[g + 1]]
    weight_sums  int64 [M], running sums of their weights in the same order; None without weights
    directory    where it is on disk; it pickles as this path
    """

    sample_ids: Integers
    weight_sums: Integers | None = None
    directory: Path | None = None

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

        Raises FileNotFoundError if it is not finished, RuntimeError if a file cannot be read.
        """
        directory = Path(directory)
        with damaged_if_unreadable(directory / _HEADER, f"run 'mclclip {verb} --force'"):
            header = read_json(directory / _HEADER)
        names = [f"{n}.npy" for n in _ARRAYS + (_WEIGHTED if header.get("weighted") else ())]
        arrays = [open_npy(directory / name, verb) for name in names]
        ids, starts, labels = arrays[:3]
        draws, sums = (np.asarray(arrays[3]), arrays[4]) if arrays[3:] else (None, None)
        plain = np.asarray(starts), np.asarray(labels), tuple(header["radices"])
        return cls(*plain, ids, sums, directory, draws=draws)

    def __reduce__(self) -> tuple[Callable[..., GroupedIndex], tuple[Any, ...]]:
        # Loader workers map the files instead of copying them.
        return GroupedIndex.open, (self.directory,)


def group_samples(
    labels: npt.NDArray[np.integer],
    radices: Sequence[int],
    left_out: npt.NDArray[np.integer] | None = None,
    weights: SampleWeights | None = None,
) -> GroupedIndex:
    """Sorts the samples of an index by pseudo label, and those of one label by id.

    labels    integers [N], -1 for samples that no plan uses; may be memory-mapped
    radices   number of clusters of each stage, the digits of a label
    left_out  ids of more samples that are not used
    weights   weights of the samples; samples of weight 0 are not used either
    """
    radices = tuple(int(radix) for radix in radices)
    space = label_space(radices)
    used = labels >= 0
    if left_out is not None:
        used[left_out] = False
    if weights is not None:
        used &= weights.units(np.arange(len(labels))) > 0
    ids = np.flatnonzero(used)
    del used
    # The smallest type, since numpy sorts numbers of up to 16 bits in linear time.
    label_of = labels[ids].astype(np.min_scalar_type(space))
    order = np.argsort(label_of, kind="stable")
    label_of = label_of[order]
    ids = ids[order]
    del order
    is_first = np.append(True, label_of[1:] != label_of[:-1])[: len(ids)]
    starts = np.append(np.flatnonzero(is_first), len(ids)).astype(np.int64)
    sums = draws = None
    if weights is not None:
        sums = np.cumsum(weights.units(ids))
        draws = weights.draws(np.diff(sums[starts[1:] - 1], prepend=0))
    return GroupedIndex(
        starts, label_of[starts[:-1]].astype(np.int64), radices, ids, sums, draws=draws
    )


# --- on disk ---------------------------------------------------------------------------------


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
        return (self.directory / _HEADER).exists()

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

    def write(self, grouped: GroupedIndex, bad_ids: np.ndarray) -> None:
        """Writes a grouped index, and the ``bad_ids``: undecodable samples that it leaves out.

        The header is written last, and marks the grouped index as complete.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        header = {
            "radices": list(grouped.radices),
            "known_bad": bad_ids.tolist(),
            **({} if grouped.draws is None else {"weighted": True}),
        }
        with with_path_in_errors(self.directory):
            (self.directory / _HEADER).unlink(missing_ok=True)
            for name in _ARRAYS + (() if grouped.draws is None else _WEIGHTED):
                save_npy(self.directory / f"{name}.npy", getattr(grouped, name))
            write_json(self.directory / _HEADER, header)

    def read(self) -> tuple[GroupedIndex, np.ndarray]:
        """Returns the grouped index (memory-mapped) and the ids that were left out of it."""
        grouped = GroupedIndex.open(self.directory)
        known_bad = read_json(self.directory / _HEADER)["known_bad"]
        return grouped, np.asarray(known_bad, dtype=np.int64)
