"""Pairs of samples whose embeddings point almost the same way, and which samples of them to keep.

Both verbs of this room search here: ``filter`` leaves out what is near a sample that is kept, and
``blindspots`` asks which of the near pairs another encoder tells apart.

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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mclclip.data.row_store import RowStore
from mclclip.run import runlog
from mclclip.util import search
from mclclip.util.search import Floats, Integers, NearPairs

Embeddings = RowStore | Floats
"""Rows [N, D], on disk or in memory, which are read by slices and by sorted numbers."""

HELD_BYTES = 128 * 2**20
"""Bytes of rows, as they are stored, of the clusters that are read together; they are there twice
for a moment."""

ROWS_AT_ONCE = 4096
"""Rows that are read at once: 50 MB for 512 dimensions in float64, with as many captions."""

ROUNDS = 10
"""Rounds in which what a chain linked is searched again."""


def cuts(count: int) -> list[slice]:
    """Slices of at most ``ROWS_AT_ONCE`` rows, in order."""
    return search.cuts(count, ROWS_AT_ONCE)


@dataclass(frozen=True)
class Subset:
    """The rows [n, D] with the sorted ``ids`` [n] among many; a slice counts these rows alone."""

    rows: Embeddings
    ids: Integers

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, cut: slice, /) -> Floats:
        ids = self.ids[cut]
        if len(ids) and ids[-1] - ids[0] == len(ids) - 1:  # without a gap: mapped, not copied
            return self.rows[int(ids[0]) : int(ids[-1]) + 1]
        return self.rows[ids]


def cosines_of(rows: Embeddings, left: Integers, right: Integers) -> NDArray[np.float64]:
    """Cosines [n] of samples by their numbers, which need not be sorted."""
    cosines = np.empty(len(left))
    for cut in cuts(len(left)):
        ids, inverse = np.unique(np.stack([left[cut], right[cut]]), return_inverse=True)
        unique_rows, (first, second) = rows[ids], inverse.reshape(2, -1)
        cosines[cut] = search.cosines(unique_rows[first], unique_rows[second])
    return cosines


# --- pairs -------------------------------------------------------------------------------------


def near_pairs(
    rows: Embeddings,
    usable: NDArray[np.bool_],
    above: float,
    labels: NDArray[np.integer] | None = None,
    *,
    what: str,
) -> Iterator[NearPairs]:
    """Yields all pairs of usable samples whose cosine is above ``above``, some at a time.

    rows    [N, D], which need not have unit length; a row of zeros is near nothing
    usable  bool [N]
    labels  [N]: only samples of one label are compared, those of -1 with none. None: all with all
    what    the verb, for the progress and for the error of a missing faiss

    The lower sample of a pair stands first; the order of the pairs says nothing. Raises ValueError
    where faiss is not installed.
    """
    if labels is None:
        ids = np.flatnonzero(usable)
        blocks = runlog.progress(
            search.blocks(len(ids)),
            total=search.num_blocks(len(ids)),
            description=f"{what}, blocks",
        )
        for piece in search.near_pairs(Subset(rows, ids), above, blocks, what=what):
            yield NearPairs(ids[piece.rows], piece.cosines)
        return
    # Rows of a cluster are scattered over all files, so those of several small clusters are read
    # together; a larger one is read block by block.
    groups = Groups(labels, usable)
    held_rows = int(HELD_BYTES // max(rows[:1].nbytes, 1))
    batches = groups.batches(held_rows)
    for first, stop in runlog.progress(
        batches, total=len(batches), description=f"{what}, clusters"
    ):
        starts = groups.starts[first : stop + 1]
        members = groups.ids[starts[0] : starts[-1]]
        if len(members) > held_rows:
            for piece in search.near_pairs(Subset(rows, members), above, what=what):
                yield NearPairs(members[piece.rows], piece.cosines)
            continue
        order = np.argsort(members)
        held = rows[members[order]][np.argsort(order)]
        for begin, end in pairwise((starts - starts[0]).tolist()):
            for piece in search.near_pairs(held[begin:end], above, what=what):
                yield NearPairs(members[begin:end][piece.rows], piece.cosines)


class Groups:
    """Samples by group: ids [n], those of a group after each other and sorted; group g has those
    of [starts[g], starts[g + 1]).

    They are groups of two samples or more that have one label [N]; those of the label -1, and what
    is not usable, are in none.
    """

    def __init__(self, labels: NDArray[np.integer], usable: NDArray[np.bool_]) -> None:
        ids = np.flatnonzero(usable & (labels >= 0))
        ids = ids[np.argsort(labels[ids], kind="stable")]
        sizes = np.bincount(labels[ids]) if len(ids) else np.zeros(0, np.int64)
        several = sizes > 1
        self.ids: Integers = ids[np.repeat(several, sizes)]
        self.starts = np.concatenate([[0], np.cumsum(sizes[several])]).astype(np.int64)

    def batches(self, most: int) -> list[tuple[int, int]]:
        """Groups [first, stop) of at most ``most`` samples together; a larger one is alone."""
        batches, first = [], 0
        while first < len(self.starts) - 1:
            stop = int(np.searchsorted(self.starts, self.starts[first] + most, side="right")) - 1
            batches.append((first, stop := max(stop, first + 1)))
            first = stop
        return batches

    def drawn(self, random: np.random.Generator, most: int) -> Integers:
        """The samples of groups that are drawn until they have ``most`` pairs; of one at least."""
        sizes = np.diff(self.starts)
        order = random.permutation(len(sizes))
        pairs = np.cumsum((sizes * (sizes - 1) // 2)[order])
        is_drawn = np.zeros(len(sizes), bool)
        is_drawn[order[: max(int(np.searchsorted(pairs, most, side="right")), 1)]] = True
        ids: Integers = self.ids[np.repeat(is_drawn, sizes)]
        return ids


def equal_pairs(
    rows: Embeddings, usable: NDArray[np.bool_], above: float, *, what: str
) -> Iterator[NearPairs]:
    """Yields (first, copy) for every usable row of which an earlier usable one has the same bits.

    A picture that is in a data set n times has n (n - 1) / 2 near pairs, of which these n - 1 are
    enough; the copies need no further search. Rows are found by a hash of 64 bits, and compared.
    Rows of zeros are equal to nothing.
    """
    width = rows[:1].nbytes // 2  # words of 16 bits in a row
    keys = 2 * np.random.default_rng(0).integers(2**63, size=width, dtype=np.uint64) + 1
    hashes, blocks = np.zeros(len(rows), np.uint64), cuts(len(rows))
    for cut in runlog.progress(blocks, total=len(blocks), description=f"{what}, equal embeddings"):
        words = np.ascontiguousarray(rows[cut]).view(np.uint16)
        hashes[cut] = (words * keys).sum(axis=1)
    ids = np.flatnonzero(usable)
    _, first, inverse = np.unique(hashes[ids], return_index=True, return_inverse=True)
    first = ids[first][inverse]
    copies = np.flatnonzero(first != ids)
    for cut in cuts(len(copies)):
        pairs = np.column_stack([first[copies[cut]], ids[copies[cut]]])
        sources, inverse = np.unique(pairs[:, 0], return_inverse=True)
        left, right = rows[sources][inverse], rows[pairs[:, 1]]
        cosines = search.cosines(left, right)
        equal = (left == right).all(axis=1) & (cosines > above)
        yield NearPairs(pairs[equal], cosines[equal])


def nearest_other(
    rows: search.Rows, others: search.Rows, above: float, *, what: str
) -> tuple[Integers, NDArray[np.float64], NDArray[np.bool_]]:
    """The nearest of ``others`` [M, D] to each of ``rows`` [N, D], where their cosine is above
    ``above``; ties by the lower one of them.

    Returns the numbers [N] of these others, -1 for none; the cosines [N] with them, -inf for none;
    and bool [M], which of the others have a near row.
    """
    nearest = np.full(len(rows), -1, np.int64)
    best = np.full(len(rows), -np.inf)
    matched = np.zeros(len(others), bool)
    for piece in search.near_rows(rows, others, above, what=what):
        numbers, other = piece.rows.T
        matched[other] = True
        order = np.lexsort((other, -piece.cosines, numbers))
        numbers, first = np.unique(numbers[order], return_index=True)
        other, value = other[order][first], piece.cosines[order][first]
        better = (value > best[numbers]) | ((value == best[numbers]) & (other < nearest[numbers]))
        nearest[numbers[better]], best[numbers[better]] = other[better], value[better]
    return nearest, best, matched


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
        nodes, inverse = np.unique(ends, return_inverse=True)
        shape = len(nodes), len(nodes)
        edges = coo_matrix((np.ones(len(ends), bool), tuple(inverse.reshape(-1, 2).T)), shape)
        _, parts = connected_components(edges, directed=False)
        _, first = np.unique(parts, return_index=True)
        self._above[nodes] = nodes[first][parts]

    def add_all(self, pieces: Iterable[NearPairs]) -> int:
        """Joins the samples of pairs that come some at a time; returns the number of pairs."""
        number = 0
        for piece in pieces:
            self.add(piece.rows)
            number += len(piece.rows)
        return number

    def _lowest(self, ids: Integers) -> Integers:
        lowest = self._above[ids]
        while (further := self._above[lowest]).tobytes() != lowest.tobytes():
            lowest = further
        self._above[ids] = lowest
        return lowest

    def lowest(self) -> Integers:
        """[N]: the lowest sample of the component of each sample."""
        return self._lowest(np.arange(len(self._above)))

    def best(self, scores: NDArray[np.floating] | None) -> Integers:
        """[N]: for each sample the best-scored one of its component, itself if it is alone; NaN is
        no score, ties go to the lower sample, and without scores it is the lowest."""
        lowest = self.lowest()
        if scores is None:
            return lowest
        members = np.flatnonzero(np.bincount(lowest, minlength=len(lowest))[lowest] > 1)
        finite_scores = np.nan_to_num(scores[members].astype(np.float64), nan=-np.inf)
        order = members[np.lexsort((members, -finite_scores, lowest[members]))]
        parts, first = np.unique(lowest[order], return_index=True)
        best = lowest.copy()
        best[parts] = order[first]
        return best[lowest]


def copies_among(
    rows: Embeddings,
    usable: NDArray[np.bool_],
    scores: NDArray[np.floating] | None,
    above: float,
    labels: NDArray[np.integer] | None = None,
    *,
    what: str,
) -> tuple[Integers, dict[str, int]]:
    """Decides which of the usable samples [N] are copies, and of what.

    scores  [N], NaN for none; the highest is kept, ties by the lower sample. None: the lowest
    labels  [N], within which samples are compared (``near_pairs``)

    Samples that only a chain links to one that is kept are left out after `ROUNDS` rounds.

    Returns the sample [N] that is kept instead of each, the best of the kept ones that are near it,
    or its own number where it is kept; and counts:

    pairs          near pairs of the first round, of equal rows each copy with the first alone
    groups         connected components of these of more than one sample
    largest_group  samples of the largest of them
    by_chain       samples that are left out after the last round and not near the sample kept
    """
    every = np.arange(len(usable))
    components = Components(len(usable))
    pairs = components.add_all(equal_pairs(rows, usable, above, what=what))
    first = components.best(scores)  # of equal rows the best is searched alone
    of, active = first.copy(), usable & (first == every)
    for number in range(ROUNDS):
        linked = Components(len(usable))
        num_linked = linked.add_all(near_pairs(rows, active, above, labels, what=what))
        best = linked.best(scores)
        members = np.flatnonzero(active & (best != every))
        of[members] = best[members]
        if number == 0:
            joined = np.flatnonzero(linked.lowest() != every)
            components.add(np.column_stack([joined, linked.lowest()[joined]]))
            pairs += num_linked
        far = members[cosines_of(rows, members, best[members]) <= above]
        if not len(far) or number == ROUNDS - 1:
            break
        of[far], active = far, np.zeros(len(usable), bool)
        active[far] = True
    sizes = np.bincount(components.lowest())
    return of[first], {
        "pairs": pairs,
        "groups": int((sizes > 1).sum()),
        "largest_group": int(sizes.max(initial=0)),
        "by_chain": int(np.isin(first[usable], far).sum()),
    }
