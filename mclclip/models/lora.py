"""LoRA on the image tower (Hu et al., arXiv:2106.09685): W + alpha / rank * B @ A.

The adapters sit on weights, through `torch.nn.utils.parametrize`, not on layers: open_clip's
attention is torch's fused `nn.MultiheadAttention`, which reads `in_proj_weight` and
`out_proj.weight` and never calls a layer that could be wrapped. peft's answer to this (0.21) adds
the product to the weight before every forward and subtracts it after, each time as a new
`Parameter`: the frozen weights drift by rounding, whoever holds the old objects (FSDP2, DDP,
compiled blocks) has stale ones, and the adapter of `out_proj` is added twice, once without
gradient. A parametrized weight is an ordinary function of parameters that keep their places, so
sharding, recomputation, autocast and the fused kernels work. The price: the backward makes the
gradient of the whole weight, briefly, before that of A and B. So LoRA here saves gradients,
optimizer state and communication, but no arithmetic.

As in peft, query, key and value share one A, since their weights are one tensor.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from mclclip.models import towers
from mclclip.models.clip_model import ClipModel

Targets = Literal["attention", "mlp", "all"]

# Module below a block, and its weight.
_ATTENTION = (("attn", "in_proj_weight"), ("attn.out_proj", "weight"))
_MLP = (("mlp.c_fc", "weight"), ("mlp.c_proj", "weight"))
_WEIGHTS = {"attention": _ATTENTION, "mlp": _MLP, "all": _ATTENTION + _MLP}


class LowRank(nn.Module):
    """Maps a weight [out, in] to weight + scale * B @ A; B [out, rank] starts at zero.

    A [rank, in] is drawn as in LoRA's own code, uniform within 1 / sqrt(in). `dropout` acts on the
    adapter's input features, with one mask per forward for all tokens.
    """

    def __init__(
        self, weight: Tensor, rank: int, scale: float, dropout: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.scale, self.dropout = scale, dropout
        lora_a = torch.empty(rank, weight.shape[1])
        nn.init.kaiming_uniform_(lora_a, a=math.sqrt(5), generator=generator)
        self.lora_a = nn.Parameter(lora_a.to(weight))
        self.lora_b = nn.Parameter(weight.new_zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        """The adapted weight, in the weight's own precision under autocast too."""
        lora_a: Tensor = self.lora_a
        if self.training and self.dropout:
            lora_a = lora_a * functional.dropout(torch.ones_like(lora_a[0]), self.dropout)
        with torch.autocast(weight.device.type, enabled=False):
            return torch.addmm(weight, self.lora_b, lora_a, alpha=self.scale)


def add_lora(
    model: ClipModel,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: Targets = "all",
    seed: int = 0,
) -> list[str]:
    """Puts adapters on the unlocked image blocks, in place; returns the names now trainable.

    Call it after `ClipModel.lock` (which would unlock the adapted weights again). Of the image
    tower only the adapters are trained, with the final norm and the projection where the lock left
    them free; everything else in and before the blocks is frozen, norms and biases too, as in
    peft. The text tower and the logit scale stay as locked. The model computes at first what it
    did before. A is drawn by `seed` alone: the caller's generators are neither used nor moved.

    Raises ValueError for a tower other than a transformer, where no block is unlocked, for a model
    that has adapters, and for numbers out of range.
    """
    _check(model, rank, alpha, dropout, targets)
    visual, layout = model.clip.visual, model.layout
    blocks = [visual.get_submodule(name) for (name,) in layout.blocks]
    unlocked = [block for block in blocks if any(p.requires_grad for p in block.parameters())]
    if not unlocked:
        raise ValueError("LoRA adapts unlocked image blocks, but all are locked: set image_blocks")
    for name, parameter in visual.named_parameters():
        if not towers.belongs(name, layout.norm + layout.projection):
            parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    classes: dict[type, type] = {}
    for block in unlocked:
        for path, name in _WEIGHTS[targets]:
            module = block.get_submodule(path)
            adapter = LowRank(getattr(module, name), rank, alpha / rank, dropout, generator)
            kind = type(module)
            parametrize.register_parametrization(module, name, adapter)
            # parametrize makes a class per module; torch.compile would compile each block anew.
            module.__class__ = classes.setdefault(kind, type(module))
    return model.update_frozen()


def merge_lora(model: ClipModel) -> None:
    """Adds the adapters to their weights, in place; modules and names are then as without LoRA.

    What was frozen stays so. Raises ValueError where the model has no adapters.
    """
    adapted = list(_adapted(model))
    if not adapted:
        raise ValueError("the model has no LoRA adapters to merge: call add_lora first")
    for module in adapted:
        parametrizations: Any = module.parametrizations
        with torch.no_grad():
            merged = {name: weight.eval()() for name, weight in parametrizations.items()}
        # Not remove_parametrizations, which takes its property from a class that modules share.
        del module.parametrizations
        module.__class__ = type(module).__bases__[0]
        for name, weight in merged.items():
            module.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    model.update_frozen()


def _adapted(model: ClipModel) -> Iterator[nn.Module]:
    return (m for m in model.clip.visual.modules() if parametrize.is_parametrized(m))


def _check(model: ClipModel, rank: int, alpha: float, dropout: float, targets: str) -> None:
    if model.layout.kind != "transformer":
        raise ValueError("LoRA adapts transformer blocks, but the image tower is a ResNet")
    if any(_adapted(model)):
        raise ValueError("the model has LoRA adapters already: merge them first")
    if targets not in _WEIGHTS:
        raise ValueError(f"targets is {targets!r}: give {', '.join(_WEIGHTS)}")
    if rank < 1 or alpha <= 0.0 or not 0.0 <= dropout < 1.0:
        raise ValueError(
            f"rank is {rank}, alpha {alpha}, dropout {dropout}: wanted a rank of 1 or more, a "
            "positive alpha, and a dropout from 0 to below 1"
        )
