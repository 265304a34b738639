"""Differences over several seeds, by definitions written out slowly and by simulated races."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mclclip.eval import outcomes, seeds
from mclclip.eval.outcomes import Outcomes
from tests.matrix import SOAK, fuller_in_soak, kept


def of_values(values: Sequence[float] | np.ndarray, **more: object) -> Outcomes:
    return Outcomes([str(n) for n in range(len(values))], np.asarray(values), **more)  # type: ignore[arg-type]


# --- simulated races -----------------------------------------------------------------------------

REMEDIES, BENCHMARKS = 4, 2
SPREADS = {0.02: 400, 0.1: 100, 0.3: 40}  # of seeds, in units of items' difficulty -> items


def encoder(rng: np.random.Generator, hard: np.ndarray, spread: float, count: int) -> np.ndarray:
    """[n, S] right answers of one method: some items suit it, whatever the seed; a seed moves all
    of them; and chance decides the rest."""
    own = rng.normal(0, 0.3, len(hard))
    noise = rng.normal(0, 0.2, (len(hard), count))
    return (hard[:, None] + own[:, None] + rng.normal(0, spread, count) + noise > 0).astype(float)


def shows_a_verdict(rng: np.random.Generator, count: int, spread: float, items: int) -> bool:
    """Whether a race of equal remedies, a control and a base finds any difference."""
    p_values = []
    for _ in range(BENCHMARKS):
        hard = rng.normal(0.5, 1.0, items)
        racing = [encoder(rng, hard, spread, count) for _ in range(REMEDIES + 2)]
        control, base = racing[0], racing[1]
        against = [(own, base) for own in (control, *racing[2:])]
        for own, other in [*against, *((own, control) for own in racing[2:])]:
            pairs = [(of_values(own[:, s]), of_values(other[:, s])) for s in range(count)]
            p_values.append(seeds.difference(pairs).p_value)
    return min(outcomes.holm(p_values)) < 0.05


@fuller_in_soak
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("spread", kept([0.02, 0.1, 0.3], 1))
def test_races_of_equal_remedies_show_no_verdict(count: int, spread: float) -> None:
    rng, races = np.random.default_rng([count, round(100 * spread)]), 500 if SOAK else 30
    shown = sum(shows_a_verdict(rng, count, spread, SPREADS[spread]) for _ in range(races))
    print(f"{count} seeds, spread {spread}: {shown} of {races} races show a verdict")
    assert shown <= (0.07 if SOAK else 0.14) * races
