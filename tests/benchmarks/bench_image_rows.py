"""A training and an embedding pass from the trunk's output on disk, beside those from images.

The same shards, weights, locks and batches; one thread and one loader worker. Rates of training are
those of its own steps, the first ones left out; those of embedding are of a whole pass over the
samples, with the loader. The ratio that operations allow is the plan's (`config --plan`): what a
step or an image costs without the frozen blocks, to all of it; images also have to be decoded.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mclclip import config as configuration
from mclclip.config import Config
from mclclip.data.row_store import StoredRows
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import TarDataset
from mclclip.models.model import unit
from mclclip.models.preparing import start_from_rows
from mclclip.models.transforms import defer_normalization
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Artifact, RunPaths
from mclclip.verbs import embed, export, index, plan
from mclclip.verbs.embed_passes import forward, image_passes
from tests.benchmarks import peers, timing
from tests.benchmarks.bench_reading import rendered, repeated

WARM_UP = 2  # steps that are not counted
WAYS = {
    "images": (),
    "images, fast": ("data.pixels=fast",),
    "cache, float16": ("image_rows.enabled=true",),
    "cache, float32": ("image_rows={enabled: true, dtype: float32}",),
}


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
    layout, inputs = RunPaths.of(config), {"index": samples.digest}
    labels = Artifact(
        layout.pseudo_labels(1), kind="pseudo_labels", config={}, inputs=inputs
    ).compare(write=True)
    np.save(labels.directory / "pseudo_labels.npy", np.zeros((len(samples), 1), np.int64))
    labels.finish({"radices": [1]})
    texts = Artifact(
        layout.text_embeddings, kind="text_embeddings", config={}, inputs=inputs
    ).compare(write=True)
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
    done = peers.run(words)
    rows = run_dir / "stage_1/train/metrics.jsonl"
    if done.returncode or not rows.exists():
        raise RuntimeError(f"mclclip gave no figures:\n{done.stderr[-2000:]}")
    found = [json.loads(line)["seconds"] for line in rows.read_text().splitlines()]
    return setting.batch / statistics.median(found[WARM_UP:])


def shards_in(folder: Path, times: int, few: int | None) -> tuple[Path, ...]:
    """CC12M's photographs ``times`` over, where they are; or ``few`` rendered pictures."""
    real = sorted((timing.SHARED_DATA / "cc12m_sample").glob("*.tar"))
    if real and few is None:
        return tuple(repeated(real, folder / "shards", times))
    return tuple(rendered(folder, few or 256))


def allowed(setting: Setting, run_dir: Path) -> tuple[float, float]:
    """How many times as fast a step and an embedded image could be, by their operations."""
    measured = plan.compute(options(setting, run_dir), plan.Machine(1, 1))["memory"]["train"]
    found = measured["operations"]
    cached = plan.compute(options(setting, run_dir, "image_rows.enabled=true"), plan.Machine(1, 1))[
        "memory"
    ]["train"]
    image, of_trunk = found["image"], cached["operations"]["trunk"]
    return found["sample"] / cached["operations"]["sample"], image / (image - of_trunk)


def embedded(setting: Setting, run_dir: Path, *more: str) -> float:
    """Images per second of a whole pass at stage 0."""
    config = options(setting, run_dir, *more)
    layout = RunPaths.of(config)
    index = SampleIndex.open(layout.index)
    model = embed.load_towers(layout.export(0)).eval()
    rows = None
    if config.image_rows.enabled:
        rows = StoredRows.of_images(layout, index, whole=False)
        start_from_rows(model, rows)
    transform = defer_normalization(model.preprocess_val)
    source = TarDataset(index, config.data, transform, image_rows=rows)

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        return unit(forward(config, SINGLE, partial(model.encode_image, pixels)))

    start = time.perf_counter()
    passes = image_passes(config, SINGLE, source, model, encode, lambda rows: None)
    shards = passes(index.shards)
    assert sum(len(features) for batches in shards for features, _ in batches) == len(index)
    return len(index) / (time.perf_counter() - start)


def report(setting: Setting, rounds: int) -> None:
    """Prints the tables of one setting."""
    rates: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder) / f"run_{number}" for number, name in enumerate(WAYS)}
        for name, run_dir in runs.items():
            prepare(setting, run_dir)
            if name.startswith("cache"):
                embed.run(options(setting, run_dir, *WAYS[name]), SINGLE, stage=0, text=False)
        for _ in range(rounds):
            for name, more in WAYS.items():
                train = ours(setting, runs[name], *more)
                rates[name].append([train, embedded(setting, runs[name], *more)])
        steps, images = allowed(setting, runs["images"])
    title = f"{setting.model}, {setting.blocks} blocks trained, batch {setting.batch}, fp32"
    for number, (what, most) in enumerate((("training", steps), ("embedding", images))):
        shown = []
        for name, found in rates.items():
            if what == "embedding" and name == "images, fast":
                continue  # embedding is always exact
            own = [each[number] for each in found]
            ratios = [a / b[number] for a, b in zip(own, rates["images"], strict=True)]
            low, high = np.quantile(ratios, [0.25, 0.75])
            ratio = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
            shown.append([name, timing.number(statistics.median(own)), ratio])
        timing.print_table(
            f"{title}: {what}; operations allow {most:.2f}",
            ["from", "samples/s", "times as fast (quartiles)"],
            shown,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables of each model."""
    parser = timing.parser(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--models", nargs="+", default=["ViT-B-32"])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    args = timing.parse(parser, arguments, models=["ViT-S-32-alt"], batch=4, steps=1)
    with tempfile.TemporaryDirectory() as name:
        shards = shards_in(Path(name), 4, 64 if args.short else None)
        for model in args.models:
            report(Setting(model, args.blocks, args.batch, args.steps, shards), args.rounds)


if __name__ == "__main__":
    main()
