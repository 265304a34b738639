"""An image tower as blocks: what lies before, in and after them, and how to run a part of it.

Freezing and the trunk/tail split both follow from one table of names, `TowerLayout`. The names are
those of open_clip's towers; only torch is imported here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class TowerLayout:
    """Which parts of an image tower are what; names are relative to the tower.

    A name is a submodule or a parameter. `embedding` lies before the first block and is empty for
    a ResNet, whose stem is its first block and whose residual blocks are the others.
    """

    kind: Literal["transformer", "resnet"]
    embedding: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    norm: tuple[str, ...]
    projection: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """Transformer blocks, or the stem and the residual blocks of a ResNet (RN50: 1 + 16)."""
        return len(self.blocks)

    @property
    def counted(self) -> str:
        """The number of blocks in words, for messages."""
        if self.kind == "transformer":
            return f"{self.num_blocks} blocks"
        return f"{self.num_blocks} blocks (the stem and {self.num_blocks - 1} residual blocks)"

    def trunk(self, num_blocks: int) -> tuple[str, ...]:
        """Names in the first `num_blocks` blocks; with any block comes the embedding."""
        if num_blocks == 0:
            return ()
        return self.embedding + tuple(name for block in self.blocks[:num_blocks] for name in block)

    def layers_above(self, name: str) -> int:
        """Layers above that of the tensor `name`, as layer-wise decay counts them.

        0 for what lies after the blocks, 1 for the last block, most for the embedding.
        """
        for number, block in enumerate((self.embedding, *self.blocks)):
            if belongs(name, block):
                return self.num_blocks + 1 - number
        return 0


def transformer_layout(tower: nn.Module) -> TowerLayout:
    """Layout of an open_clip `VisionTransformer`.

    Raises ValueError where the tower has parts that are not understood (attentional pooling).
    """
    transformer = tower.get_submodule("transformer")
    if not getattr(transformer, "batch_first", True):
        raise ValueError("the image tower runs its blocks sequence first, which is not supported")
    if tower.pool_type not in ("tok", "avg"):
        raise ValueError(f"pooling {tower.pool_type!r} of the image tower is not supported")
    blocks = transformer.get_submodule("resblocks")
    layout = TowerLayout(
        kind="transformer",
        embedding=_present(tower, "conv1", "class_embedding", "positional_embedding", "ln_pre"),
        blocks=tuple((f"transformer.resblocks.{i}",) for i, _ in enumerate(blocks.children())),
        norm=("ln_post",),
        projection=_present(tower, "proj"),
    )
    return _checked(tower, layout)


def resnet_layout(tower: nn.Module) -> TowerLayout:
    """Layout of an open_clip `ModifiedResNet`: its stem, then every residual block of its layers.

    `norm` is empty: a ResNet has no final norm, its batch norms belong to their blocks.
    """
    stem = _present(tower, "conv1", "bn1", "conv2", "bn2", "conv3", "bn3")
    residual = tuple(
        (f"layer{i}.{n}",)
        for i, layer in enumerate(block_modules(tower), start=1)
        for n, _ in enumerate(layer.children())
    )
    return _checked(tower, TowerLayout("resnet", (), (stem, *residual), (), ("attnpool",)))


def text_layout(tower: nn.Module) -> TowerLayout:
    """Layout of an open_clip text transformer: `CLIP` itself, or the `text` of `CustomTextCLIP`.

    Raises ValueError for other text towers (Hugging Face models).
    """
    number = len(block_modules(tower))
    if number == 0:
        raise ValueError(
            f"the text tower is a {type(tower).__name__} whose blocks are not known: lock it, or "
            "use an open_clip text transformer"
        )
    return TowerLayout(
        kind="transformer",
        embedding=_present(tower, "token_embedding", "positional_embedding", "cls_emb"),
        blocks=tuple((f"transformer.resblocks.{i}",) for i in range(number)),
        norm=("ln_final",),
        projection=_present(tower, "text_projection"),
    )


def block_modules(tower: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a tower of either kind, or the four layers of a ResNet.

    Empty for towers that are not understood. A ResNet's stem is no module of its own.
    """
    blocks = getattr(getattr(tower, "transformer", None), "resblocks", None)
    if blocks is not None:
        return list(blocks.children())
    return [getattr(tower, name) for name in _present(tower, *(f"layer{i}" for i in range(1, 5)))]


def _present(tower: nn.Module, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if getattr(tower, name, None) is not None)


def belongs(name: str, parts: tuple[str, ...]) -> bool:
    """Whether the tensor `name` is one of `parts` or lies below one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _checked(tower: nn.Module, layout: TowerLayout) -> TowerLayout:
    known = layout.trunk(layout.num_blocks) + layout.norm + layout.projection
    strange = [name for name in tower.state_dict() if not belongs(name, known)]
    if strange:
        raise ValueError(
            f"the image tower has parts that cannot be split or locked: {strange[:3]}; "
            "use an open_clip VisionTransformer without attentional pooling or a ModifiedResNet"
        )
    return layout


def run_trunk(tower: nn.Module, layout: TowerLayout, images: Tensor, num_blocks: int) -> Tensor:
    """[B, 3, H, W] -> what goes into block `num_blocks`; for 0 the images themselves."""
    if num_blocks == 0:
        return images
    if layout.kind == "resnet":
        return _run_blocks(tower, layout, images, 0, num_blocks)
    # open_clip's own pass, stopped after a block; class token and patches come back apart.
    found = tower.forward_intermediates(  # type: ignore[operator]
        images,
        indices=[num_blocks - 1],
        stop_early=True,
        intermediates_only=True,
        output_fmt="NLC",
        output_extra_tokens=True,
    )
    parts = (found["image_intermediates_prefix"][0], found["image_intermediates"][0])
    return torch.cat(parts, dim=1)


def run_tail(
    tower: nn.Module, layout: TowerLayout, hidden: Tensor, num_blocks: int, project: bool = True
) -> Tensor:
    """Output of `run_trunk` with the same `num_blocks` -> features [B, D], raw (not unit length).

    With `project=False` the pooled features before the projection; ValueError for a ResNet, whose
    attention pool is its projection.
    """
    if layout.kind == "resnet":
        if not project:
            raise ValueError(
                "a ResNet tower has no features before its projection: embed 'projected'"
            )
        hidden = _run_blocks(tower, layout, hidden, num_blocks, layout.num_blocks)
        features: Tensor = tower.get_submodule("attnpool")(hidden)
        return features
    if num_blocks == 0:  # hidden is the images
        hidden = run_trunk(tower, layout, hidden, layout.num_blocks)
    else:
        hidden = _run_blocks(tower, layout, hidden, num_blocks, layout.num_blocks)
    pooled = _pool(tower, hidden)
    projection = getattr(tower, "proj", None)
    return pooled if projection is None or not project else pooled @ projection


def _blocks(tower: nn.Module, layout: TowerLayout) -> Iterator[Callable[[Tensor], Tensor]]:
    if layout.kind == "resnet":
        yield tower.stem  # type: ignore[misc]  # a method, not a submodule
        yield from (tower.get_submodule(name) for (name,) in layout.blocks[1:])
    else:
        yield from (tower.get_submodule(name) for (name,) in layout.blocks)


def _run_blocks(
    tower: nn.Module, layout: TowerLayout, hidden: Tensor, start: int, stop: int
) -> Tensor:
    recompute = layout.kind == "transformer" and bool(
        getattr(tower.get_submodule("transformer"), "grad_checkpointing", False)
    )
    for block in islice(_blocks(tower, layout), start, stop):
        if recompute and torch.is_grad_enabled():
            hidden = checkpoint(block, hidden, use_reentrant=False)
        else:
            hidden = block(hidden)
    return hidden


def _pool(tower: nn.Module, hidden: Tensor) -> Tensor:
    """[B, 1 + patches, width] -> [B, width]: final norm and pooling in the tower's order."""
    norm = tower.get_submodule("ln_post")
    if not tower.final_ln_after_pool:
        hidden = norm(hidden)
    pooled = hidden[:, 0] if tower.pool_type == "tok" else hidden[:, 1:].mean(dim=1)
    return norm(pooled) if tower.final_ln_after_pool else pooled
