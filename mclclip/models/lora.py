"""LoRA on the blocks of a tower (Hu et al., arXiv:2106.09685): W + alpha / rank * B @ A.

The adapters change weights, through `torch.nn.utils.parametrize`, and do not wrap layers:
open_clip's attention is torch's fused `nn.MultiheadAttention`, which reads `in_proj_weight` and
`out_proj.weight` and calls no layer that could be wrapped. peft (0.21) instead adds the product to
the weight before every forward pass and subtracts it afterwards, each time as a new `Parameter`:
the frozen weights drift by rounding, FSDP2, DDP and compiled blocks hold stale objects, and the
adapter of `out_proj` is added twice, once without gradient. A parametrized weight is a function of
parameters that stay the same objects, so sharding, recomputation, autocast and the fused kernels
work. The backward pass briefly holds the gradient of the whole weight, before those of A and B. So
LoRA here saves gradients, optimizer state and communication, but no arithmetic.

As in peft, query, key and value share one A where their weights are one tensor, and a convolution
counts as a matrix [out, in * height * width]; grouped convolutions get no adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from mclclip.models import towers
from mclclip.models.model import Model

_ATTENTION, _MLP = ("attn", "attention"), ("mlp", "ffn", "feedforward")


class LowRank(nn.Module):
    """Maps a weight [out, in] to weight + scale * B @ A; B [out, rank] starts at zero.

    A [rank, in] is drawn as in LoRA's own code, uniform within 1 / sqrt(in). `dropout` drops input
    features of the adapter, the same ones for all tokens of a forward pass. A convolution's weight
    [out, in, height, width] counts as [out, in * height * width].
    """

    def __init__(
        self, weight: Tensor, rank: int, scale: float, dropout: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.scale, self.dropout = scale, dropout
        lora_a = torch.empty(rank, weight[0].numel())
        nn.init.kaiming_uniform_(lora_a, a=math.sqrt(5), generator=generator)
        self.lora_a = nn.Parameter(lora_a.to(weight))
        self.lora_b = nn.Parameter(weight.new_zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        """Returns the adapted weight, in the weight's own precision even under autocast."""
        lora_a: Tensor = self.lora_a
        if self.training and self.dropout:
            lora_a = lora_a * functional.dropout(torch.ones_like(lora_a[0]), self.dropout)
        with torch.autocast("cpu" if weight.is_meta else weight.device.type, enabled=False):
            matrix = torch.addmm(weight.flatten(1), self.lora_b, lora_a, alpha=self.scale)
            return matrix.reshape(weight.shape)


def add_lora(
    model: Model,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: str = "all",
    text: bool = False,
    seed: int = 0,
) -> list[str]:
    """Puts adapters on the unlocked image blocks, in place; returns the names of what is trained.

    Call it after the model's `lock`, which would unlock the adapted weights again. In the image
    tower only the adapters are trained, and the final norm and projection if they are unlocked;
    everything else in and before the blocks is frozen, norms and biases too, as in peft. With
    `text` the unlocked blocks of the text tower get adapters in the same way; otherwise the text
    tower stays as it was locked. The model's output does not change at first, since B is zero. A is
    drawn by `seed`; torch's global generators are neither used nor changed.

    Raises ValueError if no block is unlocked, or the blocks have no weights of the kind `targets`.
    `LoraConfig` holds the ranges of the numbers and the kinds of targets.
    """
    assert not any(_adapted(model)), "the model has LoRA adapters already"
    adapted: list[tuple[nn.Module, towers.TowerLayout]] = [(model.visual, model.layout)]
    if text and model.reads_texts:
        adapted.append((model.text_tower, model.text_layout))
    unlocked = [
        tower.get_submodule(name)
        for tower, layout in adapted
        for block in layout.blocks
        for name in block
        if any(p.requires_grad for p in tower.get_submodule(name).parameters())
    ]
    if not unlocked:
        raise ValueError("LoRA adapts unlocked image blocks, but all are locked: set image_blocks")
    matrices = [weight for module in unlocked for weight in _weights(module, targets)]
    if not matrices:
        raise ValueError(
            f"LoRA's targets are {targets!r}, but the unlocked blocks have no such weights: give "
            "'all', or unlock more blocks"
        )
    for tower, layout in adapted:
        for name, parameter in tower.named_parameters():
            if towers.belongs(name, layout.trunk(len(layout.blocks))):
                parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    classes: dict[tuple[type, str], type] = {}
    for module, name in matrices:
        adapter = LowRank(getattr(module, name), rank, alpha / rank, dropout, generator)
        kind = type(module)
        parametrize.register_parametrization(module, name, adapter)
        # parametrize makes a class per module; torch.compile would compile each block anew.
        module.__class__ = classes.setdefault((kind, name), type(module))
    return model.update_frozen()


def _weights(block: nn.Module, targets: str) -> Iterator[tuple[nn.Module, str]]:
    """Yields the modules of a block whose weights get adapters, each with the weight's name.

    `targets` is "attention", "mlp" or "all".
    """
    inside = dict(block.named_modules())
    for path, module in inside.items():
        if getattr(module, "in_proj_weight", None) is not None:  # torch's and open_clip's attention
            name = "in_proj_weight"
        elif isinstance(module, nn.Linear) or (
            isinstance(module, nn.Conv2d) and module.groups == 1
        ):
            name = "weight"
        else:
            continue
        if targets == "all" or (targets == "attention") == _in_attention(path, inside):
            yield module, name


def _in_attention(path: str, inside: dict[str, nn.Module]) -> bool:
    """Returns True if the weight of the module `path` belongs to attention.

    Of the modules around it that are called attention or MLP, the innermost decides. `inside` maps
    the paths within a block to its modules.
    """
    while path:
        words = f"{path.rpartition('.')[2]} {type(inside[path]).__name__}".lower()
        if any(word in words for word in _MLP):
            return False
        if any(word in words for word in _ATTENTION):
            return True
        path = path.rpartition(".")[0]
    return False


def merge_lora(model: Model) -> None:
    """Adds the adapters to their weights, in place; modules and names are then as without LoRA.

    All merged weights are frozen.
    """
    for module in list(_adapted(model)):
        parametrizations: Any = module.parametrizations
        with torch.no_grad():
            merged = {name: weight.eval()() for name, weight in parametrizations.items()}
        # remove_parametrizations would delete a property of the class that several modules share.
        del module.parametrizations
        module.__class__ = type(module).__bases__[0]
        for name, weight in merged.items():
            module.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    model.update_frozen()


def _adapted(model: Model) -> Iterator[nn.Module]:
    """Yields the modules that have an adapter."""
    return (m for m in model.exported.modules() if parametrize.is_parametrized(m))
