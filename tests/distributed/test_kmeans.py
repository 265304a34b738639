"""k-means over real gloo processes gives the single process's bits, for any number of ranks."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.clustering import centroids, kmeans
from mclclip.clustering.arithmetic import CHOSEN, Arithmetic
from mclclip.clustering.centroids import Tally
from mclclip.config import from_tree
from mclclip.data.row_store import RowBlocks, RowStore
from mclclip.verbs import cluster as verb
from tests.distributed.conftest import here
from tests.matrix import SOAK, fuller_in_soak, kept
from tests.nearest_checks import assign, assign_rows, fit, fit_two_level
from tests.unit.test_cluster import BAD, contents, make_run
from tests.unit.test_cluster import SIZES as SAMPLES

Ranks = Callable[..., list[Any]]
BLOCK = 64

SIZES = (150, 64, 1, 300, 90)  # rows per shard: neither blocks nor ranks divide them


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Overlapping clusters on the sphere in float16, with a few rows that are not numbers."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=(7, 24))
    folder = tmp_path_factory.mktemp("embeddings")
    for number, size in enumerate(SIZES):
        rows = means[rng.integers(7, size=size)] + 1.5 * rng.normal(size=(size, 24))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        np.save(folder / f"{number:05d}.npy", rows.astype(np.float16))
    return sorted(folder.glob("*.npy"))


def mask() -> np.ndarray:
    valid = np.ones(sum(SIZES), dtype=bool)
    valid[[0, 149, 214, 400, 604]] = False
    return valid


def cluster(shards: list[Path], options: dict[str, Any]) -> dict[str, Any]:
    """Everything that k-means and the assignment return, as this rank sees it."""
    blocks = RowBlocks(RowStore(shards), BLOCK)
    algorithm = options["algorithm"]
    common: dict[str, Any] = {"valid": mask(), "context": here()}
    common["arithmetic"] = options.get("arithmetic", CHOSEN)
    found = fit(blocks, seed=3, init_samples=200, **common | options)
    return everything(found, blocks, {"algorithm": algorithm, "labels_per_sample": 3, **common})


def everything(
    found: kmeans.Clustering, blocks: RowBlocks, options: dict[str, Any]
) -> dict[str, Any]:
    near = assign(blocks, found.centroids, held=found.held, **options)
    tally = Tally(found.num_clusters)
    seen = tally.of(assign_rows(blocks, found.centroids, held=found.held, **options))
    assert all(torch.equal(part.labels, near.labels[some]) for some, part in seen)
    centroids = torch.cat(list(kmeans.each_pass(found, here())))
    assert torch.equal(centroids[found.held.start : found.held.stop], found.centroids)
    tensors = {"labels": near.labels, "distances": near.distances, "centroids": centroids}
    tensors["counts"] = tally.counts
    numbers: dict[str, Any] = {"restart": found.restart, "inertia": tally.inertia}
    if isinstance(found, kmeans.KMeans):
        assert torch.equal(found.counts, tally.counts)
        numbers |= {"history": found.history, "inertia of fit": found.inertia}
    return tensors | numbers


CASES: dict[str, dict[str, Any]] = {
    "several starts": {"num_clusters": 7, "restarts": 3},
    # Three clusters start out empty, so that rows are looked for over the ranks.
    "empty": {"num_clusters": 6, "initial": torch.eye(24)[[0, 0, 1, 1, 2, 2]]},
    # More than a pass for every rank, not divided by them, and a random start.
    "many, sharded": {"num_clusters": 101, "init": "random", "restarts": 2, "sharded": True},
    # 50 clusters start out empty, spread over the ranks.
    "empty, sharded": {
        "num_clusters": 60,
        "initial": torch.eye(24)[torch.arange(60) % 10],
        "sharded": True,
    },
    # As a GPU computes.
    "many, euclidean, sharded": {
        "algorithm": "euclidean",
        "num_clusters": 67,
        "arithmetic": Arithmetic(
            products="float32",
            scores="blocks",
            additions="index_add",
            tile="large",
            threads="per_operation",
        ),
        "sharded": True,
    },
    # Ranks without a centroid.
    "few, euclidean, sharded": {"algorithm": "euclidean", "num_clusters": 3, "sharded": True},
}


@fuller_in_soak
@pytest.mark.parametrize("case", kept([*CASES], 0, 1, 2))
def test_equal_bit_for_bit_for_any_number_of_ranks(
    ranks: Ranks, shards: list[Path], case: str
) -> None:
    options = {"algorithm": "spherical", "max_iterations": 5} | CASES[case]
    wanted = cluster(shards, options | {"sharded": False})
    assert int((wanted["labels"][:, 0] >= 0).sum()) == mask().sum()
    for world_size in (4, 3, 2, 1) if SOAK else (3,):
        for rank, found in enumerate(ranks(world_size, cluster, shards, options)):
            compare(found, wanted, f"on rank {rank} of {world_size}")


def compare(found: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Equal bits."""
    for name, value in wanted.items():
        same = (
            torch.equal(value, found[name])
            if isinstance(value, torch.Tensor)
            else value == found[name]
        )
        assert same, f"{name} {where}"


def two_levels(shards: list[Path], options: dict[str, Any]) -> dict[str, Any]:
    blocks = RowBlocks(RowStore(shards), BLOCK)
    common: dict[str, Any] = {"valid": mask(), "context": here()}
    found = fit_two_level(blocks, seed=5, **common, **options)
    common["arithmetic"] = options["arithmetic"]
    return everything(found, blocks, {"labels_per_sample": 4, **common})


def test_two_levels_are_equal_for_any_number_of_ranks(ranks: Ranks, shards: list[Path]) -> None:
    options: dict[str, Any] = {"num_clusters": 43, "num_splits": 6, "max_iterations": 5}
    options["arithmetic"] = Arithmetic(products="float32", scores="blocks")
    wanted = two_levels(shards, options)
    assert wanted["counts"].sum() == mask().sum()
    for rank, found in enumerate(ranks(3, two_levels, shards, options | {"sharded": True})):
        compare(found, wanted, f"on rank {rank} of 3")


def test_more_ranks_than_blocks(ranks: Ranks, shards: list[Path]) -> None:
    options = {"algorithm": "euclidean", "num_clusters": 2}
    wanted = tiny_cluster(shards[1], options)
    for found in ranks(3, tiny_cluster, shards[1], options):
        assert torch.equal(found, wanted)


def tiny_cluster(shard: Path, options: dict[str, Any]) -> torch.Tensor:
    return fit(RowBlocks(RowStore([shard]), BLOCK), context=here(), **options).centroids


def run_the_verb(options: dict[str, Any]) -> str:
    return str(verb.run(from_tree(options), here(), stage=0))


def test_the_verb_writes_sharded_centroids(ranks: Ranks, tmp_path: Path) -> None:
    options = make_run(tmp_path / "whole", tmp_path / "shards", num_clusters=30, init="random")
    run_the_verb(options)
    wanted = contents(tmp_path / "whole")
    assert np.load(tmp_path / "whole/stage_0/clusters/centroids.npy").shape == (30, 12)
    options = make_run(tmp_path / "sharded", tmp_path / "shards", num_clusters=30, init="random")
    ranks(2, run_the_verb_sharded, options)
    assert contents(tmp_path / "sharded") == wanted


def run_the_verb_sharded(options: dict[str, Any]) -> None:
    """With a rule that shards even the smallest centroids."""
    before = centroids.SHARDED_FROM
    centroids.SHARDED_FROM = 1
    assert len(centroids.held_by(here().rank, here().world_size, 30)) < 30
    try:
        run_the_verb(options)
    finally:
        centroids.SHARDED_FROM = before


def labels_and_similarities(options: dict[str, Any]) -> Path:
    """With small blocks, of which the last round has none for some ranks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(verb, "RowBlocks", functools.partial(RowBlocks, rows_per_block=8))
        return verb.run(from_tree(options), here(), stage=0)


@pytest.mark.parametrize(
    ("algorithm", "method"), kept([("spherical", "two_level"), ("euclidean", "flat")], 0)
)
def test_the_files_are_those_of_the_whole_assignment(
    ranks: Ranks, tmp_path: Path, algorithm: Any, method: str
) -> None:
    """In their final types, for any number of ranks, with rows that take no part."""
    options: dict[str, Any] = {"labels_per_sample": 3, "algorithm": algorithm, "method": method}
    written = []
    for world_size in (1, 3):
        tree = make_run(tmp_path / str(world_size), tmp_path / "shards", **options)
        (directory,) = set(ranks(world_size, labels_and_similarities, tree))
        written.append(contents(tmp_path / str(world_size)))
    assert written[1] == written[0]
    embeddings = sorted((tmp_path / "1/stage_0/embeddings").glob("*.npy"))
    near = assign(
        RowBlocks(RowStore(embeddings)),
        torch.from_numpy(np.load(directory / "centroids.npy")),
        algorithm=algorithm,
        labels_per_sample=3,
        valid=~np.isin(np.arange(sum(SAMPLES)), BAD),
    )
    labels = np.load(directory / "cluster_labels.npy")
    similarities = np.load(directory / "similarities.npy")
    assert labels.dtype == np.int32 and np.array_equal(labels, near.labels.numpy())
    wanted = 1.0 - near.distances * (1.0 if algorithm == "spherical" else 0.5)
    wanted[list(BAD)] = 0.0
    assert similarities.dtype == np.float16
    assert np.array_equal(similarities, wanted.half().numpy())
    sizes = np.bincount(labels[labels[:, 0] >= 0, 0], minlength=4).tolist()
    counts = written[0]["stage_0/clusters/manifest.json"]["counts"]
    assert counts["cluster_sizes"] == sizes
    assert counts["inertia"] == pytest.approx(float(near.distances[:, 0].sum()), rel=1e-5)


# --- mistakes are raised on all ranks, in the same words ---


def lines_of(shards: list[Path]) -> list[str]:
    blocks: list[Any] = [np.array(block) for block in RowBlocks(RowStore(shards), BLOCK)]
    bad = [blocks[0].copy(), *blocks[1:]]
    bad[0][7, 3] = np.nan  # only one rank reads this block
    lines = []
    for given, num_clusters in ((bad, 5), (blocks, 606)):
        with pytest.raises(ValueError) as caught:
            fit(given, num_clusters, context=here())
        lines.append(str(caught.value))
    return lines


def test_every_rank_says_the_same(ranks: Ranks, shards: list[Path]) -> None:
    first, second = ranks(2, lines_of, shards)
    assert first == second
    assert first[0].startswith("1 of 605 rows hold NaN or infinite values")
    assert first[1].startswith("num_clusters is 606, but there are 605 usable rows")
