"""IFM, implicit feature modification: InfoNCE, and InfoNCE with every pair made harder.

An adversary that may move features by epsilon moves each positive away and each negative near. Of
cosines that needs no search: the positive's falls by epsilon and the negatives' rise by epsilon.
With s the logit scale, c_p the cosine of the own pair and c_pq those of the negatives,

    L_eps = -log( exp(s (c_p - eps)) / (exp(s (c_p - eps)) + sum over q of exp(s (c_pq + eps))) )

A common shift does not change the loss, so L_eps is InfoNCE with the positive lowered by 2 eps. The
loss of a row is (L + alpha L_eps) / 2, as the paper has it, which is a mean at alpha = 1 alone;
``average: mean`` divides by 1 + alpha, and ``term: modified`` is L_eps alone.

Source: Robinson et al., "Can contrastive learning avoid shortcut solutions?" (2021), Eq. 2.

Inputs: those of ``info_nce`` (``between: captions``) or of ``nt_xent`` (``between: views``).

Use it where a model learns the easy feature and no other, such as the colour and not the shape.
The paper tries an epsilon of 0.05, 0.1 and 0.2; with 0 the loss is InfoNCE.

Relations: both halves are ``info_nce`` or ``nt_xent`` of the same log-sum-exp of the negatives, so
the second one is nearly free. ``hcl`` makes negatives harder too, by weights and not by a shift.
``moco`` has the same modification as its option ``epsilon``.

Its slow reference is ``modified`` in tests/objective_loops.py.
"""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat
from torch import Tensor

from mclclip.objectives.base import ObjectiveInputs
from mclclip.objectives.contrast import (
    Between,
    Contrast,
    ContrastOptions,
    Direction,
    Temperature,
)
from mclclip.objectives.row_losses import Pairs, log_sums, softplus_of_difference
from mclclip.util.options import STRICT

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
    equal_captions: Literal["negatives", "masked"] = "negatives"  # type: ignore[misc]
    """Between captions, what rows with an equal caption (after open_clip's cleaning) or the same
    picture are to each other: ``negatives``, or ``masked``, left out of each other's negatives."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.between == "views" and self.direction != "both":
            raise ValueError(
                f"direction={self.direction} is for between=captions: views have both directions"
            )

    def build(self, inputs: ObjectiveInputs) -> Contrast:
        """Returns the loss; a trained temperature is its only parameter."""
        return ImplicitModification(self, self.new_temperature(inputs))


class ImplicitModification(Contrast):
    """The weighted sum of the plain and the modified loss, both of one log-sum-exp of the
    negatives."""

    def __init__(self, options: Options, temperature: Temperature | None = None) -> None:
        super().__init__(
            options.between,
            temperature,
            direction=options.direction,
            equal_captions=options.equal_captions,
        )
        self.epsilon = options.epsilon
        self.weights = weights_of(options.term, options.alpha, options.average)

    def rows(
        self, queries: Tensor, keys: Tensor, pairs: Pairs, scale: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum of the plain and the modified loss of every row."""
        (negatives,) = log_sums(queries, keys, pairs)
        positives = pairs.positive_logits(queries, keys)
        losses = modified_losses(negatives, positives, self.epsilon * scale, self.weights)
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
    losses = modified * softplus_of_difference(negatives, positives - 2.0 * shift)
    return losses + plain * softplus_of_difference(negatives, positives) if plain else losses
