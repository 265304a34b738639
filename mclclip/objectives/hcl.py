"""HCL, hard negatives: InfoNCE in which near negatives weigh more, corrected for false ones.

Let e+ = exp(s c_p) be the own pair's term and e_q = exp(s c_pq) those of a row's N negatives, with
cosines c and the logit scale s. Negative q has the weight w_q = e_q^beta / mean(e^beta). The sum of
the negatives becomes

    N_g  = max( (sum over q of w_q e_q - tau_plus N e+) / (1 - tau_plus),  N exp(-s) )
    loss = -log( e+ / (e+ + N_g) )

``tau_plus`` is the assumed share of negatives that are of the row's own class; so much of e+ is
subtracted from the sum. N counts the negatives that the group mask leaves; between views without a
mask it is 2B - 2. The weighted sum is N times the ratio of two sums, of e^(1 + beta) and of e^beta.
Their log-sum-exps are computed together in tiles, so memory is linear in the batch.

Source: Robinson et al., "Contrastive Learning with Hard Negative Samples" (ICLR 2021),
arXiv:2010.04592, section 3, as in the authors' code (their pseudo-code has slips).

Inputs: those of ``info_nce`` (``between: captions``) or of ``nt_xent`` (``between: views``).

Use it where most negatives are easy, as in small batches or without captions. The loss takes a
third more time than InfoNCE, which is little of a step. Set ``tau_plus: 0`` if no negative can be
false. With a large ``beta`` training follows the few nearest negatives, which in noisy data are
often false.

Relations: with ``beta: 0`` and ``tau_plus: 0`` it is ``info_nce`` or ``nt_xent``. MCL's groups are
another way to hard negatives: they choose which samples are compared, HCL weighs the comparisons.

Example: ``train.objective={kind: hcl, beta: 0.5, tau_plus: 0.05}``.

Its slow reference is ``hard`` in tests/objective_loops.py.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat
from torch import Tensor

from mclclip.objectives.base import ObjectiveInputs
from mclclip.objectives.contrast import Between, Contrast, ContrastOptions, Direction
from mclclip.objectives.row_losses import count_columns, log_sums, softplus_of_difference
from mclclip.util.options import STRICT, BelowOne


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """InfoNCE in which near negatives weigh more, with MCL's mask."""

    kind: Literal["hcl"] = "hcl"
    """Which objective."""
    between: Between = "captions"
    """``captions``: images against captions; ``views``: two views of every image."""
    beta: NonNegativeFloat = 1.0
    """How much more near negatives weigh than far ones; 0: all weigh the same."""
    tau_plus: BelowOne = 0.1
    """Share of the negatives that are taken to be of the row's own class."""

    def build(self, inputs: ObjectiveInputs) -> Contrast:
        """Returns the loss; a trained temperature is its only parameter."""
        return HardNegatives(self, **self.how(inputs))


class HardNegatives(Contrast):
    """The loss of hard negatives, over all ranks."""

    def __init__(self, options: Options, **how: Any) -> None:
        super().__init__(options.between, **how)
        self.beta, self.tau_plus = options.beta, options.tau_plus

    def loss_per_query(self, direction: Direction) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns -log(e+ / (e+ + N_g)) of every query; 0 if it has no negatives."""
        queries, keys, pairs = direction.queries, direction.keys, direction.pairs
        count, positives = count_columns(pairs), pairs.positive_logits(queries, keys)
        has_none = count == 0
        log_count = count.clamp_min(1).to(positives.dtype).log()
        # Logs of the sums of e^beta and of e^(1 + beta) over each row's negatives.
        if self.beta == 0.0:
            sums = (log_count, *log_sums(queries, keys, pairs))
        else:
            sums = tuple(log_sums(queries, keys, pairs, (self.beta, 1.0 + self.beta)))
        weights, weighted = (torch.where(has_none, 0.0, each) for each in sums)
        negatives = self._correct(log_count + weighted - weights, log_count + positives)
        negatives = torch.maximum(negatives, log_count - direction.scale)
        losses = softplus_of_difference(negatives, positives)
        losses = torch.where(has_none, torch.zeros_like(losses), losses)
        return losses, {"rows_without_negatives": has_none}

    def _correct(self, log_sum: Tensor, log_positives: Tensor) -> Tensor:
        """Returns log((R - tau_plus P) / (1 - tau_plus)), [b]; R and P are given by their logs.

        It is -inf, with gradient 0, if the difference is not positive.
        """
        if self.tau_plus == 0.0:
            return log_sum
        share = log_positives + math.log(self.tau_plus) - log_sum
        finite = torch.where(share < 0.0, share, -1.0)  # -1: any for which the next line is finite
        corrected = log_sum + (-torch.expm1(finite)).log() - math.log1p(-self.tau_plus)
        return torch.where(share < 0.0, corrected, float("-inf"))
