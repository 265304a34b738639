"""Held-out pairs of images and captions, and the weights of a concat's stages fitted on them.

With c_s the cosine of an image and a text in stage s, the similarity of the concat `weighted` is
sum_s w_s c_s, where no w_s is negative and all of them sum to 1. Equal weights w_s = 1/S make it
`stage_norm`, the mean of the cosines.

The fit minimises CLIP's loss (Radford et al. 2021, Figure 3) of the logits sum_s v_s c_s over
v >= 0. That is a convex problem of S numbers; w = v / sum(v) are the weights, and sum(v) is the
logit scale that goes with them. It is computed in float64 and draws nothing at random.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mclclip import files
from mclclip.config import Config
from mclclip.data.training_images import TrainingImages
from mclclip.eval.captions import read_captions_of_shards
from mclclip.eval.features import Extractor
from mclclip.eval.images import StoredImage
from mclclip.models.encoder import StageWeights, load_model
from mclclip.models.loading import has_texts
from mclclip.ranks.process_group import Context

log = logging.getLogger("mclclip")

_OPTION = "export.weights.held_out"
LARGEST = 100.0
"""Bound of each v_s, which is CLIP's bound of a logit scale: pairs that are told apart without an
error would push it without end."""
_BATCH = 1024  # held-out pairs that are each other's wrong answers
Rows = NDArray[np.floating[Any]]
CosineBatch = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""Cosines [S, b, b] of images and texts, and [b, b] where a text is an answer that counts."""


@dataclass(frozen=True)
class HeldOutPairs:
    """Images with one caption each, and where they are from.

    digest  of the shards' contents and the ordered keys of the pairs
    record  for a manifest: the number of pairs, the keys of the first and the last one, and the
            digests of their shards by name
    """

    images: list[StoredImage]
    captions: list[str]
    digest: str
    record: dict[str, Any]


def check(config: Config) -> None:
    """Raises ValueError or FileNotFoundError, before a run begins, where the weights that the
    concat ``weighted`` wants could not be fitted, or would be fitted on a benchmark."""
    options = config.export.weights
    if "weighted" not in config.export.concat or options.held_out is None:
        return
    folder = Path(options.held_out)
    if not any(folder.glob("*.tar")):
        raise FileNotFoundError(
            f"there is no shard in {folder}: {_OPTION} wants a folder with *.tar files, of images "
            "with captions"
        )
    if not (config.model.text and has_texts(config.model.name)):
        raise ValueError(
            "export.concat has weighted, whose weights are fitted on captions, and the model has "
            "no text tower: take raw or stage_norm"
        )
    own = folder.resolve()
    for name, benchmark in config.eval.suite.items():
        tested = Path(benchmark.path).resolve()
        if own == tested or own in tested.parents or tested in own.parents:
            raise ValueError(
                f"{_OPTION} is {folder}, and the benchmark {name!r} reads {benchmark.path}: "
                "figures on pairs that weights were fitted on are too good; give other shards"
            )


def read(config: Config) -> HeldOutPairs:
    """The pairs of ``export.weights``; ValueError where a training draws their images."""
    check(config)
    options = config.export.weights
    assert options.held_out is not None, "ExportConfig has checked it"
    folder = Path(options.held_out)
    data = read_captions_of_shards(folder, options.captions)
    first = np.unique(data.caption_image, return_index=True)[1]
    number = min(len(first), options.max_samples)
    rows = [int(row) for row in np.arange(number) * len(first) // number]
    images = [image for row in rows if isinstance(image := data.images[row], StoredImage)]
    trained_on = TrainingImages.of(config)
    if trained_on is not None and (known := trained_on.count(images)):
        raise ValueError(
            f"{_OPTION} is {folder}, and the run is trained on {known:,} of its {number:,} images: "
            "held-out pairs are those that no training has read; give other shards"
        )
    shards = {path.name: files.digest_file(path) for path in sorted({i.path for i in images})}
    keys = [f"{image.path.name}/{image.key}" for image in images]
    return HeldOutPairs(
        images,
        [data.captions[first[row]] for row in rows],
        digest=files.digest_json([shards, files.digest_keys(keys)]),
        record={"samples": len(keys), "first": keys[0], "last": keys[-1], "shards": shards},
    )


def fit(
    config: Config, context: Context, stages: Mapping[str, Path], pairs: HeldOutPairs
) -> StageWeights:
    """Fits the weights of exported stages, given by name, on the pairs, and logs them.

    All ranks call it, and share the work on features.
    """
    sides = []
    for path in stages.values():
        extractor = Extractor(
            load_model(path, device=context.device),
            context,
            batch_size=config.eval.batch_size,
            max_image_pixels=config.data.max_image_pixels,
        )
        sides.append((extractor.images(pairs.images), extractor.texts(pairs.captions)))
    images, texts = zip(*sides, strict=True)
    learned = fit_weights(images, texts, pairs.captions)
    named = ", ".join(f"{n} {w:.3f}" for n, w in zip(stages, learned.weights, strict=True))
    log.info(
        "weights of the stages, fitted on %d held-out pairs: %s; loss %.4f, with equal weights "
        "%.4f",
        *(learned.pairs, named, learned.loss, learned.equal_loss),
    )
    return learned


def fit_weights(
    images: Sequence[Rows], texts: Sequence[Rows], captions: Sequence[str]
) -> StageWeights:
    """The weights of S stages, from the unit features [N, D] of N pairs in each stage.

    Pairs are dealt to batches of at most 1,024 by a fixed permutation. An equal caption of another
    image is no wrong answer, and is left out of the sums. Raises ValueError for fewer than two
    different captions, and where the cosines of no stage tell a caption from others.
    """
    from scipy.optimize import minimize

    if len(set(captions)) < 2:
        raise ValueError(
            f"there are {len(captions)} held-out pairs with {len(set(captions))} different "
            "captions: weights of stages are fitted on two or more"
        )
    batches = _batches(images, texts, captions)
    stages = len(images)
    bounds = [(0.0, LARGEST)]
    # Steps of about 1: the logit scale of a trained CLIP is between 14 and 100.
    start, exact = np.full(stages, 10.0), {"ftol": 1e-14, "gtol": 1e-9, "maxiter": 1000}
    best = minimize(
        _loss, start, (batches,), method="L-BFGS-B", jac=True, bounds=bounds * stages, options=exact
    )

    def equal_loss(scale: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        loss, gradient = _loss(np.repeat(scale, stages), batches)
        return loss, gradient.sum(keepdims=True)

    equal = minimize(
        equal_loss, start[:1], method="L-BFGS-B", jac=True, bounds=bounds, options=exact
    )
    total = float(best.x.sum())
    if not np.isfinite(best.fun) or total < 1e-6:
        raise ValueError(
            "no stage tells held-out captions apart (their best logit scale is 0): are the "
            "captions those of the images?"
        )
    weights = tuple(float(value) / total for value in best.x)
    return StageWeights(weights, total, float(best.fun), float(equal.fun), len(captions))


def _batches(
    images: Sequence[Rows], texts: Sequence[Rows], captions: Sequence[str]
) -> list[CosineBatch]:
    seen: dict[str, int] = {}
    codes = np.array([seen.setdefault(caption, len(seen)) for caption in captions])
    order = np.random.default_rng(0).permutation(len(codes))
    batches = []
    for rows in np.array_split(order, -(-len(codes) // _BATCH)):
        sides = zip(images, texts, strict=True)
        cosines = [z[rows].astype(np.float64) @ t[rows].astype(np.float64).T for z, t in sides]
        counts = (codes[rows, None] != codes[rows]) | np.eye(len(rows), dtype=bool)
        batches.append((np.stack(cosines), counts))
    return batches


def _loss(
    scales: NDArray[np.float64], batches: Sequence[CosineBatch]
) -> tuple[float, NDArray[np.float64]]:
    """CLIP's loss of both directions, mean over pairs, of sum_s scales_s c_s, and its gradient."""
    loss, gradient, pairs = 0.0, np.zeros(len(scales)), sum(len(keep) for _, keep in batches)
    for cosines, counts in batches:
        logits = np.where(counts, np.tensordot(scales, cosines, axes=1), -np.inf)
        of_pairs = np.diagonal(logits)
        pull = -np.eye(len(logits))
        for axis in (0, 1):
            most = logits.max(axis=axis, keepdims=True)
            shares = np.exp(logits - most)
            total = shares.sum(axis=axis, keepdims=True)
            loss += float((np.log(total) + most).sum() - of_pairs.sum()) / (2 * pairs)
            pull += shares / total / 2
        gradient += (cosines * pull).sum(axis=(1, 2)) / pairs
    return loss, gradient
