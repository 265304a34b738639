"""Features of a train and a test set, and their figures, for linear probe and kNN."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
from PIL import Image

from mclclip.eval.class_figures import Metric
from mclclip.eval.features import Extractor, Features, over_ranks
from mclclip.eval.labelled_images import LabelledImages, Part, SeveralLabels
from mclclip.eval.metrics import BoolArray, IntArray
from mclclip.eval.outcomes import Outcomes, image_items
from mclclip.eval.results import Figure, figure
from mclclip.files import digest_file
from mclclip.models.encoder import Encoder
from mclclip.ranks.collectives import together
from mclclip.ranks.process_group import Context

log = logging.getLogger("mclclip")

Feature = Literal["projected", "pooled"]
"""Image features after the projection, or before it (not of a joined encoder)."""


@dataclass(frozen=True)
class LabelledFeatures:
    """Unit features [N, E] and labels [N] of both parts; ``protocol`` says how they were made,
    and ``test_items`` [Q] names the test images. Of images with several labels the labels are
    ``SeveralLabels.truth`` [N, K]. ``valid`` [N]: which of train are a published validation set;
    None where there is none."""

    train: Features
    train_labels: IntArray
    test: Features
    test_labels: IntArray
    protocol: dict[str, Any]
    test_items: Sequence[str] = ()
    class_names: Sequence[str] = ()
    valid: BoolArray | None = None


def extract(
    extractor: Extractor,
    root: Path,
    feature: Feature,
    parts: Mapping[Part, LabelledImages] | Mapping[Part, SeveralLabels],
) -> LabelledFeatures:
    """The features of the ``parts`` of ``root`` (``read_parts``), the same on every rank; train
    holds those of valid too.

    The log and the protocol count test images that are copies of a train image, since these need no
    generalisation. Raises ValueError where the encoder has no such ``feature``.
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
        np.concatenate([_labels(part) for part in learnt]),
        images.images(test.images),
        _labels(test),
        protocol,
        image_items(test.images, Path(root)),
        test.class_names,
        np.arange(len(train)) >= len(parts["train"].images) if "valid" in parts else None,
    )


def _labels(part: LabelledImages | SeveralLabels) -> IntArray:
    return part.truth.astype(np.int64) if isinstance(part, SeveralLabels) else part.labels


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
    width = together(lambda: encode(blank.to(extractor.context.device))).shape[1]
    pooled = SimpleNamespace(
        embed_dim=width, preprocess_val=encoder.preprocess_val, encode_image=encode
    )
    return replace(extractor, encoder=cast(Encoder, pooled))


def count_copies(train: Sequence[Path], test: Sequence[Path], context: Context) -> int:
    """Counts files of ``test`` with the bytes of a file in ``train``; ranks share the work.

    Only files of a size that occurs on both sides are read.
    """
    sizes = {p.stat().st_size for p in train} & {p.stat().st_size for p in test}

    def digests(paths: Sequence[Path]) -> list[str]:
        compared = [path for path in paths if path.stat().st_size in sizes]
        parts = over_ranks(context, len(compared), lambda own: [*map(digest_file, compared[own])])
        return [digest for part in parts for digest in part]

    known = set(digests(train))
    return sum(digest in known for digest in digests(test))


def accuracy_figures(
    predicted: IntArray,
    data: LabelledFeatures,
    protocol: dict[str, Any],
    metric: Metric = "accuracy",
) -> list[Figure]:
    """``accuracy`` and ``mean_per_class`` in percent of labels [Q] predicted for ``data.test``.

    ``metric`` names the headline. Their chance is what the most frequent class of the train images
    gets as the only answer.
    """
    correct = predicted == data.test_labels
    only = float(np.mean(data.test_labels == np.bincount(data.train_labels).argmax()))
    by_class = 1 / len(np.unique(data.test_labels))
    strata = [*map(str, data.test_labels)]
    found = {
        "accuracy": (Outcomes(data.test_items, correct), only),
        "mean_per_class": (Outcomes(data.test_items, correct, strata=strata), by_class),
    }
    return [
        figure(
            name,
            outcomes,
            protocol | {"chance": round(100 * chance, 2)},
            level="headline" if name == metric else "table",
        )
        for name, (outcomes, chance) in found.items()
    ]
