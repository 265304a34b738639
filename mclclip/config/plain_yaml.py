"""YAML of strangers: plain values, bounded before they are made.

Nine lines of aliases may stand for a billion values, 5,000 levels exhaust the stack of all that
walks them, and of a key given twice plain PyYAML keeps the last value in silence.
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
"""Values that a YAML document may stand for, counted as often as its aliases repeat them."""

_TAG = "tag:yaml.org,2002:"
_TYPES = ("map", "seq", "str", "int", "float", "bool", "null")
_LONGEST_NUMBER = 400  # digits; of more, yaml and Python take minutes


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; see ``parse_yaml``, whose errors name the file."""
    return parse_yaml(read_bounded(path, MAX_YAML_BYTES), str(path))


def parse_yaml(data: str | bytes, where: str) -> Any:
    """The content of a YAML text: mappings, lists, texts, numbers, true, false and null.

    A date is a text. Raises ValueError, one line that begins with ``where``, for what is not YAML
    or of other types, has a key twice in one mapping, stands for more than ``MAX_YAML_VALUES``
    values, contains itself, or is nested deeper than ``MAX_DEPTH`` levels; and for ``yes``,
    ``010`` and ``1:30`` without quotes, which YAML 1.1 reads as true, 8 and 90, and 1.2 does not.
    """
    return _one_line(where, lambda: _Loader(data).get_single_data())


def parse_value(text: str, where: str) -> Any:
    """The value of an option as it is typed on a command line.

    A list, a mapping or a text in quotes is YAML. Anything else that is no number, true, false or
    null is a text as it stands, whatever signs and blanks it has. Raises ValueError, one line that
    begins with ``where``, for what ``parse_yaml`` refuses, for line breaks, and for what stands
    behind a closing bracket or quote, such as a comment.
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
    """Refuses a document before values are made of it.

    A node is complete before another can refer to it, so that its size and depth, with all its
    aliases written out, follow from those of its parts.
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
        """The value of a text; nothing stands behind it, not even a comment."""
        node = self.get_single_node()
        assert node is not None  # a bracket or a quote has begun
        rest = self.buffer[node.end_mark.index :].strip("\0 ")
        if rest:
            raise Refused(f"has {rest!r} behind its value: leave it out, or put all in quotes")
        return self.construct_document(node)

    def scalar(self, text: str) -> Any:
        """The value of a scalar without quotes; a text where it is nothing else."""
        tag = str(self.resolve(yaml.ScalarNode, text, (True, False)))  # type: ignore[no-untyped-call]
        if tag.removeprefix(_TAG) not in _TYPES:
            return text
        node = yaml.ScalarNode(tag, text, self.get_mark())
        self._measure(node)
        return self.construct_document(node)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes a node and checks it."""
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
        """Values and levels of a node whose parts have been measured."""
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
    """Returns whether YAML 1.1 (PyYAML) reads a scalar otherwise than YAML 1.2 and most people."""
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
