"""Figures and warnings of several ranks are those of one, whatever the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.matrix import kept
from tests.unit.train.test_symptoms import NOTHING_LEARNED, figures, trained

Ranks = Callable[..., list[Any]]
OPTIONS = *NOTHING_LEARNED, "precision=float64"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("data"), num_samples=144)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The training of one rank, whose whole batches are those of every engine."""
    return trained(tmp_path_factory.mktemp("one"), data, *OPTIONS)


# Gradients are cached under ddp.
@pytest.mark.slow
@pytest.mark.parametrize("engine", kept(["name=ddp", "name=fsdp", "micro_batch=5"], 2))
def test_two_ranks_warn_as_one(
    ranks: Ranks, tmp_path: Path, data: Path, one: Path, engine: str
) -> None:
    two = ranks(2, trained, tmp_path / "two", data, *OPTIONS, f"engine.{engine}")[0]
    for expected, found in zip(figures(one), figures(two), strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
    told = [tiny.rows(directory / "warnings.jsonl") for directory in (one, two)]
    assert told[0] == told[1] and len(told[0]) == 1
