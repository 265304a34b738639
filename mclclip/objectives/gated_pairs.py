"""The parts of SimLAP: which classes are paired, gates of two classes, and the loss of gated pairs.

``draw_partners`` draws a second class for each sample, ``LabelFilter`` computes gates g from the
two classes, and ``pair_losses`` compares a row z with candidates k by the cosine of z * g and
k * g, with the row's gates g. That cosine is made of two matrix products,

    (z * g * g) K^T / (|z * g| sqrt((g * g) (K * K)^T))

so no tensor [rows, candidates, D] is needed. Scores are computed in tiles, twice in the forward
pass and once more in the backward pass; memory is linear in rows and candidates.

Source: Wu et al., "Rethinking Positive Pairs in Contrastive Learning" (SimLAP, 2024),
arXiv:2410.18200: the label filter of Eq. 3 to 5 and Table 5c, the loss of Eq. 2 with the logarithm
that Eq. 1 and 2 intend.

Inputs: rows [b, D] and candidates [N, D] of any length, gates [b, D] in (0, 1), classes, groups and
sample ids of both. The objective ``simlap`` puts these parts together. ``row_losses`` has the
losses of rows that are compared in the same dimensions.

Its slow reference is ``simlap`` in tests/objective_loops.py, which draws with ``draw_partners``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mclclip.objectives.pairs import blocks
from mclclip.objectives.row_losses import refuse_second_derivative
from mclclip.ranks.process_group import not_compiled
from mclclip.util.randomness import Integers, mix

_TINY = 1e-24  # the smallest squared length that divides
Penalty = Literal["paper", "neg_glog", "bernoulli"]
Pairing = Literal["arbitrary", "identical", "distinct", "n_closest"]


def draw_partners(
    classes: Integers,
    sample_ids: Integers,
    key: np.uint64,
    pairing: Pairing = "arbitrary",
    closest: Integers | None = None,
) -> Integers:
    """Returns the class that each sample of the global batch is paired with, int64 [B].

    It is SimLAP's second label y2 (section 3.3, "one label from a mini-batch"; Fig. 8: pairs of the
    N closest classes). It depends on key, sample and the batch's classes alone, so all ranks and a
    resumed run draw the same.

    classes, sample_ids   [B]; equal sample ids get equal partners
    key                   differs from step to step
    pairing               ``arbitrary``: any class of the batch, with equal probability;
                          ``identical``: the sample's own; ``distinct``: any other, -1 if there is
                          none; ``n_closest``: its own or one of its closest, as far as the batch
                          has them
    closest               for ``n_closest``: of each class of the batch in ascending order the
                          classes that are closest to it, [classes of the batch, n], without itself
    """
    if pairing == "identical":
        return classes.copy()
    present, position = np.unique(classes, return_inverse=True)
    numbers = np.asarray(mix(int(key), sample_ids))
    if pairing == "n_closest":
        assert closest is not None
        near = np.sort(np.column_stack([present, closest]), axis=1)
        # How many classes of the batch there are up to each column.
        reached = np.isin(near, present).cumsum(axis=1)
        drawn_rank = (numbers % reached[:, -1][position].astype(np.uint64)).astype(np.int64) + 1
        columns = (reached[position] < drawn_rank[:, None]).sum(axis=1)
        partners: Integers = near[position, columns]
        return partners
    count = len(present) - (pairing == "distinct")
    if count == 0:
        return np.full_like(classes, -1)
    drawn = (numbers % np.uint64(count)).astype(np.int64)
    if pairing == "distinct":
        drawn += drawn >= position
    return present[drawn]


def closest_classes(vectors: Tensor, classes: Tensor, count: int) -> Tensor:
    """Returns for each of ``classes`` [P] the ``count`` other classes that are closest to it, int64
    [P, count]: those whose ``vectors`` [K, E] have the largest cosine with its own.
    """
    unit = functional.normalize(vectors.detach(), dim=1)
    cosine = unit[classes] @ unit.T
    cosine.scatter_(1, classes[:, None], float("-inf"))
    return cosine.topk(count, dim=1).indices


@dataclass(frozen=True)
class ClassPairs:
    """Says which candidates are positives and negatives of which rows.

    Only candidates of the row's group count. A candidate is a positive if its class is the row's
    partner and it is another sample; a negative if its class is neither the row's nor the partner.
    Others of the row's own class are ignored. No candidate has the class -1, which means no
    partner.

    labels, partners, sample_id, groups      int64 [b] of the rows; ``labels`` are classes
    all_labels, all_sample_ids, all_groups   int64 [N] of the candidates
    """

    labels: Tensor
    partners: Tensor
    sample_id: Tensor
    groups: Tensor
    all_labels: Tensor
    all_sample_ids: Tensor
    all_groups: Tensor

    def masks(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Returns the positives and the negatives of a tile, bool [r, c] each."""
        theirs, partners = self.all_labels[columns], self.partners[rows, None]
        same_group = self.groups[rows, None] == self.all_groups[columns]
        positive = (partners == theirs) & same_group
        negative = same_group & ~positive & (self.labels[rows, None] != theirs)
        positive &= self.sample_id[rows, None] != self.all_sample_ids[columns]
        return positive, negative


def gated_queries(rows: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Returns arguments ``queries`` and ``weights`` of ``pair_losses``, with which a score is the
    cosine of the gated row and the gated candidate; rows and gates are [b, D].

    The cosine does not depend on lengths, so gates are first scaled to a largest value of 1, which
    avoids underflow.
    """
    gates = gates / gates.detach().amax(dim=1, keepdim=True).clamp_min(_TINY)
    weights = gates.square()
    length = torch.linalg.vector_norm(rows * gates, dim=1, keepdim=True)
    return rows * weights / length.clamp_min(_TINY**0.5), weights


# Not compiled, because a compiler would unroll the loop over tiles.
@not_compiled
def pair_losses(
    queries: Tensor, weights: Tensor | None, keys: Tensor, pairs: ClassPairs, tile: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss of each row: the mean, over its positives, of the cross-entropy of that
    positive among itself and the row's negatives.

    Args:
        queries: [b, D], already multiplied by the logit scale.
        weights: [b, D], at least 0; scores are queries @ keys.T / sqrt(weights @ (keys^2).T). If
            None, they are queries @ keys.T.
        keys: [N, D], of the queries' dtype.
        pairs: which candidates are positives and negatives.
        tile: rows and candidates whose scores are computed at a time.

    Returns:
        The losses [b], differentiable once in queries, weights and keys; 0 for rows without a
        positive or without a negative. The numbers of positives and of negatives, int64 [b] each.
        The backward raises RuntimeError if it is asked for a second derivative (create_graph=True).
    """
    losses, positives, negatives = _PairLosses.apply(  # type: ignore[no-untyped-call]
        queries, weights, keys, pairs, tile
    )
    return losses, positives, negatives


def _scores(queries: Tensor, weights: Tensor | None, keys: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the scores of a tile, [r, c], and the factors that make them of products (None if
    there are no weights)."""
    products = queries @ keys.T
    if weights is None:
        return products, None
    scale = (weights @ keys.square().T).clamp_min_(_TINY).rsqrt_()
    return products.mul_(scale), scale


def _stream(
    queries: Tensor,
    weights: Tensor | None,
    keys: Tensor,
    pairs: ClassPairs,
    rows: slice,
    columns_of: list[slice],
) -> tuple[Tensor, ...]:
    """Returns five tensors [r] of some rows: the sums over positives of their losses and of the
    losses' derivatives by the log-sum-exp of negatives; that log-sum-exp; the numbers of positives
    and of negatives."""
    queries, weights = queries[rows], None if weights is None else weights[rows]
    maximum = queries.new_full((len(queries),), float("-inf"))
    total, loss, pull = (torch.zeros_like(maximum) for _ in range(3))
    positives, negatives = (torch.zeros_like(maximum, dtype=torch.int64) for _ in range(2))
    for columns in columns_of:
        positive, negative = pairs.masks(rows, columns)
        positives += positive.sum(dim=1)
        negatives += negative.sum(dim=1)
        scores = _scores(queries, weights, keys[columns])[0].masked_fill_(~negative, float("-inf"))
        previous, maximum = maximum, torch.maximum(maximum, scores.amax(dim=1))
        finite = maximum.clamp_min(torch.finfo(maximum.dtype).min)  # since -inf - -inf is nan
        total.mul_((previous - finite).exp_())
        total.add_(scores.sub_(finite[:, None]).exp_().sum(dim=1))
    normalizer = maximum + total.log()
    for columns in columns_of:
        ahead = normalizer[:, None] - _scores(queries, weights, keys[columns])[0]
        ahead.masked_fill_(~pairs.masks(rows, columns)[0], float("-inf"))
        loss += torch.logaddexp(ahead, torch.zeros_like(ahead)).sum(dim=1)
        pull += ahead.sigmoid_().sum(dim=1)
    return loss, pull, normalizer, positives, negatives


class _PairLosses(torch.autograd.Function):
    """Computes ``pair_losses`` and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        weights: Tensor | None,
        keys: Tensor,
        pairs: ClassPairs,
        tile: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns = blocks(len(keys), tile)
        streamed = [
            _stream(queries, weights, keys, pairs, rows, columns)
            for rows in blocks(len(queries), tile)
        ]
        loss, pull, normalizer, positives, negatives = map(torch.cat, zip(*streamed, strict=True))
        share = positives.clamp_min(1).to(loss.dtype).reciprocal()
        ctx.save_for_backward(queries, weights, keys, pull * share, normalizer, share)
        ctx.pairs, ctx.tile = pairs, tile
        ctx.mark_non_differentiable(positives, negatives)
        return loss * share, positives, negatives

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, *_: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        refuse_second_derivative("the loss of gated pairs")
        queries, weights, keys, pull, normalizer, share = ctx.saved_tensors
        of_queries = torch.zeros_like(queries)
        of_weights = None if weights is None else torch.zeros_like(weights)
        of_keys = torch.zeros_like(keys) if ctx.needs_input_grad[2] else None
        tiles = itertools.product(blocks(len(queries), ctx.tile), blocks(len(keys), ctx.tile))
        for rows, columns in tiles:
            candidates, factors = keys[columns], None if weights is None else weights[rows]
            scores, scale = _scores(queries[rows], factors, candidates)
            positive, negative = ctx.pairs.masks(rows, columns)
            ahead = normalizer[rows, None] - scores
            # Derivatives of the rows' losses by their scores.
            slope = (-ahead).exp_().mul_(pull[rows, None]).masked_fill_(~negative, 0.0)
            ahead = ahead.sigmoid_().mul_(share[rows, None]).masked_fill_(~positive, 0.0)
            slope.sub_(ahead).mul_(grad[rows, None])
            if scale is not None and of_weights is not None:
                slope.mul_(scale)
                of_squares = scores.mul_(slope).mul_(scale).mul_(-0.5)
                of_weights[rows].addmm_(of_squares, candidates.square())
                if of_keys is not None:
                    of_keys[columns].addcmul_(candidates, of_squares.T @ weights[rows], value=2.0)
            of_queries[rows].addmm_(slope, candidates)
            if of_keys is not None:
                of_keys[columns].addmm_(slope.T, queries[rows])
        return of_queries, of_weights, of_keys, None, None


# --- gates ---------------------------------------------------------------------------------------


class LabelFilter(nn.Module):
    """Computes gates from two classes: the mean of their embeddings passes through a perceptron,
    whose sigmoids are the gates.

    The layers are those of Table 5c: batch norm, ReLU, linear, batch norm, ReLU, linear, sigmoid
    (the paper's text says three layers, its table has two linear ones). Engines compute the
    statistics of its batch norms over the global batch.

    num_classes   number of classes
    dim           D, number of gates
    label_dim     width of the embedding; the paper's is 512
    hidden_dim    width of the hidden layer; the paper's is 1,024
    seed          gives the initial weights, the same on all ranks
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        label_dim: int = 512,
        hidden_dim: int = 1024,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.labels = nn.Embedding(num_classes, label_dim, dtype=dtype)
            self.layers = nn.Sequential(
                nn.BatchNorm1d(label_dim, dtype=dtype),
                nn.ReLU(),
                nn.Linear(label_dim, hidden_dim, dtype=dtype),
                nn.BatchNorm1d(hidden_dim, dtype=dtype),
                nn.ReLU(),
                nn.Linear(hidden_dim, dim, dtype=dtype),
            )

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Returns gates [n, D] in (0, 1) of pairs of classes, int64 [n] each; the order of a pair
        does not matter."""
        mean = (self.labels(first) + self.labels(second)) / 2
        return torch.sigmoid(self.layers(mean))

    def of_classes(self) -> Tensor:
        """Returns the gates of every class paired with itself, [K, D], for the penalty; computed
        with the running statistics of the batch norms."""
        classes = torch.arange(self.labels.num_embeddings, device=self.labels.weight.device)
        training = self.training
        self.eval()
        try:
            gates: Tensor = self(classes, classes)
        finally:
            self.train(training)
        return gates


def apply_norm(features: Tensor, norm: nn.Module | None) -> Tensor:
    """Returns features [n, D] after the layer norm, if there is one.

    They are brought to length sqrt(D) first, so that the norm's epsilon has no influence.
    """
    if norm is None:
        return features
    result: Tensor = norm(functional.normalize(features) * math.sqrt(features.shape[1]))
    return result


def gate_penalty(gates: Tensor, kind: Penalty) -> Tensor:
    """Returns the mean over gates g [K, D] of a function that the training makes small.

    paper       g log g, Eq. 5 as printed, which draws gates to 1/e
    neg_glog    -g log g, which draws gates to 0 or 1, as the text of Eq. 5 wants
    bernoulli   -g log g - (1 - g) log(1 - g), which does so too, equally near 0 and near 1
    """
    terms: Tensor = torch.special.entr(gates)  # -g log g, 0 at 0
    if kind == "bernoulli":
        terms = terms + torch.special.entr(1.0 - gates)
    return -terms.mean() if kind == "paper" else terms.mean()
