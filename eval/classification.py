"""Images with classes: the features of a train and a test set, and the figures that zero-shot
classification, linear probe and kNN report."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
from PIL import Image

from mclclip.eval.features import Extractor, Features, over_ranks
from mclclip.eval.images import LabelledImages, Part, StoredImage, image_items
from mclclip.eval.metrics import BoolArray, FloatArray, IntArray, hits_at
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.results import Measurement, figure
from mclclip.models.encoder import Encoder
from mclclip.ranks.collectives import raise_on_every_rank
from mclclip.ranks.process_group import Context

log = logging.getLogger("mclclip")

# --- features ----------------------------------------------------------------------------------

Feature = Literal["projected", "pooled"]
"""Image features after the projection, or before it (not of a joined encoder)."""


@dataclass(frozen=True)
class LabelledFeatures:
    """Unit features [N, E] and labels [N] of train and test.

    ``protocol`` says how they were made, and ``test_items`` [Q] names the test images. If images
    have several labels, labels are [N, K] as in ``LabelledImages``. ``valid`` [N] is True for the
    rows of train that form the published validation set; None if the data set has none.
    """

    train: Features
    train_labels: IntArray
    test: Features
    test_labels: IntArray
    protocol: dict[str, Any] = field(default_factory=dict)
    test_items: Sequence[str] = ()
    class_names: Sequence[str] = ()
    valid: BoolArray | None = None

    def held_out(self, held: BoolArray) -> LabelledFeatures:
        """The rows ``held`` [N] of train as the test set of the others."""
        return replace(
            self,
            train=self.train[~held],
            train_labels=self.train_labels[~held],
            test=self.train[held],
            test_labels=self.train_labels[held],
            test_items=[str(row) for row in np.flatnonzero(held)],
            valid=None,
        )


def extract(
    extractor: Extractor,
    root: Path,
    feature: Feature,
    parts: Mapping[Part, LabelledImages],
) -> LabelledFeatures:
    """The features of the ``parts`` of ``root`` (``read_parts``), the same on every rank; train
    holds those of valid too.

    The log and the protocol count test images that are copies of a train image, since answering
    them needs no generalisation. Raises ValueError if the encoder has no such ``feature``.
    """
    learnt = [part for name, part in parts.items() if name != "test"]
    train = [image for part in learnt for image in part.images]
    test = parts["test"]
    images = with_feature(extractor, feature)
    if copies := count_copies(train, test.images, extractor.context):
        share = f"{copies} of {len(test.images)}"
        log.warning("%s: %s test images are copies of a train image, byte for byte", root, share)
    protocol = {
        "trials": "images",
        "feature": feature,
        "num_classes": len(test.class_names),
        "num_train": len(train),
        "copies_in_train": copies,
        "precision": extractor.precision,
    }
    return LabelledFeatures(
        images.images(train),
        np.concatenate([part.labels for part in learnt]).astype(np.int64, copy=False),
        images.images(test.images),
        test.labels.astype(np.int64, copy=False),
        protocol,
        image_items(test.images, Path(root)),
        test.class_names,
        np.arange(len(train)) >= len(parts["train"].images) if "valid" in parts else None,
    )


def with_feature(extractor: Extractor, feature: Feature) -> Extractor:
    """An extractor whose ``images`` returns the unit rows of ``feature``.

    Raises ValueError for encoders without pooled features: a joined encoder, or one whose attention
    pool is its projection (open_clip's ResNets).
    """
    if feature == "projected":
        return extractor
    encoder = extractor.encoder
    encode = getattr(encoder, "encode_pooled", None)
    if encode is None:
        raise ValueError("a joined encoder has no pooled features: use feature=projected")
    # The width of pooled features is found by encoding one blank image.
    blank = encoder.preprocess_val(Image.new("RGB", (32, 32)))[None]
    width = raise_on_every_rank(lambda: encode(blank.to(extractor.context.device))).shape[1]
    pooled = SimpleNamespace(
        embed_dim=width, preprocess_val=encoder.preprocess_val, encode_image=encode
    )
    return replace(extractor, encoder=cast(Encoder, pooled))


def count_copies(train: Sequence[Any], test: Sequence[Any], context: Context) -> int:
    """Counts files of ``test`` with the bytes of a file in ``train``; ranks share the work.

    Only files of a size that occurs on both sides are read.
    """
    sizes = {*map(_size_of, train)} & {*map(_size_of, test)}

    def digests(images: Sequence[Any]) -> list[str]:
        compared = [image for image in images if _size_of(image) in sizes]
        parts = over_ranks(context, len(compared), lambda share: [*map(_digest, compared[share])])
        return [digest for part in parts for digest in part]

    train_digests = set(digests(train))
    return sum(digest in train_digests for digest in digests(test))


def _size_of(image: Any) -> int:
    """Bytes of an image in a shard or in a file."""
    return int(image.size if isinstance(image, StoredImage) else image.stat().st_size)


def _digest(image: Any) -> str:
    return hashlib.sha256(image.read_bytes()).hexdigest()


# --- figures -----------------------------------------------------------------------------------


Metric = Literal["accuracy", "mean_per_class", "mean_of_top1_and_top5", "map_11_point", "roc_auc"]
"""The figure by which a data set is reported."""


def check_metric(metric: Metric, num_classes: int, labels: str | None) -> None:
    """Raises ValueError where a benchmark cannot have this metric."""
    if metric == "roc_auc" and num_classes != 2:
        raise ValueError(f"metric roc_auc wants 2 classes, got {num_classes}: use accuracy")
    if metric == "mean_of_top1_and_top5" and num_classes <= 5:
        raise ValueError(f"metric {metric} wants more than 5 classes, got {num_classes}")
    if metric == "map_11_point" and labels is None:
        raise ValueError(
            "metric map_11_point wants labels=FILE, a CSV with a row for each label of an image, "
            "or PASCAL VOC's folder ImageSets/Main: folders give an image one label"
        )


def ranked_figures(
    outcomes: Mapping[str, tuple[Outcomes, float]], headline: str, protocol: Mapping[str, Any]
) -> list[Measurement]:
    """A figure per metric, from its outcomes and its chance in percent; one is the headline."""
    return [
        figure(
            name,
            of_metric,
            {**protocol, "chance": round(chance, 2)},
            level="headline" if name == headline else "table",
        )
        for name, (of_metric, chance) in outcomes.items()
    ]


def mean_of_top1_and_top5(ranks: IntArray, items: Sequence[str]) -> Outcomes:
    """The mean of both, from the rank [N] of each image's class."""
    return Outcomes(items, (hits_at(ranks, 1) + hits_at(ranks, 5).astype(np.float64)) / 2)


def area(scores: FloatArray, positive: BoolArray, items: Sequence[str]) -> Outcomes:
    """The area under the ROC curve of ``scores`` [N] for the second class against the first.

    A tied pair counts as wrong. Raises ValueError if a class has no image.
    """
    if positive.all() or not positive.any():
        raise ValueError("roc_auc wants images of both classes: one of them has none")
    return Outcomes(items, scores, truth=positive, statistic="roc_auc")


def area_figures(strict: Outcomes, protocol: Mapping[str, Any]) -> list[Measurement]:
    """The figure of ``area``. If pairs tie, also ``roc_auc_half_ties``, which counts a tied pair as
    half right, as scikit-learn does."""
    half = replace(strict, statistic="roc_auc_half_ties")
    protocol = {**protocol, "chance": 50.0}
    figures = [figure("roc_auc", strict, protocol, level="headline")]
    if half.value() != strict.value():
        figures.append(figure("roc_auc_half_ties", half, protocol, level="detail"))
    return figures


def precisions(
    scores: FloatArray, truth: IntArray, files: Sequence[str], classes: Sequence[str]
) -> Outcomes:
    """The mean over classes of the 11-point average precision of ``scores`` [N, K].

    ``truth`` [N, K] as in ``LabelledImages``: images that the data set does not judge for a class
    are left out there, and classes without a positive or a negative image. ValueError where no
    class is left.
    """
    ranked = (truth == 1).any(axis=0) & (truth == -1).any(axis=0)
    if not ranked.any():
        raise ValueError("map_11_point: no class has images with it and images without it")
    image, column = np.nonzero((truth != 0) & ranked)
    units, strata = [files[i] for i in image.tolist()], [classes[k] for k in column.tolist()]
    return Outcomes(
        items=[f"{file}:{name}" for file, name in zip(units, strata, strict=True)],
        values=scores[image, column],
        strata=strata,
        units=units,
        truth=truth[image, column] == 1,
        statistic="precision_11_point",
    )


def precision_figure(
    outcomes: Outcomes, num_images: int, protocol: Mapping[str, Any]
) -> Measurement:
    """The figure of what ``precisions`` returns."""
    ranked = len(set(outcomes.strata or ()))
    settings = {**protocol, "num_images": num_images, "num_ranked_classes": ranked}
    return figure("map_11_point", outcomes, settings, level="headline")


def accuracy_figures(
    predicted: IntArray,
    data: LabelledFeatures,
    protocol: dict[str, Any],
    metric: Metric = "accuracy",
) -> list[Measurement]:
    """``accuracy`` and ``mean_per_class`` in percent of labels [Q] predicted for ``data.test``.

    ``metric`` names the headline. The chance of a figure is its value if every answer were the most
    frequent class of the train images; it is 0 if no test image is of that class.
    """
    truth, items = data.test_labels, data.test_items
    frequent = np.full(len(truth), np.bincount(data.train_labels).argmax())
    outcomes = {}
    for name, strata in (("accuracy", None), ("mean_per_class", [*map(str, truth)])):
        answered, by_chance = (
            Outcomes(items, answers == truth, strata) for answers in (predicted, frequent)
        )
        outcomes[name] = answered, 100 * by_chance.value()
    return ranked_figures(outcomes, metric, protocol)
