"""Near-duplicates: samples whose embeddings point almost the same way, and which of them to keep.

Source: SemDeDup (Abbas et al., 2023, arXiv:2303.09540), which compares samples within clusters of
k-means only: K clusters make it about K times cheaper, and copies that fell into different
clusters are not found. SemDeDup keeps, of samples that are near each other, the one farthest from
the centroid. Here the sample with the highest score is kept, or the lowest one where there are no
scores, and what is near it is left out; so in turn, until every sample is kept or left out.

That is computed without holding the pairs: those above the threshold make connected components
(single linkage), of each the best sample is kept, and what is near it is left out. In a chain, a
near b and b near c, the ends may be far from each other. What is in a component and not near the
sample that is kept is therefore searched again, among itself, in the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from mclclip import search
from mclclip.analysis.clip_scores import cuts
from mclclip.search import Floats, Integers, Pairs

HELD_BYTES = 256 * 2**20
"""Bytes of rows, as they are stored, of the groups that are read together."""

_READ_AT_ONCE = 16_384

ROUNDS = 10
"""Rounds in which what a chain linked is searched again."""


class Chosen(Protocol):
    """Rows [N, D] that can be cut, or chosen by sorted numbers."""

    def __len__(self) -> int:
        """N."""

    @overload
    def __getitem__(self, rows: slice, /) -> Floats: ...
    @overload
    def __getitem__(self, rows: Integers, /) -> Floats: ...
    def __getitem__(self, rows: slice | Integers, /) -> Floats:
        """The rows of a slice, or of sorted numbers."""


@dataclass(frozen=True)
class Subset:
    """The rows [n, D] with the sorted ``ids`` [n] among many; a slice counts these rows alone."""

    rows: Chosen
    ids: Integers

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, cut: slice, /) -> Floats:
        return self.rows[self.ids[cut]]


# --- pairs -------------------------------------------------------------------------------------


def equal_pairs(
    rows: Chosen, usable: NDArray[np.bool_], above: float, over: Iterable[slice] | None = None
) -> Iterator[Pairs]:
    """Yields (first, copy) for every usable row of which an earlier usable one has the same bits.

    A picture that is in a data set n times has n (n - 1) / 2 near pairs, of which these n - 1 are
    enough; the copies need no further search. Rows are found by a hash of 64 bits, and compared.
    ``over``: blocks of rows (None: all ``cuts``). Rows of zeros are equal to nothing.
    """
    width = rows[:1].nbytes // 2  # words of 16 bits in a row
    keys = 2 * np.random.default_rng(0).integers(2**63, size=width, dtype=np.uint64) + 1
    hashes = np.zeros(len(rows), np.uint64)
    for cut in cuts(len(rows)) if over is None else over:
        words = np.ascontiguousarray(rows[cut]).view(np.uint16)
        hashes[cut] = (words * keys).sum(axis=1)
    ids = np.flatnonzero(usable)
    _, first, places = np.unique(hashes[ids], return_index=True, return_inverse=True)
    first = ids[first][places]
    copies = np.flatnonzero(first != ids)
    for cut in cuts(len(copies)):
        pairs = np.column_stack([first[copies[cut]], ids[copies[cut]]])
        sources, places = np.unique(pairs[:, 0], return_inverse=True)
        left, right = rows[sources][places], rows[pairs[:, 1]]
        own = search.cosines(left, right)
        equal = (left == right).all(axis=1) & (own > above)
        yield Pairs(pairs[equal], own[equal])


@dataclass(frozen=True)
class Groups:
    """Samples by group: ids [n], those of a group after each other and sorted; group g has those
    of [starts[g], starts[g + 1])."""

    ids: Integers
    starts: Integers

    @classmethod
    def of(cls, labels: NDArray[np.integer], usable: NDArray[np.bool_]) -> Groups:
        """Groups of two samples or more that have one label [N]; those of the label -1, and what is
        not usable, are in none."""
        ids = np.flatnonzero(usable & (labels >= 0))
        ids = ids[np.argsort(labels[ids], kind="stable")]
        sizes = np.bincount(labels[ids]) if len(ids) else np.zeros(0, np.int64)
        several = sizes > 1
        ids = ids[np.repeat(several, sizes)]
        return cls(ids, np.concatenate([[0], np.cumsum(sizes[several])]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def comparisons(self) -> Integers:
        """Pairs [G] of samples in each group."""
        sizes = np.diff(self.starts)
        pairs: Integers = sizes * (sizes - 1) // 2
        return pairs

    def batches(self, most: int) -> list[tuple[int, int]]:
        """Groups [first, stop) of at most ``most`` samples together; a larger one is alone."""
        found, first = [], 0
        while first < len(self):
            stop = int(np.searchsorted(self.starts, self.starts[first] + most, side="right")) - 1
            found.append((first, stop := max(stop, first + 1)))
            first = stop
        return found

    def drawn(self, order: Integers, most: int) -> Integers:
        """The samples of the first groups in an order that have at most ``most`` comparisons; of
        one group at least."""
        count = int(np.searchsorted(np.cumsum(self.comparisons()[order]), most, side="right"))
        chosen = np.zeros(len(self), bool)
        chosen[order[: max(count, 1)]] = True
        ids: Integers = self.ids[np.repeat(chosen, np.diff(self.starts))]
        return ids


def near_in_groups(
    rows: Chosen,
    groups: Groups,
    above: float,
    over: Iterable[tuple[int, int]] | None = None,
    *,
    held_rows: int,
    what: str = "a search of near rows",
) -> Iterator[Pairs]:
    """Yields pairs of samples of one group whose cosine is above ``above``, as ``near_pairs`` does.

    The rows of several small groups are read together, at most ``held_rows``, since rows of a group
    are scattered over all files; a larger group is read block by block. ``over``: the batches of
    ``groups`` that are searched (None: all).
    """
    for first, stop in groups.batches(held_rows) if over is None else over:
        starts = groups.starts[first : stop + 1]
        members = groups.ids[starts[0] : starts[-1]]
        if len(members) > held_rows:
            yield from near_among(rows, members, above, what=what)
        else:
            yield from _near_in_batch(rows, members, starts - starts[0], above, what)


def _near_in_batch(
    rows: Chosen, members: Integers, starts: Integers, above: float, what: str
) -> Iterator[Pairs]:
    """Pairs within small groups, whose rows are held: ``members`` of group g are those of
    [starts[g], starts[g + 1])."""
    order = np.argsort(members)
    first = rows[:1]
    held = np.empty((len(members), *first.shape[1:]), first.dtype)
    for start in range(0, len(members), _READ_AT_ONCE):  # so that they are never there twice
        some = order[start : start + _READ_AT_ONCE]
        held[some] = rows[members[some]]
    for begin, end in pairwise(starts.tolist()):
        for found in search.near_pairs(held[begin:end], above, what=what):
            yield Pairs(members[begin:end][found.rows], found.cosines)


def near_among(
    rows: Chosen,
    ids: Integers,
    above: float,
    over: Iterable[search.Block] | None = None,
    *,
    what: str = "a search of near rows",
) -> Iterator[Pairs]:
    """Yields all pairs of the samples ``ids``, sorted, whose cosine is above ``above``; ``over`` as
    for ``near_pairs``, of these samples."""
    for found in search.near_pairs(Subset(rows, ids), above, over, what=what):
        yield Pairs(ids[found.rows], found.cosines)


# --- groups of copies --------------------------------------------------------------------------


class Components:
    """Connected components of N samples, whose pairs come some at a time.

    An array of N numbers is held, and of the pairs those that are added at once.
    """

    def __init__(self, count: int) -> None:
        self._above = np.arange(count)  # a lower sample of the same component, or the sample itself

    def add(self, pairs: Integers) -> None:
        """Joins the samples of each of the pairs [P, 2]."""
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        ends = self._lowest(pairs.ravel()).reshape(-1, 2)
        ends = ends[ends[:, 0] != ends[:, 1]]
        if not len(ends):
            return
        nodes, places = np.unique(ends, return_inverse=True)
        shape = len(nodes), len(nodes)
        edges = coo_matrix((np.ones(len(ends), bool), tuple(places.reshape(-1, 2).T)), shape)
        _, parts = connected_components(edges, directed=False)
        _, first = np.unique(parts, return_index=True)
        self._above[nodes] = nodes[first][parts]

    def _lowest(self, ids: Integers) -> Integers:
        found = self._above[ids]
        while (further := self._above[found]).tobytes() != found.tobytes():
            found = further
        self._above[ids] = found
        return found

    def lowest(self) -> Integers:
        """[N]: the lowest sample of the component of each sample."""
        return self._lowest(np.arange(len(self._above)))


def keepers(lowest: Integers, scores: NDArray[np.floating] | None) -> Integers:
    """[N]: the sample that is kept of the component of each sample, which is itself where it is.

    lowest  [N], the lowest sample of each one's component
    scores  [N], NaN for none; the highest is kept, ties by the lower sample. None: no scores
    """
    if scores is None:
        return lowest
    members = np.flatnonzero(np.bincount(lowest, minlength=len(lowest))[lowest] > 1)
    own = np.nan_to_num(scores[members].astype(np.float64), nan=-np.inf)
    order = members[np.lexsort((members, -own, lowest[members]))]
    parts, first = np.unique(lowest[order], return_index=True)
    kept = lowest.copy()
    kept[parts] = order[first]
    return kept[lowest]


@dataclass(frozen=True)
class Copies:
    """Which of N samples are copies.

    of             [N], the sample that is kept instead of each: the best of the kept ones that are
                   near it; its own number where it is kept
    pairs          near pairs of the first round, of equal rows each copy with the first alone
    groups         connected components of these of more than one sample, and the largest of them
    largest_group  in samples
    by_chain       samples that are left out after the last round and not near the sample kept
    """

    of: Integers
    pairs: int
    groups: int
    largest_group: int
    by_chain: int


def copies_among(
    rows: Chosen,
    left: NDArray[np.bool_],
    scores: NDArray[np.floating] | None,
    above: float,
    near: Callable[[NDArray[np.bool_]], Iterable[Pairs]],
    *,
    equal: Iterable[Pairs] = (),
    rounds: int = ROUNDS,
) -> Copies:
    """The copies among the samples that are ``left`` [N].

    rows    [N, D]
    scores  [N], NaN for none; the highest is kept, ties by the lower sample. None: the lowest
    near    pairs above ``above`` of the samples that a mask [N] names (it may miss some)
    equal   pairs of equal rows (``equal_pairs``); of each set of these the best is searched alone
    rounds  at most; samples that only a chain links to one that is kept are left out after the last
    """
    components, pairs = _joined(len(left), equal)
    best = keepers(components.lowest(), scores)
    of = best.copy()
    active = left & (best == np.arange(len(left)))
    for number in range(rounds):
        linked, found = _joined(len(left), near(active))
        lowest = linked.lowest()
        kept = keepers(lowest, scores)
        members = np.flatnonzero(active & (kept != np.arange(len(left))))
        of[members] = kept[members]
        if number == 0:
            joined = np.flatnonzero(lowest != np.arange(len(left)))
            components.add(np.column_stack([joined, lowest[joined]]))
            pairs += found
        far = members[cosines_of(rows, members, kept[members]) <= above]
        if not len(far) or number == rounds - 1:
            break
        of[far], active = far, np.zeros(len(left), bool)
        active[far] = True
    sizes = np.bincount(components.lowest())
    by_chain = int(np.isin(best[left], far).sum())
    return Copies(of[best], pairs, int((sizes > 1).sum()), int(sizes.max(initial=0)), by_chain)


def _joined(count: int, pairs: Iterable[Pairs]) -> tuple[Components, int]:
    components, number = Components(count), 0
    for found in pairs:
        components.add(found.rows)
        number += len(found.rows)
    return components, number


def cosines_of(rows: Chosen, left: Integers, right: Integers) -> NDArray[np.float64]:
    """Cosines [n] of samples by their numbers, ``left`` sorted."""
    found = np.empty(len(left))
    for cut in cuts(len(left)):
        ids, places = np.unique(right[cut], return_inverse=True)
        found[cut] = search.cosines(rows[left[cut]], rows[ids][places])
    return found


# --- copies of other images --------------------------------------------------------------------


@dataclass(frozen=True)
class Nearest:
    """For N samples the nearest row of another set among those that are near: rows [N], -1 for
    none, and cosines float64 [N]; and which [M] of the other rows have a near sample."""

    rows: Integers
    cosines: NDArray[np.float64]
    matched: NDArray[np.bool_]


def nearest_other(
    rows: search.Rows, others: search.Rows, above: float, *, what: str = "a search of near rows"
) -> Nearest:
    """The nearest of ``others`` [M, D] to each of ``rows`` [N, D], where their cosine is above
    ``above``; ties by the lower one of them."""
    near = np.full(len(rows), -1, np.int64)
    best = np.full(len(rows), -np.inf)
    matched = np.zeros(len(others), bool)
    for found in search.near_rows(rows, others, above, what=what):
        own, other = found.rows.T
        matched[other] = True
        order = np.lexsort((other, -found.cosines, own))
        own, first = np.unique(own[order], return_index=True)
        other, value = other[order][first], found.cosines[order][first]
        better = (value > best[own]) | ((value == best[own]) & (other < near[own]))
        near[own[better]], best[own[better]] = other[better], value[better]
    return Nearest(near, best, matched)
