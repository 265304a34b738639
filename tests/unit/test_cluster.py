"""The cluster verb: from embeddings on disk to cluster labels and pseudo labels."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import adjusted_mutual_info_score

from mclclip.clustering import centroids
from mclclip.config import Config, from_tree
from mclclip.data import arrays
from mclclip.data.labels import read_pseudo_labels
from mclclip.data.sample_index import SampleIndex
from mclclip.ranks.process_group import SINGLE, Context
from mclclip.run import artifacts
from mclclip.run.artifacts import Artifact, RunPaths, read_manifest
from mclclip.util.files import digest_array
from mclclip.verbs import cluster, index
from tests.tars import write_tar

SIZES = (40, 25, 35)  # samples per shard
BAD = (3, 77)
K = 4


def make_shards(folder: Path) -> None:
    for number, size in enumerate(SIZES):
        keys = [f"{number}{sample:03d}" for sample in range(size)]
        members = [(f"{key}.{extension}", b"bytes") for key in keys for extension in ("jpg", "txt")]
        write_tar(folder / f"{number:02d}.tar", members)


def truth(stage: int) -> np.ndarray:
    return np.random.default_rng(stage).integers(K, size=sum(SIZES))


def write_embeddings(config: Config, stage: int) -> None:
    """Tight clusters around K directions, zeros for the undecodable samples, as embed does."""
    layout = RunPaths.of(config)
    samples = SampleIndex.open(layout.index)
    rng = np.random.default_rng(100 + stage)
    rows = np.eye(12)[truth(stage)] + 0.05 * rng.normal(size=(len(samples), 12))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[list(BAD)] = 0.0
    artifact = Artifact(
        layout.embeddings(stage),
        kind="embeddings",
        config={},
        inputs={"index": samples.digest, "encoder": f"encoder {stage}"},
    ).compare(write=True)
    for number, shard in enumerate(samples.shards):
        part = rows[shard.start : shard.stop].astype(np.float16)
        np.save(artifact.directory / f"{number:05d}.npy", part)
    artifact.finish({"samples": len(samples), "shards": len(samples.shards)})


def make_run(run_dir: Path, folder: Path, stages: int = 1, **options: Any) -> dict[str, Any]:
    """Options of a run that is indexed and embedded, with two bad samples."""
    make_shards(folder)
    tree = {
        "run_dir": str(run_dir),
        "num_stages": 2,
        "data": {"sources": {"s": {"shards": f"{folder}/*.tar"}}, "index_workers": 1},
        "cluster": {"num_clusters": K, **options},
    }
    config = from_tree(tree)
    index.run(config, SINGLE).add_bad(dict.fromkeys(BAD, "broken"))
    for stage in range(stages):
        write_embeddings(config, stage)
    return tree


def contents(run_dir: Path) -> dict[str, Any]:
    """What cluster wrote; of manifests all but the time."""
    found: dict[str, Any] = {}
    for path in sorted(run_dir.glob("stage_*/*/*")):
        name = str(path.relative_to(run_dir))
        if "/embeddings/" in name:
            continue
        found[name] = path.read_bytes()
        if path.suffix == ".json":
            found[name] = json.loads(found[name]) | {"finished": "", "checksum": ""}
    return found


def change(tree: dict[str, Any], **options: Any) -> Config:
    return from_tree(tree | {"cluster": tree["cluster"] | options})


def test_clusters_and_pseudo_labels_of_two_stages(tmp_path: Path) -> None:
    tree = make_run(tmp_path / "run", tmp_path / "shards", stages=2)
    config = from_tree(tree)
    layout, good = RunPaths.of(config), np.setdiff1d(np.arange(sum(SIZES)), BAD)
    found = []
    with pytest.raises(FileNotFoundError, match="no finished clusters at .*stage_0"):
        cluster.run(config, SINGLE, stage=1)
    assert contents(tmp_path / "run") == {}
    for stage in (0, 1):
        directory = cluster.run(config, SINGLE, stage=stage)
        assert directory == layout.clusters(stage)
        labels = np.load(directory / "cluster_labels.npy")
        similarities = np.load(directory / "similarities.npy")
        centroids = np.load(directory / "centroids.npy")
        assert (labels.dtype, labels.shape) == (np.int32, (sum(SIZES), 1))
        assert (similarities.dtype, similarities.shape) == (np.float16, (sum(SIZES), 1))
        assert (centroids.dtype, centroids.shape) == (np.float32, (K, 12))
        assert np.flatnonzero(labels[:, 0] == -1).tolist() == list(BAD)
        assert adjusted_mutual_info_score(truth(stage)[good], labels[good, 0]) == pytest.approx(1)
        assert similarities[good].min() > 0.9
        assert (similarities[list(BAD)] == 0.0).all()
        found.append(labels[:, 0].astype(np.int64))
    samples = SampleIndex.open(layout.index)
    first, radices, _ = read_pseudo_labels(layout.pseudo_labels(1), samples)
    assert radices == (K,)
    assert np.array_equal(first, found[0])
    second, radices, digest = read_pseudo_labels(layout.pseudo_labels(2), samples)
    assert radices == (K, K)
    assert np.array_equal(second[good], found[0][good] * K + found[1][good])
    assert np.flatnonzero(second == -1).tolist() == list(BAD)
    assert digest == digest_array(second)
    assert np.load(layout.pseudo_labels(2) / "pseudo_labels.npy").shape == (sum(SIZES), 1)
    manifest = read_manifest(layout.clusters(1), "clusters")
    embeddings = read_manifest(layout.embeddings(1), "embeddings")
    assert manifest.inputs == {"index": samples.digest, "embeddings": embeddings.digest}
    counts, sizes = manifest.counts, np.bincount(found[1][good], minlength=K)
    assert counts["cluster_sizes"] == sizes.tolist()
    told = {"smallest": sizes.min(), "median": np.median(sizes), "largest": sizes.max()}
    assert counts["sizes"] == counts["sizes"] | told
    assert (counts["samples"], counts["bad_samples"]) == (sum(SIZES), len(BAD))
    ami = adjusted_mutual_info_score(found[0][good], found[1][good])
    assert counts["inertia"] > 0 and counts["ami"] == {"stage_0": pytest.approx(ami)}
    combined = read_manifest(layout.pseudo_labels(2), "pseudo_labels")
    assert combined.config == {"label_mode": "prefix"}
    assert combined.inputs["clusters_1"] == manifest.digest
    assert (combined.counts["radices"], combined.counts["num_outside"]) == ([K, K], len(BAD))


def test_last_mode_and_a_k_per_stage(tmp_path: Path) -> None:
    options = {"label_mode": "last", "num_clusters": [K, 3]}
    config = from_tree(make_run(tmp_path / "run", tmp_path / "shards", stages=2, **options))
    for stage in (0, 1):
        cluster.run(config, SINGLE, stage=stage)
    layout, samples = RunPaths.of(config), SampleIndex.open(tmp_path / "run" / "index")
    labels, radices, _ = read_pseudo_labels(layout.pseudo_labels(2), samples)
    assert radices == (3,)
    assert np.array_equal(labels, np.load(layout.clusters(1) / "cluster_labels.npy")[:, 0])


def interrupted_after(number: int, work: Callable[..., Any]) -> Callable[..., Any]:
    """``work``, whose call with this number is a keyboard interrupt."""
    left = [number]

    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return work(*args, **options)

    return call


def test_killed_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was on disk, the same command ends in the same files."""
    options: dict[str, Any] = {"labels_per_sample": 3}
    config = from_tree(make_run(tmp_path / "run", tmp_path / "shards", **options))
    calm = from_tree(make_run(tmp_path / "calm", tmp_path / "shards", **options))
    directory = cluster.run(calm, SINGLE, stage=0)
    wanted, directory = contents(tmp_path / "calm"), RunPaths.of(config).clusters(0)
    whole = {path.name for path in RunPaths.of(calm).clusters(0).glob("*.npy")}
    # At the end of each file, and at each of the three blocks of labels.
    places: list[tuple[Any, str, int]] = [(cluster, "write_npy_parts", n) for n in range(3)]
    places += [(arrays, "whole_file", n) for n in range(3)]
    places += [(centroids, "assign_block", 1)]
    places += [(cluster, "save_npy", 0), (cluster, "digest_array", 0), (cluster, "digest_array", 1)]
    for module, name, number in places:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, interrupted_after(number, getattr(module, name)))
            with pytest.raises(KeyboardInterrupt):
                cluster.run(config, SINGLE, stage=0)
        found = {path.name for path in directory.iterdir()}
        assert found <= whole | {"in_progress.json", "manifest.json"}
        for path in directory.glob("*.npy"):
            assert path.read_bytes() == wanted[f"stage_0/clusters/{path.name}"]
        finished = name == "save_npy" or (name, number) == ("digest_array", 1)
        assert artifacts.is_finished(directory) == finished
        shutil.rmtree(directory)
    cluster.run(config, SINGLE, stage=0)
    assert contents(tmp_path / "run") == wanted


# --- several labels, features of two towers, two levels ---


@pytest.mark.parametrize("algorithm", ["spherical", "euclidean"])
def test_the_nearest_several_with_their_similarities(tmp_path: Path, algorithm: str) -> None:
    tree = make_run(tmp_path / "run", tmp_path / "shards", labels_per_sample=3, algorithm=algorithm)
    config = from_tree(tree)
    directory = cluster.run(config, SINGLE, stage=0)
    labels = np.load(directory / "cluster_labels.npy")
    similarities = np.load(directory / "similarities.npy")
    centroids = np.load(directory / "centroids.npy").astype(np.float64)
    assert labels.shape == similarities.shape == (sum(SIZES), 3)
    files = sorted(RunPaths.of(config).embeddings(0).glob("*.npy"))
    rows = np.concatenate([np.load(path) for path in files]).astype(np.float64)
    good = np.setdiff1d(np.arange(len(rows)), BAD)
    if algorithm == "spherical":
        rows[good] /= np.linalg.norm(rows[good], axis=1, keepdims=True)
        wanted = rows @ centroids.T
    else:
        wanted = 1.0 - ((rows[:, None] - centroids[None]) ** 2).sum(axis=2) / 2.0
    assert np.array_equal(labels[good], (-wanted).argsort(axis=1)[good, :3])
    np.testing.assert_allclose(similarities[good], -np.sort(-wanted, axis=1)[good, :3], atol=1e-3)
    assert (labels[list(BAD)] == -1).all() and (similarities[list(BAD)] == 0.0).all()
    # The pseudo labels and the manifest know the nearest alone.
    layout = RunPaths.of(config)
    samples = SampleIndex.open(layout.index)
    first, radices, _ = read_pseudo_labels(layout.pseudo_labels(1), samples)
    assert radices == (K,) and np.array_equal(first, labels[:, 0])
    sizes = read_manifest(directory, "clusters").counts["cluster_sizes"]
    assert sizes == np.bincount(labels[good, 0], minlength=K).tolist()


def write_texts(config: Config, texts: np.ndarray) -> None:
    """Text embeddings of one caption per sample."""
    layout = RunPaths.of(config)
    samples = SampleIndex.open(layout.index)
    inputs = {"index": samples.digest, "encoder": "texts"}
    artifact = Artifact(
        layout.text_embeddings, kind="text_embeddings", config={}, inputs=inputs
    ).compare(write=True)
    for number, shard in enumerate(samples.shards):
        np.save(artifact.directory / f"{number:05d}.npy", texts[shard.start : shard.stop])
    artifact.finish({"samples": len(samples), "shards": len(samples.shards)})


def test_the_mean_of_image_and_text(tmp_path: Path) -> None:
    """Images tell four clusters apart and texts two halves of each: the mean, eight."""
    tree = make_run(tmp_path / "run", tmp_path / "shards", feature="mean", num_clusters=8)
    config, good = from_tree(tree), np.setdiff1d(np.arange(sum(SIZES)), BAD)
    with pytest.raises(FileNotFoundError, match="no finished text_embeddings.*embed --text"):
        cluster.run(config, SINGLE, stage=0)
    half = np.random.default_rng(9).integers(2, size=sum(SIZES))
    write_texts(config, np.eye(12)[6 + half].astype(np.float32))
    directory = cluster.run(config, SINGLE, stage=0)
    labels = np.load(directory / "cluster_labels.npy")[good, 0]
    joint = truth(0) * 2 + half
    assert adjusted_mutual_info_score(joint[good], labels) == pytest.approx(1.0)
    inputs = read_manifest(directory, "clusters").inputs
    texts = read_manifest(RunPaths.of(config).text_embeddings, "text_embeddings")
    assert inputs["text_embeddings"] == texts.digest
    with pytest.raises(ValueError, match="feature was 'mean', now 'image'"):
        cluster.run(change(tree, feature="image"), SINGLE, stage=0)


def test_two_levels(tmp_path: Path) -> None:
    options = {"method": "two_level", "num_splits": 3, "num_clusters": 11, "labels_per_sample": 2}
    tree = make_run(tmp_path / "run", tmp_path / "shards", **options)
    directory = cluster.run(from_tree(tree), SINGLE, stage=0)
    centroids = np.load(directory / "centroids.npy")
    labels = np.load(directory / "cluster_labels.npy")
    good = labels[:, 0] >= 0
    assert centroids.shape == (11, 12) and labels.shape == (sum(SIZES), 2)
    counts = read_manifest(directory, "clusters").counts
    assert counts["cluster_sizes"] == np.bincount(labels[good, 0], minlength=11).tolist()
    # Clusters split the planted ones, and never mix them.
    for number in np.unique(labels[good, 0]):
        assert len(set(truth(0)[good & (labels[:, 0] == number)])) == 1
    with pytest.raises(ValueError, match="method was 'two_level', now 'flat'"):
        cluster.run(change(tree, method="flat"), SINGLE, stage=0)


def test_a_training_without_groups_gets_no_pseudo_labels(tmp_path: Path) -> None:
    tree = make_run(tmp_path / "run", tmp_path / "shards")
    config = from_tree(tree, ["train.objective={kind: mlcd, labels_per_sample: 1, sample_rate: 1}"])
    assert config.train.objective.reads.clusters == 1
    cluster.run(config, SINGLE, stage=0)
    assert not RunPaths.of(config).pseudo_labels(1).exists()


# --- mistakes: one line, nothing half-written ---


def test_too_many_clusters_leave_nothing_behind(tmp_path: Path) -> None:
    tree = make_run(tmp_path / "run", tmp_path / "shards")
    with pytest.raises(ValueError, match="labels_per_sample=5 is more than cluster.num_clusters=4"):
        change(tree, labels_per_sample=5)
    with pytest.raises(ValueError, match="num_splits=5 is more than cluster.num_clusters=4"):
        change(tree, method="two_level", num_splits=5)
    with pytest.raises(ValueError, match="num_clusters is 99, but there are 98 usable rows"):
        cluster.run(change(tree, num_clusters=99), SINGLE, stage=0)
    assert contents(tmp_path / "run") == {}
    cluster.run(from_tree(tree), SINGLE, stage=0)


def test_a_part_that_cannot_be_made_is_not_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for the part: a rank that met them elsewhere would wait for ever."""

    def parts() -> Iterator[int]:
        yield 1
        raise OSError("no such block")

    def never(work: Any) -> None:
        raise AssertionError("another exchange was begun")

    monkeypatch.setattr("mclclip.ranks.collectives.raise_on_every_rank", never)
    for rank in (0, 1):
        with pytest.raises(OSError, match="no such block"):
            cluster.pass_parts_to_main(parts(), lambda every: sum(every), Context(rank, 2))


def test_rows_that_may_not_be_read_are_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((2, 2)))
    assert arrays.open_npy(tmp_path / "rows.npy", "embed").shape == (2, 2)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(np, "load", refuse)
    with pytest.raises(PermissionError):
        arrays.open_npy(tmp_path / "rows.npy", "embed")
