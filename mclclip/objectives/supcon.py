"""SupCon, supervised contrast: all samples of a class are each other's positives.

With P_p the other rows of p's class, A_p all rows that p meets (P_p among them), unit features z
and the temperature tau, the loss of row p is

    L_p = mean over j in P_p of
            -log( exp(z_p . z_j / tau) / sum over q in A_p of exp(z_p . z_q / tau) )

The mean over positives is outside of the logarithm, and all positives stay in the denominator. With
MCL's mask a row meets samples of its own group alone. A sample that is repeated in a batch is met
once, as in the other losses: only its own pair is a positive.

Source: Khosla et al., "Supervised Contrastive Learning" (2020), Eq. 2 (``L_out``).

Inputs: ``image_features`` and, with two views, ``image_features_1`` [b, D] of this rank, unit
length; ``labels`` [b, 1] and ``sample_id`` [b]; ``classes`` [b, l], of which the first counts.
Captions are not read.

Use it where images have classes, by an ``attribute`` or by the clusters of the stage before. Where
these clusters have made the groups too, a group has one class and no negatives: set
``groups: false``.

Relations: with classes of one sample it is ``nt_xent``. ``simlap`` takes samples of two classes for
positives, in dimensions that the two share; ``mlcd`` compares images with a learned center of each
class in the place of its samples.

Its slow reference is ``supervised`` in tests/objective_loops.py.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from mclclip.objectives.base import ObjectiveInputs, Reads
from mclclip.objectives.contrast import (
    AnyTemperature,
    Between,
    Contrast,
    ContrastOptions,
    Temperature,
)
from mclclip.objectives.row_losses import Pairs, count_columns, log_sums, row_losses, sum_columns
from mclclip.ranks import collectives
from mclclip.util.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """The supervised contrastive loss with MCL's mask; captions are not read."""

    kind: Literal["supcon"] = "supcon"
    """Which objective."""
    temperature: AnyTemperature = 0.1
    attribute: str | None = None
    """Attribute of the samples that is their class; null: their cluster at the stage before."""
    groups: bool = True
    """Compare only within groups of samples with one pseudo label, as MCL does. Where the classes
    are the clusters that made the groups, a group has one class and no negatives: then false."""
    num_views: Literal[1, 2] = 2
    """Views of every image. With one, rows that meet nobody of their class are left out."""

    between: ClassVar[Between] = "views"

    @property
    def reads(self) -> Reads:
        """Returns groups, and the attribute or the nearest cluster."""
        clusters = 1 if self.attribute is None else 0
        return Reads(
            views=self.num_views, groups=self.groups, clusters=clusters, attribute=self.attribute
        )

    def build(self, inputs: ObjectiveInputs) -> Contrast:
        """Returns the loss; a trained temperature is its only parameter."""
        return SupervisedContrast(self.new_temperature(inputs), self.num_views)


class SupervisedContrast(Contrast):
    """The supervised contrastive loss over all ranks, between two views of an image or of one.

    Beside the parts of ``Contrast``: ``rows_without_positives``, samples of the global batch that
    are left out of the mean because no other sample of their group has their class. With two views
    there are none.
    """

    reads_classes = True

    def __init__(self, temperature: Temperature | None = None, num_views: int = 2) -> None:
        super().__init__("views", temperature)
        self.names = self.names[:num_views]

    def rows(
        self, queries: Tensor, keys: Tensor, pairs: Pairs, scale: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of every row; with one view 0, and more for the others, where it is left out."""
        same = pairs.positives_of_class()
        count = count_columns(same).to(queries.dtype)
        others = sum_columns(keys, same)
        if len(self.names) == 2:
            losses, alone = row_losses(queries, keys, pairs)
            own_keys = pairs.positive_keys(keys)
            mean = (own_keys + others) / (count + 1.0)[:, None]
            losses = losses + (queries * (own_keys - mean)).sum(dim=1)
            left_out = torch.zeros_like(alone)
        else:
            left_out, (negatives,) = count == 0, log_sums(queries, keys, pairs)
            alone = negatives == float("-inf")
            mean = others / count.clamp_min(1.0)[:, None]
            losses = torch.where(left_out, 0.0, negatives - (queries * mean).sum(dim=1))
            num_rows = len(count) * collectives.world_size()
            num_counted = num_rows - collectives.all_reduce_sum(left_out.sum())
            # The mean over all rows divides by their number again.
            losses = losses * (num_rows / num_counted.clamp_min(1).to(losses.dtype))
        return losses, {"rows_without_negatives": alone, "rows_without_positives": left_out}
