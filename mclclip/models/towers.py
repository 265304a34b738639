"""Layouts of towers: the names of their parts, and how to run a part of an image tower.

Freezing, layer-wise decay, adapters and the trunk/tail split all use one table of names, a
`Layout`. This file has the layouts of open_clip's own image towers and of text towers; those of
timm's image towers are in `timm_towers`. Nothing here imports open_clip or timm.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[Tensor], Tensor]
"""A part of a tower's pass: hidden values in, hidden values out."""


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

    def last(self, num_blocks: int) -> tuple[str, ...]:
        """Names in the last `num_blocks` blocks."""
        blocks = self.blocks[self.num_blocks - num_blocks :]
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


class ImageLayout(Layout, ABC):
    """The layout of an image tower, which can also run a part of the tower.

    Subclasses define `_start`, `_steps` and `_finish`, which together are the forward pass.
    """

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
        return self._finish(tower, hidden, project)

    @abstractmethod
    def pooled_dim(self, tower: Any) -> int | None:
        """Width of the features before the projection; None where there are none."""

    @abstractmethod
    def _start(self, tower: Any, images: Tensor) -> tuple[Tensor, Sequence[Step]]:
        """Returns the input of the first block, and the blocks."""

    @abstractmethod
    def _steps(self, tower: Any) -> Sequence[Step]:
        """The blocks, one step each."""

    @abstractmethod
    def _finish(self, tower: Any, hidden: Tensor, project: bool) -> Tensor:
        """Output of the last block -> features [B, D]."""


class VisionTransformerLayout(ImageLayout):
    """open_clip's `VisionTransformer`."""

    @staticmethod
    def of(tower: nn.Module) -> "VisionTransformerLayout":
        """The layout of `tower`."""
        blocks = tower.get_submodule("transformer.resblocks")
        embedding = ("conv1", "class_embedding", "positional_embedding", "patch_dropout", "ln_pre")
        layout = VisionTransformerLayout(
            embedding=_present(tower, *embedding),
            blocks=tuple((f"transformer.resblocks.{i}",) for i, _ in enumerate(blocks.children())),
            norm=("ln_post",),
            projection=_present(tower, "attn_pool", "attn_pool_contrastive", "proj"),
        )
        return checked(tower, layout)

    def pooled_dim(self, tower: Any) -> int | None:
        """Width of the final norm."""
        return int(tower.ln_post.normalized_shape[0])

    def _start(self, tower: Any, images: Tensor) -> tuple[Tensor, Sequence[Step]]:
        return tower._embeds(images), self._steps(tower)

    def _steps(self, tower: Any) -> Sequence[Step]:
        return list(tower.transformer.resblocks)

    def _finish(self, tower: Any, hidden: Tensor, project: bool) -> Tensor:
        pooled: Tensor = tower._pool(hidden)[0]
        return pooled if tower.proj is None or not project else pooled @ tower.proj


class ResNetLayout(ImageLayout):
    """open_clip's `ModifiedResNet`: its stem, then every residual block of its four layers.

    `norm` is empty: a ResNet has no final norm, its batch norms belong to their blocks.
    """

    @staticmethod
    def of(tower: nn.Module) -> "ResNetLayout":
        """The layout of `tower`."""
        stem = _present(tower, "conv1", "bn1", "conv2", "bn2", "conv3", "bn3")
        residual = tuple(
            (f"layer{i}.{n}",)
            for i in range(1, 5)
            for n, _ in enumerate(tower.get_submodule(f"layer{i}").children())
        )
        return checked(tower, ResNetLayout((), (stem, *residual), (), ("attnpool",)))

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

    def _start(self, tower: Any, images: Tensor) -> tuple[Tensor, Sequence[Step]]:
        return images, self._steps(tower)

    def _steps(self, tower: Any) -> Sequence[Step]:
        return [tower.stem, *(tower.get_submodule(name) for (name,) in self.blocks[1:])]

    def _finish(self, tower: Any, hidden: Tensor, project: bool) -> Tensor:
        if not project:
            raise ValueError(NO_POOLED)
        features: Tensor = tower.attnpool(hidden)
        return features


NO_POOLED = (
    "the image tower's attention pool is its projection, so it has no features before its "
    "projection: embed 'projected'"
)


def text_layout(tower: nn.Module) -> Layout:
    """Layout of a text tower: `CLIP` itself, or the `text` of `CustomTextCLIP`.

    The tower is open_clip's own transformer or one of Hugging Face. Raises ValueError where no
    blocks are found.
    """
    transformer = getattr(tower, "transformer", None)
    own = getattr(transformer, "resblocks", None)
    if own is not None:
        return Layout(
            embedding=_present(tower, "token_embedding", "positional_embedding", "cls_emb"),
            blocks=tuple((f"transformer.resblocks.{i}",) for i, _ in enumerate(own.children())),
            norm=("ln_final",),
            projection=_present(tower, "text_projection"),
        )
    lists = [
        (f"transformer.{name}", module)
        for name, module in (transformer.named_modules() if transformer is not None else ())
        if isinstance(module, nn.ModuleList)
    ]
    if not lists:
        raise ValueError(
            f"the text tower is a {type(tower).__name__} whose blocks are not known: lock it, or "
            "use an open_clip text transformer"
        )
    # In Hugging Face's encoders the blocks are the longest module list. Parameters registered
    # before it are the embedding, those after it the final norm.
    name, layers = max(lists, key=lambda pair: len(pair[1]))
    blocks = tuple((f"{name}.{i}",) for i in range(len(layers)))
    outside: tuple[list[str], list[str]] = ([], [])
    seen = False
    for tensor, _ in tower.named_parameters(remove_duplicate=False):
        if tensor.startswith(f"{name}."):
            seen = True
        elif tensor.startswith("transformer.") and ".pooler." not in tensor:
            outside[seen].append(tensor)
    return Layout(tuple(outside[0]), blocks, tuple(outside[1]), ("transformer.pooler", "proj"))


def _present(tower: nn.Module, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if getattr(tower, name, None) is not None)


def belongs(name: str, parts: tuple[str, ...]) -> bool:
    """Whether the tensor `name` is one of `parts` or lies below one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


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
