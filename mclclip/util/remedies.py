"""Remedies of a race, by name and from files of one's own.

Imports nothing heavy, so that a misspelled one is refused at once.
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
equal_captions  controls=[ungrouped] train.objective.kind=info_nce \
                train.objective.equal_captions=masked  # equal captions are no negatives
preserve        controls=[ungrouped] train.objective=[{"kind":"info_nce"},{"kind":"preserve"}] \
                # and similarities held near the base's
more_steps      num_stages=1 controls=[ungrouped] encoder=stage_1  # one training, all the steps
wise            controls=[ungrouped] encoder=soup_uniform  # average of base and control (WiSE-FT)
"""
"""The remedies that are known by name, a line each: a name, overrides, and after # what it is.
``controls=[NAME]`` runs that control in the place of the method, and ``encoder`` names the encoder
that stands for the remedy (default: concat_stage_norm, else another join, else stage_1).
Remedies with the same overrides share their trainings."""

BASE, CONTROL = "base", "ungrouped"
FIXED = ("mcl", CONTROL)  # remedies that no file may redefine; they run first
_TAKEN = ("race.json", "race.csv", "race.html", "run_state.json", "run.lock")  # beside remedies
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_OWN = ("train.", "num_stages=", "controls=", "encoder=")  # what a remedy may set
_EQUAL = ("train.steps=", "train.epochs=", "train.global_batch=")  # ... but for the same cost


@dataclass(frozen=True)
class Remedy:
    """A remedy: ``overrides`` on the base configuration, and the ``encoder`` that stands for it
    (None: the one by which a run is judged); ``about`` it in a few words; the sweep ``file`` that
    it is from (empty: it is a shipped one)."""

    name: str
    overrides: tuple[str, ...]
    encoder: str | None = None
    about: str = ""
    file: str = ""

    @property
    def label(self) -> str:
        """Names the remedy in messages, and the file that has to be corrected."""
        return f"remedy {self.name!r}{self.file and f' of {self.file}'}"


def read_remedies(text: str, file: str = "") -> dict[str, Remedy]:
    """The remedies of a text by name, a line each as in ``REMEDIES`` and in sweep files.

    ``file`` names the text in errors: ValueError for a line that is no remedy, or one that sets
    what all remedies share.
    """
    where = file or "the shipped remedies"
    remedies: dict[str, Remedy] = {}
    for line in text.splitlines():
        words, _, about = (part.strip() for part in re.sub(r"(^|\s)#", "\n", line).partition("\n"))
        if not words:
            continue
        name, *options = words.split()
        if not _NAME.fullmatch(name) or name in (BASE, *_TAKEN, *remedies):
            raise ValueError(
                f"{where}: a remedy is named {name!r}: wanted letters, digits and . _ - (no . "
                f"first), each name once, and neither {BASE!r} nor a race's own file"
            )
        for option in options:
            allowed = option.startswith(_OWN) and "=" in option
            if not allowed or option.startswith(_EQUAL):
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
    """The remedies of ``words``, each a name or a sweep file, whose lines win over names. The
    control is always among them; it and mcl, whose labels another remedy may need, come first.

    Raises ValueError for an unknown name, with the nearest ones, for a name that two files have,
    and for a line that gives another meaning to mcl or the control, and FileNotFoundError for a
    file that is not there.
    """
    by_name, names = read_remedies(REMEDIES), list[str]()
    by_file = dict[str, dict[str, Remedy]]()
    for word in dict.fromkeys(word for word in words if word.endswith(".sweep")):
        if not Path(word).is_file():
            raise FileNotFoundError(f"--remedies {word}: there is no such file")
        in_file = by_file[word] = read_remedies(Path(word).read_text(errors="replace"), word)
        if fixed := [name for name in in_file if name in FIXED]:
            raise ValueError(
                f"{word}: a remedy is named {fixed[0]!r}, which others are compared with or "
                "read the labels of: call it otherwise"
            )
        if twice := [
            name for name in in_file if by_name.get(name, in_file[name]).file not in ("", word)
        ]:
            raise ValueError(
                f"{word}: a remedy is named {twice[0]!r}, as one of {by_name[twice[0]].file} is: "
                "call one of them otherwise"
            )
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
