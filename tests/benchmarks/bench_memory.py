"""One training step of a ViT-B-32 on the CPU: peak memory plain, and by gradient caching.

Both towers are trained, in fp32, on random pictures and tokens; a step is forward, backward and
AdamW on one process. Memory is the largest resident set during a step above what the model and its
moments take, in a process of its own; it includes the gradients. The plain step is measured at
growing batches and its line continued to a batch no such machine holds; cached steps are measured
at one batch. Gradients are compared with the plain step's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.info_nce import InfoNCE
from mclclip.ranks.process_group import SINGLE
from mclclip.train.loop import Trainee
from tests.benchmarks import memory, synthetic, timing

FAR = 8192


@dataclass(frozen=True)
class Measured:
    """One step: MiB above the model, seconds, and its gradient."""

    peak_mib: float
    step_s: float
    grad_norm: float
    loss: float


def measure(name: str, size: int, micro_batch: int | None, num_threads: int) -> Measured:
    """In this process, which should be a fresh one."""
    torch.set_num_threads(num_threads)
    model = load_towers(name, seed=0).train()
    engine = Engine(
        Trainee(model, InfoNCE()),
        partial(build_optimizer, weight_decay=0.2),
        SINGLE,
        micro_batch=micro_batch,
    )
    engine.update(synthetic.batch(2, model.image_size), lr=0.0)  # moments and libraries
    engine.zero_grad()
    given, found = synthetic.batch(size, model.image_size), {}
    before = time.perf_counter()
    peak = memory.peak_mib(lambda: found.update(engine.update(given, lr=0.0)))
    took = time.perf_counter() - before
    return Measured(peak, took, float(found["grad_norm"]), float(found["loss"]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Minutes."""
    parser = timing.parser(__doc__)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--micro", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--threads", type=int, default=2)
    small = {"model": "ViT-S-32-alt", "global_batch": 16, "micro": [4, 8]}
    options = timing.parse(parser, arguments, **small)
    size = options.global_batch
    run = partial(memory.in_fresh_process, measure, options.model)
    plain = {n: run(n, None, options.threads) for n in [*options.micro, size]}
    cached = {n: run(size, n, options.threads) for n in options.micro}
    slope, offset = np.polyfit(list(plain), [item.peak_mib for item in plain.values()], 1)
    rows = [[f"plain, batch {n:,}", *_cells(item, plain[size])] for n, item in plain.items()]
    extrapolated = timing.number((offset + slope * FAR) / 1024)
    rows.append([f"plain, batch {FAR:,} (EXTRAPOLATED, a line)", extrapolated, "", "", ""])
    rows += [
        [f"cached, batch {size:,}, micro-batch {n:,}", *_cells(item, plain[size])]
        for n, item in cached.items()
    ]
    headers = ["step", "peak GiB", "step s", "of the plain step", "gradient norm off by"]
    timing.print_table(f"{options.model}, {options.threads} thread(s), fp32", headers, rows)


def _cells(item: Measured, reference: Measured) -> list[str]:
    """Memory, seconds, share of the reference's, and how far the gradient's norm is off."""
    same = abs(item.loss - reference.loss) < 1e-3 * abs(reference.loss)
    off = f"{abs(item.grad_norm / reference.grad_norm - 1):.0e}" if same else ""
    return [
        timing.number(item.peak_mib / 1024),
        timing.number(item.step_s),
        f"{item.peak_mib / reference.peak_mib:.2f}",
        off,
    ]


if __name__ == "__main__":
    main()
