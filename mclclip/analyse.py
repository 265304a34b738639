"""Verb: what a run left on disk -> figures, as data and as pictures, below ``analysis/``.

Every figure is a JSON file and a PNG of the same name. Read are embeddings, clusters, pseudo labels
and results.jsonl; no encoder runs. A stage whose embeddings are not there is named in the log and
left out of the figures that need them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mclclip import files
from mclclip.analysis import (
    class_overlap,
    hypersphere,
    label_counts,
    neighbours,
    pictures,
    spectrum,
)
from mclclip.clustering.agreement import ami
from mclclip.config import Config
from mclclip.data.arrays import open_npy
from mclclip.data.decode import decode
from mclclip.data.labels import read_pseudo_labels
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import BadSample, TarDataset
from mclclip.eval import results
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.layout import Layout

log = logging.getLogger("mclclip")

MAX_SAMPLES = 5_000  # of the figures that compare all pairs
ANCHORS, NEIGHBOURS = 8, 8


@dataclass(frozen=True)
class Material:
    """A run and a seeded sample of its rows, of which the figures are made.

    ``variants`` are ``mcl`` and the run's controls; ``attributes`` are those of the index.
    """

    config: Config
    index: SampleIndex
    attributes: tuple[str, ...]
    seed: int

    @property
    def layout(self) -> Layout:
        """Paths of MCL's own stages."""
        return Layout.of(self.config)

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """Sorted ids of at most ``MAX_SAMPLES`` decodable samples, drawn by the seed."""
        good = np.setdiff1d(np.arange(len(self.index)), self.index.bad_ids())
        drawn = np.random.default_rng([self.seed, 4]).permutation(good)[:MAX_SAMPLES]
        return np.sort(drawn)

    @cached_property
    def features(self) -> dict[str, NDArray[np.float32]]:
        """Features [n, D] of ``ids`` by stage, of the stages that have embeddings."""
        found = {}
        for stage in range(self.config.num_stages + 1):
            directory = self.layout.embeddings(stage)
            if (directory / "manifest.json").exists():
                found[f"stage_{stage}"] = self._rows(directory)
            else:
                log.info(
                    "stage_%d has no embeddings and is left out of figures of features: run "
                    "'mclclip embed --stage %d' to have it in them", stage, stage,
                )  # fmt: skip
        return found

    def _rows(self, directory: Path) -> NDArray[np.float32]:
        parts = []
        for number, shard in enumerate(self.index.shards):
            here = self.ids[(shard.start <= self.ids) & (self.ids < shard.stop)] - shard.start
            if len(here):
                rows = open_npy(directory / f"{number:05d}.npy", "embed")[here]
                parts.append(np.asarray(rows, np.float32))
        return np.concatenate(parts)

    @cached_property
    def clusters(self) -> dict[str, NDArray[np.int32]]:
        """Clusters [N, L] by stage, nearest first, of the stages that are clustered."""
        stages = range(self.config.num_stages)
        paths = {f"stage_{s}": self.layout.clusters(s) / "cluster_labels.npy" for s in stages}
        return {name: open_npy(path, "cluster") for name, path in paths.items() if path.exists()}

    def codes(self, attribute: str) -> NDArray[np.int32]:
        """Codes [N] of an attribute's values; -1 for none."""
        return self.index.attribute(attribute)[0]


Figure = Callable[[Material, Path], dict[str, Any] | None]
"""Draws one figure at a path and returns its data; None where the run has nothing for it."""


def run(config: Config, context: Context, *, force: bool = False) -> Path:
    """Writes the figures of a run; returns ``run_dir/analysis``.

    A figure that is there is drawn anew: what it is made of may have changed. Raises
    FileNotFoundError where the run has no index yet. ``force`` changes nothing.
    """
    return collectives.on_main(partial(_run, config))


def _run(config: Config) -> Path:
    pictures.library()
    layout = Layout.of(config)
    index = SampleIndex.open(layout.index)
    names = sorted({name for source in config.data.sources.values() for name in source.attributes})
    material = Material(config, index, tuple(names), config.seed)
    directory = layout.run_dir / "analysis"
    directory.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        data = figure(material, directory / f"{name}.png")
        if data is None:
            log.info("analyse: the run has nothing for %s", name)
            continue
        files.write_json(directory / f"{name}.json", data)
        log.info("wrote %s", directory / f"{name}.png")
    return directory


# --- the figures -----------------------------------------------------------------------------


def accuracy(material: Material, path: Path) -> dict[str, Any] | None:
    """Every figure of results.jsonl, by benchmark, metric and model (MCL, Table 1)."""
    rows = results.read(material.layout.results)
    if not rows:
        return None
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        groups.setdefault(f"{row.benchmark}\n{row.metric}", {})[row.model] = row.value
    pictures.bars(path, "accuracy by encoder", groups)
    return {"percent": groups}


def agreement(material: Material, path: Path) -> dict[str, Any] | None:
    """AMI of the stages' clusters with each other (MCL, Table 11) and with the attributes."""
    stages = {name: np.asarray(labels[:, 0]) for name, labels in material.clusters.items()}
    if not stages:
        return None
    others = stages | {name: material.codes(name) for name in material.attributes}
    values = [[ami(own, other) for other in others.values()] for own in stages.values()]
    pictures.matrix(path, "adjusted mutual information", [*stages], [*others], values)
    return {"rows": [*stages], "columns": [*others], "ami": values}


def pseudo_labels(material: Material, path: Path) -> dict[str, Any] | None:
    """Samples by pseudo label, most first, of every stage (MCL, Fig. 7)."""
    data = {}
    for stage in range(1, material.config.num_stages + 1):
        directory = material.layout.pseudo_labels(stage)
        if (directory / "manifest.json").exists():
            found = label_counts.label_counts(read_pseudo_labels(directory, material.index)[0])
            data[f"stage_{stage}"] = {
                "counts": found.counts.tolist(),
                "share": found.share,
                "effective": found.effective,
            }
    if not data:
        return None
    sizes = {name: entry["counts"] for name, entry in data.items()}
    pictures.lines(path, "pseudo labels", sizes, "label, most frequent first", "samples", log=True)
    return data


def singular_values(material: Material, path: Path) -> dict[str, Any] | None:
    """Singular values of the features' covariance, effective rank and uniformity by stage (SimLAP,
    Fig. 3)."""
    data = {}
    for name, rows in material.features.items():
        values = spectrum.singular_values(rows)
        data[name] = {
            "singular_values": values.tolist(),
            "effective_rank": spectrum.effective_rank(values),
            "uniformity": hypersphere.uniformity(rows),
        }
    if not data:
        return None
    series = {
        f"{name}: effective rank {entry['effective_rank']:.1f}": entry["singular_values"]
        for name, entry in data.items()
    }
    pictures.lines(path, "singular values", series, "number", "value", log=True)
    return data


def nearest(material: Material, path: Path) -> dict[str, Any] | None:
    """The nearest samples of the same anchors in every stage's space (MCL, Fig. 3)."""
    if not material.features or len(material.ids) <= NEIGHBOURS:
        return None
    anchors = np.random.default_rng([material.seed, 5]).permutation(len(material.ids))[:ANCHORS]
    found, shown, labels = {}, [], []
    for name, rows in material.features.items():
        cosines, near = neighbours.nearest_samples(rows, anchors, NEIGHBOURS)
        keys = [material.index.keys(material.ids[row]) for row in near]
        found[name] = [
            {"anchor": key, "nearest": others, "cosines": values.tolist()}
            for key, others, values in zip(
                material.index.keys(material.ids[anchors]), keys, cosines, strict=True
            )
        ]
    for number, anchor in enumerate(anchors):
        for name in found:
            near_keys = found[name][number]["nearest"]
            ids = [int(material.ids[anchor]), *material.index.ids_of(near_keys).tolist()]
            shown.append(_images(material, ids))
            labels.append(name)
    pictures.sheet(path, "an anchor, and its nearest samples", shown, labels)
    return found


def overlap(material: Material, path: Path) -> dict[str, Any] | None:
    """Cosines within and between the values of each attribute, by stage (SimLAP, Fig. 4)."""
    data: dict[str, Any] = {}
    panels: dict[str, pictures.Series] = {}
    edges: Sequence[float] = ()
    for attribute in material.attributes:
        codes = material.codes(attribute)[material.ids]
        known = codes >= 0
        for name, rows in material.features.items():
            found = class_overlap.class_overlap(rows[known], codes[known])
            title = f"{name}, {attribute}: overlap {found.overlap:.2f}"
            edges = found.edges.tolist()
            panels[title] = {"within": found.intra.tolist(), "between": found.inter.tolist()}
            data.setdefault(attribute, {})[name] = {"overlap": found.overlap, **panels[title]}
    if not data:
        return None
    pictures.histograms(path, "cosines within and between values", edges, panels)
    return {"edges": edges, "attributes": data}


def recall(material: Material, path: Path) -> dict[str, Any] | None:
    """Share of the samples whose attribute is that of one of their l nearest clusters (MLCD, A.8);
    a cluster's value is that of most of its samples."""
    data: dict[str, list[float]] = {}
    for attribute in material.attributes:
        codes = material.codes(attribute)
        known = np.flatnonzero(codes >= 0)
        for name, clusters in material.clusters.items():
            near = np.asarray(clusters[known])
            data[f"{name}, {attribute}"] = label_counts.label_recall(near, codes[known]).tolist()
    if not data:
        return None
    pictures.lines(path, "label recall", data, "nearest clusters", "share")
    return data


def _images(material: Material, ids: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Pictures [H, W, 3]; of other numbers of channels the first three, or the first in grey."""
    limit = material.config.data.max_image_pixels
    dataset = TarDataset(
        material.index, transform=None, reads_captions=False, max_image_pixels=limit,
        max_open_files=material.config.data.max_open_files,
    )  # fmt: skip
    found = []
    for raw in dataset.read_many(ids):
        if isinstance(raw, BadSample):
            raise RuntimeError(
                f"sample {material.index.keys([raw.sample_id])[0]} cannot be read ({raw.reason}): "
                "its shard has changed since it was indexed, put it back"
            )
        pixels = np.asarray(decode(raw.image, limit, reads_arrays=True))
        found.append(pixels[..., :3] if pixels.shape[2] >= 3 else pixels[..., [0, 0, 0]])
    return found


FIGURES: Mapping[str, Figure] = {
    figure.__name__: figure
    for figure in (
        accuracy,
        agreement,
        pseudo_labels,
        singular_values,
        nearest,
        overlap,
        recall,
    )
}
"""Every figure by its name, which its files have too."""
