"""Planted encoders, and the images that they read as numbers (``tests.planted``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mclclip.eval import outcomes
from tests import planted as made


@pytest.fixture
def planted() -> Callable[..., made.PlantedEncoder]:
    """``planted(kind, size, dim=16, seed=0)``: perfect, constant or independent random features."""
    return made.planted


@pytest.fixture
def draw() -> Callable[[Path, int], None]:
    """``draw(path, number)`` writes the image that a planted encoder reads as ``number``."""
    return made.draw_number


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of rankings from few draws; their width is test_outcomes.py's."""
    monkeypatch.setattr(outcomes, "NUM_RANKING_DRAWS", 200)
