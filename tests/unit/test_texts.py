"""A run on rows of text embeddings: which texts it reads, how it trains, what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip import config, method
from mclclip.api import Run
from mclclip.checkpoint import step_files
from mclclip.config import Config
from mclclip.data.bytes import Bytes
from mclclip.data.sample_index import SampleIndex
from mclclip.eval import results
from mclclip.eval.protocols import EvalConfig
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import index, texts, train
from tests import tiny

WIDTH, STEPS = 6, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data"))


def write_rows(root: Path) -> Path:
    """Shards, minimal pairs, and ``rows.npy`` with a drawn row for every text that is read."""
    folder = tiny.make_data(root, num_samples=96)
    found = config.from_tree(tiny.tree(folder / "run", folder))
    index.run(found, SINGLE)
    texts.run(found, SINGLE, missing=folder / "rows.jsonl")
    rows = np.random.default_rng(0).normal(size=(len(tiny.rows(folder / "rows.jsonl")), WIDTH))
    np.save(folder / "rows.npy", rows.astype(np.float32))
    return folder


def options(data: Path, run_dir: Path, *overrides: str, rows: Path | None = None) -> Config:
    tree = tiny.tree(run_dir, data)
    tree["model"]["text_rows"] = [str(rows or data / "rows.npy")]
    tree["num_stages"] = 1
    for name in ("base", "train"):
        tree[name] |= {"steps": STEPS, "log_every": 1}
    return config.from_tree(tree, overrides)


def without(data: Path, folder: Path, count: int) -> Path:
    """The rows without those of the captions of the first ``count`` samples."""
    lines, rows = tiny.rows(data / "rows.jsonl"), np.load(data / "rows.npy")
    captions = tiny.rows(data / "captions.jsonl")[:count]
    left_out = {caption["text"] for caption in captions}
    assert len(left_out) == count
    kept = [number for number, line in enumerate(lines) if line["text"] not in left_out]
    text = "".join(json.dumps(lines[number]) + "\n" for number in kept)
    (folder / "some.jsonl").write_text(text)
    np.save(folder / "some.npy", rows[kept])
    return folder / "some.npy"


def test_the_texts_without_a_row_are_listed(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"model\.text_rows.*--missing"):
        texts.run(config.from_tree(tiny.tree(tmp_path / "run", data)), SINGLE)
    listed = [line["text"] for line in tiny.rows(data / "rows.jsonl")]
    assert len({*listed}) == len(listed) > 20
    pairs = tmp_path / "pairs"
    shutil.copytree(data / "run" / "index", tmp_path / "run" / "index")
    some = tmp_path / "some.npy"
    np.save(some, np.load(data / "rows.npy")[3:])
    lines = (data / "rows.jsonl").read_text().splitlines(keepends=True)
    some.with_suffix(".jsonl").write_text("".join(lines[3:]))
    suite = (
        "eval.suite.pairs.options.near_tie=1e-3",
        "eval.suite.gone={kind: mmvp, path: none_here}",
    )
    texts.run(options(data, tmp_path / "run", *suite, rows=some), SINGLE, missing=pairs)
    assert [line["text"] for line in tiny.rows(pairs)] == listed[:3]
    assert "gone" in caplog.text


def test_a_run_trains_embeds_joins_and_evaluates_on_rows(data: Path, tmp_path: Path) -> None:
    """With the projection locked in stage 1, whose text embeddings are stored then."""
    found = options(data, tmp_path / "run", "train.lock.text=false", "cluster.feature=mean")
    method.run(found, SINGLE)
    rows = results.read(tmp_path / "run" / "results.jsonl")
    assert {row.model for row in rows} == {*found.encoders}
    stored = np.load(tmp_path / "run/stage_0/text_embeddings/00000.npy")
    assert np.linalg.norm(stored, axis=1) == pytest.approx(1, abs=1e-5)
    states = [_state(tmp_path / "run", stage) for stage in (0, 1)]
    name = "model.clip.text.projection.weight"
    assert torch.equal(states[0][name], states[1][name])
    before = tiny.digests(tmp_path / "run")
    method.run(found, SINGLE)
    assert tiny.digests(tmp_path / "run") == before


def _state(run_dir: Path, stage: int) -> dict[str, Any]:
    return step_files.load_model_state(run_dir / f"stage_{stage}/train/checkpoints", STEPS)


def test_a_sample_without_a_row_is_replaced_and_many_are_refused(
    data: Path, tmp_path: Path
) -> None:
    captions = {line["text"]: None for line in tiny.rows(data / "rows.jsonl")}
    (data / "captions.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in captions)
    )
    found = options(data, tmp_path / "run", rows=without(data, tmp_path, 1))
    index.run(found, SINGLE)
    with pytest.raises(ValueError, match=r"text_rows: .*max_bad_fraction=0\.01") as caught:
        texts.run(found, SINGLE)
    assert "\n" not in str(caught.value) and "--missing" in str(caught.value)
    assert not (tmp_path / "run/stage_0").exists()
    found = options(data, tmp_path / "run", "data.max_bad_fraction=0.1", rows=tmp_path / "some.npy")
    train.run(found, SINGLE, stage=0)
    rows = tiny.rows(tmp_path / "run/stage_0/train/metrics.jsonl")
    assert rows[-1]["bad_samples"] == 1


def test_other_rows_make_another_training(data: Path, tmp_path: Path) -> None:
    found = options(data, tmp_path / "run")
    index.run(found, SINGLE)
    with pytest.raises(FileNotFoundError, match="run 'mclclip texts'"):
        train.run(found, SINGLE, stage=0)
    texts.run(found, SINGLE)
    train.run(found, SINGLE, stage=0)
    shutil.copy(data / "rows.jsonl", tmp_path / "other.jsonl")
    np.save(tmp_path / "other.npy", 1 + np.load(data / "rows.npy"))
    changed = options(data, tmp_path / "run", rows=tmp_path / "other.npy")
    with pytest.raises(ValueError, match="made from other data"):
        texts.run(changed, SINGLE)
    shutil.rmtree(tmp_path / "run" / "text_rows")
    texts.run(changed, SINGLE)
    with pytest.raises(ValueError, match="other data: .*text_rows"):
        train.run(changed, SINGLE, stage=0)


def test_rows_of_benchmarks_may_be_added_after_the_training(data: Path, tmp_path: Path) -> None:
    """They are no part of its identity; a text without a row stops the run before it trains."""
    lines, rows = tiny.rows(data / "rows.jsonl"), np.load(data / "rows.npy")
    index.run(options(data, tmp_path / "run"), SINGLE)
    captions = {
        text for texts_of_one in _captions(options(data, tmp_path / "run")) for text in texts_of_one
    }
    for name, wanted in (("captions", True), ("prompts", False)):
        some = [n for n, line in enumerate(lines) if (line["text"] in captions) == wanted]
        assert some
        np.save(tmp_path / f"{name}.npy", rows[some])
        text = "".join(json.dumps(lines[n]) + "\n" for n in some)
        (tmp_path / f"{name}.jsonl").write_text(text)
    found = options(data, tmp_path / "run", "num_stages=0", rows=tmp_path / "captions.npy")
    with pytest.raises(ValueError, match="texts have no row.*--missing"):
        method.run(found, SINGLE)
    assert not (tmp_path / "run/stage_0").exists()
    method.run(replace(found, eval=EvalConfig()), SINGLE)
    before = tiny.digests(tmp_path / "run")
    further = options(
        data, tmp_path / "run", "num_stages=0", f"eval.text_rows=[{tmp_path}/prompts.npy]",
        rows=tmp_path / "captions.npy",
    )  # fmt: skip
    method.run(further, SINGLE)
    assert {row.model for row in results.read(tmp_path / "run/results.jsonl")} == {"stage_0"}
    assert tiny.digests(tmp_path / "run") == before
    encoder = Run.open(tmp_path / "run").encoder("stage_0")
    assert encoder.encode_text([line["text"] for line in lines]).shape == (len(lines), 8)


def _captions(found: Config) -> list[list[str]]:
    samples = SampleIndex.open(Path(found.run_dir) / "index")
    return Bytes(samples, found.data).captions_of([*range(len(samples))])
