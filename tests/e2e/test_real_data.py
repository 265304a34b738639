"""Real photographs through the command line: UC Merced aerial images, and a shard of CC12M.

The data lie beside the checkout and are read from there; without them these tests are skipped.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import mclclip
from mclclip import config
from mclclip.data.decode import decode_image
from mclclip.data.options import DataConfig
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import TarDataset
from mclclip.eval import results
from mclclip.ranks.process_group import SINGLE
from mclclip.run import artifacts
from mclclip.verbs import index
from tests import tiny
from tests.e2e.conftest import Shell

pytestmark = pytest.mark.real_data

RECIPE = tiny.ROOT / "launch" / "recipes" / "ucm.yaml"
FEW_STEPS = (
    "base.steps=4 base.global_batch=32 train.steps=3 train.global_batch=32 "
    "data.num_workers=0 num_threads=1"
)
JOINED = ["concat_raw", "concat_stage_norm", "soup_uniform"]
STAGES = ["stage_0", "stage_1", "stage_2"]


def commands(recipe: Path) -> list[str]:
    """What the comments of a recipe tell the user to type."""
    return [line[4:] for line in recipe.read_text().splitlines() if line.startswith("#   ")]


def type_in(folder: Path, ucm: Path, lines: list[str]) -> None:
    """Has bash run ``lines`` in ``folder`` as if it were the root of the checkout, with few steps;
    RuntimeError with what it said where one fails."""
    recipes = folder / "launch"
    if not recipes.exists():
        recipes.symlink_to(tiny.ROOT / "launch")
    lines = [f"ucm={ucm}" if line.startswith("ucm=") else line for line in lines]
    script = f"""
        mclclip() {{
          [ "$1" = pack ] || set -- "$@" {FEW_STEPS}
          {sys.executable} -m mclclip "$@"
        }}
    """
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join([script, *lines])],
        cwd=folder,
        env=tiny.environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)


def captions_by_file(table: Path) -> dict[str, list[str]]:
    found = defaultdict(list)
    with open(table, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["filepath"]].append(row["title"])
    return dict(found)


# --- UC Merced ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ucm(shared_data: Path) -> Path:
    return shared_data / "ucm_captions"


@pytest.fixture(scope="module")
def checkout(ucm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything up to ``mclclip run`` was typed, and both parts were packed."""
    folder = tmp_path_factory.mktemp("ucm")
    lines = commands(RECIPE)
    where = "--allow-root $ucm/images --out $data/held_out"
    held_out = f"mclclip pack $data --captions $data/held_out.csv {where} --samples-per-shard 100"
    type_in(folder, ucm, [*lines[:-1], held_out])
    return folder


@pytest.mark.slow
def test_every_photograph_and_caption_is_in_one_part_packed_and_indexed(
    ucm: Path, checkout: Path
) -> None:
    data = checkout / "runs" / "ucm" / "data"
    train, held_out = (captions_by_file(data / f"{name}.csv") for name in ("train", "held_out"))
    everything = captions_by_file(ucm / "captions.csv")
    assert (len(everything), sum(map(len, everything.values()))) == (1680, 8398)
    assert train | held_out == everything and not train.keys() & held_out.keys()
    assert len(held_out) == 210
    with open(data / "unseen.csv", newline="") as file:
        unseen = list(csv.DictReader(file))
    assert len(unseen) == 420 and len({row["label"] for row in unseen}) == 21
    assert not {row["filepath"] for row in unseen} & everything.keys()

    parts = ("shards", "held_out")
    packed = [artifacts.read_manifest(data / part, "shards").counts for part in parts]
    assert [counts["samples"] for counts in packed] == [1470, 210]
    assert sum(counts["captions"] for counts in packed) == 8398
    assert [counts["shards"] for counts in packed] == [1, 3]
    unnamed = {"unnamed_picture": 2100 - 1470}, {"unnamed_picture": 2100 - 210}
    findings = [{n: f["count"] for n, f in counts["findings"].items()} for counts in packed]
    assert findings == [*unnamed]
    samples_of = indexed(
        checkout / "index_run",
        *(f"data.sources.{n}.shards={data / n}/*.tar" for n in parts),
        *(f"data.sources.{n}.captions=json:captions" for n in parts),
    )
    manifest = artifacts.read_manifest(samples_of.directory, "index")
    assert (manifest.counts["samples"], manifest.counts["captions"]) == (1680, 8398)
    assert not manifest.counts["findings"]
    samples = TarDataset(samples_of, DataConfig())
    found = {}
    for sample_id, raw in enumerate(samples.read_many(range(len(samples_of)))):
        path = _original(samples_of, sample_id)
        assert raw.image == (ucm / path).read_bytes()
        found[path] = samples.bytes.captions_of([sample_id])[0]
    assert found == everything


def indexed(run_dir: Path, *options: str) -> SampleIndex:
    """The index that the options ask for, below ``run_dir``."""
    return index.run(config.load(None, [f"run_dir={run_dir}", *options]), SINGLE)


def _original(opened: SampleIndex, sample_id: int) -> str:
    """The ``filepath`` that pack keeps in a sample's .json member."""
    shard = opened.shards[int(opened.shard_of[sample_id])]
    with open(shard.path, "rb") as file:
        file.seek(int(opened.text_offset[sample_id]))
        return str(json.loads(file.read(int(opened.text_size[sample_id])))["filepath"])


@pytest.mark.slow
def test_the_recipe_runs_as_typed(ucm: Path, checkout: Path) -> None:
    lines = commands(RECIPE)
    assert lines[-1].startswith("mclclip run ")
    type_in(checkout, ucm, lines[-1:])
    run_dir = checkout / "runs" / "ucm" / "mcl"
    _check_results(results.read(run_dir / "results.jsonl"))
    photograph = sorted((ucm / "images" / "beach").iterdir())[-1].read_bytes()
    exports = [f"{stage}/export" for stage in STAGES] + [f"exports/{name}" for name in JOINED]
    for name in exports:
        encoder = mclclip.load_model(run_dir / name)
        image = encoder.preprocess_val(decode_image(photograph, 10**6))
        with torch.inference_mode():
            features = encoder.encode_image(image[None])
        assert features.shape == (1, encoder.embed_dim)
        assert abs(float(features.norm()) - 1) < 1e-5
    # What is held out is in no part of the run.
    opened = SampleIndex.open(run_dir / "index")
    numbers = {_original(opened, sample_id)[-7:-4] for sample_id in range(len(opened))}
    assert numbers == {f"{number:03d}" for number in range(1, 71)}


def _check_results(rows: list[results.Result]) -> None:
    """Every model has every figure, each over all held-out photographs or captions."""
    counts = {(row.model, row.benchmark, row.metric): row.count for row in rows}
    assert {row.model for row in rows} == {*STAGES, *JOINED}
    for model in [*STAGES, *JOINED]:
        for k in (1, 5, 10):
            assert counts[model, "retrieval", f"image_to_text/R@{k}"] == 210
            assert counts[model, "retrieval", f"text_to_image/R@{k}"] == 343  # texts of 1,049
        for metric in ("top1", "top5", "mean_per_class"):
            assert counts[model, "classes", metric] == 420


# --- CC12M --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cc12m(shared_data: Path) -> Path:
    return shared_data / "cc12m_sample" / "cc12m-train-0000.tar"


@pytest.fixture(scope="module")
def cc12m_run(cc12m: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run directory with the indexed shard; what it holds is deleted in the end (0.6 GB)."""
    run_dir = tmp_path_factory.mktemp("cc12m")
    indexed(run_dir, f"data.sources.cc12m.shards={cc12m}")
    yield run_dir
    shutil.rmtree(run_dir)


def test_a_cc12m_shard_is_indexed(cc12m: Path, cc12m_run: Path) -> None:
    with tarfile.open(cc12m) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}  # type: ignore
    opened = SampleIndex.open(cc12m_run / "index")
    manifest = artifacts.read_manifest(opened.directory, "index")
    assert (manifest.counts["samples"], manifest.counts["captions"]) == (32, 32)
    assert not manifest.counts["findings"]
    keys = opened.keys(range(32))
    assert sorted(keys) == sorted({f"cc12m/{os.path.splitext(name)[0]}" for name in members})
    samples = TarDataset(opened, DataConfig())
    for sample_id, raw in enumerate(samples.read_many(range(32))):
        stem = keys[sample_id].removeprefix("cc12m/")
        assert raw.image == members[f"{stem}.jpg"]
        captions = samples.bytes.captions_of([sample_id])[0]
        assert captions == [members[f"{stem}.txt"].decode().strip()]
        assert min(decode_image(raw.image, 10**8).size) > 0


@pytest.mark.slow
def test_a_cc12m_shard_is_embedded_with_vit_b_32(
    shell: Shell, cc12m: Path, cc12m_run: Path
) -> None:
    options = (
        f"run_dir={cc12m_run}", f"data.sources.cc12m.shards={cc12m}", "model.name=ViT-B-32",
        "embed.dtype=float32", "num_threads=1", "data.num_workers=0",
    )  # fmt: skip
    shell.ok("export", "--stage", "0", *options)
    shell.ok("embed", "--stage", "0", "--text", *options)
    for kind in ("embeddings", "text_embeddings"):
        directory = cc12m_run / "stage_0" / kind
        manifest = artifacts.read_manifest(directory, kind)
        assert (manifest.counts["samples"], manifest.counts["bad_samples"]) == (32, 0)
        rows = np.load(directory / "00000.npy")
        assert rows.shape == (32, 512) and rows.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
        assert len(np.unique(rows, axis=0)) == 32
