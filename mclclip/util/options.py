"""Types of options: strict dataclasses, number ranges that several rooms use, dotted names, and
errors."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from mclclip.util.files import printable

Value = TypeVar("Value")
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
Share = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A share that is never all, such as what is dropped, or of the past that is kept."""
Decay = Annotated[float, Field(gt=0.0, lt=1.0)]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A seed of a run: torch and NumPy take 63 bits."""
NO_RESULT = {"changes": "speed, records or places, and no result"}
"""Metadata of an option, or of a group of them, which artifacts may be made or resumed without
regard to."""
Cosine = Annotated[float, Field(ge=-1.0, le=1.0)]

PROTOCOLS = ("s3", "gs", "az", "http", "https", "hf")
"""Of a shard's url."""

_UNION_MEMBERS = ("bool", "int", "float", "str", "constrained-int", "constrained-float")


def brief(value: object) -> str:
    """A value for a message: its ``repr``, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def each_once(values: list[Value]) -> list[Value]:
    """Returns the values; ValueError where one is named twice. A check of an option."""
    if len(set(values)) != len(values):
        raise ValueError("wanted each of them once")
    return values


def protocol_of(path: str | Path) -> str | None:
    """The lower-case protocol of a url; None for a path. `PROTOCOLS` and ``file`` are recognised
    even after ``Path`` has removed a slash of the url."""
    protocol, _, rest = str(path).partition(":")
    protocol = protocol.lower()
    is_listed = rest.startswith("/") and protocol in (*PROTOCOLS, "file")
    is_url = is_listed or (rest.startswith("//") and re.fullmatch(r"[a-z][a-z0-9+.-]*", protocol))
    return protocol if is_url else None


def refuse_url(path: str | Path, option: str) -> None:
    """Raises ValueError for a url where a path is wanted."""
    if (protocol := protocol_of(path)) is not None and not os.path.exists(path):
        url = f"{protocol}://{str(path)[len(protocol) + 1 :].lstrip('/')}"
        raise ValueError(
            f"{option} {printable(url)} is a url, and this reads and writes files alone: fetch it "
            "and give its path (tar shards behind urls are read by data.sources.NAME.shards)"
        )


@contextmanager
def prefix_errors(prefix: str) -> Iterator[None]:
    """Puts ``prefix``, such as the option's name, before a ValueError or FileNotFoundError."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(f"{prefix}: {error}") from None


def nearest(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """The choices whose spelling is nearest to a word, best first, however far they are."""
    return difflib.get_close_matches(word[:200], sorted(choices), n=count, cutoff=0.0)


def farthest(problems: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The problem with the longest path. pydantic reports a problem for every member of a union;
    the longest path belongs to the member that fits best."""
    return max(problems, key=lambda item: len(item["loc"]))


def dotted(path: Sequence[str]) -> str:
    """The dotted name of an option, without the members of unions that pydantic adds to a path."""
    return ".".join(part for part in path if part not in _UNION_MEMBERS and "[" not in part)


def with_prefix(entries: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """The entries whose dotted names begin with ``prefix``, under the rest of their names."""
    return {n.removeprefix(prefix): v for n, v in entries.items() if n.startswith(prefix)}


def first_problem(error: ValidationError) -> tuple[str, str]:
    """The dotted name of an option that does not fit, and what is wrong with its value.

    The name is empty for a problem of several options.
    """
    problem = farthest(error.errors())
    name = dotted([str(part) for part in problem["loc"]])
    got = f" (got {brief(problem['input'])})" if name else ""
    return name, problem["msg"].removeprefix("Value error, ") + got


def split_named_path(text: str, option: str, what: str) -> tuple[str | None, Path]:
    """Splits ``[NAME=]PATH``, the value of a command's ``option``; None without a name.

    ``what`` is named, in the message of the ValueError for a name that no folder can have.
    """
    name, sign, path = text.partition("=")
    if not sign:
        return None, Path(text)
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"{option} names {what} {name!r}: wanted letters, digits, '_', '-' and '.', since a "
            "folder is called by it"
        )
    return name, Path(path)


def all_shards(folder: Path) -> str:
    """The pattern of all shards of a folder; signs in its name that have a meaning in patterns are
    escaped."""
    return str(Path(glob.escape(str(folder)), "*.tar"))
