"""Cuts a training off, as a kill does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mclclip.engines.engine import Engine


class CutOff(Exception):
    """Ends a training as a kill does."""


@contextmanager
def cut_at(step: int) -> Iterator[None]:
    """A training in the block must come to this step, which ends it."""
    update = Engine.update

    def until(engine: Engine, batch: Any, lr: float) -> Any:
        if batch.step == step:
            raise CutOff
        return update(engine, batch, lr)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CutOff):
        patch.setattr(Engine, "update", until)
        yield
