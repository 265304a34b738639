"""InfoNCE over image and text with the group mask of MCL's Eq. 3, over all ranks.

References: CLIP (Radford et al., 2021) for the symmetric loss, MCL (Eq. 3) for the indicator in the
denominator. The mask makes pure batches, mixed batches and repeated samples all exact: a pair is a
negative where its group is the row's and its sample is not.
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from mclclip.objectives.base import Cost, Objective, ObjectiveOptions, Reads, Setting, Sizes
from mclclip.objectives.row_losses import Pairs, row_losses
from mclclip.options import STRICT
from mclclip.ranks import collectives

_TILE = 2048


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """CLIP's contrastive loss with MCL's mask: images against captions."""

    kind: Literal["info_nce"] = "info_nce"
    """Which objective."""

    controls: ClassVar[tuple[str, ...]] = ("ungrouped", "random_groups")

    @property
    def reads(self) -> Reads:
        """Captions, the logit scale, and groups of samples with one pseudo label."""
        return Reads(captions=True, logit_scale=True, groups=True)

    def build(self, setting: Setting) -> Objective:
        """The loss; it has no parameters."""
        return InfoNCE()

    def cost(self, sizes: Sizes) -> Cost:
        """Memory that the loss holds between the features and their gradients, both directions."""
        local, everywhere = sizes.local_batch, sizes.local_batch * sizes.num_ranks

        def run() -> None:
            losses = []
            for _ in range(2):
                rows, columns = (
                    torch.empty(n, sizes.dim, dtype=sizes.dtype, requires_grad=True)
                    for n in (local, everywhere)
                )
                own, every = (torch.zeros(len(x), dtype=torch.int64) for x in (rows, columns))
                pairs = Pairs(own, own, every, every, first=0)
                losses.append(row_losses(rows * 1.0, columns, pairs, _TILE)[0].mean())
            torch.autograd.backward(torch.stack(losses).sum())

        # The parts of a gather are there for a moment beside what they are joined to.
        gathered = everywhere * sizes.dim * sizes.dtype.itemsize if sizes.num_ranks > 1 else 0
        return Cost(step=sizes.peak_bytes(run) + gathered)


class InfoNCE(Objective):
    """The contrastive loss of CLIP in which only samples of one group are each other's negatives.

    It has no parameters of its own: the logit scale belongs to the model. The similarity matrix is
    computed in tiles of at most ``tile`` rows and columns, so that memory is linear in the batch;
    the result does not depend on ``tile``. Raises ValueError for a tile below 1.
    """

    def __init__(self, tile: int = _TILE) -> None:
        super().__init__()
        if tile < 1:
            raise ValueError(f"tile is {tile}: wanted at least 1 row and column of the matrix")
        self.tile = tile

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        labels: Tensor,
        sample_id: Tensor,
        **unused: Any,
    ) -> dict[str, Tensor]:
        """Computes this rank's rows of the loss over the global batch.

        Args:
            image_features, text_features: [b, D], unit length, of this rank; row i of both is one
                pair. All ranks have the same b. Other ranks' features are gathered with gradient.
            logit_scale: 0-dimensional, already exponentiated.
            labels: [b, 1] int64, group of each sample at the prefix where the mask compares.
            sample_id: [b] int64; equal ids are one sample, never each other's negatives.
            unused: what other objectives look at.

        Returns:
            `loss`: mean over this rank's rows and both directions, 0-dimensional. Its mean over the
            ranks is the global loss, and averaging gradients over ranks, as DDP does, gives the
            global gradient. `rows_without_negatives`: samples of the global batch, over all ranks,
            that have no negative and therefore loss 0 and gradient 0. `logit_scale`: as given.

        The arithmetic is fp32 (float64 for float64 features), under autocast too. Raises ValueError
        for shapes that do not fit.
        """
        _check(image_features, text_features, labels, sample_id)
        with torch.autocast(image_features.device.type, enabled=False):
            image, text = _wide(image_features), _wide(text_features)
            pairs = _pairs(labels[:, 0], sample_id)
            scale = logit_scale.to(image.dtype)
            by_image, alone = row_losses(
                scale * image, collectives.gather_with_grad(text), pairs, self.tile
            )
            by_text, _ = row_losses(
                scale * text, collectives.gather_with_grad(image), pairs, self.tile
            )
        return {
            "loss": (by_image.mean() + by_text.mean()) / 2,
            "rows_without_negatives": collectives.all_reduce_sum(alone.sum()),
            "logit_scale": logit_scale,
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


def _pairs(groups: Tensor, sample_id: Tensor) -> Pairs:
    """[b], [b] of this rank -> its rows among the global batch, for both directions."""
    every = collectives.gather(groups), collectives.gather(sample_id)
    return Pairs(groups, sample_id, *every, first=collectives.rank() * len(groups))
