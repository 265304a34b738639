"""Builds image towers of timm and torchvision for images of any size, and describes their layouts.

Such a tower is called a backbone. It is trained from random weights on small pictures, as in
studies of SimCLR, MoCo and SimLAP, where open_clip's own towers do not fit (four channels, 32
pixels, a ResNet-18). A model's configuration names it in `vision_cfg`, in place of open_clip's
fields:

    vision_cfg: {backbone: timm:resnet18, channels: 4, image_size: 32, stem: cifar}

The layouts of timm's towers serve backbones and the towers that open_clip's `TimmModel` wraps.
Transformers over tokens (ViT, SigLIP, EVA, PE-Core, ViTamin and others) run code of their own
between the image and the first block, and their layouts call it. For all others, such as ConvNeXt,
FastViT, Swin and ResNets, one forward pass on the "meta" device is recorded: if the output of each
module is the unchanged input of the next, the tower is a chain of these modules. timm's
`group_matcher`, its grouping for layer-wise decay, says which of them form one block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveFloat, PositiveInt
from torch import Tensor, nn

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import timm
from timm.models import group_parameters
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torchvision import models as torchvision_models

from mclclip.models import config_check, transforms
from mclclip.models.towers import (
    ImageLayout,
    Names,
    Step,
    belongs,
    number_blocks,
    present,
    resized_positions,
)
from mclclip.util import files
from mclclip.util.options import STRICT, brief, first_problem, nearest

_EMBEDDING_OF_TIMM = (
    *("patch_embed", "cls_token", "reg_token", "dist_token", "pos_embed", "pos_drop"),
    *("patch_drop", "norm_pre", "rope", "shared_rel_pos"),
)


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
    """``own``: the library's first layers. ``cifar``: a ResNet begins with a 3 x 3 convolution of
    stride 1 and has no max-pooling (SimCLR, appendix B.9), for pictures of about 32 pixels."""
    mean: list[float] = field(default_factory=lambda: [0.5])
    """Subtracted from values between 0 and 1: one number, or one for each channel."""
    std: list[PositiveFloat] = field(default_factory=lambda: [0.5])
    """Divides the difference: one number, or one for each channel."""
    options: dict[str, bool | int | float | str | list[int] | None] = field(default_factory=dict)
    """Other arguments of the library's model, such as ``patch_size`` and ``depth`` of timm's
    transformers, or ``layers`` and ``channels`` of its ResNets."""

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise ValueError(
                    f"{name} has {len(values)} values, but images have {self.channels} channels: "
                    "give one value, or one for each channel"
                )


def parse(vision_cfg: Mapping[str, Any], where: str) -> Backbone:
    """Checks the `vision_cfg` of a backbone and returns it as a `Backbone`.

    `where` names the configuration in messages, for example a file. Raises ValueError, one line,
    for a field that does not fit, and for a name that the library does not list itself, since it
    could load foreign code.
    """
    try:
        backbone = TypeAdapter(Backbone).validate_python(dict(vision_cfg))
    except ValidationError as error:
        name, problem = first_problem(error)
        option = f"vision_cfg.{name}" if name else "vision_cfg"
        raise ValueError(f"{option} of {where}: {problem}") from None
    config_check.check_options(backbone.options, f"vision_cfg.options of {where}")
    library, _, name = backbone.backbone.partition(":")
    listed: list[str] = []
    if library == "timm":
        listed = timm.list_models()
    elif library == "torchvision":
        listed = [n for n in torchvision_models.list_models(torchvision_models) if "resne" in n]
    elif library == "mclclip":
        listed = ["small_conv"]
    if name not in listed:
        near = nearest(name, listed)
        choices = f"nearest: {', '.join(near)}" if near else "libraries: timm, torchvision, mclclip"
        raise ValueError(
            f"vision_cfg.backbone of {where} is {brief(backbone.backbone)}, which is no listed "
            f"model ({choices}): give timm:NAME, or torchvision:NAME of a ResNet"
        )
    return backbone


class BackboneTower(nn.Module):
    """An image tower that holds a library's model without its classifier.

    ``trunk`` is the library's model; ``head`` is empty. Images [B, C, H, W] -> features [B, D].
    """

    def __init__(self, config: Backbone, where: str) -> None:
        super().__init__()
        self.image_size = (config.image_size, config.image_size)
        self.num_channels = config.channels
        try:
            self.trunk: Any = _library_model(config)
        except Exception as error:  # the libraries raise any kind for options that they do not know
            cause = files.message_of(error)
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

    def transforms(
        self, augmentation: Mapping[str, Any] | None, image_size: int | None = None
    ) -> transforms.Pair:
        """Returns the transforms of training (SimCLR's, unless `augmentation` names another kind)
        and of validation (no augmentation); ``image_size``: for pictures of another size."""
        options = {transforms.KIND: "simclr"} | dict(augmentation or {})
        pixels = self.pixels
        if image_size is not None:
            pixels = replace(pixels, size=(image_size, image_size))
        return transforms.training(pixels, options), transforms.PlainTransform(pixels)

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, D]."""
        features: Tensor = self.trunk(images)
        return features


def backbone_layout(tower: Any) -> ImageLayout:
    """Returns the layout of a `BackboneTower`.

    In a ResNet or `SmallConv` every module after the stem is a block, and an average pooling
    follows the last block.
    """
    if isinstance(tower.trunk, torchvision_models.ResNet):
        stem: Names = tuple(f"trunk.{name}" for name in ("conv1", "bn1", "relu", "maxpool"))
        layers = [f"trunk.layer{i}" for i in range(1, 5)]
    elif isinstance(tower.trunk, SmallConv):
        stem, layers = ("trunk.layers.0",), ["trunk.layers"]
    else:
        return timm_layout(tower)
    blocks = [block for layer in layers for block in number_blocks(tower, layer)]
    return ImageLayout(
        embedding=stem,
        blocks=tuple(block for block in blocks if block[0] not in stem),
        norm=(),
        projection=(),
        finish=_pool,
        pooled_dim=int(tower.embed_dim),
    )


def _pool(tower: Any, hidden: Tensor, _: bool) -> Tensor:
    return torch.flatten(tower.trunk.avgpool(hidden), 1)


def _library_model(config: Backbone) -> Any:
    """Builds the library's model with random weights and without its classifier."""
    library, _, name = config.backbone.partition(":")
    options: dict[str, Any] = dict(config.options)
    if library == "mclclip":
        return SmallConv(config.channels, **options)
    if library == "timm":
        options = {"in_chans": config.channels, "num_classes": 0} | options
        try:
            return timm.create_model(name, pretrained=False, img_size=config.image_size, **options)
        except TypeError:  # convolutional models have no argument img_size
            return timm.create_model(name, pretrained=False, **options)
    model: Any = torchvision_models.get_model(name, weights=None, **options)
    first = model.conv1
    if config.channels != first.in_channels:
        model.conv1 = _convolution(config.channels, first, first.kernel_size, first.stride)
    model.num_features = model.fc.in_features
    model.fc = nn.Identity()
    return model


def _convolution(channels: int, first: nn.Conv2d, size: Any, stride: Any) -> nn.Conv2d:
    """Returns a replacement for a ResNet's ``first`` convolution, drawn as ResNets draw theirs."""
    padding = tuple(n // 2 for n in size)
    convolution = nn.Conv2d(channels, first.out_channels, size, stride, padding, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution


class SmallConv(nn.Module):
    """A small plain network of convolutions, for experiments that end within minutes on CPU cores.

    It has 3 x 3 convolutions, each with batch norm and ReLU, then the mean over all positions. The
    smallest towers of timm and torchvision cost ten times as much, and learn less in few steps.

    channels  of an image
    widths    of the convolutions; the last one is the width D of the features
    strides   of the convolutions, one for each width
    """

    def __init__(
        self,
        channels: int,
        widths: Sequence[int] = (24, 48, 96, 192),
        strides: Sequence[int] = (2, 2, 2, 1),
    ) -> None:
        super().__init__()
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


# --- layouts of timm's towers ------------------------------------------------------------------


def timm_layout(tower: Any) -> ImageLayout:
    """Returns the layout of an open_clip `TimmModel`, or of a tower with such a `trunk` and `head`.

    Raises ValueError, naming timm's class, for a tower whose blocks do not form a chain.
    """
    trunk = tower.trunk
    start: Callable[[Any, Tensor], tuple[Tensor, Any]] | None = None
    steps: Callable[[Any, Any], Sequence[Step]] | None = None
    after: Names = ("trunk.norm",)
    forward = getattr(type(trunk), "forward_features", None)
    if forward is VisionTransformer.forward_features:
        start = _start_vit
    elif forward is Eva.forward_features:
        start, steps = _start_eva, _steps_of_eva
    elif forward is VisionTransformerRelPos.forward_features:
        start, steps = _start_relpos, _steps_of_relpos
    if start is not None:
        embedding = tuple(f"trunk.{name}" for name in present(trunk, *_EMBEDDING_OF_TIMM))
        blocks = number_blocks(tower, "trunk.blocks")
    else:
        embedding, blocks, after = _chain_of_modules(tower)
    # The width of timm's features before its classifier. None: open_clip's head does the pooling,
    # or the tower does not say its width.
    pooled_dim = None if hasattr(tower.head, "pool") else getattr(trunk, "head_hidden_size", None)
    tops = _top(tower, embedding, blocks)
    groups = group_parameters(trunk, trunk.group_matcher(coarse=False))  # of layer-wise decay
    layers = [tuple(f"trunk.{name}" for name in groups[number]) for number in sorted(groups)]
    layers += [("head",)] if any(True for _ in tower.head.parameters()) else []
    return ImageLayout(
        embedding, blocks, *tops, _finish_timm, pooled_dim, after, start, steps, layers=(*layers,)
    )


def _finish_timm(tower: Any, hidden: Tensor, project: bool) -> Tensor:
    pooled: Tensor = tower.trunk.forward_head(hidden, pre_logits=not project)
    return tower.head(pooled) if project else pooled


def _start_vit(tower: Any, images: Tensor) -> tuple[Tensor, None]:
    """Returns the input of a ViT's first block; in a hybrid ViT its convolutions run here too."""
    trunk, patches = tower.trunk, tower.trunk.patch_embed
    grid = patches.grid_size
    if not trunk.dynamic_img_size:  # else timm resizes positions itself
        grid = patches.dynamic_feat_size(tuple(images.shape[-2:]))
    with resized_positions(trunk, "pos_embed", patches.grid_size, grid):
        return trunk.norm_pre(trunk.patch_drop(trunk._pos_embed(patches(images)))), None


def _start_eva(tower: Any, images: Tensor) -> tuple[Tensor, Any]:
    trunk = tower.trunk
    hidden, rope = trunk._pos_embed(trunk.patch_embed(images))  # patch dropout thins out both
    return trunk.norm_pre(hidden), rope


def _steps_of_eva(tower: Any, rope: Tensor | None) -> Sequence[Step]:
    """Returns Eva's blocks with their rotary position embedding: one for all, or one each."""
    trunk = tower.trunk
    if rope is None and trunk.rope is not None:
        fixed = getattr(trunk.rope, "feat_shape", None) is not None  # else of images of any size
        rope = trunk.rope.get_embed(**({} if fixed else {"shape": trunk.patch_embed.grid_size}))
    if rope is not None and getattr(trunk, "rope_mixed", False):
        return [
            partial(block, rope=of_block)
            for block, of_block in zip(trunk.blocks, rope, strict=False)
        ]
    return [partial(block, rope=rope) for block in trunk.blocks]


def _start_relpos(tower: Any, images: Tensor) -> tuple[Tensor, None]:
    hidden, token = tower.trunk.patch_embed(images), tower.trunk.cls_token
    if token is not None:
        hidden = torch.cat((token.expand(len(hidden), -1, -1), hidden), dim=1)
    return hidden, None


def _steps_of_relpos(tower: Any, _: Any) -> Sequence[Step]:
    """Returns the blocks with the bias of relative positions that they may share."""
    shared = tower.trunk.shared_rel_pos
    bias = None if shared is None else shared.get_bias()
    return [partial(block, shared_rel_pos=bias) for block in tower.trunk.blocks]


def _top(tower: nn.Module, embedding: Names, blocks: tuple[Names, ...]) -> tuple[Names, Names]:
    """Returns the names of the final norms, and of everything else behind the last block."""
    lower = embedding + tuple(name for block in blocks for name in block)
    norms = tuple(
        name
        for name, module in tower.named_modules()
        if "Norm" in type(module).__name__
        and not any(True for child in module.children() for _ in child.parameters())
        and name.count(".") <= (2 if name.startswith("trunk.head.") else 1)
        and name.startswith("trunk.")
        and not belongs(name, lower)
    )
    rest = [n for n in tower.state_dict() if not belongs(n, lower + norms)]
    return norms, tuple(dict.fromkeys(".".join(name.split(".")[:2]) for name in rest))


def _chain_of_modules(tower: Any) -> tuple[Names, tuple[Names, ...], Names]:
    """Returns the names of a tower's embedding, of its blocks, and of the modules after them.

    Raises ValueError for a tower that is no chain of modules.
    """
    trunk = tower.trunk
    try:
        groups = group_parameters(trunk, trunk.group_matcher(coarse=False), reverse=True)
        calls = _record_calls(trunk, getattr(tower, "num_channels", 3), tower.image_size)
        chain = _chain(calls[0], calls, groups)
        if not chain:
            raise ValueError("its modules do not follow one another")
    except Exception as error:  # timm's towers fail in many ways on inputs they do not expect
        cause = files.message_of(error, 120)
        raise ValueError(
            f"the image tower is a timm {type(trunk).__name__}, which is no chain of blocks that "
            f"can be split or locked ({cause}): use another model"
        ) from error
    embedding: list[str] = []
    blocks: list[list[str]] = []
    last = 0
    for name in chain:
        # Group numbers never fall along the chain. A module without parameters has no group of its
        # own, and goes into that of the module before it.
        group = max([last, *_groups_of(name, groups)])
        if group > last:
            blocks.append([])
        (blocks[-1] if blocks else embedding).append(f"trunk.{name}")
        last = group
    # Modules after the last block (final norms, convolutions) are direct children of the tower,
    # and blocks lie deeper.
    deep = any(name.count(".") > 1 for block in blocks for name in block)
    after: list[str] = []
    while deep and blocks[-1][-1].count(".") == 1:
        after.insert(0, blocks[-1].pop())
        if not blocks[-1]:
            blocks.pop()
    return tuple(embedding), tuple(map(tuple, blocks)), tuple(after)


@dataclass
class _Call:
    """One recorded call of a module.

    argument, result   its only argument (None: it had others too) and what it returned
    ..._version        torch's count of in-place changes to that tensor, which stays one object
    """

    name: str
    argument: Tensor | None
    argument_version: int
    result: Any = None
    result_version: int = 0


def _record_calls(trunk: Any, channels: int, image_size: tuple[int, int]) -> list[_Call]:
    """Records the module calls of one training pass on the "meta" device, by their beginnings.

    The first is that of the whole tower, whose result is the input of its pooling.
    """
    images = torch.empty(2, channels, *image_size, device="meta")
    calls = [_Call("", images, 0)]
    open_calls: list[_Call] = []

    def begin(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        plain = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
        argument = args[0] if plain else None
        open_calls.append(_Call(name, argument, argument._version if argument is not None else 0))
        calls.append(open_calls[-1])

    def end(_: nn.Module, args: Any, result: Any) -> None:
        call = open_calls.pop()
        call.result = result
        call.result_version = result._version if isinstance(result, Tensor) else 0

    def pool(features: Tensor) -> Tensor:
        calls[0].result = features
        return features

    tensors = (*trunk.parameters(), *trunk.buffers())
    shapes = {id(tensor): tensor.detach().to("meta") for tensor in tensors}
    recorded = copy.deepcopy(trunk, shapes)
    for name, module in recorded.named_modules():
        if name:
            module.register_forward_pre_hook(partial(begin, name), with_kwargs=True)
            module.register_forward_hook(end)
    recorded.forward_head = pool
    recorded.train()  # a dropout that is no module then shows, since it breaks the chain
    with torch.no_grad():
        recorded(images)
    return calls


def _chain(whole: _Call, calls: Sequence[_Call], groups: dict[str, int]) -> list[str]:
    """Returns the names of the modules that lead from the argument of the call `whole` to its
    result, one after the other; empty if they do not.

    `groups` maps parameters to timm's groups. A module whose parameters lie in several groups is
    replaced by the chain inside it, if there is one.
    """
    prefix = f"{whole.name}." if whole.name else ""
    chain: list[str] = []
    hidden, version, skipped = whole.argument, whole.argument_version, ""
    for call in calls:
        inside = call.name.startswith(prefix) and call.name != whole.name
        nested = skipped and call.name.startswith(f"{skipped}.")
        if not inside or nested or call.argument is not hidden or call.argument_version != version:
            continue
        skipped = call.name
        parts = _chain(call, calls, groups) if len(_groups_of(call.name, groups)) > 1 else []
        chain += parts or [call.name]
        hidden, version = call.result, call.result_version
    return chain if hidden is whole.result and len(set(chain)) == len(chain) else []


def _groups_of(name: str, groups: dict[str, int]) -> set[int]:
    return {group for parameter, group in groups.items() if belongs(parameter, (name,))}
