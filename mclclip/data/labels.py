"""Labels and weights of samples: pseudo labels, which group them, classes, which they are positive
for, and weights, how often an epoch draws them.

A pseudo label is a mixed-radix number whose digits are the cluster labels of stages 0, 1, ...; its
prefix of length L consists of the labels of the first L stages. -1 marks a sample that no plan uses
(an undecodable one) and stays -1 everywhere.

A sample has a weight of its own and one of its source. Their product is the number of times that an
epoch is expected to draw the sample: 1 is the same as without weights, 0 leaves it out. With
``per_epoch`` all weights are multiplied so that an epoch has that many draws (a "virtual epoch").

A group of n draws cuts the sum W of its samples' weights into n equal pieces and draws the sample
that lies at one random point of each: systematic sampling (Madow, 1949), for which a sample's
expected number is exactly its share of the n draws, and nothing is stored per epoch. All pieces of
a run of 64 have their point at the same place, so that a sample comes floor(w) or ceil(w) times; a
new place for every run lets neighbours in the list come together, and a sample that lies across the
border of two runs may come once more or less.

n is the same in every epoch: W rounded, where what one group loses the next one gains, and at least
1, so that every sample comes at times. Groups of few draws are therefore drawn from more or less
often than their weights say, by half a draw or, where the weights add up to less than one, by up to
a whole one.

Weights are held as whole numbers of 1/65,536: their sums are exact, and so equal in whatever order
they are taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mclclip.data.arrays import open_given_npy, open_npy
from mclclip.data.options import MOST_DRAWS, DataConfig, LabelMode, PlanConfig
from mclclip.data.sample_index import SampleIndex
from mclclip.run import artifacts
from mclclip.util.files import digest_array, digest_json
from mclclip.util.randomness import mix

Integers = npt.NDArray[np.int64]
_AT_ONCE = 2**20  # samples that are hashed, or whose weights are read, at once
WEIGHT_UNIT = 2**16
MOST_WEIGHT = 10_000.0
"""The largest weight."""
_RUN = 64  # consecutive draws of a group that share their random number
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

    Raises RuntimeError where they were made from another index, or their file has another size.
    """
    manifest = artifacts.read_manifest(directory, "pseudo_labels")
    manifest.check(directory)
    labels = open_npy(directory / "pseudo_labels.npy", "cluster").reshape(-1)
    if len(labels) != len(index) or manifest.inputs["index"] != index.digest:
        raise RuntimeError(
            f"{directory} has {len(labels):,} rows, the index has {len(index):,} (or other "
            f"keys): run 'mclclip cluster --force' after 'mclclip index'"
        )
    return labels, tuple(manifest.counts["radices"]), manifest.digest


def permute_labels(labels: np.ndarray, seed: int, stage: int) -> np.ndarray:
    """The labels, permuted at random among the samples that have one; group sizes do not change."""
    permuted = labels.copy()
    labelled = np.flatnonzero(labels >= 0)
    permuted[labelled] = np.random.default_rng([seed, stage, 1]).permutation(labels[labelled])
    return permuted


class ClassLabels:
    """The first ``labels_per_sample`` clusters of each sample, nearest first, from ``clusters/``.

    With ``threshold`` only those of at least this similarity, and the nearest in any case. Arrays
    are memory-mapped. Raises RuntimeError where the clusters are those of another index, or their
    files have other sizes than they were written with or do not fit each other, and ValueError
    where fewer clusters per sample are stored.
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
        self.num_classes = int(manifest.config["cluster"]["num_clusters"])
        manifest.check(self.directory)
        if manifest.inputs["index"] != index.digest:
            raise RuntimeError(
                f"clusters at {directory} are those of another index: run 'mclclip cluster "
                "--force' after 'mclclip index'"
            )
        stored = manifest.config["cluster"]["labels_per_sample"]
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
        """[K, D], memory-mapped."""
        return open_npy(self.directory / "centroids.npy", "cluster")

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


# --- weights ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SampleWeights:
    """Weights of the samples of an index, in units of 1/65,536; nothing of size N is held.

    values     numbers [N] in index order, which may be memory-mapped; None: 1 for all
    factors    float64 [shards], by which the values of a shard's samples are multiplied
    shard_of   int32 [N], the shard of every sample
    per_epoch  draws of an epoch, which all weights are scaled to; None: the sum of the weights
    """

    values: npt.NDArray[np.floating] | None
    factors: npt.NDArray[np.float64]
    shard_of: npt.NDArray[np.int32]
    per_epoch: int | None

    @classmethod
    def open(
        cls,
        index: SampleIndex,
        data: DataConfig,
        plan: PlanConfig,
        option: str,
    ) -> SampleWeights | None:
        """The weights of an index's samples, by ``plan`` and by the sources of ``data``; None where
        every sample weighs 1 and nothing is scaled.

        option  name of the training's plan in messages, such as ``train.plan``
        A manifest beside the file ``plan.weights`` must be of this index.
        Raises FileNotFoundError or ValueError, one line, for a file that is not there or not of
        this index, for numbers that are no weights, and where all are 0.
        """
        path, per_epoch = plan.weights, plan.samples_per_epoch
        by_source = {name: source.weight for name, source in data.sources.items()}
        factors = np.array([by_source.get(s.source, 1.0) for s in index.shards], np.float64)
        if path is None and per_epoch is None and bool((factors == 1.0).all()):
            return None
        values = None if path is None else _read_weights(path, index, f"{option}.weights")
        weights = cls(values, factors, index.shard_of, per_epoch)
        what, drawn = f"{option}.weights={path}" if path else "data.sources.NAME.weight", False
        for ids in weights._blocks():
            part = weights._plain(ids)
            if bad := np.flatnonzero(~((part >= 0) & (part <= MOST_WEIGHT))).tolist():
                raise ValueError(
                    f"{what}: the weight of sample {ids[0] + bad[0]} is {part[bad[0]]}, wanted "
                    f"numbers from 0 to {MOST_WEIGHT:,.0f}"
                )
            drawn = drawn or bool(part.any())
        if not drawn:
            raise ValueError(f"{what}: all weights are 0, so that no sample is drawn: raise some")
        return weights

    def _blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Ids of all samples, some at a time."""
        for start in range(0, len(self), _AT_ONCE):
            yield np.arange(start, min(start + _AT_ONCE, len(self)))

    @property
    def num_draws(self) -> int:
        """Draws of an epoch from all samples, in one group."""
        if self.per_epoch is not None:
            return self.per_epoch
        return int(
            self.draws(np.array([sum(int(self.units(ids).sum()) for ids in self._blocks())]))[0]
        )

    def __len__(self) -> int:
        return len(self.shard_of)

    def _plain(self, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        own = 1.0 if self.values is None else self.values[ids].astype(np.float64)
        return np.asarray(own * self.factors[self.shard_of[ids]])

    def units(self, ids: npt.NDArray[np.integer]) -> Integers:
        """int64 [n]: weights of the samples; at least 1 where a weight is above 0."""
        plain = self._plain(ids)
        return np.where(plain > 0, np.maximum(np.rint(plain * WEIGHT_UNIT), 1), 0).astype(np.int64)

    def draws(self, units: Integers) -> Integers:
        """int64 [G]: how often an epoch draws from groups whose weights add up to ``units`` [G]; at
        least once from each. Raises ValueError for more draws than can be computed with."""
        if not len(units):
            return units
        ends = np.cumsum(units)
        wanted = ends[-1] / WEIGHT_UNIT if self.per_epoch is None else float(self.per_epoch)
        if wanted > MOST_DRAWS:
            raise ValueError(
                f"an epoch would have {wanted:,.0f} draws by the weights of its samples, wanted at "
                f"most {MOST_DRAWS:,}: lower data.sources.NAME.weight or the numbers of "
                "plan.weights, or set plan.samples_per_epoch"
            )
        rounded = np.rint(ends * (wanted / max(ends[-1], 1))).astype(np.int64)
        per_group: Integers = np.maximum(np.diff(rounded, prepend=0), 1)
        return per_group

    def by_source(self, index: SampleIndex) -> dict[str, float]:
        """The share of all weights that each data source of the index has, by name."""
        names = [shard.source for shard in index.shards]
        sums = np.zeros(len(names))
        for ids in self._blocks():
            sums += np.bincount(self.shard_of[ids], self.units(ids), len(names))
        shares = dict.fromkeys(names, 0.0)
        for name, part in zip(names, (sums / sums.sum()).tolist(), strict=True):
            shares[name] += part
        return shares

    @cached_property
    def digest(self) -> str:
        """Digest of all that the draws depend on, beside the index."""
        values = None if self.values is None else digest_array(self.values)
        return digest_json([values, self.factors.tolist(), self.per_epoch])


def _read_weights(file: str, index: SampleIndex, option: str) -> npt.NDArray[np.floating]:
    """The numbers of the file, memory-mapped."""
    path = Path(file).expanduser()
    try:
        values = open_given_npy(path, "numbers")
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"{option}: {error}") from None
    if values.dtype.kind not in "fiub":
        raise ValueError(f"{option}: {path} is no .npy file of numbers: it holds {values.dtype}")
    made = artifacts.read_identity(path.parent).get("inputs", {}).get("index", index.digest)
    if values.shape != (len(index),) or made != index.digest:
        raise ValueError(
            f"{option}: {path} has shape {values.shape}, the index has {len(index):,} samples"
            f"{'' if made == index.digest else ' and other sample keys'}: give one weight for each "
            f"sample of the index at {index.directory}, in its order"
        )
    return values


def drawn_rows(
    sums: Integers, starts: Integers, draws: Integers, number: Integers, keys: npt.NDArray[Any]
) -> tuple[Integers, Integers]:
    """Rows of the draws ``number`` [B], each in a group of its own choice, and their occurrence.

    sums    int64 [M], running sums of all rows' weights, groups after each other; memory-mapped
    starts  int64 [B, 2]: the rows [start, stop) of each draw's group
    draws   int64 [B]: number of draws of that group; 0 <= number < draws
    keys    uint64 [B]: key of the group's random numbers
    Occurrence tells draws of one row apart: int64 [B], mostly 0 to the row's weight.
    """
    first, last = starts.T
    base = np.where(first > 0, sums[np.maximum(first, 1) - 1], 0)
    width = sums[last - 1] - base
    offset = (mix(keys, number // _RUN) % width.astype(np.uint64)).astype(np.int64)
    whole, rest = np.divmod(width, draws)
    point = base + number * whole + (number * rest + offset) // draws
    rows = np.searchsorted(sums, point, side="right").astype(np.int64)
    before = np.where(rows > 0, sums[np.maximum(rows, 1) - 1], 0) - base
    piece = np.floor(before * draws.astype(np.float64) / width).astype(np.int64)
    return rows, number - piece
