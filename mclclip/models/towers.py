"""Layouts of towers: the names of their parts, and how to run a part of an image tower.

Freezing, layer-wise decay, adapters and the split into trunk and tail all use one table of names, a
`TowerLayout`. This file makes the layouts of open_clip's own image towers and of text towers;
`backbones` makes those of timm and torchvision. The last section stretches the context of a text
tower. This file imports neither open_clip nor timm.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Step = Callable[[Tensor], Tensor]
"""Runs a part of a tower: hidden values -> hidden values."""
Names = tuple[str, ...]
MemoryFormat = Literal["contiguous", "channels_last"]
"""How images and hidden values [B, C, H, W] of a tower lie in memory: channel by channel, or all
channels of a position side by side."""


@dataclass(frozen=True)
class TowerLayout:
    """The names of a tower's submodules and parameters, by the part that they belong to.

    embedding   before the first block; empty for open_clip's ResNet, whose stem is its first block
    blocks      of each block one or more modules, for example a downsampling convolution and the
                residual block after it
    norm        the final norm
    projection  everything else after the last block: poolings with weights, and projections
    layers      the layers of layer-wise decay, from the input on; empty: the embedding, each block
                (the last one with the final norm), and the projection
    """

    embedding: Names
    blocks: tuple[Names, ...]
    norm: Names
    projection: Names
    layers: tuple[Names, ...] = field(default=(), kw_only=True)

    def trunk(self, num_blocks: int) -> Names:
        """Returns the names in the embedding and the first `num_blocks` blocks; none for 0."""
        if num_blocks == 0:
            return ()
        return self.embedding + tuple(name for block in self.blocks[:num_blocks] for name in block)

    def last(self, count: int | Literal["all"], option: str, tower: str) -> Names:
        """Returns the names in the last `count` blocks.

        Raises ValueError, which names the `option` and the `tower`, for more than there are.
        """
        most = len(self.blocks)
        number = most if count == "all" else count
        if not 0 <= number <= most:
            raise ValueError(
                f"{option} is {number}, but the {tower} tower has {most} blocks: give 0 to {most}, "
                "or 'all'"
            )
        blocks = self.blocks[most - number :]
        return tuple(name for block in blocks for name in block)

    def layers_above(self, name: str) -> int:
        """Returns how many layers lie above the tensor `name`, for layer-wise decay.

        The layers are those of open_clip's `layer_groups` and of timm's `group_matcher`.
        """
        last = tuple(name for block in self.blocks[-1:] for name in block) + self.norm
        layers = self.layers or (self.embedding, *self.blocks[:-1], last, self.projection)
        layers = tuple(filter(None, layers))
        above = (len(layers) - 1 - n for n, parts in enumerate(layers) if belongs(name, parts))
        return next(above, 0)

    def count_without(self, names: Iterable[str]) -> int:
        """Returns how many first blocks hold none of the tensors `names`.

        It is 0 if the embedding holds one.
        """
        parts = (self.embedding, *self.blocks)
        holders = (n for name in names for n, part in enumerate(parts) if belongs(name, part))
        return max(min(holders, default=len(parts)) - 1, 0)

    def block_modules(self, tower: nn.Module) -> list[nn.Module]:
        """Returns the modules of the blocks that have parameters, in order.

        For open_clip's ResNet, whose stem is no module of its own, these are the four layers.
        """
        names = [name for block in self.blocks for name in block]
        if self.blocks and not self.embedding:
            names = [f"layer{i}" for i in range(1, 5)]
        modules = [tower.get_submodule(name) for name in names]
        return [module for module in modules if any(True for _ in module.parameters())]


@dataclass(frozen=True)
class ImageLayout(TowerLayout):
    """The layout of an image tower, which can also run a part of the tower.

    finish      (tower, output of the last block, project) -> features [B, D]
    pooled_dim  width of the features before the projection; None if there are none
    after       modules between the last block and the pooling
    start       (tower, images) -> (input of the first block, extra); `extra` depends on the images
                and goes to `steps`. None: run the modules of `embedding`, one after the other
    steps       (tower, extra or None) -> functions that run one block each. None: run the modules
    """

    finish: Callable[[Any, Tensor, bool], Tensor]
    pooled_dim: int | None
    after: Names = ()
    start: Callable[[Any, Tensor], tuple[Tensor, Any]] | None = None
    steps: Callable[[Any, Any], Sequence[Step]] | None = None

    def _check_number(self, num_blocks: int) -> None:
        if not 0 <= num_blocks <= len(self.blocks):
            raise ValueError(f"the image tower has {len(self.blocks)} blocks, got {num_blocks}")

    def run_trunk(self, tower: nn.Module, images: Tensor, num_blocks: int) -> Tensor:
        """Runs the first `num_blocks` blocks on images [B, 3, H, W]; for 0 returns the images."""
        self._check_number(num_blocks)
        if num_blocks == 0:
            return images
        hidden, steps = self._begin(tower, images)
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
        """Runs everything after the first `num_blocks` blocks on the output of `run_trunk`.

        Returns features [B, D], not of unit length; with `project=False` the pooled features before
        the projection. With `recompute` the blocks run again in the backward pass instead of
        keeping activations. Raises ValueError for features before the projection if the attention
        pool is the projection.
        """
        self._check_number(num_blocks)
        if not project and self.pooled_dim is None:
            raise ValueError(
                "the image tower's attention pool is its projection, so it has no features before "
                "its projection: embed 'projected'"
            )
        if num_blocks == 0:  # then `hidden` holds the images
            hidden, steps = self._begin(tower, hidden)
        else:
            steps = self._steps(tower, None)
        for step in steps[num_blocks:]:
            if recompute and torch.is_grad_enabled():
                hidden = checkpoint(step, hidden, use_reentrant=False)
            else:
                hidden = step(hidden)
        return self.finish(tower, _run_in_turn(tower, self.after, hidden), project)

    def _begin(self, tower: nn.Module, images: Tensor) -> tuple[Tensor, Sequence[Step]]:
        if self.start is None:
            return _run_in_turn(tower, self.embedding, images), self._steps(tower, None)
        hidden, extra = self.start(tower, images)
        return hidden, self._steps(tower, extra)

    def _steps(self, tower: nn.Module, extra: Any) -> Sequence[Step]:
        if self.steps is not None:
            return self.steps(tower, extra)
        return [partial(_run_in_turn, tower, block) for block in self.blocks]


def _run_in_turn(tower: nn.Module, names: Names, hidden: Tensor) -> Tensor:
    for name in names:
        hidden = tower.get_submodule(name)(hidden)
    return hidden


def layout_or_reason(tower: nn.Module, make: Callable[[Any], ImageLayout]) -> ImageLayout | str:
    """Returns the layout that `make` builds, or why the image tower cannot be split or locked.

    A layout without blocks, or without some tensor of the tower, is refused too.
    """
    try:
        layout = make(tower)
    except ValueError as error:
        return str(error)
    named_parts = layout.trunk(len(layout.blocks)) + layout.norm + layout.projection
    strange = [name for name in tower.state_dict() if not belongs(name, named_parts)]
    if layout.blocks and not strange:
        return layout
    return (
        f"the image tower is a {type(tower).__name__} with parts that cannot be split or locked: "
        f"{strange[:3]}; use another model"
    )


def choose_memory_format(tower: nn.Module) -> MemoryFormat:
    """Chooses channels-last for a tower of convolutions, whose kernels then copy less.

    A transformer gains nothing: its only convolution cuts the patches. And a CPU's oneDNN writes
    outside its memory in the backward pass of a channels-last 1 x 1 convolution with a stride whose
    input has less than a register of channels (oneDNN issue 6035): 8 with AVX2, 16 with AVX-512.
    """
    convolutions = [module for module in tower.modules() if isinstance(module, nn.Conv2d)]
    unsafe = any(
        each.kernel_size == (1, 1) and each.stride != (1, 1) and each.in_channels < 16 * each.groups
        for each in convolutions
    )
    return "channels_last" if len(convolutions) > 1 and not unsafe else "contiguous"


def arrange(hidden: Tensor, memory_format: MemoryFormat) -> Tensor:
    """Returns images or hidden values [B, C, H, W] in ``memory_format``, copied if necessary.

    Values of other shapes are returned unchanged. Weights need no change, since convolutions take
    the format of their input.
    """
    if memory_format == "channels_last" and hidden.dim() == 4:
        return hidden.contiguous(memory_format=torch.channels_last)
    return hidden


def belongs(name: str, parts: Names) -> bool:
    """Returns True if the tensor `name` is one of `parts` or lies in one of these modules."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def number_blocks(tower: nn.Module, name: str) -> tuple[Names, ...]:
    """Returns the modules directly inside the submodule `name`, each as one block."""
    return tuple((f"{name}.{child}",) for child, _ in tower.get_submodule(name).named_children())


def present(tower: nn.Module, *names: str) -> Names:
    """Returns those of the names that the tower has, and that are not None."""
    return tuple(name for name in names if getattr(tower, name, None) is not None)


def pair(size: Any) -> tuple[int, int]:
    """Returns height and width of a size, which may be one number for both."""
    return (int(size[0]), int(size[1])) if isinstance(size, (tuple, list)) else (size, size)


def resize_positions(rows: Tensor, before: tuple[int, int], after: tuple[int, int]) -> Tensor:
    """Resizes position embeddings [k + h w, D] of a grid (h, w) to [k + h' w', D].

    As in open_clip and timm the interpolation is bicubic with antialiasing, and the first k rows,
    which belong to no patch (class token, registers), stay.
    """
    if before == after:
        return rows
    extra = len(rows) - before[0] * before[1]
    patches = rows[extra:].reshape(1, *before, -1).permute(0, 3, 1, 2)
    patches = functional.interpolate(
        patches, after, mode="bicubic", antialias=True, align_corners=False
    )
    return torch.cat([rows[:extra], patches.permute(0, 2, 3, 1).flatten(0, 2)])


@contextmanager
def resized_positions(
    module: nn.Module, name: str, before: Sequence[int], after: Sequence[int]
) -> Iterator[None]:
    """Within the block, a module's parameter `name` of positions has those of the grid `after`.

    They are a linear function of the parameter, which gets their gradient. A product with its
    matrix has one order of sums on a GPU, which the gradient of an interpolation has not.
    """
    positions = getattr(module, name)
    if tuple(before) == tuple(after) or positions is None:
        yield
        return
    rows = positions.reshape(-1, positions.shape[-1])
    number = before[0] * before[1]
    each = torch.eye(number, dtype=rows.dtype, device=rows.device)
    matrix = resize_positions(each, (before[0], before[1]), (after[0], after[1]))
    extra = len(rows) - number
    resized = torch.cat([rows[:extra], matrix @ rows[extra:]])
    # An attribute of the module itself comes before its parameter of this name.
    vars(module)[name] = resized.reshape(*positions.shape[:-2], *resized.shape)
    try:
        yield
    finally:
        del vars(module)[name]


# --- open_clip's own towers, and text towers -------------------------------------------------


def vision_transformer_layout(tower: Any) -> ImageLayout:
    """Returns the layout of open_clip's `VisionTransformer`."""
    embedding = ("conv1", "class_embedding", "positional_embedding", "patch_dropout", "ln_pre")
    return ImageLayout(
        embedding=present(tower, *embedding),
        blocks=number_blocks(tower, "transformer.resblocks"),
        norm=("ln_post",),
        projection=present(tower, "attn_pool", "attn_pool_contrastive", "proj"),
        finish=_finish_vision_transformer,
        pooled_dim=int(tower.ln_post.normalized_shape[0]),
        start=_start_vision_transformer,
    )


def _start_vision_transformer(tower: Any, images: Tensor) -> tuple[Tensor, None]:
    sides = zip(images.shape[-2:], tower.patch_size, strict=True)
    grid = tuple(int(side) // patch for side, patch in sides)
    with resized_positions(tower, "positional_embedding", tower.grid_size, grid):
        return tower._embeds(images), None


def _finish_vision_transformer(tower: Any, hidden: Tensor, project: bool) -> Tensor:
    pooled: Tensor = tower._pool(hidden)[0]
    return pooled if tower.proj is None or not project else pooled @ tower.proj


def resnet_layout(tower: nn.Module) -> ImageLayout:
    """Returns the layout of open_clip's `ModifiedResNet`, whose blocks are the stem and every
    residual block.

    `norm` is empty, since batch norms belong to their blocks. The attention pool is the projection.
    """
    stem = present(tower, "conv1", "bn1", "conv2", "bn2", "conv3", "bn3")
    residual = tuple(block for i in range(1, 5) for block in number_blocks(tower, f"layer{i}"))
    return ImageLayout(
        embedding=(),
        blocks=(stem, *residual),
        norm=(),
        projection=("attnpool",),
        finish=_finish_resnet,
        pooled_dim=None,
        steps=partial(_resnet_steps, residual),
        layers=(stem, *((f"layer{i}",) for i in range(1, 5)), ("attnpool",)),
    )  # fmt: skip


def _resnet_steps(residual: Sequence[Names], tower: Any, _: Any) -> list[Step]:
    return [tower.stem, *(tower.get_submodule(name) for (name,) in residual)]


def _finish_resnet(tower: Any, hidden: Tensor, _: bool) -> Tensor:
    side = math.isqrt(len(tower.attnpool.positional_embedding) - 1)
    grid = tuple(hidden.shape[-2:])
    with resized_positions(tower.attnpool, "positional_embedding", (side, side), grid):
        pooled: Tensor = tower.attnpool(hidden)
    return pooled


def text_layout(tower: nn.Module) -> TowerLayout:
    """Returns the layout of a text tower: open_clip's own transformer, or one of Hugging Face.

    `tower` is a `CLIP` itself, or the `text` of a `CustomTextCLIP`. Raises ValueError if no blocks
    are found.
    """
    if isinstance(layout := getattr(tower, "layout", None), TowerLayout):
        return layout  # a ``RowProjection``'s
    transformer = getattr(tower, "transformer", None)
    if getattr(transformer, "resblocks", None) is not None:
        return TowerLayout(
            embedding=present(tower, "token_embedding", "positional_embedding", "cls_emb"),
            blocks=number_blocks(tower, "transformer.resblocks"),
            norm=("ln_final",),
            projection=present(tower, "text_projection"),
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
    return TowerLayout(tuple(before), number_blocks(tower, name), tuple(after), top)


# --- a longer context ------------------------------------------------------------------------

# Zhang et al., "Long-CLIP: Unlocking the Long-Text Capability of CLIP" (2024), section 3.1.
# Captions in CLIP's training are short, so its first 20 positions are trained well and stay as they
# are; the others are stretched to four times as many by linear interpolation. A context of 77
# tokens becomes 248. In a causal tower no token sees those after it, so a text that ends within 20
# tokens keeps its features. A tower without a causal mask sees the padding too, and its features
# change.
UNCHANGED, _RATIO = 20, 4
LONGEST = 248  # what 77 tokens become; more means that a context was stretched before
CONTEXT = 77  # open_clip's default


def longer_config(model_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model config with a context of 20 + 4 (L - 20) tokens in the place of L.

    Raises ValueError for a model without a text tower, for a text tower of Hugging Face or with a
    class token (``embed_cls``), and for a context of 20 tokens or less, or of more than 77, since
    that was stretched before.
    """
    text = dict(model_cfg.get("text_cfg") or {})
    length, reason = text.get("context_length", CONTEXT), ""
    if not text:
        reason = "the model has no text tower"
    elif text.get("hf_model_name"):
        reason = f"the text tower is {text['hf_model_name']} of Hugging Face"
    elif text.get("embed_cls"):
        reason = "the text tower has a class token after the text (embed_cls)"
    elif length <= UNCHANGED:
        reason = f"the text tower has a context of {length} tokens, wanted more than {UNCHANGED}"
    elif (longer := UNCHANGED + _RATIO * (length - UNCHANGED)) > LONGEST:
        reason = (
            f"the context of {length} tokens would become {longer}, wanted {LONGEST} at most (it "
            "may have been stretched before)"
        )
    if reason:
        raise ValueError(
            f"long_context=true stretches the positions after the first {UNCHANGED} of "
            f"open_clip's own text towers, and {reason}: set long_context=false, or take another "
            "model"
        )
    text["context_length"] = longer
    return {**model_cfg, "text_cfg": text}


def stretch_positions(positions: Tensor) -> Tensor:
    """Stretches positional embeddings p [L, D] to [20 + 4 (L - 20), D].

    For j = 0 to 3, row 20 + 4 i + j is (1 - j/4) p_{20+i} + (j/4) p_{21+i}. Behind the last
    position p_{L-1} the line from p_{L-2} to p_{L-1} is continued.
    """
    rows, steps = positions[UNCHANGED:], positions[UNCHANGED - 1 :].diff(dim=0)
    steps = torch.cat([steps[1:], steps[-1:]])
    quarters = [rows + j / _RATIO * steps for j in range(_RATIO)]
    return torch.cat([positions[:UNCHANGED], torch.stack(quarters, dim=1).flatten(0, 1)])


def stretch(clip: Any) -> None:
    """Stretches the context of open_clip's module in place: positions, causal mask and lengths.

    Call it only if ``longer_config`` accepted the module's config.
    """
    tower = getattr(clip, "text", clip)  # a CustomTextCLIP has `text`; a CLIP is its own tower
    tower.positional_embedding.data = stretch_positions(tower.positional_embedding.data)
    length = len(tower.positional_embedding)
    if tower.attn_mask is not None:
        tower.attn_mask = tower.attn_mask.new_full((length, length), -float("inf")).triu_(1)
    for module in (clip, tower):
        module.context_length = length
    if hasattr(tower, "num_pos"):
        tower.num_pos = length


class PatchDropout(nn.Module):
    """In training, tokens [b, 1 + n, D] -> [b, 1 + k, D] with k = max(1, int(n (1 - share))).

    Source: Li et al., "Scaling Language-Image Pre-training via Masking" (FLIP, 2022), section 3.
    The first token, the class token, always stays. Patches that stay keep their positions. They are
    drawn for each picture from the global generator of the device, which every training step seeds
    and gradient caching replays. On a CPU the draws are those of open_clip's PatchDropout; that
    keeps its indices in main memory, for which a GPU would wait at every step.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens with their positions added -> those that stay, in the order of the draws."""
        if not self.training:
            return tokens
        first, patches = tokens[:, :1], tokens[:, 1:]
        batch, num = patches.shape[:2]
        keys = torch.randn(batch, num, device=tokens.device)
        drawn = keys.topk(max(1, int(num * (1 - self.share))), dim=1).indices
        rows = torch.arange(batch, device=tokens.device)[:, None]
        return torch.cat([first, patches[rows, drawn]], dim=1)
