"""Curves of the trainings, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from mclclip.report import charts
from mclclip.report.charts import Line
from mclclip.report.material import Material
from mclclip.run.artifacts import Manifest
from mclclip.run.layout import Layout

COLOURS = {"mcl": "stage", "ungrouped": "control"}
"""Colours of the variants, variables of the page's style; of others ``other``."""


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


@dataclass(frozen=True)
class Curves:
    """The loss and the learning rate of a stage's trainings over steps."""

    stage: int
    loss: Markup
    lr: Markup


def trainings(material: Material) -> list[Training]:
    """Every training that has records, stage 0 first, then MCL's stages, then the controls'."""
    found = []
    for variant in material.variants:
        stages = [stage for stage in material.stages if stage or variant == "mcl"]
        for stage in stages:
            rows = material.recorded(variant, stage)
            if rows:
                directory = Layout(material.run_dir, variant).train(stage)
                manifest = material.manifest(directory, "train")
                epochs = material.epochs(variant, stage)
                found.append(_training(variant, stage, manifest, rows, epochs))
    return found


def _training(
    variant: str,
    stage: int,
    manifest: Manifest | None,
    rows: Sequence[Mapping[str, Any]],
    epochs: Sequence[Mapping[str, Any]] | None,
) -> Training:
    last = rows[-1]
    seconds = [_number(row.get("seconds")) for row in epochs or ()]
    known = [value for value in seconds if value is not None]
    speeds = (_number(last.get(name)) for name in ("samples_per_s", "samples_per_s_per_rank"))
    every, each = speeds
    losses = [value for row in rows if (value := _number(row.get("loss"))) is not None]
    peaks = [value for row in rows if (value := _number(row.get("memory_gib"))) is not None]
    return Training(
        variant,
        stage,
        manifest is not None,
        int(last["step"]),
        int(_number(last.get("samples_seen")) or 0),
        sum(known) if known else None,
        round(every / each) if every and each else None,
        max(peaks, default=None),
        losses[0] if losses else None,
        losses[-1] if losses else None,
        {} if manifest is None else manifest.config,
    )


def curves(material: Material) -> list[Curves]:
    """A pair of charts per stage that was trained, with a line per variant."""
    found = []
    for stage in material.stages:
        rows = {
            variant: material.recorded(variant, stage)
            for variant in (material.variants if stage else ["mcl"])
        }
        if any(rows.values()):
            loss = _chart(f"stage {stage}: loss", "loss", rows)
            found.append(Curves(stage, loss, _chart(f"stage {stage}: learning rate", "lr", rows)))
    return found


def _chart(title: str, name: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Markup:
    # MCL's line is drawn last, above the others.
    series = [
        Line(variant, _points(own, name), COLOURS.get(variant, "other"))
        for variant, own in reversed([*rows.items()])
    ]
    return charts.lines(title, "step", series)


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    pairs = [(float(row["step"]), _number(row.get(name))) for row in rows]
    return [(step, value) for step, value in pairs if value is not None]


def _number(value: Any) -> float | None:
    """A finite number of a row; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def total(found: Sequence[Training], of: Callable[[Training], float | None]) -> float | None:
    """The sum of a figure over trainings; None where one lacks it, or there are none."""
    values = [of(training) for training in found]
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
