"""Features of a train and a test set, and their figures, for linear probe and kNN."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
from PIL import Image

from mclclip.eval.features import Extractor, Features, over_ranks
from mclclip.eval.labelled_images import read_split
from mclclip.eval.metrics import IntArray
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
    and ``test_items`` [Q] names the test images."""

    train: Features
    train_labels: IntArray
    test: Features
    test_labels: IntArray
    protocol: dict[str, Any]
    test_items: Sequence[str] = ()


def extract(extractor: Extractor, root: Path, feature: Feature) -> LabelledFeatures:
    """The features of ``root/train`` and ``root/test`` (``read_split``), the same on every rank.

    The log and the protocol count test images that are copies of a train image, since these need no
    generalisation. Raises ValueError where the encoder has no such ``feature``.
    """
    train, test = together(lambda: read_split(Path(root)))
    images = with_feature(extractor, feature)
    if copies := count_copies(train.images, test.images, extractor.context):
        share = f"{copies} of {len(test.images)}"
        log.warning("%s: %s test images are copies of a train image, byte for byte", root, share)
    protocol = {
        "trials": "images",
        "feature": feature,
        "num_classes": len(train.class_names),
        "num_train": len(train.images),
        "copies_in_train": copies,
        "precision": extractor.precision,
    }
    known, asked = images.images(train.images), images.images(test.images)
    items = image_items(test.images, Path(root))
    return LabelledFeatures(known, train.labels, asked, test.labels, protocol, items)


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
    predicted: IntArray, data: LabelledFeatures, protocol: dict[str, Any]
) -> list[Figure]:
    """``accuracy`` and ``mean_per_class`` in percent of labels [Q] predicted for ``data.test``.

    Their chance is what the most frequent class of the train images gets as the only answer.
    """
    correct = predicted == data.test_labels
    only = float(np.mean(data.test_labels == np.bincount(data.train_labels).argmax()))
    by_class = 1 / len(np.unique(data.test_labels))
    pooled = Outcomes(data.test_items, correct)
    per_class = Outcomes(data.test_items, correct, strata=[*map(str, data.test_labels)])
    return [
        figure("accuracy", pooled, protocol | {"chance": round(100 * only, 2)}, level="headline"),
        figure("mean_per_class", per_class, protocol | {"chance": round(100 * by_class, 2)}),
    ]
