"""Completes the commands that messages suggest, with the flags of the command that was typed.

A message quotes a verb with the options that matter to it: ``'mclclip embed --stage 0 --force'``.
When the message is shown (as an error line or in the log), ``complete`` adds the configuration and
the options that name the user's run. A message that suggests the user's own command with a changed
or added word gets it from ``words_of`` and ``again``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

_OFFERED = re.compile(r"'mclclip ([a-z][a-z-]*)((?: [^'\n]*)?)'")

_READ_LABELS = ("train", "relocate")  # of a stage, which 'cluster' makes in the stage before


class _Typed:
    """The command of this process; a call from Python has none."""

    verb = ""
    words: tuple[str, ...] = ()  # after ``mclclip``, ``--flag=value`` as two
    run: tuple[str, ...] = ()  # that name the run to verbs of ``readers``
    # Verbs that read a configuration, and whether they must be given a stage.
    readers: Mapping[str, bool] = MappingProxyType({})


def remember(
    verb: str,
    words: Sequence[str],
    *,
    run: Sequence[str] = (),
    readers: Mapping[str, bool] = MappingProxyType({}),
) -> None:
    """Notes the command that was typed; without words it is forgotten.

    run      the words by which verbs that read a configuration find the same run: ``--config ucm``
    readers  these verbs, and whether they must be given a stage
    """
    _Typed.verb, _Typed.run, _Typed.readers = verb, tuple(run), readers
    split = (word.split("=", 1) if re.match(r"--[a-z-]+=", word) else [word] for word in words)
    _Typed.words = tuple(part for word in split for part in word)


def words_of(verb: str, *first: object, **flags: object) -> list[str]:
    """The words of the command that calls ``verb``: those typed, or for a call from Python those
    with the same arguments. ``first`` have no flag; a list repeats its flag for each value."""
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
    """The command with other ``words``, quoted for a shell, with urls without their queries.

    The words replace the path ``instead`` if it stands first; otherwise they are a flag and its
    value, which replace those of the same flag.
    """
    new, typed = [str(word) for word in words], [*command]
    if instead is not None:
        first = [n for n, word in enumerate(typed) if Path(word) == instead][:1]
        for at in first:
            typed[at : at + 1] = new
        return _shown(typed)
    if new[0] in typed:
        at = typed.index(new[0])
        typed[at : at + len(new)] = []
    return _shown([*typed, *new])


def complete(text: str) -> str:
    """Completes every command in the text with the run that was typed, and with a stage if its verb
    needs one: the stage of a folder in the text, or else the typed one."""

    def completed(offer: re.Match[str]) -> str:
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

    return _OFFERED.sub(completed, text)


def _shown(words: Sequence[str]) -> str:
    from mclclip.util.files import printable  # imports numpy

    return shlex.join(map(printable, words))


def _stage(verb: str, text: str) -> str:
    if not _Typed.readers[verb]:  # such a verb has another meaning without a stage
        folder = re.search(rf"stage_(\d+)/{verb}\b", text)
        return f"--stage {folder[1]}" if folder else ""
    if folder := re.search(r"stage_(\d+)/(\w+)", text):
        return (
            f"--stage {int(folder[1]) - (folder[2] == 'pseudo_labels')}"  # made by the one before
        )
    if "--stage" in _Typed.words[:-1]:
        typed = _Typed.words[_Typed.words.index("--stage") + 1]
        if verb == "cluster" and _Typed.verb in _READ_LABELS and typed.isdecimal():
            typed = str(max(0, int(typed) - 1))
        return f"--stage {typed}"
    return ""
