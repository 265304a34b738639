"""Loader, step, head, k-means and embedding of two checkouts, in turn: has anything become slower?

``python -m tests.benchmarks.two_checkouts BEFORE [AFTER]`` (by default this one) runs each side's
own code in processes of its own, with this interpreter, on the same pictures. Rounds start with
either side by turns; a ratio is the median over rounds of the time after by the time before.
About fifteen minutes on two idle cores.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.benchmarks import bench_training, timing

BATCH, STEPS, WARM_UP, WORKERS = 16, 12, 4, 1
MODEL = "ViT-S-32-alt"


class Side:
    """One checkout, a folder for its files, and shards that both sides read."""

    def __init__(self, checkout: Path, folder: Path, shards: Sequence[Path], short: bool) -> None:
        self.checkout, self.folder, self.short = checkout.resolve(), folder, short
        self.shards = [str(path) for path in shards]
        folder.mkdir()
        self.config = folder / "config.json"  # which is YAML too
        tree = {
            "run_dir": str(folder / "run"),
            "device": "cpu",
            "num_threads": 1,
            "data": {
                "sources": {"bench": {"shards": self.shards}},
                "num_workers": WORKERS,
                "index_workers": 1,
            },
            "model": {"name": MODEL, "pretrained": None},
            "base": {"global_batch": BATCH, "steps": WARM_UP + STEPS, "log_every": 1, "lr": 1e-6},
        }
        self.config.write_text(json.dumps(tree))
        self.run("mclclip", "index", "--config", str(self.config))

    def run(self, *words: str) -> str:
        """What a module of this side prints."""
        done = subprocess.run(
            [sys.executable, "-m", *words],
            capture_output=True,
            text=True,
            cwd=self.checkout,
            env=os.environ
            | {
                "PYTHONPATH": str(self.checkout),
                "MCLCLIP_SHARED_DATA": str(timing.SHARED_DATA),
                timing.TABLES: str(self.folder / "tables.jsonl"),
            },
        )
        if done.returncode:
            raise RuntimeError(f"{words} in {self.checkout} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    def loader(self) -> float:
        """Seconds of an epoch of one worker, which shares a core with its reader."""
        samples = BATCH * len(self.shards)
        words = {"index": str(self.folder / "run/index"), "shards": self.shards, "image_size": 224}
        words |= {"batch": BATCH, "samples": samples}
        out = self.run("tests.benchmarks.loader_epoch", "fast", json.dumps(words))
        return float(out.splitlines()[-1])

    def step(self) -> float:
        """Seconds of a step of ``mclclip train``."""
        self.run("mclclip", "train", "--stage", "0", "--config", str(self.config), "--force")
        rows = (self.folder / "run/stage_0/train/metrics.jsonl").read_text().splitlines()
        return statistics.median(json.loads(row)["seconds"] for row in rows[WARM_UP:])

    def table(self, bench: str, words: Sequence[str], row: str, column: str) -> float:
        """A cell of the first table of a benchmark that has such a row."""
        tables = self.folder / "tables.jsonl"
        tables.unlink(missing_ok=True)
        self.run(f"tests.benchmarks.{bench}", *(["--short"] if self.short else words))
        for line in tables.read_text().splitlines():
            entry = json.loads(line)
            for cells in entry["rows"]:
                if cells[0] == row and column in entry["columns"]:
                    return float(cells[entry["columns"].index(column)].replace(",", ""))
        raise RuntimeError(f"{bench} in {self.checkout} has no row {row}")


HEADS = ["--classes", "100000", "--batches", "1024", "--seconds", "30", "--memory", "0", "0"]
WORK: dict[str, Callable[[Side], float]] = {
    "loader, pixels fast, 224 px, s an epoch": Side.loader,
    f"step, {MODEL}, batch {BATCH}, s": Side.step,
    "head, MLCD, CPU ms": partial(
        Side.table, bench="bench_heads", words=HEADS, row="MLCD", column="CPU ms"
    ),
    "k-means, K = 100, CPU ms": partial(
        Side.table,
        bench="bench_kmeans",
        words=["--clusters", "100", "--rounds", "1", "--no-memory"],
        row="ours, 1 process",
        column="CPU ms",
    ),
    f"embedding, {MODEL}, s a picture": lambda side: (
        1 / side.table("bench_embed", ["--rounds", "1"], "mclclip embed", "images/s")
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """The table."""
    parser = timing.parser(__doc__)
    parser.set_defaults(rounds=2)
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, nargs="?", default=timing.ROOT)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="in their names")
    options = timing.parse(parser, arguments)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = bench_training.write_jpegs(folder / "shards", 2 if options.short else 32, BATCH)
        sides = {
            side: Side(getattr(options, side), folder / side, shards, options.short)
            for side in ("before", "after")
        }
        for title, work in WORK.items():
            if options.only and not any(word in title for word in options.only):
                continue
            taken: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(options.rounds):
                for side in list(sides)[:: -1 if number % 2 else 1]:
                    taken[side].append(work(sides[side]))
            ratios = [b / a for a, b in zip(*taken.values(), strict=True)]
            rows.append(
                [
                    title,
                    *(timing.number(statistics.median(times)) for times in taken.values()),
                    f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                ]
            )
            print(*rows[-1], sep="; ", flush=True)
    columns = ["what", "before", "after", "after by before, ratio (range)"]
    timing.print_table(f"{options.before} and {options.after}", columns, rows)


if __name__ == "__main__":
    main()
