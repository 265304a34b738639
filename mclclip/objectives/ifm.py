"""Implicit feature modification: the positive pair moved apart and the negatives moved nearer.

Source: Robinson et al., "Can contrastive learning avoid shortcut solutions?" (2021), Eq. 2: every
positive cosine is lowered and every negative one raised by epsilon. A common shift does not change
the loss, so that is InfoNCE with the positive lowered by 2 epsilon. The paper averages it with the
plain loss as (L + alpha L_eps) / 2, which is a mean at alpha = 1 alone; ``average=mean`` divides by
1 + alpha. Both losses come from one log-sum-exp of the negatives.
"""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat
from torch import Tensor

from mclclip.objectives.contrast import (
    TILE,
    Between,
    Contrast,
    Contrasted,
    ContrastOptions,
    Direction,
    excess,
)
from mclclip.objectives.temperature import Temperature
from mclclip.options import STRICT

Average = Literal["paper", "mean"]
Term = Literal["both", "modified"]


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """InfoNCE beside InfoNCE of implicitly modified features, with MCL's mask."""

    kind: Literal["ifm"] = "ifm"
    """Which objective."""
    between: Between = "captions"  # type: ignore[misc]
    """``captions``: images against captions; ``views``: two views of every image."""
    epsilon: NonNegativeFloat = 0.1
    """How far features are modified, in units of the cosine."""
    alpha: NonNegativeFloat = 1.0
    """Weight of the modified loss beside the plain one."""
    average: Average = "paper"
    """Divisor of the two: 2 (``paper``), or 1 + ``alpha`` (``mean``)."""
    term: Term = "both"
    """``modified``: the modified loss alone, such as a term beside another objective."""
    direction: Direction = "both"
    """Between captions: ``images`` against captions alone, ``texts`` against images, or both."""

    def __post_init__(self) -> None:
        if self.between == "views" and self.direction != "both":
            raise ValueError(
                f"direction={self.direction} is for between=captions: views have both directions"
            )

    def objective(self, temperature: Temperature) -> Contrast:
        """The loss, with its temperature."""
        weights = weights_of(self.term, self.alpha, self.average)
        return ImplicitModification(
            self.between, temperature, self.epsilon, weights, direction=self.direction
        )


class ImplicitModification(Contrast):
    """The sum of the plain and the modified loss with ``weights``; the latter's ``epsilon``."""

    def __init__(
        self,
        between: Between,
        temperature: Temperature | None = None,
        epsilon: float = 0.1,
        weights: tuple[float, float] = (0.5, 0.5),
        *,
        direction: Direction = "both",
        tile: int = TILE,
    ) -> None:
        super().__init__(between, temperature, direction=direction, tile=tile)
        self.epsilon, self.weights = epsilon, weights

    def rows(self, contrasted: Contrasted) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum of the plain and the modified loss of every row."""
        (negatives,), positives = contrasted.log_sums(1.0), contrasted.positives()
        shift = self.epsilon * contrasted.scale
        losses = modified_losses(negatives, positives, shift, self.weights)
        return losses, {"rows_without_negatives": negatives == float("-inf")}


def weights_of(term: Term, alpha: float = 1.0, average: Average = "paper") -> tuple[float, float]:
    """Weights of the plain and of the modified loss of a row."""
    if term == "modified":
        return 0.0, 1.0
    factor = 2.0 if average == "paper" else 1.0 + alpha
    return 1.0 / factor, alpha / factor


def modified_losses(
    negatives: Tensor, positives: Tensor, shift: Tensor | float, weights: tuple[float, float]
) -> Tensor:
    """The sum of the plain and the modified loss of rows, [b], with their ``weights``.

    ``negatives`` [b] are the log-sum-exps of the rows' negatives, ``positives`` [b] the logits of
    their own pairs; ``shift`` is epsilon in units of the logits.
    """
    plain, modified = weights
    losses = modified * excess(negatives, positives - 2.0 * shift)
    return losses + plain * excess(negatives, positives) if plain else losses
