"""Recipes, launch scripts, SLURM scripts and a constraints file that the package carries.

In a checkout they are links to ``launch/``, ``slurm/`` and ``constraints.txt``. Nothing heavy is
imported here: a wrong name of a recipe is refused before torch is loaded.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from importlib import resources
from pathlib import Path

from mclclip.util.options import nearest

_PACKAGE = Path(str(resources.files("mclclip")))
RECIPES = _PACKAGE / "launch" / "recipes"
_COPIED = ("launch/*.sh", "launch/recipes/*.*", "slurm/*.sbatch")


def recipe_names() -> list[str]:
    """The names of all shipped recipes, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def constraints() -> str:
    """The versions of packages that are known to work together, as a constraints file of pip."""
    return (_PACKAGE / "constraints.txt").read_text()


def find_recipe(where: Path | str) -> Path:
    """The YAML file at a path, or the shipped recipe of that name, such as ``cc12m_vitb32``.

    A file wins over a recipe of the same name. Raises FileNotFoundError, naming the nearest
    recipes, where there is neither.
    """
    path = Path(where)
    if path.is_file():
        return path
    if str(where) in (names := recipe_names()):
        return RECIPES / f"{where}.yaml"
    raise FileNotFoundError(
        f"no configuration file at {where}: give a YAML file, or the name of a shipped recipe "
        f"(nearest: {', '.join(nearest(path.stem, names))}; 'mclclip recipes' lists all)"
    )


def run(copy: Path | None = None) -> None:
    """Prints every recipe with its description. With ``copy``, writes recipes, launch scripts and
    SLURM scripts into that folder, laid out as in the repository.

    Raises ValueError if one of them is there already, since it may have been edited.
    """
    if copy is None:
        for name in recipe_names():
            print(_described(name))
        return
    if copy.is_file():
        raise ValueError(f"--copy {copy} is a file: give a folder")
    sources = sorted(source for pattern in _COPIED for source in _PACKAGE.glob(pattern))
    targets = [copy / source.relative_to(_PACKAGE) for source in sources]
    if there := [target for target in targets if target.exists()]:
        raise ValueError(f"{there[0]} exists: nothing is copied; give another folder to --copy")
    for source, target in zip(sources, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        if source.suffix == ".sh":
            target.chmod(0o755)  # which not every installer keeps
    print(f"{len(targets)} files in {copy / 'launch'} and {copy / 'slurm'}")


def _described(name: str) -> str:
    """A recipe's name, and the first sentence of its file, in lines of 80 columns."""
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines[:8] if line[:1] == "#")
    sentence = re.split(r"(?<!Fig)\.\s", comment, maxsplit=1)[0].rstrip(".")
    return textwrap.fill(
        sentence, 80, max_lines=2, initial_indent=f"{name:20}  ", subsequent_indent=" " * 22
    )
