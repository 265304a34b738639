"""The parser of the command line: help, errors, checks of paths, and completion.

It imports nothing heavy, so ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from mclclip.cli import process


class _Help(argparse.RawDescriptionHelpFormatter):
    """Formats help in 80 columns, and adds the default to every flag that takes a value."""

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
    """A parser that records its errors for the launcher; every verb has such a parser too."""

    def __init__(self, **options: Any) -> None:
        # No abbreviations: a shortened flag may be mistaken for another one.
        super().__init__(formatter_class=_Help, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        process.record_early(ValueError(message), process.EXIT_USER)
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Adds the nearest choices to the error, as Python 3.14 does itself."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            from mclclip.util.options import nearest

            choices = action.choices or ()
            near = nearest(str(value), map(str, choices))
            if isinstance(choices, dict):  # of verbs, one of which may have a flag of this name
                flag = f"--{value}"
                verbs = [v for v, p in choices.items() if flag in p._option_string_actions]
                near = [f"{verb} {flag}" for verb in verbs] if 0 < len(verbs) <= 3 else near
            error.message += f", nearest: {', '.join(near)}"
            raise


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of the verbs by name."""
    (verbs,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(verbs.choices)


# --- types of flags ------------------------------------------------------------------------------


def character(text: str) -> str:
    """Type of a flag that is one character; backslash and t are a tab."""
    text = "\t" if text == "\\t" else text
    if len(text) != 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted one character")
    return text


def whole_number(minimum: int, text: str) -> int:
    """Type of a flag that is a whole number of at least ``minimum``."""
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted a whole number of {minimum} or more"
        )
    return int(text)


def positive(text: str, most: float = 1e9) -> float:
    """Type of a flag that is a number above 0, and at most ``most``."""
    with suppress(ValueError):
        if 0 < (number := float(text)) <= most:
            return number
    raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number above 0, at most {most:g}")


def parse_path(text: str) -> Path:
    """Type of a flag whose path, or pattern of paths, must exist (``check_paths``). A run may also
    be named as ``run_dir=FOLDER``, as verbs with a configuration take it."""
    return Path(text.removeprefix("run_dir="))


def parse_named_path(text: str) -> str:
    """Type of a flag ``[NAME=]PATH`` whose path must exist. A text without "/" may also be the name
    of a model, such as ViT-B-32@openai."""
    return text


_PATHS = (Path, parse_path, parse_named_path)
_SOURCES = ("source", "images")  # arguments that may be patterns


def check_paths(args: argparse.Namespace) -> None:
    """Raises ValueError for a flag whose path is a url, and FileNotFoundError if a path must exist
    and does not."""
    from mclclip.util.options import protocol_of, refuse_url, split_named_path  # imports pydantic

    for action in args.parser._actions:
        if action.type not in _PATHS or not (value := getattr(args, action.dest)):
            continue
        flag = "/".join(action.option_strings) or str(action.metavar)
        for text in map(str, value if isinstance(value, list) else [value]):
            if action.dest in _SOURCES and protocol_of(text) == "hf":
                continue  # a data set of the hub, which is looked for later
            if action.type is not parse_named_path:
                refuse_url(text, flag)
            path = Path(split_named_path(text)[1])
            may_be_missing = (
                action.type is Path
                or action.type is parse_named_path
                and ("/" not in text or re.search("[@:]", text))
                # Patterns are expanded later; 'finetune --dry-run --samples N' reads no pictures.
                or action.dest in _SOURCES
                and re.search(r"[*?{\[]", text)
                or action.dest == "images"
                and getattr(args, "samples", None)
            )
            if not may_be_missing and not path.exists():
                problem = "there is no such file or folder"
                if flag == "--model" and re.search("[@:]", text):  # a model that has no export yet
                    problem = (
                        "wanted a folder that an export wrote; of any model "
                        "'mclclip export --stage 0 model.name=NAME model.pretrained=TAG "
                        "run_dir=FOLDER' makes one, FOLDER/stage_0/export (hf:... needs no TAG)"
                    )
                raise FileNotFoundError(f"{flag} {text}: {problem}")


# --- completion ----------------------------------------------------------------------------------


def print_completion(parser: argparse.ArgumentParser, shell: str) -> None:
    """Prints the script that makes a shell complete verbs, flags, files and recipes."""
    import shtab

    from mclclip.util import shipped

    for action in parser._actions:
        if action.dest == "verb":
            action.help = None  # otherwise shtab omits the verbs, as help does
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
