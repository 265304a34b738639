"""Pseudo labels: combine the cluster labels of all stages, shorten, count, compare, group by them.

A pseudo label is a mixed-radix number whose digits are the cluster labels of stages 0, 1, ...; its
prefix of length L is what the first L stages say. -1 marks a sample outside every plan
(undecodable) and stays -1 everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from mclclip.data.npy_files import open_npy, save_npy
from mclclip.files import digest_array, digest_json, read_json, write_json

Integers = npt.NDArray[np.int64]
LabelMode = Literal["prefix", "last"]
_Value = TypeVar("_Value", bound=np.generic)
_ARRAYS = ("sample_ids", "group_starts", "group_labels")
_MAX_LABEL = int(np.iinfo(np.int64).max)


def label_space(radices: Sequence[int]) -> int:
    """How many labels there can be: the product of the radices (Eq. 4's K^j), 1 for none.

    Raises ValueError for a radix below 1 and where int64 could not hold the labels.
    """
    if any(radix < 1 for radix in radices):
        raise ValueError(f"radices are {tuple(radices)}: wanted at least 1 cluster in every stage")
    space = math.prod(int(radix) for radix in radices)
    if space > _MAX_LABEL:
        raise ValueError(
            f"radices {tuple(radices)} allow {space:,} labels, int64 holds {_MAX_LABEL:,}: "
            "use fewer clusters or fewer stages, or label_mode 'last'"
        )
    return space


def check_labels(
    labels: npt.NDArray[np.integer], num_labels: int, name: str = "labels"
) -> Integers:
    """The labels as int64 [N], after a check that they are integers in [-1, num_labels)."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"{name} have shape {labels.shape} and type {labels.dtype}: wanted integers [N]"
        )
    if labels.size and (labels.min() < -1 or labels.max() >= num_labels):
        raise ValueError(
            f"{name} run from {labels.min()} to {labels.max()}: wanted -1 (outside) to "
            f"{num_labels - 1:,}; the labels and their radices are not of one run"
        )
    return labels.astype(np.int64, copy=False)


def combine_stages(
    cluster_labels: Sequence[npt.NDArray[np.integer]],
    radices: Sequence[int],
    mode: LabelMode = "prefix",
) -> tuple[Integers, tuple[int, ...]]:
    """The pseudo labels of a stage from the cluster labels [N] of all stages before it.

    "prefix" is the paper's Eq. 2 (MCL): sum over s of y_s times the radices after s, a bijection of
    the tuple (y_0, ..., y_{j-1}). "last" is y_{j-1} alone, which is what the authors' released
    code computes. In both modes a sample that lacks a label (-1) in any stage gets -1, so that the
    two modes train on the same samples. Returns (int64 [N], the radices of the result).
    Raises ValueError for lengths or values that do not fit, and where int64 would overflow.
    """
    if not cluster_labels or len(cluster_labels) != len(radices):
        raise ValueError(
            f"got {len(cluster_labels)} arrays of cluster labels for {len(radices)} radices: "
            "wanted one radix per stage and at least one stage"
        )
    if mode not in ("prefix", "last"):
        raise ValueError(f"label_mode is {mode!r}: wanted 'prefix' or 'last'")
    used = tuple(int(radix) for radix in radices)
    label_space(used[-1:] if mode == "last" else used)
    stages = [
        check_labels(labels, radix, f"cluster labels of stage {number}")
        for number, (labels, radix) in enumerate(zip(cluster_labels, used, strict=True))
    ]
    lengths = [len(labels) for labels in stages]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"cluster labels of the stages have {lengths} rows: wanted the rows of one index; "
            "run 'mclclip cluster' again for the stages that differ"
        )
    outside = np.logical_or.reduce([labels < 0 for labels in stages])
    if mode == "last":
        stages, used = stages[-1:], used[-1:]
    combined = np.zeros(lengths[0], dtype=np.int64)
    for labels, radix in zip(stages, used, strict=True):
        combined = combined * radix + labels
    combined[outside] = -1
    return combined, used


def split_stages(labels: npt.NDArray[np.integer], radices: Sequence[int]) -> list[Integers]:
    """The inverse of combine_stages' "prefix": one int64 [N] per stage (-1 stays -1 in all)."""
    rest = check_labels(labels, label_space(radices))
    digits: list[Integers] = []
    for radix in reversed(radices):
        digits.append(np.where(rest < 0, -1, rest % radix))
        rest = rest // radix
    return digits[::-1]


def truncate(
    labels: npt.NDArray[np.integer], radices: Sequence[int], prefix_length: int
) -> Integers:
    """What the first prefix_length stages say: int64 of labels' shape; -1 stays -1.

    Length 0 puts all samples into one group 0; the full length returns the labels.
    """
    if not 0 <= prefix_length <= len(radices):
        raise ValueError(f"prefix_length is {prefix_length}: wanted 0 to {len(radices)}")
    divisor = label_space(radices[prefix_length:])
    return np.asarray(labels, dtype=np.int64) // divisor  # floors, so that -1 stays -1


def compact(labels: npt.NDArray[np.integer]) -> Integers:
    """The labels renamed to 0 .. G-1 in ascending order (int64 [N]); -1 stays -1."""
    labels = np.asarray(labels, dtype=np.int64)
    inside = labels >= 0
    renamed = np.full(labels.shape, -1, dtype=np.int64)
    renamed[inside] = np.unique(labels[inside], return_inverse=True)[1]
    return renamed


def size_statistics(sizes: npt.NDArray[np.integer]) -> dict[str, float]:
    """Of group sizes [G] (empty groups ignored): num_groups, smallest, median, largest group,
    max_share of one group, effective_groups = e^H with H the entropy of the shares.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    sizes = sizes[sizes > 0]
    if not sizes.size:
        return dict.fromkeys(
            ("num_groups", "smallest", "median", "largest", "max_share", "effective_groups"), 0
        )
    share = sizes / sizes.sum()
    return {
        "num_groups": len(sizes),
        "smallest": int(sizes.min()),
        "median": float(np.median(sizes)),
        "largest": int(sizes.max()),
        "max_share": float(share.max()),
        "effective_groups": float(np.exp(-(share * np.log(share)).sum())),
    }


def group_statistics(labels: npt.NDArray[np.integer], radices: Sequence[int]) -> dict[str, Any]:
    """size_statistics of the labels [N], for a manifest: JSON-able, with the number of samples
    inside and outside (-1) and the label space.
    """
    checked = check_labels(labels, label_space(radices))
    inside = checked[checked >= 0]
    return {
        "num_samples": len(inside),
        "num_outside": len(checked) - len(inside),
        "radices": [int(radix) for radix in radices],
        "label_space": label_space(radices),
        **size_statistics(np.unique(inside, return_counts=True)[1]),
    }


def ami(a: npt.NDArray[np.integer], b: npt.NDArray[np.integer]) -> float:
    """Adjusted mutual information of two labellings [N], 1 for equal up to renaming, near 0 for
    independent ones (scikit-learn, arithmetic mean; MCL, Table 11).

    Rows that are -1 in either are left out. Raises ValueError where lengths differ or no row is
    left.
    """
    # Imported here: scikit-learn takes a second, and every loader worker imports this module.
    from sklearn.metrics import adjusted_mutual_info_score

    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        raise ValueError(f"ami: the labellings have shapes {a.shape} and {b.shape}: wanted one")
    both = (a >= 0) & (b >= 0)
    if not both.any():
        raise ValueError(f"ami: none of the {len(a):,} samples has a label in both labellings")
    return float(adjusted_mutual_info_score(a[both], b[both]))


def join_by_key(
    keys_from: Sequence[str], values: npt.NDArray[_Value], keys_to: Sequence[str]
) -> npt.NDArray[_Value]:
    """values [N, ...], whose rows belong to keys_from, in the order of keys_to.

    For arrays whose digest of ordered keys differs from the index's. Raises ValueError with counts
    where the two do not hold the same keys, each once: a guess would train on wrong labels.
    """
    if len(keys_from) != len(values):
        raise ValueError(
            f"join by key: {len(values):,} rows for {len(keys_from):,} keys: wanted one row per key"
        )
    row = {key: number for number, key in enumerate(keys_from)}
    wanted = set(keys_to)
    missing, extra = len(wanted - row.keys()), len(row.keys() - wanted)
    repeated = len(keys_from) - len(row) + len(keys_to) - len(wanted)
    if missing or extra or repeated:
        raise ValueError(
            f"join by key: {missing:,} of the {len(keys_to):,} samples wanted have no row, "
            f"{extra:,} of {len(keys_from):,} rows belong to no sample, {repeated:,} keys are "
            "repeated: run 'mclclip embed' and 'mclclip cluster' again on this index"
        )
    order = np.fromiter((row[key] for key in keys_to), dtype=np.int64, count=len(keys_to))
    return values[order]


@dataclass(frozen=True, eq=False)
class GroupedIndex:
    """Sample ids by group. Pickles as its path when it was opened from one.

    sample_ids    int64 [M], sorted by pseudo label, ties by id
    group_starts  int64 [G + 1], group g is sample_ids[group_starts[g] : group_starts[g + 1]]
    group_labels  int64 [G], ascending and uncompacted, so that prefixes can be read off
    radices       clusters per stage of the label; () for one group (no labels)
    """

    sample_ids: Integers
    group_starts: Integers
    group_labels: Integers
    radices: tuple[int, ...]
    directory: Path | None = None

    @classmethod
    def build(cls, labels: npt.NDArray[np.integer], radices: tuple[int, ...]) -> GroupedIndex:
        """From the pseudo labels int64 [N] of all samples of the index; -1 is left out.

        Raises ValueError for labels beyond the radices.
        """
        radices = tuple(int(radix) for radix in radices)
        checked = check_labels(labels, label_space(radices), "pseudo labels")
        inside = np.flatnonzero(checked >= 0)
        inside = inside[np.argsort(checked[inside], kind="stable")]
        group_labels, starts = np.unique(checked[inside], return_index=True)
        group_starts = np.append(starts, len(inside)).astype(np.int64)
        return cls(inside.astype(np.int64), group_starts, group_labels, radices)

    @property
    def num_groups(self) -> int:
        return len(self.group_labels)

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @cached_property
    def digest(self) -> str:
        """Digest of the contents; read from disk when the index was opened from there."""
        if self.directory is not None:
            return str(_read_header(self.directory)["digest"])
        return digest_json([self.radices, *(digest_array(getattr(self, a)) for a in _ARRAYS)])

    def group_range(self, label: int, prefix_length: int) -> tuple[int, int]:
        """Where the samples whose label has this prefix lie: [start, stop) of sample_ids."""
        width = label_space(self.radices[prefix_length:])
        first, last = np.searchsorted(self.group_labels, [label * width, (label + 1) * width])
        return int(self.group_starts[first]), int(self.group_starts[last])

    def save(self, directory: str | Path) -> None:
        """Writes three .npy files, then grouped_index.json, without which none of them counts."""
        directory = Path(directory)
        header = {"radices": list(self.radices), "digest": self.digest}
        counts = {"num_samples": self.num_samples, "num_groups": self.num_groups}
        (directory / "grouped_index.json").unlink(missing_ok=True)
        for name in _ARRAYS:
            save_npy(directory / f"{name}.npy", getattr(self, name))
        write_json(directory / "grouped_index.json", header | counts)

    @classmethod
    def open(cls, directory: str | Path) -> GroupedIndex:
        """Memory-mapped, read only. FileNotFoundError where there is no finished index,
        RuntimeError where its files do not fit each other."""
        directory = Path(directory)
        header = _read_header(directory)
        ids, starts, labels = (open_npy(directory / f"{name}.npy", "train") for name in _ARRAYS)
        got = (len(ids), len(labels), len(starts))
        wanted = (header["num_samples"], header["num_groups"], header["num_groups"] + 1)
        if got != wanted:
            raise RuntimeError(
                f"grouped index {directory}: its arrays have {got} rows, its header says {wanted}: "
                "remove the directory and run 'mclclip train' again"
            )
        return cls(ids, np.asarray(starts), np.asarray(labels), tuple(header["radices"]), directory)

    def __reduce__(self) -> tuple[Callable[..., GroupedIndex], tuple[Any, ...]]:
        if self.directory is not None:  # loader workers map the files instead of copying them
            return GroupedIndex.open, (self.directory,)
        arrays = (self.sample_ids, self.group_starts, self.group_labels)
        return GroupedIndex, (*arrays, self.radices)


def _read_header(directory: Path) -> dict[str, Any]:
    path = directory / "grouped_index.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} not found: no finished grouped index in that directory")
    header: dict[str, Any] = read_json(path)
    return header
