"""Gathering image features while the text tower runs (``begin_gather``), against gathering at once.

Two gloo processes send each other features, and the sums of their gradients. The text tower is one
that sleeps: it takes time and no core, as one that runs on a GPU. What it hides is wall time; the
messages themselves cost what they cost. How much that is on GPUs is arithmetic (launch/SCALE.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mclclip.ranks import collectives
from tests.benchmarks import timing
from tests.distributed.conftest import RankPool

WAYS = {"no messages": None, "at once": False, "begun early": True}
ROWS = 1024


class Tower(torch.autograd.Function):
    """Takes ``seconds``, and twice as many in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


def step(features: Tensor, early: bool | None, seconds: float) -> None:
    """Both passes over a text tower, with the messages of image features (None: without)."""
    collectives.barrier()
    images = features.requires_grad_() * 1.0
    if early:
        collectives.begin_gather(images)
    texts: Tensor = Tower.apply(torch.ones(1, requires_grad=True), seconds)  # type: ignore[no-untyped-call]
    every = images if early is None else collectives.gather_with_grad(images)
    torch.autograd.backward([every, texts], [torch.ones_like(every), torch.ones_like(texts)])


def measure(dim: int, seconds: float, rounds: int) -> timing.Timings:
    """This rank's times; all ranks run the same steps in the same order."""
    features = torch.randn(ROWS, dim)
    steps = {name: partial(step, features, early, seconds) for name, early in WAYS.items()}
    return timing.interleave(steps, rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table per width of features."""
    parser = timing.parser(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[768, 2048, 8192])
    parser.add_argument("--seconds", type=float, default=0.5, help="of the tower's forward pass")
    args = timing.parse(parser, arguments, dims=[64], seconds=0.01)
    pool = RankPool()
    try:
        for dim in args.dims:
            found = pool(2, measure, dim, args.seconds, args.rounds, timeout_s=600.0)[0]
            title = f"Gathering {ROWS:,} x {dim:,} features of each of two ranks"
            timing.print_table(title, timing.headers("way", "rows"), found.rows("at once", ROWS))
    finally:
        pool.kill()


if __name__ == "__main__":
    main()
