"""The parts of SimLAP: which classes are paired, gates of two classes, and the loss of gated pairs.

A draw gives each sample a second class (``draw_partners``). A label filter makes gates g of the two
classes (``LabelFilter``). The loss of a row z compares it with candidates k by the cosine of z * g
and k * g, with the gates g of the row (``pair_losses``). That cosine is two matrix products,

    (z * g * g) K^T / (|z * g| sqrt((g * g) (K * K)^T))

so no tensor [rows, candidates, D] is made. Scores are computed a tile at a time, twice in the
forward pass and once more in the backward pass; memory is linear in rows and candidates.

Source: Wu et al., "Rethinking Positive Pairs in Contrastive Learning" (SimLAP, 2024): the label
filter of Eq. 3 to 5 and Table 5c, the loss of Eq. 2 with the logarithm that Eq. 1 and 2 intend.

Inputs: rows [b, D] and candidates [N, D] of any length, gates [b, D] in (0, 1), classes, groups and
sample ids of both. ``simlap`` is the objective that is made of these parts; ``row_losses`` has the
losses of rows that meet all candidates in the same dimensions.

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

from mclclip.objectives.row_losses import blocks, refuse_second_derivative
from mclclip.ranks.process_group import not_compiled
from mclclip.util.randomness import Integers, mix

_TINY = 1e-24  # of a squared length
Penalty = Literal["paper", "neg_glog", "bernoulli"]
Pairing = Literal["arbitrary", "identical", "distinct", "n_closest"]


def draw_partners(
    classes: Integers,
    sample_ids: Integers,
    key: np.uint64,
    pairing: Pairing = "arbitrary",
    closest: Integers | None = None,
) -> Integers:
    """[B] int64: the class that each sample of the global batch is paired with; -1: there is none.

    It is SimLAP's second label y2 (section 3.3, "one label from a mini-batch"; Fig. 8: pairs of the
    N closest classes). A draw depends on the seed, the step and the sample alone, so all ranks make
    the same one, and a resumed run makes it again.

    classes, sample_ids   [B] of the global batch; equal ids get equal partners
    key                   of the step: every key is another draw
    pairing               ``arbitrary``: any class of the batch, uniformly; ``identical``: the
                          sample's own; ``distinct``: any other; ``n_closest``: its own or one of
                          its closest, those of them that the batch has, uniformly
    closest               for ``n_closest``, of each class of the batch in order (``np.unique``) the
                          classes closest to it, [P, n], its own not among them

    -1 is given by ``distinct`` alone, where the batch has one class.
    """
    if pairing == "identical":
        return classes.copy()
    present, position = np.unique(classes, return_inverse=True)
    numbers = np.asarray(mix(int(key), sample_ids))
    if pairing == "n_closest":
        assert closest is not None
        near = np.sort(np.column_stack([present, closest]), axis=1)
        reached = np.isin(near, present).cumsum(axis=1)  # present classes up to each column
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
    """[P, count] int64: the classes whose vectors have the largest cosine with a class's own.

    ``vectors`` [K, E] has a row per class, ``classes`` [P] are the classes asked about; a class is
    not among its own closest. ``count`` is below K.
    """
    unit = functional.normalize(vectors.detach(), dim=1)
    cosine = unit[classes] @ unit.T
    cosine.scatter_(1, classes[:, None], float("-inf"))
    return cosine.topk(count, dim=1).indices


@dataclass(frozen=True)
class ClassPairs:
    """Positives and negatives, among the candidates, of rows of the classes ``labels``.

    A candidate counts where its group is the row's. It is a positive where its class is the row's
    ``partners`` and its sample another one, a negative where its class is neither the row's nor the
    partner; the rest of the row's own class is ignored. A partner of -1 is nobody's class.

    ``labels``, ``partners``, ``sample_id`` and ``groups`` are [b] int64 of the rows;
    ``all_labels``, ``all_sample_ids`` and ``all_groups`` [N] int64 of the candidates.
    """

    labels: Tensor
    partners: Tensor
    sample_id: Tensor
    groups: Tensor
    all_labels: Tensor
    all_sample_ids: Tensor
    all_groups: Tensor

    def masks(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Positives and negatives of a tile, each bool [r, c]."""
        theirs, partners = self.all_labels[columns], self.partners[rows, None]
        same_group = self.groups[rows, None] == self.all_groups[columns]
        positive = (partners == theirs) & same_group
        negative = same_group & ~positive & (self.labels[rows, None] != theirs)
        positive &= self.sample_id[rows, None] != self.all_sample_ids[columns]
        return positive, negative


def gated_queries(rows: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Features and gates [b, D] -> the arguments ``queries`` and ``weights`` of ``pair_losses``.

    With them a score is the cosine of the gated row and the gated candidate. It does not depend on
    the lengths of rows, gates (which are brought to a largest value of 1) and candidates.
    """
    gates = gates / gates.detach().amax(dim=1, keepdim=True).clamp_min(_TINY)
    weights = gates.square()
    length = torch.linalg.vector_norm(rows * gates, dim=1, keepdim=True)
    return rows * weights / length.clamp_min(_TINY**0.5), weights


# A compiler would unroll the loop over tiles.
@not_compiled
def pair_losses(
    queries: Tensor, weights: Tensor | None, keys: Tensor, pairs: ClassPairs, tile: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's loss: the mean, over its positives, of the cross-entropy of one positive among
    itself and the row's negatives.

    Args:
        queries: [b, D], already multiplied by the logit scale.
        weights: [b, D], at least 0; scores are queries @ keys.T / sqrt(weights @ (keys^2).T). None:
            they are queries @ keys.T.
        keys: [N, D], of the queries' dtype.
        pairs: which candidates are positives and negatives.
        tile: rows and candidates whose scores are computed at a time.

    Returns:
        losses [b], differentiable once in queries, weights and keys, 0 for rows without a positive
        or without a negative; numbers of positives and of negatives, int64 [b] each.
        Raises RuntimeError where a second derivative is prepared (create_graph=True).
    """
    losses, positives, negatives = _PairLosses.apply(  # type: ignore[no-untyped-call]
        queries, weights, keys, pairs, tile
    )
    return losses, positives, negatives


def _scores(queries: Tensor, weights: Tensor | None, keys: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scores [r, c] of a tile, and what the products were multiplied by (None: nothing)."""
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
    """Of one row block, [r] each: sums over positives of their losses and of their pulls, the
    log-sum-exp of negatives, and the numbers of positives and negatives."""
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
        finite = maximum.clamp_min(torch.finfo(maximum.dtype).min)  # -inf minus itself is nan
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
    """See ``pair_losses``."""

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
    """Label embedding, mean of the two labels, and a perceptron whose sigmoids are the gates.

    The layers are those of Table 5c: batch norm, ReLU, linear, batch norm, ReLU, linear, sigmoid
    (the text says three layers, the table has two linear ones). Engines take the statistics of its
    batch norms over the global batch.

    num_classes   classes that have an embedding
    dim           D, number of gates
    label_dim     width of the label embedding; the paper's is 512
    hidden_dim    width of the hidden layer; the paper's is 1,024
    seed          of the initial weights, which are alike on all ranks
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
        self.num_classes = num_classes
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
        """Classes [n] and [n], int64 -> gates [n, D] in (0, 1); symmetric in the two."""
        mean = (self.labels(first) + self.labels(second)) / 2
        return torch.sigmoid(self.layers(mean))

    def of_classes(self) -> Tensor:
        """[K, D]: the gates of every class by itself, by the running statistics of the batch norms.

        The penalty is of them.
        """
        classes = torch.arange(self.labels.num_embeddings, device=self.labels.weight.device)
        training = self.training
        self.eval()
        try:
            gates: Tensor = self(classes, classes)
        finally:
            self.train(training)
        return gates


class OpenGates(nn.Module):
    """In place of a label filter: every gate is 1, so that all classes meet in all dimensions.

    num_classes   classes that samples may have
    dim           D, number of gates
    """

    def __init__(self, num_classes: int, dim: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.num_classes, self.dim, self.dtype = num_classes, dim, dtype

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Classes [n] and [n], int64 -> ones [n, D]."""
        return torch.ones(len(first), self.dim, dtype=self.dtype, device=first.device)


def normed(features: Tensor, norm: nn.Module | None) -> Tensor:
    """Features [n, D] as gates are applied to them: after the layer norm, if there is one.

    They are brought to length sqrt(D) first, so that the norm's epsilon does not count.
    """
    if norm is None:
        return features
    result: Tensor = norm(functional.normalize(features) * math.sqrt(features.shape[1]))
    return result


def gate_penalty(gates: Tensor, kind: Penalty) -> Tensor:
    """The mean over gates [K, D] of

    paper       g log g, Eq. 5 as printed: in [-1/e, 0]; making it small draws gates to 1/e
    neg_glog    -g log g: making it small draws gates to 0 or 1, as the text of Eq. 5 wants
    bernoulli   -g log g - (1 - g) log(1 - g): the same, alike for open and for closed gates
    """
    terms: Tensor = torch.special.entr(gates)  # -g log g, 0 at 0
    if kind == "bernoulli":
        terms = terms + torch.special.entr(1.0 - gates)
    return -terms.mean() if kind == "paper" else terms.mean()
