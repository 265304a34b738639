"""The figures of a run. To add one, add a module that declares ``FIGURE``; it has its name."""

from __future__ import annotations

from importlib import import_module

from mclclip.figures.inputs import Figure
from mclclip.util import shipped


def figures() -> dict[str, Figure]:
    """Every figure by its name, in alphabetical order."""
    names = shipped.plugins("figures")
    return {name: import_module(f"{__name__}.{name}").FIGURE for name in names}
