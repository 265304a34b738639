"""How the command line is read: its help, its errors, flags that are paths, and completion.

Imports nothing heavy, since ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, NoReturn

from mclclip.cli import process


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


class Parser(argparse.ArgumentParser):
    """A parser that also records its errors for the launcher; sub-parsers have this class too."""

    def __init__(self, **options: Any) -> None:
        # A flag is written out: a shortened one may be another flag's name to its user.
        super().__init__(formatter_class=_Help, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        process.record_early(ValueError(message), process.EXIT_USER)
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Names the nearest choices too; Python 3.14 does so itself."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            from mclclip.util.options import nearest

            near = nearest(str(value), map(str, action.choices or ()))
            error.message += f", nearest: {', '.join(near)}"
            raise


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each verb, by its name."""
    (verbs,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(verbs.choices)


# --- types of flags ------------------------------------------------------------------------------


def character(text: str) -> str:
    """Type of flags that are one character."""
    if len(text) != 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted one character")
    return text


def parse_path(text: str) -> Path:
    """Type of flags whose path, or pattern of paths, must exist; see ``check_paths``."""
    return Path(text)


def parse_named_path(text: str) -> str:
    """The same, of ``[NAME=]PATH``; what has no "/" may also be a name, such as ViT-B-32@openai."""
    return text


_PATHS = (Path, parse_path, parse_named_path)
_SOURCES = ("source", "images")  # flags that take patterns too


def check_paths(args: argparse.Namespace) -> None:
    """Raises ValueError for a flag's path that is a url, and FileNotFoundError for one that must
    exist and does not; takes no time."""
    from mclclip.util.options import refuse_url  # imports pydantic  # imports pydantic

    for action in args.parser._actions:
        if action.type not in _PATHS or not (value := getattr(args, action.dest)):
            continue
        flag = "/".join(action.option_strings) or str(action.metavar)
        for text in map(str, value if isinstance(value, list) else [value]):
            if action.type is not parse_named_path:
                refuse_url(text, flag)
            path = Path(text) if Path(text).exists() else Path(text.rpartition("=")[2])
            may_be_missing = action.type is parse_named_path and (
                "/" not in text or re.search("[@:]", text)
            )
            # Patterns are expanded later; a dry run of so many samples reads none of them.
            may_be_missing = (
                may_be_missing or action.dest in _SOURCES and re.search(r"[*?{\[]", text)
            )
            may_be_missing = (
                may_be_missing or action.dest == "images" and getattr(args, "samples", None)
            )
            if action.type is not Path and not may_be_missing and not path.exists():
                raise FileNotFoundError(f"{flag} {text}: there is no such file or folder")


# --- completion ----------------------------------------------------------------------------------


def print_completion(parser: argparse.ArgumentParser, shell: str) -> None:
    """Prints the script by which a shell completes verbs, flags, files and names of recipes."""
    import shtab

    from mclclip.util import shipped

    for action in parser._actions:
        if action.dest == "verb":
            action.help = None  # shtab leaves out what help leaves out
    recipes = dict.fromkeys(["bash", "zsh"], "_mclclip_recipes")
    for verb in verbs_of(parser).values():
        flag: Any  # shtab reads an attribute that argparse's actions lack
        for flag in verb._actions:
            if flag.dest == "config":
                flag.complete = recipes
            elif flag.type in _PATHS:
                flag.complete = shtab.FILE
    names = " ".join(shipped.recipe_names())
    either = f"_alternative 'recipes:recipe:({names})' 'files:file:_files'"
    preamble: Any = {
        "bash": f'{recipes["bash"]}() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}',
        "zsh": f"{recipes['zsh']}() {{ {either}; }}",
    }
    print(shtab.complete(parser, shell, preamble=preamble))
