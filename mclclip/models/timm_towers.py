"""Layouts of timm's image towers, as open_clip's `TimmModel` wraps them.

Transformers over tokens (ViT, SigLIP, EVA, PE-Core, ViTamin and others) have code of their own
between the image and the first block, which their layouts call. Of all other towers, such as
ConvNeXt, FastViT, Swin and ResNets, one forward pass on the "meta" device is recorded: if the
output of each module is the unchanged input of the next, the tower is a chain of these modules.
timm's `group_matcher`, its grouping for layer-wise decay, says which of them form one block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import mclclip.torchvision_fix  # noqa: F401

# isort: split
from timm.models import group_parameters
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos

from mclclip.models.towers import NO_POOLED, ImageLayout, Step, belongs, checked

_FIRST = (
    *("patch_embed", "cls_token", "reg_token", "dist_token", "pos_embed", "pos_drop"),
    *("patch_drop", "norm_pre", "rope", "shared_rel_pos"),
)


def timm_layout(tower: Any) -> ImageLayout:
    """The layout of an open_clip `TimmModel`, or of another tower with its `trunk` and `head`.

    Raises ValueError, naming timm's class, for a tower whose blocks do not form a chain.
    """
    kinds: dict[type[Any], type[_TimmLayout]] = {
        VisionTransformer: _TokenLayout,
        Eva: _EvaLayout,
        VisionTransformerRelPos: _RelPosLayout,
    }
    for kind, layout in kinds.items():
        if getattr(type(tower.trunk), "forward_features", None) is kind.forward_features:
            return checked(tower, _of_tokens(tower, layout))
    return checked(tower, _of_chain(tower))


class _TimmLayout(ImageLayout):
    """A tower with timm's pooling and open_clip's projection; as it stands, a chain of modules."""

    def pooled_dim(self, tower: Any) -> int | None:
        """Width of timm's features before its classifier; None where the pool projects."""
        return None if hasattr(tower.head, "pool") else int(tower.trunk.head_hidden_size)

    def _finish(self, tower: Any, hidden: Tensor, project: bool) -> Tensor:
        if not project and hasattr(tower.head, "pool"):
            raise ValueError(NO_POOLED)
        pooled: Tensor = tower.trunk.forward_head(hidden, pre_logits=not project)
        features: Tensor = tower.head(pooled) if project else pooled
        return features


# --- transformers over tokens ----------------------------------------------------------------


class _TokenLayout(_TimmLayout):
    """timm's `VisionTransformer`; the convolutions of a hybrid are part of its embedding."""

    def _embed(self, tower: Any, images: Tensor) -> Tensor:
        trunk = tower.trunk
        hidden: Tensor = trunk.patch_drop(trunk._pos_embed(trunk.patch_embed(images)))
        hidden = trunk.norm_pre(hidden)
        return hidden


class _EvaLayout(_TimmLayout):
    """timm's `Eva`, whose blocks also take the rotary embedding of the positions."""

    def _start(self, tower: Any, images: Tensor) -> tuple[Tensor, Sequence[Step]]:
        trunk = tower.trunk
        hidden, rope = trunk._pos_embed(trunk.patch_embed(images))  # patch dropout thins out both
        return trunk.norm_pre(hidden), self._with(tower, rope)

    def _steps(self, tower: Any) -> Sequence[Step]:
        rope = tower.trunk.rope
        if rope is None:
            return self._with(tower, None)
        fixed = hasattr(rope, "feat_shape")
        shape = {} if fixed else {"shape": tower.trunk.patch_embed.grid_size}
        return self._with(tower, rope.get_embed(**shape))

    def _with(self, tower: Any, rope: Tensor | None) -> Sequence[Step]:
        blocks = tower.trunk.blocks
        if rope is not None and getattr(tower.trunk, "rope_mixed", False):  # one for each block
            return [partial(block, rope=own) for block, own in zip(blocks, rope, strict=False)]
        return [partial(block, rope=rope) for block in blocks]


class _RelPosLayout(_TimmLayout):
    """timm's `VisionTransformerRelPos`, whose blocks may share a bias of relative positions."""

    def _embed(self, tower: Any, images: Tensor) -> Tensor:
        hidden, token = tower.trunk.patch_embed(images), tower.trunk.cls_token
        if token is not None:
            hidden = torch.cat((token.expand(len(hidden), -1, -1), hidden), dim=1)
        embedded: Tensor = hidden
        return embedded

    def _steps(self, tower: Any) -> Sequence[Step]:
        shared = tower.trunk.shared_rel_pos
        bias = None if shared is None else shared.get_bias()
        return [partial(block, shared_rel_pos=bias) for block in tower.trunk.blocks]


def _of_tokens(tower: Any, kind: type[_TimmLayout]) -> _TimmLayout:
    if getattr(tower.trunk, "dynamic_img_size", False) and kind is _EvaLayout:
        raise ValueError(
            "the image tower is a timm Eva for images of any size, which cannot be split or locked"
        )
    first = (name for name in _FIRST if getattr(tower.trunk, name, None) is not None)
    embedding = tuple(f"trunk.{name}" for name in first)
    blocks = tuple((f"trunk.blocks.{i}",) for i, _ in enumerate(tower.trunk.blocks))
    return kind(embedding, blocks, *_top(tower, embedding, blocks), ("trunk.norm",))


def _top(
    tower: nn.Module, embedding: tuple[str, ...], blocks: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the final norms, and of everything else that is not in or before a block."""
    known = embedding + tuple(name for block in blocks for name in block)
    norms = tuple(
        name
        for name, module in tower.named_modules()
        if "Norm" in type(module).__name__
        and not any(True for child in module.children() for _ in child.parameters())
        and name.count(".") <= (2 if name.startswith("trunk.head.") else 1)
        and name.startswith("trunk.")
        and not belongs(name, known)
    )
    rest = [n for n in tower.state_dict() if not belongs(n, known + norms)]
    return norms, tuple(dict.fromkeys(".".join(name.split(".")[:2]) for name in rest))


# --- chains of modules -----------------------------------------------------------------------


def _of_chain(tower: Any) -> _TimmLayout:
    trunk = tower.trunk
    try:
        groups = group_parameters(trunk, trunk.group_matcher(coarse=False), reverse=True)
        steps = _Pass(trunk, getattr(tower, "num_channels", 3), tower.image_size).steps(groups)
    except Exception as error:  # a pass of any of timm's towers may fail in any way
        cause = " ".join(str(error).split())[:120]
        raise ValueError(
            f"the image tower is a timm {type(trunk).__name__}, which is no chain of blocks that "
            f"can be split or locked ({cause}): use another model"
        ) from error
    stem = [name for name, group in steps if group == 0]
    embedding = tuple(f"trunk.{name}" for name in stem)
    blocks: list[list[str]] = []
    for (_, before), (name, group) in pairwise([("", 0), *steps[len(stem) :]]):
        if group > before:
            blocks.append([])
        blocks[-1].append(f"trunk.{name}")
    # Modules after the last block (final norms, convolutions) are known by their depth: they are
    # direct children of the tower, blocks are not.
    deep = any(name.count(".") > 1 for block in blocks for name in block)
    after: list[str] = []
    while deep and blocks[-1][-1].count(".") == 1:
        after.insert(0, blocks[-1].pop())
        if not blocks[-1]:
            blocks.pop()
    names = tuple(map(tuple, blocks))
    return _TimmLayout(embedding, names, *_top(tower, embedding, names), tuple(after))


@dataclass
class _Call:
    """One call of a module: its only argument and its result, each with its version.

    The version of a tensor counts changes in place, which leave the tensor the same object.
    """

    name: str
    given: Tensor | None
    given_version: int
    result: Any = None
    result_version: int = 0


class _Pass:
    """The calls of one training pass on the "meta" device, in the order in which they begin."""

    def __init__(self, trunk: Any, channels: int, image_size: tuple[int, int]) -> None:
        self.calls = list[_Call]()
        tensors = dict(trunk.named_parameters()) | dict(trunk.named_buffers())
        shapes = {name: torch.empty_like(t, device="meta") for name, t in tensors.items()}
        training = {module: module.training for module in trunk.modules()}
        hooks = [h for name, m in trunk.named_modules() if name for h in self._watch(name, m)]
        trunk.forward_head = self._pool
        try:
            # In training mode, where a dropout that is no module would break the chain.
            trunk.train()
            self.images = torch.empty(2, channels, *image_size, device="meta")
            with torch.no_grad():
                torch.func.functional_call(trunk, shapes, (self.images,))
        finally:
            del trunk.forward_head
            for hook in hooks:
                hook.remove()
            for module, mode in training.items():
                module.training = mode

    def _pool(self, features: Tensor) -> Tensor:
        self.features = features
        return features

    def _watch(self, name: str, module: nn.Module) -> list[Any]:
        open_calls: list[_Call] = []

        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            plain = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
            given = args[0] if plain else None
            open_calls.append(_Call(name, given, given._version if given is not None else 0))
            self.calls.append(open_calls[-1])

        def end(_: nn.Module, args: Any, result: Any) -> None:
            call = open_calls.pop()
            call.result = result
            call.result_version = result._version if isinstance(result, Tensor) else 0

        return [
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(end),
        ]

    def steps(self, groups: dict[str, int]) -> list[tuple[str, int]]:
        """The modules of the chain and their groups, which never fall; ValueError for no chain.

        A module without parameters belongs to the group before it. `groups`: by parameter name.
        """
        chain = self._chain(_Call("", self.images, 0, self.features), groups)
        if not chain:
            raise ValueError("its modules do not follow one another")
        steps, group = [], 0
        for name in chain:
            group = max([group, *_groups_of(name, groups)])
            steps.append((name, group))
        return steps

    def _chain(self, whole: _Call, groups: dict[str, int]) -> list[str]:
        """The modules within a call that make its result of its argument; empty for no chain.

        A module that timm puts into several groups is replaced by the chain inside of it, if any.
        """
        prefix = f"{whole.name}." if whole.name else ""
        chain: list[str] = []
        hidden, version, skipped = whole.given, whole.given_version, ""
        for call in self.calls:
            inside = call.name.startswith(prefix) and call.name != whole.name
            nested = skipped and call.name.startswith(f"{skipped}.")
            if not inside or nested or call.given is not hidden or call.given_version != version:
                continue
            skipped = call.name
            parts = self._chain(call, groups) if len(_groups_of(call.name, groups)) > 1 else []
            chain += parts or [call.name]
            hidden, version = call.result, call.result_version
        return chain if hidden is whole.result and len(set(chain)) == len(chain) else []


def _groups_of(name: str, groups: dict[str, int]) -> set[int]:
    return {group for parameter, group in groups.items() if belongs(parameter, (name,))}


def check_image_size(visual: Any) -> None:
    """Raises ValueError if a timm tower, which is built for the size of its name, has another."""
    trunk = getattr(visual, "trunk", None)
    patches = getattr(trunk, "patch_embed", None)
    own = getattr(patches, "img_size", None)
    if own is None or getattr(trunk, "dynamic_img_size", False):
        return
    # Below a transformer, convolutions take any size; positions that are learned do not.
    strict = getattr(patches, "strict_img_size", True) and not hasattr(patches, "backbone")
    positions = getattr(trunk, "pos_embed", None) is not None
    if (strict or positions) and tuple(own) != tuple(visual.image_size):
        raise ValueError(
            f"image_size is {visual.image_size[0]}, but timm's tower of this name takes {own[0]} "
            "pixels only: leave image_size out, or name the tower of that size"
        )
