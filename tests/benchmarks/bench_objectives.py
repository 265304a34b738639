"""Every objective's cost per training step, beside NT-Xent's or CLIP's at equal batch.

One process in fp32: a step of a small encoder (``cifar_mnist.yaml``'s between views,
``demo.yaml``'s between captions), with the optimizer, and with everything that an objective adds to
the model: a momentum copy's forward passes, a queue, a label filter, class centers. All are
measured side by side in one run.

Objectives between captions are compared with ``info_nce``, the others with ``nt_xent``; those with
"one view" encode half as many images. Memory is what tensors take at most during a step, above what
lay there before; it includes the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
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
DIM = 512
TOTAL_STEPS = 1000


@dataclass(frozen=True)
class Variant:
    """An objective, by its options; ``num_classes`` are known, where it reads classes.

    ``tile``: rows and columns whose scores exist at a time (None: the objective's own).
    """

    options: Any
    num_classes: int = 100
    tile: int | None = None

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
        {"kind": "feature_dropout", "width": 8, "residual_blocks": 1}
    ),
}
TABLES: dict[str, Mapping[str, Variant]] = {"captions": CAPTIONS, "views": VIEWS}
RECIPES = {"captions": "demo", "views": "cifar_mnist"}


# --- what a step is made of ----------------------------------------------------------------------


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
    engine: Engine

    def step(self) -> None:
        """All of a training's step."""
        objective = self.trainee.objective
        objective.begin(self.batch.step, TOTAL_STEPS, 0.0)
        self.engine.update(self.batch, lr=1e-6)
        objective.stepped(self.trainee.model)

    def peak_mib(self) -> float:
        """MiB that tensors take at most during a step, above what is there before it."""
        self.step()  # whatever is made once
        there = [*self.batch.tensors(), *self.trainee.parameters(), *self.trainee.buffers()]
        there += [tensor.grad for tensor in there if tensor.grad is not None]
        states = [part.state_dict() for part in self.trainee.objective.outside()]
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


def measure_trainings(between: str, size: int, rounds: int) -> None:
    """The table of training steps."""
    recipe, table = RECIPES[between], TABLES[between]
    cases = {name: training(variant, size, recipe) for name, variant in table.items()}
    steps: dict[str, Callable[[], object]] = {name: case.step for name, case in cases.items()}
    timings = timing.interleave(steps, rounds)
    rows = [
        [*row, timing.number(cases[row[0]].peak_mib())]
        for row in timings.rows(next(iter(table)), size)
    ]
    timing.print_table(
        f"training steps of {recipe}.yaml's model, {size:,} samples, losses between {between}",
        [*timing.headers("objective", "samples"), "peak MiB"],
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Five minutes."""
    parser = timing.parser(__doc__)
    parser.add_argument("--batch", type=int, default=128)
    options = timing.parse(parser, arguments, batch=16)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for between in TABLES:
        measure_trainings(between, options.batch, options.rounds)


if __name__ == "__main__":
    main()
