"""Shipped recipes, found by name: an installed package has no launch/recipes folder."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from mclclip.options import nearest


def folder() -> Path:
    """The recipes of the installed package; in a checkout a link to launch/recipes."""
    return Path(str(resources.files("mclclip") / "recipes"))


def names() -> list[str]:
    """The names of all shipped recipes, sorted."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def find(where: Path | str) -> Path:
    """The YAML file at a path, or the shipped recipe of that name, such as ``cc12m_vitb32``.

    A file wins over a recipe of the same name. Raises FileNotFoundError, naming the shipped
    recipes, where there is neither.
    """
    path = Path(where)
    if path.is_file():
        return path
    if str(where) in names():
        return folder() / f"{where}.yaml"
    raise FileNotFoundError(
        f"no configuration file at {where}: give a YAML file, or the name of a shipped recipe "
        f"(nearest: {', '.join(nearest(path.stem, names()))}; all: {', '.join(names())})"
    )
