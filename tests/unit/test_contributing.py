"""Everything that CONTRIBUTING.md puts between backticks is there: paths, targets, names."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import re
import typing
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mclclip import cli
from mclclip.config import Config
from tests import house
from tests.unit import test_architecture as architecture

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
QUOTED = sorted({" ".join(text.split()) for text in re.findall(r"`([^`]+)`", PROSE)})
# A path in the text may start at any of these.
FOLDERS = ["", "mclclip", "mclclip/objectives", "eval", "tests", "tests/unit", "tests/distributed"]
TOOLS = {"ruff", "mypy", "pip", "python"}
# What stands for itself: parts of names, a scheme, what is made, an example of a value.
WORDS = {
    "num_",
    "_id",
    "_s",
    "_bytes",
    "_per_s",
    "choose_",
    "pipe:",
    ".venv",
    ".venv-peers",
    '{"loss": ..., parts}',
}


@cache
def defined() -> dict[str, set[str]]:
    """The names that each module and each class of mclclip, eval and tests defines, by its own
    name; under "" all of them."""
    found: dict[str, set[str]] = defaultdict(set)
    for folder in ("mclclip", "eval", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if path == Path(__file__).resolve():
                continue
            tree = ast.parse(path.read_text())
            found[path.stem] |= names_in(tree)
            found[""] |= found[path.stem] | {path.stem}
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name] |= names_in(node)
    return found


def names_in(tree: ast.AST) -> set[str]:
    """Functions, classes, arguments, variables and fields, at any depth."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def is_option(path: str) -> bool:
    """Whether ``eval.suite`` or the like is an option of a run."""
    found: Any = Config
    for part in path.split("."):
        if not dataclasses.is_dataclass(found):
            return False
        found = typing.get_type_hints(found).get(part)
    return found is not None


def is_of_a_library(dotted: str) -> bool:
    """Whether ``torch.distributed`` or ``nn.Module`` (torch's) is there."""
    for name in (dotted, f"torch.{dotted}"):
        module, _, attribute = name.rpartition(".")
        try:
            if hasattr(importlib.import_module(module), attribute):
                return True
        except ModuleNotFoundError:
            continue
    return False


def is_command(text: str) -> bool:
    """Whether make has these targets, mclclip this verb, or environment or checkout this tool."""
    program, *words = text.split()
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        targets = [word for word in words if re.fullmatch(r"[a-z-]+", word)]
        return all(re.search(rf"^{word}:", makefile, re.MULTILINE) for word in targets)
    if program == "mclclip":
        choices = cli.build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
        return words[0] in choices  # type: ignore[operator]
    return program in TOOLS or is_path(program)


def is_path(text: str) -> bool:
    """Whether a path is there; NAME stands for any name."""
    pattern = text.rstrip("/").replace("NAME", "*")
    return any(any((ROOT / folder).glob(pattern)) for folder in FOLDERS)


def is_there(text: str) -> bool:
    """Whether what stands between backticks can be found."""
    if text in WORDS or text in TOOLS or text in architecture.ROOMS:
        return True
    if text.startswith("import "):
        return importlib.util.find_spec(text.split()[1]) is not None
    name = re.sub(r"\(.*\)( ->.*)?$", "", text)  # without its arguments
    if " " in name:
        return is_command(name)
    if re.fullmatch(r"\w+", name):
        return name in defined()[""] or is_path(name) or hasattr(builtins, name) or is_mark(name)
    if re.fullmatch(r"\w+(\.\w+)+", name) and not is_path(name):
        owner, _, last = name.rpartition(".")
        return last in defined().get(owner, ()) or is_option(name) or is_of_a_library(name)
    return is_path(name)


def is_mark(name: str) -> bool:
    """A mark of tests, a variable of make, or the environment variable of the soak."""
    settings = (ROOT / "setup.cfg").read_text() + (ROOT / "Makefile").read_text()
    return re.search(rf"^\s*{name}\s*[:?]?=|^\s+{name}:", settings, re.MULTILINE) is not None


def test_all_that_it_names_is_there() -> None:
    assert len(QUOTED) > 60
    missing = [text for text in QUOTED if not is_there(text)]
    assert not missing, f"CONTRIBUTING.md names what is nowhere: {missing}"


@pytest.mark.parametrize(
    "stale",
    [
        "_old_objective", "mclclip/config.py", "process_group.seed_all", "Figure.protocols",
        "eval.suites_of", "make everything", "mclclip compile", "tests/nowhere/", "none.py",
        "parallel/none.py", "torch.nothing", "gather_with_gradient(x)", "import mclclip.nothing",
    ],
)  # fmt: skip
def test_what_is_nowhere_is_found_out(stale: str) -> None:
    assert not is_there(stale)


def test_every_module_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """``make modules`` lists them with what their docstrings begin with."""
    house.print_modules()
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) > 100
    silent = [line for line in listed if not line.endswith("/") and len(line.split()) < 4]
    assert not silent, f"a docstring that says what the module is: {silent}"


def test_the_tests_that_catch_wrong_behaviours_are_there() -> None:
    """Every row of ``tests/README.md`` names a duty's test: the last column, or the one before."""
    rows = re.findall(r"^\| (?!duty|---)(.*) \|$", (ROOT / "tests/README.md").read_text(), re.M)
    assert len(rows) >= 40
    for duty, _, before, _, now in (row.split(" | ") for row in rows):
        (name,) = re.findall(r"::(\w+)`", before if now == "=" else now)
        assert name in defined()[""], f"{duty}: no test {name}"


def test_its_limits_of_size_are_those_that_are_checked() -> None:
    file, function = re.findall(r"no file over (\d+) lines, no function over (\d+)", TEXT)[0]
    assert (int(file), int(function)) == (architecture.FILE_LINES, architecture.FUNCTION_LINES)
