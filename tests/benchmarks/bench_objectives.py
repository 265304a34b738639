"""Every objective's cost per step, beside NT-Xent's or CLIP's at equal batch.

Three tables, of one process in fp32, each measured side by side in one run:

- The loss alone: forward and backward of a global batch from features that lie ready, with the
  group mask. Arithmetic says what to expect. With P the product of all queries with all keys of a
  direction, a loss in tiles takes four of them: the scores, the scores again in the backward, two
  gradients. Between views there are twice as many keys.
- A training step of a small encoder (``cifar_mnist.yaml``'s between views, ``demo.yaml``'s between
  captions), with the optimizer, and with everything that an objective adds to the model: a momentum
  copy's forward passes, a queue, a label filter, class centers. Beside it the share of the loss
  alone, from features of the encoder's own width.
- The gated cosine (SimLAP) over batches: bytes of tensors, and how they grow.

Objectives between captions are compared with ``info_nce``, the others with ``nt_xent``; those with
"one view" encode half as many images. Memory is what tensors take at most during a step, above what
lay there before; it includes the gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from mclclip import config
from mclclip.data.batches import Batch
from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.memory import StepMeter
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.base import Objective, ObjectiveInputs, ObjectiveOptions, parse
from mclclip.objectives.moco import QueuedKeys
from mclclip.ranks.process_group import Context
from mclclip.train.loop import ModelWithObjective
from tests.benchmarks import timing

SINGLE = Context(0, 1)
SIZES = (256, 1024)
DIM = 512
GATED_SIZES = (128, 256, 512, 1024, 2048)
GATED_DIM = 256
TOTAL_STEPS = 1000
WARM_UPS = 1


@dataclass(frozen=True)
class Variant:
    """An objective, by its options; ``num_classes`` are known, where it reads classes.

    ``tile``: rows and columns whose scores exist at a time (None: the objective's own).
    ``from_features``: whether its loss can be timed alone; one that changes pictures cannot.
    """

    options: Any
    num_classes: int = 100
    tile: int | None = None
    from_features: bool = True

    @property
    def parsed(self) -> ObjectiveOptions:
        """The checked options."""
        return parse(self.options)


def _views(kind: str, **options: Any) -> Variant:
    return Variant({"kind": kind, "between": "views", **options})


def _simlap(**options: Any) -> Variant:
    return Variant({"kind": "simlap", "attribute": "class", **options})


def _centers(kind: str) -> Variant:
    return Variant({"kind": kind, "sample_rate": 0.1, "centers": "normal"}, 10_000)


def _sum(first: str, **second: Any) -> Variant:
    modified = {"kind": "ifm", "term": "modified", **second}
    return Variant([{"kind": first}, modified])


SCHEDULE, LEARNABLE = {"schedule": "cosine"}, {"learnable": True}
SOFT = {"threshold": 0.95, "role": "positives"}
# Objectives by name, the one that the others are compared with first.
CAPTIONS: dict[str, Variant] = {
    "info_nce": Variant({"kind": "info_nce"}),
    "info_nce, scheduled": Variant({"kind": "info_nce", "temperature": SCHEDULE}),
    "info_nce, trained": Variant({"kind": "info_nce", "temperature": LEARNABLE}),
    "info_nce, equal bytes": Variant({"kind": "info_nce", "near_copies": {}}),
    "info_nce, near copies": Variant({"kind": "info_nce", "near_copies": {"threshold": 0.95}}),
    "info_nce, soft targets": Variant({"kind": "info_nce", "near_copies": SOFT}),
    "info_nce, three widths": Variant({"kind": "info_nce", "widths": [8, 16]}),
    "ifm": Variant({"kind": "ifm"}),
    "ifm, modified alone": Variant({"kind": "ifm", "term": "modified"}),
    "hcl": Variant({"kind": "hcl"}),
    "sigmoid": Variant({"kind": "sigmoid"}),
    "sigmoid, tiles of 256": Variant({"kind": "sigmoid"}, tile=256),
    "info_nce + ifm, modified": _sum("info_nce"),
}
VIEWS: dict[str, Variant] = {
    "nt_xent": Variant({"kind": "nt_xent"}),
    "nt_xent, scheduled": Variant({"kind": "nt_xent", "temperature": SCHEDULE}),
    "nt_xent, trained": Variant({"kind": "nt_xent", "temperature": LEARNABLE}),
    "ifm": _views("ifm"),
    "ifm, modified alone": _views("ifm", term="modified"),
    "hcl": _views("hcl"),
    "sigmoid": _views("sigmoid"),
    "sigmoid, tiles of 256": Variant({"kind": "sigmoid", "between": "views"}, tile=256),
    "supcon": Variant({"kind": "supcon", "attribute": "class"}),
    "supcon, one view": Variant({"kind": "supcon", "attribute": "class", "num_views": 1}),
    "moco v2, 4,096 keys": Variant({"kind": "moco", "queue_size": 4096}),
    "moco v2, 65,536 keys": Variant({"kind": "moco"}),
    "moco v2, 4,096 keys, ifm": Variant({"kind": "moco", "queue_size": 4096, "epsilon": 0.1}),
    "moco v3": Variant({"kind": "moco", "version": "v3"}),
    "simlap": _simlap(),
    "simlap, score of the code": _simlap(score="code"),
    "simlap, open gates": _simlap(gates="open"),
    "simlap, identical": _simlap(pairs="identical"),
    "simlap, distinct": _simlap(pairs="distinct"),
    "simlap, 5 closest": _simlap(pairs="n_closest", closest_by="label_embeddings"),
    "simlap, penalty": _simlap(penalty_weight=0.1),
    "simlap, momentum copy": _simlap(momentum=0.99),
    "mlcd, one view": _centers("mlcd"),
    "mlc, one view": _centers("mlc"),
    "single_label, one view": _centers("single_label"),
    "nt_xent + ifm, modified": _sum("nt_xent", between="views"),
    "feature_dropout, narrow": Variant(
        {"kind": "feature_dropout", "width": 8, "residual_blocks": 1}, from_features=False
    ),
}
TABLES: dict[str, Mapping[str, Variant]] = {"captions": CAPTIONS, "views": VIEWS}
RECIPES = {"captions": "demo", "views": "cifar_mnist"}


# --- what a step is made of ----------------------------------------------------------------------


class Ready(nn.Module):
    """A model whose "images" are features already: what is left of a step is the loss."""

    has_logit_bias, first_block = False, 0

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.feature_dim = dim

    def forward(
        self, image: Tensor, text: Tensor | None = None, text_features: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns what it is given, by name, and a logit scale."""
        found = {"image_features": image, "logit_scale": image.new_full((), 20.0)}
        found |= {} if text_features is None else {"text_features": text_features}
        return found


@dataclass(frozen=True)
class Classes:
    """Classes of which only the number counts."""

    num_classes: int

    def centroids(self) -> npt.NDArray[np.float32]:
        """Rows of zeros: class centers are drawn here."""
        return np.zeros((self.num_classes, 1), dtype=np.float32)


@dataclass
class Case:
    """A variant with its model and one batch of two groups, ready to be stepped."""

    trainee: ModelWithObjective
    batch: Batch
    engine: Engine | None = None
    outside: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.outside = list(self.trainee.objective.outside())

    def step(self) -> Tensor:
        """One step: with an engine all of a training's, without one forward and backward."""
        objective = self.trainee.objective
        objective.begin(self.batch.step, TOTAL_STEPS, 0.0)
        if self.engine is not None:
            loss = self.engine.update(self.batch, lr=1e-6)["loss"]
        else:
            for tensor in (*self.batch.tensors(), *self.trainee.parameters()):
                tensor.grad = None
            for part in self.outside:
                part.zero_grad()
                part.begin(self.batch.step)
            loss = self.trainee(self.batch)["loss"]
            loss.backward()
        objective.stepped(self.trainee.model)
        return loss.detach()

    def peak_mib(self) -> float:
        """MiB that tensors take at most during a step, above what is there before it."""
        self.step()  # whatever is made once
        there = [*self.batch.tensors(), *self.trainee.parameters(), *self.trainee.buffers()]
        there += [tensor.grad for tensor in there if tensor.grad is not None]
        states = [part.state_dict() for part in self.outside]
        if self.engine is not None:
            states += list(self.engine.optimizer.state.values())
        there += [value for state in states for value in state.values() if torch.is_tensor(value)]
        with StepMeter(there) as meter:
            self.step()
        return meter.peak / 2**20


def build(variant: Variant, model: Any) -> Objective:
    """The objective on one process; a queue is full of other samples' keys."""
    classes = Classes(variant.num_classes)
    setting = ObjectiveInputs(model=model, context=SINGLE, seed=0, classes=classes)
    objective = variant.parsed.build(setting)
    if variant.tile is not None:
        objective.tile = variant.tile  # type: ignore[assignment]
    if isinstance(objective, QueuedKeys):
        places = torch.arange(len(objective.queue))
        objective.queue.copy_(functional.normalize(torch.randn_like(objective.queue)))
        objective.queue_groups.copy_(places % 2)
        objective.queue_sample_ids.copy_(places + 10**9)
        objective.queue_prefix_lengths.zero_()
    return objective


def marks(variant: Variant, size: int) -> dict[str, Any]:
    """What a batch says of its samples: two groups, and classes where they are read."""
    ids, columns = torch.arange(size), variant.parsed.reads.num_classes_per_sample
    random = torch.Generator().manual_seed(1)
    drawn = torch.randint(variant.num_classes, (size, columns), generator=random)
    reads = variant.parsed.reads
    extras = {name: ids for name in reads.digests}  # all of them unlike each other
    for name in reads.of_stage_0:
        stored = torch.randn(size, DIM, generator=random)
        extras[f"base_{name}"] = functional.normalize(stored)
    return {
        "group_ids": ids[:, None] % 2,
        "sample_id": ids,
        "classes": drawn if columns else None,
        "step": 1,
        "group_size": size // 2,
        "extras": extras,
    }


def loss_alone(variant: Variant, size: int, dim: int) -> Case:
    """Unit features with gradient in place of images and captions."""
    random = torch.Generator().manual_seed(0)

    def features() -> Tensor:
        drawn = functional.normalize(torch.randn(size, dim, generator=random))
        return drawn.requires_grad_()

    options = variant.parsed
    batch = Batch(
        views=[features() for _ in range(options.reads.num_views)],
        text_features=features() if options.reads.captions else None,
        **marks(variant, size),
    )
    model: Any = Ready(dim)
    return Case(ModelWithObjective(model, build(variant, model)), batch)


def training(variant: Variant, size: int, recipe: str) -> Case:
    """A recipe's model on random pictures and captions, with AdamW."""
    options, random = variant.parsed, torch.Generator().manual_seed(0)
    model = encoder(recipe)
    reads = options.reads
    model.lock("all", True, True, reads.captions, reads.logit_scale)
    trainee = ModelWithObjective(model, build(variant, model)).train()
    shape = size, model.num_channels, model.image_size, model.image_size
    batch = Batch(
        views=[torch.randn(shape, generator=random) for _ in range(options.reads.num_views)],
        text=torch.randint(1, 49_000, (size, 20), generator=random) if reads.captions else None,
        **marks(variant, size),
    )
    outside = trainee.objective.outside()
    optimizer = partial(build_optimizer, weight_decay=0.2)
    return Case(trainee, batch, Engine(trainee, optimizer, SINGLE, outside=outside))


def encoder(recipe: str) -> Model:
    """The model of a recipe, from random weights."""
    named = config.load(timing.ROOT / "launch" / "recipes" / f"{recipe}.yaml").model
    return load_towers(named.name, projector=named.projector, seed=0)


# --- the tables ----------------------------------------------------------------------------------


def measure_losses(between: str, size: int, rounds: int) -> None:
    """The table of the losses alone."""
    table = {name: v for name, v in TABLES[between].items() if v.from_features}
    cases = {name: loss_alone(v, size, DIM) for name, v in table.items()}
    steps: dict[str, Callable[[], object]] = {name: case.step for name, case in cases.items()}
    timings = timing.interleave(steps, rounds, WARM_UPS)
    rows = [
        [*row, timing.number(cases[row[0]].peak_mib())]
        for row in timings.rows(next(iter(cases)), size)
    ]
    timing.print_table(
        f"losses between {between} of {size:,} samples x {DIM}, forward and backward",
        [*timing.headers("objective", "samples"), "peak MiB"],
        rows,
    )


def measure_trainings(between: str, size: int, rounds: int) -> None:
    """The table of whole training steps, with the share of the loss alone."""
    recipe, table = RECIPES[between], TABLES[between]
    dim, first = encoder(recipe).feature_dim, next(iter(table))
    whole = {name: training(variant, size, recipe) for name, variant in table.items()}
    alone = {
        f"{name}: loss": loss_alone(v, size, dim) for name, v in table.items() if v.from_features
    }
    steps: dict[str, Callable[[], object]] = {n: case.step for n, case in (whole | alone).items()}
    timings = timing.interleave(steps, rounds, WARM_UPS)
    rows = [
        [
            *row,
            f"{100 * timings.cpu_ratio(loss, row[0]):.1f} %" if loss in alone else "-",
            timing.number(whole[row[0]].peak_mib()),
        ]
        for row in timings.rows(first, size, table)
        for loss in [f"{row[0]}: loss"]
    ]
    timing.print_table(
        f"training steps of {recipe}.yaml's model, {size:,} samples, losses between {between}",
        [*timing.headers("objective", "samples"), "loss alone (CPU)", "peak MiB"],
        rows,
    )


def measure_gated(sizes: Sequence[int]) -> None:
    """The table of the gated cosine's memory, and the exponents of its growth."""
    own = loss_alone(_simlap(), 2, 2).trainee.objective.tile
    ways = {f"tiles of {tile:,}": tile for tile in (own, 128)}
    found = {
        name: [loss_alone(_tiled(tile), size, GATED_DIM).peak_mib() for size in sizes]
        for name, tile in ways.items()
    }
    pairs = [size * size * GATED_DIM * 4 / 2**20 for size in sizes]
    columns = {**found, "a tensor [B, B, D] alone": pairs}
    rows = [
        [f"{size:,}", *(timing.number(column[n]) for column in columns.values())]
        for n, size in enumerate(sizes)
    ]
    for last in (len(sizes), 2):
        title = "exponent" if last == len(sizes) else "exponent, the last two"
        exponents = [exponent(sizes[-last:], column[-last:]) for column in columns.values()]
        rows.append([title, *(f"{value:.2f}" for value in exponents)])
    title = f"simlap of B samples x {GATED_DIM}, MiB at most of a forward and a backward"
    timing.print_table(title, ["B", *columns], rows)


def _tiled(tile: int) -> Variant:
    return Variant(_simlap().options, tile=tile)


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """p of the power of the size that the values grow with: the slope of their logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Five minutes."""
    options = _options(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for between in TABLES:
        for size in options.sizes:
            measure_losses(between, size, options.rounds)
        measure_trainings(between, options.batch, options.rounds)
    measure_gated(options.gated)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = timing.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="SAMPLES")
    parser.add_argument("--batch", type=int, default=128, help="of the training steps")
    parser.add_argument("--gated", type=int, nargs="+", default=list(GATED_SIZES))
    return timing.parse(parser, arguments, sizes=[64], batch=16, gated=[32, 64])


if __name__ == "__main__":
    main()
