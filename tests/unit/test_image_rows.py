"""The frozen blocks' output on disk: what it holds, what starts from it, and what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.config import Config
from mclclip.data import samples
from mclclip.data.bytes import BadSample
from mclclip.data.options import DataConfig
from mclclip.data.row_store import IMAGE_ROWS, StoredRows
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import Sample, TarDataset
from mclclip.models.loading import load_towers
from mclclip.models.preparing import start_from_rows
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import RunPaths, read_manifest
from mclclip.util.remake import Remake
from mclclip.verbs import cluster, embed, export, index, train
from tests import tiny
from tests.matrix import kept

RESNET = str(tiny.ROOT / "tests/configs/tiny_resnet.json")
NUM_SAMPLES = 60
PLAIN = "model.augmentation={kind: none}"  # as from the cache: the crops of validation
ON = "image_rows={enabled: true, dtype: float32}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("trunk"), num_samples=NUM_SAMPLES)


def options(run_dir: Path, data: Path, *more: str) -> Config:
    """A given encoder and one stage; captions' embeddings come from disk."""
    return tiny.make_config(
        run_dir, data, "base=null", "num_stages=1", "train.steps=4", "train.log_every=1", *more,
        locked_text=True,
    )  # fmt: skip


PARTS = ("index", "stage_0/export")
STARTED: dict[str, TemporaryDirectory[str]] = {}  # folders with both, by data and model


def start(config: Config) -> None:
    """Index and stage 0's encoder, which are made once and copied."""
    key, run_dir = f"{config.data} {config.model}", Path(config.run_dir)
    if key in STARTED:
        for part in PARTS:
            shutil.copytree(Path(STARTED[key].name) / part, run_dir / part)
        return
    index.run(config, SINGLE)
    export.stage(config, SINGLE, stage=0)
    STARTED[key] = TemporaryDirectory()
    for part in PARTS:
        shutil.copytree(run_dir / part, Path(STARTED[key].name) / part)


def embedded(config: Config) -> StoredRows:
    start(config)
    embed.run(config, SINGLE, stage=0)
    return rows_of(config)


def rows_of(config: Config) -> StoredRows:
    layout = RunPaths.of(config)
    return StoredRows(layout.image_rows, SampleIndex.open(layout.index), IMAGE_ROWS)


def trained(config: Config) -> list[float]:
    """The loss of every step of stage 1, whose encoder embeds the images again."""
    cluster.run(config, SINGLE, stage=0)
    train.run(config, SINGLE, stage=1)
    export.stage(config, SINGLE, stage=1)
    embed.run(config, SINGLE, stage=1)
    return [row["loss"] for row in tiny.rows(RunPaths.of(config).train(1) / "metrics.jsonl")]


def embeddings(config: Config, stage: int) -> np.ndarray:
    paths = sorted(RunPaths.of(config).embeddings(stage).glob("*.npy"))
    return np.concatenate([np.load(path) for path in paths])


def read(config: Config, rows: StoredRows, ids: list[int]) -> list[Sample | BadSample]:
    samples = SampleIndex.open(RunPaths.of(config).index)
    copy = pickle.loads(pickle.dumps(rows))
    found = TarDataset(samples, DataConfig(), image_rows=copy)
    return found.__getitems__(ids)


@pytest.fixture(scope="module")
def made(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished cache; tests copy it."""
    config = options(tmp_path_factory.mktemp("made") / "run", data, ON)
    embedded(config)
    return config


def copied(made: Config, data: Path, root: Path, *more: str) -> Config:
    shutil.copytree(made.run_dir, root / "run")
    return options(root / "run", data, ON, *more)


# --- what is written and what starts from it -----------------------------------------------------


@pytest.mark.parametrize(
    ("model", "blocks", "shape", "dtype"),
    kept([(None, 1, (17, 32), "float16"), (RESNET, 3, (128, 4, 4), "float32")], 0),
)
def test_rows_are_the_output_of_the_frozen_blocks(
    data: Path, tmp_path: Path, model: str | None, blocks: int, shape: tuple[int, ...], dtype: str
) -> None:
    more = [f"model.name={model}", "train.lock.image_blocks=2"] if model else []
    given = f"image_rows={{enabled: true, dtype: {dtype}}}"
    config = options(tmp_path / "run", data, given, *more)
    rows = embedded(config)
    assert rows.shape == shape and rows.get(0).dtype == dtype
    assert read_manifest(rows.directory, IMAGE_ROWS).config["blocks"] == blocks
    encoder = load_towers(RunPaths.of(config).export(0)).eval()
    samples = SampleIndex.open(RunPaths.of(config).index)
    images = TarDataset(samples, DataConfig(max_image_pixels=10**6), encoder.preprocess_val)
    ids = [51, 3, 59, 0, 48, 47]  # of both shards, in no order
    for number, found in zip(ids, read(config, rows, ids), strict=True):
        picture = images[number]
        assert isinstance(found, Sample) and isinstance(picture, Sample)
        with torch.no_grad():
            (wanted,) = encoder.encode_trunk(picture.views[0][None], blocks)
        assert found.views[0].dtype == getattr(torch, dtype)
        tolerance = 2e-3 if dtype == "float16" else 1e-6
        torch.testing.assert_close(found.views[0].float(), wanted, rtol=tolerance, atol=tolerance)


def test_everything_after_it_is_as_from_images(made: Config, data: Path, tmp_path: Path) -> None:
    """In float32 to the bit, by the same crops: embeddings, losses, the trained encoder. Worker
    processes read the same rows."""
    cached = copied(made, data, tmp_path / "cached", "data.num_workers=2")
    images = options(tmp_path / "images/run", data, PLAIN)
    start(images)
    embed.run(images, SINGLE, stage=0)
    losses = trained(images)
    assert trained(cached) == losses and len({*losses}) == 4
    for stage in (0, 1):
        np.testing.assert_array_equal(embeddings(cached, stage), embeddings(images, stage))
    weights = [tiny.digests(RunPaths.of(config).export(1)) for config in (images, cached)]
    assert weights[0] == weights[1] and weights[0]


@pytest.mark.parametrize(
    "more",
    kept(
        [
            ["train.engine.micro_batch=8"],
            ["train.precision=bf16", "embed.precision=bf16"],
            ["train.precision=float64"],
            ["train.lora={rank: 2}"],
            ["embed.feature=pooled"],
            ["train.engine.compile=model"],
            ["train.cached_text=false"],
            ["train.start=previous", "num_stages=2"],
            ["data.verify=full"],
        ]
    ),
    ids=str,
)
def test_every_way_to_train_starts_from_it(data: Path, tmp_path: Path, more: list[str]) -> None:
    found = {}
    for name, given in {"images": PLAIN, "cache": ON}.items():
        config = options(tmp_path / name, data, given, *more)
        start(config)
        embed.run(config, SINGLE, stage=0)
        found[name] = trained(config)
        if config.num_stages == 2:
            cluster.run(config, SINGLE, stage=1)
            train.run(config, SINGLE, stage=2)
            lines = (RunPaths.of(config).train(2) / "metrics.jsonl").read_text().splitlines()
            found[name] += [json.loads(line)["loss"] for line in lines]
    # In float64 the cache's trunk still ran in fp32.
    tolerance = 1e-4 if "train.precision=float64" in more else 1e-5
    np.testing.assert_allclose(found["cache"], found["images"], rtol=tolerance)


def test_where_the_whole_tower_is_frozen_its_embeddings_stand_for_pictures(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in LiT: a training and an embedding pass after stage 0 decode none."""
    lock = "train.lock={image_blocks: 0, image_norm: false, image_projection: false}"
    images, rows = (
        options(tmp_path / name, data, given, lock, "embed.dtype=float32")
        for name, given in (("images", PLAIN), ("rows", ON))
    )
    for config in (images, rows):
        start(config)
        embed.run(config, SINGLE, stage=0)
    losses = trained(images)
    monkeypatch.setattr(samples, "decode", None)
    np.testing.assert_allclose(trained(rows), losses, rtol=1e-5)
    assert len({*losses}) == 4 and not RunPaths.of(rows).image_rows.exists()
    np.testing.assert_allclose(embeddings(rows, 1), embeddings(images, 1), atol=1e-6)
    with pytest.raises(ValueError, match="embed.feature=pooled"):
        options(tmp_path / "pooled", data, ON, lock, "embed.feature=pooled")


# --- what is bad ---------------------------------------------------------------------------------


def test_a_sample_that_cannot_be_decoded_has_no_row_until_it_is_restored(
    data: Path, tmp_path: Path
) -> None:
    shutil.copytree(data, tmp_path / "data")
    config = options(tmp_path / "run", tmp_path / "data", ON, "data.max_bad_fraction=0.1")
    index.run(config, SINGLE)
    samples = SampleIndex.open(RunPaths.of(config).index)
    path = Path(samples.shards[0].path)
    whole = path.read_bytes()
    with open(path, "r+b") as file:  # the image of sample 5 ends in zeros
        file.seek(int(samples.image_offset[5]) + 60)
        file.write(bytes(int(samples.image_size[5]) - 60))
    rows = embedded(config)
    assert [*rows.without] == [5]
    (found, other) = read(config, rows, [5, 6])
    assert found == BadSample(5, "no_row") and isinstance(other, Sample)
    assert not embeddings(config, 0)[5].any()
    cluster.run(config, SINGLE, stage=0)
    train.run(config, SINGLE, stage=1)
    record = read_manifest(RunPaths.of(config).image_rows, "image_rows")
    assert record.counts["bad_samples"] == 1
    path.write_bytes(whole)
    shutil.rmtree(RunPaths.of(config).train(1))
    embed.run(config, SINGLE, stage=0)  # says that a row could be made
    train.run(config, SINGLE, stage=1)  # finds none
    embed.run(config, SINGLE, stage=0, force=Remake.ALL)
    assert not len(rows_of(config).without)
    assert 5 not in SampleIndex.open(RunPaths.of(config).index).bad_ids()


def test_other_blocks_or_other_weights_are_refused(
    made: Config, data: Path, tmp_path: Path
) -> None:
    config = copied(made, data, tmp_path)
    fewer = copied(made, data, tmp_path / "fewer", "train.lock.image_blocks=1")
    with pytest.raises(ValueError, match="blocks was 1, now 2.*--force"):
        embed.run(fewer, SINGLE, stage=0)
    embed.run(fewer, SINGLE, stage=0, force=Remake.ALL)  # two blocks are frozen now
    more = options(Path(fewer.run_dir), data, ON)
    cluster.run(more, SINGLE, stage=0)
    with pytest.raises(ValueError, match="have passed 2 blocks, and train.lock freezes 1: lower"):
        train.run(more, SINGLE, stage=1)
    other = load_towers(config.model.name, seed=5)
    with pytest.raises(RuntimeError, match="was made by other weights than the first 1 blocks"):
        start_from_rows(other, rows_of(config))
    assert other.first_block == 0


@pytest.mark.parametrize("change", [{"quick_gelu": True}, {"head_width": 8}], ids=str)
def test_equal_weights_of_another_architecture_are_another_trunk(change: dict[str, Any]) -> None:
    other = json.loads(json.dumps(tiny.MODEL))
    (other if "quick_gelu" in change else other["vision_cfg"]).update(change)
    models = [load_towers(config, seed=0) for config in (tiny.MODEL, tiny.MODEL, other)]
    same, again, changed = (model.trunk_digest(2) for model in models)
    assert same == again != changed
    assert models[0].trunk_digest(1) != same


def test_embeddings_of_images_are_told_before_a_row_is_written(data: Path, tmp_path: Path) -> None:
    plain, on = (options(tmp_path / "run", data, *more) for more in ([], [ON]))
    start(plain)
    embed.run(plain, SINGLE, stage=0)
    with pytest.raises(ValueError, match="was made from images, and image_rows.enabled starts"):
        embed.run(on, SINGLE, stage=0)
    assert not RunPaths.of(on).image_rows.exists()
    embed.run(on, SINGLE, stage=0, force=Remake.ALL)
    assert not len(rows_of(on).without)


def test_without_it_a_later_stage_says_what_to_run(data: Path, tmp_path: Path) -> None:
    config = options(tmp_path / "run", data)
    start(config)
    embed.run(config, SINGLE, stage=0)
    cluster.run(config, SINGLE, stage=0)
    on = options(tmp_path / "run", data, ON)
    message = "no finished image_rows at .*: run 'mclclip embed --stage 0' first"
    with pytest.raises(FileNotFoundError, match=message):
        train.run(on, SINGLE, stage=1)


def test_what_cannot_be_is_told_before_a_row(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among it blocks of which it is not known with the options that none is frozen."""
    config = options(tmp_path / "run", data, "image_rows.enabled=true")
    start(config)
    later = f"model={{name: local-dir:{tmp_path}/later}}"
    all_blocks = options(tmp_path / "run", data, ON, "train.lock.image_blocks=3", later)
    with pytest.raises(ValueError, match="train.lock.image_blocks=3, which freezes no block"):
        embed.run(all_blocks, SINGLE, stage=0)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
        with pytest.raises(ValueError, match="image rows needs about .* GiB, the disk .* free"):
            embed.run(config, SINGLE, stage=0)
    forward = embed.forward

    def large(*given: Any) -> torch.Tensor:
        return forward(*given) * 1e6

    monkeypatch.setattr(embed, "forward", large)
    with pytest.raises(ValueError, match="float16 does not hold: set image_rows.dtype=float32"):
        embed.run(config, SINGLE, stage=0)
    assert not [*RunPaths.of(config).image_rows.rglob("*.npy")]
