"""Contrastive learning with hard negatives, and with a correction for false ones.

Source: Robinson et al., "Contrastive Learning with Hard Negative Samples" (2021), as in their code
(their pseudo-code has slips). With e = exp(logit), e+ that of the own pair, N the number of a row's
negatives and averages over them, hard negatives weigh e^beta / mean(e^beta):

    N_g = max((sum of weighted e - tau_plus N e+) / (1 - tau_plus), N exp(-scale))
    loss = -log(e+ / (e+ + N_g))

N counts the negatives that the group mask keeps; without a mask between views it is 2B - 2. The
weighted sum is N times the ratio of the sums of e^(1 + beta) and e^beta, whose log-sum-exps are
computed together in tiles: memory is linear in the batch.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat
from torch import Tensor

from mclclip.objectives.contrast import (
    TILE,
    Between,
    Contrast,
    Contrasted,
    ContrastOptions,
    excess,
)
from mclclip.objectives.row_losses import count_negatives
from mclclip.objectives.temperature import Temperature
from mclclip.options import STRICT, BelowOne


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """InfoNCE in which near negatives weigh more, with MCL's mask."""

    kind: Literal["hcl"] = "hcl"
    """Which objective."""
    between: Between = "captions"  # type: ignore[misc]
    """``captions``: images against captions; ``views``: two views of every image."""
    beta: NonNegativeFloat = 1.0
    """How much more near negatives weigh; 0: all weigh the same."""
    tau_plus: BelowOne = 0.1
    """Share of the negatives that are taken to be of the row's own class."""

    def objective(self, temperature: Temperature) -> Contrast:
        """The loss, with its temperature."""
        return HardNegatives(self.between, temperature, self.beta, self.tau_plus)


class HardNegatives(Contrast):
    """InfoNCE with weighted negatives; see the module's docstring."""

    def __init__(
        self,
        between: Between,
        temperature: Temperature | None = None,
        beta: float = 1.0,
        tau_plus: float = 0.1,
        *,
        tile: int = TILE,
    ) -> None:
        super().__init__(between, temperature, tile=tile)
        self.beta, self.tau_plus = beta, tau_plus

    def rows(self, contrasted: Contrasted) -> tuple[Tensor, dict[str, Tensor]]:
        """-log(e+ / (e+ + N_g)) of every row; 0 where it has no negatives."""
        count = count_negatives(contrasted.pairs, contrasted.tile)
        alone, positives = count == 0, contrasted.positives()
        log_count = count.clamp_min(1).to(positives.dtype).log()
        # Logs of the sums of e^beta and of e^(1 + beta) over each row's negatives.
        if self.beta == 0.0:
            sums = (log_count, *contrasted.log_sums(1.0))
        else:
            sums = contrasted.log_sums(self.beta, 1.0 + self.beta)
        weights, weighted = (torch.where(alone, 0.0, each) for each in sums)
        negatives = self._corrected(log_count + weighted - weights, log_count + positives)
        negatives = torch.maximum(negatives, log_count - contrasted.scale)
        losses = excess(negatives, positives)
        return torch.where(alone, torch.zeros_like(losses), losses), {
            "rows_without_negatives": alone
        }

    def _corrected(self, weighted: Tensor, positives: Tensor) -> Tensor:
        """log((R - tau_plus P) / (1 - tau_plus)) of R and P given by their logs, [b].

        -inf, with gradient 0, where the difference is not positive.
        """
        if self.tau_plus == 0.0:
            return weighted
        share = positives + math.log(self.tau_plus) - weighted
        left = torch.where(share < 0.0, share, -1.0)  # -1: any for which the next line is finite
        corrected = weighted + (-torch.expm1(left)).log() - math.log1p(-self.tau_plus)
        return torch.where(share < 0.0, corrected, float("-inf"))
