"""The nearest samples of the same anchors in every stage's space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mclclip.figures.nearest import nearest_samples
from mclclip.report.material import Material
from mclclip.report.thumbnails import Picture, Samples, Thumbnails

ANCHORS, NEIGHBOURS = 5, 6


@dataclass(frozen=True)
class Anchor:
    """A sample, and by stage its nearest samples, nearest first, each with its cosine."""

    picture: Picture
    stages: Sequence[tuple[str, Sequence[tuple[Picture, float]]]]


def anchors(material: Material, samples: Samples, thumbnails: Thumbnails) -> list[Anchor]:
    """Anchors drawn by the seed, with their neighbours among the rows that were read; none where
    there are no embeddings, or too few. Raises RuntimeError where these are damaged."""
    features = material.features
    if not features:
        return []
    usable = np.logical_and.reduce([(rows != 0).any(axis=1) for rows in features.values()])
    ids = material.feature_ids[usable]
    if len(ids) <= NEIGHBOURS:
        return []
    drawn = np.random.default_rng([material.seed, 5]).permutation(len(ids))[:ANCHORS]
    near = {
        f"stage_{stage}": nearest_samples(rows[usable], drawn, NEIGHBOURS)
        for stage, rows in features.items()
    }
    return [
        Anchor(
            thumbnails.of_sample(samples, int(ids[anchor])),
            [
                (
                    stage,
                    [
                        (thumbnails.of_sample(samples, int(ids[row])), float(cosine))
                        for cosine, row in zip(cosines[place], rows[place], strict=True)
                    ],
                )
                for stage, (cosines, rows) in near.items()
            ],
        )
        for place, anchor in enumerate(drawn)
    ]
