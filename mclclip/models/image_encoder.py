"""An image tower alone, trained with or without a projector; it has no texts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mclclip.models import towers, weights
from mclclip.models.image_model import ImageModel, Transform, unit

NO_TEXT = (
    "the model is an image encoder without a text tower: take a CLIP model for what needs texts, "
    "such as zero-shot classification and retrieval"
)


class ImageEncoder(ImageModel):
    """An image tower, optionally with a projector that is trained and then discarded.

    `tower` is a module whose `visual` is an image tower, of open_clip or a backbone. The objective
    gets the projector's output; `encode_image`, evaluation and exports use the tower alone.
    """

    part = "tower"
    reads_texts = False
    tower: Any

    def __init__(
        self,
        tower: nn.Module,
        config: Mapping[str, Any],
        layout: towers.ImageLayout | str,
        transforms: tuple[Transform, Transform],
        projector: Sequence[int] = (),
    ) -> None:
        super().__init__(tower, config, layout, transforms)
        self.projector = projector_of(self.embed_dim, projector)
        self.feature_dim = projector[-1] if projector else self.embed_dim

    def forward(
        self,
        image: Tensor | None = None,
        text: Tensor | None = None,
        text_features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Images [b, C, H, W] -> `image_features` [b, F] for an objective, unit length.

        F is the projector's last width, or D without one. Raises ValueError for texts.
        """
        if text is not None or text_features is not None:
            raise ValueError(NO_TEXT)
        if image is None:
            return {}
        return {"image_features": unit(self.projector(self.encode_image(image)))}

    def encode_text(self, tokens: Tensor, normalize: bool = False) -> Tensor:
        """Raises ValueError: there is no text tower."""
        raise ValueError(NO_TEXT)

    def tokenizer(self, texts: Sequence[str]) -> Tensor:
        """Raises ValueError: there is no text tower."""
        raise ValueError(NO_TEXT)

    def logit_scale(self) -> Tensor:
        """Always 1: an image encoder has no logits."""
        return torch.ones(())

    @property
    def has_logit_bias(self) -> bool:
        """False: there are no logits."""
        return False

    @property
    def upper_bounds(self) -> dict[str, float]:
        """No parameter has an upper bound."""
        return {}

    def lock(
        self,
        image_blocks: int | Literal["all"],
        image_norm: bool,
        image_projection: bool,
        text: bool = False,
        logit_scale: bool = False,
        text_blocks: int | Literal["all"] = "all",
        logit_bias: bool = False,
    ) -> list[str]:
        """Makes exactly the named parts and the projector trainable; returns the trainable names.

        See `ClipModel.lock`; the arguments on texts and logits have no effect here.
        """
        self._lock_image(image_blocks, image_norm, image_projection)
        return self.update_frozen()

    def save(self, directory: Path, base_digest: str | None = None) -> None:
        """Writes the tower as `config.json` and `model.safetensors`, without the projector.

        `base_digest` names the base it was fine-tuned from; None: it is a base itself.
        """
        tensors = {name: tensor.detach() for name, tensor in self.tower.state_dict().items()}
        base = {"base_digest": base_digest or weights.digest_tensors(tensors)}
        weights.write_model(Path(directory), self.config | base, tensors)


def projector_of(dim: int, widths: Sequence[int]) -> nn.Module:
    """Linear layers of these widths with a batch norm and a ReLU between them.

    With two layers it is the projector of SimCLR's code; section 4.2 of the paper (Chen et al.,
    2020) has no batch norm. Without widths it is the identity.
    """
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise([dim, *widths])):
        if number:
            layers += [nn.BatchNorm1d(before), nn.ReLU()]
        layers.append(nn.Linear(before, after))
    return nn.Sequential(*layers)
