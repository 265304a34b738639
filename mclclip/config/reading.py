"""Loads options from YAML and ``key.path=value`` overrides, checks and dumps them.

Numbers that follow from options are no options: the verb that needs one computes and logs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from mclclip.config import rules
from mclclip.config.options import Config
from mclclip.config.plain_yaml import parse_value, read_yaml
from mclclip.objectives.base import ObjectiveOptions, options_class
from mclclip.run.lock import RUN_STATE
from mclclip.util.options import UNKNOWN, brief, dotted, farthest, nearest, refuse_url
from mclclip.util.shipped import find_recipe, model_name


def load(path: Path | str | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies ``key.path=value`` overrides and checks everything.

    ``path`` may also be the name of a shipped recipe (see ``find_recipe``). If it is the
    configuration that a run has recorded, and the run's folder was moved, then ``run_dir`` and all
    paths below it are changed to where the folder is now.

    Raises FileNotFoundError for a missing file and ValueError, one line, for anything else: an
    unknown key is named with the nearest valid one, a wrong value with its dotted path.
    """
    file = None if path is None else Path(find_recipe(path))
    if file is not None and not file.stat().st_size:
        raise ValueError(f"{path} is empty: the command that was to write it has failed")
    tree = {} if file is None else read_yaml(file) or {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds {type(tree).__name__}, expected a mapping of options")
    if file is not None and (run_dir := _run_around(file)) is not None:
        before = str(tree.get("run_dir", run_dir)).rstrip("/")
        if Path(before).resolve() != run_dir.resolve():
            tree = map_texts(tree, partial(_move_path, before=before, now=str(run_dir)))
    return from_tree(tree, overrides)


def _run_around(file: Path) -> Path | None:
    """Returns the directory of the run to which a configuration file belongs, or None.

    Such a file is RUN/config.yaml, or RUN/finetune/settings.yaml, which ``finetune`` wrote.
    """
    run_dir = file.parent.parent if file.parent.name == "finetune" else file.parent
    is_run = file.name in ("config.yaml", "settings.yaml") and (run_dir / RUN_STATE).exists()
    return run_dir if is_run else None


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a copy of an option's value, or of a tree of them, with every text changed."""
    if isinstance(value, dict):
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _move_path(text: str, before: str, now: str) -> str:
    """Replaces ``before`` by ``now`` at the beginning of a path or pattern (``all_shards``)."""
    for old in (before, glob.escape(before)):
        if text == old or text.startswith(f"{old}/"):
            rest = text.removeprefix(old)
            return (glob.escape(now) if glob.has_magic(rest) else now) + rest
    return text


def _expand_home(text: str) -> str:
    marked, path = text[:10], text[10:]
    if marked == "local-dir:":
        return marked + _expand_home(path)
    return os.path.expanduser(text) if text.startswith("~/") else text


def from_tree(tree: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Returns the Config of a nested mapping and overrides. Raises ValueError as ``load`` does."""
    # Copied, since YAML's aliases put one mapping at two places, and an override of train.objective
    # must not change base.objective too.
    tree = map_texts(tree, str)
    for override in overrides:
        _apply(tree, override)
    tree = map_texts(tree, _expand_home)
    try:
        config = TypeAdapter(Config).validate_python(tree)
    except ValidationError as error:
        raise ValueError(_message(error, tree)) from None
    _refuse_booleans(tree, config)
    rules.check(config)
    refuse_url(config.run_dir, "run_dir")
    return config


def _refuse_booleans(tree: Any, options: Any, name: str = "") -> None:
    """Raises ValueError if true or false stands for a number; pydantic takes them for 1 and 0.

    ``tree`` is what a user wrote for the option ``name`` (empty: everything), and ``options`` what
    pydantic made of it.
    """
    if isinstance(tree, bool) and type(options) in (int, float):
        raise ValueError(f"option {name!r}, got {tree}: wanted a number")
    parts = tree if isinstance(tree, dict) else {}
    if isinstance(tree, list) and isinstance(options, list | tuple):
        parts, options = dict(enumerate(tree)), dict(enumerate(options))
    for key, part in parts.items():
        value = options.get(key) if isinstance(options, dict) else getattr(options, key, None)
        _refuse_booleans(part, value, f"{name}.{key}".lstrip("."))


def dump(config: Config) -> str:
    """Returns the whole configuration, with all defaults, as YAML. Shipped model configs have their
    names in it, since their paths differ between machines."""
    plain = map_texts(TypeAdapter(Config).dump_python(config, mode="json"), model_name)
    return str(yaml.safe_dump(plain, sort_keys=False))


def _apply(tree: dict[str, Any], override: str) -> None:
    """Sets one ``key.path=value`` in the tree. ``parse_value`` reads the value."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"got the override {override!r}, expected key.path=value")
    if not text.strip():
        raise ValueError(f"the override {override!r} has no value: null is one, and '\"\"' a text")
    *parents, last = key.split(".")
    node: Any = tree
    for parent in parents:
        if isinstance(node, dict) and node.get(parent) is None:
            node[parent] = {}
        node = node[_place(node, parent, override)]
    place = _place(node, last, override)
    node[place] = parse_value(text, f"override {override!r}")
    if last == "kind" and "objective" in parents[-2:]:
        _drop_options_of_other_kinds(node)
    if node[place] is None and parents in (["eval", "suite"], ["data", "sources"]):
        del node[place]  # eval.suite.coco=null drops a recipe's benchmark


def _place(node: Any, name: str, override: str) -> str | int:
    """Returns what ``name`` stands for in a mapping, a key, or in a list, a number from 0."""
    if isinstance(node, dict):
        return name
    if isinstance(node, list) and name.isdigit() and int(name) < len(node):
        return int(name)
    raise ValueError(f"override {override!r}: there is no {name!r} in {brief(node)}")


def _drop_options_of_other_kinds(objective: dict[str, Any]) -> None:
    """Removes, in place, options that the objective's kind does not have.

    They belonged to the kind before an override changed it. An unknown kind is reported later.
    """
    with contextlib.suppress(ValueError):
        valid = {item.name for item in dataclasses.fields(options_class(str(objective["kind"])))}
        for name in objective.keys() - valid:
            del objective[name]


ELSEWHERE = {
    "batch_size": "global_batch", "learning_rate": "lr", "wd": "weight_decay", "arch": "name",
    "workers": "num_workers", "accum_freq": "micro_batch", "train_data": "shards",
}  # fmt: skip
"""Names that options have in other programs, which are spelt unlike ours."""


def _message(error: ValidationError, tree: dict[str, Any]) -> str:
    """Describes one problem of the error in one line: the option, its value, what was wanted."""
    problems = error.errors()
    unknown = [item for item in problems if item["type"] in UNKNOWN]
    problem: Mapping[str, Any] = unknown[0] if unknown else farthest(problems)
    path = [str(part) for part in problem["loc"]]
    name = dotted(path)
    if problem["type"] in UNKNOWN:
        valid = _fields_at(path[:-1], tree)
        word = ELSEWHERE.get(path[-1], path[-1])
        groups = [g for g, hint in typing.get_type_hints(Config).items() if _options_in(hint)]
        places = [[], *([group] for group in groups)] if word not in valid else []
        near = [dotted([*place, word]) for place in places if word in _fields_at(place, tree)]
        near = near or [dotted([*path[:-1], option]) for option in nearest(word, valid, 1)]
        hint = f": did you mean {' or '.join(map(repr, near))}?" if near else ""
        return f"unknown option {name!r}{hint} (valid here: {', '.join(valid)})"
    if problem["type"] in ("missing", "missing_argument"):
        return f"option {name!r} is required: set {name}=VALUE"
    if problem["type"] == "union_tag_not_found":
        if numbers := [key for key in map(str, problem["input"]) if key.isdigit()]:
            return f"{name} is no list of objectives: leave the number out of {name}.{numbers[0]}"
        return f"option '{name}.kind' is required beside other options of {name}"
    got = "" if isinstance(problem["input"], dict) else f", got {problem['input']!r}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "string_type" and not isinstance(problem["input"], dict | list):
        message = "wanted a text: put it in quotes"
    return f"option {name or 'configuration'!r}{got}: {message}"


def _fields_at(path: list[str], tree: Any) -> list[str]:
    """Returns the names of the options below a path of pydantic's, for example ["train", "plan"].

    ``tree`` is what the user wrote; it has the kinds of objectives.
    """
    owner: Any = Config
    for part in path:
        if isinstance(tree, list) and part.isdigit():
            tree = tree[int(part)]
        elif isinstance(tree, dict):
            tree = tree.get(part)
        owner = _options_in(typing.get_type_hints(owner).get(part)) or owner
        if owner is ObjectiveOptions and isinstance(tree, dict):
            owner = options_class(str(tree.get("kind")))
    return [item.name for item in dataclasses.fields(owner)]


def _options_in(annotation: Any) -> Any:
    """Returns the first class of options that an annotation mentions, for example in
    ``dict[str, BenchmarkConfig]``; None if it mentions none."""
    if dataclasses.is_dataclass(annotation):
        return annotation
    return next(filter(None, map(_options_in, typing.get_args(annotation))), None)
