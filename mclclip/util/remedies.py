"""Reads the remedies that a race compares: shipped ones, by name, and those of a user's sweep file.

A remedy is a training with certain overrides of the configuration. Nothing heavy is imported here,
so that a misspelled name is refused at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mclclip.util.options import nearest

REMEDIES = """
mcl             # groups of pseudo labels, stage by stage
ungrouped       controls=[ungrouped]  # the same trainings without groups: the control
random_groups   controls=[random_groups]  # groups of the same sizes whose members are drawn
ifm             controls=[ungrouped] train.objective.kind=ifm  # implicit feature modification
hcl             controls=[ungrouped] train.objective.kind=hcl  # hard negatives weigh more
sigmoid         controls=[ungrouped] train.objective.kind=sigmoid  # SigLIP's loss
supcon          num_stages=1 train.objective.kind=supcon train.objective.groups=false  # by cluster
hard_captions   controls=[ungrouped] train.objective.kind=info_nce \
                train.objective.hard_captions={}  # edited captions as further texts
near_copies     controls=[ungrouped] train.objective.kind=info_nce \
                train.objective.near_copies={"threshold":0.95}  # near copies are no negatives
equal_captions  controls=[ungrouped] train.objective.kind=info_nce \
                train.objective.near_copies={"threshold":1.0}  # equal captions are no negatives
preserve        controls=[ungrouped] train.objective=[{"kind":"info_nce"},{"kind":"preserve"}] \
                # and similarities held near the base's
more_steps      num_stages=1 controls=[ungrouped] encoder=stage_1  # one training, all the steps
wise            controls=[ungrouped] encoder=soup_uniform  # average of base and control (WiSE-FT)
"""
"""The shipped remedies, one per line: its name, its overrides, and a description after #.

``controls=[NAME]`` runs that control instead of the method. ``encoder`` names the encoder by which
the remedy is judged (default: concat_stage_norm, else another join, else stage_1). Remedies with
the same overrides share their trainings."""

BASE, CONTROL = "base", "ungrouped"
FIXED = ("mcl", CONTROL)  # remedies that no file may redefine; they run first
# Files beside the folders of the remedies, which no remedy may be named after.
_FILES_OF_RACE = ("race.json", "race.csv", "race.html", "run_state.json", "run.lock")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_ALLOWED = ("train.", "num_stages=", "controls=", "encoder=")  # options that a remedy may set
# Options of train that it may not set, since remedies are compared at the same cost.
_SHARED = ("train.steps=", "train.epochs=", "train.global_batch=")


@dataclass(frozen=True)
class Remedy:
    """A remedy.

    name       for example 'ifm'
    overrides  of the race's configuration, such as ('train.objective.kind=ifm',)
    encoder    the encoder by which it is judged; None: the one by which any run is judged
    about      a few words for the reader
    file       the sweep file that defines it; empty for a shipped remedy
    """

    name: str
    overrides: tuple[str, ...]
    encoder: str | None = None
    about: str = ""
    file: str = ""

    @property
    def label(self) -> str:
        """For example "remedy 'mine' of mine.sweep", for messages."""
        return f"remedy {self.name!r}{self.file and f' of {self.file}'}"


def read_remedies(text: str, file: str = "") -> dict[str, Remedy]:
    """Reads remedies from a text of lines like those of ``REMEDIES``; returns them by name.

    Raises ValueError, which names ``file``, for a line that is no remedy or sets an option that all
    remedies share, and for a text without remedies.
    """
    where = file or "the shipped remedies"
    remedies: dict[str, Remedy] = {}
    for line in text.splitlines():
        words, _, about = (part.strip() for part in re.sub(r"(^|\s)#", "\n", line).partition("\n"))
        if not words:
            continue
        name, *options = words.split()
        if not _NAME.fullmatch(name) or name in (BASE, *_FILES_OF_RACE, *remedies):
            raise ValueError(
                f"{where}: a remedy is named {name!r}: wanted letters, digits and . _ - (no . "
                f"first), each name once, and neither {BASE!r} nor a race's own file"
            )
        for option in options:
            allowed = option.startswith(_ALLOWED) and "=" in option
            if not allowed or option.startswith(_SHARED):
                raise ValueError(
                    f"{where}: remedy {name!r} has {option!r}: a remedy sets options of train, "
                    "num_stages, controls or encoder, but neither steps, epochs nor global_batch, "
                    "since all remedies share the rest: run another race, or set it for all"
                )
        encoders = [o.removeprefix("encoder=") for o in options if o.startswith("encoder=")]
        overrides = tuple(o for o in options if not o.startswith("encoder="))
        remedies[name] = Remedy(name, overrides, encoders[-1] if encoders else None, about, file)
    if not remedies:
        raise ValueError(f"{where} has no remedies: wanted a line each, as in a sweep file")
    return remedies


def choose_remedies(words: Sequence[str]) -> list[Remedy]:
    """Returns the remedies that the user has listed; each word is a name or a sweep file.

    A remedy of a file replaces a shipped one of the same name. The control is always included. The
    control and mcl come first, since other remedies may need mcl's labels.

    Raises FileNotFoundError for a missing file. Raises ValueError for an unknown name, for a name
    that two files define, and for a file that defines mcl or the control.
    """
    by_name, names = read_remedies(REMEDIES), list[str]()
    by_file = dict[str, dict[str, Remedy]]()
    for word in dict.fromkeys(word for word in words if word.endswith(".sweep")):
        if not Path(word).is_file():
            raise FileNotFoundError(f"--remedies {word}: there is no such file")
        in_file = by_file[word] = read_remedies(Path(word).read_text(errors="replace"), word)
        for name in in_file:
            other_file = by_name[name].file if name in by_name else ""
            if name in FIXED or other_file:
                reason = (
                    f"as one of {other_file} is"
                    if other_file
                    else "which others are compared with or read the labels of"
                )
                raise ValueError(f"{word}: a remedy is named {name!r}, {reason}: name it otherwise")
        by_name |= in_file
    for word in words:
        if word in by_file:
            names += by_file[word]
        elif word in by_name:
            names.append(word)
        else:
            raise ValueError(
                f"no remedy {word!r} (nearest: {', '.join(nearest(word, by_name))}): name some of "
                f"{', '.join(by_name)}, or a file of your own, such as mine.sweep"
            )
    first = [name for name in FIXED if name in (*names, CONTROL)]
    return [by_name[name] for name in dict.fromkeys([*first, *names])]
