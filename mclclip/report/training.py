"""Curves of the trainings, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from mclclip.opened_run import Run, Stage, thinned
from mclclip.report import charts

COLOURS = {"mcl": "stage", "ungrouped": "control"}
"""Colours of the variants, variables of the page's style; of others ``other``."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Training:
    """One training as it was recorded; figures are None where they were not."""

    variant: str
    stage: int
    finished: bool
    steps: int
    samples: int
    seconds: float | None
    ranks: int | None
    memory_gib: float | None
    first_loss: float | None
    last_loss: float | None
    made_of: Mapping[str, Any]

    @property
    def rank_hours(self) -> float | None:
        """Hours times ranks, which are GPUs where there are some."""
        if self.seconds is None or self.ranks is None:
            return None
        return self.seconds * self.ranks / 3600


def trainings(run: Run) -> list[Training]:
    """Every training that has records, stage 0 first, then MCL's stages, then the controls'."""
    trainings = []
    for variant, own in {"mcl": run, **run.controls}.items():
        for number in range(len(run.stages)):
            if number == 0 and variant != "mcl":
                continue  # it is shared
            stage = own.stage(number)
            if rows := thinned(stage.records("metrics")[0]):
                trainings.append(_training(variant, stage, rows))
    return trainings


def _training(variant: str, stage: Stage, rows: Rows) -> Training:
    manifest = stage.train if stage.has("train") else None
    epochs, whole = stage.records("epochs")
    seconds = _numbers(epochs, "seconds") if whole else []
    last, losses = rows[-1], _numbers(rows, "loss")
    every, each = (_number(last.get(f"samples_per_s{of}")) for of in ("", "_per_rank"))
    return Training(
        variant,
        stage.number,
        manifest is not None,
        int(last["step"]),
        int(_number(last.get("samples_seen")) or 0),
        sum(seconds) if seconds else None,
        round(every / each) if every and each else None,
        max(_numbers(rows, "memory_gib"), default=None),
        losses[0] if losses else None,
        losses[-1] if losses else None,
        {} if manifest is None else manifest.config,
    )


def curves(run: Run) -> list[dict[str, Any]]:
    """Charts of the ``loss`` and the ``lr`` of each ``stage`` that was trained, with a line per
    variant."""
    curves = []
    for number in range(len(run.stages)):
        variants = {"mcl": run, **(run.controls if number else {})}
        recorded = {
            name: thinned(own.stage(number).records("metrics")[0]) for name, own in variants.items()
        }
        if any(recorded.values()):
            loss = _chart(f"stage {number}: loss", "loss", recorded)
            rate = _chart(f"stage {number}: learning rate", "lr", recorded)
            curves.append({"stage": number, "loss": loss, "lr": rate})
    return curves


def _chart(title: str, name: str, recorded: Mapping[str, Rows]) -> Markup:
    """A line per variant; MCL's is drawn last, above the others."""
    series = []
    for variant, rows in reversed([*recorded.items()]):
        points = [
            (float(row["step"]), value)
            for row in rows
            if (value := _number(row.get(name))) is not None
        ]
        series.append((COLOURS.get(variant, "other"), points))
    return charts.lines(title, "step", series)


def _number(value: Any) -> float | None:
    """A finite number of a row; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _numbers(rows: Rows, name: str) -> list[float]:
    """The finite numbers of a name that rows have."""
    return [value for row in rows if (value := _number(row.get(name))) is not None]


def total(trainings: Sequence[Training], of: Callable[[Training], float | None]) -> float | None:
    """The sum of a figure over trainings; None where one lacks it, or there are none."""
    values = [of(training) for training in trainings]
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None


def duration(seconds: float | None) -> str:
    """Seconds in words, such as ``3 h 12 min``."""
    if seconds is None:
        return "not recorded"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
