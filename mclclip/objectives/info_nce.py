"""InfoNCE over image and text with the group mask of MCL's Eq. 3, over all ranks.

References: CLIP (Radford et al., 2021) for the symmetric loss, MCL (Eq. 3) for the indicator in the
denominator. The mask makes pure batches, mixed batches and repeated samples all exact: a pair is a
negative where its group is the row's and its sample is not.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from mclclip.objectives.contrast import Between, Contrast, Contrasted, ContrastOptions
from mclclip.objectives.row_losses import row_losses
from mclclip.objectives.temperature import Temperature
from mclclip.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """CLIP's contrastive loss with MCL's mask: images against captions."""

    kind: Literal["info_nce"] = "info_nce"
    """Which objective."""

    between: ClassVar[Between] = "captions"

    def objective(self, temperature: Temperature) -> Contrast:
        """The loss, with its temperature."""
        return InfoNCE("captions", temperature)


class InfoNCE(Contrast):
    """The contrastive loss in which only samples of one group are each other's negatives.

    With the model's temperature, the default, it has no parameters of its own.
    """

    def rows(self, contrasted: Contrasted) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of the own pair among its row's kept pairs."""
        c = contrasted
        losses, alone = row_losses(c.queries, c.keys, c.pairs, c.tile)
        return losses, {"rows_without_negatives": alone}
