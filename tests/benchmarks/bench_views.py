"""SimCLR's views beside torchvision's own transforms, one thread.

The same crops, flips, colours and blur of random pictures from uint8 arrays to normalised tensors:
torchvision's classes as SimCLR's code is written with them, `SimCLRTransform` for a view alone, and
for the views of a batch together, as loaders make them. All ways run in turn in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mclclip.models.transforms import PixelFormat, SimCLROptions, SimCLRTransform
from tests.benchmarks import timing

# isort: split
from torchvision.transforms import v2

MEAN, STD = [0.5] * 3, [0.25] * 3


def torchvisions(side: int, blur: float) -> Any:
    """Full colour distortion, and a blur of a tenth of the side."""
    width = 2 * (side // 20) + 1
    jitter = v2.ColorJitter(0.8, 0.8, 0.8, 0.2)
    return v2.Compose(
        [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.RandomResizedCrop(side, interpolation=v2.InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([jitter], 0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(width, (0.1, 2.0))], blur),
            v2.Normalize(MEAN, STD),
        ]
    )


def alone(transform: Any, pictures: list[Any]) -> Tensor:
    torch.manual_seed(0)
    return torch.stack([transform(picture) for picture in pictures])


def together(transform: SimCLRTransform, pictures: list[Any]) -> Tensor:
    torch.manual_seed(0)
    return transform.finish([transform.draw(picture) for picture in pictures])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--batch", type=int, default=128, help="views; default: %(default)s")
    given = timing.parse(parser, arguments, batch=4)
    torch.set_num_threads(1)
    rows = []
    for side, blur in ((32, 0.0), (96, 0.0), (224, 0.5)):
        rng = np.random.default_rng(0)
        pictures = [*rng.integers(0, 256, (given.batch, side, side, 3), np.uint8)]
        ours = SimCLRTransform(
            PixelFormat((side, side), MEAN, STD), SimCLROptions(strength=1.0, blur=blur)
        )
        ways = {
            "torchvision": partial(alone, torchvisions(side, blur), pictures),
            "alone": partial(alone, ours, pictures),
            "in a batch": partial(together, ours, pictures),
        }
        timings = timing.interleave(ways, given.rounds)
        per_view = [timing.number(1000 * timings.cpu_s(way) / given.batch) for way in ways]
        ratio = f"{timings.cpu_ratio('in a batch', 'torchvision'):.2f}"
        rows.append([f"{side} px{', half of them blurred' if blur else ''}", *per_view, ratio])
    columns = ["views", "torchvision, CPU ms per view", "ours, alone", "ours, in a batch", "ratio"]
    timing.print_table(f"SimCLR's views, batches of {given.batch}", columns, rows)


if __name__ == "__main__":
    main()
