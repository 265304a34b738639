"""Supervised contrastive loss: the views of all samples of a class are each other's positives.

Source: Khosla et al., "Supervised Contrastive Learning" (2020), Eq. 2 (``L_out``): the mean over a
row's positives is outside of the logarithm, and all positives stay in the denominator. With the
group mask of MCL's Eq. 3 the row meets samples of its own group alone. A sample that is repeated in
a batch is met once, as in the other losses: only its own pair is a positive.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from mclclip.objectives.base import Reads
from mclclip.objectives.contrast import TILE, Between, Contrast, Contrasted, ContrastOptions
from mclclip.objectives.row_losses import Pairs, count_negatives, row_losses, sum_negatives
from mclclip.objectives.temperature import AnyTemperature, Temperature
from mclclip.options import STRICT
from mclclip.ranks import collectives


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """The supervised contrastive loss with MCL's mask; captions are not read."""

    kind: Literal["supcon"] = "supcon"
    """Which objective."""
    temperature: AnyTemperature = 0.1
    """As for other contrastive losses."""
    attribute: str | None = None
    """Attribute of the samples that is their class; null: their cluster at the stage before."""
    groups: bool = True
    """Compare only within groups of samples with one pseudo label, as MCL does. Where the classes
    are the clusters that made the groups, a group has one class and no negatives: then false."""
    num_views: Literal[1, 2] = 2  # type: ignore[misc]
    """Views of every image. With one, rows that meet nobody of their class are left out."""

    between: ClassVar[Between] = "views"

    @property
    def controls(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of groups, where there are groups."""
        return ContrastOptions.controls if self.groups else ()

    @property
    def reads(self) -> Reads:
        """Groups, and the attribute or the nearest cluster."""
        clusters = 1 if self.attribute is None else 0
        return Reads(groups=self.groups, clusters=clusters, attribute=self.attribute)

    def objective(self, temperature: Temperature) -> Contrast:
        """The loss, with its temperature."""
        return SupervisedContrast(temperature, self.num_views)


class SupervisedContrast(Contrast):
    """The mean over a row's positives of their cross-entropy among all that the row meets.

    Beside the parts of ``Contrast``: ``rows_without_positives``, samples of the global batch that
    are left out of the mean because no other sample of their group has their class. With two views
    there are none.
    """

    reads_classes = True

    def __init__(
        self, temperature: Temperature | None = None, num_views: int = 2, *, tile: int = TILE
    ) -> None:
        super().__init__("views", temperature, tile=tile)
        self.names = self.names[:num_views]

    def rows(self, contrasted: Contrasted) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of every row; with one view 0, and more for the others, where it is left out."""
        c = contrasted
        same = _same_class(c)
        count = count_negatives(same, c.tile).to(c.queries.dtype)
        others = sum_negatives(c.keys, same, c.tile)
        if len(self.names) == 2:
            losses, alone = row_losses(c.queries, c.keys, c.pairs, c.tile)
            own = c.pairs.own(c.keys)
            mean = (own + others) / (count + 1.0)[:, None]
            losses = losses + (c.queries * (own - mean)).sum(dim=1)
            left_out = torch.zeros_like(alone)
        else:
            left_out, (log_sums,) = count == 0, c.log_sums(1.0)
            alone = log_sums == float("-inf")
            mean = others / count.clamp_min(1.0)[:, None]
            losses = torch.where(left_out, 0.0, log_sums - (c.queries * mean).sum(dim=1))
            num_rows = len(count) * collectives.world_size()
            kept = num_rows - collectives.all_reduce_sum(left_out.sum())
            # The mean over all rows divides by their number again.
            losses = losses * (num_rows / kept.clamp_min(1).to(losses.dtype))
        return losses, {"rows_without_negatives": alone, "rows_without_positives": left_out}


def _same_class(contrasted: Contrasted) -> Pairs:
    """The pairs whose "negatives" are the row's positives but for its own pair."""
    assert contrasted.classes is not None
    classes, all_classes = contrasted.classes
    num, pairs = all_classes.max() + 1, contrasted.pairs
    return Pairs(
        pairs.groups * num + classes,
        pairs.sample_id,
        pairs.all_groups * num + all_classes,
        pairs.all_sample_ids,
        pairs.first,
    )
