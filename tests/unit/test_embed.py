"""Embedding passes: what reaches the device, and what torch compiles for them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mclclip.config import Config
from mclclip.data.datasets.patterns import draw_samples
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import Sample, TarDataset
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.transforms import PixelTransform
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import RunPaths
from mclclip.verbs import embed, export, index
from tests import tiny

BROKEN = {5, *range(24, 27)}  # one of a batch, and a whole last batch
NUM_SAMPLES, BATCH = 40, 8


def samples() -> Iterator[PackedSample]:
    for sample in draw_samples(NUM_SAMPLES, 0):
        broken = int(sample.key) in BROKEN
        yield dataclasses.replace(sample, image=b"no picture") if broken else sample


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards, of 27 and 13 samples, their index, and the encoder of stage 0."""
    root = tmp_path_factory.mktemp("started")
    write_shards(samples(), root / "shards", 27)
    config = options(root)
    index.run(config, SINGLE)
    export.stage(config, SINGLE, stage=0)
    return root


def options(root: Path, *more: str) -> Config:
    return tiny.make_config(
        root / "run", root, "base=null", f"embed.batch_size={BATCH}", "data.max_bad_fraction=0.2",
        *more,
    )  # fmt: skip


def embedded(started: Path, root: Path, *more: str) -> list[np.ndarray]:
    """The rows of each shard, made in a copy of the run."""
    shutil.copytree(started, root, dirs_exist_ok=True)
    config = options(root, *more)
    embed.run(config, SINGLE, stage=0)
    return rows_of(config)


def rows_of(config: Config) -> list[np.ndarray]:
    folder = RunPaths.of(config).embeddings(0)
    return [np.load(path) for path in sorted(folder.glob("*.npy"))]


def test_rows_are_those_of_open_clips_transform_to_the_bit(
    started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device gets bytes and normalises them. Zeros stand for what cannot be decoded."""
    sent: list[Tensor] = []
    to_floats = PixelTransform.to_floats

    def record(self: PixelTransform, views: Tensor) -> Tensor:
        sent.append(views)
        return to_floats(self, views)

    monkeypatch.setattr(PixelTransform, "to_floats", record)
    found = embedded(started, tmp_path, "data.num_workers=1")
    assert {views.dtype for views in sent} == {torch.uint8, torch.float32}  # floats: no picture
    config = options(tmp_path)
    model = load_towers(RunPaths.of(config).export(0)).eval()
    samples_index = SampleIndex.open(RunPaths.of(config).index)
    source = TarDataset(samples_index, config.data, model.preprocess_val)
    for shard, rows in zip(samples_index.shards, found, strict=True):
        for start in range(shard.start, shard.stop, BATCH):
            batch = [source[n] for n in range(start, min(start + BATCH, shard.stop))]
            good = np.array([isinstance(sample, Sample) for sample in batch])
            images = torch.zeros(len(batch), *model.image_shape)
            for place, sample in enumerate(batch):
                if isinstance(sample, Sample):
                    images[place] = sample.views[0]
            with torch.inference_mode():
                wanted = model.encode_image(images, normalize=True).numpy()
            wanted[~good] = 0.0
            part = rows[start - shard.start : start - shard.start + len(batch)]
            assert np.array_equal(part, wanted)
    assert sum(int((~rows.any(axis=1)).sum()) for rows in found) == len(BROKEN)


# --- what torch compiles ---


class Graphs:
    """A backend of torch.compile that runs what it gets, and counts it; and the models whose blocks
    it was to compile."""

    def __init__(self) -> None:
        self.count = self.num_models = 0

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        self.count += 1
        return module.forward  # type: ignore[no-any-return]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    graphs, compile_blocks = Graphs(), Model.compile_blocks

    def compile_and_count(self: Model) -> None:
        graphs.num_models += 1
        compile_blocks(self, graphs)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "compile_blocks", compile_and_count)
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


def test_shards_of_any_length_are_compiled_for_once(
    started: Path, tmp_path: Path, graphs: Graphs
) -> None:
    """All batches have the size that cuts the longest shard of 27 evenly, 7."""
    plain = embedded(started, tmp_path / "plain")
    compiled = embedded(started, tmp_path / "compiled", "embed.compile=model")
    assert graphs.count == 1
    for rows, wanted in zip(compiled, plain, strict=True):
        np.testing.assert_allclose(rows, wanted, rtol=0, atol=1e-6)


def test_a_teacher_and_image_rows_are_compiled_too(
    started: Path, tmp_path: Path, graphs: Graphs
) -> None:
    shutil.copytree(started, tmp_path, dirs_exist_ok=True)
    teacher = str(RunPaths.of(options(tmp_path)).export(0))
    embed.run(options(tmp_path, "embed.compile=model"), SINGLE, encoder=teacher)
    assert graphs.count == 1
    on = ["image_rows.enabled=true", "num_stages=1", "embed.compile=model"]
    torch._dynamo.reset()
    config = tiny.make_config(
        tmp_path / "run", tmp_path, "base=null", "data.max_bad_fraction=0.2", *on, locked_text=True
    )
    embed.run(config, SINGLE, stage=0)
    # The rows, and embeddings that start from them: blocks of the same shape share one graph.
    assert graphs.num_models == 3 and graphs.count == 2


@pytest.mark.slow
def test_inductor_gives_the_rows_up_to_rounding(started: Path, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    plain = embedded(started, tmp_path / "plain")
    torch._dynamo.reset()
    compiled = embedded(started, tmp_path / "compiled", "embed.compile=model")
    for rows, wanted in zip(compiled, plain, strict=True):
        assert not np.array_equal(rows, wanted)  # so it was compiled
        np.testing.assert_allclose(rows, wanted, rtol=0, atol=1e-5)
