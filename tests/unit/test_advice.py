"""The options that messages and docstrings name exist, with the values they advise."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mclclip import config

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
    {
        "run_dir": "run",
        "train": {
            "objective": {"kind": "weighted_sum", "terms": [{"objective": {"kind": "info_nce"}}]}
        },
    },
)
UNKNOWN = "\0"  # stands for the values that an f-string fills in, and for "..."
ADVICE = re.compile(r"(?<![\w.])([a-z_]+(?:\.\w+)+)=([^\s,;:)`'\"]+)")


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a module; an f-string is one, with ``UNKNOWN`` for what it fills in."""
    parts = set()
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
    values that are lists of mappings, of which ``ADVICE`` sees the beginning alone."""
    files = [*(ROOT / "mclclip").rglob("*.py"), *(ROOT / "eval").glob("*.py")]
    found = {
        (key, value.rstrip(".") or UNKNOWN)
        for file in files
        for text in texts(ast.parse(file.read_text(encoding="utf-8")))
        for key, value in ADVICE.findall(text)
        if not value.startswith("[{")
    }
    return found - {("key.path", "value")}


def complaint(key: str, value: str) -> str | None:
    """What the configurations say against the advice, None where one takes it; parts of ``train``
    may go by their names."""
    options = config.to_tree(config.from_tree(BASES[0]))
    full = key if key.split(".")[0] in options else f"train.{key}"
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


@pytest.mark.parametrize(
    "key, value, why",
    [
        ("embed.feature", "proj", "'projected' or 'pooled'"),
        ("embed.features", UNKNOWN, "unknown option 'embed.features'"),
        ("engine.name", "zero", "'train.engine.name', got 'zero'"),
    ],
)
def test_wrong_advice_would_be_found(key: str, value: str, why: str) -> None:
    assert why in str(complaint(key, value))
