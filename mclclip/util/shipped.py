"""Finds the plugins, recipes, launch scripts, SLURM scripts and constraints file in the package.

In a checkout the scripts are links to ``launch/``, ``slurm/`` and ``constraints.txt``. Nothing
heavy is imported here, so that a misspelled name is refused before torch is loaded.
"""

from __future__ import annotations

import re
import sys
import textwrap
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

_PACKAGE = Path(str(resources.files("mclclip")))
RECIPES = _PACKAGE / "launch" / "recipes"
PLUGINS = {
    "data/datasets": "def build(",
    "eval/protocols": "EVALUATOR = ",
    "export/targets": "TARGET = ",
    "figures": "def draw(",
    "objectives": "class Options(",
    "run/trackers": "def open_tracker(",
}
"""How a line begins by which a module of a folder is found as a plugin of its name."""
_COPIED = ("launch/*.sh", "launch/recipes/*.*", "slurm/*.sbatch")


@cache
def plugins(folder: str, declaring: str = "") -> tuple[str, ...]:
    """Returns the sorted names of the plugins in a folder of `PLUGINS`, such as ``figures``, whose
    declaration has ``declaring`` in its line. Their text is read; nothing is imported."""
    line = re.compile(f"^{re.escape(PLUGINS[folder])}.*{re.escape(declaring)}", re.MULTILINE)
    paths = (_PACKAGE / folder).glob("*.py")
    return tuple(sorted(path.stem for path in paths if line.search(path.read_text())))


def installed(group: str) -> EntryPoints:
    """Returns the plugins of other packages: the entry points of a group, found on ``sys.path``."""
    return _installed(group, tuple(sys.path))


@cache
def _installed(group: str, path: tuple[str, ...]) -> EntryPoints:
    from importlib.metadata import entry_points  # a tenth of the time that help may take

    return entry_points(group=group)


def recipe_names() -> list[str]:
    """The names of all shipped recipes, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def constraints() -> str:
    """The text of a pip constraints file: versions of packages that are tested together."""
    return (_PACKAGE / "constraints.txt").read_text()


def find_recipe(where: Path | str) -> Path:
    """Returns the YAML file at a path, or the shipped recipe of that name, such as
    ``cc12m_vitb32``; a file wins over a recipe of the same name.

    Raises FileNotFoundError, which names the nearest recipes, if there is neither.
    """
    path = Path(where)
    if path.is_file():
        return path
    if str(where) in (names := recipe_names()):
        return RECIPES / f"{where}.yaml"
    from mclclip.util.options import nearest  # imports pydantic, which help does without

    raise FileNotFoundError(
        f"no configuration file at {where}: give a YAML file, or the name of a shipped recipe "
        f"(nearest: {', '.join(nearest(path.stem, names))}; 'mclclip recipes' lists all)"
    )


def model_config(name: str) -> str:
    """Returns the path of the shipped model config of that name, such as ``tiny_clip``; any other
    name, and an existing path, as it is."""
    shipped = RECIPES / f"{name}.json"
    is_shipped = Path(name).name == name and not Path(name).exists() and shipped.is_file()
    return str(shipped) if is_shipped else name


def model_name(where: str) -> str:
    """Returns the name of a shipped model config by its path; anything else as it is."""
    name = Path(where).stem
    return name if where.endswith(".json") and model_config(name) == where else where


def run(copy: Path | None = None) -> None:
    """Prints every recipe with its description. With ``copy``, writes recipes, launch scripts and
    SLURM scripts into that folder instead, in the folders that they have in the repository.

    Raises ValueError if one of these files exists already with other content, since the user may
    have edited it.
    """
    if copy is None:
        for name in recipe_names():
            print(_description(name))
        return
    if copy.is_file():
        raise ValueError(f"--copy {copy} is a file: give a folder")
    sources = sorted(source for pattern in _COPIED for source in _PACKAGE.glob(pattern))
    targets = [copy / source.relative_to(_PACKAGE) for source in sources]
    from mclclip.util.files import write_bytes  # imports numpy, which help does without

    texts = [source.read_bytes() for source in sources]
    for target, text in zip(targets, texts, strict=True):
        if target.exists() and target.read_bytes() != text:
            raise ValueError(f"{target} exists: nothing is copied; give another folder to --copy")
    for source, target, text in zip(sources, targets, texts, strict=True):
        write_bytes(target, text)
        if source.suffix == ".sh":
            target.chmod(0o755)  # not every installer keeps scripts executable
    print(f"{len(targets)} files in {copy / 'launch'} and {copy / 'slurm'}")


def _description(name: str) -> str:
    """A recipe's name and the first sentence of its file, in at most two lines of 80 columns."""
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines[:8] if line[:1] == "#")
    sentence = re.split(r"(?<!Fig)\.\s", comment, maxsplit=1)[0].rstrip(".")
    return textwrap.fill(
        sentence, 80, max_lines=2, initial_indent=f"{name:20}  ", subsequent_indent=" " * 22
    )
