"""Held-out pairs of images and captions, and the weights of a concat's stages fitted on them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mclclip import files
from mclclip.config import Config
from mclclip.data.training_images import TrainingImages
from mclclip.eval.captions import read_captions_of_shards
from mclclip.eval.features import Extractor
from mclclip.eval.images import StoredImage
from mclclip.models import stage_weights
from mclclip.models.encoder import load_model
from mclclip.models.loading import has_texts
from mclclip.models.stage_weights import StageWeights
from mclclip.ranks.process_group import Context

log = logging.getLogger("mclclip")

_OPTION = "export.weights.held_out"


@dataclass(frozen=True)
class Pairs:
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


def read(config: Config) -> Pairs:
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
    return Pairs(
        images,
        [data.captions[first[row]] for row in rows],
        digest=files.digest_json([shards, files.digest_keys(keys)]),
        record={"samples": len(keys), "first": keys[0], "last": keys[-1], "shards": shards},
    )


def fit(config: Config, context: Context, stages: Mapping[str, Path], pairs: Pairs) -> StageWeights:
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
    learned = stage_weights.fit(images, texts, pairs.captions)
    named = ", ".join(f"{n} {w:.3f}" for n, w in zip(stages, learned.weights, strict=True))
    log.info(
        "weights of the stages, fitted on %d held-out pairs: %s; loss %.4f, with equal weights "
        "%.4f",
        *(learned.pairs, named, learned.loss, learned.equal_loss),
    )
    return learned
