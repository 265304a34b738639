"""Class centers: learned rows of a head with up to millions of classes, shared out over the ranks.

PartialFC (An et al., 2021) keeps each rank's rows on that rank, gathers the samples' features, and
sums over ranks what the loss needs. Rows are cut as DTensor cuts them (the last ranks may have
fewer or none), so that a checkpoint of W ranks goes on with any other number. Their gradients are
never averaged: they stay outside of what DDP, FSDP and ZeRO wrap, and have an optimizer of their
own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mclclip.ranks import collectives
from mclclip.ranks.process_group import SINGLE, Context
from mclclip.ranks.sharded_rows import ShardedRows
from mclclip.ranks.transfer import to_device

Rule = Literal["two_path", "exclude_positives", "partial_fc"]
InitialRows = Callable[[int, int], Tensor]
"""(start, stop) -> [stop - start, D]: the initial rows of these classes."""

_ROWS_PER_DRAW = 4_096  # rows of one random generator; part of the initial values
_STATE = ("rows", "exp_avg", "exp_avg_sq", "steps")


@dataclass(frozen=True)
class HeadOptimizer:
    """AdamW of the class centers (Loshchilov and Hutter, 2019).

    ``lazy``: only rows that a step touches (its positives and its drawn negatives) move, and each
    counts its own steps. Otherwise all rows move, along their momentum and towards zero, whether
    they were touched or not, as any dense AdamW does; with a tenth of the classes drawn a row
    then moves ten times as often. ``lr_scale`` multiplies the training's learning rate.
    """

    lr_scale: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    lazy: bool = False


class ShardedClassCenters:
    """``num_classes`` rows of width ``dim``; this rank holds the classes ``start`` to ``stop``.

    draw      step -> int64 ids of the classes that serve as negatives in that step, in the order
              in which they were drawn: the same on all ranks (None: all classes)
    rule      ``two_path``: the drawn ones; ``exclude_positives``: those of them that are positive
              for no row of the batch; ``partial_fc``: all positives of the batch, and of the drawn
              ones as many as are left of their number (PartialFC's rule)
    initial   the rows at the start
    dtype     float32, or float64 for checks

    Gradients are kept for the touched rows only: ``touched`` int64 [t], ascending and in main
    memory, and ``grad`` [t, D]. Raises ValueError for fewer than one class and for initial rows of
    another width.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        initial: InitialRows,
        *,
        context: Context = SINGLE,
        draw: Callable[[int], npt.NDArray[np.int64]] | None = None,
        rule: Rule = "two_path",
        optimizer: HeadOptimizer | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes is {num_classes}: wanted at least 1")
        self.num_classes, self.dim, self.context = num_classes, dim, context
        self.rule, self.optimizer = rule, optimizer or HeadOptimizer()
        self._shards = ShardedRows(num_classes, context)
        self.start, self.stop = self._shards.start, self._shards.stop
        rows = collectives.together(lambda: initial(self.start, self.stop))  # may read a file
        if tuple(rows.shape) != (self.stop - self.start, dim):
            raise ValueError(
                f"initial class centers are {list(rows.shape)}: wanted "
                f"{[self.stop - self.start, dim]}, as wide as the features that are compared; "
                "centroids of an encoder of another width cannot start them: set centers=normal"
            )
        self.rows = rows.to(context.device, dtype, copy=True)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.rows), torch.zeros_like(self.rows)
        self.steps = torch.zeros(len(rows), dtype=torch.int32, device=context.device)
        self._draw, self._drawn = draw, np.arange(num_classes)
        self.loss_scale: Tensor | float = 1.0
        self.touched: Tensor | None = None
        self.grad: Tensor | None = None

    # --- a step --------------------------------------------------------------------------------

    def begin(self, step: int, loss_scale: Tensor | float = 1.0) -> None:
        """Draws the negatives of a step; the loss that is differentiated in it will be multiplied
        by ``loss_scale``."""
        self.loss_scale = loss_scale
        if self._draw is not None:
            self._drawn = self._draw(step)

    def negatives(self, labels: Tensor) -> Tensor:
        """int64 [n], ascending: rows of this rank that are negatives for the batch with positives
        ``labels`` [B, l] (-1: none); both in main memory."""
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
        own = np.sort(drawn[(drawn >= self.start) & (drawn < self.stop)]) - self.start
        return torch.from_numpy(own)

    def add_gradient(self, touched: Tensor, grad: Tensor) -> None:
        """Adds the gradient [t, D] of the rows ``touched`` [t], ascending, in main memory."""
        if self.touched is None or self.grad is None:
            self.touched, self.grad = touched, grad
            return
        union = torch.unique(torch.cat([self.touched, touched]))
        total = self.grad.new_zeros((len(union), self.dim))
        for ids, part in ((self.touched, self.grad), (touched, grad)):
            total[to_device(torch.searchsorted(union, ids), total.device)] += part
        self.touched, self.grad = union, total

    def zero_grad(self) -> None:
        """Forgets the gradient."""
        self.touched = self.grad = None

    def grad_square(self) -> Tensor:
        """The sum of squares of the gradient over all ranks, float64, 0-dimensional."""
        here = torch.zeros((), dtype=torch.float64, device=self.context.device)
        if self.grad is not None:
            here = torch.linalg.vector_norm(self.grad, dtype=torch.float64).square()
        return collectives.all_reduce_sum(here)

    def step(self, lr: float, factor: Tensor | float = 1.0) -> None:
        """One AdamW step along ``factor`` times the gradient, at lr_scale times ``lr``."""
        if self.touched is None or self.grad is None:
            return
        lr *= self.optimizer.lr_scale
        at_once = 16_384 if self.rows.device.type == "cuda" else 1024  # a CPU's cache holds that
        touched = to_device(self.touched, self.rows.device)
        if self.optimizer.lazy:
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
        """AdamW of some rows; each corrects the bias of its moments by its own count."""
        how = self.optimizer
        self.steps[where] += 1
        count = self.steps[where].to(grad.dtype)[:, None]
        first = self.exp_avg[where].lerp_(grad, 1.0 - how.betas[0])
        second = self.exp_avg_sq[where].mul_(how.betas[1])
        second.addcmul_(grad, grad, value=1.0 - how.betas[1])
        if isinstance(where, Tensor):  # what an index takes out is a copy
            self.exp_avg[where], self.exp_avg_sq[where] = first, second
        size = second.sqrt().div_((1.0 - how.betas[1] ** count).sqrt_()).add_(how.eps)
        change = (first / size).mul_(lr / (1.0 - how.betas[0] ** count))
        rows = self.rows[where]
        self.rows[where] = rows.mul_(1.0 - lr * how.weight_decay).sub_(change)

    # --- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """``class_centers.NAME``: rows, moments and step counts, as shards of one tensor each."""
        return {f"class_centers.{name}": self._shards.whole(getattr(self, name)) for name in _STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes what ``state_dict`` gave, filled with other values."""
        for name in _STATE:
            getattr(self, name).copy_(self._shards.local(state[f"class_centers.{name}"]))


def normal_rows(dim: int, seed: int, deviation: float = 0.01) -> InitialRows:
    """Rows drawn from a normal distribution: the same for any number of ranks.

    Source: UNICOM and PartialFC start so.
    """

    def rows(start: int, stop: int) -> Tensor:
        first = start // _ROWS_PER_DRAW * _ROWS_PER_DRAW
        blocks = [
            np.random.default_rng([seed, block]).standard_normal((_ROWS_PER_DRAW, dim), np.float32)
            for block in range(first, stop, _ROWS_PER_DRAW)
        ]
        drawn = np.concatenate([np.zeros((0, dim), np.float32), *blocks])
        return torch.from_numpy(drawn[start - first : stop - first] * np.float32(deviation))

    return rows
