"""An engine from one flat list of options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from mclclip.engines import EngineConfig, build
from mclclip.engines.engine import Engine, MakeOptimizer
from mclclip.ranks.process_group import Context


def build_engine(
    name: Any, module: nn.Module, make: MakeOptimizer, context: Context, **options: Any
) -> Engine:
    """``build.build_engine``; among its ``options`` are those of ``EngineConfig``."""
    own = {
        item.name: options.pop(item.name) for item in fields(EngineConfig) if item.name in options
    }
    return build.build_engine(EngineConfig(name=name, **own), module, make, context, **options)
