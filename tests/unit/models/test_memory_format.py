"""Channels-last: which towers take it, that hidden values lie so, and that results agree."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer
from mclclip.models.towers import MemoryFormat, choose_memory_format
from tests.unit.models.conftest import CONFIGS

TIMM = {"embed_dim": 12, "text_cfg": {"context_length": 8, "width": 16, "heads": 2, "layers": 1}}
SMALL = {"backbone": "mclclip:small_conv", "image_size": 32}
TOWERS: dict[str, Any] = {
    "resnet": CONFIGS / "tiny_resnet.json",
    "small_conv": {"vision_cfg": SMALL},
    "resnet of timm": {"vision_cfg": {"backbone": "timm:test_resnet", "image_size": 32}},
    "convnext": TIMM
    | {"vision_cfg": {"timm_model_name": "test_convnext", "timm_proj": "linear", "image_size": 32}},
    "mobilenet": TIMM
    | {
        "vision_cfg": {
            "timm_model_name": "test_efficientnet", "timm_proj": "linear", "image_size": 32
        }
    },
}  # fmt: skip
every_tower = pytest.mark.parametrize("name", TOWERS)


def formats(model: Model, images: Tensor, **options: Any) -> list[bool]:
    """Whether the input of each convolution lies in channels-last, in the order of their calls."""
    found: list[bool] = []

    def note(module: nn.Module, given: Any) -> None:
        tensor = given[0]
        if min(tensor.shape[1:]) > 1:  # otherwise both formats have the same strides
            found.append(tensor.is_contiguous(memory_format=torch.channels_last))

    convolutions = [m for m in model.visual.modules() if isinstance(m, nn.Conv2d)]
    hooks = [module.register_forward_pre_hook(note) for module in convolutions]
    try:
        model.encode_image(images, **options)
    finally:
        for hook in hooks:
            hook.remove()
    assert found
    return found


@every_tower
@pytest.mark.parametrize("training", [False, True])
def test_convolutions_read_and_write_channels_last(name: str, training: bool) -> None:
    model, images = load_towers(TOWERS[name], seed=1).train(training), torch.randn(2, 3, 32, 32)
    assert model.memory_format == choose_memory_format(model.visual) == "channels_last"
    assert all(formats(model, images))
    model.memory_format = "contiguous"
    assert not formats(model, images)[0]  # ConvNeXt's norms leave channels-last behind them


def test_a_transformer_stays_as_it_was(vit: Model, images: Tensor) -> None:
    assert vit.memory_format == choose_memory_format(vit.visual) == "contiguous"


@pytest.mark.parametrize(("width", "found"), [(8, "contiguous"), (16, "channels_last")])
def test_few_channels_and_a_stride_stay_as_they_were(width: int, found: str) -> None:
    options = {"channels": [width] * 4, "layers": [1] * 4}
    config = {"backbone": "timm:resnet18", "image_size": 32, "options": options}
    model, images = load_towers({"vision_cfg": config}), torch.randn(2, 3, 32, 32)
    assert model.memory_format == found
    assert any(formats(model, images)) == (found == "channels_last")


@every_tower
def test_a_trunk_and_a_tail_have_it_too(name: str) -> None:
    model, images = load_towers(TOWERS[name], seed=1), torch.randn(2, 3, 32, 32)
    number = 1
    with torch.no_grad():
        hidden = model.encode_trunk(images, number)
        model.first_block = number
        rows = hidden.contiguous()  # as a cache gives them
        torch.testing.assert_close(model.encode_image(rows), model.encode_tail(hidden, number))
        assert all(formats(model, rows))


def steps_of(
    name: str, memory_format: MemoryFormat, dtype: torch.dtype, number: int
) -> tuple[list[float], Model]:
    """Losses of some steps of AdamW, and the model after them."""
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(2), dtype=dtype)
    model = load_towers(TOWERS[name], seed=1).to(dtype)
    model.lock("all", image_norm=True, image_projection=True)
    model.train().memory_format = memory_format
    optimizer = build_optimizer(model, weight_decay=0.1, lr=1e-3, eps=1e-6)
    losses = []
    for _ in range(number):
        optimizer.zero_grad()
        loss = model.encode_image(images, normalize=True)[:, 0].square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@every_tower
def test_both_formats_train_alike_in_float64(name: str) -> None:
    """By the tolerance for ranks: losses, weights and statistics to 1e-9 over some steps."""
    plain, other = (steps_of(name, each, torch.float64, 6) for each in get_args(MemoryFormat))
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    close(other[0], plain[0])
    close(dict(other[1].state_dict()), dict(plain[1].state_dict()))


@every_tower
def test_both_formats_agree_in_fp32(name: str) -> None:
    """The loss to 1e-5, and the gradient to 3e-5 of its length. (Over steps, AdamW makes steps of
    full size of gradients that are zero but for rounding, as before a batch norm.)"""
    plain, other = (steps_of(name, each, torch.float32, 1) for each in get_args(MemoryFormat))
    torch.testing.assert_close(other[0], plain[0], rtol=1e-5, atol=0)
    gradients = []
    for _, model in (plain, other):
        for parameter in model.parameters():  # exports, digests and FSDP read plain rows
            assert parameter.is_contiguous()
            assert parameter.grad is None or parameter.grad.is_contiguous()
        found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat(found))
    assert (gradients[1] - gradients[0]).norm() <= 3e-5 * gradients[0].norm()
