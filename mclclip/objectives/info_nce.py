"""InfoNCE over image and text with the group mask of MCL's Eq. 3, over all ranks.

References: CLIP (Radford et al., 2021) for the symmetric loss, MCL (Eq. 3) for the indicator in the
denominator. The mask makes pure batches, mixed batches and repeated samples all exact: a pair is a
negative where its group is the row's and its sample is not.
"""

import torch
from torch import Tensor, nn

from mclclip.parallel import collectives


class InfoNCE(nn.Module):
    """The contrastive loss of CLIP in which only samples of one group are each other's negatives.

    It has no parameters of its own: the logit scale belongs to the model.
    """

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        labels: Tensor,
        sample_id: Tensor,
    ) -> dict[str, Tensor]:
        """Computes this rank's rows of the loss over the global batch.

        Args:
            image_features, text_features: [b, D], unit length, of this rank; row i of both is one
                pair. All ranks have the same b. Other ranks' features are gathered with gradient.
            logit_scale: 0-dimensional, already exponentiated.
            labels: [b, 1] int64, group of each sample at the prefix where the mask compares.
            sample_id: [b] int64; equal ids are one sample, never each other's negatives.

        Returns:
            `loss`: mean over this rank's rows and both directions, 0-dimensional. Its mean over the
            ranks is the global loss, and averaging gradients over ranks, as DDP does, gives the
            global gradient. `rows_without_negatives`: samples of the global batch, over all ranks,
            that have no negative and therefore loss 0 and gradient 0.

        The arithmetic is fp32 (float64 for float64 features), under autocast too. Raises ValueError
        for shapes that do not fit.
        """
        _check(image_features, text_features, labels, sample_id)
        with torch.autocast(image_features.device.type, enabled=False):
            image, text = _wide(image_features), _wide(text_features)
            keep = _keep(labels[:, 0], sample_id)
            scale = logit_scale.to(image.dtype)
            by_image = _rows(scale * image @ collectives.gather_with_grad(text).T, keep)
            by_text = _rows(scale * text @ collectives.gather_with_grad(image).T, keep)
        # The row itself is always kept.
        alone = (keep.sum(dim=1) == 1).sum()
        return {
            "loss": (by_image.mean() + by_text.mean()) / 2,
            "rows_without_negatives": collectives.all_reduce_sum(alone),
        }


def _check(image: Tensor, text: Tensor, labels: Tensor, sample_id: Tensor) -> None:
    rows = image.shape[0]
    if image.ndim != 2 or image.shape != text.shape:
        raise ValueError(
            f"image_features {tuple(image.shape)} and text_features {tuple(text.shape)} must both "
            "be [b, D]"
        )
    if tuple(labels.shape) != (rows, 1) or tuple(sample_id.shape) != (rows,):
        raise ValueError(
            f"labels {tuple(labels.shape)} and sample_id {tuple(sample_id.shape)} must be "
            f"[{rows}, 1] and [{rows}]"
        )


def _wide(features: Tensor) -> Tensor:
    return features if features.dtype == torch.float64 else features.float()


def _positions(rows: int, device: torch.device) -> Tensor:
    """[b]: where this rank's rows stand in the global batch."""
    return torch.arange(rows, device=device) + collectives.rank() * rows


def _keep(groups: Tensor, sample_id: Tensor) -> Tensor:
    """[b], [b] -> bool [b, B]: the own pair, and samples of the row's group that are not the row's.

    It is symmetric over the global batch, so one mask serves both directions.
    """
    all_groups, all_ids = collectives.gather(groups), collectives.gather(sample_id)
    keep = (groups[:, None] == all_groups[None]) & (sample_id[:, None] != all_ids[None])
    keep[
        torch.arange(len(groups), device=groups.device), _positions(len(groups), groups.device)
    ] = True
    return keep


def _rows(logits: Tensor, keep: Tensor) -> Tensor:
    """[b, B] logits -> [b] losses: -L_pp + log of the sum over kept columns of exp L_pq."""
    own = _positions(len(logits), logits.device)
    positive = logits.gather(1, own[:, None])[:, 0]
    return logits.masked_fill(~keep, float("-inf")).logsumexp(dim=1) - positive
