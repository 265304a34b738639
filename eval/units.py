"""What figures are measured in: percent of right answers, or nats of a loss; how they are shown.

A row of results.jsonl says its unit in ``protocol["unit"]``; without one it is in percent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_SIGNIFICANT, _MOST = 4, 8  # digits of the largest value; decimals at most


@dataclass(frozen=True)
class Unit:
    """The unit of a figure.

    name              as it is shown behind a value
    difference        as it is shown behind a difference of two
    scale             by which the mean of outcomes (see ``Outcomes``) is multiplied
    smaller_is_better whether it is a loss
    """

    name: str
    difference: str
    scale: float = 1.0
    smaller_is_better: bool = False

    def decimals(self, values: Iterable[float]) -> int:
        """Digits behind the point with which all ``values`` of a column are shown: 1 of percent;
        else 4 significant ones of the largest, and as many more as tell different values apart."""
        if self == PERCENT:
            return 1
        known = set(values)
        largest = max(map(abs, known), default=0.0)
        whole = len(f"{largest:.0f}") if largest >= 1 else 0
        least = max(1, _SIGNIFICANT - whole)
        told_apart = (
            d for d in range(least, _MOST) if len({f"{v:.{d}f}" for v in known}) == len(known)
        )
        return next(told_apart, least)

    @property
    def note(self) -> str:
        """What the head of a column says of it, on a line of its own: nothing of percent."""
        return "" if self == PERCENT else f"\n({self.name})"

    @property
    def sign(self) -> int:
        """1 where a larger value is better, -1 where a smaller one is."""
        return -1 if self.smaller_is_better else 1


PERCENT = Unit("%", "points", 100.0)
NATS = Unit("nats", "nats", smaller_is_better=True)


def unit_of(protocol: Mapping[str, Any]) -> Unit:
    """The unit of a row with this protocol; of one that is not known the larger value is better."""
    name = str(protocol.get("unit", PERCENT.name))
    return {"%": PERCENT, "percent": PERCENT, "nats": NATS}.get(name) or Unit(name, name)
