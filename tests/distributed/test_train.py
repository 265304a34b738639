"""Training on several ranks equals training on one: batches, losses, weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip import config
from mclclip.checkpoint import step_files
from mclclip.config import Config
from mclclip.data import patterns
from mclclip.data.datasets.sources import jpeg
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.models.towers import PatchDropout
from mclclip.ranks import collectives
from mclclip.ranks.process_group import seed_everything
from mclclip.verbs import index, train
from tests import tiny
from tests.distributed.conftest import here
from tests.matrix import kept

Ranks = Callable[..., list[Any]]
STEPS = 20


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("data"), num_samples=120)


def train_stage_zero(options: dict[str, Any]) -> dict[str, Any]:
    """Runs index and stage 0 on this rank; returns weights and losses."""
    torch.set_num_threads(1)
    settled: Config = config.from_tree(options)
    index.run(settled, here())
    directory = train.run(settled, here(), stage=0)
    state = step_files.load_model_state(directory / "checkpoints", STEPS)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": {name: tensor.numpy() for name, tensor in state.items()},
        "losses": [row["loss"] for row in rows],
    }


def run_on(ranks: Ranks, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    return ranks(world_size, train_stage_zero, options)[0]


def options_for(data: Path, run_dir: Path, precision: str, model: Any) -> dict[str, Any]:
    tree = tiny.tree(run_dir, data)
    tree["model"] = {"name": model}
    tree["train"]["lock"]["image_blocks"] = 1
    tree["base"] |= {"precision": precision, "steps": STEPS, "log_every": 1}
    tree["base"] |= {"checkpoint": {"every": STEPS}}
    return tree


@pytest.mark.parametrize(
    "model", kept([tiny.ONE_BLOCK, tiny.RESNET], 0), ids=["transformer", "resnet"]
)
@pytest.mark.parametrize("world_size", kept([2, 3], 1))
def test_float64_weights_agree_to_1e9(
    ranks: Ranks, data: Path, tmp_path: Path, model: Any, world_size: int
) -> None:
    one = run_on(ranks, 1, options_for(data, tmp_path / "one", "float64", model))
    many = run_on(ranks, world_size, options_for(data, tmp_path / "many", "float64", model))
    assert len(one["losses"]) == STEPS
    for name, weights in one["weights"].items():
        np.testing.assert_allclose(many["weights"][name], weights, atol=1e-9, rtol=0, err_msg=name)


@pytest.mark.parametrize("world_size", kept([1, 2], 0))
def test_dropped_patches_are_those_of_the_step(
    ranks: Ranks, data: Path, tmp_path: Path, world_size: int
) -> None:
    """The second half of a training, repeated from the checkpoint before it, bit for bit."""
    tree = options_for(data, tmp_path / "run", "fp32", tiny.ONE_BLOCK)
    tree["base"] |= {"patch_dropout": 0.5, "engine": {"micro_batch": 5}}
    check_repeated(ranks, world_size, tree)


@pytest.mark.slow
@pytest.mark.parametrize("model", kept([tiny.ONE_BLOCK, tiny.RESNET], 0))
def test_image_sizes_are_those_of_the_step_on_any_ranks(
    ranks: Ranks, data: Path, tmp_path: Path, model: Any
) -> None:
    """A quarter of the steps at 64 pixels, then 32: on two ranks as on one, resumed bit for bit."""
    ends = []
    for world_size in (1, 2):
        tree = options_for(data, tmp_path / str(world_size), "float64", model)
        tree["model"]["image_size"] = 64
        if world_size > 1 and model is tiny.ONE_BLOCK:  # its positions are shared out
            tree["base"]["engine"] = {"name": "fsdp", "grad_checkpointing": True}
        tree["base"] |= {"steps": None, "epochs": 4, "image_size": [{"size": 32, "epochs": 3}]}
        train_it = check_repeated if world_size > 1 else run_on
        ends.append(train_it(ranks, world_size, tree)["weights"])
    for name, weights in ends[0].items():
        np.testing.assert_allclose(ends[1][name], weights, atol=1e-9, rtol=0, err_msg=name)
    tree["run_dir"] = str(tmp_path / "own")
    tree["base"]["image_size"] = []
    own = run_on(ranks, 1, tree)["weights"]
    assert max(np.abs(own[name] - ends[0][name]).max() for name in own) > 1e-6


def check_repeated(ranks: Ranks, world_size: int, tree: dict[str, Any]) -> dict[str, Any]:
    """Trains, and again from the middle; both ends are equal bit for bit."""
    tree["base"] |= {"checkpoint": {"every": STEPS // 2, "keep_every": STEPS // 2}}
    whole = run_on(ranks, world_size, tree)
    directory = Path(tree["run_dir"]) / "stage_0" / "train"
    shutil.rmtree(directory / f"checkpoints/step_{STEPS:08d}")
    (directory / "manifest.json").rename(directory / "in_progress.json")
    again = run_on(ranks, world_size, tree)
    assert again["losses"] == whole["losses"]
    for name, weights in whole["weights"].items():
        np.testing.assert_array_equal(again["weights"][name], weights, err_msg=name)
    return whole


@pytest.fixture(scope="module")
def paragraphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with captions of four sentences."""
    samples = [
        PackedSample(
            f"{number:04d}", jpeg(pattern.image), "jpg",
            [" ".join(f"The {name} is {value}." for name, value in pattern.values.items())],
        )
        for number, pattern in enumerate(patterns.patterns(96, 0))
    ]  # fmt: skip
    data = tmp_path_factory.mktemp("paragraphs")
    write_shards(samples, data / "shards", 48)
    return data


@pytest.mark.slow
def test_sentences_are_those_of_the_step_on_any_ranks(
    ranks: Ranks, paragraphs: Path, tmp_path: Path
) -> None:
    """With a longer context: on two ranks as on one, and resumed bit for bit."""
    model = tiny.MODEL | {"text_cfg": tiny.MODEL["text_cfg"] | {"context_length": 30}}
    ends = []
    for world_size in (1, 2):
        tree = options_for(paragraphs, tmp_path / str(world_size), "float64", model)
        tree["model"]["long_context"] = True
        tree["base"]["sentences"] = {"number": 2, "leave_out_first": 0.5}
        train_it = check_repeated if world_size > 1 else run_on
        ends.append(train_it(ranks, world_size, tree)["weights"])
    tree["run_dir"] = str(tmp_path / "all")
    del tree["base"]["sentences"]
    ends.append(run_on(ranks, 1, tree)["weights"])
    positions = "model.clip.positional_embedding"
    assert ends[0][positions].shape == (60, 16)
    for name, weights in ends[0].items():
        np.testing.assert_allclose(ends[1][name], weights, atol=1e-9, rtol=0, err_msg=name)
    assert np.abs(ends[2][positions] - ends[0][positions]).max() > 1e-6


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
