"""The common part of zero-shot classification, linear probe and kNN: features of a train and a test
set, and the figures of images with classes."""

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
from mclclip.eval.metrics import BoolArray, FloatArray, IntArray
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.results import Measurement, figure
from mclclip.models.encoder import Encoder
from mclclip.ranks.collectives import raise_on_every_rank
from mclclip.ranks.process_group import Context

log = logging.getLogger("mclclip")

# --- features ----------------------------------------------------------------------------------

Feature = Literal["projected", "pooled"]
"""Image features after the projection into the space of texts, or before it (a joined encoder has
no features before it)."""


@dataclass(frozen=True)
class LabelledFeatures:
    """Unit features and labels of N train images and Q test images.

    train, train_labels  [N, E] and [N]; [N, K] if images have several labels (``LabelledImages``)
    test, test_labels    [Q, E] and [Q]; [Q, K] if images have several labels
    protocol             how features were extracted, for the protocol of figures
    test_items           [Q] names of the test images
    class_names          [K]
    valid                bool [N], True for train images of the published validation set; None if
                         the data set has none
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
        """Splits train: images where ``held`` [N] is True become the test set, the others train."""
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
    """Extracts the features of the ``parts`` of a data set (``read_parts``), the same on every
    rank.

    Images of valid are added to train. The log and the protocol count the test images that are
    copies of a train image, since an encoder need not generalise to answer these. Raises ValueError
    if the encoder has no such ``feature``.
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
    """Returns an extractor whose ``images`` gives unit features of the kind ``feature``.

    Raises ValueError if the encoder has no pooled features: joined encoders, and those whose
    attention pool is their projection (open_clip's ResNets).
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
    """Counts images of ``test`` with the same bytes as an image of ``train``; ranks share the work.

    Only files are read whose size occurs in both.
    """
    sizes = {*map(_size_of, train)} & {*map(_size_of, test)}

    def digests(images: Sequence[Any]) -> list[str]:
        compared = [image for image in images if _size_of(image) in sizes]
        parts = over_ranks(context, len(compared), lambda share: [*map(_digest, compared[share])])
        return [digest for part in parts for digest in part]

    train_digests = set(digests(train))
    return sum(digest in train_digests for digest in digests(test))


def _size_of(image: Any) -> int:
    """The number of bytes of an image in a shard or in a file."""
    return int(image.size if isinstance(image, StoredImage) else image.stat().st_size)


def _digest(image: Any) -> str:
    return hashlib.sha256(image.read_bytes()).hexdigest()


# --- figures -----------------------------------------------------------------------------------


Metric = Literal["accuracy", "mean_per_class", "mean_of_top1_and_top5", "map_11_point", "roc_auc"]
"""The figure by which a data set is reported."""


def check_metric(metric: Metric, num_classes: int, labels: str | None) -> None:
    """Raises ValueError if a benchmark with so many classes, and the option ``labels``, cannot have
    this metric."""
    if metric == "roc_auc" and num_classes != 2:
        needs = f"2 classes, got {num_classes}: use accuracy"
    elif metric == "mean_of_top1_and_top5" and num_classes <= 5:
        needs = f"more than 5 classes, got {num_classes}"
    elif metric == "map_11_point" and labels is None:
        needs = (
            "labels=FILE, a CSV with a row for each label of an image, or PASCAL VOC's folder "
            "ImageSets/Main: folders give an image one label"
        )
    else:
        return
    raise ValueError(f"metric {metric} wants {needs}")


def ranked_figures(
    outcomes: Mapping[str, tuple[Outcomes, float]], headline: str, protocol: Mapping[str, Any]
) -> list[Measurement]:
    """One figure per metric; ``outcomes`` maps a metric to its outcomes and its chance in percent.
    The figure of the metric ``headline`` is the headline."""
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
    """Outcomes of the mean of top-1 and top-5 accuracy, from the rank [N] of each image's class."""
    return Outcomes(items, ((ranks <= 1) + (ranks <= 5).astype(np.float64)) / 2)


def area(scores: FloatArray, positive: BoolArray, items: Sequence[str]) -> Outcomes:
    """Outcomes of the area under the ROC curve of ``scores`` [N]; ``positive`` [N] is True for
    images of the second class.

    A tied pair counts as wrong. Raises ValueError if a class has no image.
    """
    if positive.all() or not positive.any():
        raise ValueError("roc_auc wants images of both classes: one of them has none")
    return Outcomes(items, scores, truth=positive, statistic="roc_auc")


def area_figures(strict: Outcomes, protocol: Mapping[str, Any]) -> list[Measurement]:
    """The figure ``roc_auc`` of what ``area`` returns. If pairs tie, also ``roc_auc_half_ties``, in
    which a tied pair counts as half right, as in scikit-learn."""
    half = replace(strict, statistic="roc_auc_half_ties")
    protocol = {**protocol, "chance": 50.0}
    figures = [figure("roc_auc", strict, protocol, level="headline")]
    if half.value() != strict.value():
        figures.append(figure("roc_auc_half_ties", half, protocol, level="detail"))
    return figures


def precisions(
    scores: FloatArray, truth: IntArray, files: Sequence[str], classes: Sequence[str]
) -> Outcomes:
    """Outcomes of the mean over classes of the 11-point average precision of ``scores`` [N, K].

    ``truth`` [N, K] is that of ``LabelledImages``. Pairs of image and class that the data set does
    not judge are left out, and so are classes without a positive or a negative image. Raises
    ValueError if no class is left.
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
    """The figure ``map_11_point`` of what ``precisions`` returns."""
    ranked = len(set(outcomes.strata or ()))
    settings = {**protocol, "num_images": num_images, "num_ranked_classes": ranked}
    return figure("map_11_point", outcomes, settings, level="headline")


def accuracy_figures(
    predicted: IntArray,
    data: LabelledFeatures,
    protocol: dict[str, Any],
    metric: Metric = "accuracy",
) -> list[Measurement]:
    """The figures ``accuracy`` and ``mean_per_class``, in percent, of the labels ``predicted`` [Q]
    for ``data.test``; ``metric`` is the headline.

    The chance is what a figure would be if every answer were the most frequent class of train; the
    mean over those that are equally frequent.
    """
    truth, items = data.test_labels, data.test_items
    counts = np.bincount(data.train_labels)
    frequent = np.flatnonzero(counts == counts.max())
    outcomes = {}
    for name, strata in (("accuracy", None), ("mean_per_class", [*map(str, truth)])):
        answered = Outcomes(items, predicted == truth, strata)
        by_chance = Outcomes(items, np.isin(truth, frequent) / len(frequent), strata)
        outcomes[name] = answered, 100 * by_chance.value()
    return ranked_figures(outcomes, metric, protocol)
