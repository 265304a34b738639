"""How often the plan of an epoch draws each sample: by a weight of its own and one of its source.

A weight is the number of times that an epoch is expected to draw the sample: 1 is the same as
without weights, 0 leaves it out. With ``per_epoch`` all weights are multiplied so that an epoch has
that many draws (a "virtual epoch").

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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mclclip.data.arrays import open_given_npy
from mclclip.data.options import MOST_DRAWS, DataConfig, PlanConfig
from mclclip.data.sample_index import SampleIndex
from mclclip.files import digest_array, digest_json
from mclclip.randomness import mix
from mclclip.run.artifacts import made_of

Integers = npt.NDArray[np.int64]
UNIT = 2**16
MOST = 10_000.0
"""The largest weight."""
_RUN = 64  # consecutive draws of a group that share their random number
_AT_ONCE = 2**20


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
        share: float = 1.0,
    ) -> SampleWeights | None:
        """The weights of an index's samples, by ``plan`` and by the sources of ``data``; None where
        every sample weighs 1 and nothing is scaled.

        option  name of the training's plan in messages, such as ``train.plan``
        share   of the samples that a pilot draws from
        A manifest beside the file ``plan.weights`` must be of this index.
        Raises FileNotFoundError or ValueError, one line, for a file that is not there or not of
        this index, for numbers that are no weights, and where all are 0.
        """
        path, per_epoch = plan.weights, plan.samples_per_epoch
        per_epoch = per_epoch and max(1, round(share * per_epoch))
        by_source = {name: source.weight for name, source in data.sources.items()}
        factors = np.array([by_source.get(s.source, 1.0) for s in index.shards], np.float64)
        if path is None and per_epoch is None and bool((factors == 1.0).all()):
            return None
        values = (
            None if path is None else _read(Path(path).expanduser(), index, f"{option}.weights")
        )
        weights = cls(values, factors, index.shard_of, per_epoch)
        what, drawn = f"{option}.weights={path}" if path else "data.sources.NAME.weight", False
        for ids in weights._blocks():
            part = weights._plain(ids)
            if bad := np.flatnonzero(~((part >= 0) & (part <= MOST))).tolist():
                raise ValueError(
                    f"{what}: the weight of sample {ids[0] + bad[0]} is {part[bad[0]]}, wanted "
                    f"numbers from 0 to {MOST:,.0f}"
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
        return np.where(plain > 0, np.maximum(np.rint(plain * UNIT), 1), 0).astype(np.int64)

    def draws(self, units: Integers) -> Integers:
        """int64 [G]: how often an epoch draws from groups whose weights add up to ``units`` [G]; at
        least once from each. Raises ValueError for more draws than can be computed with."""
        if not len(units):
            return units
        ends = np.cumsum(units)
        wanted = ends[-1] / UNIT if self.per_epoch is None else float(self.per_epoch)
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


def _read(path: Path, index: SampleIndex, option: str) -> npt.NDArray[np.floating]:
    """The numbers of the file, memory-mapped."""
    try:
        values = open_given_npy(path, "numbers")
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"{option}: {error}") from None
    if values.dtype.kind not in "fiub":
        raise ValueError(f"{option}: {path} is no .npy file of numbers: it holds {values.dtype}")
    made = made_of(path.parent).get("inputs", {}).get("index", index.digest)
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
