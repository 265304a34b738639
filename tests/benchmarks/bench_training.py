"""One training step beside open_clip's own training entry point, at the same settings.

Random weights, pictures and captions, so that only the step counts: forward, contrastive loss,
backward, AdamW, on one device (the GPU where there is one). open_clip runs ``open_clip_train.main``
on its synthetic data, one picture that is kept in memory (it would transform it for every sample),
and reports its own time per batch, of which its loader's share is shown; ours is timed around
``Engine.update`` with the device waited for. Each runs in a process of its own, in
turn, open_clip's in the environment that ``make peers`` makes; memory is what torch has allocated
on the GPU at most, or the process's resident set.
"""

from __future__ import annotations

import os
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.info_nce import InfoNCE
from mclclip.ranks.process_group import Context, pick_device
from mclclip.train.loop import ModelWithObjective
from tests.benchmarks import memory, peers, synthetic, timing

WARM_UP = 2  # steps that are not counted
THEIRS = """
import sys
import mclclip.util.torchvision_fix
import torch
from open_clip_train import data
from open_clip_train.main import main
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
    """What is compared."""

    model: str
    batch: int
    image_blocks: int | Literal["all"]
    compiled: bool
    precision: str
    steps: int
    threads: int
    groups: int = 1  # of ours
    deterministic: bool = False  # ours


@dataclass(frozen=True)
class Measured:
    """Median seconds per step, peak memory in GiB, seconds of a step spent on data."""

    step_s: float
    peak_gib: float
    data_s: float = 0.0


def ours(setting: Setting) -> Measured:
    """In this process, which should be a fresh one."""
    torch.set_num_threads(setting.threads)
    device = pick_device("auto", deterministic=setting.deterministic)
    model = load_towers(setting.model, seed=0)
    model.lock(setting.image_blocks, True, True, text=False, logit_scale=True)
    model.to(device).train()
    if setting.compiled:
        model.compile_blocks()
    engine = Engine(
        ModelWithObjective(model, InfoNCE(), setting.precision),
        partial(build_optimizer, weight_decay=0.2),
        Context(device=device),
    )
    given = synthetic.batch(setting.batch, model.image_size, setting.groups).to(device)
    spent = []
    for _ in range(WARM_UP + setting.steps):
        before = time.perf_counter()
        engine.update(given, lr=1e-6)
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - before)
    on_gpu = device.type == "cuda"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident
    return Measured(statistics.median(spent[WARM_UP:]), peak / 2**30)


def theirs(setting: Setting, interpreter: str) -> Measured:
    """open_clip's entry point in a process of its own."""
    total = (WARM_UP + setting.steps) * setting.batch
    options = {
        "model": setting.model,
        "dataset-type": "synthetic",
        "train-num-samples": total,
        "batch-size": setting.batch,
        "precision": "amp_bf16" if setting.precision == "bf16" else setting.precision,
        "epochs": 1,
        "workers": max(2, (os.cpu_count() or 2) - 2),
        "warmup": 0,
        "lr": 1e-6,
        "wd": 0.2,
        "log-every-n-steps": 1,
        "save-frequency": 0,
        "device": pick_device("auto").type,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    words += ["--lock-text", "--lock-text-freeze-layer-norm"]
    if setting.image_blocks != "all":
        # Their groups count the projection first: six blocks are seven groups.
        words += ["--lock-image", f"--lock-image-unlocked-groups={setting.image_blocks + 1}"]
    words += ["--torchcompile"] if setting.compiled else []
    with tempfile.TemporaryDirectory() as logs:
        words = ["-c", THEIRS, str(setting.threads), *words, f"--logs={logs}"]
        done = peers.run(interpreter, words, setting.threads)
    rates = [float(rate) for rate in re.findall(r", ([\d.e+-]+)/s, ", done.stderr + done.stdout)]
    if done.returncode or len(rates) <= WARM_UP:
        raise RuntimeError(f"open_clip_train gave no figures:\n{done.stderr[-2000:]}")
    shares = re.findall(r"Data \(t\): ([\d.]+)", done.stderr + done.stdout)
    peak = int(done.stdout.rsplit("peak_bytes", 1)[1])
    step_s = statistics.median(setting.batch / rate for rate in rates[WARM_UP:])
    return Measured(step_s, peak / 2**30, float(shares[-1]))


def measure(setting: Setting, rounds: int) -> list[list[str]]:
    """Rows of the two at one setting, measured in turn; ours alone where the other cannot run."""
    interpreter = peers.python(reads_shards=False)
    found: dict[str, list[Measured]] = {"mclclip": [], "open_clip": []}
    for _ in range(rounds):
        found["mclclip"].append(memory.in_fresh_process(ours, setting))
        if interpreter is not None:
            found["open_clip"].append(theirs(setting, interpreter))
    blocks = f"{setting.image_blocks} blocks" + (", compiled" if setting.compiled else "")
    pairs = list(zip(*found.values(), strict=False))
    ratios = {"open_clip": "1", "mclclip": ""}
    if pairs:
        ratios["mclclip"] = f"{statistics.median(a.step_s / b.step_s for a, b in pairs):.2f}"
    return [
        [
            f"{setting.model}, {blocks}",
            name,
            timing.number(setting.batch / statistics.median(item.step_s for item in measured)),
            ratios[name],
            timing.number(max(item.peak_gib for item in measured)),
            timing.number(max(item.data_s for item in measured)) if name == "open_clip" else "",
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
    small = {"models": ["ViT-S-32-alt"], "batch": 4, "steps": 2, "blocks": ["6"]}
    options = timing.parse(parser, arguments, **small, compile=["off"])
    rows = []
    for model in options.models:
        for blocks in options.blocks:
            for switch in options.compile:
                setting = Setting(
                    model,
                    options.batch,
                    "all" if blocks == "all" else int(blocks),
                    switch == "on",
                    options.precision,
                    options.steps,
                    options.threads,
                )
                rows += measure(setting, options.rounds)
    headers = ["setting", "", "samples/s", "time per step, ratio", "peak GiB", "data s"]
    timing.print_table(
        f"text locked, batch {options.batch}, {options.precision}, {pick_device('auto').type}",
        headers,
        rows,
    )
    if peers.python(reads_shards=False) is None:
        print(f"\n{peers.MISSING}")


if __name__ == "__main__":
    main()
