"""Predicts every attribute of the images in shards from frozen features, by a linear classifier or
by the nearest neighbours.

Source: MCL, section 5.3, and IFM, section 4: a classifier per attribute on the frozen encoder,
without its projector, shows which features an encoder has learned and which it suppresses. Both
papers name no optimizer; here it is L-BFGS with an L2 penalty, as in `linear_probe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field
from pydantic.types import NonNegativeInt, PositiveFloat, PositiveInt

from mclclip.data import shard_scan as fields
from mclclip.eval.classification import LabelledFeatures
from mclclip.eval.features import Extractor
from mclclip.eval.images import StoredImage, read_shards
from mclclip.eval.logistic import MAX_ITERATIONS
from mclclip.eval.metrics import IntArray
from mclclip.eval.outcomes import Outcomes, join_outcomes
from mclclip.eval.protocols import Evaluator, knn, linear_probe
from mclclip.eval.results import Measurement, figure
from mclclip.ranks.collectives import raise_on_every_rank
from mclclip.util import search

Probe = Literal["linear", "knn"]
Names = Annotated[list[str], Field(min_length=1), AfterValidator(fields.check_names)]


def read_split(
    directory: Path, names: Sequence[str]
) -> tuple[list[StoredImage], dict[str, list[str]]]:
    """Reads the images of ``directory/*.tar``, and the values [N] of each attribute as text.

    Raises FileNotFoundError if there is no shard, and ValueError for a damaged shard or a sample
    without one of the attributes.
    """
    images, table = read_shards(directory, attributes=names)
    return images, {name: table[fields.ATTRIBUTE + name].to_pylist() for name in names}


def encode(train: Sequence[str], test: Sequence[str], name: str) -> tuple[IntArray, IntArray, int]:
    """Numbers the values of the attribute ``name``: returns labels [N] of train and [Q] of test,
    and the number of different values in train.

    Raises ValueError if train has a single value, or if test has a value that train lacks.
    """
    codes = {value: code for code, value in enumerate(sorted(set(train)))}
    if len(codes) < 2:
        raise ValueError(
            f"all {len(train)} train images have the same value of {name!r}: there is nothing to "
            "tell apart; leave the attribute out, or give other images"
        )
    if strange := sorted(set(test) - codes.keys()):
        raise ValueError(
            f"the test images have values of {name!r} that no train image has, such as "
            f"{strange[:3]}: split the data so that train has all of them"
        )
    labels = (np.array([codes[v] for v in values], np.int64) for values in (train, test))
    return next(labels), next(labels), len(codes)


def check(root: Path, *, attributes: Names, probe: Probe = "linear", **_: Any) -> None:
    """Raises those errors of ``read_split`` that show in the first shard of each part, and
    ValueError if faiss is needed but missing."""
    if probe == "knn":
        search.library("the search for neighbours")
    for part in ("train", "test"):
        read_shards(root / part, attributes=attributes, first_only=True)


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
    k: PositiveInt = 10,
    max_train: PositiveInt | None = None,
) -> list[Measurement]:
    """Accuracy in percent of every attribute, as a metric of its name, and their ``mean``.

    Classifiers are trained on the shards ``root/train`` and measured on ``root/test``.
    ``attributes`` are the names of the attributes, fields of the samples' .json. ``probe`` is
    'linear', or 'knn', the majority of the ``k`` nearest train images. ``strength`` is the L2
    strength of 'linear'; None: it is chosen on ``validation_share`` of the train images, which
    ``seed`` draws. ``max_iterations`` limits the solver of 'linear'. With ``max_train`` only the
    first so many train images are used; None: all.

    Figures do not depend on the number of ranks. Raises the errors of ``read_split`` and
    ``encode``.
    """
    (train_images, train_values), (test_images, test_values) = raise_on_every_rank(
        lambda: [read_split(Path(root) / part, attributes) for part in ("train", "test")]
    )
    train, test = extractor.images(train_images[:max_train]), extractor.images(test_images)
    items = [image.key for image in test_images]
    options: dict[str, Any] = {
        "strength": strength, "validation_share": validation_share, "seed": seed,
        "max_iterations": max_iterations,
    }  # fmt: skip
    figures = []
    for name in attributes:
        labels, truth, number = encode(train_values[name][:max_train], test_values[name], name)
        data = LabelledFeatures(train, labels, test, truth)
        protocol: dict[str, Any] = {
            "trials": "images",
            "num_classes": number,
            "num_train": len(train),
            "precision": extractor.precision,
        }
        if probe == "knn":
            predicted = knn.predict(extractor.context, data, k)
            protocol |= {"name": "attributes_knn", "k": k, "weights": "majority"}
        else:
            predicted, settings = linear_probe.predict(extractor.context, data, **options)
            protocol |= {"name": "attributes_linear", **settings}
        right = Outcomes(items, predicted == truth)
        figures.append(figure(name, right, protocol, level="headline"))
    if len(figures) > 1:  # add the mean over attributes; all answers for an image are one unit
        protocol = figures[0].protocol | {"of": [*attributes], "trials": "answers"}
        protocol.pop("num_classes")
        parts = {f.metric: f.outcomes for f in figures if f.outcomes is not None}
        figures.append(figure("mean", join_outcomes(parts), protocol))
    return figures


EVALUATOR = Evaluator(
    evaluate,
    needs="shards train/*.tar and test/*.tar of images with attributes",
    reads_text=False,
    check=check,
    judged="test",
)
