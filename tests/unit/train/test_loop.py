"""What stands around the steps of a training: garbage, checkpoints, kernels of attention."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from mclclip.checkpoint import step_files
from mclclip.models.loading import load_towers
from mclclip.ranks.process_group import SINGLE, choose_flash_attention
from mclclip.train.build import attention_kernels
from mclclip.train.loop import hold_garbage_collector
from mclclip.verbs import index, train
from tests import tiny


class Ring:
    """Holds itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.ring = self


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_when_the_loop_asks_and_at_no_other_time(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), hold_garbage_collector():
            assert not gc.isenabled() and gc.get_freeze_count() > 0
            ring = weakref.ref(Ring())
            for _ in range(10_000):  # many times what starts a collection
                Ring()
            assert ring() is not None
            gc.collect()
            assert ring() is None
            raise KeyError
        assert gc.isenabled() == enabled and gc.get_freeze_count() == 0
    finally:
        (gc.enable if was_enabled else gc.disable)()


# --- checkpoints of a training that is lent ----------------------------------------------------


def test_a_lent_training_keeps_its_checkpoints(data: Path, tmp_path: Path) -> None:
    lender, borrower = tmp_path / "lender", tmp_path / "borrower"

    def trained(run_dir: Path, checkpoint: str) -> list[int]:
        model = f"model.name={json.dumps(tiny.ONE_BLOCK)}"
        options = ["base.steps=2", f"base.checkpoint={checkpoint}", model]
        options.append("train.lock.image_blocks=1")
        settled = tiny.make_config(run_dir, data, *options)
        index.run(settled, SINGLE)
        train.run(settled, SINGLE, stage=0)
        return step_files.steps(lender / "stage_0/train/checkpoints")

    assert trained(lender, "{every: 1, keep_every: 1}") == [1, 2]
    for part in ("index", "stage_0/train"):
        (borrower / part).parent.mkdir(parents=True, exist_ok=True)
        (borrower / part).symlink_to(lender / part)
    assert trained(borrower, "{every: 1}") == [1, 2]
    assert trained(lender, "{every: 1}") == [2]


# --- kernels of attention ----------------------------------------------------------------------


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
