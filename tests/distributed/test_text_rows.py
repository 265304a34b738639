"""A training on rows of text embeddings is the same on two ranks as on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.checkpoint import step_files
from mclclip.config import Config
from mclclip.verbs import index, texts, train
from tests.distributed.conftest import here
from tests.unit.test_texts import STEPS, options, write_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data"))


def train_stage_zero(found: Config) -> dict[str, Any]:
    index.run(found, here())
    texts.run(found, here())
    directory = train.run(found, here(), stage=0)
    state = step_files.load_model_state(directory / "checkpoints", STEPS)
    return {name: tensor.numpy() for name, tensor in state.items()}


def test_two_ranks_train_as_one(
    ranks: Callable[..., list[Any]], data: Path, tmp_path: Path
) -> None:
    weights = [
        ranks(n, train_stage_zero, options(data, tmp_path / str(n), "base.precision=float64"))[0]
        for n in (1, 2)
    ]
    assert "model.clip.text.projection.weight" in weights[0]
    for name, of_one in weights[0].items():
        np.testing.assert_allclose(weights[1][name], of_one, atol=1e-9, rtol=0, err_msg=name)
