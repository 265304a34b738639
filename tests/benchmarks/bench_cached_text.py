"""What cached text embeddings save per training step.

With a locked text tower a caption's embedding never changes, so ``embed`` writes it once. The
tables time ``Engine.update`` of the product's own trainee on equal batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import yaml

from mclclip.data.batches import Batch
from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.info_nce import InfoNCE
from mclclip.ranks.process_group import SINGLE
from mclclip.train.loop import ModelWithObjective
from tests.benchmarks import timing

UCM_RECIPE = timing.ROOT / "launch" / "recipes" / "ucm.yaml"


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
        "group_ids": torch.zeros(size, 1, dtype=torch.int64),
        "sample_id": torch.arange(size),
        "step": 0,
        "group_size": size,
    }
    with torch.no_grad():
        features = model.encode_text(tokens, normalize=True)
    return Batch(**fixed, text=tokens), Batch(**fixed, text_features=features)


def engine_of(model: Model) -> Engine:
    """The product's training step around a model."""
    trainee = ModelWithObjective(model, InfoNCE())
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Times of two models."""
    options = timing.parse(timing.parser(__doc__), arguments)
    rounds = options.rounds
    torch.set_num_threads(1)
    recipe = yaml.safe_load(UCM_RECIPE.read_text())
    ucm = recipe["model"]["name"]
    if not options.short:
        time_steps("ViT-B-32", "ViT-B-32", 8, rounds)
    time_steps("UCM recipe's model", ucm, 64, rounds)


if __name__ == "__main__":
    main()
