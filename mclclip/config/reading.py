"""Options from YAML and ``key.path=value`` overrides: load, check, dump, and the error messages.

Derived numbers are not options: they are computed once, by the verb that needs them, and logged.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from mclclip.config import recipes
from mclclip.config.options import Config
from mclclip.objectives.base import ObjectiveOptions, options_class


def load(path: Path | str | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies ``key.path=value`` overrides and checks everything.

    ``path`` may be the name of a shipped recipe too (see ``recipes.find``).

    Raises FileNotFoundError for a missing file and ValueError, one line, for anything else: an
    unknown key is named with the nearest valid one, a wrong value with its dotted path.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        tree = _parse_yaml(recipes.find(path).read_text(), str(path)) or {}
        if not isinstance(tree, dict):
            raise ValueError(f"{path} holds {type(tree).__name__}, expected a mapping of options")
    return from_tree(tree, overrides)


def from_tree(tree: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Checks a nested mapping with overrides and returns the Config (see ``load`` for errors)."""
    tree = copy.deepcopy(tree)
    for override in overrides:
        _apply(tree, override)
    try:
        return TypeAdapter(Config).validate_python(tree)
    except ValidationError as error:
        raise ValueError(_message(error, tree)) from None


def to_tree(config: Any) -> dict[str, Any]:
    """A config (or a part of one) as plain nested mappings."""
    tree: dict[str, Any] = dataclasses.asdict(config)
    return tree


def dump(config: Config) -> str:
    """The resolved configuration as YAML."""
    plain = TypeAdapter(Config).dump_python(config, mode="json")
    text: str = yaml.safe_dump(plain, sort_keys=False)
    return text


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def _apply(tree: dict[str, Any], override: str) -> None:
    """Sets one ``key.path=value`` in the tree; the value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"got the override {override!r}, expected key.path=value")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        below = node.setdefault(parent, {})
        if below is None:
            below = node[parent] = {}
        if not isinstance(below, dict):
            raise ValueError(f"override {override!r}: {parent!r} holds a value, not options")
        node = below
    node[last] = _parse_yaml(text, f"override {override!r}")
    if node[last] is None and parents in (["eval", "suite"], ["data", "sources"]):
        del node[last]  # eval.suite.coco=null drops a recipe's benchmark


_UNION_MEMBERS = ("int", "str", "constrained-int", "constrained-float")
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


def _message(error: ValidationError, tree: dict[str, Any]) -> str:
    """The first problem as one line: dotted path, what it got, what was wanted."""
    problems = error.errors()
    unknown = [item for item in problems if item["type"] in _UNKNOWN]
    # Of the tried members of a union the one that got farthest tells most.
    problem = unknown[0] if unknown else max(problems, key=lambda item: len(item["loc"]))
    path = [str(part) for part in problem["loc"]]
    if problem["type"] in _UNKNOWN:
        valid = _fields_at(path[:-1], tree)
        near = difflib.get_close_matches(path[-1], valid, n=1, cutoff=0.0)
        hint = f": did you mean {near[0]!r}?" if near else ""
        name = ".".join(_options_in(path))
        return f"unknown option {name!r}{hint} (valid here: {', '.join(valid)})"
    name = ".".join(_options_in(path))
    if problem["type"] in ("missing", "missing_argument"):
        return f"option {name!r} is required: set {name}=VALUE"
    if problem["type"] == "union_tag_not_found":
        return f"option '{name}.kind' is required beside other options of {name}"
    if problem["type"] == "value_error" and not path:  # said of several options
        return str(problem["ctx"]["error"])
    got = "" if isinstance(problem["input"], dict) else f", got {problem['input']!r}"
    return (
        f"option {name or 'configuration'!r}{got}: {problem['msg'].removeprefix('Value error, ')}"
    )


def _options_in(path: list[str]) -> list[str]:
    """The path without the tried members of a union, which pydantic adds, as in
    "image_blocks.int"."""
    return [part for part in path if part not in _UNION_MEMBERS and "[" not in part]


def _fields_at(path: list[str], tree: Any) -> list[str]:
    """Names of the options valid below a path of pydantic's; ``tree`` tells the objectives."""
    found: list[Any] = [Config]
    for part in path:
        tree = tree[int(part)] if isinstance(tree, list) and part.isdigit() else tree
        tree = tree.get(part) if isinstance(tree, dict) else tree
        hints = [typing.get_type_hints(member, include_extras=False) for member in found]
        below = [hint[part] for hint in hints if part in hint]
        if below:
            found = _dataclasses_in(below[0])
        if ObjectiveOptions in found and isinstance(tree, dict):
            found = [options_class(str(tree.get("kind")))]
    return [item.name for item in dataclasses.fields(found[0])]


def _dataclasses_in(annotation: Any) -> list[Any]:
    """The options dataclasses that an annotation mentions, such as the values of a mapping."""
    if dataclasses.is_dataclass(annotation):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in _dataclasses_in(part)]
