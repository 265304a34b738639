"""Sections of single samples: nearest neighbours, blind spots, and what filters keep."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from mclclip import files
from mclclip.figures.nearest import nearest_samples
from mclclip.opened_run import Run
from mclclip.report.thumbnails import Thumbnails
from mclclip.run.artifacts import MANIFEST

FEATURE_ROWS = 20_000
"""Rows at most of which the embeddings are read."""

ANCHORS, NEIGHBOURS = 5, 6

PAIRS = 8
"""Pairs shown of two encoders, those of the largest difference."""


def anchors(run: Run, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """Samples drawn by the seed, each with its ``picture``; and by stage its nearest samples among
    the rows that are read, nearest first.

    Empty where there are no embeddings, or too few. Raises RuntimeError where they are damaged.
    """
    ids = run.spread_ids(FEATURE_ROWS)
    features = {
        stage.name: stage.embeddings_of(ids) for stage in run.stages if stage.has("embeddings")
    }
    if not features:
        return []
    usable = np.logical_and.reduce([(rows != 0).any(axis=1) for rows in features.values()])
    ids = ids[usable]
    if len(ids) <= NEIGHBOURS:
        return []
    drawn = np.random.default_rng([run.seed, 5]).permutation(len(ids))[:ANCHORS]
    near = {
        name: nearest_samples(rows[usable], drawn, NEIGHBOURS)[1] for name, rows in features.items()
    }
    return [
        {
            "picture": thumbnails.of_sample(int(ids[anchor])),
            "stages": {
                name: [thumbnails.of_sample(int(ids[row])) for row in rows[number]]
                for name, rows in near.items()
            },
        }
        for number, anchor in enumerate(drawn)
    ]


def blindspots(run: Run, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """Options and counts of each artifact of ``mclclip blindspots``, and the first of its pairs:
    two pictures, their cosine for the encoder that confuses them, and that for the other.

    Raises RuntimeError where one is of another index, or damaged.
    """
    sections = []
    for directory in run.finished("blindspots").values():
        manifest = run.index.manifest_of(directory, "blindspots")
        manifest.check(directory, "pairs.jsonl")
        path, again = directory / "pairs.jsonl", "run 'mclclip blindspots --force' to make it again"
        with files.own(path, again), open(path, "rb") as lines:
            rows = [files.parse_json(line, str(path)) for line in islice(lines, PAIRS)]
            pairs = [
                (
                    [thumbnails.of_sample(int(sample_id)) for sample_id in row["sample_ids"]],
                    float(row["cosine"]),
                    float(row["other_cosine"]),
                )
                for row in rows
            ]
        sections.append({"options": manifest.config, "counts": manifest.counts, "pairs": pairs})
    return sections


def filters(run: Run) -> list[dict[str, Any]]:
    """The filters of a run: ``name``, options as ``flags``, and numbers of ``samples``: of all, and
    by reason, the first of which is ``kept``.

    Raises RuntimeError where one is of another index, or its manifest is damaged.
    """
    rows = []
    for name, directory in run.finished("filters").items():
        manifest = run.index.manifest_of(directory, "filter")
        with files.own(directory / MANIFEST, "run 'mclclip filter --force' to make it again"):
            flags = []
            for option, value in manifest.config.items():
                if value is not None and value != []:
                    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
                    flags.append(f"--{option.replace('_', '-')} {text}")
            reasons = {str(reason): int(n) for reason, n in manifest.counts["reasons"].items()}
            samples = int(manifest.counts["samples"])
            rows.append(
                {"name": name, "flags": " ".join(flags), "samples": samples, "reasons": reasons}
            )
    return rows
