"""Verb: what a run left on disk -> figures, as data and as pictures, below ``analysis/``.

Every figure is a JSON file and a PNG of the same name. Figures are made of embeddings, clusters,
pseudo labels, results.jsonl, metrics.jsonl, and the last checkpoint of a training that has learned
gates. A stage that lacks what a figure needs is named in the log and left out of it. Figures for
which an encoder runs are drawn only where they are named.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from mclclip import files
from mclclip.analyse import (
    features,
    gates,
    heat_maps,
    labels,
    robustness,
    scores,
    subspaces,
)
from mclclip.analyse.material import Figure, Lacking, Material
from mclclip.analysis import pictures
from mclclip.config import Config
from mclclip.data.sample_index import SampleIndex
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.layout import Layout

log = logging.getLogger("mclclip")

FIGURES: Mapping[str, Figure] = {
    **scores.FIGURES,
    **labels.FIGURES,
    **features.FIGURES,
    **gates.FIGURES,
    **heat_maps.FIGURES,
    **robustness.FIGURES,
    **subspaces.FIGURES,
}
"""Every figure by its name, which its files have too."""


def run(
    config: Config, context: Context, *, figures: str | None = None, force: bool = False
) -> Path:
    """Writes the figures of a run; returns ``run_dir/analysis``.

    ``figures`` are names with commas between them; None: all for which no encoder runs, as far as
    the run has what they need. A figure that is there is drawn anew: what it is made of may have
    changed. Raises FileNotFoundError where the run has no index yet, and ValueError for an unknown
    name and where the run lacks what a named figure needs. ``force`` changes nothing.
    """
    names = None if figures is None else [name.strip() for name in figures.split(",")]
    if unknown := [name for name in names or () if name not in FIGURES]:
        raise ValueError(f"there is no figure {unknown[0]!r}: take {', '.join(FIGURES)}")
    return collectives.on_main(partial(_run, config, context, names))


def material_of(config: Config, context: Context) -> Material:
    """The material of a run's figures. Raises FileNotFoundError where there is no index yet."""
    index = SampleIndex.open(Layout.of(config).index)
    attributes = {name for source in config.data.sources.values() for name in source.attributes}
    return Material(config, index, tuple(sorted(attributes)), config.seed, context.device)


def _run(config: Config, context: Context, names: Sequence[str] | None) -> Path:
    pictures.library()
    material = material_of(config, context)
    directory = material.layout.run_dir / "analysis"
    directory.mkdir(exist_ok=True)
    drawn = names or [name for name, figure in FIGURES.items() if not figure.encoder]
    for name in drawn:
        figure = FIGURES[name]
        needs = figure.needs
        try:
            data = figure.draw(material, directory / f"{name}.png")
        except Lacking as lacking:
            data, needs = None, str(lacking)
        if data is not None:
            files.write_json(directory / f"{name}.json", data)
            log.info("wrote %s", directory / f"{name}.png")
        elif names:
            raise ValueError(f"{config.run_dir} has nothing for {name}: {name} needs {needs}")
        else:
            log.info("analyse: the run has nothing for %s, which needs %s", name, needs)
    return directory
