"""Makes the parts of the pages that ``mclclip report`` and ``mclclip race`` write, and renders
them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mclclip.eval.results import short_name
from mclclip.util import files


def _printable(value: Any) -> Any:
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return files.printable(value) if is_text else value


@cache
def environment() -> Environment:
    """The renderer of this folder's templates. It escapes all text, makes it printable, and raises
    an error for a missing value."""
    renderer = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    renderer.filters["duration"] = duration
    renderer.filters["place"] = "{:.1f}".format
    renderer.filters["short"] = short_name
    # Lets a browser break a line behind an underscore or a slash of a name.
    renderer.filters["breakable"] = lambda name: Markup("<wbr>").join(
        re.split(r"(?<=[_/])", files.printable(name))
    )
    return renderer


def duration(seconds: float | None) -> str:
    """Formats seconds as '45 s', '90 min' or '3 h 12 min'; None is 'not recorded'."""
    if seconds is None:
        return "not recorded"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
