"""By what each stage clustered: pictures and words of some clusters, their sizes, their agreement.

The words of a cluster are those that tell its captions from others. A word's weight is
p log(p / q), its part of the Kullback-Leibler divergence between the shares of captions that hold
it: p in the group, q outside. This is tf-idf's idea, with a group in the place of a document:
common everywhere counts nothing, and rare everywhere counts little.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mclclip.data.labels import ami
from mclclip.report import charts
from mclclip.report.pictures import Thumbnails
from mclclip.run.opened import Run, spread

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


_WORD = re.compile(r"[^\W\d_](?:[\w'-]*\w)?|\d+")
# Function words of English alone. Numbers and places ("two", "left", "behind"), which usual lists
# hold, are kept: they are what an encoder may have been blind to.
STOP_WORDS = frozenset(
    "a an and are as at be been being but by can could did do does for from had has have he her "
    "his how i if in into is it its may me my of on or our she should so some such than that the "
    "their them then there these they this those to was we were what when where which while who "
    "will with would you your".split()
)
_LONGEST = 40  # characters of a word; longer ones are none
_FEWEST_CAPTIONS = 3  # of a group that hold a word
_ERRORS = 3.0  # standard errors by which the shares inside and outside differ: hundreds are tried
_UNSEEN = 0.5  # captions that stand for none outside, so that the ratio is finite


def _labels(run: Run, ids: Integers) -> dict[int, Integers]:
    """The nearest clusters of samples by stage, of the stages that are clustered; -1: none."""
    return {
        stage.number: stage.clusters_of(ids)[:, 0].astype(np.int64)
        for stage in run.stages
        if stage.has("clusters")
    }


def clustered(run: Run, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """The clusters of every ``stage`` that is clustered.

    counts, options  of their manifest
    galleries        of some clusters: ``cluster``, its ``share`` of the rows that were read, its
                     ``words`` (``dominant_words``), and some ``pictures``
    sizes            a chart of the samples by cluster

    Raises RuntimeError where they are damaged.
    """
    stages, ids = [], run.spread_ids(LABEL_ROWS)
    for stage, labels in _labels(run, ids).items():
        manifest = run.stage(stage).manifest("clusters")
        # Of more clusters than are recorded, the sizes are of the rows that were read.
        sizes = manifest.counts.get("cluster_sizes")
        if sizes is None:
            sizes = np.unique(labels[labels >= 0], return_counts=True)[1]
        title = f"stage {stage}: samples by cluster"
        random = np.random.default_rng([run.seed, stage, 11])
        stages.append(
            {
                "stage": stage,
                "counts": manifest.counts,
                "options": manifest.config["cluster"],
                "galleries": _galleries(ids, labels, thumbnails, random),
                "sizes": charts.sizes(title, "clusters, largest first", sizes, "stage"),
            }
        )
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


# --- words ---------------------------------------------------------------------------------------


def words_of(caption: str) -> set[str]:
    """The words of a caption in lower case, without stop words and what is too long for a word."""
    words = _WORD.findall(caption.lower())
    return {word for word in words if word not in STOP_WORDS and len(word) <= _LONGEST}


def dominant_words(
    groups: Mapping[int, Sequence[str]], count: int
) -> dict[int, list[tuple[str, float, float]]]:
    """For each group of captions at most ``count`` words that tell it from the others, best first,
    each with the share of the captions that hold it inside the group, and outside.

    A word is held by at least three captions of its group, and more often there than outside by
    three standard errors, so that groups drawn at random have hardly any. Empty captions do not
    count. Of equal weights the word that comes first in the alphabet goes first.
    """
    held = {
        name: Counter(word for text in captions for word in words_of(text))
        for name, captions in groups.items()
    }
    sizes = {name: sum(1 for text in captions if text) for name, captions in groups.items()}
    every: Counter[str] = sum(held.values(), Counter())
    total = sum(sizes.values())
    dominant = {}
    for name, counts in held.items():
        size, others = sizes[name], max(total - sizes[name], 1)
        weighed = []
        for word, number in counts.items():
            inside, outside = number / size, (every[word] - number) / others
            # By the normal approximation of two shares.
            share = (inside * size + outside * others) / (size + others)
            error = math.sqrt(share * (1 - share) * (1 / size + 1 / others))
            if number >= _FEWEST_CAPTIONS and inside - outside > _ERRORS * error:
                weight = inside * math.log(inside / max(outside, _UNSEEN / others))
                weighed.append((-weight, word, inside, outside))
        best = sorted(weighed)[:count]
        dominant[name] = [(word, inside, outside) for _, word, inside, outside in best]
    return dominant


# --- agreement -----------------------------------------------------------------------------------


def agreement(run: Run) -> list[dict[str, Any]]:
    """Adjusted mutual information of stages' clusters (``rows``) with others (``columns``): a
    ``table``, with None where it was not computed, and a ``note`` of what it was computed.

    It is what ``mclclip cluster`` recorded of stages, and of attributes it is computed of some of
    the rows that are read. Empty where there is nothing to compare.
    """
    ids = run.spread_ids(LABEL_ROWS)
    labels, rows_read = _labels(run, ids), spread(len(ids), AMI_ROWS)
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
