"""Shows by what each stage clustered: pictures and words of some clusters, sizes, agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from mclclip import files
from mclclip.data.labels import ami
from mclclip.opened_run import Run, numbers_in, spread
from mclclip.report import charts
from mclclip.report.caption_words import dominant_words
from mclclip.report.thumbnails import Thumbnails

Integers = NDArray[np.int64]

LABEL_ROWS = 200_000
"""Rows at most of which the clusters are read: pieces spread evenly over the index."""

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
class Clustered:
    """The clusters of a stage.

    counts, options  of their manifest
    galleries        of some clusters: ``cluster``, its ``share`` of the rows that were read, its
                     ``words``, and some ``pictures``
    sizes            a chart of the samples by cluster
    """

    stage: int
    counts: Mapping[str, Any]
    options: Mapping[str, Any]
    galleries: Sequence[Mapping[str, Any]]
    sizes: Markup

    def words(self) -> list[str]:
        """The first word of every gallery, each once."""
        return list(dict.fromkeys(one["words"][0].text for one in self.galleries if one["words"]))


def _labels(run: Run, ids: Integers) -> dict[int, Integers]:
    """The nearest clusters of samples by stage, of the stages that are clustered; -1: none."""
    return {
        stage.number: stage.clusters_of(ids)[:, 0].astype(np.int64)
        for stage in run.stages
        if stage.has("clusters")
    }


def clustered(run: Run, thumbnails: Thumbnails) -> list[Clustered]:
    """The clusters of every stage that is clustered. Raises RuntimeError where they are damaged."""
    stages, ids = [], run.spread_ids(LABEL_ROWS)
    for stage, labels in _labels(run, ids).items():
        manifest = run.stage(stage).manifest("clusters")
        # Of more clusters than are recorded, the sizes are of the rows that were read.
        sizes = manifest.counts.get("cluster_sizes")
        if sizes is None:
            sizes = np.unique(labels[labels >= 0], return_counts=True)[1]
        title = f"stage {stage}: samples by cluster"
        chart = charts.sizes(title, "clusters, largest first", sizes, "stage")
        random = np.random.default_rng([run.seed, stage, 11])
        galleries = _galleries(ids, labels, thumbnails, random)
        stages.append(Clustered(stage, manifest.counts, manifest.config, galleries, chart))
    return stages


def _galleries(
    ids: Integers, labels: Integers, thumbnails: Thumbnails, random: np.random.Generator
) -> list[dict[str, Any]]:
    chosen = some_clusters(labels, CLUSTERS)
    members = {c: random.permutation(ids[labels == c])[:CAPTIONS].tolist() for c in chosen}
    others = ids[(labels >= 0) & ~np.isin(labels, chosen)]
    # Clusters that are not shown stand beside them, so that a word of all of these is none of one.
    groups = members | {-1: random.permutation(others)[:OTHERS].tolist()}
    captions = {c: [thumbnails.caption(i) for i in own] for c, own in groups.items()}
    words = dominant_words(captions, WORDS)
    total = max(int((labels >= 0).sum()), 1)
    return [
        {
            "cluster": cluster,
            "share": float((labels == cluster).sum()) / total,
            "words": words[cluster],
            "pictures": [thumbnails.of_sample(i) for i in members[cluster][:PICTURES]],
        }
        for cluster in chosen
    ]


def some_clusters(labels: Integers, count: int) -> list[int]:
    """At most ``count`` clusters of ``labels``, from the largest to the smallest that has some
    members, evenly over the order of their sizes."""
    names, sizes = np.unique(labels[labels >= 0], return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    order = order[sizes[order] >= _FEWEST]
    if len(order) > count:
        order = order[np.linspace(0, len(order) - 1, count).round().astype(np.int64)]
    chosen: list[int] = names[order].tolist()
    return chosen


# --- agreement -----------------------------------------------------------------------------------


def agreement(run: Run) -> list[dict[str, Any]]:
    """Adjusted mutual information of stages' clusters (``rows``) with others (``columns``): a
    ``table``, with None where it was not computed, and a ``note`` of what it was computed.

    It is the figure of ``mclclip analyse`` where there is one; else what ``mclclip cluster``
    recorded of stages, and of attributes by some of the rows that are read. Empty where there is
    nothing to compare.
    """
    path = run.directory / "analysis" / "agreement.json"
    if path.is_file():
        with files.own(path, "run 'mclclip analyse --figures agreement' to make it again"):
            drawn = files.read_json(path)
            table = [[float(value) for value in row] for row in drawn["ami"]]
            rows, columns = ([str(name) for name in drawn[key]] for key in ("rows", "columns"))
            if len(table) != len(rows) or any(len(row) != len(columns) for row in table):
                raise ValueError("its table has another shape than its names")
        note = "From 'mclclip analyse', of all samples."
        return [{"rows": rows, "columns": columns, "table": table, "note": note}]
    ids = run.spread_ids(LABEL_ROWS)
    labels, rows_read = _labels(run, ids), numbers_in(spread(len(ids), AMI_ROWS))
    attributes = sorted({name for shard in run.index.shards for name in shard.attributes})
    if len(labels) + len(attributes) < 2 or not labels:
        return []
    codes = [run.index.attribute(name)[0][ids[rows_read]] for name in attributes]
    computed: list[list[float | None]] = [
        [_recorded(run, stage, other) for other in labels]
        + [_ami(labels[stage][rows_read], own) for own in codes]
        for stage in labels
    ]
    note = "Of stages: of all samples, as 'mclclip cluster' recorded it."
    if attributes:
        note += f" Of attributes: computed of {len(rows_read):,} samples."
    names = [f"stage_{stage}" for stage in labels]
    columns = [*names, *attributes]
    return [{"rows": names, "columns": columns, "table": computed, "note": note}]


def _recorded(run: Run, stage: int, other: int) -> float | None:
    """The agreement of two stages, which the later one's manifest has; None where it was not
    computed, because there are too many clusters."""
    if stage == other:
        return 1.0
    counts = run.stage(max(stage, other)).manifest("clusters").counts
    recorded = counts.get("ami", {}).get(f"stage_{min(stage, other)}")
    return None if recorded is None else float(recorded)


def _ami(own: Integers, other: NDArray[np.integer]) -> float | None:
    """The agreement; None where it is not cheap, or no sample has both labels."""
    fewer = min(int(labels.max(initial=0)) + 1 for labels in (own, other))
    if fewer * len(own) > _MOST_TERMS or not ((own >= 0) & (other >= 0)).any():
        return None
    return ami(own, other)
