"""What tests of the plan share: recipes, and measurements that are made once in a session."""

from __future__ import annotations

import copy
from typing import Any

from mclclip import config
from mclclip.config import Config, TrainConfig
from mclclip.plan import memory
from mclclip.verbs.plan import Machine
from tests import tiny

CC12M = 10_968_539
_measure = memory.measure
_measured: dict[str, dict[str, Any]] = {}


def recipe(name: str, *overrides: str) -> Config:
    return config.load(tiny.ROOT / "launch" / "recipes" / f"{name}.yaml", overrides)


def measure(options: Config, name: str, training: TrainConfig, machine: Machine) -> dict[str, Any]:
    """``memory.measure``, once for all that it reads: each takes most of a second."""
    clusters = options.clusters, options.cluster.clusters_of(0), options.data.num_workers
    clusters += (options.image_rows.enabled,)
    read = options.model_of(name), options.device, options.seed, name, training, machine.ranks
    if (key := repr((clusters, read))) not in _measured:
        _measured[key] = _measure(options, name, training, machine)
    return copy.deepcopy(_measured[key])
