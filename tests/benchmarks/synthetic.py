"""Random pictures and tokens, for benchmarks in which only the step counts."""

from __future__ import annotations

import torch

from mclclip.data.batches import Batch


def batch(size: int, image_size: int | tuple[int, int], groups: int = 1) -> Batch:
    """``size`` random pictures of a model's size with random captions, in ``groups`` groups."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    random = torch.Generator().manual_seed(0)
    return Batch(
        views=[torch.randn(size, 3, height, width, generator=random)],
        text=torch.randint(1, 49_000, (size, 77), generator=random),
        group_ids=torch.arange(size)[:, None] % groups,
        sample_id=torch.arange(size),
        step=0,
        group_size=size // groups,
    )
