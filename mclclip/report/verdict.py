"""Says which encoder of a run to use: a tuned one that is proven to be better, or else the base.

The tuned encoder is chosen on one part of the pictures and compared with the base on another
(``compare.family``). It is recommended if it is better than the base beyond chance in at least one
main metric, and worse in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mclclip.eval.comparisons import Comparison
from mclclip.eval.results import CHOOSE, REPORT, short_name
from mclclip.verbs import compare
from mclclip.verbs.compare import BASE, TWIN, Row


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    tuned      the best trained encoder (``compare.tuned``); None if there is none
    has_base   True if the base has figures in the benchmarks by which ``tuned`` was chosen
    is_ahead   True if the mean of ``tuned`` in these is above the base's, or the base has none
    family     the comparisons by which the run is judged
    has_share  True if ``tuned`` was chosen on the benchmark 'choose', not on all benchmarks
    """

    tuned: str | None
    has_base: bool
    is_ahead: bool
    family: Sequence[Comparison]
    has_share: bool = False

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Verdict:
        """Derives the verdict from rows of results.

        Raises FileNotFoundError and ValueError if outcomes are missing or damaged.
        """
        tuned, means = compare.tuned(rows), compare.means(rows)
        has_base = BASE in means
        is_ahead = tuned is not None and (not has_base or means[tuned] > means[BASE])
        family = compare.compare(rows) if compare.family(rows) else []
        has_share = any(row.benchmark == CHOOSE for row, _ in rows)
        return cls(tuned, has_base, is_ahead, family, has_share)

    @cached_property
    def with_base(self) -> list[Comparison]:
        """The comparisons of the tuned encoder with the base, those on 'report' first."""
        return self._with(BASE)

    @cached_property
    def with_control(self) -> list[Comparison]:
        """The comparisons of the tuned encoder with its ungrouped control."""
        return self._with(f"{TWIN}{self.tuned}")

    def _with(self, other: str) -> list[Comparison]:
        of_both = [c for c in self.family if (c.row.model, c.against.model) == (self.tuned, other)]
        return sorted(of_both, key=lambda c: c.row.benchmark != REPORT)

    @property
    def recommended(self) -> str:
        """The encoder to use: the tuned one if it is proven, or if the base has no figures;
        otherwise the base."""
        verdicts = {c.verdict for c in self.with_base} or (set() if self.has_base else {"better"})
        proven = self.is_ahead and "better" in verdicts and "worse" not in verdicts
        return self.tuned if self.tuned is not None and proven else BASE

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        if self.tuned is None:
            return "No encoder was trained and measured yet (controls do not count)."
        if not self.with_base:
            return f"Nothing is proven: {self.tuned} was not compared with a base."
        worse = [_name(c) for c in self.with_base if c.verdict == "worse"]
        better = [_name(c) for c in self.with_base if c.verdict == "better"]
        if worse and not better:
            return f"Keep the base: {self.tuned} is worse beyond chance ({', '.join(worse)})."
        if worse:
            return (
                f"Keep the base, or decide what counts: {self.tuned} is better beyond chance in "
                f"{', '.join(better)}, and worse in {', '.join(worse)}."
            )
        if not self.is_ahead:
            where = "on the share `choose`" if self.has_share else "in the mean of the main figures"
            return f"Keep the base: no tuned encoder scored higher than the base {where}."
        if better:
            return f"Take {self.tuned}: it is better than the base beyond chance."
        return "Keep the base: nothing is proven."

    def sentences(self) -> list[str]:
        """The headline, the figures behind it, and how far to trust it."""
        lines = [self.headline]
        if self.with_base:
            lines += [f"{self.tuned} against the base:", *map(_figure, self.with_base)]
        if self.with_control:
            lines += ["Against the same training without groups:", *map(_figure, self.with_control)]
        if self.with_base or self.with_control:
            lines.append(
                f"Each p is corrected over the {len(self.family)} comparisons that the run is "
                "judged by. More pictures held out make intervals narrower; a training with "
                "another seed may end with another verdict."
            )
        return lines


def _figure(c: Comparison) -> str:
    value, other, change, low, high = c.texts()
    return (
        f"- {_name(c)} {other} -> {value} ({change} {c.row.unit.difference}, 95 % interval {low} "
        f"to {high}), {c.verdict} ({c.p_text()}{c.reason()})"
    )


def _name(c: Comparison) -> str:
    return f"{c.row.benchmark} {short_name(c.row.metric)}"
