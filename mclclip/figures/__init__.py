"""The figures of a run. To add one, add a module with a function ``draw``; it has its name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from mclclip.figures.inputs import Inputs
from mclclip.util import shipped


def figures() -> dict[str, Callable[[Inputs, Path], dict[str, Any]]]:
    """Every figure by its name, in alphabetical order: a function that draws it at a path and
    returns its data, or raises MissingInput if the run lacks something."""
    names = shipped.plugins("figures")
    return {name: import_module(f"{__name__}.{name}").draw for name in names}
