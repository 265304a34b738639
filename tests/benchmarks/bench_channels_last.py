"""Convolutional image towers in channels-last beside contiguous tensors, forward and backward.

Random weights and pictures, a frozen text tower that does not run; batch norms in evaluation mode
forward, as in embedding, and in training mode with the backward pass. Both formats run in turn in
one process; CPU time per picture, which hardly moves where other programs take the cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import torch

from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.towers import MemoryFormat
from tests.benchmarks import timing

SIDES = {"RN50": 224, "convnext_tiny": 160, "mobilenetv2_100": 160}


def tower(name: str, side: int) -> Model:
    """The image tower of this name: open_clip's RN50, or one of timm's."""
    if name == "RN50":
        return load_towers("RN50", text=False)
    vision: dict[str, Any] = {"timm_model_name": name, "timm_proj": "linear", "image_size": side}
    return load_towers({"embed_dim": 256, "vision_cfg": vision}, text=False)


def forward(model: Model, images: torch.Tensor, memory_format: MemoryFormat) -> None:
    """Features of the images, as embedding and evaluation make them."""
    model.memory_format = memory_format
    with torch.inference_mode():
        model.eval().encode_image(images)


def both(model: Model, images: torch.Tensor, memory_format: MemoryFormat) -> None:
    """Features of the images, and the gradients of all weights."""
    model.memory_format = memory_format
    model.train().zero_grad()
    model.encode_image(images).square().sum().backward()  # type: ignore[no-untyped-call]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--batch", type=int, default=16, help="pictures; default: %(default)s")
    parser.add_argument("--towers", nargs="+", default=[*SIDES], choices=[*SIDES])
    given = timing.parse(parser, arguments, batch=2, towers=["mobilenetv2_100"])
    torch.set_num_threads(1)
    rows = []
    for name in given.towers:
        model, side = tower(name, SIDES[name]), SIDES[name]
        images = torch.randn(given.batch, 3, side, side)
        for what, work in (("forward", forward), ("forward and backward", both)):
            variants = {each: partial(work, model, images, each) for each in get_args(MemoryFormat)}
            timings = timing.interleave(variants, given.rounds)
            per_picture = [1000 * timings.cpu_s(each) / given.batch for each in variants]
            rows.append(
                [
                    f"{name}, {side} px: {what}",
                    *map(timing.number, per_picture),
                    f"{timings.cpu_ratio('channels_last', 'contiguous'):.2f}",
                ]
            )
    columns = ["tower", "contiguous, CPU ms per picture", "channels-last", "ratio"]
    timing.print_table("Image towers in channels-last", columns, rows)


if __name__ == "__main__":
    main()
