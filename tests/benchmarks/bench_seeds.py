"""How often ``eval.seeds`` finds a difference that is not there, and one that is: simulated races.

Every race has a base and ``METHODS`` equal methods on the same items in the same seeds, so that its
comparisons are correlated. A difference of two methods has an item's part (deviation 0.5), a seed's
part and a rest. The method *wide* has three times the others' spread of seeds. Of each cell stand
the comparisons in percent that find a difference where there is none, at the level of 5 %, and
those that find 8 points. Items are numbers with normal parts, or right answers, 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mclclip.eval.seeds import Spread
from tests.benchmarks import timing

Array = NDArray[np.float64]
METHODS, GAIN, ITEM, WIDE = 6, 0.08, 0.5, 3
CHUNK_NUMBERS = 2_000_000  # at a time


def draw(rng: np.random.Generator, shape: tuple[int, int, int], spreads: Array) -> Array:
    """[races, methods, items, seeds]: values with normal parts of ``shape`` (races, items, seeds);
    ``spreads`` [methods]: deviations over seeds."""
    races, items, seeds = shape
    own = rng.normal(0, ITEM / 2**0.5, (races, len(spreads), items, 1))
    rest = rng.normal(0, ITEM / 2, (races, len(spreads), items, seeds))
    moved = rng.normal(0, 1, (races, len(spreads), 1, seeds)) * spreads[:, None, None] / 2**0.5
    return np.asarray(own + rest + moved)


def answered(rng: np.random.Generator, values: Array) -> Array:
    """Right answers, 0 and 1, of items that are hard for all methods or for none."""
    hard = rng.normal(0.5, 1, (len(values), 1, values.shape[2], 1))
    return np.asarray((hard + values > 0) * 1.0)


def spread_of(differences: Array, methods: int, *, invented: bool) -> Spread:
    """The parts of the variance of differences [..., comparisons, items, seeds] of ``methods``
    methods; ``invented``: with the units that are invented for shares."""
    *_, items, seeds = differences.shape
    parts, extra = differences / items, 2 if invented else 0
    means = parts.mean(axis=-1, keepdims=True)
    square = ((means**2).sum(axis=(-2, -1)) + (extra / 2) / items**2) / (items + extra)
    middle = means.sum(axis=(-2, -1)) / (items + extra)
    left = parts - means - parts.mean(axis=-2, keepdims=True) + means.mean(axis=-2, keepdims=True)
    widened = items / (items - 1)
    rest = widened * (left**2).sum(axis=(-2, -1)) / (seeds - 1) / seeds
    return Spread(
        units=items * (square - middle**2) * widened,
        seeds=parts.sum(axis=-2).var(axis=-1, ddof=1) / seeds - rest,
        unit_degrees=items - 1,
        num_methods=methods,
        num_seeds=seeds,
    )


def simulate(kind: str, items: int, seeds: int, spread: float, races: int) -> dict[str, float]:
    """Shares in percent: ``alarms`` of equal methods, the same of ``wide`` alone, and how often a
    gain of ``GAIN`` is ``found`` (of numbers alone)."""
    rng = np.random.default_rng([items, seeds, round(1000 * spread)])
    spreads = np.array([spread] * METHODS + [WIDE * spread])
    chunk = max(CHUNK_NUMBERS // (len(spreads) * items * seeds), 1)
    counts: dict[str, list[float]] = {"alarms": [], "wide": [], "found": []}
    for start in range(0, races, chunk):
        values = draw(rng, (min(chunk, races - start), items, seeds), spreads)
        values = answered(rng, values) if kind == "answers" else values
        differences = values[:, 1:] - values[:, :1]
        settled = spread_of(differences, len(spreads), invented=kind == "answers")
        half, means = settled.half_width(0.05), differences.mean(axis=(2, 3))
        alarms = np.abs(means) > half
        counts["alarms"] += alarms[:, :-1].ravel().tolist()
        counts["found"] += (means + GAIN > half)[:, :-1].ravel().tolist()
        counts["wide"] += alarms[:, -1].tolist()
    if kind == "answers":
        del counts["found"]
    return {name: 100 * float(np.mean(each)) for name, each in counts.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a row per kind of item, number of seeds and their spread."""
    parser = timing.parser(__doc__)
    parser.add_argument("--races", type=int, default=10_000, help="of numbers; of answers a fifth")
    parser.add_argument("--items", type=int, nargs="+", default=[135, 1_000])
    args = timing.parse(parser, arguments, races=100, items=[135])
    print("| items | seeds | spread | false alarms | of *wide* | 8 points found |")
    print("|---|---|---|---|---|---|")
    for kind, races in (("numbers", args.races), ("answers", args.races // 5)):
        for items in args.items:
            for seeds in (2, 3, 5):
                for spread in (0.0, 0.05, 0.15):
                    number = max(races * 135 // items, 20)
                    shares = simulate(kind, items, seeds, spread, number)
                    cells = [f"{shares[name]:.1f}" for name in ("alarms", "wide")]
                    cells.append(f"{shares['found']:.0f}" if "found" in shares else "-")
                    row = [f"{items:,} {kind}", str(seeds), str(spread), *cells]
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
