"""Completes the commands that messages suggest, with the flags of the command that was typed.

A message quotes a command without the run: ``'mclclip embed --stage 0 --force'``. When the message
is shown, as an error line or in the log, ``complete`` adds the words that name the user's run, such
as ``--config ucm``. To suggest the command that the user typed with one word changed, a message
takes it from ``words_of`` and changes it with ``again``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

_OFFERED = re.compile(r"'mclclip ([a-z][a-z-]*)((?: [^'\n]*)?)'")

OF_STAGE = ("embed", "cluster", "relocate", "train")
"""Verbs that require a stage."""
# These verbs read labels that 'mclclip cluster' has made one stage earlier.
_READ_LABELS = ("train", "relocate")


class _Typed:
    """The command that started this process (see ``remember``); empty for a call from Python."""

    verb = ""
    words: tuple[str, ...] = ()  # after ``mclclip``; ``--flag=value`` is split into two words
    run: tuple[str, ...] = ()
    readers: Sequence[str] = ()


def remember(
    verb: str,
    words: Sequence[str],
    *,
    run: Sequence[str] = (),
    readers: Sequence[str] = (),
) -> None:
    """Stores the command that was typed; empty arguments make this module forget it.

    verb     for example 'train'
    words    all words after ``mclclip``
    run      the words that name the user's run to another verb, such as ('--config', 'ucm')
    readers  the verbs that read a configuration
    """
    _Typed.verb, _Typed.run, _Typed.readers = verb, tuple(run), tuple(readers)
    split = (word.split("=", 1) if re.match(r"--[a-z-]+=", word) else [word] for word in words)
    _Typed.words = tuple(part for word in split for part in word)


def words_of(verb: str, *first: object, **flags: object) -> list[str]:
    """Returns the words of the command that runs ``verb``, beginning with 'mclclip'.

    If the user typed this verb, these are the typed words. After a call from Python they are built
    from its arguments: ``first`` come without a flag, ``flags`` as ``--name value``; a list repeats
    its flag for each value.
    """
    if _Typed.verb == verb:
        return ["mclclip", *_Typed.words]
    words = ["mclclip", verb, *map(str, first)]
    for name, value in flags.items():
        values = value if isinstance(value, list | tuple) else [value]
        flag = "--" + name.removesuffix("s" if values is value else "").replace("_", "-")
        for each in values:
            if each is True:
                words.append(flag)
            elif each not in (None, False, ""):
                words += [flag, str(each)]
    return words


def again(command: Sequence[str], *words: object, instead: Path | None = None) -> str:
    """Returns ``command`` with some words changed, quoted for a shell, without queries of urls.

    With ``instead``, ``words`` take the place of that path. Otherwise ``words`` are a flag with its
    value: they replace the value that the command has for this flag, or are added at the end.
    """
    new, typed = [str(word) for word in words], [*command]
    if instead is not None:
        at = next((n for n, word in enumerate(typed) if Path(word) == instead), None)
        if at is not None:
            typed[at : at + 1] = new
        return _shown(typed)
    if new[0] in typed:
        at = typed.index(new[0])
        typed[at : at + len(new)] = []
    return _shown([*typed, *new])


def complete(text: str) -> str:
    """Completes every quoted command in a message so that the user can paste it.

    Adds the words that name the user's run, and, if the verb requires it, ``--stage``: the stage of
    a folder that the text names (``stage_1/``), or else the stage that the user typed.
    """

    def complete_command(offer: re.Match[str]) -> str:
        verb, words = offer.groups()
        if "--data CONFIG" in words and _Typed.run[:1] == ("--config",):
            return offer[0].replace("CONFIG", _shown(_Typed.run[1:]))
        if verb not in _Typed.readers or "--config" in words:
            return offer[0]
        run = _shown(_Typed.run)
        stage = _stage(verb, text) if "--stage" not in words else ""
        control = re.search(r"controls/(\w+)/", text) if verb in ("train", "export") else None
        variant = f"--variant {control[1]}" if control and "--variant" not in words else ""
        parts = ("mclclip", verb, run, stage, variant, words.strip())
        return "'" + " ".join(filter(None, parts)) + "'"

    return _OFFERED.sub(complete_command, text)


def _shown(words: Sequence[str]) -> str:
    from mclclip.util.files import printable  # imports numpy

    return shlex.join(map(printable, words))


def _stage(verb: str, text: str) -> str:
    """Returns for example '--stage 1' for the suggested ``verb``, or '' (see ``complete``)."""
    folder = re.search(r"stage_(\d+)/(\w+)", text)
    if verb not in OF_STAGE:  # without --stage 'export' joins the stages
        return f"--stage {folder[1]}" if folder and folder[2] == verb else ""
    if folder:
        made_one_earlier = folder[2] == "pseudo_labels"
        return f"--stage {int(folder[1]) - made_one_earlier}"
    if "--stage" in _Typed.words[:-1]:
        typed = _Typed.words[_Typed.words.index("--stage") + 1]
        if verb == "cluster" and _Typed.verb in _READ_LABELS and typed.isdecimal():
            typed = str(max(0, int(typed) - 1))
        return f"--stage {typed}"
    return ""
