"""A whole training with data beside open_clip's training entry point: same shards, locks, batch.

Both programs read photographs from tars in one loader worker and train the same random weights with
a locked text tower in fp32. mclclip reads text embeddings that ``embed --text`` has written once,
and open_clip runs its text tower in every step, as each does by default. Rates are those that the
programs report for their own steps, the first ones left out. The ratio that operations allow is
that of the plan (`config --plan`): what a step computes without the text tower, to all of it.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mclclip import config as configuration
from mclclip import export, index, plan
from mclclip.config import Config
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Artifact, Layout
from tests.benchmarks import peers, timing
from tests.benchmarks.bench_reading import rendered, repeated
from tests.benchmarks.bench_training import THEIRS

WARM_UP = 2  # steps that are not counted


@dataclass(frozen=True)
class Setting:
    """What is compared."""

    model: str
    blocks: int
    batch: int
    steps: int
    shards: tuple[Path, ...]


def options(setting: Setting, run_dir: Path, *more: str) -> Config:
    """One stage of one group, on one thread and one loader worker."""
    tree: dict[str, Any] = {
        "run_dir": str(run_dir),
        "num_stages": 1,
        "num_threads": 1,
        "device": "cpu",
        "data": {
            "sources": {"bench": {"shards": [str(path) for path in setting.shards]}},
            "num_workers": 1,
            "pixels": "exact",
        },
        "model": {"name": setting.model, "pretrained": None},
        "embed": {"batch_size": 32},
        "train": {
            "global_batch": setting.batch,
            "steps": WARM_UP + setting.steps,
            "precision": "fp32",
            "lock": {"image_blocks": setting.blocks, "text": False},
            "log_every": 1,
            "checkpoint": {"every": 1000},
        },
    }
    return configuration.from_tree(tree, more)


def prepare(setting: Setting, run_dir: Path) -> None:
    """What a training reads: index, random weights, one group, and random text embeddings, since
    speed does not depend on their values."""
    config = options(setting, run_dir)
    samples = index.run(config, SINGLE)
    encoder = export.stage(config, SINGLE, stage=0)
    layout, inputs = Layout.of(config), {"index": samples.digest}
    labels = Artifact.open(layout.pseudo_labels(1), kind="pseudo_labels", config={}, inputs=inputs)
    np.save(labels.directory / "pseudo_labels.npy", np.zeros((len(samples), 1), np.int64))
    labels.finish({"radices": [1]})
    texts = Artifact.open(layout.text_embeddings, kind="text_embeddings", config={}, inputs=inputs)
    dim = json.loads((encoder / "open_clip_config.json").read_text())["model_cfg"]["embed_dim"]
    for number, shard in enumerate(samples.shards):
        captions = int(samples.num_captions[shard.start : shard.stop].sum())
        rows = np.random.default_rng(number).normal(size=(captions, dim))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        np.save(texts.directory / f"{number:05d}.npy", rows.astype(np.float16))
    texts.finish({"samples": len(samples), "shards": len(samples.shards)})


def ours(setting: Setting, run_dir: Path, *more: str) -> float:
    """Samples per second of ``mclclip train``, the median over steps."""
    path = run_dir.with_suffix(".yaml")
    path.write_text(configuration.dump(options(setting, run_dir, *more)))
    words = ["-m", "mclclip", "train", "--stage", "1", "--config", str(path), "--force"]
    done = peers.run(sys.executable, words)
    rows = run_dir / "stage_1/train/metrics.jsonl"
    if done.returncode or not rows.exists():
        raise RuntimeError(f"mclclip gave no figures:\n{done.stderr[-2000:]}")
    found = [json.loads(line)["seconds"] for line in rows.read_text().splitlines()]
    return setting.batch / statistics.median(found[WARM_UP:])


def theirs(setting: Setting, interpreter: str) -> float:
    """Samples per second of ``open_clip_train.main``, the median over steps."""
    words = [
        f"--model={setting.model}", "--dataset-type=webdataset", f"--batch-size={setting.batch}",
        f"--train-data={'::'.join(map(str, setting.shards))}", "--precision=fp32", "--workers=1",
        f"--train-num-samples={(WARM_UP + setting.steps) * setting.batch}", "--epochs=1",
        "--dataset-resampled", "--lock-text", "--lock-text-freeze-layer-norm", "--lock-image",
        # Their groups count the projection first: six blocks are seven groups.
        f"--lock-image-unlocked-groups={setting.blocks + 1}", "--log-every-n-steps=1",
        "--save-frequency=0", "--device=cpu",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as logs:
        done = peers.run(interpreter, ["-c", THEIRS, "1", *words, f"--logs={logs}"])
    rates = [float(rate) for rate in re.findall(r", ([\d.e+-]+)/s, ", done.stderr + done.stdout)]
    if done.returncode or len(rates) <= WARM_UP:
        raise RuntimeError(f"open_clip_train gave no figures:\n{done.stderr[-2000:]}")
    return statistics.median(rates[WARM_UP:])


def operations(setting: Setting, run_dir: Path, *more: str) -> float:
    """GFLOP of a sample in a step, as the plan counts them."""
    config = options(setting, run_dir, *more)
    planned = plan.make(config, plan.Machine(1, 1))
    return float(planned["memory"]["train"]["operations"]["sample"]) / 1e9


def report(setting: Setting, rounds: int) -> None:
    """Prints the table of one setting."""
    interpreter = peers.python(reads_shards=True)
    without = "train.cached_text=false"
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        prepare(setting, run_dir)
        rates: dict[str, list[float]] = {}
        for _ in range(rounds):
            if interpreter is not None:
                rates.setdefault("open_clip", []).append(theirs(setting, interpreter))
            rates.setdefault("mclclip", []).append(ours(setting, run_dir))
            rates.setdefault("mclclip, fast", []).append(ours(setting, run_dir, "data.pixels=fast"))
            rates.setdefault("mclclip, texts in every step", []).append(
                ours(setting, run_dir, without)
            )
        flops = operations(setting, run_dir), operations(setting, run_dir, without)
    reference = next(iter(rates))
    rows = []
    for way, found in rates.items():
        each = [rate / other for rate, other in zip(found, rates[reference], strict=True)]
        low, high = np.quantile(each, [0.25, 0.75])
        ratio = f"{statistics.median(each):.2f} ({low:.2f} to {high:.2f})"
        rows.append([way, timing.number(statistics.median(found)), ratio])
    timing.print_table(
        f"{setting.model}, {setting.blocks} blocks trained, batch {setting.batch}, fp32, "
        f"{len(setting.shards)} shards; operations allow {flops[1] / flops[0]:.2f}",
        ["program", "samples/s", "times as fast (quartiles)"],
        rows,
    )
    if interpreter is None:
        print(f"\n{peers.MISSING}")


def shards_in(folder: Path, times: int, few: int | None) -> tuple[Path, ...]:
    """CC12M's photographs ``times`` over, where they are; or ``few`` rendered pictures."""
    real = sorted((timing.SHARED_DATA / "cc12m_sample").glob("*.tar"))
    if real and few is None:
        return tuple(repeated(real, folder / "shards", times))
    return tuple(rendered(folder, few or 256))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table per model; on a CPU the large one takes half a minute for a step of 8."""
    parser = timing.parser(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--models", nargs="+", default=["ViT-B-32", "ViT-L-14"])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    small = {"models": ["ViT-S-32-alt"], "batch": 4, "steps": 1}
    args = timing.parse(parser, arguments, **small)
    with tempfile.TemporaryDirectory() as name:
        shards = shards_in(Path(name), 8, 256 if args.short else None)
        for model in args.models:
            report(Setting(model, args.blocks, args.batch, args.steps, shards), args.rounds)


if __name__ == "__main__":
    main()
