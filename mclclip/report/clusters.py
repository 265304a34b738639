"""The section on clusters of each stage: pictures and words of some clusters, sizes, and agreement.

The words of a cluster are those that its captions have more often than others do: those whose log
odds, of a caption to have the word, are higher by several standard errors. A prior of all captions
draws rare words towards no difference (Monroe, Colaresi and Quinn, "Fightin' Words", 2008, Eqs. 15
to 22).
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
"""Clusters are read of at most so many samples, in pieces spread evenly over the index."""

CLUSTERS = 6
"""So many clusters of a stage are shown."""

PICTURES = 8
"""So many pictures of a cluster are shown."""

CAPTIONS = 150
"""So many captions of each shown cluster are read."""

AMI_ROWS = 20_000
"""Agreement with attributes is computed on so many samples."""

OTHERS = 600
"""So many captions of samples of other clusters are read."""

WORDS = 6
"""So many words of a cluster are shown."""

_FEWEST = 4  # a cluster with fewer samples is not shown
_MOST_TERMS = 50_000_000  # AMI takes time by samples times labels; with more it is not computed


_WORD = re.compile(r"[^\W\d_](?:[\w'-]*\w)?|\d+")
# English function words. Numbers and places ("two", "left", "behind"), which usual lists of stop
# words hold, are not among them: they may be what an encoder was blind to.
STOP_WORDS = frozenset(
    "a an and are as at be been being but by can could did do does for from had has have he her "
    "his how i if in into is it its may me my of on or our she should so some such than that the "
    "their them then there these they this those to was we were what when where which while who "
    "will with would you your".split()
)
_LONGEST = 40  # a longer string of characters is not a word
_ERRORS = 3.0  # a word's log odds inside and outside differ by so many standard errors
_PRIOR = 10.0  # captions that the prior counts as


def _labels(run: Run, ids: Integers) -> dict[int, Integers]:
    """The nearest cluster of each sample (-1: none), by stage, for stages that are clustered."""
    stages = [stage for stage in run.stages if stage.has("clusters")]
    return {stage.number: stage.clusters_of(ids)[:, 0].astype(np.int64) for stage in stages}


def clustered(run: Run, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """Describes the clusters of every ``stage`` that is clustered.

    counts, options  those in the manifest
    galleries        for some clusters: the ``cluster``, its ``share`` of the samples that were
                     read, its ``words`` (``dominant_words``), and some ``pictures``
    sizes            a chart of the numbers of samples of the clusters

    Raises RuntimeError if they are damaged.
    """
    stages, ids = [], run.spread_ids(LABEL_ROWS)
    for stage, labels in _labels(run, ids).items():
        manifest = run.stage(stage).manifest("clusters")
        # If the manifest has no sizes, since there are many clusters, they are of the read samples.
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
    shown = some_clusters(labels, CLUSTERS)
    members = {c: random.permutation(ids[labels == c])[:CAPTIONS].tolist() for c in shown}
    others = ids[(labels >= 0) & ~np.isin(labels, shown)]
    # Words are compared with clusters that are not shown too: a word that all shown ones share can
    # distinguish them from the others.
    groups = members | {-1: random.permutation(others)[:OTHERS].tolist()}
    captions = {c: [thumbnails.caption(i) for i in rows] for c, rows in groups.items()}
    words = dominant_words(captions, WORDS)
    total = max(int((labels >= 0).sum()), 1)
    return [
        {
            "cluster": cluster,
            "share": float((labels == cluster).sum()) / total,
            "words": words[cluster],
            "pictures": [thumbnails.of_sample(i) for i in members[cluster][:PICTURES]],
        }
        for cluster in shown
    ]


def some_clusters(labels: Integers, count: int) -> list[int]:
    """Selects at most ``count`` clusters from ``labels``, evenly over the order of their sizes,
    from the largest to the smallest with ``_FEWEST`` samples."""
    names, sizes = np.unique(labels[labels >= 0], return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    order = order[sizes[order] >= _FEWEST]
    if len(order) > count:
        order = order[np.linspace(0, len(order) - 1, count).round().astype(np.int64)]
    clusters: list[int] = names[order].tolist()
    return clusters


# --- words ---------------------------------------------------------------------------------------


def words_of(caption: str) -> set[str]:
    """The words of a caption in lower case, without stop words and without very long ones."""
    words = _WORD.findall(caption.lower())
    return {word for word in words if word not in STOP_WORDS and len(word) <= _LONGEST}


def dominant_words(
    groups: Mapping[int, Sequence[str]], count: int
) -> dict[int, list[tuple[str, float, float]]]:
    """Finds for each group of captions at most ``count`` words that distinguish it from the others.

    Returns (word, share of captions with it in the group, share outside), those first whose log
    odds differ by most standard errors, at least three; then in alphabetical order. Groups drawn at
    random have hardly any such words. Empty captions do not count.
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
        size, others, weighed = sizes[name], total - sizes[name], []
        for word, inside in counts.items():
            outside, prior = every[word] - inside, (every[word] + 0.5) / (total + 1)
            # Captions with and without the word: two in the group, two outside of it.
            a, b, c, d = (
                inside + _PRIOR * prior, size - inside + _PRIOR * (1 - prior),
                outside + _PRIOR * prior, others - outside + _PRIOR * (1 - prior),
            )  # fmt: skip
            errors = math.log(a * d / (b * c)) / math.sqrt(1 / a + 1 / b + 1 / c + 1 / d)
            if errors > _ERRORS:
                weighed.append((-errors, word, inside / size, outside / max(others, 1)))
        best = sorted(weighed)[:count]
        dominant[name] = [(word, inside, outside) for _, word, inside, outside in best]
    return dominant


# --- agreement -----------------------------------------------------------------------------------


def agreement(run: Run) -> list[dict[str, Any]]:
    """A ``table`` of the adjusted mutual information of stages' clusters (``rows``) with those of
    all stages and with attributes (``columns``), and a ``note`` that says how it was computed.

    For stages it is what ``mclclip cluster`` recorded; for attributes it is computed here, on some
    samples. An entry is None if it was not computed. Returns an empty list if there is nothing to
    compare.
    """
    ids = run.spread_ids(LABEL_ROWS)
    labels, rows_read = _labels(run, ids), spread(len(ids), AMI_ROWS)
    attributes = run.index.attributes
    if len(labels) + len(attributes) < 2 or not labels:
        return []
    codes = [run.index.attribute(name)[0][ids[rows_read]] for name in attributes]
    computed: list[list[float | None]] = [
        [_recorded(run, stage, other) for other in labels]
        + [_ami(labels[stage][rows_read], values) for values in codes]
        for stage in labels
    ]
    note = "Of stages: of all samples, as 'mclclip cluster' recorded it."
    if attributes:
        note += f" Of attributes: computed of {len(rows_read):,} samples."
    names = [f"stage_{stage}" for stage in labels]
    columns = [*names, *attributes]
    return [{"rows": names, "columns": columns, "table": computed, "note": note}]


def _recorded(run: Run, stage: int, other: int) -> float | None:
    """The agreement of two stages, from the manifest of the later one; None if there were too many
    clusters to compute it."""
    if stage == other:
        return 1.0
    counts = run.stage(max(stage, other)).manifest("clusters").counts
    recorded = counts.get("ami", {}).get(f"stage_{min(stage, other)}")
    return None if recorded is None else float(recorded)


def _ami(clusters: Integers, values: NDArray[np.integer]) -> float | None:
    """The agreement; None if it takes too long, or no sample has both a cluster and a value."""
    fewer = min(int(labels.max(initial=0)) + 1 for labels in (clusters, values))
    return None if fewer * len(clusters) > _MOST_TERMS else ami(clusters, values)
