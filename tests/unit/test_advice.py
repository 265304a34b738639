"""The options that messages and docstrings name exist, with the values they advise."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mclclip import config
from mclclip.cli import entry, flag_parser, flags
from mclclip.util import advice

ROOT = Path(__file__).resolve().parents[2]
# Of these at least one has to take an advice: some options belong to class centers, frozen blocks
# or one objective alone.
BASES: tuple[dict[str, Any], ...] = (
    {
        "run_dir": "run",
        "cluster": {"labels_per_sample": 8},
        "train": {"objective": {"kind": "mlcd"}},
    },
    {"run_dir": "run"},
    {"run_dir": "run", "train": {"lock": {"image_blocks": 6}}},
    {"run_dir": "run", "train": {"objective": {"kind": "supcon"}}},
    {"run_dir": "run", "train": {"objective": {"kind": "info_nce"}}},
)
OPTIONS = {field.name for field in fields(config.Config)}
UNKNOWN = "\0"  # stands for the values that an f-string fills in, and for "..."
ADVICE = re.compile(r"(?<![\w.])([a-z_]+(?:\.\w+)+)=([^\s,;:)`'\"]+)")


@cache
def tree_of(file: Path) -> ast.AST:
    return ast.parse(file.read_text(encoding="utf-8"))


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a module; an f-string is one, with ``UNKNOWN`` for what it fills in. The
    conditions of rules are left out."""
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "excludes":
                parts |= {id(condition) for condition in node.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            constants = [part if isinstance(part, ast.Constant) else None for part in node.values]
            parts |= {id(part) for part in constants}
            yield "".join(UNKNOWN if part is None else str(part.value) for part in constants)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in parts:
                yield node.value


def advised() -> set[tuple[str, str]]:
    """All ``key.path=value`` in strings of the package, but for ``key.path=value`` itself, and for
    values that are mappings or lists of them, of which ``ADVICE`` sees only the beginning."""
    files = [*(ROOT / "mclclip").rglob("*.py"), *(ROOT / "eval").glob("*.py")]
    found = {
        (key, value.rstrip(".") or UNKNOWN)
        for file in files
        for text in texts(tree_of(file))
        for key, value in ADVICE.findall(text)
        if not value.startswith(("[{", "{"))
    }
    return found - {("key.path", "value")}


def complaint(key: str, value: str) -> str | None:
    """What the configurations say against the advice, None where one takes it; parts of ``train``
    may go by their names."""
    full = key if key.split(".")[0] in OPTIONS else f"train.{key}"
    filled, first = UNKNOWN in value, None
    for base in BASES:
        try:
            config.from_tree(base, [f"{full}={'[[]]' if filled else value}"])
        except ValueError as error:
            if filled and "unknown option" not in str(error):
                return None
            first = first or str(error)
        else:
            return None
    return first


def test_advised_options_and_values_exist() -> None:
    found = advised()
    assert {("export.soup", "false"), ("cluster.num_clusters", UNKNOWN)} <= found
    wrong = {f"{key}={value}": complaint(key, value) for key, value in sorted(found)}
    assert {advice: why for advice, why in wrong.items() if why} == {}


# --- commands ------------------------------------------------------------------------------------

VERBS = flag_parser.verbs_of(flags.build_parser())
OFFERED = re.compile(r"'mclclip ([a-z][a-z-]*)((?: [^'\n]*)?)'")
ANY_COMMAND = re.compile(rf"mclclip (?:{'|'.join(VERBS)})\b")
# The command line's help, and a card, which nobody is to type.
NO_MESSAGES = {"flags.py", "card.py"}
ALONE = {"pack", "make-pairs"}  # named as what does a thing, not as a command to type


def messages(tree: ast.AST) -> Iterator[str]:
    """The strings of a module without its docstrings."""
    documented = {
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return (text for text in texts(tree) if text not in documented)


def refused(text: str) -> list[str]:
    """The commands of a message that are not in quotes, or that their verb's parser refuses; a
    stage may be missing, since ``advice.complete`` adds it."""
    offered = OFFERED.findall(text)
    wrong = [] if len(offered) == len(ANY_COMMAND.findall(text)) else [text]
    for verb, words in offered:
        values = re.sub(rf"{UNKNOWN}|%[ds]", "0", words).split()
        has_one = {"--stage", "--encoder"} & {*values}
        stage = ["--stage", "0"] * (verb in advice.OF_STAGE and not has_one)
        try:
            if values or verb not in ALONE:
                VERBS[verb].parse_args([*values, *stage])
        except SystemExit:
            wrong.append(f"mclclip {verb}{words}")
    return wrong


def test_commands_of_messages_are_such_that_can_be_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = [*(ROOT / "mclclip").rglob("*.py"), *(ROOT / "eval").rglob("*.py")]
    checked = [file for file in files if file.name not in NO_MESSAGES]
    assert [
        (file.name, wrong)
        for file in checked
        for text in messages(tree_of(file))
        for wrong in refused(text)
    ] == []
    assert refused("run mclclip embed") and refused("run 'mclclip embed --stag 0'")
    composed = [file.name for file in checked if "shlex.join" in file.read_text(encoding="utf-8")]
    assert {*composed} == {"advice.py"}


@pytest.mark.parametrize(
    ("typed", "message", "completed"),
    [
        (
            "embed --config ucm --stage 1 run_dir=runs/a",
            "run 'mclclip cluster --force' after 'mclclip index'",
            "run 'mclclip cluster --config ucm run_dir=runs/a --stage 1 --force' after "
            "'mclclip index --config ucm run_dir=runs/a'",
        ),
        (
            "finetune photos --base a@b --out 'my runs/a'",
            "runs/a/stage_1/pseudo_labels: 'mclclip cluster --force'",
            "runs/a/stage_1/pseudo_labels: 'mclclip cluster --config 'my runs/a/config.yaml' "
            "--stage 0 --force'",
        ),
        (
            "train --config u --stage 2",
            "'mclclip cluster --force', 'mclclip embed'",
            "'mclclip cluster --config u --stage 1 --force', 'mclclip embed --config u --stage 2'",
        ),
        (
            "run --config u",
            "r/controls/ungrouped/stage_1/train: 'mclclip train --force'",
            "r/controls/ungrouped/stage_1/train: 'mclclip train --config u --stage 1 "
            "--variant ungrouped --force'",
        ),
        ("index --config u", "'mclclip doctor --data CONFIG'", "'mclclip doctor --data u'"),
        (
            "train --config u --stage 0 data.sources.a.shards=http://h/x.tar?sig=SECRET",
            "'mclclip index'",
            "'mclclip index --config u 'data.sources.a.shards=http://h/x.tar?...''",
        ),
    ],
)
def test_an_offered_command_names_the_run_that_was_typed(
    capsys: pytest.CaptureFixture[str], typed: str, message: str, completed: str
) -> None:
    entry.parse_words(shlex.split(typed))
    assert advice.complete(message) == completed


def test_the_typed_command_is_offered_again_with_all_of_its_flags() -> None:
    words = shlex.split("pack 'my photos/' --delimiter=; --out o --path-column a")
    entry.parse_words(words)
    command = advice.words_of("pack")
    signed = advice.again([*command, "--captions", "https://h/c?sig=SECRET"], "--out", "o")
    assert "https://h/c?" in signed and "SECRET" not in signed
    asked = shlex.split(advice.again(command, "--path-column", "b c"))
    assert asked == shlex.split(
        "mclclip pack 'my photos/' --delimiter ';' --out o --path-column 'b c'"
    )
    moved = shlex.split(advice.again(command, "x", "--captions", "y", instead=Path("my photos")))
    assert moved[2:5] == ["x", "--captions", "y"] and moved[5:] == command[3:]
    twice = ["mclclip", "finetune", "photos", "--base", "a@b", "--out", "photos"]
    instead = advice.again(twice, "photos/t.csv", instead=Path("photos"))
    assert shlex.split(instead) == [*twice[:2], "photos/t.csv", *twice[3:]]
    called = advice.words_of(
        "finetune", "p", base="a@b", out="o", allow_roots=["r", "s"], seed=None
    )
    args = flags.build_parser().parse_args(called[1:])
    assert (args.base, args.allow_roots) == ("a@b", [Path("r"), Path("s")])
