"""Verb ``analyse``: the artifacts of a run -> figures, as data and as pictures, in ``analysis/``.

A figure is a module of ``figures/`` with a function ``draw``, such as ``figures/tsne.py``, which
makes tsne.json and tsne.png. Figures read embeddings, clusters, pseudo labels and results.jsonl; no
encoder runs. If a stage lacks what a figure needs, the log says so and the figure omits the stage.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from mclclip import figures as drawn
from mclclip.config import Config
from mclclip.figures import drawing
from mclclip.figures.inputs import Inputs, MissingInput
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.util import files

log = logging.getLogger("mclclip")


def run(config: Config, context: Context, *, figures: str | None = None) -> Path:
    """Writes the figures of a run; returns ``run_dir/analysis``.

    ``figures``: names with commas between them, such as 'tsne,ami'; None: all for which the run has
    the data. Figures are always drawn anew, since their data may have changed. Raises
    FileNotFoundError if the run has no index yet, and ValueError for an unknown name, and if the
    run lacks the data of a named figure.
    """
    return collectives.on_main(partial(_draw_figures, config, figures))


def _draw_figures(config: Config, selected: str | None) -> Path:
    every = drawn.figures()
    names = [*every] if selected is None else [name.strip() for name in selected.split(",")]
    if unknown := [name for name in names if name not in every]:
        raise ValueError(f"there is no figure {unknown[0]!r}: take {', '.join(every)}")
    drawing.library("analyse")
    inputs = Inputs(config)
    directory = inputs.run.directory / "analysis"
    directory.mkdir(exist_ok=True)
    for name in names:
        try:
            data = every[name](inputs, directory / f"{name}.png")
        except MissingInput as error:
            if selected is not None:
                raise ValueError(
                    f"{config.run_dir} has nothing for {name}: {name} needs {error}"
                ) from None
            log.info("analyse: the run has nothing for %s, which needs %s", name, error)
        else:
            files.write_json(directory / f"{name}.json", data)
            log.info("wrote %s", directory / f"{name}.png")
    return directory
