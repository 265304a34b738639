"""Commands that messages offer, made from the command that was typed, with all of its flags.

A message writes a verb with what matters to it, in quotes: ``'mclclip embed --stage 0 --force'``.
Where it is shown (the line of an error, the log) ``complete`` adds the configuration and the
options that name the user's run. A message that offers the user's command again, with a word more
or another one, gets it from ``words_of`` and ``again``.
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
    """The command that calls ``verb``: the typed one, or for a call from Python the one that has
    the same arguments: ``first`` are those without a flag, and a list is given a flag a value."""
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
    """The command with other ``words``, quoted for a shell, urls without their queries: in the
    place of the path ``instead``, where it stands first, or else a flag and its value, which
    replace the same flag's."""
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
    """The text, in which every command that it offers names the run of the typed one, and the stage
    that it is about where it needs one: that of a folder in the text, or else the typed one."""

    def completed(found: re.Match[str]) -> str:
        verb, words = found.groups()
        if "--data CONFIG" in words and _Typed.run[:1] == ("--config",):
            return found[0].replace("CONFIG", _shown(_Typed.run[1:]))
        if verb not in _Typed.readers or "--config" in words:
            return found[0]
        run = _shown(_Typed.run)
        stage = _stage(verb, text) if "--stage" not in words else ""
        control = re.search(r"controls/(\w+)/", text) if verb in ("train", "export") else None
        variant = f"--variant {control[1]}" if control and "--variant" not in words else ""
        parts = ("mclclip", verb, run, stage, variant, words.strip())
        return "'" + " ".join(filter(None, parts)) + "'"

    return _OFFERED.sub(completed, text)


def _shown(words: Sequence[str]) -> str:
    from mclclip.util.files import clean  # imports numpy

    return shlex.join(map(clean, words))


def _stage(verb: str, text: str) -> str:
    if not _Typed.readers[verb]:  # such a verb has another meaning without a stage
        named = re.search(rf"stage_(\d+)/{verb}\b", text)
        return f"--stage {named[1]}" if named else ""
    if found := re.search(r"stage_(\d+)/(\w+)", text):
        return f"--stage {int(found[1]) - (found[2] == 'pseudo_labels')}"  # made by the one before
    if "--stage" in _Typed.words[:-1]:
        typed = _Typed.words[_Typed.words.index("--stage") + 1]
        if verb == "cluster" and _Typed.verb in _READ_LABELS and typed.isdecimal():
            typed = str(max(0, int(typed) - 1))
        return f"--stage {typed}"
    return ""
