"""HCL, hard negatives: InfoNCE in which near negatives weigh more, corrected for false ones.

With e+ = exp(s c_p) of the own pair, e_q = exp(s c_pq) of the N negatives of a row, and s the logit
scale, negative q has the weight w_q = e_q^beta / mean(e^beta). The sum of the negatives becomes

    N_g  = max( (sum over q of w_q e_q - tau_plus N e+) / (1 - tau_plus),  N exp(-s) )
    loss = -log( e+ / (e+ + N_g) )

``tau_plus`` is the share of negatives that are taken to be of the row's own class: as much of e+ is
taken out of the sum. N counts the negatives that the group mask keeps; between views without a mask
it is 2B - 2. The weighted sum is N times the ratio of the sums of e^(1 + beta) and e^beta, whose
log-sum-exps are computed together in tiles: memory is linear in the batch.

Source: Robinson et al., "Contrastive Learning with Hard Negative Samples" (2021), section 3, as in
the authors' code (their pseudo-code has slips).

Inputs: those of ``info_nce`` (``between: captions``) or of ``nt_xent`` (``between: views``).

Use it where most negatives are easy, as in small batches or without captions. The loss takes a
third more time than InfoNCE, which is little of a step. Set ``tau_plus: 0`` where no negative can
be false; a large ``beta`` makes training follow the few nearest negatives, which in noisy data are
often false.

Relations: with ``beta: 0`` and ``tau_plus: 0`` it is ``info_nce`` or ``nt_xent``. MCL's groups are
another way to hard negatives: they choose who meets whom, HCL weighs those who meet.

Its slow reference is ``hard`` in tests/objective_loops.py.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat
from torch import Tensor

from mclclip.objectives.base import ObjectiveInputs
from mclclip.objectives.contrast import Between, Contrast, ContrastOptions, Temperature
from mclclip.objectives.row_losses import Pairs, count_columns, log_sums, softplus_of_difference
from mclclip.util.options import STRICT, BelowOne


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
    equal_captions: Literal["negatives", "masked"] = "negatives"  # type: ignore[misc]
    """Between captions, what rows with an equal caption (after open_clip's cleaning) or the same
    picture are to each other: ``negatives``, or ``masked``, left out of each other's negatives."""

    def build(self, inputs: ObjectiveInputs) -> Contrast:
        """Returns the loss; a trained temperature is its only parameter."""
        return HardNegatives(self, self.new_temperature(inputs))


class HardNegatives(Contrast):
    """The loss of hard negatives, over all ranks; its formula stands above."""

    def __init__(self, options: Options, temperature: Temperature | None = None) -> None:
        super().__init__(options.between, temperature, equal_captions=options.equal_captions)
        self.beta, self.tau_plus = options.beta, options.tau_plus

    def rows(
        self, queries: Tensor, keys: Tensor, pairs: Pairs, scale: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """-log(e+ / (e+ + N_g)) of every row; 0 where it has no negatives."""
        count, positives = count_columns(pairs), pairs.positive_logits(queries, keys)
        alone = count == 0
        log_count = count.clamp_min(1).to(positives.dtype).log()
        # Logs of the sums of e^beta and of e^(1 + beta) over each row's negatives.
        if self.beta == 0.0:
            sums = (log_count, *log_sums(queries, keys, pairs))
        else:
            sums = tuple(log_sums(queries, keys, pairs, (self.beta, 1.0 + self.beta)))
        weights, weighted = (torch.where(alone, 0.0, each) for each in sums)
        negatives = self._corrected(log_count + weighted - weights, log_count + positives)
        negatives = torch.maximum(negatives, log_count - scale)
        losses = softplus_of_difference(negatives, positives)
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
