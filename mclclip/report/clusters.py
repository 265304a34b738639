"""Shows by what each stage clustered: pictures and words of some clusters, sizes, agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from mclclip import files
from mclclip.data.labels import ami
from mclclip.report import charts
from mclclip.report.caption_words import Word, dominant_words
from mclclip.report.material import Material, numbers_in, spread
from mclclip.report.thumbnails import Picture, Samples, Thumbnails
from mclclip.run.artifacts import Manifest

CLUSTERS = 6
"""Clusters shown of a stage."""

PICTURES = 8
"""Pictures shown of a cluster."""

CAPTIONS = 150
"""Captions read of a cluster that is shown."""

AMI_ROWS = 20_000
"""Rows of which the agreement with attributes is computed."""

OTHERS = 600
"""Captions read of samples outside of the clusters that are shown."""

WORDS = 6
"""Words shown of a cluster."""

_FEWEST = 4  # samples of a cluster that is shown
_MOST_TERMS = 50_000_000  # samples times labels, to which the time of AMI is proportional


@dataclass(frozen=True)
class Gallery:
    """One cluster: its share of the rows that were read, its words, and some of its pictures."""

    cluster: int
    share: float
    words: Sequence[Word]
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Clustered:
    """The clusters of a stage: its manifest's counts and configuration, galleries, sizes."""

    stage: int
    counts: Mapping[str, Any]
    options: Mapping[str, Any]
    galleries: Sequence[Gallery]
    sizes: Markup

    def words(self) -> list[str]:
        """The first word of every gallery, each once."""
        return list(dict.fromkeys(found.words[0].text for found in self.galleries if found.words))


@dataclass(frozen=True)
class Agreement:
    """Adjusted mutual information of stages' clusters (rows) with others (columns); None: not
    computed. ``note`` says of what it was computed."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    note: str


def clustered(material: Material, samples: Samples, thumbnails: Thumbnails) -> list[Clustered]:
    """The clusters of every stage that is clustered. Raises RuntimeError where they are damaged."""
    found = []
    for stage, labels in material.clusters.items():
        manifest = material.index.manifest_of(material.layout.clusters(stage), "clusters")
        random = np.random.default_rng([material.seed, stage, 11])
        galleries = _galleries(material.label_ids, labels, samples, thumbnails, random)
        sizes = _sizes(f"stage {stage}: samples by cluster", manifest, labels)
        found.append(Clustered(stage, manifest.counts, manifest.config, galleries, sizes))
    return found


def _sizes(title: str, manifest: Manifest, labels: NDArray[np.int64]) -> Markup:
    """Sizes of all clusters, as recorded; of more clusters than are recorded, of the rows read."""
    recorded = manifest.counts.get("cluster_sizes")
    if recorded is None:
        recorded = np.unique(labels[labels >= 0], return_counts=True)[1]
    return charts.steps(title, "clusters, largest first", charts.largest_first(recorded), "stage")


def _galleries(
    ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    samples: Samples,
    thumbnails: Thumbnails,
    random: np.random.Generator,
) -> list[Gallery]:
    chosen = some_clusters(labels, CLUSTERS)
    members = {c: random.permutation(ids[labels == c])[:CAPTIONS].tolist() for c in chosen}
    others = ids[(labels >= 0) & ~np.isin(labels, chosen)]
    captions = {c: [samples.caption(i) for i in own] for c, own in members.items()}
    # Clusters that are not shown stand beside them, so that a word of all of these is none of one.
    background = {-1: [samples.caption(i) for i in random.permutation(others)[:OTHERS].tolist()]}
    words = dominant_words(captions | background, WORDS)
    total = max(int((labels >= 0).sum()), 1)
    return [
        Gallery(
            cluster,
            float((labels == cluster).sum()) / total,
            words[cluster],
            [thumbnails.of_sample(samples, i) for i in members[cluster][:PICTURES]],
        )
        for cluster in chosen
    ]


def some_clusters(labels: NDArray[np.int64], count: int) -> list[int]:
    """At most ``count`` clusters of ``labels``, from the largest to the smallest that has some
    members, evenly over the order of their sizes."""
    names, sizes = np.unique(labels[labels >= 0], return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    order = order[sizes[order] >= _FEWEST]
    if len(order) > count:
        order = order[np.linspace(0, len(order) - 1, count).round().astype(np.int64)]
    found: list[int] = names[order].tolist()
    return found


# --- agreement -----------------------------------------------------------------------------------


def agreement(material: Material) -> Agreement | None:
    """The agreement of clusters with each other and with attributes: the figure of ``mclclip
    analyse`` where there is one; else what ``mclclip cluster`` recorded of stages, and attributes
    by some of the rows that were read. None where there is nothing to compare."""
    path = material.run_dir / "analysis" / "agreement.json"
    if path.is_file():
        return _analysed(path)
    stages, attributes = [*material.clusters], _attributes(material)
    if len(stages) + len(attributes) < 2 or not stages:
        return None
    places = numbers_in(spread(len(material.label_ids), AMI_ROWS))
    codes = [material.index.attribute(name)[0][material.label_ids[places]] for name in attributes]
    values = [
        [_recorded(material, stage, other) for other in stages]
        + [_ami(material.clusters[stage][places], own) for own in codes]
        for stage in stages
    ]
    note = "Of stages: of all samples, as 'mclclip cluster' recorded it."
    if attributes:
        note += f" Of attributes: computed of {len(places):,} samples."
    names = [f"stage_{stage}" for stage in stages]
    return Agreement(names, [*names, *attributes], values, note)


def _analysed(path: Path) -> Agreement:
    with files.own(path, "run 'mclclip analyse --figures agreement' to make it again"):
        found = files.read_json(path)
        values = [[float(value) for value in row] for row in found["ami"]]
        rows, columns = ([str(name) for name in found[key]] for key in ("rows", "columns"))
        if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
            raise ValueError("its table has another shape than its names")
    return Agreement(rows, columns, values, "From 'mclclip analyse', of all samples.")


def _attributes(material: Material) -> list[str]:
    return sorted({name for shard in material.index.shards for name in shard.attributes})


def _recorded(material: Material, stage: int, other: int) -> float | None:
    """The agreement of two stages, which the later one's manifest has; None where it was not
    computed, because there are too many clusters."""
    if stage == other:
        return 1.0
    directory = material.layout.clusters(max(stage, other))
    manifest = material.index.manifest_of(directory, "clusters")
    found = manifest.counts.get("ami", {}).get(f"stage_{min(stage, other)}")
    return None if found is None else float(found)


def _ami(own: NDArray[np.int64], other: NDArray[np.integer]) -> float | None:
    """The agreement; None where it is not cheap, or no sample has both labels."""
    fewer = min(int(labels.max(initial=0)) + 1 for labels in (own, other))
    if fewer * len(own) > _MOST_TERMS or not ((own >= 0) & (other >= 0)).any():
        return None
    return ami(own, other)
