"""MMVP-VLM: minimal pairs of images and statements, in their published layout.

Source: Tong et al., Eyes Wide Shut (CVPR 2024), and its public evaluation script. There are two
differences to the script. The category comes from the column Type, not from the row number. A tie
counts against the model, while the script lets a tied statement pick image 2 (if both statements
tie, the pair is wrong in both).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import Field

from mclclip.eval.features import Extractor
from mclclip.eval.images import SUFFIXES, read_rows
from mclclip.eval.items import PAIR, Item
from mclclip.eval.metrics import BoolArray
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.protocols import Evaluator
from mclclip.eval.protocols.compositional import Side, chance_of, item_margins
from mclclip.eval.results import Level, Measurement, figure
from mclclip.ranks.collectives import raise_on_every_rank
from mclclip.util.files import below

MMVP_COLUMNS = ("Question ID", "Type", "Statement")
MMVP_FOLDERS = ("MLLM_VLM Images", "MLLM_VLM_Images")
Direction = Literal["statement_to_image", "image_to_text", "group"]
SIDES: dict[Direction, Side] = {
    "statement_to_image": "image",
    "image_to_text": "text",
    "group": "group",
}
"""Which decisions of a pair count in each direction: statements pick images, images pick
statements, or both."""
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
PROMPT = "a photo of "

NEAR_TIE = 5e-4
"""If the cosines of a decision differ by less, half precision may change it."""


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    prompt: str = PROMPT,
    directions: Annotated[Sequence[Direction], Field(min_length=1)] = DIRECTIONS[:1],
    near_tie: float = NEAR_TIE,
) -> list[Measurement]:
    """MMVP-VLM's figures in percent: one per Type, ``average`` over Types, ``pooled`` over pairs.

    A pair is right if both its decisions are (chance 25). ``directions`` are some of
    statement_to_image, the official one, whose metrics have no prefix; image_to_text, in which each
    image picks its statement; and group, both together. Decisions whose cosines differ by less than
    ``near_tie`` are counted in the protocol. ``prompt`` is put before every statement.
    """
    pairs = raise_on_every_rank(lambda: read_pairs(root))
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
            of_type_outcomes = Outcomes([names[row] for row in rows], right[rows])
            figures.append(figure(prefix + kind, of_type_outcomes, protocol, level=of_type))
        by_type = Outcomes(names, right, strata=types.tolist())
        figures.append(figure(f"{prefix}average", by_type, protocol, level=level))
        pooled = Outcomes(names, right)
        figures.append(figure(f"{prefix}pooled", pooled, protocol, level=of_type))
    return figures


# --- the folder --------------------------------------------------------------------------------


def read_pairs(root: Path) -> list[Item]:
    """Reads the pairs of a folder in MMVP-VLM's layout, in the order of the file.

    An item has two images and two statements; statement i is true of image i. Its ``kind`` is the
    Type, and its ``name`` the ids, such as '1-2'.

    ``Questions.csv`` has the columns Question ID, Type and Statement. Two consecutive rows form a
    pair of one Type: first an odd id, then an even one. Images lie at ``MLLM_VLM Images/<Type>/
    <Question ID>.jpg`` (or in ``MLLM_VLM_Images``, or with another suffix). Raises ValueError and
    FileNotFoundError for another layout, and for a Type that leads out of ``root``.
    """
    root = Path(root)
    questions = _read_questions(root / "Questions.csv")
    folder = next((f for name in MMVP_FOLDERS if (f := root / name).is_dir()), None)
    if folder is None:
        raise FileNotFoundError(f"no folder {MMVP_FOLDERS[0]!r} (or with _) in {root}")
    files = {kind: _images_of_type(folder, kind) for kind in sorted({q[2] for q in questions})}
    items = []
    for (line, a, kind, first), (_, b, other_kind, second) in zip(
        questions[::2], questions[1::2], strict=True
    ):
        if kind != other_kind or a % 2 != 1 or b % 2 != 0:
            raise ValueError(
                f"{line} and the next row form a pair, but their Types are {kind!r} and "
                f"{other_kind!r}, and their Question IDs {a} and {b}: expected one Type, an odd ID "
                f"(image 1) and then an even one (image 2), such as {a | 1} and {(a | 1) + 1}"
            )
        if lacking := [number for number in (a, b) if str(number) not in files[kind]]:
            raise FileNotFoundError(
                f"no image {folder / kind / str(lacking[0])}.jpg (nor of another suffix) for "
                f"question {lacking[0]}"
            )
        images, name = (files[kind][str(a)], files[kind][str(b)]), f"{a}-{b}"
        items.append(Item(name, images, (first, second), PAIR, part="", kind=kind, unit=name))
    return items


def _read_questions(path: Path) -> list[tuple[str, int, str, str]]:
    """Reads an even number of questions: of each the line, such as 'Questions.csv line 2', its id,
    Type and Statement."""
    questions, rows = [], read_rows(path, MMVP_COLUMNS, "questions of MMVP-VLM")
    if unfilled := [line for line, cells in rows if cells[0].strip() and not cells[2].strip()]:
        raise ValueError(
            f"{len(unfilled)} of {len(rows)} rows have no Statement, the first is "
            f"{unfilled[0]}: write for each image what is true of it and not of the other image of "
            "its pair, and remove the pairs that have no such difference"
        )
    for line, cells in rows:
        number, kind, statement = (cell.strip() for cell in cells)
        if not number.isdecimal() or not kind or not statement:
            raise ValueError(
                f"{line}: got Question ID {number!r}, Type {kind!r}, Statement "
                f"{statement!r}; expected a whole number and two texts"
            )
        questions.append((line, int(number), kind, statement))
    twice = [n for n, times in Counter(number for _, number, *_ in questions).items() if times > 1]
    if not questions or len(questions) % 2 or twice:
        again = f", and the Question ID {twice[0]} more than once" if twice else ""
        raise ValueError(
            f"{path} has {len(questions)} questions{again}: expected an even number above zero, "
            "each with an ID of its own, since two consecutive rows form a pair"
        )
    return questions


def _images_of_type(folder: Path, kind: str) -> dict[str, Path]:
    """Maps Question IDs, without leading zeros, to images of a Type. If an ID has several files,
    the suffix that comes first in ``SUFFIXES`` wins."""
    folders = [below(folder, name, "Questions.csv") for name in (kind, kind.replace(" ", "_"))]
    type_folder = next((path for path in folders if path.is_dir()), None)
    if type_folder is None:
        raise FileNotFoundError(f"no folder {folder / kind} for the Type {kind!r}")
    files = [path for path in type_folder.iterdir() if path.suffix.lower() in SUFFIXES]
    files.sort(key=lambda path: SUFFIXES.index(path.suffix.lower()), reverse=True)
    padded = {path.stem.lstrip("0"): path for path in files}
    return padded | {path.stem: path for path in files}


EVALUATOR = Evaluator(
    evaluate,
    needs="Questions.csv and MLLM_VLM Images/<Type>/<Question ID>.jpg of MMVP-VLM",
    reads_text=True,
    check=lambda root, **_: read_pairs(root),
)
