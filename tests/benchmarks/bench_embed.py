"""Embedding a data set: ``mclclip embed`` beside the encoder's bare forward and a plain loop.

The forward is that of batches which lie ready in memory. The loop is what clip-retrieval's
inference does, written anew: webdataset in a DataLoader, open_clip's transform, ``encode_image``,
unit rows in float16. Each pass runs in a fresh process on one thread with one loader worker, and is
timed from its first batch to the last row on disk, without loading the model. With ``--ranks`` the
verb also runs on two processes, to be compared with one of them.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
from mclclip.config import Config, from_tree
from mclclip.models.loading import load_towers
from mclclip.ranks import process_group
from mclclip.ranks.process_group import SINGLE, Context
from mclclip.run.artifacts import RunPaths
from mclclip.util.remake import Remake
from mclclip.verbs import embed, export, index
from tests.benchmarks import memory, timing
from tests.benchmarks.bench_reading import photographs, rendered

BATCH = 32


def options(run_dir: Path, shards: Sequence[Path], model: str) -> Config:
    """One loader worker and one thread."""
    tree: dict[str, Any] = {
        "run_dir": str(run_dir),
        "device": "cpu",
        "num_threads": 1,
        "data": {
            "sources": {"bench": {"shards": [str(path) for path in shards]}},
            "num_workers": 1,
            "index_workers": 1,
        },
        "model": {"name": model, "pretrained": None},
        "embed": {"batch_size": BATCH},
    }
    return from_tree(tree)


def _settle() -> None:
    """One thread; and loader workers are forked, as in a process that was not itself spawned."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)


def verb(config: Config, rank: int = 0, world_size: int = 1, store: str = "") -> float:
    """Seconds of ``mclclip embed`` on this rank, without loading the model."""
    _settle()
    context: Context = SINGLE
    if world_size > 1:
        context = Context(rank, world_size)
        timeout = datetime.timedelta(seconds=600)
        process_group.join(context.device, rank, world_size, timeout, init_method=store)
    started = []
    original = embed.load_towers

    def timed(*arguments: Any) -> Any:
        model = original(*arguments)
        started.append(time.perf_counter())
        return model

    embed.load_towers = timed
    embed.run(config, context, stage=0, force=Remake.ALL)
    spent = time.perf_counter() - started[0]
    if world_size > 1:
        process_group.shutdown()
    return spent


def bare(config: Config) -> float:
    """Seconds of the forward alone, for as many images."""
    _settle()
    model = load_towers(RunPaths.of(config).export(0)).eval()
    samples = len(index.SampleIndex.open(RunPaths.of(config).index))
    images = torch.randn(BATCH, 3, model.image_size, model.image_size)
    with torch.inference_mode():
        model.encode_image(images)
        start = time.perf_counter()
        for first in range(0, samples, BATCH):
            model.encode_image(images[: min(BATCH, samples - first)])
    return time.perf_counter() - start


def loop(config: Config, shards: Sequence[Path], out: Path) -> float:
    """Seconds of the plain loop."""
    _settle()
    model = load_towers(RunPaths.of(config).export(0)).eval()
    data = webdataset.WebDataset([str(path) for path in shards], shardshuffle=False)
    data = data.decode("pil").to_tuple("jpg;png").map_tuple(model.preprocess_val)
    loader = torch.utils.data.DataLoader(data.batched(BATCH), batch_size=None, num_workers=1)
    start, rows = time.perf_counter(), []
    with torch.inference_mode():
        for (images,) in loader:
            features = torch.nn.functional.normalize(model.encode_image(images), dim=1)
            rows.append(features.numpy().astype(np.float16))
    np.save(out, np.concatenate(rows))
    return time.perf_counter() - start


def two_ranks(config: Config, work: Path) -> float:
    """The longest of two ranks."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    store = f"file://{work}/store_{time.monotonic_ns()}"
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        calls = [pool.submit(verb, config, rank, 2, store) for rank in range(2)]
        return max(call.result() for call in calls)


def main(arguments: Sequence[str] | None = None) -> None:
    """Photographs where they are, else rendered pictures."""
    parser = timing.parser(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--model", default="ViT-S-32-alt")
    parser.add_argument("--ranks", action="store_true", help="two processes too")
    args = timing.parse(parser, arguments)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        real = timing.SHARED_DATA.is_dir() and not args.short
        shards = photographs(work / "photos", 2, 400) if real else rendered(work, 256)
        config = options(work / "run", shards, args.model)
        samples = len(index.run(config, SINGLE))
        export.stage(config, SINGLE, stage=0)
        ways = {
            "bare forward": lambda: memory.in_fresh_process(bare, config),
            "mclclip embed": lambda: memory.in_fresh_process(verb, config),
            "plain loop": lambda: memory.in_fresh_process(loop, config, shards, work / "rows.npy"),
        }
        if args.ranks:
            ways["mclclip embed, two ranks"] = lambda: two_ranks(config, work)
        spent: dict[str, list[timing.Spent]] = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, call in ways.items():
                spent[way].append(timing.Spent(call(), float("nan")))
        found = timing.Timings(spent)
        rows = []
        for way in ways:
            low, high = found.spread(way, "bare forward")
            ratio = f"{found.ratio(way, 'bare forward'):.3f} ({low:.3f} to {high:.3f})"
            rows.append([way, timing.number(samples / found.wall_s(way)), ratio])
        timing.print_table(
            f"{samples} images, {args.model}, batches of {BATCH}, one thread and loader worker",
            ["way", "images/s", "time, ratio (quartiles)"],
            rows,
        )


if __name__ == "__main__":
    main()
