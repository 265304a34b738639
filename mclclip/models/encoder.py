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
    """An image tower and a text tower; dot products of their features are the similarities.

    An encoder without a text tower raises ValueError for texts.

    Inputs are already transformed (`preprocess_val`, `tokenizer`); they may be on any device.
    Outputs have unit length in fp32, no graph, and are on the encoder's device.
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
        """Image -> [C, H, W]: the model's validation transform (open_clip's, or a backbone's)."""
        ...

    def encode_image(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> unit [B, E]."""
        ...

    def encode_text(self, tokens: Tensor) -> Tensor:
        """[B, context] int64 -> unit [B, E]."""
        ...


class SingleEncoder(nn.Module):
    """One model as an `Encoder`. The model itself is frozen and put into eval mode."""

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
        """[B, 3, H, W] -> unit [B, width], features before the projection.

        Raises ValueError where the attention pool is the projection, as in open_clip's ResNets.
        """
        return unit(self.model.encode_tail(images.to(self.device), 0, project=False))

    @torch.no_grad()
    def encode_text(self, tokens: Tensor) -> Tensor:
        """[B, context] int64 -> unit [B, D]."""
        return self.model.encode_text(tokens.to(self.device), normalize=True)
