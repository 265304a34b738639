"""Figures of results.jsonl: accuracy by encoder, and loss against readout errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.analyse.material import Figure, Material
from mclclip.analysis import loss_readout, pictures
from mclclip.eval import results
from mclclip.eval.results import Result
from mclclip.eval.units import PERCENT
from mclclip.run import artifacts
from mclclip.run.layout import Layout

_LAST = 0.1  # share of the recorded steps, from the end, over which a loss is averaged


def accuracy(material: Material, path: Path) -> dict[str, Any] | None:
    """Every figure of results.jsonl in percent, by benchmark, metric and model (MCL, Table 1)."""
    rows = _in_percent(material)
    if not rows:
        return None
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        groups.setdefault(f"{row.benchmark}\n{row.metric}", {})[row.model] = row.value
    pictures.bars(path, "accuracy by encoder", groups)
    return {"percent": groups}


def _in_percent(material: Material) -> list[Result]:
    """The rows of results.jsonl, without losses, which are no accuracies."""
    return [row for row in results.read(material.layout.results) if row.unit == PERCENT]


def loss_against_readouts(material: Material, path: Path) -> dict[str, Any] | None:
    """The loss of every encoder that the run has trained against its errors in results.jsonl, and
    their correlations (IFM, Fig. 2).

    A loss is the mean over the last tenth of the recorded steps. Losses are of one kind only where
    the stages have one objective; joined encoders have none. Correlations want three encoders.
    """
    losses = _losses(material)
    errors: dict[str, dict[str, float]] = {}
    for row in _in_percent(material):
        if row.model in losses:
            errors.setdefault(f"{row.benchmark}, {row.metric}", {})[row.model] = 100.0 - row.value
    # A correlation is over the encoders that all of its columns know.
    models = [name for name in losses if errors and all(name in e for e in errors.values())]
    if len(models) < 2:
        return None
    columns = {name: [values[m] for m in models] for name, values in errors.items()}
    own = [losses[model] for model in models]
    found = loss_readout.loss_against_readouts(own, columns)
    # Two points always lie on a line.
    enough = len(models) > 2
    panels = {
        name + (f": correlation {found.between('loss', name):.2f}" if enough else ""): list(
            zip(models, own, values, strict=True)
        )
        for name, values in columns.items()
    }
    pictures.points(path, "loss against readout error", panels, "loss", "error in percent")
    return {
        "models": models,
        "loss": own,
        "error_percent": columns,
        "columns": list(found.names),
        "correlations": pictures.without_nan(found.matrix) if enough else None,
    }


def _losses(material: Material) -> dict[str, float]:
    """The last losses of all finished trainings of the run, by the names of their encoders."""
    found = {}
    for variant in ("mcl", *material.config.controls):
        layout = Layout.of(material.config, variant)
        for stage, name in material.stages.items():
            directory = layout.train(stage)
            if artifacts.is_finished(directory) and (stage or variant == "mcl"):
                recorded = _recorded(directory / "metrics.jsonl")
                last = recorded[-max(1, round(_LAST * len(recorded))) :]
                if last:
                    found[layout.model_name(name)] = float(np.mean(last))
    return found


def _recorded(path: Path) -> list[float]:
    """The losses of a metrics.jsonl in order; ValueError names the line that is not a row."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    losses = []
    for number, line in enumerate(lines, start=1):
        try:
            losses.append(float(json.loads(line)["loss"]))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path} line {number} is not a row with a loss ({error}): remove that line"
            ) from error
    return losses


FIGURES = {
    "accuracy": Figure(accuracy, "rows in results.jsonl: run 'mclclip eval'"),
    "loss_readout": Figure(
        loss_against_readouts,
        "at least two trained stages or controls in results.jsonl: train them, run 'mclclip eval'",
    ),
}
