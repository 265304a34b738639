"""Which kernels of attention a training may use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mclclip.models.loading import load_towers
from mclclip.ranks.process_group import choose_flash_attention
from mclclip.train.build import attention_kernels
from tests import tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LONG = tiny.MODEL | {"vision_cfg": tiny.MODEL["vision_cfg"] | {"image_size": 96}}  # 145 patches
TIMM = tiny.MODEL | {
    "vision_cfg": {"timm_model_name": "vit_tiny_patch16_224", "timm_proj": "linear"}
}


@pytest.mark.parametrize("length", [1, 50, 128, 129, 257, 1025])
def test_flash_attention_is_left_out_where_it_is_slower(length: int) -> None:
    assert choose_flash_attention(GPU, length, True) == (length > 128)
    assert choose_flash_attention(GPU, length, False)
    assert choose_flash_attention(CPU, length, True)


@pytest.mark.parametrize(
    ("model", "flash"), [(tiny.MODEL, False), (LONG, True), (TIMM, True), (tiny.RESNET, False)]
)
def test_the_choice_ends_with_the_training(model: Any, flash: bool) -> None:
    towers = load_towers(model, seed=0)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(KeyError), attention_kernels(towers, GPU):
            assert torch.backends.cuda.flash_sdp_enabled() == flash
            raise KeyError
        with attention_kernels(towers, CPU):
            assert torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.backends.cuda.flash_sdp_enabled()
