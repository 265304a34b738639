"""IFM, implicit feature modification: InfoNCE, and InfoNCE with every pair made harder.

An adversary that may move features by epsilon moves a row's positive away and its negatives near.
No search is needed for that: the positive's cosine falls by epsilon, and the negatives' rise by
epsilon. With s the logit scale, c_p the cosine of the own pair and c_pq those of the negatives,

    L_eps = -log( exp(s (c_p - eps)) / (exp(s (c_p - eps)) + sum over q of exp(s (c_pq + eps))) )

A common shift does not change the loss, so L_eps is InfoNCE with the positive lowered by 2 eps.
The loss of a row is (L + alpha L_eps) / 2, as in the paper, where L is plain InfoNCE; ``term:
modified`` takes L_eps alone.

Source: Robinson et al., "Can contrastive learning avoid shortcut solutions?" (NeurIPS 2021),
arXiv:2106.11230, Eq. 2.

Inputs: those of ``info_nce`` (``between: captions``) or of ``nt_xent`` (``between: views``).

Use it where a model learns the easy feature and no other, such as the colour and not the shape. The
paper tries an epsilon of 0.05, 0.1 and 0.2; with 0 the loss is InfoNCE.

Relations: both halves are ``info_nce`` or ``nt_xent`` of the same log-sum-exp of the negatives, so
the second one costs nearly nothing. ``hcl`` makes negatives harder too, by weights instead of a
shift. ``moco`` has the same modification as its option ``epsilon``.

Example: ``train.objective={kind: ifm, epsilon: 0.05}``.

Its slow reference is ``modified`` in tests/objective_loops.py.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat
from torch import Tensor

from mclclip.objectives.base import ObjectiveInputs
from mclclip.objectives.contrast import (
    Between,
    Contrast,
    ContrastOptions,
    Direction,
    WhichDirections,
)
from mclclip.objectives.row_losses import log_sums, softplus_of_difference
from mclclip.util.options import STRICT

Term = Literal["both", "modified"]


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """InfoNCE beside InfoNCE of implicitly modified features, with MCL's mask."""

    kind: Literal["ifm"] = "ifm"
    """Which objective."""
    between: Between = "captions"
    """``captions``: images against captions; ``views``: two views of every image."""
    epsilon: NonNegativeFloat = 0.1
    """How far the cosines of pairs are moved against the loss."""
    alpha: NonNegativeFloat = 1.0
    """Weight of the modified loss beside the plain one."""
    term: Term = "both"
    """``both``: half of each; ``modified``: the modified loss alone, such as a term beside another
    objective."""
    direction: WhichDirections = "both"
    """Between captions: ``images`` look for captions, ``texts`` look for images, or ``both``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.between == "views" and self.direction != "both":
            raise ValueError(
                f"direction={self.direction} is for between=captions: views have both directions"
            )

    def build(self, inputs: ObjectiveInputs) -> Contrast:
        """Returns the loss; a trained temperature is its only parameter."""
        return ImplicitModification(self, **self.how(inputs))


class ImplicitModification(Contrast):
    """The weighted sum of the plain and the modified loss, over all ranks."""

    def __init__(self, options: Options, **how: Any) -> None:
        super().__init__(options.between, which=options.direction, **how)
        self.epsilon = options.epsilon
        self.weights = (0.0, 1.0) if options.term == "modified" else (0.5, options.alpha / 2.0)

    def loss_per_query(self, direction: Direction) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns (L + alpha L_eps) / 2, or L_eps, of every query."""
        queries, keys, pairs = direction.queries, direction.keys, direction.pairs
        (negatives,) = log_sums(queries, keys, pairs)
        positives = pairs.positive_logits(queries, keys)
        shift = self.epsilon * direction.scale
        losses = modified_losses(negatives, positives, shift, self.weights)
        return losses, {"rows_without_negatives": negatives == float("-inf")}


def modified_losses(
    negatives: Tensor, positives: Tensor, shift: Tensor | float, weights: tuple[float, float]
) -> Tensor:
    """Returns the weighted sum of the plain and the modified loss of rows, [b].

    negatives  [b], the log-sum-exp of each row's negatives
    positives  [b], the logit of each row's own pair
    shift      epsilon times the logit scale
    weights    of the plain and of the modified loss, such as (0.5, 0.5)
    """
    plain, modified = weights
    losses = modified * softplus_of_difference(negatives, positives - 2.0 * shift)
    return losses + plain * softplus_of_difference(negatives, positives) if plain else losses
