"""Shards whose images have no captions, or some of whose have none: who trains on what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from mclclip.checkpoint import step_files
from mclclip.data.datasets.patterns import draw_samples
from mclclip.data.groups import GroupedIndex
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.models.loading import load_towers
from mclclip.run import artifacts
from tests import tiny
from tests.e2e.conftest import RecordBatches, Shell

NUM_SAMPLES = 80
OPTIONS = ("num_stages=1", "base=null", "train.steps=3", "train.global_batch=8", "eval.suite={}",
           "export.concat=[]", "export.soup=false")  # fmt: skip
MLCD = (
    "train.objective={kind: mlcd, labels_per_sample: 2, sample_rate: 0.5}",
    "cluster.num_clusters=9",
    "cluster.labels_per_sample=2",
)
FIGURES = {
    "positive_loss", "negative_loss", "positive_cosine", "max_negative_cosine", "saturated_share",
    "distinct_positives", "conflicts",
}  # fmt: skip


def config_of(folder: Path, bare: Callable[[int], bool]) -> Path:
    """A configuration over rendered shards in which the samples that are ``bare`` lack captions."""

    def samples() -> Iterator[PackedSample]:
        for number, sample in enumerate(draw_samples(NUM_SAMPLES, 0)):
            yield dataclasses.replace(sample, captions=[]) if bare(number) else sample

    write_shards(samples(), folder / "shards", 30)
    return tiny.write_config(folder / "config.yaml", folder / "unused", folder, *OPTIONS)


def test_mlcd_trains_on_images_without_captions_and_what_reads_them_is_refused(
    shell: Shell, tmp_path: Path
) -> None:
    run_dir, recorded = tmp_path / "run", RecordBatches(tmp_path / "batches")
    given = ["--config", config_of(tmp_path / "data", lambda _: True), f"run_dir={run_dir}"]
    refused = {
        "train.objective.kind=info_nce": (),
        "base.objective.kind=info_nce": ("base={}", *MLCD),
        "cluster.feature=mean": ("cluster.feature=mean", *MLCD),
    }
    words = "reads captions, and none of the 80 samples of the index at "
    for reader, options in refused.items():
        assert shell.refused("run", *given, *options).startswith(f"mclclip: {reader} {words}")
        assert not [*run_dir.glob("stage*")]
    shell.ok("run", *given, *MLCD, inside=recorded)
    counts = artifacts.read_manifest(run_dir / "index", "index").counts
    assert (counts["samples"], counts["captions"], counts["without_caption"]) == (80, 0, 80)
    assert (run_dir / "stage_1/export/open_clip_model.safetensors").exists()
    counts = artifacts.read_manifest(run_dir / "stage_1/train", "train").counts
    assert "without_caption" not in counts
    assert recorded.sample_ids().shape == (3, 8) and len(set(recorded.sample_ids().flat)) == 24
    # Of the losses each row has its figures; centers move from the centroids, and no text tower.
    assert FIGURES <= tiny.rows(run_dir / "stage_1/train/metrics.jsonl")[0].keys()
    state = step_files.load_model_state(run_dir / "stage_1/train/checkpoints", 3, "class_centers")
    moved = state["rows"] - torch.from_numpy(np.load(run_dir / "stage_0/clusters/centroids.npy"))
    assert moved.shape == (9, 8) and moved.abs().max() > 0 and int(state["steps"].max()) == 3
    before, after = (
        load_towers(run_dir / stage / "export").clip.state_dict()
        for stage in ("stage_0", "stage_1")
    )
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {n for n in before if not n.startswith("visual.")} <= same and "visual.proj" not in same
    assert "leave it out" in shell.refused(
        "train", "--stage", 1, "--variant", "ungrouped", *given, *MLCD
    )
    assert not (run_dir / "controls").exists()
    # The verbs by themselves refuse it too.
    for arguments in (("embed", "--stage", 0, "--text"), ("train", "--stage", 1, "--force")):
        assert words in shell.refused(*arguments, *given)
    assert not (run_dir / "stage_0/text_embeddings").exists()


def test_samples_without_captions_are_left_out_of_what_reads_them(
    shell: Shell, tmp_path: Path
) -> None:
    """A whole shard has no captions, and every fourth sample of the others."""
    some = config_of(tmp_path / "data", lambda n: 30 <= n < 60 or n % 4 == 1)
    run_dir, recorded = tmp_path / "run", RecordBatches(tmp_path / "batches")
    options = ("train.lock.text=false", "controls=[random_groups]", "cluster.feature=mean")
    given = ("--config", some, f"run_dir={run_dir}", *options)
    finished = shell.ok("run", *given, inside=recorded)
    index = SampleIndex.open(run_dir / "index")
    bare = index.without_caption("this test")
    assert (len(index), len(bare)) == (80, 43)
    texts = run_dir / "stage_0/text_embeddings"
    counts = artifacts.read_manifest(texts, "text_embeddings").counts
    assert (counts["captions"], counts["without_caption"]) == (37, 43)
    assert [len(np.load(texts / f"0000{shard}.npy")) for shard in range(3)] == [22, 0, 15]
    labels = np.load(run_dir / "stage_0/clusters/cluster_labels.npy")
    assert (labels >= 0).all()  # their images are clustered all the same
    clusters = artifacts.read_manifest(run_dir / "stage_0/clusters", "clusters")
    assert clusters.counts["without_caption"] == 43
    groups = []
    for folder in ("", "controls/random_groups/"):
        train = run_dir / folder / "stage_1/train"
        assert artifacts.read_manifest(train, "train").counts["without_caption"] == 43
        groups.append(GroupedIndex.open(train / "grouped_index"))
        in_plan = np.sort(groups[-1].sample_ids)
        assert in_plan.tolist() == np.flatnonzero(index.num_captions > 0).tolist()
    assert groups[0].group_starts.tolist() == groups[1].group_starts.tolist()
    assert not set(recorded.sample_ids().flat) & set(bare.tolist())
    assert finished.stderr.count("stage 1: 43 of 80 samples have no caption and are left out") == 2
    refused = shell.refused("run", "--config", some, f"run_dir={run_dir}", "train.global_batch=64")
    assert refused == (
        "mclclip: train.global_batch=64 is more than the index's 37 samples that have what is "
        "read: lower it, or set train.plan.policy=wrap"
    )
