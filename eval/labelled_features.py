"""Features of a train and a test set, and their figures, for linear probe and kNN."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

from PIL import Image

from mclclip.eval.datasets import read_split
from mclclip.eval.features import Extractor, Features, over_ranks
from mclclip.eval.metrics import IntArray
from mclclip.eval.results import Figure, class_mean, proportion
from mclclip.files import digest_file
from mclclip.models.encoder import Encoder
from mclclip.ranks.collectives import together
from mclclip.ranks.process_group import Context

log = logging.getLogger("mclclip")

Feature = Literal["projected", "pooled"]
"""Image features after the projection, or before it (not of a joined encoder)."""


@dataclass(frozen=True)
class LabelledFeatures:
    """Unit features [N, E] and labels [N] of both parts; ``protocol`` says how they were made."""

    train: Features
    train_labels: IntArray
    test: Features
    test_labels: IntArray
    protocol: dict[str, Any]


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
        "feature": feature,
        "num_classes": len(train.class_names),
        "num_train": len(train.images),
        "copies_in_train": copies,
        "precision": extractor.precision,
    }
    known, asked = images.images(train.images), images.images(test.images)
    return LabelledFeatures(known, train.labels, asked, test.labels, protocol)


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
    predicted: IntArray, labels: IntArray, protocol: dict[str, Any]
) -> list[Figure]:
    """``accuracy`` and ``mean_per_class`` of predicted and true labels [N], in percent."""
    correct = predicted == labels
    return [
        proportion("accuracy", int(correct.sum()), len(labels), protocol),
        class_mean("mean_per_class", correct, labels, protocol),
    ]
