"""``python -m tests.gpu.papers``: figures of the papers at their size, in pieces; see README.md.

One call is one piece. It makes the data sets that are not there, starts ``mclclip run`` on a recipe
of paper size, asks it to save and leave before the limit, and prints the figures found so far
beside the paper's. The next call goes on. Exit codes are those of mclclip: 0 all is done, 85 saved,
start the same again; others: something failed, whose last line is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mclclip.eval import results
from mclclip.ranks import signals
from mclclip.ranks.signals import EXIT_PREEMPTED
from mclclip.run import artifacts
from tests.gpu import running
from tests.gpu.__main__ import limit_s, parser, ready

RECIPES = running.ROOT / "launch" / "recipes"
LEAVE_S = 45.0  # for saving and leaving, of a piece's time
POLL_S = 0.2
Paper = dict[str, tuple[float, ...]]  # encoder -> accuracies in percent, by attribute


@dataclass(frozen=True)
class Figure:
    """A recipe at one temperature, and what the paper has for SimCLR (stage 0) and MCL.

    ``make`` are the options of make-dataset, ``small`` those of both at the size for a CPU.
    """

    recipe: str
    dataset: str
    attributes: tuple[str, ...]
    temperature: float
    paper: Paper
    sources: tuple[str, ...] = ()
    small_make: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Names its folder too."""
        return f"{self.dataset}-tau_{self.temperature}"


def _figures() -> dict[str, Figure]:
    """MCL's Table 4, whose best rows are those of Table 2."""
    pictures = ("cifar_mnist_paper", "cifar_mnist", ("cifar", "mnist"))
    shapes = ("trifeature_paper", "trifeature", ("shape", "texture", "colour"))
    small = ("--size", "16", "--images-per-combination", "1")
    found = []
    for tau, first, joined in (
        (0.1, (29, 98), (83, 98)),
        (0.25, (10, 99), (87, 99)),
        (0.5, (10, 99), (87, 99)),
    ):
        paper: Paper = {"stage_0": first, "concat_raw": joined}
        found.append(Figure(*pictures, tau, paper, sources=("cifar10", "mnist")))
    for tau, alone, all_three in (
        (0.1, (66, 91, 100), (100, 100, 100)),
        (0.25, (81, 99, 100), (92, 100, 100)),
        (0.5, (44, 92, 100), (75, 99, 100)),
    ):
        paper = {"stage_0": alone, "concat_raw": all_three}
        found.append(Figure(*shapes, tau, paper, small_make=small))
    return {figure.name: figure for figure in found}


FIGURES = _figures()
SMALL = (
    "global_batch=16", "steps=12", "precision=fp32", "checkpoint.every=5",
    "log_every=1",
)  # fmt: skip
"""Of both trainings, at the size for a CPU."""
SMALL_MODEL = (
    "model.name.vision_cfg.options={channels: [4, 8, 8, 12], layers: [1, 1, 1, 1]}",
    "model.name.vision_cfg.image_size=16",
    "model.projector=[12, 6]",
    "cluster.num_clusters=2",
    "cluster.restarts=1",
)


@dataclass(frozen=True)
class Piece:
    """One call, whose files lie below ``out``, and which ends at ``deadline`` (time.monotonic).

    ``sources`` are NAME=FOLDER of published data, ``options`` go to the run behind all others.
    """

    out: Path
    device: str
    deadline: float
    sources: Sequence[str] = ()
    epochs: int = 200
    workers: int = 8
    options: Sequence[str] = field(default_factory=list)

    @property
    def small(self) -> bool:
        """A CPU does the same at a small size."""
        return self.device == "cpu"

    def run_dir(self, figure: Figure) -> Path:
        """Where a figure's run lies."""
        return self.out / "runs" / figure.name

    def data(self, figure: Figure) -> Path:
        """Where its data set lies."""
        return self.out / "data" / figure.dataset

    def is_over(self) -> bool:
        """Whether it is time to save and leave, or a signal has asked for that."""
        return time.monotonic() > self.deadline - LEAVE_S or signals.get_request() is not None


def make_data(figure: Figure, piece: Piece) -> int:
    """Writes the data set, unless it is there: in one piece, as a writer begins anew."""
    folder = piece.data(figure)
    if artifacts.is_finished(folder):
        return 0
    given = {entry.partition("=")[0] for entry in piece.sources}
    if missing := [name for name in figure.sources if name not in given]:
        wanted = " ".join(f"--source {name}=FOLDER" for name in missing)
        print(f"{folder} is not there, and is made from files of yours: give {wanted}")
        return 2
    words = ["make-dataset", figure.dataset, "--out", str(folder)]
    for entry in piece.sources:
        words += ["--source", entry] if entry.partition("=")[0] in figure.sources else []
    return mclclip([*words, *(figure.small_make if piece.small else ())], figure, piece)


def run_options(figure: Figure, piece: Piece) -> list[str]:
    """The options of the run behind ``--config RECIPE``."""
    data = piece.data(figure)
    found = [
        f"run_dir={piece.run_dir(figure)}",
        f"device={piece.device}",
        f"data.sources.pictures.shards={data}/train/*.tar",
        f"eval.suite.features.path={data}",
        f"data.num_workers={piece.workers}",
        "controls=[]",
        *(SMALL_MODEL if piece.small else ()),
    ]
    for training in ("base", "train"):
        found.append(f"{training}.objective.temperature={figure.temperature}")
        own = SMALL if piece.small else (f"epochs={piece.epochs}",)
        found += [f"{training}.{option}" for option in own]
    return [*found, *piece.options]


def mclclip(words: Sequence[str], figure: Figure, piece: Piece) -> int:
    """Runs a verb until it ends or the piece is over; returns its exit code.

    What is asked to leave, or has to be killed since it does not in time, gives 85.
    """
    log = piece.out / f"{figure.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(running.ROOT), os.environ.get("PYTHONPATH", "")]))
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "mclclip", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", **os.environ, "PYTHONPATH": path},
        )
    try:
        code = _ended(process, piece.is_over)
    finally:
        process.kill()  # it has ended, unless this process was interrupted
        process.wait()
    if code not in (0, EXIT_PREEMPTED):
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        print(f"{figure.name}: {words[0]} failed with code {code}: {' '.join(last)} (log: {log})")
    return code


def _ended(process: subprocess.Popen[bytes], is_over: Callable[[], bool]) -> int:
    """Waits for the end of a process, which is asked to leave when ``is_over``."""
    while process.poll() is None and not is_over():
        time.sleep(POLL_S)
    if process.poll() is not None:
        return process.returncode
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        print(f"killed, since it did not leave within {LEAVE_S:g} s: steps may be lost")
        process.kill()
        code = process.wait()
    return EXIT_PREEMPTED if code in (-signal.SIGTERM, -signal.SIGKILL) else code


def go_on(figure: Figure, piece: Piece) -> int:
    """Data, then as much of the run as there is time for; the exit code."""
    code = make_data(figure, piece)
    if code:
        return code
    recipe = str(RECIPES / f"{figure.recipe}.yaml")
    return mclclip(["run", "--config", recipe, *run_options(figure, piece)], figure, piece)


# --- what is shown -------------------------------------------------------------------------------


def shown(figure: Figure, piece: Piece) -> str:
    """How far the run is, and a line for each encoder: accuracies in percent, and the paper's."""
    run_dir, lines = piece.run_dir(figure), [f"\n{figure.name} ({figure.recipe}.yaml)"]
    for metrics in sorted(run_dir.glob("stage_*/train/metrics.jsonl")):
        rows = [json.loads(line) for line in metrics.read_text().splitlines() if line]
        if rows:
            lines.append(
                f"  {metrics.parts[-3]}: step {rows[-1]['step']:,}, loss {rows[-1]['loss']:.3f}, "
                f"{rows[-1]['samples_per_s']:,.0f} samples/s, of the time "
                f"{rows[-1]['data_wait_share']:.0%} waiting for data"
            )
    found: dict[str, dict[str, float]] = {}
    path = run_dir / "results.jsonl"
    for row in results.read(path) if path.exists() else []:
        found.setdefault(row.model, {})[row.metric] = row.value
    names = figure.attributes
    head = "".join(f"{name:>9s}" for name in names)
    lines.append(f"  {'accuracy, %':14s}{head}   the paper's")
    for model in {**dict.fromkeys(figure.paper), **found}:
        values, paper = found.get(model, {}), figure.paper.get(model, ())
        cells = (f"{values[name]:9.1f}" if name in values else f"{'-':>9s}" for name in names)
        beside = "  ".join(f"{value:g}" for value in paper)
        lines.append(f"  {model:14s}{''.join(cells)}   {beside}".rstrip())
    return "\n".join(lines)


# --- the command ---------------------------------------------------------------------------------


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    found = parser("One piece of the papers' figures; 85: start the same again.")
    found.prog = "python -m tests.gpu.papers"
    found.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER")
    found.add_argument("--epochs", type=int, default=200, help="of a stage (default: %(default)s)")
    found.add_argument("--workers", type=int, help="loader processes (default: one core less)")
    found.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    return found.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Goes on with the chosen figures in turn; returns the exit code."""
    begun, options = time.monotonic(), _options(arguments)
    words = options.only
    chosen = [f for n, f in FIGURES.items() if not words or any(word in n for word in words)]
    if options.list:
        print("\n".join(figure.name for figure in chosen))
        return 0
    if (code := ready(options)) is not None:
        return code
    if options.out is None or not chosen:
        print("give --out DIR, which the next piece reads, and --only with words that --list shows")
        return 2
    device = "cpu" if options.device == "cpu" else "cuda"
    cores = len(os.sched_getaffinity(0))
    piece = Piece(
        out=options.out.absolute(),
        device=device,
        deadline=begun + limit_s(options),
        sources=options.source,
        epochs=options.epochs,
        workers=max(cores - 1, 0) if options.workers is None else options.workers,
        options=options.set,
    )
    print(running.machine(device), flush=True)
    code = 0
    for figure in chosen:
        code = code or go_on(figure, piece)
    print("\n".join(shown(figure, piece) for figure in chosen))
    print({0: "\ndone", EXIT_PREEMPTED: "\nsaved: start the same again"}.get(code, "\nfailed"))
    return code


def command() -> int:
    """``main`` in a process of its own, in which SIGTERM ends the piece as its limit does."""
    signals.install_handlers()
    try:
        with signals.defer_requests():
            return main()
    except signals.Preempted:
        return EXIT_PREEMPTED


if __name__ == "__main__":
    sys.exit(command())
