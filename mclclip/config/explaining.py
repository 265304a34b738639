"""Lists every option of a configuration with its text, type, default and allowed values.

The text is the docstring below the option in its owner's module. Type and values are those by which
a configuration is checked.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from mclclip.config.options import Config
from mclclip.config.reading import ELSEWHERE
from mclclip.eval import protocols
from mclclip.objectives.base import ObjectiveOptions, Sum, kinds, options_class
from mclclip.util.options import nearest

# Groups that repeat the options of ``train`` and ``model``; they are printed only if asked for.
_REPEATED = ("base.", "trained_model.")


class Option(NamedTuple):
    """One option: its dotted key, its type and default in words, and its text.

    In the key, NAME stands for a name that the user chooses, as in ``eval.suite.NAME.kind``. If
    only one kind of objective or benchmark has the option, ``kind`` names it; else it is empty.
    """

    key: str
    kind: str
    type: str
    default: str
    text: str


def explain(key: str) -> str:
    """Returns a text about the options whose keys begin with ``key``.

    A later part of a key, such as ``lr``, finds all options that have it, and so does its name in
    other programs, such as ``learning_rate``. An empty key gives all options but those of ``base``
    and ``trained_model``, which repeat ``train`` and ``model``.
    Raises ValueError, with the nearest keys, if there is no such option.
    """
    every = list(options())
    if not key:
        matches = [option for option in every if not option.key.startswith(_REPEATED)]
    else:
        matches = [option for option in every if _begins(option.key, key, whole=True)]
        matches = matches or [option for option in every if _begins(option.key, key)]
        words = (f".{key}", f".{ELSEWHERE.get(key, key)}")
        matches = matches or [option for option in every if any(w in option.key for w in words)]
    if not matches:
        near = ", ".join(nearest(key, {option.key for option in every}))
        raise ValueError(f"there is no option {key!r} (nearest: {near})")
    return "\n\n".join(map(_describe, matches))


def options(owner: Any = Config, prefix: str = "", kind: str = "") -> Iterator[Option]:
    """Yields every option of a class of options, and of the classes that its fields mention.

    ``prefix`` begins their keys, for example "train."; ``kind`` goes into ``Option.kind``.
    """
    hints = typing.get_type_hints(owner, include_extras=True)
    for name, item in owner.__pydantic_fields__.items():
        key, hint = prefix + name, hints[name]
        inner = list(_classes(hint))
        text = _description(owner, name) or next((str(each.__doc__) for each in inner), "")
        yield Option(key, kind, _type(hint), _default(item), text)
        below = f"{key}.NAME." if typing.get_origin(hint) is dict else f"{key}."
        for each in inner:
            if each is not ObjectiveOptions:
                yield from options(each, below, kind)
            else:
                for each_kind in kinds():
                    yield from options(options_class(each_kind), below, each_kind)
            if each is protocols.BenchmarkConfig:
                yield from _of_benchmarks(f"{below}options.")


def _description(owner: Any, name: str) -> str | None:
    """Returns the docstring of a field, which pydantic keeps in the class that declares it."""
    fields = (each.__dict__.get("__pydantic_fields__", {}).get(name) for each in owner.__mro__)
    return next((field.description for field in fields if field and field.description), None)


def _of_benchmarks(prefix: str) -> Iterator[Option]:
    """Yields the options of every kind of benchmark, which are arguments of its evaluator.

    Their text is their row in a table of the evaluator's docstring ("NAME   text", continued on
    indented lines), or else the sentences that mention ``NAME``.
    """
    for kind in protocols.KINDS:
        evaluator = protocols.evaluator(kind)
        text = inspect.getdoc(evaluator.evaluate) or ""
        sentences = re.split(r"(?<=[.;])\s+", text)
        schemas = evaluator.options.model_json_schema()
        for name, item in evaluator.options.model_fields.items():
            about = re.findall(rf"^{name}  +(.*(?:\n   +.*)*)", text, re.M)
            about = about or [each for each in sentences if f"``{name}``" in each]
            words = _words(schemas["properties"][name], schemas)
            yield Option(
                prefix + name, kind, words, _default(item), " ".join(" ".join(about).split())
            )


def _begins(option: str, key: str, whole: bool = False) -> bool:
    """Returns True if ``key``, as typed for --explain, names this option or a group above it.

    Unless ``whole``, the beginning of the key's last part is enough.
    """
    names, parts = option.split("."), key.split(".")
    pairs = list(zip(names, parts, strict=False))
    if len(names) < len(parts) or any(a not in (b, "NAME") for a, b in pairs[:-1]):
        return False
    name, last = pairs[-1]
    return name in (last, "NAME") or not whole and name.startswith(last)


def _classes(hint: Any) -> Iterator[Any]:
    """Yields the classes of options that a type mentions."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)


def _type(hint: Any) -> str:
    """Describes a type and its allowed values in words, for example "whole number at least 1"."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Sum:
        return "a list of them, whose losses are added"
    if not list(_classes(hint)):
        schema = TypeAdapter(hint).json_schema()
        return _words(schema, schema)
    if origin is typing.Annotated:
        return _type(parts[0])
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(map(_type, parts))
    if origin in (list, tuple, dict):
        return f"{_type(parts[-1])}, several{' by name' * (origin is dict)}"
    return f"one of the objectives {', '.join(kinds())}" if hint is ObjectiveOptions else "options"


_NAMES = {"integer": "whole number", "number": "number", "string": "text", "null": "null"}
_NAMES |= {"boolean": "true or false", "object": "mapping"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
_BOUNDS |= {"exclusiveMaximum": "below"}


def _words(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Describes a JSON schema in words; references are looked up in the schema ``whole``."""
    if "$ref" in schema:
        return _words(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(_words(each, whole) for each in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema["const"]]
        return f"{'one of ' * (len(values) > 1)}{', '.join(map(_plain, values))}"
    if schema.get("type") == "array":
        each = schema.get("items") or {}
        parts = [_words(part, whole) for part in schema.get("prefixItems", [each])]
        return f"list of {', '.join(dict.fromkeys(parts))}"
    bounds = [f"{word} {_number(schema[name])}" for name, word in _BOUNDS.items() if name in schema]
    return " ".join([_NAMES.get(schema.get("type", ""), "value"), *bounds])


def _number(bound: float) -> str:
    return f"{bound:g}" if bound % 1 else f"{bound:,.0f}"


def _default(item: FieldInfo) -> str:
    """Returns the default of a field as it is written in YAML, or "required"."""
    return "required" if item.is_required() else _plain(item.get_default(call_default_factory=True))


def _plain(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return "those below"
    plain = TypeAdapter(Any).dump_python(value, mode="json")
    return (
        str(yaml.safe_dump(plain, default_flow_style=True, width=10**6))
        .removesuffix("...\n")
        .strip()
    )


def _describe(option: Option) -> str:
    kind = f"  (of kind {option.kind})" if option.kind else ""
    lines = f"{option.type}; default: {option.default}".replace("; default: required", "; required")
    text = " ".join(inspect.cleandoc(option.text).split())
    indented = (textwrap.indent(textwrap.fill(each, 76), "    ") for each in (lines, text))
    return "\n".join((f"{option.key}{kind}", *indented))
