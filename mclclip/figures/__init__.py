"""The figures of a run. To add one, add a module that declares ``FIGURE``; it has its name."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from mclclip.figures.inputs import Figure


def figures() -> dict[str, Figure]:
    """Every figure by its name, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = {name: import_module(f"{__name__}.{name}") for name in names}
    return {name: module.FIGURE for name, module in modules.items() if hasattr(module, "FIGURE")}
