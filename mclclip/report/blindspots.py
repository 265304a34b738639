"""Pairs of images that one encoder confuses and another tells apart, with their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mclclip import files
from mclclip.report.material import Material
from mclclip.report.thumbnails import Picture, Samples, Thumbnails
from mclclip.run.artifacts import Manifest

PAIRS = 8
"""Pairs shown of two encoders, those of the largest difference."""


@dataclass(frozen=True)
class Pair:
    """Two pictures, with their cosines for the encoder that confuses them and for the other."""

    pictures: Sequence[Picture]
    cosine: float
    other_cosine: float


@dataclass(frozen=True)
class BlindSpots:
    """Options and counts of one artifact of ``mclclip blindspots``, and the first of its pairs."""

    options: dict[str, Any]
    counts: dict[str, Any]
    pairs: Sequence[Pair]


def blindspots(material: Material, samples: Samples, thumbnails: Thumbnails) -> list[BlindSpots]:
    """The blind spots of all encoders that were compared; none where there are none.

    Raises RuntimeError where they are of another index, or damaged.
    """
    found = []
    for directory in material.finished(material.layout.blindspots("")):
        manifest = material.index.manifest_of(directory, "blindspots")
        pairs = _pairs(directory, manifest, samples, thumbnails)
        found.append(BlindSpots(manifest.config, manifest.counts, pairs))
    return found


def _pairs(
    directory: Path, manifest: Manifest, samples: Samples, thumbnails: Thumbnails
) -> list[Pair]:
    manifest.check(directory, path := "pairs.jsonl")
    again = "run 'mclclip blindspots --force' to make it again"
    with files.own(directory / path, again), open(directory / path, "rb") as lines:
        rows = [files.parse_json(line, str(directory / path)) for line in islice(lines, PAIRS)]
        return [
            Pair(
                [thumbnails.of_sample(samples, int(sample_id)) for sample_id in row["sample_ids"]],
                float(row["cosine"]),
                float(row["other_cosine"]),
            )
            for row in rows
        ]
