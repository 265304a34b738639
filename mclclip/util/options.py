"""Types that several groups of options share, and helpers for names and errors of options."""

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
"""A share below 1, such as that of the features that dropout drops."""
Decay = Annotated[float, Field(gt=0.0, lt=1.0)]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A seed of a run: torch and NumPy both take 63 bits."""
NO_RESULT = {"changes": "speed, records or places, and no result"}
"""Metadata of an option that changes no result: an artifact can be resumed with another value."""
Cosine = Annotated[float, Field(ge=-1.0, le=1.0)]

PROTOCOLS = ("s3", "gs", "az", "http", "https", "hf")
"""Protocols that the url of a shard may have."""

_UNION_MEMBERS = ("bool", "int", "float", "str", "constrained-int", "constrained-float")


def brief(value: object) -> str:
    """The ``repr`` of a value for a message, cut after 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def each_once(values: list[Value]) -> list[Value]:
    """Checks the list that an option holds: ValueError if a value is in it twice."""
    if len(set(values)) != len(values):
        raise ValueError("wanted each of them once")
    return values


def protocol_of(path: str | Path) -> str | None:
    """The lower-case protocol of a url, such as 's3'; None for a path.

    A url that ``Path`` has changed to ``s3:/bucket``, with one slash, is recognised if its protocol
    is 'file' or one of `PROTOCOLS`.
    """
    protocol, _, rest = str(path).partition(":")
    protocol = protocol.lower()
    is_listed = rest.startswith("/") and protocol in (*PROTOCOLS, "file")
    is_url = is_listed or (rest.startswith("//") and re.fullmatch(r"[a-z][a-z0-9+.-]*", protocol))
    return protocol if is_url else None


def refuse_url(path: str | Path, option: str) -> None:
    """Raises ValueError if ``path``, the value of ``option``, is a url."""
    if (protocol := protocol_of(path)) is not None and not os.path.exists(path):
        url = f"{protocol}://{str(path)[len(protocol) + 1 :].lstrip('/')}"
        raise ValueError(
            f"{option} {printable(url)} is a url, and this reads and writes files alone: fetch it "
            "and give its path (tar shards behind urls are read by data.sources.NAME.shards)"
        )


def first_few(texts: Sequence[str], count: int, separator: str = ", ") -> str:
    """Joins the first ``count`` texts, and says how many more there are: 'a, b and 7 more'."""
    more = f" and {len(texts) - count} more" if len(texts) > count else ""
    return separator.join(texts[:count]) + more


@contextmanager
def prefix_errors(prefix: str) -> Iterator[None]:
    """Puts ``prefix``, such as the option's name, before a ValueError or FileNotFoundError."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(f"{prefix}: {error}") from None


def nearest(word: str, choices: Iterable[str], count: int = 3, cutoff: float = 0.0) -> list[str]:
    """The ``count`` choices whose spelling is nearest to a word, best first.

    ``cutoff``: the least similarity, 1 for the same spelling."""
    return difflib.get_close_matches(word[:200], sorted(choices), n=count, cutoff=cutoff)


UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
"""The types of pydantic's problems with a name that no option has."""


def farthest(problems: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The problem to show, of those that pydantic reports for a value of a union type.

    pydantic reports one for every member of the union. The member that fits best is the one in
    which it came farthest, so the problem has the longest path of option names.
    """
    return max(problems, key=lambda item: len(item["loc"]))


def dotted(path: Sequence[str]) -> str:
    """Joins a path of names to 'train.objective.kind', without the types, such as 'int' or
    'function-after[...]', that pydantic puts between them for members of unions."""
    return ".".join(part for part in path if part not in _UNION_MEMBERS and "[" not in part)


def with_prefix(entries: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """Selects the entries whose dotted names begin with ``prefix``, and removes it from them."""
    return {n.removeprefix(prefix): v for n, v in entries.items() if n.startswith(prefix)}


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Returns the dotted name of an invalid option and what is wrong with its value.

    The name is empty if the problem is about several options.
    """
    problem = farthest(error.errors())
    name = dotted([str(part) for part in problem["loc"]])
    got = f" (got {brief(problem['input'])})" if name else ""
    if problem["type"] in UNKNOWN:
        return name, f"there is no such option{got}"
    return name, problem["msg"].removeprefix("Value error, ") + got


def split_named_path(text: str) -> tuple[str | None, str]:
    """Splits ``[NAME=]PATH`` into name (or None) and path. What exists is a path, even with a = in
    it. Raises ValueError for a blank name."""
    name, sign, path = text.partition("=")
    if sign and not name.strip() and not Path(text).exists():
        raise ValueError(f"{text!r} has no name before its '=': give NAME=PATH, or PATH alone")
    return (name, path) if sign and not Path(text).exists() else (None, text)


def check_folder_name(name: str, option: str, what: str) -> None:
    """Raises ValueError for a name that no folder can have; ``what`` says in its message what
    ``option`` names by it, for example 'evaluation images'."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"{option} names {what} {name!r}: wanted letters, digits, '_', '-' and '.', since a "
            "folder is called by it"
        )


def all_shards(folder: Path) -> str:
    """The glob pattern of all shards in a folder: 'data' gives 'data/*.tar'. Characters of the
    folder's name that have a meaning in patterns are escaped."""
    return str(Path(glob.escape(str(folder)), "*.tar"))
