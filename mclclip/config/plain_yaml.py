"""Reads YAML that may come from strangers: plain values only, of bounded size and depth.

The bounds are checked before values are built: nine lines of aliases may stand for a billion
values, and 5,000 levels exhaust the stack of any function that walks them. A key that is given
twice is refused; PyYAML would silently keep the last value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from mclclip.util.files import MAX_DEPTH, Refused, read_bounded

MAX_YAML_BYTES = 1 << 20  # some seconds of parsing
MAX_YAML_VALUES = 100_000
"""The most values in a YAML document; what an alias refers to counts again for each alias."""

_TAG = "tag:yaml.org,2002:"
_TYPES = ("map", "seq", "str", "int", "float", "bool", "null")
_LONGEST_NUMBER = 400  # digits; Python needs minutes for numbers of very many


def read_yaml(path: Path) -> Any:
    """Returns the content of a YAML file. Raises the errors of ``parse_yaml``, with the path."""
    return parse_yaml(read_bounded(path, MAX_YAML_BYTES), str(path))


def parse_yaml(data: str | bytes, where: str) -> Any:
    """Returns the content of a YAML text: mappings, lists, texts, numbers, true, false and null.

    Dates stay texts. Raises ValueError, one line that begins with ``where``, for a text that is no
    YAML, has other types, has a key twice in one mapping, stands for more than ``MAX_YAML_VALUES``
    values, contains itself, or is nested deeper than ``MAX_DEPTH`` levels. ``yes``, ``010`` and
    ``1:30`` without quotes are refused too: YAML 1.1 reads them as true, 8 and 90, 1.2 does not.
    """
    return _one_line(where, lambda: _Loader(data).get_single_data())


def parse_value(text: str, where: str) -> Any:
    """Returns the value of an option as it is typed on a command line.

    A list, a mapping or a text in quotes is read as YAML, and so are numbers, true, false and null.
    Everything else is a text, with all its signs and blanks. Raises ValueError, one line that
    begins with ``where``, for what ``parse_yaml`` refuses, for line breaks, and for anything behind
    a closing bracket or quote, such as a comment.
    """
    if "\n" in text or "\r" in text:
        raise ValueError(f"{where} has a line break: write the value in one line")
    value = text.strip()
    if value.startswith(("[", "{", '"', "'")):
        return _one_line(where, lambda: _Loader(value).whole_value())
    read = _one_line(where, lambda: _Loader("").scalar(value))
    return text if isinstance(read, str) else read


def _one_line(where: str, read: Callable[[], Any]) -> Any:
    """Returns ``read()``; its errors become a ValueError of one line that begins with ``where``."""
    try:
        return read()
    except Refused as error:
        raise ValueError(f"{where} {error}") from None
    except Exception as error:  # yaml lets errors of many kinds through, such as for "!!int ''"
        cause = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{where} is not valid YAML: {cause}") from None


class _Loader(yaml.SafeLoader):
    """Refuses a document before Python values are built of it.

    A node is complete before an alias can refer to it. So its size and depth, as if all aliases
    were written out, follow from those of its parts.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in _TYPES
    }

    def __init__(self, stream: str | bytes) -> None:
        super().__init__(stream)
        self._open = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # node -> (values, levels)

    def whole_value(self) -> Any:
        """Returns the value of the text; raises Refused for anything behind it, even a comment."""
        node = self.get_single_node()
        assert node is not None  # a bracket or a quote has begun
        rest = self.buffer[node.end_mark.index :].strip("\0 ")
        if rest:
            raise Refused(f"has {rest!r} behind its value: leave it out, or put all in quotes")
        return self.construct_document(node)

    def scalar(self, text: str) -> Any:
        """Returns the value of a text without quotes: a number, true, false, null, or the text."""
        tag = str(self.resolve(yaml.ScalarNode, text, (True, False)))  # type: ignore[no-untyped-call]
        if tag.removeprefix(_TAG) not in _TYPES:
            return text
        node = yaml.ScalarNode(tag, text, self.get_mark())
        self._measure(node)
        return self.construct_document(node)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes a node, as PyYAML calls this, and checks its depth and size."""
        self._open += 1
        if self._open > MAX_DEPTH + 1:
            raise Refused(f"is nested deeper than {MAX_DEPTH} levels")
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._open -= 1
        if node is not None and node not in self._sizes:
            if is_alias:
                line = node.start_mark.line + 1
                raise Refused(f"has a value that contains itself, which begins in line {line}")
            self._sizes[node] = self._measure(node)
        return node

    def _measure(self, node: yaml.Node) -> tuple[int, int]:
        """Returns how many values a node stands for, and how many levels it has.

        Its parts have been measured before. Raises Refused for what is not allowed.
        """
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            parts = [part for pair in node.value for part in pair]
        else:
            parts = node.value if isinstance(node, yaml.SequenceNode) else []
            is_number = node.tag in (f"{_TAG}int", f"{_TAG}float")
            if is_number and not parts and len(node.value) > _LONGEST_NUMBER:
                raise Refused(f"has a number of {len(node.value)} digits")
            if not parts and _reads_differently(node):
                text, value = node.value, str(self.construct_object(node)).lower()
                raise Refused(
                    f"has {text} in line {node.start_mark.line + 1}, which YAML 1.1 reads as "
                    f"{value}: write {value} if you mean it, or '{text}' in quotes for a text"
                )
        sizes = [self._sizes[part] for part in parts]
        values = 1 + sum(size for size, _ in sizes)
        nested = not isinstance(node, yaml.ScalarNode)
        levels = int(nested) + max((depth for _, depth in sizes), default=0)
        if values > MAX_YAML_VALUES:
            raise Refused(f"stands for more than {MAX_YAML_VALUES:,} values: make it smaller")
        if levels > MAX_DEPTH:
            raise Refused(f"is nested deeper than {MAX_DEPTH} levels")
        return values, levels


def _reads_differently(node: yaml.Node) -> bool:
    """Returns True if YAML 1.1 (PyYAML) reads a scalar otherwise than YAML 1.2 and most people."""
    if node.tag == f"{_TAG}bool":
        return node.value.lower() in ("yes", "no", "on", "off")
    if node.tag == f"{_TAG}int" and re.match(r"[-+]?0[0-7_]", node.value):
        return True
    return node.tag in (f"{_TAG}int", f"{_TAG}float") and ":" in node.value


def _check_keys(node: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name, line = (key.tag, key.value), key.start_mark.line + 1
        if name in lines:
            raise Refused(
                f"has the key {key.value!r} twice, in line {lines[name]} and in line {line}: keep "
                "one of them"
            )
        lines[name] = line
