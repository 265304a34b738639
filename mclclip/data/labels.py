"""Labels and weights of samples.

Pseudo labels group the samples. Classes say of which class centers, or of which other samples, a
sample is a positive. Weights say how often an epoch draws a sample.

A pseudo label is a mixed-radix number whose digits are the cluster labels of stages 0, 1, ...; its
prefix of length L has the labels of the first L stages. -1 marks a sample that no plan uses, such
as an undecodable one, and stays -1 everywhere.

The weight of a sample is the product of its number in the file of weights and the weight of its
source. An epoch draws a sample of weight w on average w times: 1 is the same as without weights,
and 0 leaves it out. ``per_epoch`` scales all weights so that an epoch has that many draws.

Draws are systematic samples (Madow, 1949). Put the samples of a group in a line, each as long as
its weight, and cut the line into n equal pieces: one random point of each piece is a draw. So a
sample's expected number of draws is exactly its share of the n draws, and nothing is stored per
epoch. The pieces of a run of 64 have their points at the same place within the piece, so that a
sample is drawn floor(w) or ceil(w) times, or, across the border of two runs, once more or less.
Every run has another place, so that neighbours in the line are not always drawn apart.

n is the same in every epoch: the sum of the group's weights, rounded so that the total is kept, and
at least 1, so that every sample is drawn at times. Small groups are therefore drawn from up to half
a draw more or less often than their weights say, and up to one more if these sum to less than one.

Weights are held as whole numbers of 1/65,536, so that their sums are exact in any order.
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
_AT_ONCE = 2**20  # samples whose weights are read at once
WEIGHT_UNIT = 2**16
MOST_WEIGHT = 10_000.0
_RUN = 64  # consecutive draws of a group that share their random number
_MAX_LABEL = int(np.iinfo(np.int64).max)


def label_space(radices: Sequence[int]) -> int:
    """Returns the number of possible labels: the product of the radices (Eq. 4's K^j), 1 for none.

    Raises ValueError if int64 could not hold the labels.
    """
    space = math.prod(int(radix) for radix in radices)
    if space > _MAX_LABEL:
        raise ValueError(
            f"radices {tuple(radices)} allow {space:,} labels, int64 holds {_MAX_LABEL:,}: "
            "use fewer clusters or fewer stages, or label_mode 'last'"
        )
    return space


def combine_stages(
    cluster_labels: Sequence[npt.NDArray[np.integer]],
    radices: Sequence[int],
    mode: LabelMode = "prefix",
) -> tuple[Integers, tuple[int, ...]]:
    """Combines the cluster labels [N] of all earlier stages to pseudo labels int64 [N].

    Mode "prefix" is the paper's Eq. 2 (MCL): the sum over s of y_s times the radices after s, which
    numbers the tuples (y_0, ..., y_{j-1}). Mode "last" is y_{j-1} alone, as in the authors'
    released code. In both modes a sample without a label (-1) in any stage gets -1, so that both
    train on the same samples. Also returns the radices of the result. Raises ValueError if int64
    would overflow.
    """
    used = tuple(int(radix) for radix in radices)
    label_space(used[-1:] if mode == "last" else used)
    stages = [np.asarray(labels) for labels in cluster_labels]
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
    """Cuts labels to those of their first ``prefix_length`` stages; -1 stays -1.

    The result is int64 of the same shape. For length 0 it is 0 for all samples.
    """
    divisor = label_space(radices[prefix_length:])
    return np.asarray(labels, dtype=np.int64) // divisor  # floors, so that -1 stays -1


def size_statistics(sizes: npt.NDArray[np.integer]) -> dict[str, float]:
    """Returns statistics of the sizes [G] of groups; empty groups do not count.

    These are num_groups, smallest, median, largest, max_share (of the largest group) and
    effective_groups, which is e^H, H being the entropy of the groups' shares.
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
    """Returns `size_statistics` of the groups of labels [N], and more counts for a manifest.

    These are the numbers of samples with and without (-1) a label, and of possible labels.
    """
    inside = labels[labels >= 0]
    return {
        "num_samples": len(inside),
        "num_outside": len(labels) - len(inside),
        "radices": [int(radix) for radix in radices],
        "label_space": label_space(radices),
        **size_statistics(np.unique(inside, return_counts=True)[1]),
    }


def ami(a: np.ndarray, b: np.ndarray) -> float | None:
    """Returns the adjusted mutual information of two labellings [N] (MCL, Table 11).

    It is 1 if they are equal up to renaming, and near 0 if they are independent (scikit-learn's,
    with the arithmetic mean). Rows with -1 in either do not count; None if none is left.
    """
    # Imported here: scikit-learn takes a second.
    from sklearn.metrics import adjusted_mutual_info_score

    a, b = np.asarray(a), np.asarray(b)
    both = (a >= 0) & (b >= 0)
    if not both.any():
        return None
    return float(adjusted_mutual_info_score(a[both], b[both]))


def read_pseudo_labels(
    directory: Path, index: SampleIndex
) -> tuple[np.ndarray, tuple[int, ...], str]:
    """Reads pseudo labels int64 [N] in index order; returns also their radices and their digest.

    Raises RuntimeError if they were made of another index, or their file has another size.
    """
    manifest = index.manifest_of(directory, "pseudo_labels")
    manifest.check(directory)
    labels = open_npy(directory / "pseudo_labels.npy", "cluster").reshape(-1)
    return labels, tuple(manifest.counts["radices"]), manifest.digest


def permute_labels(labels: np.ndarray, seed: int, stage: int) -> np.ndarray:
    """Permutes labels at random among the samples that have one, so that group sizes stay."""
    permuted = labels.copy()
    labelled = np.flatnonzero(labels >= 0)
    permuted[labelled] = np.random.default_rng([seed, stage, 1]).permutation(labels[labelled])
    return permuted


class ClassLabels:
    """The clusters of samples as classes: the ``labels_per_sample`` nearest ones of each.

    ``directory`` is the artifact of the clusters. With a ``threshold`` clusters of less similarity
    do not count, except the nearest one. Arrays are memory-mapped. Raises RuntimeError if the
    clusters were made of another index or a file has another size, and ValueError if fewer clusters
    per sample are stored.
    """

    def __init__(
        self,
        directory: Path,
        index: SampleIndex,
        labels_per_sample: int,
        threshold: float | None = None,
    ) -> None:
        manifest = index.manifest_of(directory, "clusters")
        self.directory, self.digest = Path(directory), manifest.digest
        self.labels_per_sample, self.threshold = labels_per_sample, threshold
        self.num_classes = int(manifest.config["cluster"]["num_clusters"])
        manifest.check(self.directory)
        stored = manifest.config["cluster"]["labels_per_sample"]
        if stored < labels_per_sample:
            raise ValueError(
                f"clusters at {directory} have {stored} labels per sample, wanted "
                f"{labels_per_sample}: raise cluster.labels_per_sample and run 'mclclip cluster "
                "--force'"
            )

    def centroids(self) -> npt.NDArray[np.float32]:
        """Returns the centroids [K, D], memory-mapped."""
        return open_npy(self.directory / "centroids.npy", "cluster")

    def __getitem__(self, sample_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the classes of samples, int64 [n, l]; -1 where there is none."""
        of_labels, similarities = self._arrays
        labels = of_labels[sample_ids, : self.labels_per_sample].astype(np.int64)
        if self.threshold is not None:
            near = similarities[sample_ids, : self.labels_per_sample] >= self.threshold
            near[:, 0] = True
            labels[~near] = -1
        return labels

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
    """The values of an attribute as classes, one per sample; it is used as `ClassLabels` is.

    Raises ValueError for an attribute that the index lacks.
    """

    labels_per_sample = 1

    def __init__(self, index: SampleIndex, name: str) -> None:
        self.index, self.name = index, name
        self._codes, values = index.attribute(name)
        self.num_classes = len(values)
        self.digest = digest_json({"index": index.digest, "attribute": name})

    def __getitem__(self, sample_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the classes of samples, int64 [n, 1]; -1 where there is no value."""
        return self._codes[sample_ids, None].astype(np.int64)

    def centroids(self) -> npt.NDArray[np.float32]:
        """Raises RuntimeError: values of an attribute have no centroids."""
        raise RuntimeError(
            f"the classes are values of the attribute {self.name!r}, which have no centroids: "
            "start class centers from noise, or read clusters"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return AttributeClasses, (self.index, self.name)


# --- weights ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SampleWeights:
    """The weights of the samples of an index.

    values     numbers [N] in index order, memory-mapped; None: 1 for all
    factors    float64 [shards], multiply the values of each shard's samples
    shard_of   int32 [N], the shard of every sample, memory-mapped
    per_epoch  number of draws of an epoch; None: the sum of the weights
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
        """Opens the weights that ``plan`` and the sources of ``data`` give the samples.

        Returns None if every sample weighs 1 and nothing is scaled. ``option`` names the plan in
        messages, such as 'train.plan'. Raises FileNotFoundError or ValueError if the file of
        weights is missing or of another index, for numbers that are no weights, and if all are 0.
        """
        path, per_epoch = plan.weights, plan.samples_per_epoch
        by_source = {name: source.weight for name, source in data.sources.items()}
        factors = np.array([by_source.get(s.source, 1.0) for s in index.shards], np.float64)
        if path is None and per_epoch is None and bool((factors == 1.0).all()):
            return None
        values = None if path is None else _read_weights(path, index, f"{option}.weights")
        weights = cls(values, factors, index.shard_of, per_epoch)
        what, any_drawn = f"{option}.weights={path}" if path else "data.sources.NAME.weight", False
        for ids in weights._blocks():
            part = weights._plain(ids)
            if bad := np.flatnonzero(~((part >= 0) & (part <= MOST_WEIGHT))).tolist():
                raise ValueError(
                    f"{what}: the weight of sample {ids[0] + bad[0]} is {part[bad[0]]}, wanted "
                    f"numbers from 0 to {MOST_WEIGHT:,.0f}"
                )
            any_drawn = any_drawn or bool(part.any())
        if not any_drawn:
            raise ValueError(f"{what}: all weights are 0, so that no sample is drawn: raise some")
        return weights

    def _blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yields the ids of all samples in blocks."""
        for start in range(0, len(self), _AT_ONCE):
            yield np.arange(start, min(start + _AT_ONCE, len(self)))

    @property
    def num_draws(self) -> int:
        """Number of draws of an epoch if all samples are one group."""
        if self.per_epoch is not None:
            return self.per_epoch
        return int(
            self.draws(np.array([sum(int(self.units(ids).sum()) for ids in self._blocks())]))[0]
        )

    def __len__(self) -> int:
        return len(self.shard_of)

    def _plain(self, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        values = 1.0 if self.values is None else self.values[ids].astype(np.float64)
        return np.asarray(values * self.factors[self.shard_of[ids]])

    def units(self, ids: npt.NDArray[np.integer]) -> Integers:
        """Returns weights of samples in units of 1/65,536, int64 [n]; a weight above 0 is >= 1."""
        plain = self._plain(ids)
        return np.where(plain > 0, np.maximum(np.rint(plain * WEIGHT_UNIT), 1), 0).astype(np.int64)

    def draws(self, units: Integers) -> Integers:
        """Returns the number of draws of an epoch from each group, int64 [G], at least 1.

        ``units`` [G] are the sums of the groups' weights. Raises ValueError for too many draws.
        """
        if not len(units):
            return units
        ends = np.cumsum(units)
        total = ends[-1] / WEIGHT_UNIT if self.per_epoch is None else float(self.per_epoch)
        if total > MOST_DRAWS:
            raise ValueError(
                f"an epoch would have {total:,.0f} draws by the weights of its samples, wanted at "
                f"most {MOST_DRAWS:,}: lower data.sources.NAME.weight or the numbers of "
                "plan.weights, or set plan.samples_per_epoch"
            )
        rounded = np.rint(ends * (total / max(ends[-1], 1))).astype(np.int64)
        per_group: Integers = np.maximum(np.diff(rounded, prepend=0), 1)
        return per_group

    def by_source(self, index: SampleIndex) -> dict[str, float]:
        """Returns each data source's share of the sum of all weights."""
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
        """Digest of everything that the draws depend on, except the index."""
        values = None if self.values is None else digest_array(self.values)
        return digest_json([values, self.factors.tolist(), self.per_epoch])


def _read_weights(file: str, index: SampleIndex, option: str) -> npt.NDArray[np.floating]:
    """Opens the file of weights, memory-mapped; ``option`` names it in messages."""
    path = Path(file).expanduser()
    try:
        values = open_given_npy(path, "numbers")
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"{option}: {error}") from None
    digest = artifacts.read_identity(path.parent).get("inputs", {}).get("index", index.digest)
    fits = values.dtype.kind in "fiub" and values.shape == (len(index),)
    if not fits or digest != index.digest:
        raise ValueError(
            f"{option}: {path} holds {values.dtype} of shape {values.shape}, the index has "
            f"{len(index):,} samples"
            f"{'' if digest == index.digest else ' and other sample keys'}: give one weight for "
            f"each sample of the index at {index.directory}, in its order"
        )
    return values


def locate_draws(
    sums: Integers, starts: Integers, draws: Integers, number: Integers, keys: npt.NDArray[Any]
) -> tuple[Integers, Integers]:
    """Returns the row of each draw, int64 [B], and its occurrence.

    sums    int64 [M], running sums of all rows' weights, group after group; memory-mapped
    starts  int64 [B, 2], the rows [start, stop) of the group of each draw
    draws   int64 [B], the number of draws of that group
    number  int64 [B], which of them it is: 0 <= number < draws
    keys    uint64 [B], the key of the group's random numbers

    The occurrence, int64 [B], tells draws of one row apart; it is mostly 0 to the row's weight.
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
