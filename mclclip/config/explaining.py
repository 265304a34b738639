"""Every option of a configuration with its text, type, default and allowed values.

The text is the docstring below the option in its owner's module; the type and the values are those
by which a configuration is checked.
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
from mclclip.eval import protocols
from mclclip.objectives.base import ObjectiveOptions, Sum, kinds, options_class
from mclclip.util.options import nearest

# Options that are those of another one again; they are printed where they are asked for.
_AGAIN = ("base.", "trained_model.")


class Option(NamedTuple):
    """One option: its dotted key, in which NAME stands for a name of the user's, and its words.

    ``kind`` is that of the objective or benchmark that alone has the option; empty: all have it.
    """

    key: str
    kind: str
    type: str
    default: str
    text: str


def explain(key: str) -> str:
    """The options whose keys begin with ``key`` as text (empty: all, with those of ``base`` and
    ``trained_model`` left out, which are those of ``train`` and ``model``).

    A key in the middle, such as ``lr``, finds what contains it. Raises ValueError, with the nearest
    keys, where there is none.
    """
    known = list(options())
    if not key:
        found = [option for option in known if not option.key.startswith(_AGAIN)]
    else:
        found = [option for option in known if _begins(option.key, key, whole=True)]
        found = found or [option for option in known if _begins(option.key, key)]
        found = found or [option for option in known if f".{key}" in option.key]
    if not found:
        near = ", ".join(nearest(key, {option.key for option in known}))
        raise ValueError(f"there is no option {key!r} (nearest: {near})")
    return "\n\n".join(map(_described, found))


def options(owner: Any = Config, prefix: str = "", kind: str = "") -> Iterator[Option]:
    """Every option of a class of options, with those of the classes that it mentions."""
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
    """The docstring of a field, which pydantic has in the class that declares it."""
    fields = (each.__dict__.get("__pydantic_fields__", {}).get(name) for each in owner.__mro__)
    return next((field.description for field in fields if field and field.description), None)


def _of_benchmarks(prefix: str) -> Iterator[Option]:
    """The options of every kind of benchmarks: arguments of its evaluator, whose docstring has
    sentences about them."""
    for kind in protocols.KINDS:
        evaluator = protocols.evaluator(kind)
        sentences = re.split(r"(?<=[.;])\s+", inspect.getdoc(evaluator.evaluate) or "")
        schemas = evaluator.options.model_json_schema()
        for name, item in evaluator.options.model_fields.items():
            about = [each for each in sentences if f"``{name}``" in each]
            words = _words(schemas["properties"][name], schemas)
            yield Option(prefix + name, kind, words, _default(item), " ".join(about))


def _begins(option: str, key: str, whole: bool = False) -> bool:
    """Returns whether ``key``, as typed for --explain, names this option or a group above it; of
    the last part the beginning is enough, unless ``whole``."""
    names, given = option.split("."), key.split(".")
    pairs = list(zip(names, given, strict=False))
    if len(names) < len(given) or any(a not in (b, "NAME") for a, b in pairs[:-1]):
        return False
    name, last = pairs[-1]
    return name in (last, "NAME") or not whole and name.startswith(last)


def _classes(hint: Any) -> Iterator[Any]:
    """The classes of options that a type mentions."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)


def _type(hint: Any) -> str:
    """A type in words, with the allowed values."""
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
    """A JSON schema in words; ``whole`` has what it refers to."""
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
    """The default of a field as it is written in YAML; "required" without one."""
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


def _described(option: Option) -> str:
    kind = f"  (of kind {option.kind})" if option.kind else ""
    lines = f"{option.type}; default: {option.default}".replace("; default: required", "; required")
    text = " ".join(inspect.cleandoc(option.text).split())
    indented = (textwrap.indent(textwrap.fill(each, 76), "    ") for each in (lines, text))
    return "\n".join((f"{option.key}{kind}", *indented))
