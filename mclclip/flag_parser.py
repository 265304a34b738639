"""The parser of the command line: how its help looks, and what its errors say.

Imports nothing heavy, since ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from mclclip import process


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help of 80 columns in which every flag that takes a value says its default."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=80, max_help_position=26)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not action.option_strings or action.nargs == 0 or "default" in text:
            return text
        if action.required:
            return f"{text} (required)"
        none = action.default in (None, "", [])
        return f"{text} (default: {'none' if none else '%(default)s'})"


def character(text: str) -> str:
    """Type of flags that are one character."""
    if len(text) != 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted one character")
    return text


class Parser(argparse.ArgumentParser):
    """A parser that also records its errors for the launcher; sub-parsers have this class too."""

    def __init__(self, **given: Any) -> None:
        # A flag is written out: a shortened one may be another flag's name to its user.
        super().__init__(formatter_class=_Help, allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        process.record_early(ValueError(message), process.EXIT_USER)
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Names the nearest choices too; Python 3.14 does so itself."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            from mclclip.options import nearest

            near = nearest(str(value), map(str, action.choices or ()))
            error.message += f", nearest: {', '.join(near)}"
            raise
