"""A tower of convolutions in channels-last on two ranks equals a contiguous one on one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.models.towers import MemoryFormat
from mclclip.objectives.info_nce import InfoNCE
from mclclip.train.loop import ModelWithObjective
from tests import tiny
from tests.distributed.conftest import here
from tests.distributed.test_engines import assert_close, train, whole
from tests.engines import build_engine
from tests.matrix import kept

Ranks = Callable[..., list[Any]]
TOWER: dict[str, Any] = tiny.MODEL | {  # with depthwise convolutions
    "vision_cfg": {
        "timm_model_name": "test_efficientnet", "timm_proj": "linear", "image_size": 32
    }
}  # fmt: skip


def steps(name: str, memory_format: MemoryFormat) -> tuple[list[float], dict[str, Any], list[str]]:
    """Losses of six steps in float64, weights and statistics after them, and warnings."""
    torch.set_num_threads(1)
    model = load_towers(tiny.of_few_ids(TOWER), seed=1).train()
    model.memory_format = memory_format
    context = here()
    trainee = ModelWithObjective(model, InfoNCE(), "float64").double()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = build_engine(
            name,
            trainee,
            lambda module: build_optimizer(module, weight_decay=0.1),
            context,
            blocks=model.blocks(),
            precision="float64",
        )
        losses = train(engine, range(6), torch.float64)
    state = {n: v for n, v in whole(engine.state_dict()).items() if n.startswith("model.")}
    return losses, state, [str(warning.message) for warning in told]


@pytest.mark.parametrize("name", kept(["ddp", "fsdp"], 0))
def test_two_ranks_equal_one(ranks: Ranks, name: str) -> None:
    losses, state, _ = ranks(1, steps, "ddp", "contiguous")[0]
    got_losses, got, told = ranks(2, steps, name, "channels_last")[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-9)
    assert_close(state, got, 1e-9)
    assert not [message for message in told if "Grad strides" in message]
