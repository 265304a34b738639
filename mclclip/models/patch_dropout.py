"""Patch dropout: image towers see a random part of each picture's patches while they are trained.

Source: Li et al., "Scaling Language-Image Pre-training via Masking" (FLIP, 2022), section 3. The
class token and the positions of the patches that stay are kept, as in open_clip's PatchDropout,
whose draws these are on a CPU; its indices lie in main memory, and a GPU would wait for them at
every step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mclclip.models.model import Model


class PatchDropout(nn.Module):
    """Tokens [b, 1 + n, D] -> [b, 1 + k, D], k = max(1, int(n (1 - share))); as they are in eval.

    The first token is the class token. Patches are drawn for each picture from torch's global
    generator of the device, which every training step seeds, and gradient caching replays.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def extra_repr(self) -> str:
        """The share, in the module's ``repr``."""
        return f"share={self.share}"

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens with their positions added -> those that are kept, in the order of their draws."""
        if not self.training:
            return tokens
        first, patches = tokens[:, :1], tokens[:, 1:]
        batch, num = patches.shape[:2]
        keys = torch.randn(batch, num, device=tokens.device)
        kept = keys.topk(max(1, int(num * (1 - self.share))), dim=1).indices
        rows = torch.arange(batch, device=tokens.device)[:, None]
        return torch.cat([first, patches[rows, kept]], dim=1)


def drop_patches(model: Model, share: float) -> None:
    """Has the image tower drop this share of the patches in training; 0 leaves it as it is.

    The module has no weights and is in no configuration, so exports know nothing of it. Call it
    after locks and adapters. Raises ValueError for a tower other than open_clip's own vision
    transformer, and where frozen blocks, which run as in evaluation, come before all trained ones.
    """
    if not share:
        return
    visual = model.visual
    if not hasattr(visual, "patch_dropout"):
        raise ValueError(
            f"patch_dropout is {share}, and the image tower is a {type(visual).__name__}: patches "
            "are dropped in open_clip's own vision transformers alone; leave it out"
        )
    if model.num_frozen_blocks:
        raise ValueError(
            f"patch_dropout is {share}, but the first {model.num_frozen_blocks} of "
            f"{model.num_blocks} blocks of the image tower are locked and see whole pictures: set "
            "lock.image_blocks=all, or leave patch_dropout out"
        )
    visual.patch_dropout = PatchDropout(share).train(visual.training)
