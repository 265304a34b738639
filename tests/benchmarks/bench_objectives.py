"""Every objective's own cost per step, beside CLIP's or NT-Xent's at equal batch.

A step is forward and backward of the loss alone, of one process's global batch in fp32, with the
group mask, from features that lie ready: what the loss adds to the towers. Objectives between
captions are compared with ``info_nce``, those between views with ``nt_xent``, in one run. Peak
memory is measured in a fresh process for each: the largest resident set during one step, above what
was resident when the features lay ready; it includes the features' gradients. Objectives that
change the views cost more than their loss: for them forward and backward of a ResNet-18 with its
projector and its loss are timed, on pictures of 32 x 32.

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

from mclclip.data.batches import Batch
from mclclip.models.loading import load_any
from mclclip.objectives.base import HasFeatures, Objective, Setting, parse
from mclclip.ranks.process_group import Context
from mclclip.train.loop import Trainee
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
STEPS: dict[str, dict[str, Any]] = {
    "nt_xent": {"kind": "nt_xent"},
    "feature_dropout": {"kind": "feature_dropout"},
    "feature_dropout, narrow": {"kind": "feature_dropout", "width": 8, "residual_blocks": 1},
}
PICTURES = 32  # of a whole step
TABLES: dict[str, Mapping[str, dict[str, Any]]] = {"captions": CAPTIONS, "views": VIEWS}


class _Model:
    """The part of a model that an objective is built for."""

    feature_dim = DIM
    has_logit_bias = False


def build(options: dict[str, Any], model: HasFeatures | None = None) -> Objective:
    """The objective on one process."""
    return parse(options).build(Setting(model=model or _Model(), context=Context(0, 1), seed=0))


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


def whole_step(trainee: Trainee, batch: Batch) -> None:
    """Forward and backward of model, views and loss."""
    trainee.zero_grad()
    for part in trainee.objective.outside():
        part.zero_grad()
    trainee(batch)["loss"].backward()


def measure_steps(rounds: int) -> None:
    """The table of whole steps."""
    vision = {"backbone": "timm:resnet18", "image_size": 32, "stem": "cifar"}
    model = load_any({"vision_cfg": vision}, seed=0, projector=[512, 128]).train()
    batch = Batch(
        views=[torch.rand(PICTURES, 3, 32, 32) for _ in range(2)],
        labels=torch.zeros(PICTURES, 1, dtype=torch.int64),
        sample_id=torch.arange(PICTURES),
        step=0,
        group_size=PICTURES,
    )
    steps: dict[str, Callable[[], object]] = {
        name: partial(whole_step, Trainee(model, build(options, model)), batch)
        for name, options in STEPS.items()
    }
    timings = timing.interleave(steps, rounds)
    timing.print_table(
        f"steps of a ResNet-18 on two views of {PICTURES} pictures, forward and backward",
        timing.headers("objective", "samples"),
        timings.rows("nt_xent", PICTURES),
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
    measure_steps(options.rounds)


if __name__ == "__main__":
    main()
