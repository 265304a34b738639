"""The nearest centroids and k-means on the device, against the CPU and against themselves."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mclclip.clustering import kmeans
from mclclip.clustering.arithmetic import Arithmetic, sums_in_float32
from mclclip.clustering.centroids import Assignment
from mclclip.clustering.nearest import Search, half_squares
from mclclip.clustering.options import Algorithm
from mclclip.data.arrays import cut_blocks
from mclclip.eval import features
from mclclip.ranks.process_group import Context
from mclclip.util.search import NearPairs, choose_index, near_rows, nearest, nearest_to_few
from tests.gpu import Skip
from tests.gpu.checks import Where, check, close, no_faiss, random, same_bits, unit
from tests.nearest_checks import assign, check_nearest, every_arithmetic, fit, fit_two_level

CPU = torch.device("cpu")
ALGORITHMS: tuple[Algorithm, ...] = ("spherical", "euclidean")
Floats = npt.NDArray[np.floating[Any]]


def planted(
    num_rows: int, dim: int, num_clusters: int, noise: float = 0.3, seed: int = 0
) -> Floats:
    """Unit rows around unit centers, of unequal numbers: k-means finds the same on any machine."""
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((num_clusters, dim), dtype=np.float32)
    share = np.arange(1, num_clusters + 1, dtype=float)
    labels = rng.choice(num_clusters, num_rows, p=share / share.sum())
    labels[:num_clusters] = np.arange(num_clusters)  # none is empty
    rows = centers[labels] + noise * rng.standard_normal((num_rows, dim), dtype=np.float32)
    found: Floats = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


# --- the nearest ---


@check("nearest centroids: every path in bfloat16", "bfloat16", limit_s=150.0)
@check("nearest centroids: every path in float32", "float32", limit_s=150.0)
def search(where: Where, products: str) -> str:
    """Every arithmetic against a brute force in float64; numbers of centroids on both sides of each
    size at which the search goes another way."""
    ks = [1, 15, 16, 63, 64, 65, 511, 512, 513, 1000, *where.several([16_384, 16_385, 40_000])]
    different, compared = 0, 0
    for arithmetic in every_arithmetic():
        if arithmetic.products != products:
            continue
        # Where the product is said to round its output alone, it has to.
        once = arithmetic.rounding == "output"
        with sums_in_float32() if once else contextlib.nullcontext():
            for algorithm in ALGORITHMS:
                given = ks if where.on_gpu or arithmetic.tile == "cache" else ks[:6]
                found = check_nearest(where.device, arithmetic, given, (33, 64), (1, 3), algorithm)
                if found:
                    print(f"{arithmetic}, {algorithm}: {found} differ")
                different += found
                compared += 1
    assert not different, f"{different} labels or scores differ from a brute force (see the log)"
    return f"{compared} ways"


@check("nearest centroids: a score is that of its two rows")
def independent(where: Where) -> str:
    """Bit for bit, whatever lies beside them: parts of the rows, parts of the centroids, D odd."""
    for dim in (33, 48, 511, 768):
        rows, centroids = unit(700, dim).to(where.device), unit(1300, dim, seed=1).to(where.device)
        for algorithm in ALGORITHMS:
            whole = Search(centroids, algorithm).best(rows, 4)
            same_bits("a second time", Search(centroids, algorithm).best(rows, 4), whole)
            for cuts in ((0, 1, 1300), (0, 600, 603, 1300)):
                parts = [
                    torch.cat([part.best(some, 4) for some in rows[1:].split(97)])
                    for a, b in itertools.pairwise(cuts)
                    if (part := Search(centroids[a:b].clone(), algorithm, a))
                ]
                merged = torch.cat(parts, dim=1).sort(dim=1, descending=True).values[:, :4]
                same_bits(f"D = {dim}, {algorithm}, {cuts}", merged, whole[1:])
        lengths = half_squares(centroids)
        alone = torch.cat([half_squares(part) for part in centroids.split(3)])
        same_bits(f"D = {dim}: half squares", alone, lengths)
    return ""


@check("nearest centroids: TF32 and bf16 products, as torch is set, change nothing")
def arithmetics(where: Where) -> str:
    """The product only says which pairs are scored."""
    rows, centroids = unit(1000, 64).to(where.device), unit(3000, 64, seed=1).to(where.device)
    wanted = Search(centroids, "spherical").best(rows, 3)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        same_bits("TF32", Search(centroids, "spherical").best(rows, 3), wanted)
    finally:
        torch.set_float32_matmul_precision(before)
    half = Arithmetic(products="bfloat16")
    same_bits("bf16", Search(centroids, "spherical", 0, half).best(rows, 3), wanted)
    with sums_in_float32():
        same_bits("sums in fp32", Search(centroids, "spherical", 0, half).best(rows, 3), wanted)
    return ""


# --- k-means ---


def _fit(device: torch.device, rows: Floats, **options: Any) -> kmeans.KMeans:
    context = Context(device=device)
    return fit(cut_blocks([rows], 500), context=context, seed=3, **options)


@check("k-means: what the CPU finds", limit_s=150.0)
def lloyd(where: Where) -> str:
    """Both distances, both starts, fp16 rows, rows left out: centroids, counts, inertia."""
    num_rows, worst = where.size(20_000, 2000), 0.0
    rows = planted(num_rows, 33, 12)
    valid = np.random.default_rng(1).random(num_rows) < 0.8
    cases: list[tuple[Floats, dict[str, Any]]] = [
        (rows, {"algorithm": "spherical"}),
        (2.0 * rows, {"algorithm": "euclidean"}),
        (rows.astype(np.float16), {"init": "random", "restarts": 2}),
        (rows, {"valid": valid, "cache_bytes": 0}),
        (rows, {"sharded": True}),
        (rows, {"arithmetic": Arithmetic(products="bfloat16")}),
        (rows, {"initial": torch.from_numpy(rows[:12].copy())}),
    ]
    for given, options in cases:
        wanted = _fit(CPU, given, num_clusters=12, **options)
        got = _fit(where.device, given, num_clusters=12, **options)
        name = ", ".join(options)
        worst = max(worst, close(f"{name}: centroids", got.centroids, wanted.centroids, 1e-5))
        assert torch.equal(got.counts, wanted.counts), f"{name}: counts"
        assert abs(got.inertia - wanted.inertia) <= 1e-4 * wanted.inertia, f"{name}: inertia"
        again = _fit(where.device, given, num_clusters=12, **options)
        same_bits(f"{name}: a second time", again.centroids, got.centroids)
    return f"centroids off by {worst:.1g}"


@check("k-means: whole and sharded, fp32 and bf16 are the same bits")
def sharded(where: Where) -> str:
    rows = planted(where.size(20_000, 3000), 40, 50, noise=1.0)
    common: dict[str, Any] = {"num_clusters": 200, "max_iterations": 6, "init": "random"}
    wanted = _fit(where.device, rows, **common)
    for shared, products in ((True, "float32"), (False, "bfloat16"), (True, "bfloat16")):
        forced = Arithmetic(products=products)  # type: ignore[arg-type]
        found = _fit(where.device, rows, sharded=shared, arithmetic=forced, **common)
        same_bits(f"{products}, sharded: {shared}", found.centroids, wanted.centroids)
        assert found.history == wanted.history
    return f"{wanted.iterations} iterations"


@check("k-means: empty clusters, too few rows, rows that are not finite")
def hard_cases(where: Where) -> str:
    rows = np.repeat(planted(40, 16, 4), 5, axis=0)  # 40 distinct rows
    initial = torch.from_numpy(np.repeat(rows[:1], 8, axis=0).copy())
    found = _fit(where.device, rows, num_clusters=8, initial=initial)
    assert (found.counts > 0).all(), "an empty cluster was not restarted"
    _raises("distinct usable rows", lambda: _fit(where.device, rows, num_clusters=60))
    bad = rows.copy()
    bad[7, 3] = np.nan
    _raises("1 of 200 rows hold NaN", lambda: _fit(where.device, bad, num_clusters=4))
    return ""


def _raises(words: str, work: Any) -> None:
    try:
        work()
    except ValueError as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"no error that says {words!r}")


@check("k-means: in two levels")
def levels(where: Where) -> str:
    rows = planted(where.size(30_000, 3000), 24, 30, noise=0.05)
    found = {}
    for device in {CPU, where.device}:
        context = Context(device=device)
        result = fit_two_level(cut_blocks([rows], 500), 90, num_splits=6, seed=1, context=context)
        near = assign(cut_blocks([rows]), result.centroids, context=context)
        found[device] = float(near.distances.double().sum())
    cpu, here = found[CPU], found[where.device]
    assert abs(here - cpu) <= 0.02 * cpu, f"inertia {here:.4f}, on the CPU {cpu:.4f}"
    return f"inertia {here:.4f}, on the CPU {cpu:.4f}"


@check("assignment of all rows: what the CPU finds")
def assignment(where: Where) -> str:
    """The three nearest of each row, but for ties within rounding, and the distances."""
    rows, worst = planted(where.size(20_000, 1500), 48, 20), 0.0
    valid = np.random.default_rng(1).random(len(rows)) < 0.9
    for algorithm in ("spherical", "euclidean"):
        centroids = torch.from_numpy(planted(300, 48, 20, seed=2)) * (1.0 + 0.1 * random(300, 1))
        if algorithm == "spherical":
            centroids = torch.nn.functional.normalize(centroids, dim=1)
        near = [
            assign(
                cut_blocks([rows], 700),
                centroids,
                algorithm=algorithm,  # type: ignore[arg-type]
                labels_per_sample=3,
                valid=valid,
                context=Context(device=device),
            )
            for device in (where.device, CPU)
        ]
        worst = max(worst, _compare(*near))
    return f"distances off by {worst:.1g}"


def _compare(got: Assignment, wanted: Assignment) -> float:
    error = close("distances", got.distances, wanted.distances, 1e-5)
    differ = got.labels != wanted.labels
    assert float(differ.double().mean()) < 1e-3, "labels"
    off = (got.distances - wanted.distances)[differ].abs()
    assert not len(off) or float(off.max()) < 1e-5, "labels that are no tie"
    return error


@check("k nearest neighbours of the evaluation")
def neighbours(where: Where) -> str:
    """The device's similarities, sorted, are those that kNN finds on the CPU, ties too."""
    train = unit(where.size(20_000, 900), 64).numpy()
    train[100:110] = train[5]
    queries = np.concatenate([unit(50, 64, seed=1).numpy(), train[5:6]])
    near = features.similarity(queries, train, where.device)
    rows = np.argsort(-near, axis=1, kind="stable")[:, :10]
    values = np.take_along_axis(near, rows, axis=1)
    wanted_values, wanted_rows = nearest_to_few(queries, train, 10)
    assert np.array_equal(rows, wanted_rows)
    assert np.abs(values - wanted_values).max() <= 1e-7
    return ""


@check("searches by faiss: the same bits as on the CPU, whatever torch allows")
def searches(where: Where) -> str:
    """The nearest rows, and those within a radius: of some queries 40 rows, of others 3,000."""
    if (why := no_faiss(where)) is not None:
        raise Skip(why)
    import faiss

    torch.backends.cuda.matmul.allow_tf32 = True
    on_gpu = choose_index(faiss)
    assert on_gpu is not faiss.IndexFlatIP, "the CPU was chosen"
    bank = planted(40_000, 512, 300)
    bank[:3000] = planted(3000, 512, 1, noise=0.1)
    bank[100:110] = bank[5]
    queries = bank[::40]
    for k in (1, 10, 2000, 2100):
        got, wanted = (nearest(queries, bank, k, make=make) for make in (on_gpu, faiss.IndexFlatIP))
        for found, known in zip(got, wanted, strict=True):
            same_bits(f"k = {k}", torch.from_numpy(found), torch.from_numpy(known))
    for above in (0.3, 0.9):
        got, wanted = (
            _sorted(near_rows(queries, bank, above, make=make))
            for make in (on_gpu, faiss.IndexFlatIP)
        )
        same_bits(f"above {above}", torch.from_numpy(got), torch.from_numpy(wanted))
    return f"faiss {faiss.__version__}"


def _sorted(parts: Iterator[NearPairs]) -> Floats:
    """Pairs and their cosines [P, 3]."""
    found = np.concatenate([np.column_stack([part.rows, part.cosines]) for part in parts])
    return found[np.lexsort((found[:, 1], found[:, 0]))]
