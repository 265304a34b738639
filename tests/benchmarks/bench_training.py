"""One training step beside open_clip's own training entry point, at the same settings.

Random weights and captions. With pictures in memory only the step counts: forward, contrastive
loss, backward, AdamW, on one device (the GPU where there is one). open_clip runs
``open_clip_train.main`` on its synthetic data, one picture that is kept in memory (it would
transform it for every sample); ours calls ``Engine.update`` on a batch that lies on the device.
With ``--shards`` both read the same JPEGs from the same shards, each by its own loader with as many
workers: open_clip by ``--dataset-type webdataset``, ours by ``mclclip train``. Each runs in a
process of its own, in turn, open_clip's with what ``make peers`` fetches. As many steps as are
measured go before; both sides log, and wait for the device, at the end of each half alone. Memory
is what torch has allocated on the GPU at most, or the process's resident set.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import torch
from PIL import Image
from torch.nn import functional

from mclclip.config import TrainConfig, from_tree
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.info_nce import InfoNCE
from mclclip.plan.memory import count_operations
from mclclip.ranks.process_group import Context, pick_device
from mclclip.train.build import attention_kernels
from mclclip.train.loop import ModelWithObjective
from mclclip.verbs import index, train
from tests.benchmarks import memory, peers, synthetic, timing

WIDTH, HEIGHT, QUALITY = 512, 384, 90  # of JPEGs, 50 kB each
THEIRS = """
import sys
import mclclip.util.torchvision_fix
import torch
from open_clip_train import data
from open_clip_train import train
from open_clip_train.main import main
class Meter(train.AverageMeter):
    def reset(self):
        if getattr(self, "count", 0):
            print("window", self.sum, self.count)
        super().reset()
train.AverageMeter = Meter
def item(self, _):
    if not hasattr(self, "kept"):
        self.kept = self.transform(self.image), self.preprocess_txt(self.caption)
    return self.kept
data.SyntheticDataset.__getitem__ = item
torch.set_num_threads(int(sys.argv[1]))
main(sys.argv[2:])
if torch.cuda.is_available():
    print("peak_bytes", torch.cuda.max_memory_allocated())
else:
    import resource
    print("peak_bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@dataclass(frozen=True)
class Setting:
    """What is compared. ``image_blocks``: how many are trained, with the text tower frozen; "all":
    both towers. ``shards`` are read by ``workers`` processes; without, pictures lie in memory."""

    model: str
    batch: int
    image_blocks: int | Literal["all"]
    compiled: bool
    precision: str
    steps: int
    threads: int
    shards: tuple[Path, ...] = ()
    workers: int = 1
    groups: int = 1  # of ours
    deterministic: bool = True  # ours

    @property
    def half(self) -> int:
        """Steps before those that count, and steps that count: more than workers have ready."""
        return max(self.steps, 2 * self.workers + 2) if self.shards else self.steps

    @property
    def title(self) -> str:
        """Model, batch, what is trained and compiled, and where pictures come from."""
        blocks = self.image_blocks
        parts = [
            self.model,
            f"batch {self.batch}",
            "all trained" if blocks == "all" else f"{blocks} blocks, text frozen",
            "compiled" if self.compiled else "",
            f"shards, {self.workers} worker(s)" if self.shards else "",
        ]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Measured:
    """Seconds per step, peak memory in GiB, seconds of a step in which data was waited for, and
    floating-point operations of a sample (0: not counted)."""

    step_s: float
    peak_gib: float
    data_s: float = 0.0
    operations: float = 0.0


def write_jpegs(folder: Path, num_shards: int, samples_per_shard: int) -> tuple[Path, ...]:
    """Shards of smooth random pictures with noise, of which every shard has others, up to 1,024.

    open_clip's loader drops what is left of a worker's shards after whole batches.
    """
    random = torch.Generator().manual_seed(0)

    def jpeg() -> bytes:
        coarse = torch.rand(1, 3, HEIGHT // 32, WIDTH // 32, generator=random)
        smooth = functional.interpolate(coarse, (HEIGHT, WIDTH), mode="bicubic")[0]
        noisy = smooth + 0.02 * torch.randn(smooth.shape, generator=random)
        pixels = noisy.clamp(0, 1).mul(255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(file := io.BytesIO(), "JPEG", quality=QUALITY)
        return file.getvalue()

    total = num_shards * samples_per_shard
    jpegs = itertools.cycle([jpeg() for _ in range(min(total, 1024))])
    words = "a an the photo picture dog cat house tree red blue small large two near on".split()

    def samples() -> Iterator[PackedSample]:
        for number, data in zip(range(total), jpegs, strict=False):
            places = torch.randint(len(words), (9,), generator=random).tolist()
            caption = " ".join(words[place] for place in places)
            yield PackedSample(f"{number:06d}", data, "jpg", [caption])

    return tuple(write_shards(samples(), folder, samples_per_shard))


def ours(setting: Setting) -> Measured:
    """In this process, which should be a fresh one."""
    torch.set_num_threads(setting.threads)
    device = pick_device("auto", deterministic=setting.deterministic)
    return _trained(setting, device) if setting.shards else _updated(setting, device)


def _updated(setting: Setting, device: torch.device) -> Measured:
    """Steps on a batch that lies on the device."""
    model = load_towers(setting.model, seed=0)
    text = setting.image_blocks == "all"
    model.lock(setting.image_blocks, True, True, text=text, logit_scale=True)
    model.to(device).train()
    trainee = ModelWithObjective(model, InfoNCE(), setting.precision)
    options = TrainConfig(precision=setting.precision)  # type: ignore[arg-type]
    operations = count_operations(trainee, options, device, cached_text=False)
    if setting.compiled:
        model.compile_blocks()
    engine = Engine(
        trainee,
        partial(build_optimizer, weight_decay=0.2),
        Context(device=device),
    )
    batch = synthetic.batch(setting.batch, model.image_size, setting.groups).to(device)

    def half() -> float:
        before = time.perf_counter()
        for _ in range(setting.half):
            engine.update(batch, lr=1e-6)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - before

    with attention_kernels(model, device):
        half()
        seconds = half()
    on_gpu = device.type == "cuda"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident
    return Measured(seconds / setting.half, peak / 2**30, operations=operations)


def _trained(setting: Setting, device: torch.device) -> Measured:
    """Steps of ``mclclip train`` without groups."""
    lock = {"image_blocks": setting.image_blocks, "text": setting.image_blocks == "all"}
    with tempfile.TemporaryDirectory() as run_dir:
        tree: dict[str, Any] = {
            "run_dir": run_dir,
            "device": device.type,
            "deterministic": setting.deterministic,
            "num_threads": setting.threads,
            "data": {
                "sources": {"bench": {"shards": [str(path) for path in setting.shards]}},
                "num_workers": setting.workers,
                "index_workers": setting.workers,
            },
            "model": {"name": setting.model, "pretrained": None},
            "base": {
                "global_batch": setting.batch,
                "steps": 2 * setting.half,
                "lr": 1e-6,
                "precision": setting.precision,
                "lock": lock,
                "engine": {"compile": "model" if setting.compiled else "none"},
                "checkpoint": {"every": 10**6},
                "log_every": setting.half,
            },
        }
        config, context = from_tree(tree), Context(device=device)
        index.run(config, context)
        rows = (train.run(config, context, stage=0) / "metrics.jsonl").read_text().splitlines()
    row = json.loads(rows[1])
    step_s = row["seconds"] / setting.half
    operations = 1e12 * row["tflops_per_s_per_rank"] / row["samples_per_s"]
    return Measured(step_s, row["memory_gib"], step_s * row["data_wait_share"], operations)


def theirs(setting: Setting) -> Measured:
    """open_clip's entry point in a process of its own."""
    options = {
        "model": setting.model,
        "dataset-type": "webdataset" if setting.shards else "synthetic",
        "train-num-samples": (2 * setting.half + 1) * setting.batch,
        "batch-size": setting.batch,
        "precision": "amp_bf16" if setting.precision == "bf16" else setting.precision,
        "epochs": 1,
        "workers": setting.workers if setting.shards else max(2, (os.cpu_count() or 2) - 2),
        "warmup": 0,
        "lr": 1e-6,
        "wd": 0.2,
        "log-every-n-steps": setting.half,
        "save-frequency": 0,
        "device": pick_device("auto").type,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    if setting.shards:
        words.append("--train-data=" + "::".join(str(path) for path in setting.shards))
    if setting.image_blocks != "all":
        words += ["--lock-text", "--lock-text-freeze-layer-norm"]
        # Their groups count the projection first: six blocks are seven groups.
        words += ["--lock-image", f"--lock-image-unlocked-groups={setting.image_blocks + 1}"]
    words += ["--torchcompile"] if setting.compiled else []
    with tempfile.TemporaryDirectory() as logs:
        words = ["-c", THEIRS, str(setting.threads), *words, f"--logs={logs}"]
        done = peers.run(words, setting.threads, peers=True)
    # Time and waiting of the first step, of a half, of the next one.
    words = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("window")]
    if done.returncode or len(words) < 6:
        raise RuntimeError(f"open_clip_train gave no figures:\n{done.stderr[-2000:]}")
    step_s, data_s = (float(total) / int(steps) for total, steps in words[4:6])
    return Measured(step_s, int(done.stdout.rsplit("peak_bytes", 1)[1]) / 2**30, data_s)


def measure(setting: Setting, rounds: int) -> list[list[str]]:
    """Rows of the two at one setting, measured in turn; ours alone where the other cannot run."""
    found: dict[str, list[Measured]] = {"open_clip": [], "mclclip": []}
    for _ in range(rounds):
        found["mclclip"].append(memory.in_fresh_process(ours, setting))
        if peers.can_run(reads_shards=bool(setting.shards)):
            found["open_clip"].append(theirs(setting))
    ratios = {"open_clip": "1", "mclclip": ""}
    if pairs := list(zip(*found.values(), strict=False)):
        ratios["mclclip"] = f"{statistics.median(b.step_s / a.step_s for a, b in pairs):.2f}"
    return [
        [
            setting.title,
            name,
            timing.number(setting.batch / statistics.median(item.step_s for item in measured)),
            ratios[name],
            timing.number(max(item.peak_gib for item in measured)),
            timing.number(max(item.data_s for item in measured)),
        ]
        for name, measured in found.items()
        if measured
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """The defaults are for a GPU; on a CPU they are of a size that it does in minutes."""
    on_gpu = pick_device("auto").type == "cuda"
    parser = timing.parser(__doc__)
    parser.set_defaults(rounds=3 if on_gpu else 1)
    models = ["ViT-B-32", "ViT-L-14"] if on_gpu else ["ViT-B-32"]
    parser.add_argument("--models", nargs="+", default=models)
    parser.add_argument("--batch", type=int, default=256 if on_gpu else 8)
    parser.add_argument("--steps", type=int, default=20 if on_gpu else 3)
    parser.add_argument("--blocks", nargs="+", default=["6", "all"])
    compiled = ["off", "on"] if on_gpu else ["off"]
    parser.add_argument("--compile", nargs="+", default=compiled, choices=["off", "on"])
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shards", action="store_true", help="read JPEGs, each by its own loader")
    parser.add_argument("--workers", type=int, default=1, help="loader processes with --shards")
    small = {"models": ["ViT-S-32-alt"], "batch": 4, "steps": 2, "blocks": ["6"]}
    options = timing.parse(parser, arguments, **small, compile=["off"])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shards: tuple[Path, ...] = ()
        if options.shards:
            shards = write_jpegs(Path(folder), options.workers, options.batch)
        for model, blocks, switch in itertools.product(
            options.models, options.blocks, options.compile
        ):
            setting = Setting(
                model,
                options.batch,
                "all" if blocks == "all" else int(blocks),
                switch == "on",
                options.precision,
                options.steps,
                options.threads,
                shards,
                options.workers,
            )
            rows += measure(setting, options.rounds)
    headers = ["setting", "", "samples/s", "time per step, ratio", "peak GiB", "data s"]
    timing.print_table(f"{options.precision}, {pick_device('auto').type}", headers, rows)
    if not peers.can_run(reads_shards=options.shards):
        print(f"\n{peers.MISSING}")


if __name__ == "__main__":
    main()
