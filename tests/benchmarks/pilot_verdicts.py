"""How often a pilot says the same as the whole run, on the demo's pictures in its three regimes.

For each regime and seed the demo's whole run is judged by the same rule as its pilots: is the
joined encoder better than that of the ungrouped control beyond chance, and better than stage 0?
Runs that are finished below ``--out`` are not made again, so that seeds may be added one by one::

    python -m tests.benchmarks.pilot_verdicts --out runs/pilots --seeds 3 --regimes trained
    python -m tests.benchmarks.pilot_verdicts --out runs/pilots --seeds 3 4 5
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from mclclip import compare, demo, pilot, pipeline
from mclclip.compare import Comparison
from mclclip.config import Config
from mclclip.ranks.process_group import SINGLE, num_threads
from mclclip.run import runlog
from mclclip.run.lock import RunLock
from mclclip.train.options import PilotConfig

METRIC = "average"  # the main metric of minimal pairs, which verdicts go by


@dataclass(frozen=True)
class Judged:
    """A verdict, and the difference of the joined encoders in points with its interval."""

    gain: bool
    value: float
    low: float
    high: float


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/pilots"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[3, 4, 5])
    parser.add_argument("--regimes", nargs="+", choices=demo.REGIMES, default=list(demo.REGIMES))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.3])
    steps = "pilots' shares of the steps, where they are others than those of the samples"
    parser.add_argument("--steps-shares", nargs="+", type=float, default=[None], help=steps)
    parser.add_argument("--short", action="store_true", help="only shows that it runs")
    args = parser.parse_args(words)
    runlog.setup()
    lines = []
    for regime in args.regimes:
        overrides = list(demo.SHORT) if args.short else []
        demo.run(args.out, seeds=args.seeds, regimes=[regime], short=args.short)
        settled = [demo.settings(args.out, seed, overrides, regime) for seed in args.seeds]
        whole = [_whole(config) for config in settled]
        lines += [_line(regime, "whole", whole, whole)]
        for how in (PilotConfig(*each) for each in product(args.shares, args.steps_shares)):
            lines += [_line(regime, _name(how), [_piloted(c, how) for c in settled], whole)]
    print("| regime | share | same verdict | gain | difference of joined encoders, points |")
    print("|---|---|---|---|---|")
    print("\n".join(lines))


def _whole(config: Config) -> Judged:
    gain, control, _ = pilot.gain(
        compare.read_runs([Path(config.run_dir)]), pilot.encoder_of(config)
    )
    return _judged(gain, control)


def _name(how: PilotConfig) -> str:
    steps = "" if how.steps_share is None else f", steps {how.steps_share:g}"
    return f"{how.share:g}{steps}"


def _piloted(config: Config, how: PilotConfig) -> Judged:
    """The verdict of a pilot on the finished run; it is kept in a folder of its own."""
    run_dir = Path(config.run_dir)
    kept = run_dir / f"pilot_{_name(how).replace(', ', '_').replace(' ', '_')}"
    if not kept.exists():
        with RunLock(run_dir), num_threads(config.num_threads):
            pipeline.run(replace(config, pilot=how), SINGLE)
        (run_dir / "pilot").rename(kept)
    verdict = json.loads((kept / pilot.VERDICT).read_text())
    (row,) = [
        row
        for row in verdict["comparisons"]
        if row["metric"] == METRIC and row["against"] == verdict["against"]
    ]
    return Judged(verdict["gain"], row["difference"], row["ci_low"], row["ci_high"])


def _judged(gain: bool, control: Sequence[Comparison]) -> Judged:
    (found,) = [c.difference for c in control if c.row.metric == METRIC]
    return Judged(gain, 100 * found.value, 100 * found.low, 100 * found.high)


def _line(regime: str, share: str, found: Sequence[Judged], whole: Sequence[Judged]) -> str:
    same = sum(one.gain == of.gain for one, of in zip(found, whole, strict=True))
    values = ", ".join(f"{one.value:+.1f} ({one.low:+.1f} to {one.high:+.1f})" for one in found)
    mean = f"{statistics.mean(one.value for one in found):+.1f}: "
    gains = sum(one.gain for one in found)
    return f"| {regime} | {share} | {same} of {len(found)} | {gains} | {mean}{values} |"


if __name__ == "__main__":
    main()
