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
from mclclip.eval.metrics import BoolArray, FloatArray, pair_margins
from mclclip.eval.results import Figure, class_mean, proportion
from mclclip.ranks.collectives import together

READS_TEXT = True  # whether images are compared with texts

DIRECTIONS = ("statement_to_image", "image_to_text", "group")
PROMPT = "a photo of "

NEAR_TIE = 5e-4
"""Difference of cosines below which half precision may change a decision."""


def score_pairs(
    extractor: Extractor, pairs: Sequence[Pair], prompt: str = PROMPT
) -> dict[str, FloatArray]:
    """Margins of all pairs by direction (``pair_margins``); ``prompt`` is put before statements."""
    images = extractor.images([image for pair in pairs for image in pair.images])
    texts = extractor.texts([prompt + text for pair in pairs for text in pair.statements])
    # Summed in float64 and rounded to float32: equal features tie exactly, in any order of sums.
    left, right = (rows.reshape(len(pairs), 2, -1).astype(np.float64) for rows in (texts, images))
    return pair_margins(np.einsum("pse,pie->psi", left, right).astype(np.float32))


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
    types = list(dict.fromkeys(pair.type for pair in pairs))
    labels = np.array([types.index(pair.type) for pair in pairs], dtype=np.int64)
    figures = []
    for direction in directions:
        margins = margins_by_direction[direction]
        protocol: dict[str, Any] = {
            "name": "mmvp_vlm",
            "prompt": prompt,
            "precision": extractor.precision,
            "direction": direction,
            "ties": "against the model",
            "tied_decisions": int(np.count_nonzero(margins == 0)),
            "near_ties": int(np.count_nonzero(np.abs(margins) < near_tie)),
            "near_tie_cosine": near_tie,
            "right_decisions": int(np.count_nonzero(margins > 0)),
            "decisions": int(margins.size),
        }
        prefix = "" if direction == DIRECTIONS[0] else f"{direction}/"
        right: BoolArray = np.asarray((margins > 0).all(axis=1))
        for label, name in enumerate(types):
            own = right[labels == label]
            figures.append(proportion(prefix + name, int(own.sum()), len(own), protocol))
        figures.append(class_mean(f"{prefix}average", right, labels, protocol))
        figures.append(proportion(f"{prefix}pooled", int(right.sum()), len(right), protocol))
    return figures
