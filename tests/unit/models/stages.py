"""Exports that look like the stages of one run: a base and variations of its unlocked part."""

from pathlib import Path

import torch
from torch import nn

from mclclip.models import weights
from mclclip.models.model import Model


def vary(model: nn.Module, seed: int) -> None:
    """Moves every trainable parameter a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.05 * noise.to(parameter)


def save_stages(
    model: Model, directory: Path, count: int, image_blocks: int = 1, text: bool = False
) -> list[Path]:
    """Exports the model as stage 0 and `count - 1` variations; returns the directories."""
    paths = [directory / f"stage_{number}" / "export" for number in range(count)]
    model.save(paths[0])
    base = weights.base_digest(paths[0])
    model.lock(image_blocks, image_norm=True, image_projection=True, text=text, logit_scale=True)
    for seed, path in enumerate(paths[1:], start=1):
        vary(model, seed)
        model.save(path, base)
    return paths
