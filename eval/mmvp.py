"""MMVP-VLM: minimal pairs of images and statements, from a folder in its published layout.

Source: Tong et al., Eyes Wide Shut (CVPR 2024), and its public evaluation script. Departures from
the script: the category comes from the Type column, not from the row number; a tie counts against
the model (the script lets a tied statement pick image 2; a pair is wrong either way if both
statements tie).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.eval.datasets import Pair, read_pairs
from mclclip.eval.features import Extractor
from mclclip.eval.metrics import BoolArray, FloatArray, item_similarities, pair_margins
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.results import Figure, Level, figure
from mclclip.ranks.collectives import together

READS_TEXT = True  # whether images are compared with texts

DIRECTIONS = ("statement_to_image", "image_to_text", "group")
PROMPT = "a photo of "

_CHANCE = dict(zip(DIRECTIONS, (25.0, 25.0, 16.67), strict=True))
"""Percent of pairs whose decisions are all right where similarities have a random order: two
independent ones of two each, or one of the six pairs of places that the two truths may take."""

NEAR_TIE = 5e-4
"""Difference of cosines below which half precision may change a decision."""


def score_pairs(
    extractor: Extractor, pairs: Sequence[Pair], prompt: str = PROMPT
) -> dict[str, FloatArray]:
    """Margins of all pairs by direction (``pair_margins``); ``prompt`` is put before statements."""
    images = extractor.images([image for pair in pairs for image in pair.images])
    texts = extractor.texts([prompt + text for pair in pairs for text in pair.statements])
    left, right = (rows.reshape(len(pairs), 2, -1) for rows in (texts, images))
    return pair_margins(item_similarities(left, right))


def needs(**_: Any) -> str:
    """Names the files that a folder must hold, for messages."""
    return "Questions.csv and MLLM_VLM Images/<Type>/<Question ID>.jpg of MMVP-VLM"


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    prompt: str = PROMPT,
    directions: Sequence[str] = DIRECTIONS[:1],
    near_tie: float = NEAR_TIE,
) -> list[Figure]:
    """MMVP-VLM's figures: per Type, ``average`` over Types, ``pooled`` over pairs; in percent.

    A pair is right where both its decisions are (chance 25). ``directions``: statement_to_image is
    the official one, of which the metrics carry plain names; image_to_text (each image picks its
    statement) and group (both) are prefixed. ``near_tie``: cosine difference below which a decision
    is counted in the protocol's ``near_ties``.
    """
    if unknown := [name for name in directions if name not in DIRECTIONS]:
        raise ValueError(f"unknown directions {unknown}: use some of {', '.join(DIRECTIONS)}")
    pairs = together(lambda: read_pairs(root))
    margins_by_direction = score_pairs(extractor, pairs, prompt)
    names = ["-".join(map(str, pair.question_ids)) for pair in pairs]
    types = [pair.type for pair in pairs]
    figures = []
    for direction in directions:
        margins = margins_by_direction[direction]
        protocol: dict[str, Any] = {
            "name": "mmvp_vlm",
            "trials": "pairs",
            "prompt": prompt,
            "precision": extractor.precision,
            "direction": direction,
            "chance": _CHANCE[direction],
            "ties": "against the model",
            "tied_decisions": int(np.count_nonzero(margins == 0)),
            "near_ties": int(np.count_nonzero(np.abs(margins) < near_tie)),
            "near_tie_cosine": near_tie,
            "right_decisions": int(np.count_nonzero(margins > 0)),
            "decisions": int(margins.size),
        }
        official = direction == DIRECTIONS[0]
        prefix = "" if official else f"{direction}/"
        of_type: Level = "table" if official else "detail"
        level: Level = "headline" if official else "table"
        right: BoolArray = np.asarray((margins > 0).all(axis=1))
        for kind in dict.fromkeys(types):
            rows = [row for row, own in enumerate(types) if own == kind]
            found = Outcomes([names[row] for row in rows], right[rows])
            figures.append(figure(prefix + kind, found, protocol, level=of_type))
        by_type = Outcomes(names, right, strata=types)
        figures.append(figure(f"{prefix}average", by_type, protocol, level=level))
        pooled = Outcomes(names, right)
        figures.append(figure(f"{prefix}pooled", pooled, protocol, level=of_type))
    return figures
