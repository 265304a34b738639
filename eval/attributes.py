"""Predicts every attribute of a data set in shards from frozen features, by a linear classifier or
by the nearest neighbours.

Source: MCL, section 5.3, and IFM, section 4: a classifier per attribute on the frozen encoder,
without its projector, shows which features an encoder has learned and which it suppresses. Both
papers name no optimizer; here it is L-BFGS with an L2 penalty, as in `linear_probe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field
from pydantic.types import NonNegativeInt, PositiveFloat, PositiveInt

from mclclip.data import attributes as fields
from mclclip.eval import knn, linear_probe
from mclclip.eval.features import Extractor, Features
from mclclip.eval.labelled_features import LabelledFeatures
from mclclip.eval.logistic import MAX_ITERATIONS, Solver
from mclclip.eval.metrics import IntArray
from mclclip.eval.outcomes import Outcomes, joined
from mclclip.eval.results import Figure, figure
from mclclip.eval.stored import StoredImage, check_shards, read_shards
from mclclip.ranks.collectives import on_main, together
from mclclip.search import nearest

READS_TEXT = False  # whether images are compared with texts

Probe = Literal["linear", "knn"]
Names = Annotated[list[str], Field(min_length=1), AfterValidator(fields.check_names)]


@dataclass(frozen=True)
class Split:
    """Images of one part of a data set, and each attribute's values [N] as text."""

    images: list[StoredImage]
    values: dict[str, list[str]]

    def first(self, number: int | None) -> Split:
        """The first ``number`` images; all of them for None."""
        values = {name: found[:number] for name, found in self.values.items()}
        return Split(self.images[:number], values)


def read_split(directory: Path, names: Sequence[str]) -> Split:
    """Reads ``directory/*.tar``. FileNotFoundError where there is none; ValueError for samples
    without a value of one of the attributes, or for shards with damage."""
    images, table = read_shards(directory, attributes=names)
    return Split(images, {name: table[fields.COLUMN + name].to_pylist() for name in names})


def coded(train: Sequence[str], test: Sequence[str], name: str) -> tuple[IntArray, IntArray, int]:
    """Labels [N] of train and [Q] of test (places among train's sorted values), and their number.

    ValueError for a value that only test has, which no classifier could answer, and where train
    has one value only.
    """
    known = {value: code for code, value in enumerate(sorted(set(train)))}
    if len(known) < 2:
        raise ValueError(
            f"all {len(train)} train images have the same value of {name!r}: there is nothing to "
            "tell apart; leave the attribute out, or give other images"
        )
    if strange := sorted(set(test) - known.keys()):
        raise ValueError(
            f"the test images have values of {name!r} that no train image has, such as "
            f"{strange[:3]}: split the data so that train has all of them"
        )
    labels = (np.array([known[v] for v in values], np.int64) for values in (train, test))
    return next(labels), next(labels), len(known)


def needs(**_: Any) -> str:
    """Names the files that a folder must hold, for messages."""
    return "shards train/*.tar and test/*.tar of images with attributes"


def check(root: Path, *, attributes: Names, **_: Any) -> None:
    """Raises the errors of ``read_split`` that the first shard of each part shows."""
    for part in ("train", "test"):
        check_shards(root / part, attributes=attributes)


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    attributes: Names,
    probe: Probe = "linear",
    strength: PositiveFloat | None = 1.0,
    validation_share: linear_probe.OpenShare = 0.2,
    seed: NonNegativeInt = 0,
    max_iterations: PositiveInt = MAX_ITERATIONS,
    solver: Solver = "auto",
    k: PositiveInt = 10,
    max_train: PositiveInt | None = None,
) -> list[Figure]:
    """Accuracy in percent of every attribute, as a metric of its name, on the shards ``root/test``
    with a classifier trained on ``root/train``; ``mean`` is over attributes.

    ``probe``: ``linear``, with the L2 ``strength`` (None: chosen on ``validation_share`` of train)
    and ``solver`` (see ``linear_probe``), or ``knn``, the majority of the ``k`` nearest.
    ``max_train``: only the first so many train images are used. Features are extracted once for all
    attributes. Figures do not depend on the number of ranks. Raises ValueError for options out of
    range, and the errors of ``read_split``.
    """
    if not attributes:
        raise ValueError("attributes is empty: name at least one field of the samples' .json")
    if max_train is not None and max_train < 1:
        raise ValueError(f"max_train is {max_train}: wanted at least 1 image, or null for all")
    known, asked = together(
        lambda: [read_split(Path(root) / part, attributes) for part in ("train", "test")]
    )
    known = known.first(max_train)
    train, test = extractor.images(known.images), extractor.images(asked.images)
    items = [image.key for image in asked.images]
    options: dict[str, Any] = {
        "strength": strength, "validation_share": validation_share, "seed": seed,
        "max_iterations": max_iterations, "solver": solver,
    }  # fmt: skip
    figures = []
    for name in attributes:
        labels, truth, number = coded(known.values[name], asked.values[name], name)
        protocol: dict[str, Any] = {
            "trials": "images",
            "num_classes": number,
            "num_train": len(train),
            "precision": extractor.precision,
        }
        if probe == "knn":
            predicted = _by_neighbours(train, labels, test, number, k)
            protocol |= {"name": "attributes_knn", "k": k, "weights": "majority"}
        else:
            data = LabelledFeatures(train, labels, test, truth, {})
            fitted, chosen = linear_probe.train(extractor.context, data, **options)
            predicted = on_main(partial(linear_probe.single(fitted).predict, test))
            protocol |= {"name": "attributes_linear", **chosen}
        figures.append(
            figure(name, Outcomes(items, predicted == truth), protocol, level="headline")
        )
    if len(figures) > 1:
        figures.append(_mean(figures))
    return figures


def _by_neighbours(
    train: Features, labels: IntArray, test: Features, num_classes: int, k: int
) -> IntArray:
    near, rows = nearest(test, train, k, what="kNN")
    return knn.vote(near, labels[rows], num_classes)


def _mean(figures: Sequence[Figure]) -> Figure:
    """The mean over attributes; all answers to an image are one unit."""
    of = [found.metric for found in figures]
    protocol = figures[0].protocol | {"of": of, "trials": "answers"}
    protocol.pop("num_classes")
    parts = {found.metric: found.outcomes for found in figures if found.outcomes is not None}
    return figure("mean", joined(parts), protocol)
