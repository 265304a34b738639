"""Class centers: learned rows of a head with up to millions of classes, shared out over the ranks.

Each rank keeps its own rows; it gathers the samples' features of all ranks, and the ranks add up
what the loss needs. Rows are cut as DTensor cuts them (the last ranks may have fewer or none), so
that a checkpoint can be loaded by any number of ranks. Gradients of rows are never averaged:
engines (DDP, FSDP, ZeRO) do not wrap them, and they have an optimizer of their own.

A loss sums over positive and negative classes of a batch. For row i with unit feature e, unit class
centers w, and scores s = scale * (e . w):

    P_i = sum of exp(-scale * phi(e . w_j)) over its positives j,
    N_i = sum of exp(s_ij) over the drawn negatives j that are not its positives.

MLCD, MLC and the softmax loss are functions of these two numbers. The forward pass gathers features
and labels, and adds [B, 2] numbers over the ranks; the backward pass adds the features' gradients
and hands them to their owners. Scores are computed in tiles, twice, and never exist whole. P and N
are added up in float64, which holds both exp(-scale) and exp(scale), so ranks need not agree on the
largest score first.

Source: An et al., "Partial FC: Training 10 Million Identities on a Single Machine" (2020),
arXiv:2010.05222; MLCD (arXiv:2407.17331), Eq. 4 to 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mclclip.objectives.products import EXACT, Products
from mclclip.objectives.row_losses import refuse_second_derivative
from mclclip.ranks import collectives
from mclclip.ranks.process_group import SINGLE, Context, choose_no_autocast, not_compiled, to_device
from mclclip.ranks.sharded_rows import ShardedRows
from mclclip.util.pair_products import pair_products, starts_of, weighted_sums

Rule = Literal["two_path", "exclude_positives", "partial_fc"]
InitialRows = Callable[[int, int], Tensor]
"""A function of (start, stop) that returns the initial rows of these classes, [stop - start, D]."""

_ROWS_PER_DRAW = 4_096  # rows of one random generator; the initial rows depend on it
_NEAR_ONE = 1.0 - 1e-4  # of a cosine; the derivative of the angle is infinite at 1
_STATE = ("rows", "exp_avg", "exp_avg_sq", "steps")


class ShardedClassCenters:
    """The class centers of ``num_classes`` classes, with their AdamW; this rank holds those of the
    classes ``start`` to ``stop``, as ``rows`` [stop - start, dim].

    draw      a function of the step that returns the classes which serve as its negatives, int64,
              in the order in which they were drawn, the same on all ranks (None: all classes)
    rule      which negatives a batch has: ``two_path``: the drawn classes; ``exclude_positives``:
              those of them that are positive for no row of the batch; ``partial_fc``: all positives
              of the batch, and then drawn ones up to the number that was drawn (PartialFC's rule)
    initial   gives the rows at the start (None: any values, if only shapes count)
    dtype     float32, or float64 for checks

    The learning rate of their AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) is ``lr_scale``
    times the training's. With ``lazy`` only the rows that a step touches (its positives and its
    negatives) move, and each counts its own steps. Otherwise all rows move, along their momentum
    and towards zero, as with any dense AdamW; with a tenth of the classes drawn, a row then moves
    ten times as often.

    Only touched rows have gradients: ``grad`` [t, D] of the rows ``touched``, int64 [t], ascending,
    in main memory. Raises ValueError for initial rows of another width.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        initial: InitialRows | None,
        *,
        context: Context = SINGLE,
        draw: Callable[[int], npt.NDArray[np.int64]] | None = None,
        rule: Rule = "two_path",
        lr_scale: float = 1.0,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        lazy: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_classes, self.dim, self.context = num_classes, dim, context
        self.rule, self.lr_scale, self.weight_decay = rule, lr_scale, weight_decay
        self.betas, self.eps, self.lazy = betas, eps, lazy
        self._shards = ShardedRows(num_classes, context)
        self.start, self.stop = self._shards.start, self._shards.stop
        rows = torch.empty(self.stop - self.start, dim)
        if initial is not None:  # it may read a file, and fail on one rank
            rows = collectives.raise_on_every_rank(lambda: initial(self.start, self.stop))
        if tuple(rows.shape) != (self.stop - self.start, dim):
            raise ValueError(
                f"initial class centers are {list(rows.shape)}: wanted "
                f"{[self.stop - self.start, dim]}, as wide as the features that are compared; "
                "centroids of an encoder of another width cannot start them: set centers=normal"
            )
        self.rows = rows.to(context.device, dtype, copy=True)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.rows), torch.zeros_like(self.rows)
        self.steps = torch.zeros(len(rows), dtype=torch.int32, device=context.device)
        self.draw, self._drawn = draw, np.arange(num_classes)
        self.loss_scale: Tensor | float = 1.0
        self.touched: Tensor | None = None
        self.grad: Tensor | None = None

    # --- a step --------------------------------------------------------------------------------

    def begin(self, step: int, loss_scale: Tensor | float = 1.0) -> None:
        """Draws the negatives of a step, whose loss will be multiplied by ``loss_scale`` before it
        is differentiated."""
        self.loss_scale = loss_scale
        if self.draw is not None:
            self._drawn = self.draw(step)

    def negatives(self, labels: Tensor) -> Tensor:
        """Returns which of this rank's rows are negatives of a batch, int64 [n], ascending.
        ``labels`` [B, l] are the batch's positive classes (-1: none). Both are in main memory."""
        drawn = self._drawn
        if self.rule != "two_path":
            positives = np.unique(labels.numpy())
            positives = positives[positives >= 0]
            others = drawn[~np.isin(drawn, positives)]
            if self.rule == "exclude_positives":
                drawn = others
            else:
                room = max(len(drawn) - len(positives), 0)
                drawn = np.concatenate([positives, others[:room]])
        is_drawn = np.zeros(self.stop - self.start, dtype=bool)  # faster than a sort
        is_drawn[drawn[(drawn >= self.start) & (drawn < self.stop)] - self.start] = True
        return torch.from_numpy(np.flatnonzero(is_drawn))

    def add_gradient(self, touched: Tensor, grad: Tensor) -> None:
        """Adds ``grad`` [t, D], the gradient of the rows ``touched`` [t], ascending, in main
        memory."""
        if self.touched is None or self.grad is None:
            self.touched, self.grad = touched, grad
            return
        union = torch.unique(torch.cat([self.touched, touched]))
        total = self.grad.new_zeros((len(union), self.dim))
        for ids, part in ((self.touched, self.grad), (touched, grad)):
            total[to_device(torch.searchsorted(union, ids), total.device)] += part
        self.touched, self.grad = union, total

    def zero_grad(self) -> None:
        """Deletes the gradient."""
        self.touched = self.grad = None

    def grad_square(self) -> Tensor:
        """Returns the sum of squares of the gradient over all ranks, a float64 scalar."""
        here = torch.zeros((), dtype=torch.float64, device=self.context.device)
        if self.grad is not None:
            here = torch.linalg.vector_norm(self.grad, dtype=torch.float64).square()
        return collectives.all_reduce_sum(here)

    def step(self, lr: float, factor: Tensor | float = 1.0) -> None:
        """Makes one step of AdamW along ``factor`` times the gradient; ``lr`` is the training's."""
        if self.touched is None or self.grad is None:
            return
        lr *= self.lr_scale
        at_once = 16_384 if self.rows.device.type == "cuda" else 1024  # fits a CPU's cache
        touched = to_device(self.touched, self.rows.device)
        if self.lazy:
            for first in range(0, len(touched), at_once):
                part = slice(first, first + at_once)
                self._move(touched[part], self.grad[part] * factor, lr)
            return
        for first in range(0, len(self.rows), at_once):
            stop = min(first + at_once, len(self.rows))
            grad = self.rows.new_zeros((stop - first, self.dim))
            at, end = torch.searchsorted(self.touched, torch.tensor([first, stop])).tolist()
            grad[touched[at:end] - first] = self.grad[at:end] * factor
            self._move(slice(first, stop), grad, lr)

    def _move(self, where: Tensor | slice, grad: Tensor, lr: float) -> None:
        """Moves some rows by AdamW; each corrects the bias of its moments by its own step count."""
        self.steps[where] += 1
        count = self.steps[where].to(grad.dtype)[:, None]
        first = self.exp_avg[where].lerp_(grad, 1.0 - self.betas[0])
        second = self.exp_avg_sq[where].mul_(self.betas[1])
        second.addcmul_(grad, grad, value=1.0 - self.betas[1])
        if isinstance(where, Tensor):  # then indexing has copied the moments
            self.exp_avg[where], self.exp_avg_sq[where] = first, second
        size = second.sqrt().div_((1.0 - self.betas[1] ** count).sqrt_()).add_(self.eps)
        change = (first / size).mul_(lr / (1.0 - self.betas[0] ** count))
        rows = self.rows[where]
        self.rows[where] = rows.mul_(1.0 - lr * self.weight_decay).sub_(change)

    # --- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Returns rows, moments and step counts, such as ``class_centers.exp_avg``; each is this
        rank's shard of one tensor."""
        return {f"class_centers.{name}": self._shards.whole(getattr(self, name)) for name in _STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes what ``state_dict`` gave, filled with other values."""
        for name in _STATE:
            getattr(self, name).copy_(self._shards.local(state[f"class_centers.{name}"]))


def normal_rows(dim: int, seed: int, deviation: float = 0.01) -> InitialRows:
    """Returns initial rows from a normal distribution, the same for any number of ranks, as in
    UNICOM and PartialFC."""

    def rows(start: int, stop: int) -> Tensor:
        first = start // _ROWS_PER_DRAW * _ROWS_PER_DRAW
        blocks = [
            np.random.default_rng([seed, block]).standard_normal((_ROWS_PER_DRAW, dim), np.float32)
            for block in range(first, stop, _ROWS_PER_DRAW)
        ]
        drawn = np.concatenate([np.zeros((0, dim), np.float32), *blocks])
        return torch.from_numpy(drawn[start - first : stop - first] * np.float32(deviation))

    return rows


# --- sums of a batch -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Margin:
    """Computes phi(c), which replaces the cosine c of a positive class, and its derivative.

    kind      ``arc``: cos(arccos c + size), and c - size * sin(size) if the angle would pass pi, so
              that phi falls further (ArcFace, Deng et al., 2019, arXiv:1801.07698); ``cos``:
              c - size (CosFace, Wang et al., 2018, arXiv:1801.09414); ``none``: c. MLCD says "m =
              0.3 for the positive classes, following ArcFace" and no more
    gradient  ``straight_through`` takes the derivative as 1, as PartialFC's code does

    With ``arc`` cosines are clamped to 1 - 1e-4.
    """

    kind: Literal["arc", "cos", "none"] = "arc"
    size: float = 0.3
    gradient: Literal["exact", "straight_through"] = "exact"

    def __call__(self, cosine: Tensor) -> Tensor:
        """Returns phi(c) of each cosine."""
        if self.kind == "none":
            return cosine
        if self.kind == "cos":
            return cosine - self.size
        c = cosine.clamp(-_NEAR_ONE, _NEAR_ONE)
        turned = c * math.cos(self.size) - (1.0 - c.square()).sqrt() * math.sin(self.size)
        beyond_pi = c < -math.cos(self.size)
        return torch.where(beyond_pi, c - self.size * math.sin(self.size), turned)

    def derivative(self, cosine: Tensor) -> Tensor:
        """Returns the derivative of phi at each cosine."""
        if self.kind != "arc" or self.gradient == "straight_through":
            return torch.ones_like(cosine)
        c = cosine.clamp(-_NEAR_ONE, _NEAR_ONE)
        exact = math.cos(self.size) + c / (1.0 - c.square()).sqrt() * math.sin(self.size)
        beyond_pi = c < -math.cos(self.size)
        slope = torch.where(beyond_pi, torch.ones_like(c), exact)
        return torch.where(cosine.abs() <= _NEAR_ONE, slope, torch.zeros_like(c))


# Not compiled, because a compiler would unroll the loops over tiles, and compile again for every
# step's negatives.
@not_compiled
def class_sums(
    features: Tensor,
    labels: Tensor,
    centers: ShardedClassCenters,
    *,
    scale: float,
    margin: Margin,
    tile: int | None = None,
    products: Products = EXACT,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Returns log P and log N of every row of the global batch, and figures to log.

    Args:
        features: [b, D] of this rank, unit length, float32 or float64. All ranks have the same b.
        labels: int64 [b, l], the positive classes of each row, -1 for none, in main memory (on a
            GPU, the host would wait for them).
        centers: must have begun this step (``begin``). The backward adds their gradient to them.
        scale: multiplier of cosines.
        margin: of positive cosines.
        tile: rows and classes of the scores that are computed at a time.
        products: of features and negative class centers, and of their gradients.

    Returns:
        log P and log N, [B] each, the same on every rank, differentiable once. Every rank computes
        the loss of the whole global batch, and engines average gradients over ranks, so the
        gradient of ``features`` is multiplied by the number of ranks. Then bool [B]: the row has a
        positive, and counts. Then figures by name, such as ``positive_cosine``: their mean over the
        ranks (if ``max`` is in the name, the largest) is the figure of the global batch.
    """
    with choose_no_autocast(features.device):
        every = collectives.gather(labels.cpu().int()).long()
        size = tile or (2048 if features.device.type == "cpu" else 8192)
        batch = _ClassBatch(centers, every, scale, margin, size, products)
        log_p, log_n = _ClassSums.apply(features, batch)  # type: ignore[no-untyped-call]
    return log_p, log_n, batch.counted, batch.figures


class _ClassSums(torch.autograd.Function):
    """Computes the sums of ``class_sums`` and their gradients."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, batch: _ClassBatch) -> tuple[Tensor, Tensor]:
        every = collectives.gather(features)
        positive, cosine = batch.positive_sums(every)
        negative, largest = batch.negative_sums(every)
        sums = collectives.all_reduce_sum(torch.stack([positive, negative], dim=1))
        log_p, log_n = (column.log().to(every.dtype) for column in sums.unbind(dim=1))
        ranks = collectives.world_size()
        batch.figures = {
            "positive_cosine": cosine.sum() * ranks / batch.num_positives,
            "max_negative_cosine": largest,
            "positives_per_row": batch.num_positives / batch.counted.sum().clamp_min(1),
            "distinct_positives": (batch.uses > 0).sum() * ranks,
            "conflicts": (batch.uses[batch.of_negatives] > 0).sum() * ranks,
        }
        ctx.save_for_backward(every, cosine, log_p, log_n)
        ctx.batch = batch
        return log_p, log_n

    @staticmethod
    def backward(ctx: Any, grad_p: Tensor, grad_n: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative("the loss of the class centers")
        every, cosine, log_p, log_n = ctx.saved_tensors
        batch: _ClassBatch = ctx.batch
        with choose_no_autocast(every.device):
            grad, of_centers = batch.pull_positives(every, cosine, log_p, grad_p)
            batch.pull_negatives(every, log_n, grad_n, grad, of_centers)
            batch.centers.add_gradient(batch.touched_here, of_centers)
            # Engines will average over the ranks, but the gradient is a sum over them.
            local_grad = collectives.sum_to_owner(grad) * collectives.world_size()
        return local_grad, None


class _ClassBatch:
    """The positives and negatives of a batch among this rank's classes, and tiles of their scores.

    All of it follows from ``labels`` [B, l]. They are sorted and counted in main memory, and only
    the results go to the device, because tensors whose length depends on values would make the host
    wait. A class has two numbers: its row on this rank, and its position among the t rows that the
    batch touches, as positives or negatives. ``touched`` [t] are these rows, and ``touched_here``
    the same in main memory.
    """

    def __init__(
        self, centers: ShardedClassCenters, labels: Tensor, scale: float, margin: Margin, tile: int,
        products: Products,
    ) -> None:  # fmt: skip
        self.centers, self.scale, self.margin, self.tile = centers, scale, margin, tile
        self.products = products
        self.shape, rows = labels.shape, centers.rows
        self.figures: dict[str, Tensor] = {}
        moved = partial(to_device, device=rows.device)
        self.counted = moved((labels >= 0).any(dim=1))
        self.num_positives = moved((labels >= 0).sum().clamp_min(1))
        # The pairs of a row and a positive class, in the order of rows; then their order by class.
        is_local = (labels >= centers.start) & (labels < centers.stop)
        row, positives = is_local.nonzero()[:, 0], labels[is_local] - centers.start
        self.own, self.row, self.positives = moved(is_local), moved(row), moved(positives)
        self.row_starts = moved(starts_of(is_local.sum(dim=1)))
        self.by_class = moved(positives.argsort(stable=True))
        # The touched classes, and the positions of negatives and positives among them.
        negatives, uses = centers.negatives(labels), torch.bincount(positives, minlength=len(rows))
        takes_part = uses > 0
        takes_part[negatives] = True
        self.touched_here = takes_part.nonzero()[:, 0]
        position = takes_part.cumsum(0) - 1
        self.touched, self.uses = moved(self.touched_here), moved(uses[self.touched_here])
        self.of_negatives, self.of_positives = (
            moved(position[negatives]),
            moved(position[positives]),
        )
        squares = pair_products(rows, rows, starts_of(moved(takes_part)), self.touched)
        self.inverse = squares.sqrt_().clamp_min_(1e-12).reciprocal_()
        # Places of scores whose class is both drawn and positive for the row, in tile order.
        column = torch.full((len(rows),), -1)
        column[negatives] = torch.arange(len(negatives))
        column = column[positives]
        row, column = row[column >= 0], column[column >= 0]
        per_block = -(-len(labels) // tile)
        number = column // tile * per_block + row // tile
        order = number.argsort(stable=True)
        self._drawn = moved(row[order] % tile), moved(column[order] % tile)
        num_tiles = per_block * -(-len(negatives) // tile)
        self._ends = [0, *torch.bincount(number, minlength=num_tiles).cumsum(0).tolist()]

    # --- sums ----------------------------------------------------------------------------------

    def positive_sums(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of P, float64 [B], and the cosines of its positive pairs [n]."""
        cosine = pair_products(features, self.centers.rows, self.row_starts, self.positives)
        cosine *= self.inverse[self.of_positives]
        terms = torch.exp(-self.scale * self.margin(cosine).double())
        sums = terms.new_zeros(self.shape).masked_scatter_(self.own, terms).sum(dim=1)
        return sums, cosine

    def negative_sums(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of N, float64 [B], and the largest cosine of a negative."""
        sums = features.new_zeros(len(features), dtype=torch.float64)
        largest = features.new_full((), -self.scale)
        for _, _, tiles in self._negative_blocks(features):
            for rows, scores in tiles:
                top = scores.amax(dim=1).clamp_min_(-self.scale)  # -inf if all are masked
                largest = torch.maximum(largest, top.amax())
                terms = scores.sub_(top[:, None]).exp_().sum(dim=1)
                sums[rows] += terms.double() * top.double().exp_()
        return sums, largest / self.scale

    def _negative_blocks(
        self, features: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Iterator[tuple[slice, Tensor]]]]:
        """Yields, for blocks of m negatives: their unit class centers [m, D], their positions [m]
        among the touched, and an iterator over tiles of ``features``, which gives the rows of a
        tile and their scores [r, m], valid until the next tile."""
        scaled = self.products.factor(features * self.scale)
        count = min(self.tile, len(scaled)) * min(self.tile, len(self.of_negatives))
        memory = features.new_empty(count)
        for block, first in enumerate(range(0, len(self.of_negatives), self.tile)):
            positions = self.of_negatives[first : first + self.tile]
            centers = self.centers.rows.index_select(0, self.touched[positions])
            centers.mul_(self.inverse[positions, None])
            factor = self.products.factor(centers)
            yield centers, positions, self._scores(scaled, factor, block, memory)

    def _scores(
        self, scaled: Tensor, centers: Tensor, block: int, memory: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        starts = range(0, len(scaled), self.tile)
        for number, start in enumerate(starts, block * len(starts)):
            rows = slice(start, start + self.tile)
            shape = len(scaled[rows]), len(centers)
            scores = memory[: shape[0] * shape[1]].view(shape)
            self.products.multiply(scaled[rows], centers.T, out=scores)
            first, stop = self._ends[number], self._ends[number + 1]
            if first < stop:  # a row's own positives are no negatives of it
                row, column = (index[first:stop] for index in self._drawn)
                scores[row, column] = float("-inf")
            yield rows, scores

    # --- gradients -----------------------------------------------------------------------------

    def pull_positives(
        self, features: Tensor, cosine: Tensor, log_p: Tensor, grad_p: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients through P of the features, [B, D], and of the touched class
        centers, [t, D]; the latter are divided by the loss scale."""
        shares = torch.exp(-self.scale * self.margin(cosine) - log_p[self.row])
        slope = self.margin.derivative(cosine) * self.inverse[self.of_positives]
        weights = -self.scale * grad_p[self.row] * shares * slope
        rows = self.centers.rows
        of_features = weighted_sums(rows, self.positives, self.row_starts, weights)
        pairs, starts = self.by_class, starts_of(self.uses)
        weights = weights[pairs] / self.centers.loss_scale
        of_centers = weighted_sums(features, self.row[pairs], starts, weights)
        # Through w / |w| only the part that is orthogonal to w remains.
        along = weighted_sums(cosine[:, None], pairs, starts, weights) * self.inverse[:, None]
        for first in range(0, len(of_centers), self.tile):
            part = slice(first, first + self.tile)
            touched = rows.index_select(0, self.touched[part])
            of_centers[part].addcmul_(touched, along[part], value=-1.0)
        return of_features, of_centers

    def pull_negatives(
        self,
        features: Tensor,
        log_n: Tensor,
        grad_n: Tensor,
        of_features: Tensor,
        of_centers: Tensor,
    ) -> None:
        """Adds the gradients through N to ``of_features`` [B, D] and ``of_centers`` [t, D]."""
        # An empty sum: inf, so that exp(score - log_n) is 0.
        log_n = log_n.masked_fill(log_n == float("-inf"), float("inf"))
        weights, factor = self.scale * grad_n, self.products.factor(features)
        for centers, positions, tiles in self._negative_blocks(features):
            grad, of_block = torch.zeros_like(centers), self.products.factor(centers)
            for rows, scores in tiles:
                shares = scores.sub_(log_n[rows, None]).exp_().mul_(weights[rows, None])
                shares = self.products.factor(shares)
                of_features[rows] += self.products.multiply(shares, of_block)
                grad += self.products.multiply(shares.T, factor[rows])
            along = (grad * centers).sum(dim=1, keepdim=True)
            grad.addcmul_(centers, along, value=-1.0)
            grad.mul_(self.inverse[positions, None] / self.centers.loss_scale)
            of_centers.index_add_(0, positions, grad)  # exact, since no position comes twice
