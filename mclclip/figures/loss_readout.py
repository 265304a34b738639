"""Figure: does a lower loss come with a lower error of a readout? Correlations over encoders.

Source: IFM (Robinson et al., 2021), Fig. 2: Pearson correlations between the InfoNCE loss and the
errors of linear readouts of several features, over encoders trained with different settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from numpy.typing import ArrayLike, NDArray

from mclclip.eval.outcomes import PERCENT
from mclclip.figures import drawing
from mclclip.figures.inputs import Figure, Inputs, without_nan
from mclclip.files import parse_json

_LAST = 0.1  # share of the recorded steps, from the end, over which a loss is averaged


def draw(inputs: Inputs, path: Path) -> dict[str, Any] | None:
    """The loss of every encoder that the run has trained against its errors in results.jsonl, and
    their correlations.

    A loss is the mean over the last tenth of the recorded steps. Losses are of one kind only where
    the stages have one objective; joined encoders have none. Correlations want three encoders.
    """
    losses = _losses(inputs)
    errors: dict[str, dict[str, float]] = {}
    for row in inputs.run.result_rows:
        if row.unit == PERCENT and row.model in losses:
            errors.setdefault(f"{row.benchmark}, {row.metric}", {})[row.model] = 100.0 - row.value
    # A correlation is over the encoders that all of its columns know.
    models = [name for name in losses if errors and all(name in e for e in errors.values())]
    if len(models) < 2:
        return None
    columns = {name: [values[m] for m in models] for name, values in errors.items()}
    own = [losses[model] for model in models]
    names, matrix = correlations(own, columns)
    # Two points always lie on a line.
    enough = len(models) > 2
    panels = {}
    for (name, values), correlation in zip(columns.items(), matrix[0, 1:], strict=True):
        title = f"{name}: correlation {correlation:.2f}" if enough else name
        panels[title] = list(zip(models, own, values, strict=True))
    with drawing.canvas(path, 4.2 * len(panels) + 0.4, 3.6) as figure:
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (name, named) in zip(grid, panels.items(), strict=True):
            for label, across, up in named:
                axes.scatter([across], [up], label=label)
            axes.set_title(name, fontsize="small")
            axes.set_xlabel("loss")
            axes.set_ylabel("error in percent")
            axes.margins(0.15)
            axes.locator_params(axis="x", nbins=4)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize="small")
        figure.suptitle("loss against readout error")
    return {
        "models": models,
        "loss": own,
        "error_percent": columns,
        "columns": names,
        "correlations": without_nan(matrix) if enough else None,
    }


def correlations(
    losses: ArrayLike, errors: Mapping[str, ArrayLike]
) -> tuple[list[str], NDArray[np.float64]]:
    """Pearson correlations [n, n] of the ``losses`` [M] of M encoders and of their readout
    ``errors``, [M] by name, and the names of the columns, of which the first is ``loss``.

    nan stands where a column does not vary.
    """
    table = pandas.DataFrame({"loss": losses, **errors}, dtype=np.float64)
    return [*table.columns], table.corr().to_numpy()


def _losses(inputs: Inputs) -> dict[str, float]:
    """The last losses of all finished trainings of the run, by the names of their encoders."""
    losses = {}
    controls = inputs.run.controls
    runs = [inputs.run, *(controls[n] for n in inputs.config.controls if n in controls)]
    for run in runs:
        for stage in map(run.stage, range(inputs.config.num_stages + 1)):
            # Stage 0 is shared: of a control it is the run's own.
            if stage.has("train") and (stage.number or run is inputs.run):
                path, recorded = stage.directory("train") / "metrics.jsonl", []
                lines = path.read_bytes().splitlines() if path.exists() else []
                for number, line in enumerate(lines, start=1):
                    try:
                        recorded.append(float(parse_json(line, "it")["loss"]))
                    except (ValueError, LookupError, TypeError, RecursionError) as error:
                        raise ValueError(
                            f"{path} line {number} is not a row with a loss ({error}): remove "
                            "that line"
                        ) from error
                if last := recorded[-max(1, round(_LAST * len(recorded))) :]:
                    losses[stage.name] = float(np.mean(last))
    return losses


FIGURE = Figure(
    draw, "at least two trained stages or controls in results.jsonl: train them, run 'mclclip eval'"
)
