"""Cuts a training off, as a kill does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from mclclip.engines.engine import Engine


class CutOff(Exception):
    """Ends a training as a kill does."""


CutAt = Callable[[int], AbstractContextManager[None]]


@pytest.fixture
def cut_at(monkeypatch: pytest.MonkeyPatch) -> CutAt:
    """``with cut_at(3):`` a training in the block must come to step 3, which ends it."""

    @contextmanager
    def cut(step: int) -> Iterator[None]:
        update = Engine.update

        def until(engine: Engine, batch: Any, lr: float) -> Any:
            if batch.step == step:
                raise CutOff
            return update(engine, batch, lr)

        with monkeypatch.context() as patch, pytest.raises(CutOff):
            patch.setattr(Engine, "update", until)
            yield

    return cut
