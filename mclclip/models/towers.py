"""Layouts of towers: the names of their parts, and how to run a part of an image tower.

Freezing, layer-wise decay, adapters and the trunk/tail split all use one table of names, a
`Layout`. This file has the layouts of open_clip's own image towers and of text towers; those of
timm's image towers are in `timm_towers`. Nothing here imports open_clip or timm.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[Tensor], Tensor]
"""A part of a tower's pass: hidden values in, hidden values out."""
NO_POOLED = (
    "the image tower's attention pool is its projection, so it has no features before its "
    "projection: embed 'projected'"
)


@dataclass(frozen=True)
class Layout:
    """The names of a tower's parts, relative to the tower.

    A name is a submodule or a parameter. `embedding` lies before the first block; it is empty for
    open_clip's ResNet, whose stem is its first block. A block may consist of several modules, such
    as a downsampling convolution and the residual block after it. `norm` is the final norm, and
    `projection` everything else after the last block: poolings with weights and projections.
    """

    embedding: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    norm: tuple[str, ...]
    projection: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """Number of blocks that a lock or a split may name."""
        return len(self.blocks)

    @property
    def counted(self) -> str:
        """The number of blocks in words, for messages."""
        return f"{self.num_blocks} blocks"

    def trunk(self, num_blocks: int) -> tuple[str, ...]:
        """Names in the first `num_blocks` blocks; with any block comes the embedding."""
        if num_blocks == 0:
            return ()
        return self.embedding + tuple(name for block in self.blocks[:num_blocks] for name in block)

    def last(self, wanted: int | Literal["all"], option: str, tower: str) -> tuple[str, ...]:
        """Names in the last `wanted` blocks.

        Raises ValueError, which names the `option` and the `tower`, for more than there are.
        """
        number = self.num_blocks if wanted == "all" else wanted
        if not 0 <= number <= self.num_blocks:
            raise ValueError(
                f"{option} is {wanted}, but the {tower} tower has {self.counted}: give 0 to "
                f"{self.num_blocks}, or 'all'"
            )
        blocks = self.blocks[self.num_blocks - number :]
        return tuple(name for block in blocks for name in block)

    def layers_above(self, name: str) -> int:
        """Number of layers above the tensor `name`, as layer-wise decay counts them.

        0 after the blocks, 1 for the last block, `num_blocks` + 1 for the embedding.
        """
        for number, block in enumerate((self.embedding, *self.blocks)):
            if belongs(name, block):
                return self.num_blocks + 1 - number
        return 0

    def count_without(self, names: Iterable[str]) -> int:
        """Number of blocks of the longest trunk that contains none of the tensors `names`."""
        layers = [self.num_blocks + 1 - self.layers_above(name) for name in names]
        return min([self.num_blocks, *(max(layer - 1, 0) for layer in layers)])

    def block_modules(self, tower: nn.Module) -> list[nn.Module]:
        """The modules with parameters that the blocks consist of, in order."""
        modules = [tower.get_submodule(name) for block in self.blocks for name in block]
        return [module for module in modules if any(True for _ in module.parameters())]


@dataclass(frozen=True)
class ImageLayout(Layout, ABC):
    """The layout of an image tower, which can also run a part of the tower.

    `_start` (or `_embed` and `_steps`) and `_finish` together are the forward pass. As they stand
    here, the modules of `embedding`, of the blocks and of `after` are run one after the other.
    """

    after: tuple[str, ...] = ()
    """Modules between the last block and the pooling."""

    def run_trunk(self, tower: nn.Module, images: Tensor, num_blocks: int) -> Tensor:
        """[B, 3, H, W] -> input of block `num_blocks`; for 0 the images themselves."""
        if num_blocks == 0:
            return images
        hidden, steps = self._start(tower, images)
        for step in steps[:num_blocks]:
            hidden = step(hidden)
        return hidden

    def run_tail(
        self,
        tower: nn.Module,
        hidden: Tensor,
        num_blocks: int,
        project: bool = True,
        recompute: bool = False,
    ) -> Tensor:
        """Output of `run_trunk` with the same `num_blocks` -> features [B, D], not unit length.

        `recompute`: the blocks run again in the backward pass instead of keeping activations.
        With `project=False` the pooled features before the projection; ValueError for a tower whose
        attention pool is its projection.
        """
        if num_blocks == 0:  # hidden is the images
            hidden, steps = self._start(tower, hidden)
        else:
            steps = self._steps(tower)
        for step in steps[num_blocks:]:
            if recompute and torch.is_grad_enabled():
                hidden = checkpoint(step, hidden, use_reentrant=False)
            else:
                hidden = step(hidden)
        for name in self.after:
            hidden = tower.get_submodule(name)(hidden)
        return self._finish(tower, hidden, project)

    @abstractmethod
    def pooled_dim(self, tower: Any) -> int | None:
        """Width of the features before the projection; None where there are none."""

    def _start(self, tower: Any, images: Tensor) -> tuple[Tensor, Sequence[Step]]:
        """Returns the input of the first block, and the blocks."""
        return self._embed(tower, images), self._steps(tower)

    def _embed(self, tower: Any, images: Tensor) -> Tensor:
        """[B, C, H, W] -> input of the first block."""
        return _in_turn([tower.get_submodule(name) for name in self.embedding], images)

    def _steps(self, tower: Any) -> Sequence[Step]:
        """The blocks, one step each."""
        parts = [[tower.get_submodule(name) for name in block] for block in self.blocks]
        return [part[0] if len(part) == 1 else partial(_in_turn, part) for part in parts]

    @abstractmethod
    def _finish(self, tower: Any, hidden: Tensor, project: bool) -> Tensor:
        """Output of the last block, behind `after` -> features [B, D]."""


def _in_turn(modules: Sequence[nn.Module], hidden: Tensor) -> Tensor:
    for module in modules:
        hidden = module(hidden)
    return hidden


class VisionTransformerLayout(ImageLayout):
    """open_clip's `VisionTransformer`."""

    def pooled_dim(self, tower: Any) -> int | None:
        """Width of the final norm."""
        return int(tower.ln_post.normalized_shape[0])

    def _embed(self, tower: Any, images: Tensor) -> Tensor:
        hidden: Tensor = tower._embeds(images)
        return hidden

    def _finish(self, tower: Any, hidden: Tensor, project: bool) -> Tensor:
        pooled: Tensor = tower._pool(hidden)[0]
        return pooled if tower.proj is None or not project else pooled @ tower.proj


def vision_transformer_layout(tower: nn.Module) -> VisionTransformerLayout:
    """The layout of open_clip's `VisionTransformer`."""
    embedding = ("conv1", "class_embedding", "positional_embedding", "patch_dropout", "ln_pre")
    layout = VisionTransformerLayout(
        embedding=_present(tower, *embedding),
        blocks=_numbered(tower, "transformer.resblocks"),
        norm=("ln_post",),
        projection=_present(tower, "attn_pool", "attn_pool_contrastive", "proj"),
    )
    return checked(tower, layout)


class ResNetLayout(ImageLayout):
    """open_clip's `ModifiedResNet`: its stem, then every residual block of its four layers.

    `norm` is empty: a ResNet has no final norm, its batch norms belong to their blocks.
    """

    @property
    def counted(self) -> str:
        """The number of blocks in words, for messages."""
        return f"{self.num_blocks} blocks (the stem and {self.num_blocks - 1} residual blocks)"

    def block_modules(self, tower: nn.Module) -> list[nn.Module]:
        """The four layers: a ResNet's stem is no module of its own."""
        return [tower.get_submodule(f"layer{i}") for i in range(1, 5)]

    def pooled_dim(self, tower: Any) -> int | None:
        """None: the attention pool is the projection."""
        return None

    def _steps(self, tower: Any) -> Sequence[Step]:
        return [tower.stem, *(tower.get_submodule(name) for (name,) in self.blocks[1:])]

    def _finish(self, tower: Any, hidden: Tensor, project: bool) -> Tensor:
        if not project:
            raise ValueError(NO_POOLED)
        features: Tensor = tower.attnpool(hidden)
        return features


def resnet_layout(tower: nn.Module) -> ResNetLayout:
    """The layout of open_clip's `ModifiedResNet`."""
    stem = _present(tower, "conv1", "bn1", "conv2", "bn2", "conv3", "bn3")
    residual = [block for i in range(1, 5) for block in _numbered(tower, f"layer{i}")]
    return checked(tower, ResNetLayout((), (stem, *residual), (), ("attnpool",)))


class ConvolutionLayout(ImageLayout):
    """A convolutional backbone: a stem (the embedding), blocks, and an average pooling."""

    def pooled_dim(self, tower: Any) -> int:
        """Width of the features: there is no projection."""
        return int(tower.embed_dim)

    def _finish(self, tower: Any, hidden: Tensor, project: bool) -> Tensor:
        return torch.flatten(tower.trunk.avgpool(hidden), 1)


def convolution_layout(
    tower: nn.Module, stem: Sequence[str], layers: Iterable[str]
) -> ConvolutionLayout:
    """The layout of a backbone: every module in a layer that is no part of the stem is a block."""
    blocks = [block for layer in layers for block in _numbered(tower, layer)]
    kept = tuple(block for block in blocks if block[0] not in stem)
    return checked(tower, ConvolutionLayout(tuple(stem), kept, (), ()))


def text_layout(tower: nn.Module) -> Layout:
    """Layout of a text tower: `CLIP` itself, or the `text` of `CustomTextCLIP`.

    The tower is open_clip's own transformer or one of Hugging Face. Raises ValueError where no
    blocks are found.
    """
    transformer = getattr(tower, "transformer", None)
    if getattr(transformer, "resblocks", None) is not None:
        return Layout(
            embedding=_present(tower, "token_embedding", "positional_embedding", "cls_emb"),
            blocks=_numbered(tower, "transformer.resblocks"),
            norm=("ln_final",),
            projection=_present(tower, "text_projection"),
        )
    lists = {
        name: len(module)
        for name, module in tower.named_modules()
        if name.startswith("transformer.") and isinstance(module, nn.ModuleList)
    }
    if not lists:
        raise ValueError(
            f"the text tower is a {type(tower).__name__} whose blocks are not known: lock it, or "
            "use an open_clip text transformer"
        )
    # In Hugging Face's encoders the blocks are the longest module list. Parameters registered
    # before it are the embedding, those after it the final norm.
    name = max(lists, key=lists.__getitem__)
    before, after = list[str](), list[str]()
    side = before
    for tensor, _ in tower.named_parameters(remove_duplicate=False):
        if tensor.startswith(f"{name}."):
            side = after
        elif tensor.startswith("transformer.") and ".pooler." not in tensor:
            side.append(tensor)
    top = ("transformer.pooler", "proj")
    return Layout(tuple(before), _numbered(tower, name), tuple(after), top)


def _numbered(tower: nn.Module, name: str) -> tuple[tuple[str, ...], ...]:
    """Every module in the submodule `name` as one block."""
    return tuple((f"{name}.{child}",) for child, _ in tower.get_submodule(name).named_children())


def _present(tower: nn.Module, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if getattr(tower, name, None) is not None)


def belongs(name: str, parts: tuple[str, ...]) -> bool:
    """Whether the tensor `name` is one of `parts` or lies below one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def pair(size: Any) -> tuple[int, int]:
    """Height and width of a size that may be one number."""
    return (int(size[0]), int(size[1])) if isinstance(size, (tuple, list)) else (size, size)


L = TypeVar("L", bound=ImageLayout)


def checked(tower: nn.Module, layout: L) -> L:
    """The layout itself. Raises ValueError where it has no block or lacks a tensor of the tower."""
    known = layout.trunk(layout.num_blocks) + layout.norm + layout.projection
    strange = [name for name in tower.state_dict() if not belongs(name, known)]
    if strange or not layout.blocks:
        raise ValueError(
            f"the image tower is a {type(tower).__name__} with parts that cannot be split or "
            f"locked: {strange[:3]}; use another model"
        )
    return layout
