"""SupCon, supervised contrast: all samples of a class are each other's positives.

Let P_p be the other rows of p's class, A_p all rows that p is compared with (P_p among them), z
unit features, and tau the temperature. The loss of row p is

    L_p = mean over j in P_p of
            -log( exp(z_p . z_j / tau) / sum over q in A_p of exp(z_p . z_q / tau) )

The mean over positives is outside of the logarithm, and all positives stay in the denominator. With
MCL's group mask a row is compared with samples of its own group only. If a sample is repeated in a
batch, its copies are left out of each other's rows, as in the other losses.

Source: Khosla et al., "Supervised Contrastive Learning" (NeurIPS 2020), arXiv:2004.11362, Eq. 2
(``L_out``).

Inputs: ``image_features`` and, with two views, ``image_features_1`` [b, D] of this rank, unit
length; ``group_ids`` [b, 1] and ``sample_id`` [b]; ``classes`` [b, l], of which the first column is
read. Captions are not read.

Use it where images have classes: an ``attribute`` of the samples, or their clusters at the stage
before. If these clusters have made the groups too, a group has one class and no negatives: set
``groups: false``.

Relations: with a class for each sample it is ``nt_xent``. ``simlap`` takes samples of two classes
for positives, in dimensions that the two share. ``mlcd`` compares images with a learned center of
each class instead of with its samples.

Example: ``train.objective={kind: supcon, attribute: shape, temperature: 0.1}``.

Its slow reference is ``supervised`` in tests/objective_loops.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from mclclip.objectives.base import BatchFields, ObjectiveInputs, Reads
from mclclip.objectives.contrast import (
    AnyTemperature,
    Between,
    Contrast,
    ContrastOptions,
    Direction,
)
from mclclip.objectives.pairs import Pairs
from mclclip.objectives.row_losses import count_columns, log_sums, row_losses, sum_columns
from mclclip.ranks import collectives
from mclclip.ranks.process_group import to_device
from mclclip.util.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """The supervised contrastive loss with MCL's mask; captions are not read."""

    kind: Literal["supcon"] = "supcon"
    """Which objective."""
    between: ClassVar[Between] = "views"
    temperature: AnyTemperature = 0.1
    attribute: str | None = None
    """Attribute of the samples that is their class, such as ``shape``; null: their cluster at the
    stage before."""
    groups: bool = True
    """Compare only samples with the same pseudo label, as MCL does. Set false if the classes are
    the clusters that made these groups: a group then has one class and no negatives."""
    num_views: Literal[1, 2] = 2
    """Views of every image. With one, samples whose class no other sample of the batch has are left
    out."""

    @property
    def reads(self) -> Reads:
        """Reads groups, and the attribute or the nearest cluster of each sample."""
        clusters = 1 if self.attribute is None else 0
        return replace(
            super().reads,
            num_views=self.num_views,
            groups=self.groups,
            clusters=clusters,
            attribute=self.attribute,
        )

    def build(self, inputs: ObjectiveInputs) -> Contrast:
        """Returns the loss; a trained temperature is its only parameter."""
        return SupervisedContrast(self.num_views, **self.how(inputs))


class SupervisedContrast(Contrast):
    """The supervised contrastive loss over all ranks, of one or two views of every image.

    Returns beside the parts of ``Contrast``: ``rows_without_positives``, the number of samples of
    the global batch that are left out of the mean because no other sample of their group has their
    class. With two views there are none, since a sample's other view is a positive.
    """

    def __init__(self, num_views: int = 2, **how: Any) -> None:
        super().__init__("views", **how)
        self.names = self.names[:num_views]

    def pairs(self, batch: BatchFields) -> Pairs:
        """Returns the pairs of ``Contrast`` with the classes of rows and columns."""
        assert batch.classes is not None
        classes = to_device(batch.classes[:, 0], batch.sample_id.device)
        return replace(
            super().pairs(batch), classes=classes, all_classes=collectives.gather(classes)
        )

    def loss_per_query(self, direction: Direction) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns L_p of every query. With one view, a query without positives has 0, and the
        others have more, so that the mean over all is the mean over the others."""
        queries, keys, pairs = direction.queries, direction.keys, direction.pairs
        same_class = pairs.positives_of_class()
        count = count_columns(same_class).to(queries.dtype)
        positive_sum = sum_columns(keys, same_class)
        if len(self.names) == 2:
            losses, has_no_negatives = row_losses(queries, keys, pairs)
            own_keys = pairs.positive_keys(keys)
            mean = (own_keys + positive_sum) / (count + 1.0)[:, None]
            losses = losses + (queries * (own_keys - mean)).sum(dim=1)
            left_out = torch.zeros_like(has_no_negatives)
        else:
            left_out, (negatives,) = count == 0, log_sums(queries, keys, pairs)
            has_no_negatives = negatives == float("-inf")
            mean = positive_sum / count.clamp_min(1.0)[:, None]
            losses = torch.where(left_out, 0.0, negatives - (queries * mean).sum(dim=1))
            num_rows = len(count) * collectives.world_size()
            num_counted = num_rows - collectives.all_reduce_sum(left_out.sum())
            # The caller's mean over all queries divides by their number again.
            losses = losses * (num_rows / num_counted.clamp_min(1).to(losses.dtype))
        counted = {"rows_without_negatives": has_no_negatives, "rows_without_positives": left_out}
        return losses, counted
