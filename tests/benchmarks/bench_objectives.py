"""Every objective's own cost per step, beside CLIP's or NT-Xent's at equal batch.

A step is forward and backward of the loss alone, of one process's global batch in fp32, with the
group mask, from features that lie ready: what the loss adds to the towers. Objectives between
captions are compared with ``info_nce``, those between views with ``nt_xent``, in one run. Peak
memory is measured in a fresh process for each: the largest resident set during one step, above what
was resident when the features lay ready; it includes the features' gradients.

Arithmetic says what to expect. With P the product of all queries with all keys of a direction, a
loss in tiles takes four of them: the scores, the scores again in the backward, two gradients.
Between views there are twice as many keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.base import Objective, Setting, parse
from mclclip.ranks.process_group import Context
from tests.benchmarks import memory, timing

SIZES = (256, 1024, 4096)
DIM = 512
NUM_CLASSES = 100
# Objectives by name, the one that the others are compared with first.
CAPTIONS: dict[str, dict[str, Any]] = {
    "info_nce": {"kind": "info_nce"},
    "info_nce, scheduled": {"kind": "info_nce", "temperature": {"schedule": "cosine"}},
    "ifm": {"kind": "ifm"},
    "ifm, modified": {"kind": "ifm", "term": "modified"},
    "hcl": {"kind": "hcl"},
}
VIEWS: dict[str, dict[str, Any]] = {
    "nt_xent": {"kind": "nt_xent"},
    "nt_xent, learnable": {"kind": "nt_xent", "temperature": {"learnable": True}},
    "ifm": {"kind": "ifm", "between": "views"},
    "hcl": {"kind": "hcl", "between": "views"},
    "supcon": {"kind": "supcon", "attribute": "class"},
    "supcon, one view": {"kind": "supcon", "attribute": "class", "num_views": 1},
}
TABLES: dict[str, Mapping[str, dict[str, Any]]] = {"captions": CAPTIONS, "views": VIEWS}


class _Model:
    """The part of a model that an objective is built for."""

    feature_dim = DIM


def build(options: dict[str, Any]) -> Objective:
    """The objective on one process."""
    return parse(options).build(Setting(model=_Model(), context=Context(0, 1), seed=0))


def inputs(size: int) -> dict[str, Tensor]:
    """Unit features with gradient, the logit scale, two groups, and classes."""
    rng = torch.Generator().manual_seed(0)
    image, other = (functional.normalize(torch.randn(size, DIM, generator=rng)) for _ in "it")
    leaves = {"image_features": image, "text_features": other, "image_features_1": other.clone()}
    leaves["logit_scale"] = torch.tensor(20.0)
    ids = torch.arange(size)
    marks = {"labels": ids[:, None] % 2, "sample_id": ids, "classes": ids[:, None] % NUM_CLASSES}
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()} | marks


def step(objective: Objective, features: Mapping[str, Tensor]) -> Tensor:
    """Forward and backward; the loss."""
    for tensor in features.values():
        tensor.grad = None
    loss: Tensor = objective(**features)["loss"]
    loss.backward()
    return loss.detach()


def peak_here(between: str, name: str, size: int) -> float:
    """MiB of one step, in this process, which should be a fresh one."""
    torch.set_num_threads(1)
    objective = build(TABLES[between][name])
    step(objective, inputs(32))  # libraries and their buffers are loaded at first use
    features = inputs(size)
    return memory.peak_mib(lambda: step(objective, features))


def measure(between: str, size: int, rounds: int) -> None:
    """The table of one global batch."""
    table, features = TABLES[between], inputs(size)
    steps: dict[str, Callable[[], object]] = {
        name: partial(step, build(options), features) for name, options in table.items()
    }
    timings = timing.interleave(steps, rounds)
    rows = [
        [*row, timing.number(memory.in_fresh_process(peak_here, between, row[0], size))]
        for row in timings.rows(next(iter(table)), size)
    ]
    timing.print_table(
        f"losses between {between} of {size:,} samples x {DIM}, forward and backward",
        [*timing.headers("objective", "samples"), "peak MiB"],
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Small to full size."""
    parser = timing.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="SAMPLES")
    options = timing.parse(parser, arguments, sizes=[128])
    torch.set_num_threads(1)
    for size in options.sizes:
        for between in TABLES:
            measure(between, size, options.rounds)


if __name__ == "__main__":
    main()
