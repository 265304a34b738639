"""``save`` and ``load`` of a module and its optimizer, for callers without an engine's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from mclclip.checkpoint import storage
from mclclip.checkpoint.checkpoints import Checkpoints
from mclclip.checkpoint.step_files import path_of
from mclclip.parallel import collectives

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class _Pair:
    """A module and its optimizer under flat names."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.module, self.optimizer, options=_FLAT)
        state = {f"model.{name}": value for name, value in model.items()}
        return state | {f"optimizer.{name}": value for name, value in optimizer.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
        for name, value in state.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = value
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
            options=_FLAT,
        )


def save(
    directory: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, *, keep: int
) -> Path:
    """Saves a step from all ranks, keeps the newest ``keep``; returns its path."""
    Checkpoints(directory, keep=keep).save(step, _Pair(module, optimizer))
    return path_of(directory, step)


def load(directory: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Loads a step into ``module`` and ``optimizer`` in place, on any number of ranks."""
    path, target = path_of(directory, step), _Pair(module, optimizer)
    state = target.state_dict()
    collectives.together(lambda: storage.check_fit(path, state, storage.read_metadata(path)))
    storage.read(path, state, alone=collectives.world_size() == 1)
    target.load_state_dict(state)
