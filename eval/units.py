"""The units of figures, and the statistics that make a figure of the outcomes of items."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_SIGNIFICANT, _MOST = 3, 8  # significant digits of the largest value; the most decimals


@dataclass(frozen=True)
class Unit:
    """The unit of a figure.

    name               is written behind a value, for example '%'
    difference         is written behind a difference of two values, for example 'points'
    scale              the factor from ``Outcomes.value()`` to a value in this unit, for example 100
    best               the value of a perfect encoder, in this unit
    smaller_is_better  True for losses
    """

    name: str
    difference: str
    scale: float = 1.0
    best: float = math.inf
    smaller_is_better: bool = False

    def decimals(self, values: Iterable[float]) -> int:
        """The number of decimals with which all ``values`` of a column are shown.

        Percent gets 1, or 2 for small values. Other units get 3 significant digits of the largest
        value, and more if different values would look equal.
        """
        distinct = set(values)
        largest = max(map(abs, distinct), default=0.0)
        if self == PERCENT:
            return 1 if largest >= 9.995 or not largest else 2
        before = math.floor(math.log10(largest)) + 1 if largest else 0  # digits before the point
        least = max(1, _SIGNIFICANT - before)
        told_apart = (
            d for d in range(least, _MOST) if len({f"{v:.{d}f}" for v in distinct}) == len(distinct)
        )
        return next(told_apart, least)

    @property
    def note(self) -> str:
        """The unit in a line below the head of a column, such as '(nats)'; empty for percent."""
        return "" if self == PERCENT else f"\n({self.name})"

    @property
    def sign(self) -> int:
        """1 if larger values are better, -1 if smaller ones are."""
        return -1 if self.smaller_is_better else 1


PERCENT = Unit("%", "points", 100.0, best=100.0)
NATS = Unit("nats", "nats", best=0.0, smaller_is_better=True)


@dataclass(frozen=True)
class Statistic:
    """How the values of items become a metric.

    unit         unit of the metric
    is_share     the metric is a mean of values in [0, 1]; its interval is Wilson's
    is_ranking   values rank the items by ``truth``; otherwise the metric is a mean of values
    tied_pair    of an area: how much of a tied pair is right; None where the metric is no area
    """

    unit: Unit
    is_share: bool = False
    is_ranking: bool = False
    tied_pair: float | None = None


STATISTICS = {
    "mean": Statistic(PERCENT, is_share=True),
    "mean_loss": Statistic(NATS),
    "roc_auc": Statistic(PERCENT, is_ranking=True, tied_pair=0.0),
    "roc_auc_half_ties": Statistic(PERCENT, is_ranking=True, tied_pair=0.5),  # scikit-learn's
    "precision_11_point": Statistic(PERCENT, is_ranking=True),
}
"""Every statistic by the name that ``Outcomes.statistic`` and files of outcomes have. A figure in a
new unit, such as a cosine, is a row."""
UNITS = {each.unit.name: each.unit for each in STATISTICS.values()}
"""Units by the names that rows of results.jsonl have."""
