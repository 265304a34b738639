"""SigLIP's loss: each pair of image and text is asked by itself whether the two belong together.

With cosines c, the scale t and the bias b, and z = 1 for a sample's own pair and -1 for others,

    loss = 1 / B  *  sum over pairs (i, j) that count of  log(1 + exp(-z_ij (t c_ij + b)))

There is no sum over a row that a pair has to be compared with, so the mask of MCL's Eq. 3 goes pair
by pair: a pair of two samples counts where their groups are equal and the samples are not. B is the
global batch whatever is masked, as in the paper. Pairs with an equal caption or picture may be
masked too, or have z = 1 (``equal_captions``).

Source: Zhai, Mustafa, Kolesnikov and Beyer, "Sigmoid Loss for Language Image Pre-Training" (2023),
Eq. 1 and section 3.3.

Inputs: ``image_features`` and ``text_features`` (``between: views``: ``image_features_1``) [b, D]
of this rank, unit length; ``group_ids`` [b, 1] and ``sample_id`` [b]; the model's ``logit_scale``
and ``logit_bias``, or parameters of its own.

Use it for models that were trained by it, such as SigLIP's, and where batches are small or
captions repeat: a false negative costs its own pair and no row.

Relations: ``info_nce`` asks which of all texts is the image's, by a softmax over the row. Here no
rank holds all texts at once ("Efficient chunked implementation"): each computes its images against
its own texts, hands the texts to the next rank and takes those of the rank before, until all have
been everywhere. The gradient of the texts is added up on the way and is complete when they are home
again. Within a chunk the matrix is computed in tiles: memory is linear in the local batch.

Its slow reference is ``sigmoid`` in tests/objective_loops.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor, nn
from torch.nn import functional

from mclclip.objectives.base import (
    BatchFields,
    Features,
    Objective,
    ObjectiveInputs,
    ObjectiveOptions,
    Reads,
)
from mclclip.objectives.contrast import (
    DIGESTS,
    EqualCaptions,
    count_equal,
    refuse_equal_captions_of_views,
)
from mclclip.objectives.row_losses import (
    TILE,
    Pairs,
    Tiles,
    choose_no_autocast,
    count_columns,
    refuse_second_derivative,
)
from mclclip.ranks import collectives
from mclclip.ranks.process_group import not_compiled
from mclclip.util.options import STRICT

_START_SCALE, _START_BIAS = 10.0, -10.0


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """SigLIP's loss: each pair on its own, with a trained scale and bias."""

    kind: Literal["sigmoid"] = "sigmoid"
    """Which objective."""
    between: Literal["captions", "views"] = "captions"
    """``captions``: images against captions, with the model's logit scale, and its logit bias where
    it has one (else one of the objective's, from -10, which exports leave behind); ``views``: the
    first view of an image against the second of all, with a scale from 10 and a bias from -10 of
    the objective's."""
    equal_captions: EqualCaptions = "negatives"
    """Between captions, what rows with an equal caption (after open_clip's cleaning) or the same
    picture are to each other: ``negatives``; ``masked``: their pairs do not count; or
    ``positives``: their pairs belong together."""

    def __post_init__(self) -> None:
        refuse_equal_captions_of_views(self.equal_captions, self.between)

    @property
    def reads(self) -> Reads:
        """Returns groups of samples with one pseudo label; two views, or captions with logit scale
        and bias; digests where equal captions are no negatives."""
        captions = self.between == "captions"
        digests = self.equal_captions != "negatives"
        return Reads(
            num_views=1 if captions else 2,
            captions=captions,
            logit_scale=captions,
            logit_bias=captions,
            groups=True,
            digests=digests,
        )

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """The loss, with the scale and bias that the model does not have."""
        if self.between == "views":
            other = "image_features_1"
            return Sigmoid(other, own_scale=True, own_bias=True, dtype=inputs.dtype)
        own_bias = not inputs.model.has_logit_bias
        return Sigmoid(own_bias=own_bias, equal_captions=self.equal_captions, dtype=inputs.dtype)


class Sigmoid(Objective):
    """The sigmoid loss of image features against those named ``other``.

    ``own_scale`` and ``own_bias``: parameters of its own, [1] each and of this ``dtype``, instead
    of the model's.
    ``tile`` bounds the scores that exist at a time. Where ``equal_captions`` is not ``negatives``,
    batches have ``contrast.DIGESTS``.
    """

    def __init__(
        self,
        other: str = "text_features",
        *,
        own_scale: bool = False,
        own_bias: bool = False,
        tile: int = TILE,
        equal_captions: EqualCaptions = "negatives",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.other, self.tile, self.equal_captions = other, tile, equal_captions
        start_scale = torch.full((1,), math.log(_START_SCALE), dtype=dtype)
        self.log_scale = nn.Parameter(start_scale) if own_scale else None
        start_bias = torch.full((1,), _START_BIAS, dtype=dtype)
        self.bias = nn.Parameter(start_bias) if own_bias else None

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Computes this rank's rows of the loss over the global batch.

        Args:
            features: `image_features` and the others [b, D], unit length, of this rank; all ranks
                have the same b. The model's `logit_scale` (exponentiated) and `logit_bias` where
                they are not the objective's.
            batch: `group_ids` [b, 1], group of each sample at the prefix where the mask compares;
                `sample_id` [b], of which equal ones are one sample, whose pairs but the own do not
                count; the extras `caption_digest` and `picture_digest` [b] int64 where equal
                captions are no negatives.

        Returns:
            `loss`: sum over this rank's images and the texts of all ranks, divided by b. Its mean
            over the ranks is the global loss. `rows_without_negatives`: number of samples of the
            global batch that have no pair but their own. `equal_captions`: as
            ``contrast.count_equal`` gives it, where digests are read. `logit_scale`, `logit_bias`:
            those used.

        Raises ValueError for features that do not fit.
        """
        image_features, others = features["image_features"], features[self.other]
        if image_features.ndim != 2 or image_features.shape != others.shape:
            raise ValueError(
                f"image_features {tuple(image_features.shape)} and {self.other} "
                f"{tuple(others.shape)} must both be [b, D]"
            )
        scale = features["logit_scale"] if self.log_scale is None else self.log_scale[0].exp()
        bias = features["logit_bias"] if self.bias is None else self.bias[0]
        pairs = self._pairs(batch)
        positives = self.equal_captions == "positives"
        total, alone = sigmoid_sums(image_features, others, scale, bias, pairs, positives)
        return {
            "loss": total / len(image_features),
            "rows_without_negatives": collectives.all_reduce_sum(alone.sum()),
            **(count_equal(pairs) if pairs.digests else {}),
            "logit_scale": scale,
            "logit_bias": bias.detach().clone(),  # FSDP frees what a view of a parameter shows
        }

    def chance(self, features: Features, batch: BatchFields, parts: Features) -> Tensor:
        """Returns the least loss of one logit for all pairs: that of a probability of k in n, for
        the n texts that an image is compared with, of which k belong to it (1 but for equal
        captions)."""
        pairs = self._pairs(batch)
        negatives, positives = count_columns(pairs).double(), torch.ones((), dtype=torch.float64)
        if self.equal_captions == "positives":
            positives = positives + count_columns(replace(pairs, columns="equal"))
        num = negatives + positives
        losses: Tensor = torch.xlogy(num, num) - torch.xlogy(negatives, negatives)
        return (losses - torch.xlogy(positives, positives)).mean()

    def _pairs(self, batch: BatchFields) -> Pairs:
        """Returns this rank's rows among the columns of all ranks."""
        reads_digests = self.equal_captions != "negatives"
        digests = tuple(batch.extras[name] for name in DIGESTS) if reads_digests else ()
        return Pairs.over_ranks(batch.group_ids[:, 0], batch.sample_id, self.tile, digests)


# A compiler would unroll the loop over tiles.
@not_compiled
def sigmoid_sums(
    queries: Tensor,
    keys: Tensor,
    scale: Tensor,
    bias: Tensor,
    pairs: Pairs,
    positives: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sum of log(1 + exp(-z (scale * cosine + bias))) over this rank's rows and all ranks' keys.

    Args:
        queries, keys: [b, D] of this rank, of one dtype, float32 or float64.
        scale, bias: 0-dimensional, the same on all ranks.
        pairs: rows among the columns of all ranks.
        positives: pairs of equal rows belong together; else they do not count.

    Returns:
        The sum, differentiable once in all but ``pairs``, and bool [b]: the row's own pair alone
        counts.
        The gradient is found in the same pass, in the dtype given. All ranks' sums must enter the
        loss with the same factor, which is how the mean over ranks takes them.
    """
    total, alone = _SigmoidSums.apply(queries, keys, scale, bias, pairs, positives)  # type: ignore[no-untyped-call]
    return total, alone


class _PairSums:
    """The sum over pairs, and its gradients, as chunks of keys come by."""

    def __init__(self, queries: Tensor, scale: Tensor, bias: Tensor) -> None:
        self.queries, self.scale, self.bias = queries, scale, bias
        self.total, self.slope = torch.zeros_like(scale), torch.zeros_like(scale)
        # Of the logits' gradient A: A @ keys, which gives the gradients of queries and scale.
        self.products = torch.zeros_like(queries)
        self.alone = torch.ones(len(queries), dtype=torch.bool, device=queries.device)

    def add_own(self, keys: Tensor, grad_keys: Tensor | None) -> None:
        """Adds the own pairs, row by row; their logits' gradient is -sigmoid(-logit)."""
        logits = self.scale * torch.linalg.vecdot(self.queries, keys) + self.bias
        self.total -= functional.logsigmoid(logits).sum()
        pulls = torch.sigmoid(-logits).neg_()
        self.slope += pulls.sum()
        self.products.addcmul_(pulls[:, None], keys)
        if grad_keys is not None:
            grad_keys.addcmul_(pulls[:, None], self.queries)

    def add_pairs(
        self, keys: Tensor, grad_keys: Tensor | None, pairs: Pairs, z: float = -1.0
    ) -> None:
        """Adds the pairs of all rows and these keys that ``pairs`` has for negatives, as ones that
        do not belong together (``z`` = -1), or do (1)."""
        tiles = Tiles(-z * self.scale * self.queries, keys, pairs)
        for rows, columns in pairs.tiles():
            logits = tiles.logits(rows, columns).sub_(z * self.bias)  # -inf where masked
            self.alone[rows] &= logits.amax(dim=1) == float("-inf")
            pushes = torch.sigmoid(logits)
            self.total -= functional.logsigmoid(logits.neg_()).sum()
            self.slope -= z * pushes.sum()
            self.products[rows].addmm_(pushes, keys[columns], alpha=-z)
            if grad_keys is not None:
                grad_keys[columns].addmm_(pushes.T, self.queries[rows], alpha=-z)


def _around_the_ring(
    sums: _PairSums, keys: Tensor, pairs: Pairs, need_grad: bool, positives: bool
) -> Tensor | None:
    """Adds the pairs with all ranks' keys; returns the gradient of this rank's, by the scale.

    Keys travel together with the gradient that ranks have added to them, all the way home. Where
    it is not needed they travel alone, and stop before the last hop.
    """
    world, count = collectives.world_size(), len(keys)
    travelling = torch.stack([keys, torch.zeros_like(keys)]) if need_grad else keys[None]
    for hop in range(world):
        here = travelling[0], travelling[1] if need_grad else None
        if hop == 0:
            sums.add_own(*here)
        owner = (collectives.rank() - hop) % world
        columns = slice(owner * count, (owner + 1) * count)
        chunk = replace(
            pairs,
            all_groups=pairs.all_groups[columns],
            all_sample_ids=pairs.all_sample_ids[columns],
            all_digests=tuple(digests[columns] for digests in pairs.all_digests),
            first=pairs.first - columns.start,
        )
        sums.add_pairs(*here, chunk)
        if positives:
            sums.add_pairs(*here, replace(chunk, columns="equal"), z=1.0)
        if need_grad or hop < world - 1:
            travelling = collectives.shift(travelling)
    return travelling[1] if need_grad else None


class _SigmoidSums(torch.autograd.Function):
    """See ``sigmoid_sums``."""

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
        with choose_no_autocast(queries.device):
            sums = _PairSums(queries, scale.to(queries.dtype), bias.to(queries.dtype))
            by_keys = _around_the_ring(sums, keys, pairs, ctx.needs_input_grad[1], positives)
            by_scale = (sums.products * queries).sum()
            by_keys = None if by_keys is None else by_keys * sums.scale
        ctx.save_for_backward(sums.products * sums.scale, by_keys, by_scale, sums.slope)
        ctx.dtypes = scale.dtype, bias.dtype
        ctx.mark_non_differentiable(sums.alone)
        return sums.total, sums.alone

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
