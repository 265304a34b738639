"""The search for nearest centroids against a brute force in float64, on any device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args
from unittest import mock

import torch
from torch import Tensor

from mclclip.clustering import kmeans
from mclclip.clustering.arithmetic import Arithmetic, Products, Rounding, Scores, Tile
from mclclip.clustering.centroids import Assignment, Block, WholeCentroids, assign_blocks
from mclclip.clustering.nearest import NOTHING, Search, unpack
from mclclip.clustering.options import Algorithm, ClusterConfig
from mclclip.clustering.rows import RankRows
from mclclip.data.arrays import Floats

Data = Literal["whole_numbers", "unit_vectors"]
ROUNDINGS: list[tuple[Products, Rounding]] = [
    ("float32", "none"),
    ("float32", "inputs"),
    ("bfloat16", "output"),
    ("bfloat16", "partial_sums"),
]


def every_arithmetic() -> list[Arithmetic]:
    """All combinations that a search can have."""
    return [
        Arithmetic(products=products, rounding=rounding, scores=scores, tile=tile)
        for (products, rounding), scores, tile in itertools.product(
            ROUNDINGS, get_args(Scores), get_args(Tile)
        )
    ]


def assign_rows(
    blocks: Sequence[Floats],
    centroids: Tensor,
    labels_per_sample: int = 1,
    held: range | None = None,
    **options: Any,
) -> Iterator[Block]:
    """``assign_blocks`` of rows with these ``options`` of ``RankRows``."""
    rows = RankRows(blocks, **{"cache_bytes": 0, **options})
    return assign_blocks(rows, centroids, labels_per_sample, held=held)


def assign(blocks: Sequence[Floats], centroids: Tensor, **options: Any) -> Assignment:
    """The assignment of all N rows at once; arguments are those of ``assign_rows``."""
    every = [near for _, near in assign_rows(blocks, centroids, **options)]
    return Assignment(
        torch.cat([near.labels for near in every]), torch.cat([near.distances for near in every])
    )


def fit(
    blocks: Sequence[Floats], num_clusters: int, *, initial: Tensor | None = None, **options: Any
) -> kmeans.KMeans:
    """``kmeans.fit`` of rows with some of these ``options`` (``_settings``).

    It begins with the centroids ``initial`` [K, D] (None: those it draws).
    """

    def starts(holder: WholeCentroids, *_: object) -> Iterator[Tensor]:
        assert initial is not None
        yield holder.rows.prepare(initial[holder.held.start : holder.held.stop])

    begin = kmeans.draw_starts if initial is None else starts
    with mock.patch.object(kmeans, "draw_starts", begin):
        rows, config, others = _settings(blocks, options)
        return kmeans.fit(rows, num_clusters, config, **others)


def fit_two_level(blocks: Sequence[Floats], num_clusters: int, **options: Any) -> kmeans.Clustering:
    """``kmeans.fit_two_level`` of rows with some of these ``options`` (``_settings``)."""
    rows, config, others = _settings(blocks, options)
    return kmeans.fit_two_level(rows, num_clusters, config, **others)


def _settings(
    blocks: Sequence[Floats], options: dict[str, Any]
) -> tuple[RankRows, ClusterConfig, dict[str, Any]]:
    """Sorts options into those of rows, those of the clustering (one restart unless given; numbers
    that a user may not set are taken too, such as no iteration), and the others."""
    options = {"restarts": 1, **options}
    of_rows = {n: options.pop(n) for n in _OF_ROWS if n in options}
    config = ClusterConfig()
    for name in [field.name for field in fields(ClusterConfig) if field.name in options]:
        object.__setattr__(config, name, options.pop(name))
    if isinstance(options.get("seed"), int):
        options["seed"] = [options["seed"]]
    return RankRows(blocks, **of_rows), config, options


_OF_ROWS = ("algorithm", "valid", "context", "cache_bytes", "arithmetic")


def check_nearest(
    device: torch.device | str,
    arithmetic: Arithmetic,
    ks: Sequence[int],
    dims: Sequence[int],
    counts: Sequence[int],
    algorithm: Algorithm,
    *,
    data: Sequence[Data] = ("whole_numbers", "unit_vectors"),
    num_rows: int = 8,
) -> int:
    """How many of the labels and scores that ``Search`` finds differ from a brute force, and how
    many of the labels that it finds without scores differ from those.

    Each of ``ks`` (numbers of centroids) is taken with each of ``dims`` and of ``counts`` (how many
    of the nearest are wanted), for both kinds of ``data``. Of whole numbers float32's scores are
    exact, so labels must be equal, and ties must go to the lowest id. Of unit vectors a label is
    wrong where its score in float64 is lower than the right one's by more than float32 may round.
    """
    differences = 0
    for dim, kind in itertools.product(dims, data):
        make = _whole_numbers if kind == "whole_numbers" else _unit_vectors
        rows, centroids, tolerance = make(dim, num_rows, max(ks))
        scores = _all_scores(rows, centroids, algorithm)
        rows, centroids = rows.to(device), centroids.to(device)
        for k in ks:
            is_unit = kind == "unit_vectors"
            search = Search(centroids[:k], algorithm, 0, arithmetic, unit_rows=is_unit)
            for count in counts:
                found = search.best(rows, count).cpu()
                differences += _differences(found, scores[:, :k], tolerance)
            differences += int((search.nearest(rows) != unpack(search.best(rows))[1][:, 0]).sum())
    return differences


def _whole_numbers(dim: int, num_rows: int, k: int) -> tuple[Tensor, Tensor, float]:
    """Rows, centroids, and the tolerance 0.0: float32 holds their scores, and twice these, exactly.

    Half of the centroids lie in crowds that bfloat16 cannot tell apart; some are equal.
    """
    largest = int((2**24 / (3 * dim)) ** 0.5)
    generator = torch.Generator().manual_seed(dim)

    def draw(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high + 1, (size, dim), generator=generator).float()

    rows, centroids = draw(-largest, largest, num_rows), draw(-largest // 2, largest, k)
    crowd = draw(-largest // 2, largest - 1, 4).repeat(-(-k // 4), 1)[:k] + draw(-1, 1, k)
    crowded = torch.rand(k, 1, generator=generator) < 0.5
    return rows, torch.where(crowded, crowd, centroids), 0.0


def _unit_vectors(dim: int, num_rows: int, k: int) -> tuple[Tensor, Tensor, float]:
    """Rows, centroids of unlike lengths, and how far two of their scores may be off in float32."""
    generator = torch.Generator().manual_seed(dim + 1)
    both = torch.randn(num_rows + k, dim, generator=generator) + 0.5
    both /= torch.linalg.vector_norm(both, dim=1, keepdim=True)
    lengths = 0.5 + torch.rand(k, 1, generator=generator)
    tolerance = 4.0 * (dim + 16) * 2.0**-24 * float(lengths.max()) ** 2
    return both[:num_rows], both[num_rows:] * lengths, tolerance


def _all_scores(rows: Tensor, centroids: Tensor, algorithm: Algorithm) -> Tensor:
    """float64 [n, k] of all pairs."""
    scores = rows.double() @ centroids.double().T
    return (
        scores - centroids.double().square().sum(dim=1) / 2.0
        if algorithm == "euclidean"
        else scores
    )


def _differences(packed: Tensor, scores: Tensor, tolerance: float) -> int:
    """How many of the places of ``packed`` [n, count] do not hold what ``scores`` [n, k] say."""
    count = min(packed.shape[1], scores.shape[1])
    differences = int((packed[:, count:] != NOTHING).sum())
    values, ids = unpack(packed[:, :count])
    wanted = scores.sort(dim=1, descending=True, stable=True)
    if tolerance == 0.0:
        wrong = ids != wanted.indices[:, :count]
    else:
        known = ids.clamp(0, scores.shape[1] - 1)
        wrong = (ids != known) | (wanted.values[:, :count] - scores.gather(1, known) > tolerance)
        ordered = ids.sort(dim=1).values
        differences += int((ordered[:, 1:] == ordered[:, :-1]).sum())
    wrong |= ~((values.double() - wanted.values[:, :count]).abs() <= tolerance)
    return differences + int(wrong.sum())
