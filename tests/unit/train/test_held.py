"""A small real training that reads what stage 0 stored: it is held near it, or meets edits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from mclclip.config import Config
from mclclip.data.bytes import Bytes, RawSample
from mclclip.data.extras import BaseFeatures
from mclclip.data.sample_index import SampleIndex
from mclclip.models.loading import load_towers
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import RunPaths, read_manifest
from mclclip.util.caption_rules import all_edits
from mclclip.verbs import cluster, embed, export, index, train
from tests import tiny
from tests.unit.train.conftest import cut_at

TERM = "{kind: preserve%s, weight: 0.5}"
SUM = "train.objective=[{kind: info_nce}%s]"


STORED_ROWS = {f"base_{what}": (None, what) for what in ("image_features", "text_features")}


STORED = SUM % f", {TERM % ''}, {TERM % ', what: features'}"


def options(run_dir: Path, data: Path, *more: str) -> Config:
    """A given encoder and one stage with a trained text tower."""
    return tiny.make_config(
        run_dir, data, "base=null", "num_stages=1", "train.steps=4", "train.log_every=1",
        "train.plan.policy=wrap", f"model.name={json.dumps(tiny.ONE_BLOCK)}",
        "train.lock.image_blocks=1", "train.checkpoint.every=4", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("held"), num_samples=60)


@pytest.fixture(scope="module")
def labelled(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run up to its labels, with text embeddings because a term wants them; tests copy it."""
    run_dir = tmp_path_factory.mktemp("labelled") / "run"
    config = options(run_dir, data, STORED)
    index.run(config, SINGLE)
    export.stage(config, SINGLE, stage=0)
    embed.run(config, SINGLE, stage=0)
    cluster.run(config, SINGLE, stage=0)
    assert (run_dir / "stage_0/text_embeddings/manifest.json").exists()
    return run_dir


def losses(config: Config) -> list[dict[str, float]]:
    """The rows of stage 1's training."""
    return tiny.rows(train.run(config, SINGLE, stage=1) / "metrics.jsonl")


def test_a_sample_brings_the_rows_of_its_picture_and_its_caption(
    labelled: Path, data: Path
) -> None:
    layout, opened = RunPaths(labelled), SampleIndex.open(labelled / "index")
    extra = BaseFeatures(layout, opened, STORED_ROWS)
    images, texts = (
        np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))])
        for folder in (layout.embeddings(0), layout.text_embeddings)
    )
    assert len(images) == len(texts) == 60 and extra.reads_text is False
    for sample in (0, 47, 48, 59):  # of two shards
        found = extra(RawSample(sample, b"", b""), (), 0, 0)
        for name, rows in (("image", images), ("text", texts)):
            row = found[f"base_{name}_features"]
            assert row.dtype == torch.float32 and float(row.norm()) == pytest.approx(1.0, abs=1e-6)
            np.testing.assert_allclose(row, rows[sample], atol=1e-6)
    assert BaseFeatures(layout, opened, {})(RawSample(0, b"", b""), (), 0, 0) == {}


def test_stored_features_hold_a_training(labelled: Path, data: Path, tmp_path: Path) -> None:
    """The parts are recorded, its inputs are the embeddings, and it stays nearer to the base."""
    cosines = {}
    for weight in ("0.000001", "100.0"):
        run_dir = tmp_path / weight
        shutil.copytree(labelled, run_dir)
        term = TERM.replace("0.5", weight) % ", what: features"
        config = options(run_dir, data, SUM % f", {term}")
        rows = losses(config)
        cosines[weight] = rows[-1]["1_preserve/teacher_cosine"]
        inputs = read_manifest(run_dir / "stage_1/train", "train").inputs
        assert {"embeddings", "text_embeddings"} <= inputs.keys()
    assert cosines["100.0"] > cosines["0.000001"]


# More than there are of any caption, so that every draw has the same ones.
_HARD = "{rules: [colour], per_caption: 16}"
EDITS = ["train.lock.text=false", f"train.objective={{kind: info_nce, hard_captions: {_HARD}}}"]


def test_a_frozen_text_tower_embeds_the_edits_of_captions_once(
    labelled: Path, data: Path, tmp_path: Path
) -> None:
    """Whose training, cut off and resumed, is that of a tower that runs."""
    shutil.copytree(labelled, tmp_path / "run")
    config = options(tmp_path / "run", data, *EDITS, "train.checkpoint.every=2")
    with pytest.raises(FileNotFoundError, match="run 'mclclip embed --text' first"):
        losses(config)
    embed.run(config, SINGLE, stage=0)
    layout = RunPaths.of(config)
    (folder,) = (tmp_path / "run/stage_0/edited_texts").iterdir()
    stored = np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))])
    model, samples = load_towers(layout.export(0)).eval(), SampleIndex.open(layout.index)
    for sample_id, (caption,) in enumerate(Bytes(samples, config.data).captions_of(range(60))):
        with torch.inference_mode():
            texts = [edit.text for edit in all_edits("colour", caption)]
            wanted = np.zeros((16, model.embed_dim))
            if texts:
                wanted[: len(texts)] = model.encode_text(model.tokenizer(texts), normalize=True)
        rows = stored[sample_id].reshape(16, -1)
        order = (np.lexsort(rows.T), np.lexsort(wanted.T))  # the draw's order is its own
        np.testing.assert_allclose(rows[order[0]], wanted[order[1]], atol=2e-6)
    with cut_at(3):  # the last checkpoint is that of two steps
        losses(config)
    read = losses(config)
    assert "edited_texts" in read_manifest(layout.train(1), "train").inputs
    shutil.rmtree(layout.train(1))
    run = losses(options(tmp_path / "run", data, *EDITS, "train.cached_text=false"))
    assert [row["rows_with_edits"] for row in read] == [row["rows_with_edits"] for row in run]
    assert read[0]["rows_with_edits"] > 20
    np.testing.assert_allclose([r["loss"] for r in read], [r["loss"] for r in run], rtol=1e-5)


def test_edits_are_not_stored_beside_a_trained_text_tower(
    labelled: Path, data: Path, tmp_path: Path
) -> None:
    """What is preserved is stored, and the tower reads the edits themselves."""
    shutil.copytree(labelled, tmp_path / "run")
    hard = SUM.replace("kind: info_nce", f"kind: info_nce, hard_captions: {_HARD}")
    config = options(tmp_path / "run", data, hard % f", {TERM % ''}")
    embed.run(config, SINGLE, stage=0)
    assert losses(config)[0]["0_info_nce/rows_with_edits"] > 0
    inputs = read_manifest(tmp_path / "run/stage_1/train", "train").inputs
    assert {"text_embeddings"} == {name for name in inputs if "text" in name}


def test_missing_embeddings_are_one_line_for_a_term_that_reads_them_and_no_matter_without(
    labelled: Path, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(labelled, run_dir)
    for folder in ("embeddings", "text_embeddings"):
        (run_dir / "stage_0" / folder).rename(run_dir / "away")
        with pytest.raises((FileNotFoundError, ValueError), match="run 'mclclip embed"):
            losses(options(run_dir, data, STORED))
        assert not (run_dir / "stage_1/train").exists()
        (run_dir / "away").rename(run_dir / "stage_0" / folder)
    losses(options(run_dir, data, "train.steps=1"))
    inputs = read_manifest(run_dir / "stage_1/train", "train").inputs
    assert not {"embeddings", "text_embeddings"} & inputs.keys()
