"""Types of options: strict dataclasses, number ranges that several rooms use, and their errors."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Cosine = Annotated[float, Field(ge=-1.0, le=1.0)]

_UNION_MEMBERS = ("bool", "int", "float", "str")


def first_problem(error: ValidationError) -> tuple[str, str]:
    """The dotted name of an option that does not fit, and what is wrong with its value.

    The name is empty for what is said of several options. Of the tried members of a union the one
    that got farthest tells most; their names, which pydantic adds, are left out.
    """
    problem = max(error.errors(), key=lambda item: len(item["loc"]))
    path = [str(part) for part in problem["loc"]]
    name = ".".join(part for part in path if part not in _UNION_MEMBERS and "[" not in part)
    got = f" (got {problem['input']!r})" if name else ""
    return name, problem["msg"].removeprefix("Value error, ") + got
