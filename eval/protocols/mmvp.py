"""MMVP-VLM: minimal pairs of images and statements, from a folder in its published layout.

Source: Tong et al., Eyes Wide Shut (CVPR 2024), and its public evaluation script. Departures from
the script: the category comes from the Type column, not from the row number; a tie counts against
the model (the script lets a tied statement pick image 2; a pair is wrong either way if both
statements tie).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mclclip.eval.features import Extractor
from mclclip.eval.metrics import BoolArray
from mclclip.eval.minimal_pairs import read_pairs
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.protocols import Evaluator
from mclclip.eval.protocols.compositional import Side, chance_of, item_margins
from mclclip.eval.results import Figure, Level, figure
from mclclip.ranks.collectives import together

SIDES: dict[str, Side] = {"statement_to_image": "image", "image_to_text": "text", "group": "group"}
"""Direction -> the decisions of a pair that count: statements pick images, images pick statements,
or both."""
DIRECTIONS = tuple(SIDES)
PROMPT = "a photo of "

NEAR_TIE = 5e-4
"""Difference of cosines below which half precision may change a decision."""


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
    by_side = item_margins(extractor, pairs, [SIDES[name] for name in directions], prompt)
    names, types = [pair.name for pair in pairs], np.array([pair.kind for pair in pairs])
    figures = []
    for direction in directions:
        margins = np.stack(by_side[SIDES[direction]])
        protocol = {
            "name": "mmvp_vlm",
            "trials": "pairs",
            "prompt": prompt,
            "precision": extractor.precision,
            "direction": direction,
            "chance": round(100 * chance_of(SIDES[direction], pairs[0].truth), 2),
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
        for kind in dict.fromkeys(types.tolist()):
            rows = np.flatnonzero(types == kind)
            own = Outcomes([names[row] for row in rows], right[rows])
            figures.append(figure(prefix + kind, own, protocol, level=of_type))
        by_type = Outcomes(names, right, strata=types.tolist())
        figures.append(figure(f"{prefix}average", by_type, protocol, level=level))
        pooled = Outcomes(names, right)
        figures.append(figure(f"{prefix}pooled", pooled, protocol, level=of_type))
    return figures


EVALUATOR = Evaluator(
    evaluate,
    needs="Questions.csv and MLLM_VLM Images/<Type>/<Question ID>.jpg of MMVP-VLM",
    reads_text=True,
)
