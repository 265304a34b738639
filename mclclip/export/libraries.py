"""Packages that only some exports need, imported when they are used."""

from __future__ import annotations

from importlib import import_module, util
from typing import Any

EXTRA = "pip install 'mclclip[export]'"


def needed(name: str, what: str) -> Any:
    """The module ``name``. Raises ValueError, in one line, where it is not installed."""
    if util.find_spec(name) is None:
        raise ValueError(f"{what} needs the package {name}, which is not installed: {EXTRA}")
    return import_module(name)


def is_installed(name: str) -> bool:
    """Whether there is a module ``name``; nothing is imported."""
    return util.find_spec(name) is not None
