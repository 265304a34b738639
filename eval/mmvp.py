"""MMVP-VLM: minimal pairs of images and statements, from a folder in its published layout.

Source: Tong et al., Eyes Wide Shut (CVPR 2024), and its public evaluation script. Departures from
the script: the category comes from the Type column, not from the row number; a tie counts against
the model (the script lets a tied statement pick image 2; a pair is wrong either way if both
statements tie).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.eval.features import Extractor
from mclclip.eval.metrics import PairOutcomes, mean_per_class, pair_outcomes, stratified_interval
from mclclip.eval.results import Figure, proportion
from mclclip.ranks.collectives import together

COLUMNS = ("Question ID", "Type", "Statement")
IMAGE_FOLDERS = ("MLLM_VLM Images", "MLLM_VLM_Images")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
DIRECTIONS = ("statement_to_image", "image_to_text", "group")
PROMPT = "a photo of "

NEAR_TIE = 5e-4
"""Difference of cosines below which half precision may turn a decision round."""


@dataclass(frozen=True)
class Pair:
    """Two images and two statements; statement i is true of image i. The odd id comes first."""

    type: str
    question_ids: tuple[int, int]
    statements: tuple[str, str]
    images: tuple[Path, Path]


@dataclass(frozen=True)
class Question:
    """One row of Questions.csv."""

    line: int
    question_id: int
    type: str
    statement: str


def read_pairs(root: Path) -> list[Pair]:
    """The pairs of a folder in MMVP-VLM's layout, in file order.

    ``Questions.csv`` has the columns Question ID, Type, Statement; two consecutive rows are a pair,
    an odd id and then an even one, of one Type. Images lie at ``MLLM_VLM Images/<Type>/<Question
    ID>.jpg`` (or ``MLLM_VLM_Images``; jpeg, png and webp too). FileNotFoundError or ValueError, one
    line, where the folder is not so.
    """
    root = Path(root)
    questions = _read_questions(root / "Questions.csv")
    images = _ImageFinder(root)
    return [
        _pair(first, second, images)
        for first, second in zip(questions[::2], questions[1::2], strict=True)
    ]


def _read_questions(path: Path) -> list[Question]:
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: the folder of MMVP-VLM holds Questions.csv and images")
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        header = [name.strip() for name in reader.fieldnames or []]
        if missing := [name for name in COLUMNS if name not in header]:
            raise ValueError(f"{path} has the columns {header}, missing {missing}")
        reader.fieldnames = header
        questions = [_question(path, reader.line_num, row) for row in reader]
    if not questions or len(questions) % 2:
        raise ValueError(
            f"{path} has {len(questions)} questions, expected an even number above zero: "
            f"two consecutive rows form a pair"
        )
    ids = [question.question_id for question in questions]
    if len(set(ids)) != len(ids):
        repeated = next(number for number in ids if ids.count(number) > 1)
        raise ValueError(f"{path} has the Question ID {repeated} more than once")
    return questions


def _question(path: Path, line: int, row: dict[str, Any]) -> Question:
    number, kind, statement = ((row[name] or "").strip() for name in COLUMNS)
    if not number.isdecimal() or not kind or not statement:
        raise ValueError(
            f"{path} line {line}: got Question ID {number!r}, Type {kind!r}, Statement "
            f"{statement!r}; expected a whole number and two texts"
        )
    return Question(line, int(number), kind, statement)


def _pair(first: Question, second: Question, images: _ImageFinder) -> Pair:
    where = f"Questions.csv lines {first.line} and {second.line}"
    if first.type != second.type:
        raise ValueError(
            f"{where} form a pair, but their Types are {first.type!r} and {second.type!r}"
        )
    if first.question_id % 2 != 1 or second.question_id % 2 != 0:
        raise ValueError(
            f"{where} form a pair, but their Question IDs are {first.question_id} and "
            f"{second.question_id}: expected an odd one (image 1) and then an even one (image 2)"
        )
    return Pair(
        type=first.type,
        question_ids=(first.question_id, second.question_id),
        statements=(first.statement, second.statement),
        images=(
            images.find(first.type, first.question_id),
            images.find(second.type, second.question_id),
        ),
    )


class _ImageFinder:
    """Question -> image file; lists each folder once."""

    def __init__(self, root: Path) -> None:
        folders = [root / name for name in IMAGE_FOLDERS if (root / name).is_dir()]
        if not folders:
            raise FileNotFoundError(f"no folder {IMAGE_FOLDERS[0]!r} (or with _) in {root}")
        self.folder = folders[0]
        self._files: dict[str, dict[str, Path]] = {}

    def find(self, kind: str, question_id: int) -> Path:
        if kind not in self._files:
            self._files[kind] = self._list(kind)
        try:
            return self._files[kind][str(question_id)]
        except KeyError:
            wanted = self.folder / kind / f"{question_id}.jpg"
            raise FileNotFoundError(
                f"no image {wanted} (nor .jpeg, .png, .webp) for question {question_id}"
            ) from None

    def _list(self, kind: str) -> dict[str, Path]:
        names = (kind, kind.replace(" ", "_"))
        folder = next((self.folder / name for name in names if (self.folder / name).is_dir()), None)
        if folder is None:
            raise FileNotFoundError(f"no folder {self.folder / kind} for the Type {kind!r}")
        files = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES]
        # Where one id has several files the published suffix wins: it is set last.
        files.sort(key=lambda path: SUFFIXES.index(path.suffix.lower()), reverse=True)
        return {path.stem: path for path in files}


def score_pairs(extractor: Extractor, pairs: Sequence[Pair], prompt: str = PROMPT) -> PairOutcomes:
    """Outcomes of all pairs under an encoder; ``prompt`` is put before every statement."""
    images = extractor.images([image for pair in pairs for image in pair.images])
    texts = extractor.texts([prompt + text for pair in pairs for text in pair.statements])
    by_pair = (len(pairs), 2, -1)
    # Summed in float64 and rounded to float32: equal features tie exactly, in any order of sums.
    similarity = np.einsum(
        "pse,pie->psi",
        texts.reshape(by_pair).astype(np.float64),
        images.reshape(by_pair).astype(np.float64),
    ).astype(np.float32)
    return pair_outcomes(similarity)


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
    outcomes = score_pairs(extractor, pairs, prompt)
    settings = {"name": "mmvp_vlm", "prompt": prompt, "precision": extractor.precision}
    figures = []
    for direction in directions:
        margins = outcomes.margins(direction)
        protocol = settings | {
            "direction": direction,
            "ties": "against the model",
            "tied_decisions": int(np.count_nonzero(margins == 0)),
            "near_ties": int(np.count_nonzero(np.abs(margins) < near_tie)),
            "near_tie_cosine": near_tie,
            "right_decisions": int(np.count_nonzero(margins > 0)),
            "decisions": int(margins.size),
        }
        prefix = "" if direction == DIRECTIONS[0] else f"{direction}/"
        figures += _figures(pairs, outcomes.right(direction), prefix, protocol)
    return figures


def _figures(
    pairs: Sequence[Pair], right: np.ndarray, prefix: str, protocol: dict[str, Any]
) -> list[Figure]:
    types = list(dict.fromkeys(pair.type for pair in pairs))
    labels = np.array([types.index(pair.type) for pair in pairs], dtype=np.int64)
    average, shares, counts = mean_per_class(right, labels)
    figures = [
        proportion(prefix + name, int(right[labels == label].sum()), int(counts[label]), protocol)
        for label, name in enumerate(types)
    ]
    low, high = stratified_interval(shares, counts)
    percent = (100 * average, len(pairs), 100 * low, 100 * high)
    figures.append(Figure(prefix + "average", *percent, dict(protocol)))
    figures.append(proportion(prefix + "pooled", int(right.sum()), len(pairs), protocol))
    return figures
