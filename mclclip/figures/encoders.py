"""The encoders that some figures run: exports of the stages, for pixels between 0 and 1.

Gates act on the features of the projector, which is not exported and is read from the last
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mclclip.figures.inputs import ClassGates, Inputs
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.objectives.label_filter import normed
from mclclip.opened_run import Stage

log = logging.getLogger("mclclip")


class PixelEncoder(nn.Module):
    """A stage's encoder for pixels [n, C, H, W] between 0 and 1, which it normalises itself.

    Its features are those of the export, at unit length; with ``gates`` those that the gates act
    on, behind projector and layer norm.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model, gates: ClassGates | None = None) -> None:
        super().__init__()
        self.model, self.gated = model, gates is not None
        self.norm = None if gates is None else gates.subspaces.norm
        for name, values in zip(("mean", "std"), model.normalization, strict=True):
            self.register_buffer(name, values)

    def forward(self, pixels: Tensor) -> Tensor:
        """[n, C, H, W] -> [n, D]."""
        images = (pixels - self.mean) / self.std
        if self.gated:
            return normed(self.model(image=images)["image_features"], self.norm)
        return self.model.encode_image(images, normalize=True)

    def pixels(self, images: Sequence[Any]) -> Tensor:
        """Stored images -> pixels [n, C, H, W] between 0 and 1, of the encoder's size."""
        prepared = torch.stack([self.model.preprocess_val(image) for image in images])
        return (prepared.to(self.mean.device) * self.std + self.mean).clamp(0.0, 1.0)

    def of_all(self, pixels: Tensor, batch_size: int) -> NDArray[np.float32]:
        """[N, D]: the features of pixels [N, C, H, W], a batch at a time."""
        with torch.no_grad():
            parts = [self(batch).cpu() for batch in torch.split(pixels, batch_size)]
        features: NDArray[np.float32] = torch.cat(parts).numpy()
        return features

    def of_samples(self, inputs: Inputs, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """[n, D]: the features of samples, which are read a batch at a time."""
        size = inputs.config.embed.batch_size
        parts = []
        for start in range(0, len(ids), size):
            images = inputs.run.images(ids[start : start + size])
            parts.append(self.of_all(self.pixels(images), size))
        return np.concatenate(parts)


def load(inputs: Inputs, stage: Stage, gates: ClassGates | None = None) -> PixelEncoder | None:
    """A stage's export in evaluation mode, on the device; None, and a line in the log, without one.

    With ``gates`` it has the projector that was trained.
    """
    if not stage.has("export"):
        log.info(
            "%s has no export and is left out: run 'mclclip export --stage %d' to have it in",
            stage.name, stage.number,
        )  # fmt: skip
        return None
    projector: Sequence[int] = ()
    if gates is not None:
        projector = inputs.config.model_of("train" if stage.number else "base").projector
    model = load_towers(stage.export, projector=projector)
    if gates is not None and projector:
        model.get_submodule("projector").load_state_dict(gates.projector)
    return PixelEncoder(model, gates).to(inputs.device).eval()
