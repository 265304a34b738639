"""Finds pairs of samples whose embeddings have a high cosine, and chooses which samples to keep.

``filter`` leaves out samples that are near a kept sample. ``blindspots`` asks which of the near
pairs another encoder tells apart.

Source: SemDeDup (Abbas et al., 2023, arXiv:2303.09540). It compares samples only within clusters of
k-means: with K clusters that is about K times cheaper, and copies in different clusters are missed.
Of samples that are near each other it keeps the one farthest from the centroid. Here the sample
with the highest score is kept (without scores the one of the lowest number), and samples near it
are left out; then the next one, until every sample is kept or left out.

Pairs are not held in memory. They join samples to connected components; of each component the best
sample is kept, and samples near it are left out. If a is near b and b near c, then a and c may be
far from each other. So the samples of a component that are not near the kept one are searched
again, among themselves, in the next round.
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
"""Rows [N, D], on disk or in memory, that can be indexed by a slice or by sorted numbers."""

HELD_BYTES = 128 * 2**20
"""Small clusters are read together, up to these bytes of stored rows. For a moment memory holds
twice as many."""

ROWS_AT_ONCE = 4096
"""Rows that are read at once; with D = 512, float64 and one caption each they take 50 MB."""

ROUNDS = 10
"""Most rounds in which the ends of chains are searched again."""


def cuts(count: int) -> list[slice]:
    """Cuts ``count`` rows into slices of at most ``ROWS_AT_ONCE``."""
    return search.cuts(count, ROWS_AT_ONCE)


@dataclass(frozen=True)
class Subset:
    """The rows [n, D] with the sorted numbers ``ids`` [n]; a slice counts only these rows."""

    rows: Embeddings
    ids: Integers

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, cut: slice, /) -> Floats:
        ids = self.ids[cut]
        if len(ids) and ids[-1] - ids[0] == len(ids) - 1:  # no gap: a view needs no copy
            return self.rows[int(ids[0]) : int(ids[-1]) + 1]
        return self.rows[ids]


def cosines_of(rows: Embeddings, left: Integers, right: Integers) -> NDArray[np.float64]:
    """Returns the cosines [n] of samples ``left`` [n] with samples ``right`` [n], in any order."""
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
    """Yields all pairs of usable samples whose cosine is above ``above``, piece by piece.

    rows    [N, D], of any length; a row of zeros is near nothing
    usable  bool [N]
    labels  [N]: only samples of one label are compared, those of -1 with none. None: all with all
    what    the verb, such as 'filter', for the progress and for the error if faiss is missing

    The lower sample of a pair comes first; pairs come in any order. Raises ValueError if faiss is
    not installed.
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
    # The rows of a cluster are scattered over all files. So several small clusters are read in one
    # pass; a large one is read block by block.
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
    """Groups of two or more usable samples with the same label; the label -1 makes no group.

    ids [n] has the samples of group after group, sorted within each. Group g has
    ids[starts[g] : starts[g + 1]].
    """

    def __init__(self, labels: NDArray[np.integer], usable: NDArray[np.bool_]) -> None:
        ids = np.flatnonzero(usable & (labels >= 0))
        ids = ids[np.argsort(labels[ids], kind="stable")]
        sizes = np.bincount(labels[ids]) if len(ids) else np.zeros(0, np.int64)
        several = sizes > 1
        self.ids: Integers = ids[np.repeat(several, sizes)]
        self.starts = np.concatenate([[0], np.cumsum(sizes[several])]).astype(np.int64)

    def batches(self, most: int) -> list[tuple[int, int]]:
        """Returns ranges [first, stop) of groups with at most ``most`` samples together; a larger
        group has its own range."""
        batches, first = [], 0
        while first < len(self.starts) - 1:
            stop = int(np.searchsorted(self.starts, self.starts[first] + most, side="right")) - 1
            batches.append((first, stop := max(stop, first + 1)))
            first = stop
        return batches


def equal_pairs(
    rows: Embeddings, usable: NDArray[np.bool_], above: float, *, what: str
) -> Iterator[NearPairs]:
    """Yields a pair (first, copy) for every usable row with the same bits as an earlier usable one.

    A picture that is in a data set n times has n (n - 1) / 2 near pairs. These n - 1 are enough, so
    the copies need no search. Rows with equal hashes of 64 bits are compared. Rows of zeros are
    equal to nothing.
    """
    width = rows[:1].nbytes // 2  # a row is hashed as words of 16 bits
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
    """Finds for each of ``rows`` [N, D] the nearest of ``others`` [M, D], if their cosine is above
    ``above``; of equally near ones the lower.

    Returns its number [N], -1 for none; the cosine [N], -inf for none; and bool [M], True for
    others that have a near row.
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
    """Connected components of ``count`` samples; pairs are added piece by piece and not kept."""

    def __init__(self, count: int) -> None:
        self._above = np.arange(count)  # of each sample a lower one of its component, or itself

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
        """Joins the samples of all pieces of pairs; returns the number of pairs."""
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
        """Returns [N], for each sample the lowest one of its component."""
        return self._lowest(np.arange(len(self._above)))

    def best(self, scores: NDArray[np.floating] | None) -> Integers:
        """Returns [N], for each sample the one with the highest score in its component.

        NaN counts as the lowest score; of equal scores the lower sample wins. Without ``scores`` it
        is the lowest sample."""
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
    """Decides which of the usable samples [N] are copies, and of which sample.

    scores  [N], NaN for none; of near samples the one with the highest score is kept, of equal
            scores the lower one. None: the lowest sample is kept
    labels  [N]: only samples of one label are compared (``near_pairs``)

    Returns [N], for a copy the kept sample that it is near, and for others their own number. After
    ``ROUNDS`` rounds samples that only a chain of pairs links to a kept one are copies of that one
    too. Also returns counts:

    pairs          near pairs of the first round; of equal rows only pairs with the first one
    groups         connected components of these pairs
    largest_group  number of samples in the largest component
    by_chain       number of copies that are not near the sample that is kept instead
    """
    every = np.arange(len(usable))
    components = Components(len(usable))
    pairs = components.add_all(equal_pairs(rows, usable, above, what=what))
    first = components.best(scores)  # of equal rows only the best one is searched
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
