"""Every shipped recipe is a valid run: options, model, benchmarks, and no machine's own paths."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from mclclip import cli, config
from mclclip.eval import run as evaluation
from tests import tiny

FOLDER = tiny.ROOT / "launch" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
SWEEPS = sorted(FOLDER.glob("*.sweep"))
PAPER = ["cc12m_vitl14_paper", "cc12m_rn50_paper"]
OPENAI = ["cc12m_vitb32", "cc12m_vitl14", "mcl_release", *PAPER]
MLCD = ["mlcd_laion_vitl14", "mlcd_ablation_vitb32"]

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def _values(tree: Any) -> Iterator[str]:
    """Every string below a mapping."""
    if isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _values(value)
    elif isinstance(tree, str):
        yield tree


@every_recipe
def test_it_is_valid_and_stays_so_resolved(recipe: Path) -> None:
    options = config.load(recipe)
    assert config.from_tree(yaml.safe_load(config.dump(options))) == options


@every_recipe
def test_its_paths_are_relative(recipe: Path) -> None:
    options = yaml.safe_load(recipe.read_text())
    assert not [text for text in _values(options) if text.startswith(("/", "~", ".."))]
    assert options["run_dir"].startswith("runs/")


@every_recipe
def test_its_commands_name_it(recipe: Path) -> None:
    comments = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    assert comments, "a recipe begins with what it is and what to type"
    if recipe.stem != "demo":  # has a command of its own
        assert any(f"launch/recipes/{recipe.name}" in line for line in comments)


def _commands(recipe: Path) -> list[list[str]]:
    """What follows ``mclclip`` in the command lines of the header, word by word.

    Lines that a shell would have to complete (``$options``) are left out.
    """
    lines = [line[1:] for line in recipe.read_text().splitlines() if line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    found = re.findall(r"^ {2,}(?:\S.*?)?(?:mclclip|mclclip\.sbatch) (\w.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found if "$" not in line]


@pytest.mark.parametrize("recipe", [*RECIPES, *SWEEPS], ids=lambda path: path.name)
def test_its_commands_are_valid(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line takes every word of them, and the options are those of the recipe."""
    monkeypatch.chdir(tiny.ROOT)
    for words in _commands(recipe):
        arguments = cli.parse_words(words)
        if words[0] in ("run", "config"):
            assert arguments.config == f"launch/recipes/{recipe.name}"
            config.load(arguments.config, arguments.overrides)


@every_recipe
def test_its_benchmarks_have_options_that_evaluators_know(recipe: Path) -> None:
    suite = config.load(recipe).eval.suite
    assert suite
    evaluation.check_options(suite)


def _model_config(name: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(name, dict):
        return name
    root = resources.files("open_clip") / "model_configs"
    found: dict[str, Any] = json.loads((root / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", ["launch", "slurm"])
def test_the_package_reaches_recipes_and_scripts_by_a_relative_link(name: str) -> None:
    link = tiny.ROOT / "mclclip" / name
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == tiny.ROOT / name


# --- recipes of MCL ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OPENAI, "cc12m_vitl14_dfn2b"])
def test_weights_fit_the_model(name: str) -> None:
    """The tag exists for the model, and both use the same activation."""
    from mclclip.models.clip import open_clip  # with the torchvision fix in place

    model = config.load(FOLDER / f"{name}.yaml").model
    tag = open_clip.get_pretrained_cfg(model.name, model.pretrained)
    assert tag
    assert bool(tag["quick_gelu"]) == bool(_model_config(model.name)["quick_gelu"])


# --- recipes of MLCD -----------------------------------------------------------------------------
