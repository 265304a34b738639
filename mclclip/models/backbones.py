"""Image towers of timm and torchvision, for images of any size and number of channels.

They are for training from random weights on small pictures, as in studies of SimCLR, MoCo and
SimLAP, where open_clip's own towers do not fit (four channels, 32 pixels, a ResNet-18). A model's
configuration names one in its `vision_cfg`, in place of open_clip's fields:

    vision_cfg: {backbone: timm:resnet18, channels: 4, image_size: 32, stem: cifar}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveFloat, PositiveInt
from torch import Tensor, nn

import mclclip.torchvision_fix  # noqa: F401

# isort: split
import timm
from torchvision import models as torchvision_models

from mclclip.models import config_check, transforms
from mclclip.models.timm_towers import timm_layout
from mclclip.models.towers import ImageLayout, convolution_layout
from mclclip.options import STRICT, first_problem, nearest, shown


@checked_dataclass(frozen=True, config=STRICT)
class Backbone:
    """The `vision_cfg` of a backbone."""

    backbone: str
    """``timm:NAME``; ``torchvision:NAME`` for one of its ResNets; ``mclclip:small_conv``, plain
    convolutions for experiments of minutes, with ``widths`` and ``strides`` as options."""
    channels: PositiveInt = 3
    """Channels of an image."""
    image_size: PositiveInt = 224
    """Pixels of an image's side."""
    stem: Literal["own", "cifar"] = "own"
    """``cifar``: a ResNet begins with a 3 x 3 convolution of stride 1 and without a max-pooling
    (SimCLR, appendix B.9), for pictures of about 32 pixels."""
    mean: list[float] = field(default_factory=lambda: [0.5])
    """Subtracted from values between 0 and 1: one number, or one for each channel."""
    std: list[PositiveFloat] = field(default_factory=lambda: [0.5])
    """Divides the difference: one number, or one for each channel."""
    options: dict[str, bool | int | float | str | list[int] | None] = field(default_factory=dict)
    """Further arguments of the library's model, such as ``patch_size`` and ``depth`` of timm's
    transformers, ``layers`` and ``channels`` of its ResNets."""

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise ValueError(
                    f"{name} has {len(values)} values, but images have {self.channels} channels: "
                    "give one value, or one for each channel"
                )


def parse(vision_cfg: Mapping[str, Any], where: str) -> Backbone:
    """The checked `vision_cfg` of a backbone; ValueError of one line for one that does not fit.

    The name must be one that the library lists itself, so that no foreign code is loaded.
    """
    for field_name, value in vision_cfg.items():
        if field_name != "options":
            config_check.check_numbers(value, field_name, f"vision_cfg of {where}")
    try:
        chosen = TypeAdapter(Backbone).validate_python(dict(vision_cfg))
    except ValidationError as error:
        name, problem = first_problem(error)
        option = f"vision_cfg.{name}" if name else "vision_cfg"
        raise ValueError(f"{option} of {where}: {problem}") from None
    config_check.check_options(chosen.options, f"vision_cfg.options of {where}")
    library, _, name = chosen.backbone.partition(":")
    listed: list[str] = []
    if library == "timm":
        listed = timm.list_models()
    elif library == "torchvision":
        listed = [n for n in torchvision_models.list_models(torchvision_models) if "resne" in n]
    elif library == "mclclip":
        listed = ["small_conv"]
    if name not in listed:
        near = nearest(name, listed)
        known = f"nearest: {', '.join(near)}" if near else "libraries: timm, torchvision, mclclip"
        raise ValueError(
            f"vision_cfg.backbone of {where} is {shown(chosen.backbone)}, which is no listed model "
            f"({known}): give timm:NAME, or torchvision:NAME of a ResNet"
        )
    return chosen


class BackboneTower(nn.Module):
    """A model of ``Backbone`` as an image tower, without its classifier.

    ``trunk`` is the library's model; ``head`` is empty. Images [B, C, H, W] -> features [B, D].
    """

    def __init__(self, config: Backbone, where: str) -> None:
        super().__init__()
        self.image_size = (config.image_size, config.image_size)
        self.num_channels = config.channels
        library, _, name = config.backbone.partition(":")
        try:
            self.trunk: Any = _MAKERS[library](name, config)
        except Exception as error:  # the libraries raise any kind for options that they do not know
            cause = " ".join(str(error).split())[:200]
            raise ValueError(f"{config.backbone} of {where} cannot be built ({cause})") from error
        self.embed_dim: int = self.trunk.num_features
        if config.stem == "cifar":
            first = getattr(self.trunk, "conv1", None)
            if not isinstance(first, nn.Conv2d) or not hasattr(self.trunk, "maxpool"):
                raise ValueError(
                    f"stem is cifar, but {config.backbone} of {where} does not begin with one "
                    "convolution and a max-pooling, as ResNets do: leave stem out"
                )
            self.trunk.conv1 = _convolution(config.channels, first, (3, 3), 1)
            self.trunk.maxpool = nn.Identity()
        self.head = nn.Sequential()
        self.pixels = transforms.PixelFormat(
            self.image_size, config.mean, config.std, config.channels
        )
        self.preprocess_cfg = asdict(self.pixels)

    def transforms(self, augmentation: Mapping[str, Any] | None) -> transforms.Pair:
        """The train transform (SimCLR's unless `augmentation` names another kind), and the plain
        transform for validation."""
        options = {transforms.KIND: "simclr"} | dict(augmentation or {})
        return transforms.training(self.pixels, options), transforms.PlainTransform(self.pixels)

    def layout(self) -> ImageLayout | str:
        """The tower's layout, or the reason why it cannot be split or locked by block."""
        try:
            if isinstance(self.trunk, torchvision_models.ResNet):
                stem = [f"trunk.{name}" for name in ("conv1", "bn1", "relu", "maxpool")]
                return convolution_layout(self, stem, [f"trunk.layer{i}" for i in range(1, 5)])
            if isinstance(self.trunk, SmallConv):
                return convolution_layout(self, ["trunk.layers.0"], ["trunk.layers"])
            return timm_layout(self)
        except ValueError as error:
            return str(error)

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, D]."""
        features: Tensor = self.trunk(images)
        return features


def _timm_model(name: str, config: Backbone) -> Any:
    options: dict[str, Any] = {"in_chans": config.channels, "num_classes": 0} | config.options
    try:
        return timm.create_model(name, pretrained=False, img_size=config.image_size, **options)
    except TypeError:  # convolutional models have no argument img_size
        return timm.create_model(name, pretrained=False, **options)


def _torchvision_model(name: str, config: Backbone) -> Any:
    model: Any = torchvision_models.get_model(name, weights=None, **config.options)
    first = model.conv1
    if config.channels != first.in_channels:
        model.conv1 = _convolution(config.channels, first, first.kernel_size, first.stride)
    model.num_features = model.fc.in_features
    model.fc = nn.Identity()
    return model


def _small_conv(name: str, config: Backbone) -> Any:
    options: dict[str, Any] = dict(config.options)
    return SmallConv(config.channels, **options)


_MAKERS = {"timm": _timm_model, "torchvision": _torchvision_model, "mclclip": _small_conv}


def _convolution(channels: int, first: nn.Conv2d, size: Any, stride: Any) -> nn.Conv2d:
    """A first convolution of another size, with the weights that ResNets begin with."""
    padding = tuple(n // 2 for n in size)
    made = nn.Conv2d(channels, first.out_channels, size, stride, padding, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


class SmallConv(nn.Module):
    """A small plain network of convolutions, for experiments that end within minutes on CPU cores.

    3 x 3 convolutions, each with batch norm and ReLU, and the mean over all positions. The towers
    of timm and torchvision begin at ten times its cost, and learn more slowly in few steps.

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
        layers = []
        for before, width, stride in zip([channels, *widths[:-1]], widths, strides, strict=True):
            convolution = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
            layers.append(nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU()))
        self.layers = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.num_features = widths[-1]

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, D]."""
        return torch.flatten(self.avgpool(self.layers(images)), 1)
