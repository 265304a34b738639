"""Verb ``analyse``: what a run left on disk -> figures, as data and as pictures, in ``analysis/``.

A figure is a module of ``figures/`` that has a ``FIGURE``, and is called as the module is. It
becomes a JSON file and a PNG of that name. Figures are made of embeddings, clusters, pseudo labels
and results.jsonl; no encoder runs. A stage that lacks what a figure needs is named in the log and
left out of it.
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

    ``figures`` are names with commas between them; None: all that the run has what they need for.
    A figure that is there is drawn anew: what it is made of may have changed. Raises
    FileNotFoundError where the run has no index yet, and ValueError for an unknown name and where
    the run lacks what a named figure needs.
    """
    return collectives.on_main(partial(_draw_figures, config, figures))


def _draw_figures(config: Config, wanted: str | None) -> Path:
    known = drawn.figures()
    names = [*known] if wanted is None else [name.strip() for name in wanted.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no figure {unknown[0]!r}: take {', '.join(known)}")
    drawing.library("analyse")
    inputs = Inputs(config)
    directory = inputs.run.directory / "analysis"
    directory.mkdir(exist_ok=True)
    for name in names:
        figure = known[name]
        needs = figure.needs
        try:
            data = figure.draw(inputs, directory / f"{name}.png")
        except MissingInput as error:
            data, needs = None, str(error)
        if data is not None:
            files.write_json(directory / f"{name}.json", data)
            log.info("wrote %s", directory / f"{name}.png")
        elif wanted is not None:
            raise ValueError(f"{config.run_dir} has nothing for {name}: {name} needs {needs}")
        else:
            log.info("analyse: the run has nothing for %s, which needs %s", name, needs)
    return directory
