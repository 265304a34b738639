"""Contrastive losses written out row by row with plain loops, from the formulas of the papers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.base import Objective
from mclclip.objectives.contrast import DIGESTS


@dataclass
class Batch:
    """Raw features of two sides and the model's logit scale, with gradient, and marks."""

    first: Tensor
    second: Tensor
    scale: Tensor
    labels: Tensor
    sample_id: Tensor
    classes: Tensor
    digests: tuple[Tensor, ...] = ()  # equal in one of them: equal captions or pictures

    def unit(self) -> tuple[Tensor, Tensor]:
        return functional.normalize(self.first, dim=-1), functional.normalize(self.second, dim=-1)

    def run(self, objective: Objective, second: str = "image_features_1") -> dict[str, Tensor]:
        """The objective's parts; the loss has been pulled back."""
        image, other = self.unit()
        features = {"image_features": image, second: other, "logit_scale": self.scale}
        parts: dict[str, Tensor] = objective(
            **features,
            labels=self.labels[:, None],
            sample_id=self.sample_id,
            classes=self.classes[:, None],
            **dict(zip(DIGESTS, self.digests, strict=False)),
        )
        parts["loss"].backward()
        return parts

    def gradients(self) -> list[Tensor]:
        """Of both sides and the scale; zeros where none arrived."""
        leaves = (self.first, self.second, self.scale)
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]

    def rows(self, chosen: Any) -> Batch:
        """Some of the samples, as a batch of its own."""
        marks = (self.labels[chosen], self.sample_id[chosen], self.classes[chosen])
        sides = (side.detach()[chosen].clone() for side in (self.first, self.second))
        leaves = (x.requires_grad_() for x in (*sides, self.scale.detach().clone()))
        return Batch(*leaves, *marks, tuple(each[chosen] for each in self.digests))

    def equals(self, p: int, q: int) -> bool:
        """Whether two rows are one sample, or have an equal caption or picture."""
        marks = (self.sample_id, *self.digests)
        return any(bool(mark[p] == mark[q]) for mark in marks)


def draw(
    seed: int,
    rows: int,
    groups: int = 1,
    classes: int = 2,
    repeated: bool = False,
    dim: int = 6,
    scale: float = 7.0,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """Features at random; ``repeated``: the last sample is the first one again."""
    rng = np.random.default_rng(seed)
    sides = [torch.tensor(rng.normal(size=(rows, dim)), dtype=dtype) for _ in range(2)]
    marks = [torch.tensor(rng.integers(0, n, size=rows)) for n in (groups, classes)]
    sample_id = torch.tensor(rng.permutation(1000)[:rows])
    if repeated:
        for values in (*marks, sample_id):
            values[-1] = values[0]
    leaves = [x.requires_grad_() for x in (*sides, torch.tensor(scale, dtype=dtype))]
    return Batch(*leaves, marks[0], sample_id, marks[1])


@dataclass
class Row:
    """What a row meets: cosines of its own pair (None: it has none), of its negatives, of those of
    them that have its class, and of others that it equals."""

    positive: Tensor | None
    negatives: list[Tensor]
    same_class: list[Tensor]
    equal: list[Tensor]


def rows_of(batch: Batch, between: str, num_views: int = 2) -> list[list[Row]]:
    """The rows of every direction."""
    first, second = batch.unit()
    count = len(first)
    if between == "captions":
        directions = [(first, [second], 0), (second, [first], 0)]
    elif num_views == 1:
        directions = [(first, [first], None)]
    else:
        directions = [(first, [first, second], 1), (second, [first, second], 0)]

    def row(queries: Tensor, keys: list[Tensor], own: int | None, p: int) -> Row:
        group = [q for q in range(count) if q != p and batch.labels[p] == batch.labels[q]]
        every = [(queries[p] @ side[q], q) for side in keys for q in group]
        met = [(cosine, q) for cosine, q in every if not batch.equals(p, q)]
        same = [cosine for cosine, q in met if batch.classes[p] == batch.classes[q]]
        equal = [cosine for cosine, q in every if batch.equals(p, q)]
        positive = None if own is None else queries[p] @ keys[own][p]
        return Row(positive, [cosine for cosine, _ in met], same, equal)

    return [[row(*direction, p) for p in range(count)] for direction in directions]


def loss(rows: list[list[Row]], of_row: Callable[[Row], Tensor | None]) -> Tensor:
    """The mean over directions of the mean over the rows that have a loss; 0 where none has."""
    found = [[x for x in map(of_row, direction) if x is not None] for direction in rows]
    means = [torch.stack(losses).mean() for losses in found if losses]
    return (
        torch.stack(means).mean()
        if means
        else torch.zeros((), dtype=torch.float64).requires_grad_()
    )


def _sum(terms: Iterator[Tensor]) -> Any:
    return sum(terms, start=0.0)


def info_nce(row: Row, scale: Tensor) -> Tensor:
    """-log of the own pair's share."""
    assert row.positive is not None
    own = (scale * row.positive).exp()
    return -(own / (own + _sum((scale * c).exp() for c in row.negatives))).log()


def info_nce_of_equals(row: Row, scale: Tensor) -> Tensor:
    """The mean over the own pair and those that equal it, of -log of the share among all."""
    assert row.positive is not None
    positives = [row.positive, *row.equal]
    everybody = _sum((scale * c).exp() for c in [*positives, *row.negatives])
    return -torch.stack([((scale * c).exp() / everybody).log() for c in positives]).mean()


def modified(row: Row, scale: Tensor, epsilon: float) -> Tensor:
    """IFM's Eq. 2."""
    assert row.positive is not None
    own = (scale * (row.positive - epsilon)).exp()
    return -(own / (own + _sum((scale * (c + epsilon)).exp() for c in row.negatives))).log()


def hard_negatives(row: Row, scale: Tensor, beta: float, tau_plus: float) -> Tensor:
    """HCL's code, with the number of the row's negatives."""
    assert row.positive is not None
    if not row.negatives:
        return 0.0 * row.positive
    own, count = (scale * row.positive).exp(), len(row.negatives)
    e = torch.stack([(scale * c).exp() for c in row.negatives])
    weights = e**beta
    reweighted = (weights * e).sum() / weights.mean()
    estimate = (reweighted - tau_plus * count * own) / (1.0 - tau_plus)
    estimate = torch.maximum(estimate, count * (-scale).exp())
    return -(own / (own + estimate)).log()


def supervised(row: Row, scale: Tensor) -> Tensor | None:
    """SupCon's Eq. 2; None without a positive."""
    own = [] if row.positive is None else [row.positive]
    if not own + row.same_class:
        return None
    everybody = _sum((scale * c).exp() for c in own + row.negatives)
    terms = [((scale * c).exp() / everybody).log() for c in own + row.same_class]
    return -torch.stack(terms).mean()


def close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
