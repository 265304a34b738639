"""SigLIP's loss: of each image and each text it asks whether the two belong together.

With cosines c, the scale t and the bias b, and z = 1 for a sample's own pair and -1 for others,

    loss = 1 / B  *  sum over pairs (i, j) that count of  log(1 + exp(-z_ij (t c_ij + b)))

Pairs are not compared with the rest of their row, so the group mask (MCL's Eq. 3) works pair by
pair: a pair of two samples counts if they are not one and have the same pseudo label. B is the
global batch, whatever is masked, as in the paper. Pairs of near copies may be masked too, or have
a soft target (``near_copies``): a pair of weight w has w times the loss of z = 1 and 1 - w times
that of z = -1.

Source: Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (SigLIP, ICCV 2023),
arXiv:2303.15343, Eq. 1 and section 3.3. The mask: Zhang et al., "Learning the Unlearned: Mitigating
Feature Suppression in Contrastive Learning" (MCL, 2024), arXiv:2402.11816.

Inputs: ``image_features`` and ``text_features`` (``between: views``: ``image_features_1``) [b, D]
of this rank, unit length; ``group_ids`` [b, 1] and ``sample_id`` [b]; the model's scalars
``logit_scale`` and ``logit_bias``, or parameters of its own.

Use it for models that were trained with it, such as SigLIP's, and where batches are small or
captions repeat: a false negative costs its own pair and no row.

Relations: ``info_nce`` asks which of all texts is the image's, by a softmax over the row. Here no
rank holds all texts at once ("Efficient chunked implementation"): each computes its images against
its own texts, hands the texts to the next rank and takes those of the rank before, until all texts
are home again. Their gradient travels with them and is added up on the way. A chunk's matrix is
computed in tiles: memory is linear in the local batch.

Example: ``train.objective={kind: sigmoid, near_copies: {threshold: 1.0}}``.

Its slow reference is ``sigmoid`` in tests/objective_loops.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor, nn
from torch.nn import functional

from mclclip.objectives.base import BatchFields, Features, Objective, ObjectiveInputs, Reads
from mclclip.objectives.contrast import PairOptions, cut, mean_of_widths
from mclclip.objectives.near_copies import NearCopies, count_near, pairs_of
from mclclip.objectives.pairs import TILE, Pairs
from mclclip.objectives.row_losses import (
    Tiles,
    count_columns,
    refuse_second_derivative,
    sum_weights,
    to_fp32,
)
from mclclip.ranks import collectives
from mclclip.ranks.process_group import choose_no_autocast, not_compiled
from mclclip.util.options import STRICT

_START_SCALE, _START_BIAS = 10.0, -10.0
Target = Literal["apart", "weight", "rest"]


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(PairOptions):
    """SigLIP's loss: each pair on its own, with a trained scale and bias."""

    kind: Literal["sigmoid"] = "sigmoid"
    """Which objective."""
    between: Literal["captions", "views"] = "captions"
    """``captions``: images against captions, with the model's logit scale and logit bias (if the
    model has no bias, the objective trains one, from -10, which exports leave out); ``views``:
    first views against second ones, with a scale and a bias of the objective's, from 10 and -10."""
    takes_positives: ClassVar[bool] = True

    @property
    def reads(self) -> Reads:
        """Reads what all losses of pairs read, and the logit bias beside the logit scale."""
        reads = super().reads
        return replace(reads, logit_bias=reads.logit_scale)

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """Returns the loss, with parameters for the scale and bias that the model does not have.
        Raises ValueError if ``widths`` exceed the model's."""
        self.refuse_width(inputs.model.feature_dim)
        views = self.between == "views"
        return Sigmoid(
            "image_features_1" if views else "text_features",
            trains_scale=views,
            trains_bias=views or not inputs.model.has_logit_bias,
            near=self.near,
            widths=self.widths,
            dtype=inputs.dtype,
        )


class Sigmoid(Objective):
    """The sigmoid loss of image features against ``other`` features, such as ``text_features``.

    ``trains_scale`` and ``trains_bias``: it has parameters [1] of this ``dtype`` for them, instead
    of taking the model's. Logits are computed in tiles of at most ``tile`` rows and columns.
    ``near``: options of near copies, with ``of`` filled in. ``widths`` are trained beside the whole
    width.
    """

    def __init__(
        self,
        other: str = "text_features",
        *,
        trains_scale: bool = False,
        trains_bias: bool = False,
        tile: int = TILE,
        near: NearCopies | None = None,
        widths: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.other, self.tile, self.near, self.widths = other, tile, near, tuple(widths)
        start_scale = torch.full((1,), math.log(_START_SCALE), dtype=dtype)
        self.log_scale = nn.Parameter(start_scale) if trains_scale else None
        start_bias = torch.full((1,), _START_BIAS, dtype=dtype)
        self.bias = nn.Parameter(start_bias) if trains_bias else None

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Computes the loss of this rank's images over the texts of all ranks.

        Args:
            features: `image_features` and the others [b, D], unit length, of this rank; all ranks
                have the same b. The model's `logit_scale` (exponentiated) and `logit_bias` if the
                objective does not train its own.
            batch: `group_ids` [b, 1], the group of each sample at the step's prefix length;
                `sample_id` [b]; two copies of a repeated sample are no pair. What near copies are
                told by: the extras `caption_digest` and `picture_digest` [b], or
                `base_image_features` and `base_text_features` [b, D'].

        Returns:
            `loss`: sum over this rank's images and the texts of all ranks, divided by b, and its
            mean over the widths. Its mean over the ranks is the global loss. `loss_at_WIDTH` of
            every width that is trained beside the whole one. `rows_without_negatives`: number of
            samples of the global batch that have no pair but their own, and `near_copies`, where
            they are no negatives: how many the samples have, each its own. The `logit_scale` and
            `logit_bias` that were used.
        """
        image_features, others = (to_fp32(features[n]) for n in ("image_features", self.other))
        scale = features["logit_scale"] if self.log_scale is None else self.log_scale[0].exp()
        bias = features["logit_bias"] if self.bias is None else self.bias[0]
        pairs = pairs_of(batch, self.tile, self.near)
        by_width: dict[int, Tensor] = {}
        for width in dict.fromkeys([*self.widths, image_features.shape[1]]):
            sides = cut(image_features, width), cut(others, width)
            total, has_none = sigmoid_sums(*sides, scale, bias, pairs, self._has_positives)
            by_width[width] = total / len(image_features)
        return {
            **mean_of_widths(by_width),
            "rows_without_negatives": collectives.all_reduce_sum(has_none.sum()),
            **(count_near(pairs) if self.near else {}),
            "logit_scale": scale,
            "logit_bias": bias.detach().clone(),  # cloned, since FSDP frees the parameter
        }

    def chance(self, features: Features, batch: BatchFields, parts: Features) -> Tensor:
        """Returns the smallest loss that one logit for all pairs of an image can have: that of the
        probability k / n, if k of the n texts that it is compared with belong to it (k is 1 and the
        weights of near copies that are positives)."""
        pairs = pairs_of(batch, self.tile, self.near)
        negatives, positives = count_columns(pairs).double(), torch.ones((), dtype=torch.float64)
        if self._has_positives:
            near = replace(pairs, columns="near")
            weights = sum_weights(near, torch.float64)
            positives, negatives = positives + weights, negatives + count_columns(near) - weights
        num = negatives + positives
        losses: Tensor = torch.xlogy(num, num) - torch.xlogy(negatives, negatives)
        return (losses - torch.xlogy(positives, positives)).mean()

    @property
    def _has_positives(self) -> bool:
        return self.near is not None and self.near.role == "positives"


# Not compiled, because a compiler would unroll the loop over tiles.
@not_compiled
def sigmoid_sums(
    queries: Tensor,
    keys: Tensor,
    scale: Tensor,
    bias: Tensor,
    pairs: Pairs,
    positives: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the sum of log(1 + exp(-z (scale * cosine + bias))) over this rank's queries and all
    ranks' keys.

    Args:
        queries, keys: [b, D] of this rank, of one dtype, float32 or float64.
        scale, bias: scalars, the same on all ranks.
        pairs: which pairs count.
        positives: True if near copies belong together, by their weights (``Pairs.weights``); else
            they do not count.

    Returns:
        The sum, differentiable once in the tensors, and bool [b]: only the query's own pair counts.
        Gradients are computed in the same pass as the sum, in the queries' dtype. The sums of all
        ranks must enter the loss with the same factor, as in a mean over ranks.
    """
    total, has_no_negatives = _SigmoidSums.apply(  # type: ignore[no-untyped-call]
        queries, keys, scale, bias, pairs, positives
    )
    return total, has_no_negatives


class _PairSums:
    """Adds up the loss over pairs, and its gradients, while chunks of keys arrive."""

    def __init__(self, queries: Tensor, scale: Tensor, bias: Tensor) -> None:
        self.queries, self.scale, self.bias = queries, scale, bias
        self.total, self.slope = torch.zeros_like(scale), torch.zeros_like(scale)
        # A @ keys, where A is the gradient of the logits: gives those of queries and scale.
        self.products = torch.zeros_like(queries)
        self.has_no_negatives = torch.ones(len(queries), dtype=torch.bool, device=queries.device)

    def add_own(self, keys: Tensor, grad_keys: Tensor | None) -> None:
        """Adds the own pairs; the gradient of their logits is -sigmoid(-logit)."""
        logits = self.scale * torch.linalg.vecdot(self.queries, keys) + self.bias
        self.total -= functional.logsigmoid(logits).sum()
        pulls = torch.sigmoid(-logits).neg_()
        self.slope += pulls.sum()
        self.products.addcmul_(pulls[:, None], keys)
        if grad_keys is not None:
            grad_keys.addcmul_(pulls[:, None], self.queries)

    def add_pairs(
        self, keys: Tensor, grad_keys: Tensor | None, pairs: Pairs, target: Target = "apart"
    ) -> None:
        """Adds the pairs of all queries and these ``keys`` that ``pairs`` counts: as pairs that do
        not belong together; or, of weight w, as w of one that does, or as 1 - w of one that does
        not."""
        z = 1.0 if target == "weight" else -1.0
        tiles = Tiles(-z * self.scale * self.queries, keys, pairs)
        for rows, columns in pairs.tiles():
            logits = tiles.logits(rows, columns).sub_(z * self.bias)  # -inf where masked
            self.has_no_negatives[rows] &= logits.amax(dim=1) == float("-inf")
            pushes = torch.sigmoid(logits)
            losses = functional.logsigmoid(logits.neg_())
            if target != "apart":
                weights = pairs.weights(rows, columns, keys.dtype)
                weights = weights if target == "weight" else 1.0 - weights
                pushes, losses = pushes.mul_(weights), losses * weights
            self.total -= losses.sum()
            self.slope -= z * pushes.sum()
            self.products[rows].addmm_(pushes, keys[columns], alpha=-z)
            if grad_keys is not None:
                grad_keys[columns].addmm_(pushes.T, self.queries[rows], alpha=-z)


class _SigmoidSums(torch.autograd.Function):
    """Computes ``sigmoid_sums`` and its gradients in one pass of the keys around all ranks.

    Keys travel together with the gradient (divided by the scale) that ranks have added to them,
    until both are home again. If they need no gradient, keys travel alone, and stop before the last
    hop.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        scale: Tensor,
        bias: Tensor,
        pairs: Pairs,
        positives: bool,
    ) -> tuple[Tensor, Tensor]:
        world, count, need_grad = collectives.world_size(), len(keys), ctx.needs_input_grad[1]
        with choose_no_autocast(queries.device):
            sums = _PairSums(queries, scale.to(queries.dtype), bias.to(queries.dtype))
            travelling = torch.stack([keys, torch.zeros_like(keys)]) if need_grad else keys[None]
            for hop in range(world):
                here = travelling[0], travelling[1] if need_grad else None
                if hop == 0:
                    sums.add_own(*here)
                owner = (collectives.rank() - hop) % world
                chunk = pairs.chunk(slice(owner * count, (owner + 1) * count))
                sums.add_pairs(*here, chunk)
                if positives:
                    near = replace(chunk, columns="near")
                    sums.add_pairs(*here, near, "weight")
                    if pairs.bounds is not None:  # else all weights are 1
                        sums.add_pairs(*here, near, "rest")
                if need_grad or hop < world - 1:
                    travelling = collectives.shift(travelling)
            by_scale = (sums.products * queries).sum()
            by_keys = travelling[1] * sums.scale if need_grad else None
        ctx.save_for_backward(sums.products * sums.scale, by_keys, by_scale, sums.slope)
        ctx.dtypes = scale.dtype, bias.dtype
        ctx.mark_non_differentiable(sums.has_no_negatives)
        return sums.total, sums.has_no_negatives

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative("the sigmoid loss")
        by_queries, by_keys, by_scale, by_bias = ctx.saved_tensors
        of_scale, of_bias = ctx.dtypes
        return (
            grad * by_queries,
            None if by_keys is None else grad * by_keys,
            (grad * by_scale).to(of_scale),
            (grad * by_bias).to(of_bias),
            None,
            None,
        )
