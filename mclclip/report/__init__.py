"""Parts of the pages that ``mclclip report`` and ``mclclip race`` write, and their renderer."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mclclip.util import files


def _printable(value: Any) -> Any:
    return (
        files.printable(value)
        if isinstance(value, str) and not isinstance(value, Markup)
        else value
    )


@cache
def environment() -> Environment:
    """The renderer of the pages of this folder: all text is escaped, without characters that do not
    print, and what is missing is an error."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    made.filters["duration"] = duration
    made.filters["place"] = "{:.1f}".format
    # A line may break behind an underscore or a slash of a name.
    made.filters["breakable"] = lambda name: Markup("<wbr>").join(
        re.split(r"(?<=[_/])", files.printable(name))
    )
    return made


def duration(seconds: float | None) -> str:
    """Seconds in words, such as ``3 h 12 min``."""
    if seconds is None:
        return "not recorded"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
