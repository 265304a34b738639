"""What the README says of the tree, the verbs and the exit codes is so."""

from __future__ import annotations

import re
from pathlib import Path

from mclclip import cli, process

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def listed_paths() -> set[str]:
    """Every path of the README's tree, relative to the checkout."""
    block = README.split("## Tree")[1].split("```")[1]
    folders: list[tuple[int, str]] = []
    paths = set()
    for line in filter(str.strip, block.splitlines()):
        depth = len(line) - len(line.lstrip())
        name = line.split()[0]
        folders = [(d, f) for d, f in folders if d < depth]
        path = "".join(f for _, f in folders) + name
        if name.endswith("/"):
            folders.append((depth, name))
        paths.add(path)
    return paths


def test_the_tree_is_the_tree() -> None:
    listed = listed_paths()
    for path in listed:
        assert (ROOT / path).exists(), f"the README lists {path}, which is not there"
    modules = {
        str(path.relative_to(ROOT))
        for folder in ("mclclip", "eval")
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.startswith("__") and "mclclip/eval" not in str(path)
    }
    assert modules - listed == set(), "modules that the README's tree lacks"


def test_every_verb_stands_in_the_readme() -> None:
    actions = cli.build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    for verb in actions[0].choices:  # type: ignore[union-attr]
        assert re.search(rf"`{verb}\b", README), verb


def test_exit_codes_agree() -> None:
    for name, code in vars(process).items():
        if not name.startswith("EXIT_"):
            continue
        assert f"| {code} |" in README


def test_recipes_named_are_there() -> None:
    named = set(re.findall(r"`(\w+\.yaml)`", README))
    there = {path.name for path in (ROOT / "launch" / "recipes").glob("*.yaml")}
    assert named == there
