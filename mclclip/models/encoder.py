"""Models at inference: images and texts to unit features."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mclclip.models.clip_model import ClipModel
from mclclip.models.image_encoder import ImageEncoder
from mclclip.models.image_model import unit


@runtime_checkable
class Encoder(Protocol):
    """An image and a text tower whose dot products are the model's similarities.

    One without a text tower raises ValueError where it is given texts.

    Inputs are already transformed (`preprocess_val`, `tokenizer`); they may lie on any device.
    Outputs have unit length in fp32, no graph, and lie on the encoder's device.
    """

    @property
    def embed_dim(self) -> int:
        """E, width of the features."""
        ...

    @property
    def logit_scale(self) -> float:
        """Multiplier of cosines in a softmax over texts (exponentiated)."""
        ...

    @property
    def tokenizer(self) -> Callable[..., Tensor]:
        """List of N strings -> int64 [N, context]."""
        ...

    @property
    def preprocess_val(self) -> Callable[[Any], Tensor]:
        """PIL image -> [3, H, W], open_clip's validation transform."""
        ...

    def encode_image(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> unit [B, E]."""
        ...

    def encode_text(self, tokens: Tensor) -> Tensor:
        """[B, context] int64 -> unit [B, E]."""
        ...


class SingleEncoder(nn.Module):
    """One model as an `Encoder`; it takes the model over: frozen and in eval mode."""

    def __init__(self, model: ClipModel | ImageEncoder) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.embed_dim = model.embed_dim
        self.logit_scale = model.logit_scale().item()
        self.tokenizer = model.tokenizer
        self.preprocess_val = model.preprocess_val
        self.eval()

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.parameters()).device

    @torch.no_grad()
    def encode_image(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> unit [B, D]."""
        return self.model.encode_image(images.to(self.device), normalize=True)

    @torch.no_grad()
    def encode_pooled(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> unit [B, width], before the projection; ValueError for a ResNet."""
        return unit(self.model.encode_tail(images.to(self.device), 0, project=False))

    @torch.no_grad()
    def encode_text(self, tokens: Tensor) -> Tensor:
        """[B, context] int64 -> unit [B, D]."""
        return self.model.encode_text(tokens.to(self.device), normalize=True)
