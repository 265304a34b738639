"""A small run for tests of damage: everything up to the labels of stage 1."""

from __future__ import annotations

import shutil
from pathlib import Path

from mclclip.config import Config
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import cluster, embed, export, index
from tests import tiny

NUM_SAMPLES = 96


def options(run_dir: Path, data: Path, *more: str) -> Config:
    """A given encoder, one stage that reads cached texts and clusters, everything in seconds."""
    return tiny.make_config(
        run_dir, data, "base=null", "num_stages=1", "train.steps=2", "embed.feature=projected",
        "cluster.feature=mean", "cluster.labels_per_sample=2", "export.concat=[]",
        "export.soup=false", *more, locked_text=True,
    )  # fmt: skip


def prepare(root: Path) -> Path:
    """Shards and a run up to its pseudo labels below ``root``; returns the run directory."""
    data = tiny.make_data(root / "data", num_samples=NUM_SAMPLES)
    config = options(root / "run", data)
    index.run(config, SINGLE)
    export.stage(config, SINGLE, stage=0)
    embed.run(config, SINGLE, stage=0)
    cluster.run(config, SINGLE, stage=0)
    return root / "run"


def copied(prepared: Path, root: Path) -> Config:
    """The configuration of a copy of the run and its shards below ``root``."""
    shutil.copytree(prepared, root / "run")
    return options(root / "run", prepared.parent / "data")
