"""What cached text embeddings save per training step, and how far they move the loss.

With a locked text tower a caption's embedding never changes, so ``embed`` writes it once. The
first tables time ``Engine.update`` of the product's own trainee on equal batches; the last one
trains with ``train.run`` on the fly, from float32 and from float16 embeddings, on the same groups.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from mclclip import cluster, embed, export, index
from mclclip.config import from_tree
from mclclip.data.batches import Batch
from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.info_nce import InfoNCE
from mclclip.ranks.process_group import SINGLE
from mclclip.train import verb as train
from mclclip.train.loop import Trainee
from tests import tiny
from tests.benchmarks import timing
from tests.benchmarks.bench_reading import photographs

UCM_RECIPE = timing.ROOT / "launch" / "recipes" / "ucm.yaml"
STEPS = 20


def locked(name: str | dict[str, Any], image_blocks: int | str) -> Model:
    """A random model in training mode, its text tower locked."""
    model = load_towers(name)
    model.lock(image_blocks, image_norm=True, image_projection=True, text=False, logit_scale=True)  # type: ignore[arg-type]
    return model.train()


def batches_of(model: Model, size: int) -> tuple[Batch, Batch]:
    """The same images with tokens, and with text embeddings."""
    rng = torch.Generator().manual_seed(0)
    tokens = model.tokenizer([f"a photograph of {number} red squares" for number in range(size)])
    side = model.image_size
    height, width = (side, side) if isinstance(side, int) else side
    fixed: dict[str, Any] = {
        "views": [torch.randn(size, 3, height, width, generator=rng)],
        "labels": torch.zeros(size, 1, dtype=torch.int64),
        "sample_id": torch.arange(size),
        "step": 0,
        "group_size": size,
    }
    with torch.no_grad():
        features = model.encode_text(tokens, normalize=True)
    return Batch(**fixed, text=tokens), Batch(**fixed, text_features=features)


def engine_of(model: Model) -> Engine:
    """The product's training step around a model."""
    trainee = Trainee(model, InfoNCE())
    optimizer = partial(build_optimizer, weight_decay=0.2, betas=(0.9, 0.98), eps=1e-6)
    return Engine(trainee, optimizer, SINGLE)


def time_steps(title: str, name: str | dict[str, Any], size: int, rounds: int) -> None:
    """Forward, backward and AdamW, with the last half and with all of the image blocks trained."""
    half = load_towers(name, load_weights=False).num_blocks // 2
    for blocks in (half, "all"):
        model = locked(name, blocks)
        engine = engine_of(model)
        fly, cached = batches_of(model, size)
        variants: dict[str, Callable[[], object]] = {
            "text tower run": partial(engine.update, fly, 1e-6),
            "cached text": partial(engine.update, cached, 1e-6),
        }
        timing.print_table(
            f"{title}: one step of {size} samples, fp32, image blocks trained: {blocks}",
            timing.headers("step", "samples"),
            timing.interleave(variants, rounds).rows("text tower run", size),
        )


# --- through the product's own verbs ---------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One training to compare: a model and the options that differ from tests/tiny.py's."""

    name: str
    model: dict[str, Any]
    data: Path
    train: dict[str, Any]
    logit_scale: float | None = None  # None: open_clip's first, 14.3


def prepare(root: Path, setting: Setting) -> dict[str, Any]:
    """Index, stage 0 (a random encoder), float32 embeddings and pseudo labels; the options."""
    base = load_towers(setting.model, seed=1)
    if setting.logit_scale is not None:
        with torch.no_grad():
            base.clip.logit_scale.fill_(math.log(setting.logit_scale))
    base.save(root / "given")
    options = tiny.tree(root / "run", setting.data, locked_text=True)
    options |= {"num_stages": 1, "base": None, "model": {"name": f"local-dir:{root / 'given'}"}}
    options["train"] |= {"steps": STEPS, "log_every": 1, "checkpoint": {"every": STEPS}}
    options["train"] |= setting.train
    config = from_tree(options)
    index.run(config, SINGLE)
    export.stage(config, SINGLE, stage=0)
    embed.run(config, SINGLE, stage=0, text=True)
    cluster.run(config, SINGLE, stage=0)
    return options


def losses(options: dict[str, Any], run_dir: Path, dtype: str | None) -> np.ndarray:
    """Losses [STEPS] of stage 1 in a copy of the run; dtype None runs the text tower."""
    shutil.copytree(options["run_dir"], run_dir)
    changed = options | {"run_dir": str(run_dir)}
    changed["train"] = options["train"] | {"cached_text": dtype is not None}
    changed["embed"] = options["embed"] | {"dtype": dtype or "float32"}
    config = from_tree(changed)
    if dtype == "float16":
        embed.run(config, SINGLE, stage=0, text=True, force=True)
    directory = train.run(config, SINGLE, stage=1)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return np.array([row["loss"] for row in rows])


def deviations(setting: Setting, root: Path) -> list[list[object]]:
    """Relative deviation of the loss from the training that runs the text tower."""
    options = prepare(root, setting)
    fly = losses(options, root / "fly", None)
    assert len(fly) == STEPS
    rows: list[list[object]] = []
    for dtype in ("float32", "float16"):
        found = np.abs(losses(options, root / dtype, dtype) - fly) / fly
        figures = (found[0], found.max(), np.median(found))
        ends = f"{fly[0]:.4f} to {fly[-1]:.4f}"
        compared = f"cached, {dtype}"
        rows.append([setting.name, compared, ends, *(f"{figure:.1e}" for figure in figures)])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Times, then deviations."""
    options = timing.parse(timing.parser(__doc__), arguments)
    rounds = options.rounds
    torch.set_num_threads(1)
    recipe = yaml.safe_load(UCM_RECIPE.read_text())
    ucm = recipe["model"]["name"]
    if not options.short:
        time_steps("ViT-B-32", "ViT-B-32", 8, rounds)
    time_steps("UCM recipe's model", ucm, 64, rounds)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        data = tiny.make_data(root / "rendered")
        pictures = data
        if timing.SHARED_DATA.is_dir() and not options.short:
            pictures = root / "photographs"
            photographs(pictures)
        shipped = {key: recipe["train"][key] for key in ("global_batch", "lr", "lock")}
        harsh = shipped | {"lr": 1e-3, "lock": shipped["lock"] | {"logit_scale": True}}
        settings = (
            Setting("tiny ViT, lr 1e-3", tiny.MODEL, data, {}),
            Setting("tiny ViT, lr 1e-3, logit scale from 100", tiny.MODEL, data, {}, 100.0),
            Setting("UCM recipe, lr 5e-4", ucm, pictures, shipped),
            Setting("UCM recipe, logit scale 100", ucm, pictures, shipped, 100.0),
            Setting("UCM model, lr 1e-3, logit scale from 100", ucm, pictures, harsh, 100.0),
        )
        rows: list[list[object]] = []
        for number, setting in enumerate(settings[:1] if options.short else settings):
            rows += deviations(setting, root / str(number))
    columns = ["training", "compared", "loss, first to last", "step 1", "largest", "median"]
    timing.print_table(
        f"Relative deviation of the loss from the text tower run on the fly, {STEPS} steps of "
        "train.run",
        columns,
        rows,
    )


if __name__ == "__main__":
    main()
