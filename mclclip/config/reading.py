"""Options from YAML and ``key.path=value`` overrides: load, check, dump, and the error messages.

Derived numbers are not options: they are computed once, by the verb that needs them, and logged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from mclclip.config import rules
from mclclip.config.options import Config
from mclclip.config.plain_yaml import parse_value, read_yaml
from mclclip.objectives.base import ObjectiveOptions, options_class
from mclclip.run.lock import RUN_STATE
from mclclip.util.options import dotted, farthest, nearest, refuse_url
from mclclip.util.shipped import find_recipe


def load(path: Path | str | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies ``key.path=value`` overrides and checks everything.

    ``path`` may be the name of a shipped recipe too (see ``find_recipe``). The configuration that a
    run holds means that run, also where its folder was moved: paths below it go with it.

    Raises FileNotFoundError for a missing file and ValueError, one line, for anything else: an
    unknown key is named with the nearest valid one, a wrong value with its dotted path.
    """
    file = None if path is None else Path(find_recipe(path))
    tree = {} if file is None else read_yaml(file) or {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds {type(tree).__name__}, expected a mapping of options")
    if file is not None and (run_dir := _run_around(file)) is not None:
        before = str(tree.get("run_dir", run_dir)).rstrip("/")
        if Path(before).resolve() != run_dir.resolve():
            tree = _moved(tree, before, str(run_dir))
    return from_tree(tree, overrides)


def _run_around(file: Path) -> Path | None:
    """The run whose recorded configuration, or the settings that ``finetune`` chose, a file is."""
    chosen = file.parent.name == "finetune"
    run_dir = file.parent.parent if chosen else file.parent
    is_run = file.name in ("config.yaml", "settings.yaml") and (run_dir / RUN_STATE).exists()
    return run_dir if is_run else None


def _moved(value: Any, before: str, now: str) -> Any:
    """The value in which every path that is ``before``, or lies below it, is or lies below ``now``;
    of a pattern too."""
    if isinstance(value, dict):
        return {key: _moved(item, before, now) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, before, now) for item in value]
    if isinstance(value, str) and (value == before or value.startswith(f"{before}/")):
        return now + value.removeprefix(before)
    return value


def from_tree(tree: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Checks a nested mapping with overrides and returns the Config (see ``load`` for errors)."""
    tree = _unshared(tree)
    for override in overrides:
        _apply(tree, override)
    try:
        config = TypeAdapter(Config).validate_python(tree)
    except ValidationError as error:
        raise ValueError(_message(error, tree)) from None
    _refuse_truths(tree, config)
    rules.check(config)
    refuse_url(config.run_dir, "run_dir")
    return config


def _unshared(value: Any) -> Any:
    """A copy in which no mapping or list stands at two places, as YAML's anchors have it: an
    override of ``train.objective`` shall not change ``base.objective`` too."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def _refuse_truths(given: Any, checked: Any, name: str = "") -> None:
    """Raises ValueError where true or false stands for a number: pydantic takes them for 1 and 0.

    ``given`` is a tree, or a part of it that is called ``name``, and ``checked`` its options.
    """
    if isinstance(given, bool) and type(checked) in (int, float):
        raise ValueError(f"option {name!r}, got {given}: wanted a number")
    parts = given if isinstance(given, dict) else {}
    if isinstance(given, list) and isinstance(checked, list | tuple):
        parts, checked = dict(enumerate(given)), dict(enumerate(checked))
    for key, part in parts.items():
        value = checked.get(key) if isinstance(checked, dict) else getattr(checked, key, None)
        _refuse_truths(part, value, f"{name}.{key}".lstrip("."))


def to_tree(config: Any) -> dict[str, Any]:
    """A config (or a part of one) as plain nested mappings."""
    return dict(dataclasses.asdict(config))


def dump(config: Config) -> str:
    """The resolved configuration as YAML."""
    plain = TypeAdapter(Config).dump_python(config, mode="json")
    return str(yaml.safe_dump(plain, sort_keys=False))


def _apply(tree: dict[str, Any], override: str) -> None:
    """Sets one ``key.path=value`` in the tree; see ``parse_value`` for the value."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"got the override {override!r}, expected key.path=value")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ValueError(f"override {override!r}: {parent!r} holds a value, not options")
    node[last] = parse_value(text, f"override {override!r}")
    if last == "kind" and parents[-1:] == ["objective"]:
        _drop_foreign(node)
    if node[last] is None and parents in (["eval", "suite"], ["data", "sources"]):
        del node[last]  # eval.suite.coco=null drops a recipe's benchmark


def _drop_foreign(objective: dict[str, Any]) -> None:
    """Removes, in place, options that the newly named kind of objective lacks; they belonged to the
    kind before. An unknown kind is reported by the check that follows."""
    with contextlib.suppress(ValueError):
        known = {item.name for item in dataclasses.fields(options_class(str(objective["kind"])))}
        for name in objective.keys() - known:
            del objective[name]


_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


def _message(error: ValidationError, tree: dict[str, Any]) -> str:
    """One problem of the error as one line: dotted path, value, and what was wanted."""
    problems = error.errors()
    unknown = [item for item in problems if item["type"] in _UNKNOWN]
    problem: Mapping[str, Any] = unknown[0] if unknown else farthest(problems)
    path = [str(part) for part in problem["loc"]]
    name = dotted(path)
    if problem["type"] in _UNKNOWN:
        valid = _fields_at(path[:-1], tree)
        inner = [part for part in valid if len(path) == 1 and name in _fields_at([part], tree)]
        near = [f"{part}.{name}" for part in inner] or nearest(path[-1], valid, 1)
        hint = f": did you mean {' or '.join(map(repr, near))}?" if near else ""
        return f"unknown option {name!r}{hint} (valid here: {', '.join(valid)})"
    if problem["type"] in ("missing", "missing_argument"):
        return f"option {name!r} is required: set {name}=VALUE"
    if problem["type"] == "union_tag_not_found":
        return f"option '{name}.kind' is required beside other options of {name}"
    got = "" if isinstance(problem["input"], dict) else f", got {problem['input']!r}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "string_type" and not isinstance(problem["input"], dict | list):
        message = "wanted a text: put it in quotes"
    return f"option {name or 'configuration'!r}{got}: {message}"


def _fields_at(path: list[str], tree: Any) -> list[str]:
    """Names of the options valid below a path of pydantic's; ``tree`` tells kinds of objectives."""
    found: Any = Config
    for part in path:
        if isinstance(tree, list) and part.isdigit():
            tree = tree[int(part)]
        elif isinstance(tree, dict):
            tree = tree.get(part)
        found = _options_in(typing.get_type_hints(found).get(part)) or found
        if found is ObjectiveOptions and isinstance(tree, dict):
            found = options_class(str(tree.get("kind")))
    return [item.name for item in dataclasses.fields(found)]


def _options_in(annotation: Any) -> Any:
    """The first class of options that an annotation mentions, such as that of a mapping's values;
    None for other annotations."""
    if dataclasses.is_dataclass(annotation):
        return annotation
    return next(filter(None, map(_options_in, typing.get_args(annotation))), None)
