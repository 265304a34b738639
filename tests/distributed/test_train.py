"""Training on several ranks equals training on one: batches, losses, weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip import config
from mclclip.checkpoint import step_files
from mclclip.data import patterns
from mclclip.data.datasets.sources import jpeg
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.models.towers import PatchDropout
from mclclip.ranks import collectives
from mclclip.ranks.process_group import seed_everything
from mclclip.verbs import index, texts, train
from tests import tiny
from tests.distributed.conftest import here
from tests.matrix import kept
from tests.unit.test_texts import write_rows

Ranks = Callable[..., list[Any]]
Weights = dict[str, np.ndarray]
STEPS = 20


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards and minimal pairs, with a row for each of their texts."""
    return write_rows(tmp_path_factory.mktemp("data"))


def train_stage_zero(options: dict[str, Any]) -> tuple[Weights, list[float]]:
    """Runs index and stage 0 on this rank; returns weights and losses."""
    torch.set_num_threads(1)
    settled = config.from_tree(options)
    index.run(settled, here())
    if settled.model.text_rows:
        texts.run(settled, here())
    directory = train.run(settled, here(), stage=0)
    rows = tiny.rows(directory / "metrics.jsonl")
    state = step_files.load_model_state(directory / "checkpoints", rows[-1]["step"])
    weights = {name: tensor.numpy() for name, tensor in state.items()}
    return weights, [row["loss"] for row in rows]


def options_for(
    data: Path, run_dir: Path, precision: str, model: Any = tiny.ONE_BLOCK, steps: int = STEPS
) -> dict[str, Any]:
    tree = tiny.tree(run_dir, data)
    tree["model"] = {"name": model}
    tree["train"]["lock"]["image_blocks"] = 1
    tree["base"] |= {"precision": precision, "steps": steps, "log_every": 1}
    tree["base"] |= {"checkpoint": {"every": steps}}
    return tree


def assert_equal(ends: list[Weights]) -> None:
    """Weights to 1e-9."""
    for name, weights in ends[0].items():
        np.testing.assert_allclose(ends[1][name], weights, atol=1e-9, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("model", "rows"),
    kept([(tiny.ONE_BLOCK, False), (tiny.ONE_BLOCK, True), (tiny.RESNET, False)], 0, 1),
    ids=["transformer", "text rows", "resnet"],
)
def test_float64_weights_agree_to_1e9(
    ranks: Ranks, data: Path, tmp_path: Path, model: Any, rows: bool
) -> None:
    """On captions, and on rows of text embeddings in their place."""
    ends = []
    for world_size in (1, 2 if rows else 3):
        tree = options_for(data, tmp_path / str(world_size), "float64", model, 4 if rows else STEPS)
        if rows:
            tree["model"]["text_rows"] = [str(data / "rows.npy")]
        weights, losses = ranks(world_size, train_stage_zero, tree)[0]
        assert len(losses) == (4 if rows else STEPS)
        assert ("model.clip.text.projection.weight" in weights) == rows
        ends.append(weights)
    assert_equal(ends)


def check_repeated(ranks: Ranks, world_size: int, tree: dict[str, Any]) -> Weights:
    """Trains, and again from the middle; both ends are equal bit for bit."""
    steps = tree["base"]["steps"] or STEPS
    tree["base"] |= {"checkpoint": {"every": steps // 2, "keep_every": steps // 2}}
    whole, losses = ranks(world_size, train_stage_zero, tree)[0]
    directory = Path(tree["run_dir"]) / "stage_0" / "train"
    shutil.rmtree(directory / f"checkpoints/step_{len(losses):08d}")
    (directory / "manifest.json").rename(directory / "in_progress.json")
    again, same_losses = ranks(world_size, train_stage_zero, tree)[0]
    assert same_losses == losses
    for name, weights in whole.items():
        np.testing.assert_array_equal(again[name], weights, err_msg=name)
    return whole


@pytest.mark.parametrize("world_size", kept([1, 2], 0))
def test_dropped_patches_are_those_of_the_step(
    ranks: Ranks, data: Path, tmp_path: Path, world_size: int
) -> None:
    """The second half of a training, repeated from the checkpoint before it, bit for bit."""
    tree = options_for(data, tmp_path / "run", "fp32", steps=6)
    tree["base"] |= {"patch_dropout": 0.5, "engine": {"micro_batch": 5}}
    check_repeated(ranks, world_size, tree)


def draws() -> list[int]:
    """Patches that this rank keeps of one picture, at two steps."""
    found = []
    for step in range(2):
        seed_everything(1, step, collectives.rank())
        found.append(PatchDropout(0.5)(torch.arange(1e3)[None, :, None])[0, :, 0].tolist())
    return found


def test_every_rank_and_step_drops_its_own_patches(ranks: Ranks) -> None:
    first, second = ranks(2, draws)
    assert len({tuple(kept) for kept in (*first, *second)}) == 4
    assert ranks(2, draws) == [first, second]


def ends_of(ranks: Ranks, tmp_path: Path, tree_of: Callable[[Path, int], Any]) -> list[Weights]:
    """Weights of one rank, and of two, which are resumed bit for bit."""
    one = ranks(1, train_stage_zero, tree_of(tmp_path / "1", 1))[0][0]
    return [one, check_repeated(ranks, 2, tree_of(tmp_path / "2", 2))]


@pytest.mark.slow
@pytest.mark.parametrize("model", kept([tiny.ONE_BLOCK, tiny.RESNET], 0))
def test_image_sizes_are_those_of_the_step_on_any_ranks(
    ranks: Ranks, data: Path, tmp_path: Path, model: Any
) -> None:
    """A quarter of the steps at 64 pixels, then 32."""

    def tree_of(run_dir: Path, world_size: int) -> Any:
        tree = options_for(data, run_dir, "float64", model)
        tree["model"]["image_size"] = 64
        if world_size > 1 and model is tiny.ONE_BLOCK:  # its positions are shared out
            tree["base"]["engine"] = {"name": "fsdp", "grad_checkpointing": True}
        tree["base"] |= {"steps": None, "epochs": 4, "image_size": [{"size": 32, "epochs": 3}]}
        return tree

    ends = ends_of(ranks, tmp_path, tree_of)
    assert_equal(ends)
    tree = tree_of(tmp_path / "own", 1)
    tree["base"]["image_size"] = []
    own = ranks(1, train_stage_zero, tree)[0][0]
    assert max(np.abs(own[name] - ends[0][name]).max() for name in own) > 1e-6


@pytest.mark.slow
def test_sentences_are_those_of_the_step_on_any_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Of captions of four sentences, with a longer context."""
    samples = [
        PackedSample(
            f"{number:04d}", jpeg(pattern.image), "jpg",
            [" ".join(f"The {name} is {value}." for name, value in pattern.values.items())],
        )
        for number, pattern in enumerate(patterns.patterns(96, 0))
    ]  # fmt: skip
    write_shards(samples, tmp_path / "shards", 48)
    model = tiny.MODEL | {"text_cfg": tiny.MODEL["text_cfg"] | {"context_length": 30}}

    def tree_of(run_dir: Path, _: int) -> Any:
        tree = options_for(tmp_path, run_dir, "float64", model)
        tree["model"]["long_context"] = True
        tree["base"]["sentences"] = {"number": 2, "leave_out_first": 0.5}
        return tree

    ends = ends_of(ranks, tmp_path, tree_of)
    assert_equal(ends)
    tree = tree_of(tmp_path / "all", 1)
    del tree["base"]["sentences"]
    every, positions = ranks(1, train_stage_zero, tree)[0][0], "model.clip.positional_embedding"
    assert ends[0][positions].shape == (60, 16)
    assert np.abs(every[positions] - ends[0][positions]).max() > 1e-6
