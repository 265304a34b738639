"""Operations of a training and of its encoder per sample, counted on tensors without values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mclclip.data.batches import Batch
from mclclip.models import memory
from mclclip.models.image_model import ImageModel
from mclclip.models.loading import AnyModel
from mclclip.models.options import ModelConfig
from mclclip.train.loop import Trainee

# Samples that are counted together: batch norms that train want more than one.
_ROWS = 2
Step = Callable[[Trainee, Batch], Callable[[], None]]


def of_encoder(model: AnyModel) -> dict[str, int | None]:
    """Operations of an ``image``, and of a ``text`` (None without a text tower), forward alone.

    ``model`` is a fake (``memory.faked``) whose weights nobody has begun to train.
    """
    size = model.image_size
    height, width = (size, size) if isinstance(size, int) else size
    kind = next(model.parameters()).dtype
    images = torch.empty(_ROWS, model.num_channels, height, width, dtype=kind)
    context = int(getattr(model.tokenizer, "context_length", 77)) if model.reads_texts else 0
    tokens = torch.zeros(_ROWS, context, dtype=torch.int64)
    with torch.no_grad():
        image = memory.operations(lambda: model.encode_image(images))
        text = memory.operations(lambda: model.encode_text(tokens)) if context else None
    return {"image": image // _ROWS, "text": None if text is None else text // _ROWS}


def of_named_encoder(named: ModelConfig) -> dict[str, int | None]:
    """``of_encoder`` of a model that is not loaded."""
    model = memory.load_shapes(named.name, text=named.text)
    with memory.faked(model):
        return of_encoder(model.eval())


def of_training(trainee: Trainee, batch: Batch, step: Step, *, twice: bool) -> dict[str, Any]:
    """Operations of a sample in a step, all of its views, and what a cache of the trunk would save.

    ``step`` gives the forward and backward pass of a batch; ``twice``: gradient caching runs the
    forward pass once more before. The loss itself is left out. Beside ``sample``: ``features``,
    bytes of a sample's features, and of those with a gradient (``features_trained``); ``trunk``
    (None where no block is frozen, or there are several views): its ``blocks``, the ``values`` of
    its output for one crop, what is left of ``sample`` where that output is at hand
    (``sample_cached``), and ``image``, the trunk's part of an embedding pass.
    """
    model: Any = trainee.model
    batch = batch.rows(0, _ROWS)
    rows = len(batch)

    def count() -> int:
        forward = 0
        if twice:
            with torch.no_grad():
                forward = memory.operations(lambda: trainee(batch, only_features=True))
        return (forward + memory.operations(step(trainee, batch))) // rows

    features = [f for f in trainee(batch, only_features=True).values() if f.ndim]
    trained = [feature for feature in features if feature.requires_grad]
    sizes = [memory.size_bytes(each) // rows for each in (features, trained)]
    found: dict[str, Any] = dict(zip(("features", "features_trained"), sizes, strict=True))
    found |= {"sample": count(), "trunk": None}
    frozen = model.num_frozen_blocks
    if frozen and len(batch.views) == 1:  # several views of a row would be equal
        images = batch.views[0]
        with torch.no_grad():
            output = model.encode_trunk(images, frozen)
            image = memory.operations(lambda: model.encode_trunk(images, frozen)) // rows
        batch = replace(batch, views=[output])
        encoders = [m for m in trainee.modules() if isinstance(m, ImageModel)]  # copies too
        for encoder in encoders:
            encoder.first_block = frozen
        cached = count()
        for encoder in encoders:
            encoder.first_block = 0
        found["trunk"] = {"blocks": frozen, "of_blocks": model.num_blocks, "image": image}
        found["trunk"] |= {"values": output.numel() // rows, "sample_cached": cached}
    return found
