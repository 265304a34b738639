"""Labels of samples: pseudo labels, which group them, and classes, which they are positive for.

A pseudo label is a mixed-radix number whose digits are the cluster labels of stages 0, 1, ...; its
prefix of length L consists of the labels of the first L stages. -1 marks a sample that no plan uses
(an undecodable one) and stays -1 everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mclclip.data.arrays import open_npy
from mclclip.data.options import LabelMode
from mclclip.data.sample_index import SampleIndex
from mclclip.files import digest_json
from mclclip.randomness import mix
from mclclip.run import artifacts

Integers = npt.NDArray[np.int64]
_Value = TypeVar("_Value", bound=np.generic)
_SHARE = int.from_bytes(b"share", "big")  # purpose of a random number, part of its key
_AT_ONCE = 2**20  # samples that are hashed at once
_MAX_LABEL = int(np.iinfo(np.int64).max)


def label_space(radices: Sequence[int]) -> int:
    """Number of possible labels: the product of the radices (Eq. 4's K^j), 1 for none.

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


def check_labels(labels: np.ndarray, num_labels: int, name: str) -> None:
    """Raises ValueError where labels are not integers [N] in [-1, num_labels). Copies nothing."""
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"{name} have shape {labels.shape} and type {labels.dtype}: wanted integers [N]"
        )
    if labels.size and (labels.min() < -1 or labels.max() >= num_labels):
        raise ValueError(
            f"{name} run from {labels.min()} to {labels.max()}: wanted -1 (outside) to "
            f"{num_labels - 1:,}; the labels and their radices are not of one run"
        )


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
    There is at least one stage, and all are of one index (``SampleIndex.manifest_of``). Raises
    ValueError for values that do not fit, and where int64 would overflow.
    """
    used = tuple(int(radix) for radix in radices)
    label_space(used[-1:] if mode == "last" else used)
    stages = [np.asarray(labels) for labels in cluster_labels]
    for number, (labels, radix) in enumerate(zip(stages, used, strict=True)):
        check_labels(labels, radix, f"cluster labels of stage {number}")
    outside = np.logical_or.reduce([labels < 0 for labels in stages])
    if mode == "last":
        stages, used = stages[-1:], used[-1:]
    combined = np.zeros(len(outside), dtype=np.int64)
    for labels, radix in zip(stages, used, strict=True):
        combined = combined * radix + labels
    combined[outside] = -1
    return combined, used


def truncate(
    labels: npt.NDArray[np.integer], radices: Sequence[int], prefix_length: int
) -> Integers:
    """Cuts labels to their first prefix_length stages: int64 of labels' shape; -1 stays -1.

    Length 0 puts all samples into one group 0; the full length returns the labels.
    """
    if not 0 <= prefix_length <= len(radices):
        raise ValueError(f"prefix_length is {prefix_length}: wanted 0 to {len(radices)}")
    divisor = label_space(radices[prefix_length:])
    return np.asarray(labels, dtype=np.int64) // divisor  # floors, so that -1 stays -1


def size_statistics(sizes: npt.NDArray[np.integer]) -> dict[str, float]:
    """Statistics of group sizes [G], empty ones ignored: num_groups, smallest, median, largest,
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
    inside = labels[labels >= 0]
    return {
        "num_samples": len(inside),
        "num_outside": len(labels) - len(inside),
        "radices": [int(radix) for radix in radices],
        "label_space": label_space(radices),
        **size_statistics(np.unique(inside, return_counts=True)[1]),
    }


def ami(a: np.ndarray, b: np.ndarray) -> float:
    """Adjusted mutual information of two labellings [N], 1 for equal up to renaming, near 0 for
    independent ones (scikit-learn, arithmetic mean; MCL, Table 11).

    Rows that are -1 in either are left out. Raises ValueError where lengths differ or no row is
    left.
    """
    # Imported here: scikit-learn takes a second.
    from sklearn.metrics import adjusted_mutual_info_score

    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        raise ValueError(f"ami: the labellings have shapes {a.shape} and {b.shape}: wanted one")
    both = (a >= 0) & (b >= 0)
    if not both.any():
        raise ValueError(f"ami: none of the {len(a):,} samples has a label in both labellings")
    return float(adjusted_mutual_info_score(a[both], b[both]))


def read_pseudo_labels(
    directory: Path, index: SampleIndex
) -> tuple[np.ndarray, tuple[int, ...], str]:
    """Pseudo labels int64 [N] in index order, their radices, and their digest.

    Raises RuntimeError where they were made from another index, or are not what was written.
    """
    manifest = artifacts.read_manifest(directory, "pseudo_labels")
    record = manifest.record("pseudo_labels.npy")
    labels = open_npy(directory / "pseudo_labels.npy", "cluster", record).reshape(-1)
    if len(labels) != len(index) or manifest.inputs["index"] != index.digest:
        raise RuntimeError(
            f"pseudo_labels has {len(labels):,} rows, the index has {len(index):,} (or other "
            f"keys): run 'mclclip cluster --force' after 'mclclip index'"
        )
    return labels, tuple(manifest.counts["radices"]), manifest.digest


def permute_labels(labels: np.ndarray, seed: int, stage: int) -> np.ndarray:
    """The labels, permuted at random among the samples that have one; group sizes do not change."""
    permuted = labels.copy()
    labelled = np.flatnonzero(labels >= 0)
    permuted[labelled] = np.random.default_rng([seed, stage, 1]).permutation(labels[labelled])
    return permuted


def outside_of_share(num_samples: int, share: float, seed: int) -> Integers:
    """Sorted ids of the samples that a draw of ``share`` of ``num_samples`` leaves out.

    A hash of the seed and the id decides, so that a larger share holds a smaller one, and samples
    that are added later change nothing for the others.
    """
    limit = np.uint64(min(int(share * 2.0**64), 2**64 - 1))
    blocks = [np.zeros(0, np.int64)]
    for start in range(0, num_samples, _AT_ONCE):
        ids = np.arange(start, min(start + _AT_ONCE, num_samples))
        blocks.append(ids[mix(seed, _SHARE, ids) >= limit])
    return np.concatenate(blocks)


class ClassLabels:
    """The first ``labels_per_sample`` clusters of each sample, nearest first, from ``clusters/``.

    With ``threshold`` only those of at least this similarity, and the nearest in any case. Arrays
    are memory-mapped, and compared with their records first, but not again in loader workers.
    Raises RuntimeError where the clusters are those of another index, their files do not fit each
    other or are not what was written, ValueError where fewer clusters per sample are stored.
    """

    def __init__(
        self,
        directory: Path,
        index: SampleIndex,
        labels_per_sample: int,
        threshold: float | None = None,
    ) -> None:
        manifest = artifacts.read_manifest(directory, "clusters")
        self.directory, self.digest = Path(directory), manifest.digest
        self.labels_per_sample, self.threshold = labels_per_sample, threshold
        self.num_classes = int(manifest.config["num_clusters"])
        manifest.check(self.directory, "cluster_labels.npy", "similarities.npy")
        self._centroids = manifest.record("centroids.npy")
        if manifest.inputs["index"] != index.digest:
            raise RuntimeError(
                f"clusters at {directory} are those of another index: run 'mclclip cluster "
                "--force' after 'mclclip index'"
            )
        stored = manifest.config["labels_per_sample"]
        for array in self._arrays:
            self._check(array.shape == (len(index), stored), f"rows of {list(array.shape)}")
        centroids = self.centroids()
        self._check(len(centroids) == self.num_classes, f"{len(centroids):,} centroids")
        if stored < labels_per_sample:
            raise ValueError(
                f"clusters at {directory} have {stored} labels per sample, wanted "
                f"{labels_per_sample}: raise cluster.labels_per_sample and run 'mclclip cluster "
                "--force'"
            )

    def centroids(self) -> npt.NDArray[np.float32]:
        """[K, D], memory-mapped. Raises RuntimeError where they are not what was written."""
        return open_npy(self.directory / "centroids.npy", "cluster", self._centroids)

    def __getitem__(self, sample_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 [n, l]: the classes of these samples; -1 where there is none."""
        of_labels, similarities = self._arrays
        labels = of_labels[sample_ids, : self.labels_per_sample].astype(np.int64)
        most = labels.max(initial=-1)
        self._check(most < self.num_classes, f"a label {most:,}")
        if self.threshold is not None:
            near = similarities[sample_ids, : self.labels_per_sample] >= self.threshold
            near[:, 0] = True
            labels[~near] = -1
        return labels

    def _check(self, fits: bool, what: str) -> None:
        if not fits:
            raise RuntimeError(
                f"clusters at {self.directory} hold {what}, and their manifest tells of "
                f"{self.num_classes:,} clusters: run 'mclclip cluster --force' to make them again"
            )

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Labels and similarities [N, L], memory-mapped."""
        return (
            open_npy(self.directory / "cluster_labels.npy", "cluster"),
            open_npy(self.directory / "similarities.npy", "cluster"),
        )

    def __getstate__(self) -> dict[str, object]:
        # A memory map would be pickled with its content, so a loader worker maps the files again.
        return {name: value for name, value in self.__dict__.items() if name != "_arrays"}


class AttributeClasses:
    """The values of an attribute as classes, one per sample; read as ``ClassLabels`` are.

    Raises ValueError for an attribute that the index lacks.
    """

    labels_per_sample = 1

    def __init__(self, index: SampleIndex, name: str) -> None:
        self.index, self.name = index, name
        self._codes, values = index.attribute(name)
        self.num_classes = len(values)
        self.digest = digest_json({"index": index.digest, "attribute": name})

    def __getitem__(self, sample_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 [n, 1]: the classes of these samples; -1 where there is no value."""
        return self._codes[sample_ids, None].astype(np.int64)

    def centroids(self) -> npt.NDArray[np.float32]:
        """Raises RuntimeError: what starts from centroids needs clusters."""
        raise RuntimeError(
            f"the classes are values of the attribute {self.name!r}, which have no centroids: "
            "start class centers from noise, or read clusters"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return AttributeClasses, (self.index, self.name)
