"""Verb: the script by which a shell completes the words of the command line."""

from __future__ import annotations

from typing import Any

import shtab

from mclclip import flags, shipped


def run(shell: str) -> None:
    """Prints the script by which a shell completes verbs, flags, files and names of recipes."""
    parser = flags.build_parser()
    for action in parser._actions:
        if action.dest == "verb":
            action.help = None  # shtab leaves out what help leaves out
    recipes = {"bash": "_mclclip_recipes", "zsh": "_mclclip_recipes"}
    for verb in flags.verbs_of(parser).values():
        flag: Any  # shtab reads an attribute that argparse's actions lack
        for flag in verb._actions:
            if flag.dest == "config":
                flag.complete = recipes
            elif flag.type in flags.PATHS:
                flag.complete = shtab.FILE
    names = " ".join(shipped.recipe_names())
    either = f"_alternative 'recipes:recipe:({names})' 'files:file:_files'"
    preamble: Any = {
        "bash": f'{recipes["bash"]}() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}',
        "zsh": f"{recipes['zsh']}() {{ {either}; }}",
    }
    print(shtab.complete(parser, shell, preamble=preamble))
