"""A small plain network of convolutions, for experiments that end within minutes on CPU cores.

The towers of timm and torchvision begin at ten times its cost, and learn more slowly in few steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SmallConv(nn.Module):
    """3 x 3 convolutions, each with batch norm and ReLU, and the mean over all positions.

    channels  of an image
    widths    of the convolutions; the last one is the width D of the features
    strides   of the convolutions, as many
    """

    def __init__(
        self,
        channels: int,
        widths: Sequence[int] = (24, 48, 96, 192),
        strides: Sequence[int] = (2, 2, 2, 1),
    ) -> None:
        super().__init__()
        lists = all(isinstance(numbers, Sequence) for numbers in (widths, strides))
        fits = lists and 0 < len(widths) == len(strides) and min(*widths, *strides) >= 1
        if not fits:
            raise ValueError(
                f"widths are {widths} and strides {strides}: wanted two lists of one length, all "
                "numbers 1 or more"
            )
        inputs = [channels, *widths[:-1]]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(before, width, 3, stride, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                )
                for before, width, stride in zip(inputs, widths, strides, strict=True)
            )
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.num_features = widths[-1]

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, D]."""
        return torch.flatten(self.avgpool(self.layers(images)), 1)
