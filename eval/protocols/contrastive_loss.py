"""CLIP's loss on held-out samples: how well images pick their captions, and captions their images.

Source: Radford et al., Learning Transferable Visual Models (2021), Figure 3. All samples are one
batch, and the logit scale is the model's, whatever its objective was. The matrix of similarities is
computed in chunks, so it is never in memory all at once. The loss depends on the number of samples:
compare encoders on the same data. Equal captions of different images count as wrong, as in
training.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from pydantic.types import PositiveInt

from mclclip.eval.captions import read_captioned
from mclclip.eval.features import CHUNK_BYTES, Extractor, Features, over_chunks, similarity
from mclclip.eval.images import image_items, refuse_absent
from mclclip.eval.metrics import FloatArray
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.protocols import Evaluator
from mclclip.eval.results import Measurement, figure
from mclclip.ranks.collectives import raise_on_every_rank
from mclclip.ranks.process_group import SINGLE, Context


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    captions: str = "txt",
    images: str = ".",
    max_samples: PositiveInt | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[Measurement]:
    """The loss in nats and its two directions, over all samples as one batch. Smaller is better;
    chance is log(number of samples). The interval is that of a mean over samples.

    captions     'txt', 'lines' or 'json:FIELD' of the samples in ``root/*.tar``; or a file or
                 folder below ``root`` (``read_captions``). Only an image's first caption is used
    images       the folder, below ``root``, to which names of files are relative
    max_samples  only the first so many images are used; None: all
    chunk_bytes  memory for cosines

    Figures do not depend on the number of ranks. Raises FileNotFoundError if there is no shard,
    ValueError for a damaged shard or a sample without a caption, and the errors of
    ``read_captions``.
    """
    root = Path(root)
    options: dict[str, Any] = {"captions": captions, "images": images, "max_samples": max_samples}
    pictures, texts = raise_on_every_rank(lambda: read_captioned(root, **options))
    sides = extractor.images(pictures), extractor.texts(texts)
    scale = float(extractor.encoder.logit_scale)
    to_text, to_image = (
        row_losses(a, b, scale=scale, context=extractor.context, chunk_bytes=chunk_bytes)
        for a, b in (sides, sides[::-1])
    )
    losses = {
        "loss": (to_text + to_image) / 2,
        "image_to_text": to_text,
        "text_to_image": to_image,
    }
    protocol = {
        "name": "contrastive_loss",
        "trials": "samples",
        "precision": extractor.precision,
        "logit_scale": scale,
        "chance": math.log(len(pictures)),
    }
    items = image_items(pictures, root)
    return [
        figure(
            name,
            Outcomes(items, values, statistic="mean_loss"),
            protocol,
            level="headline" if name == "loss" else "detail",
        )
        for name, values in losses.items()
    ]


def check(root: Path, *, captions: str = "txt", images: str = ".", **options: Any) -> None:
    """Raises the errors of ``read_captioned``, which reads one shard, and FileNotFoundError for
    missing image files."""
    pictures, _ = read_captioned(root, captions=captions, images=images, first_only=True, **options)
    refuse_absent(pictures, root / captions, root / images)


def row_losses(
    queries: Features,
    candidates: Features,
    *,
    scale: float,
    context: Context = SINGLE,
    chunk_bytes: int = CHUNK_BYTES,
) -> FloatArray:
    """The cross-entropy float64 [N] of each query, whose right candidate has the same row number.

    Logits are cosines times ``scale``. The ranks of ``context`` share the queries; each holds about
    ``chunk_bytes`` of similarities.
    """

    def of_chunk(chunk: slice) -> FloatArray:
        logits = scale * similarity(queries[chunk], candidates, context.device).astype(np.float64)
        most = logits.max(axis=1)
        total = np.log(np.exp(logits - most[:, None]).sum(axis=1)) + most
        return np.asarray(total - logits.diagonal(chunk.start))

    step = chunk_bytes // (8 * len(candidates))
    return np.concatenate(over_chunks(context, len(queries), step, of_chunk))


EVALUATOR = Evaluator(
    evaluate,
    needs="shards *.tar of images with captions, or images and a table, JSON or files of captions",
    reads_text=True,
    is_loss=True,
    files=("images",),  # not captions, which may be a field of samples
    check=check,
)
