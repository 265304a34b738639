"""Figures of attention's kernels, and of the contrastive loss with near copies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from mclclip.objectives.base import Objective, ObjectiveInputs, parse
from mclclip.ranks.process_group import Context
from tests.contracts.test_objectives import Towers
from tests.gpu.checks import Where
from tests.gpu.figures import Row, figure, in_turn
from tests.objective_loops import parts_of

KERNELS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
SHAPES = {
    "ViT-B-32 (50 patches)": (1024, 12, 50),
    "64 patches": (1024, 12, 64),
    "128 patches": (512, 12, 128),
    "ViT-B-16 (197 patches)": (256, 12, 197),
    "ViT-L-14 (257 patches)": (256, 16, 257),
}
"""Batch, heads and patches; each head has 64 columns."""
NEAR: dict[str, dict[str, Any]] = {
    "plain": {},
    "by bytes": {"near_copies": {}},
    "threshold": {"near_copies": {"threshold": 0.9}},
    "margin": {"near_copies": {"margin": 0.05}},
    "positives": {"near_copies": {"threshold": 0.9, "role": "positives"}},
}


@figure("attention: kernels", limit_s=60.0)
def attention(where: Where) -> Iterator[Row]:
    """Forward and backward in bf16 by each of torch's kernels, deterministic or not."""
    was = torch.are_deterministic_algorithms_enabled()
    for name, (batch, heads, patches) in SHAPES.items():
        size = where.size(batch, 2), heads, patches, 64
        made = [torch.randn(size, device=where.device, dtype=torch.bfloat16) for _ in range(4)]
        inputs = [tensor.requires_grad_() for tensor in made[:3]]
        for deterministic in (True, False):
            torch.use_deterministic_algorithms(deterministic)
            how, first = "deterministic" if deterministic else "free", 0.0
            for kernel in KERNELS if where.on_gpu else KERNELS[:1]:
                title = f"{name}, {how}: {kernel.lower()}"
                try:
                    took = in_turn({"": partial(_attend, kernel, inputs, made[3])}, where.device, 5)
                except RuntimeError as error:
                    yield Row(title, None, "", note=str(error).splitlines()[0])
                    continue
                first = first or took[""]
                yield Row(title, 1000 * took[""], "ms", took[""] / first)
    torch.use_deterministic_algorithms(was)


def _attend(kernel: str, inputs: list[Tensor], grad: Tensor) -> None:
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        output = functional.scaled_dot_product_attention(*inputs)
    output.backward(grad)  # type: ignore[no-untyped-call]


@figure("contrastive loss: near copies", limit_s=60.0)
def near_copies(where: Where) -> Iterator[Row]:
    """InfoNCE, forward and backward, with each way of telling near copies."""
    for size in (4096, 16_384) if where.on_gpu else (64,):
        names = "image_features", "text_features", "base_image_features", "base_text_features"
        raw = torch.randn(len(names), size, 512, device=where.device)
        batch: dict[str, Tensor] = dict(zip(names, functional.normalize(raw, dim=2), strict=True))
        numbers = torch.arange(size, device=where.device)
        batch |= {"logit_scale": torch.tensor(30.0, device=where.device)}
        batch |= {"group_ids": numbers[:, None] % 4, "sample_id": numbers}
        batch |= {"caption_digest": numbers, "picture_digest": numbers}
        inputs = ObjectiveInputs(Towers(), Context(device=where.device), 0, "bf16")
        steps = {
            name: partial(_contrast, parse({"kind": "info_nce"} | how).build(inputs), batch)
            for name, how in NEAR.items()
        }
        taken = in_turn(steps, where.device, 5)
        for name, took in taken.items():
            ratio = took / taken["plain"]
            yield Row(f"B = {size:,}, D = 512: {name}", 1000 * took, "ms", ratio)


def _contrast(objective: Objective, batch: dict[str, Tensor]) -> None:
    moving = ("image_features", "text_features", "logit_scale")
    given = batch | {name: batch[name].detach().requires_grad_() for name in moving}
    parts_of(objective, **given)["loss"].backward()
