"""What every objective keeps, each by its settings and loop in ``objective_cases.CASES``.

Value and gradient are the paper's formula in float64; N ranks equal one on real processes under
every engine; a state goes on bit for bit; samples of other groups have no influence.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional

from mclclip import config
from mclclip.data.batches import Batch
from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.models.preparing import prepare_model
from mclclip.objectives.base import (
    Objective,
    ObjectiveInputs,
    ObjectiveOptions,
    kinds,
    options_class,
    parse,
)
from mclclip.ranks import collectives
from mclclip.ranks.process_group import SINGLE
from mclclip.train.loop import ModelWithObjective
from tests import tiny
from tests.contracts.objective_cases import CASES, TEACHERS, Case, teacher_of
from tests.distributed.conftest import here
from tests.distributed.test_engines import assert_close, whole
from tests.engines import build_engine
from tests.matrix import SOAK, in_soak, kept
from tests.objective_loops import DIGESTS, NUM_CLASSES, SEED, Step

Ranks = Callable[..., list[Any]]
GLOBAL_BATCH, STEPS, DIM = 12, 4, 8


class Classes:
    """Classes with centroids, as clusters have them."""

    num_classes = NUM_CLASSES

    def centroids(self) -> Any:
        return np.random.default_rng(5).standard_normal((NUM_CLASSES, DIM), np.float32)


def batch_of(options: ObjectiveOptions, seed: int, rows: int, groups: int) -> Batch:
    """What the options read, of samples of which some are repeated; every third step is masked at
    another length."""
    random, reads = torch.Generator().manual_seed(seed), options.reads
    drawn = [
        torch.randn(rows, 3, 32, 32, generator=random).double() for _ in range(reads.num_views)
    ]
    classes = torch.randint(0, NUM_CLASSES, (rows, max(reads.num_classes_per_sample, 1)),
                            generator=random)  # fmt: skip
    if classes.shape[1] > 1:  # distinct ones; some rows have fewer, one has none
        classes[classes[:, 0] == classes[:, 1], 1] = -1
        classes[seed % rows] = -1
    # Of captions and pictures some are equal, in every third step most.
    digests = torch.randint(0, 2 + rows * (seed % 3), (len(DIGESTS), rows), generator=random)
    extras = {
        name: functional.normalize(
            torch.randn(rows, TEACHERS.get(encoder, DIM), generator=random, dtype=torch.float64)
        )
        for name, (encoder, _) in reads.stored.items()
    }
    extras |= {n: d for n, d in zip(DIGESTS, digests, strict=True) if n in reads.digests}
    if reads.edits:  # in every third step none is there
        shape = (rows, reads.edits.per_caption)
        extras["edited_text"] = torch.randint(1, 400, (*shape, 20), generator=random)
        extras["has_edit"] = torch.rand(shape, generator=random) < 0.3 * (seed % 3)
    return Batch(
        views=drawn,
        text=torch.randint(1, 400, (rows, 20), generator=random) if reads.captions else None,
        group_ids=torch.randint(0, groups, (rows, 1), generator=random),
        classes=classes,
        sample_id=torch.randint(0, rows + 4, (rows,), generator=random),
        step=seed,
        group_size=rows,
        prefix_length=seed // 3,
        extras=extras,
    )


# --- value and gradient ------------------------------------------------------------------------


class Towers(nn.Module):
    """One linear layer for images of 3 x 32 x 32 pixels, and one for 20 tokens."""

    feature_dim, has_logit_bias, image_size, num_channels = DIM, True, 32, 3
    image_shape = (3, 32, 32)
    normalization = torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.25)

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        for name, width in (("image", 3 * 32 * 32), ("text", 20)):
            weight = torch.randn(DIM, width, generator=random, dtype=torch.float64) / width**0.5
            self.register_parameter(name, nn.Parameter(weight))
        self.log_scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.logit_bias = nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))

    def forward(
        self,
        image: Tensor | None = None,
        text: Tensor | None = None,
        text_features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        found = {"logit_scale": self.log_scale.exp(), "logit_bias": self.logit_bias}
        for name, x in (("image", image), ("text", text)):
            if x is not None:
                features = x.flatten(1).double() @ self.get_parameter(name).T
                found[f"{name}_features"] = functional.normalize(features, dim=-1)
        return found


def built(
    options: ObjectiveOptions, tile: int = 2048, precision: str = "float64"
) -> tuple[Towers, Objective]:
    model: Any = Towers()
    objective = options.build(
        ObjectiveInputs(model, SINGLE, SEED, precision, classes=Classes(), teacher=teacher_of)
    )
    for module in objective.modules():
        if hasattr(module, "tile"):
            module.tile = tile
    return model, objective


def forward(model: Towers, objective: Objective, batch: Batch, step: int) -> Any:
    """The parts of a step, and the step as its loop gets it."""
    objective.begin(step, STEPS, step / 2)
    for part in objective.outside():
        part.zero_grad()
        part.begin(step)
    features = objective.features(model, batch, {})
    parts = objective(features, batch)
    features |= batch.extras
    seen = Step(objective, features, batch.group_ids[:, 0], batch.sample_id, batch.classes,
                batch.prefix_length, step, batch.extras)  # type: ignore[arg-type]  # fmt: skip
    return parts, seen


def leaves_of(model: Towers, objective: Objective) -> dict[str, Tensor]:
    """All that is trained, but for class centers, which have no graph."""
    found = {n: p for m in (model, objective) for n, p in m.named_parameters() if p.requires_grad}
    for part in objective.outside():
        own: Any = part
        if hasattr(own, "network"):
            found |= dict(own.network.named_parameters())
        found |= {n: v for n, v in vars(own).items() if isinstance(v, Tensor) and v.requires_grad}
    return found


def test_every_kind_has_a_case() -> None:
    assert {*kinds()} <= {case.kind for case in CASES.values()}, "add it to CASES"
    compared = {CASES[name].kind for name in COMPARED}
    assert {*kinds()} <= compared | ALIKE, "add a case of it to COMPARED"


@pytest.mark.parametrize("kind", kinds())
def test_the_example_in_the_docstring_is_read(kind: str) -> None:
    text = sys.modules[options_class(kind).__module__].__doc__ or ""
    (example,) = re.findall(r"^Example: ``train\.objective=(.+)``\.$", text, re.MULTILINE)
    parse(yaml.safe_load(example))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("seed", "rows", "groups", "tile"), [(1, 5, 3, 2), (4, 4, 1, 9)])
def test_value_and_gradient_are_the_formula_with_loops(
    name: str, seed: int, rows: int, groups: int, tile: int
) -> None:
    """Over steps, of which the later ones depend on what the earlier ones left."""
    options, loop = CASES[name].options(), CASES[name].loop()
    model, objective = built(options, tile)
    leaves = leaves_of(model, objective)
    for step in range(STEPS):
        batch = batch_of(options, seed + step, rows, groups)
        batch.step = step
        parts, seen = forward(model, objective, batch, step)
        expected = loop(seen)
        torch.testing.assert_close(parts["loss"], expected, atol=1e-11, rtol=1e-11)
        own = [leaf for leaf, _ in seen.found]
        gradients = torch.autograd.grad(
            expected, [*leaves.values(), *own], retain_graph=True, allow_unused=True
        )
        for leaf in leaves.values():
            leaf.grad = None
        parts["loss"].backward()
        found = [*(leaf.grad for leaf in leaves.values()), *(of() for _, of in seen.found)]
        for part, mine, theirs in zip([*leaves, *own], found, gradients, strict=True):
            mine, theirs = (torch.zeros(()) if x is None else x for x in (mine, theirs))
            if not mine.ndim or not theirs.ndim:
                mine, theirs = torch.broadcast_tensors(mine.double(), theirs.double())
            torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9, msg=f"{step}, {part}")
        for outside in objective.outside():
            outside.grad_square()
            outside.step(0.05)
        with torch.no_grad():
            for parameter in (*model.parameters(), *objective.parameters()):
                if parameter.requires_grad and parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        objective.stepped(model)


def pulled_back(name: str, autocast: bool, again: bool = False) -> list[Tensor]:
    """Loss and gradients of the features in fp32; ``again``: as for a second derivative."""
    options = CASES[name].options()
    batch = batch_of(options, 2, 6, 2)
    _, seen = forward(*built(options), batch, 0)
    _, objective = built(options, precision="fp32")
    objective.float()
    objective.begin(0, STEPS, 0.0)
    for part in objective.outside():
        part.begin(0)
    floats = {n: v.detach().float() for n, v in seen.features.items() if v.is_floating_point()}
    given = seen.features | floats
    leaves = [v.requires_grad_() for v in floats.values() if v.ndim > 1]
    batch.extras = {name: given[name] for name in batch.extras}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = objective(given, batch)["loss"]
    return [loss, *torch.autograd.grad(loss, leaves, create_graph=again, allow_unused=True)]


def has_written_gradients(loss: Tensor) -> bool:
    """Returns True if the graph of a loss holds a gradient that is not autograd's own."""
    nodes: dict[Any, None] = {loss.grad_fn: None}
    todo = [*nodes]
    while todo:
        after = [node for node, _ in todo.pop().next_functions if node and node not in nodes]
        nodes |= dict.fromkeys(after)
        todo += after
    return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if not case.autocast])
def test_arithmetic_is_fp32_under_autocast(name: str) -> None:
    for got, wanted in zip(pulled_back(name, True), pulled_back(name, False), strict=True):
        assert got is wanted is None or (got.dtype == torch.float32 and torch.equal(got, wanted))


@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_is_autograds_or_refused(name: str) -> None:
    loss, *_ = pulled_back(name, False)
    if not has_written_gradients(loss):
        pulled_back(name, False, again=True)
        return
    with pytest.raises(RuntimeError, match="create_graph"):
        pulled_back(name, False, again=True)


def wrong(kind: str, message: str, **options: Any) -> Any:
    return pytest.param({"kind": kind, **options}, message, id=f"{kind}: {message}"[:60])


V3 = {"version": "v3"}
CLOSEST = {"pairs": "n_closest", "num_closest": 1}
MOCO = {"kind": "moco", "queue_size": 4096}
WRONG_LISTS: list[tuple[list[dict[str, Any]], str]] = [
    ([], "the list of objectives is empty"),
    ([{"kind": "hcl"}, {"kind": "hcl", "wight": 2}], "objective.1.wight': did you mean .*weight'"),
    ([{"kind": "hcl"}, {"weight": 2.0}], "objective.1.kind' is required"),
    ([{"kind": "feature_dropout"}, {"kind": "info_nce"}], r"want \[1, 2\] views"),
    ([{"kind": "info_nce", "hard_captions": {"rules": [rule]}} for rule in ("colour", "size")],
     "want different hard_captions"),
    ([{"kind": "mlcd", "labels_per_sample": n} for n in (1, 2)], "read different classes"),
    ([MOCO, {"kind": "nt_xent"}, MOCO], "moco and moco each make features of their own"),
    ([{"kind": "nt_xent"}, {"kind": "feature_dropout"}], "put it first"),
]  # fmt: skip
WRONG = [
    wrong("hcl", "tau_plus", tau_plus=1.0),
    wrong("hcl", "beta", beta=-1.0),
    wrong("ifm", "direction=images is for betw", between="views", direction="images"),
    wrong("ifm", "epsilon", epsilon=-0.1),
    wrong("supcon", "num_views", num_views=3),
    wrong("sigmoid", "between", between="texts"),
    *(
        wrong(kind, "near_copies: role=positives is for", near_copies={"role": "positives"})
        for kind in ("ifm", "hcl", "nt_xent")
    ),
    *(
        wrong(kind, "near_copies between views compares pictures", near_copies=near, **views)
        for near in ({"of": ["captions"]}, {"margin": 0.1})
        for kind, views in (("nt_xent", {}), ("sigmoid", {"between": "views"}))
    ),
    wrong("info_nce", "near_copies.threshold", near_copies={"threshold": 0.0}),
    wrong("info_nce", "near_copies.margin", near_copies={"margin": -0.1}),
    wrong("info_nce", "leave one out", near_copies={"margin": 0.1, "threshold": 0.9}),
    wrong("info_nce", "near_copies: of=", near_copies={"of": ["pairs"]}),
    wrong("info_nce", "each of them once", near_copies={"of": ["captions", "captions"]}),
    wrong("info_nce", "near_copies.of", near_copies={"of": []}),
    wrong("info_nce", "near_copies.of", near_copies={"of": ["images"]}),
    *(
        wrong(kind, r"widths=\[8, 4\] do not ascend", widths=[8, 4])
        for kind in ("info_nce", "sigmoid")
    ),
    wrong("info_nce", "widths", widths=[0, 4]),
    wrong("info_nce", r"no rule 'color' for captions \(nearest: colour",
          hard_captions={"rules": ["color"]}),
    wrong("info_nce", "rules and field are given",
          hard_captions={"rules": ["colour"], "field": "wrong"}),
    wrong("info_nce", "each once", hard_captions={"rules": []}),
    wrong("info_nce", "per_caption", hard_captions={"per_caption": 0}),
    wrong("moco", "term=modified with epsilon=0 modifies nothing", term="modified"),
    wrong("moco", "predictor belongs to version=v3", predictor=[4, 4]),
    wrong("moco", "queue_size belongs to version=v2", **V3, queue_size=4),
    wrong("simlap", "attribute=breed has no class means: give class_means=", **CLOSEST,
          attribute="breed"),
    wrong("simlap", "class_means is given, and is read only with pairs=", class_means="x.npy"),
    wrong("simlap", "penalty_weight=0.1 is for the gates of a label filter", gates="open",
          penalty_weight=0.1),
    wrong("simlap", "gates=open has no label embeddings to say which classes", **CLOSEST,
          gates="open", closest_by="label_embeddings"),
    *(wrong("mlcd", "scale", scale=scale) for scale in (0.0, -1.0, 257.0, float("inf"))),
    wrong("mlcd", "sample_rate", sample_rate=1.5),
    wrong("mlcd", "margin_size", margin_size=3),
    wrong("mlcd", "threshold", threshold=91),
    wrong("mlc", "raise sample_rate", sample_rate=0),
    wrong("mldc", r"there is no objective 'mldc' \(nearest: mlc, mlcd"),
    wrong("single_label", "attribute=class have no centroids.*set centers=normal",
          attribute="class"),
    wrong("feature_dropout", "epsilon", epsilon=-0.1),
    wrong("feature_dropout", "adversary_lr", adversary_lr=0.0),
    wrong("feature_dropout", "width", width=0),
    wrong("feature_dropout", "residual_blocks", residual_blocks=-1),
    wrong("feature_dropout", "between", between="captions"),
    wrong("preserve", "temperature belongs to what=similarities", what="features",
          temperature=0.1),
    wrong("preserve", "'features' or 'similarities'", what="weights"),
    wrong("preserve", "teacher belongs to kind=distill", teacher="ViT-B-32@openai"),
    wrong("distill", "distance belongs to what=features", distance="squared"),
    wrong("distill", "'cosine' or 'squared'", what="features", distance="euclidean"),
    wrong("ifm", "weight=0.5 is for one of several objectives", weight=0.5),
    wrong("ifm", "weight", weight=-0.5),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "message"), [*WRONG, *WRONG_LISTS])
def test_wrong_options_are_one_line(tree: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        config.from_tree({"run_dir": "x", "train": {"objective": tree}})
    assert "\n" not in str(caught.value)


GROUPED = [n for n, case in CASES.items() if case.options().reads.groups and not case.coupled]


@pytest.mark.parametrize("name", GROUPED)
def test_samples_of_another_group_have_no_influence(name: str) -> None:
    """Those of the second group are others, and the gradients of the first stay as they are; so do
    those of a group of one, which has no negatives."""
    options = CASES[name].options()
    gradients = []
    for changed in (False, True):
        model, objective = built(options)
        for step in range(2):  # a queue has keys in the second
            batch = batch_of(options, 11 + step, 8, 1)
            batch.group_ids[:, 0] = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])
            batch.classes[:, 0] = torch.tensor([0, 0, 1, 1, 2, 0, 1, 2])
            batch.sample_id, batch.prefix_length = torch.arange(8), 1
            views = [view.requires_grad_() for view in batch.views]
            if changed:
                with torch.no_grad():
                    for view in views:
                        view[5:].neg_().add_(0.25)
            parts, seen = forward(model, objective, batch, step)
            objective.stepped(model)
        names = [n for n in seen.features if n.startswith("image_features")]
        found = torch.autograd.grad(parts["loss"], [seen.features[n] for n in names])
        gradients.append([gradient[:5] for gradient in found])
        assert all(bool((gradient[:5] != 0).any()) for gradient in found)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one, atol=1e-14, rtol=1e-12)


# --- ranks and engines -------------------------------------------------------------------------


def make_engine(name: str, engine: str, precision: str, **options: Any) -> Engine:
    """The objective beside a small CLIP under an engine, the same on every number of ranks."""
    torch.set_num_threads(1)
    case, context = CASES[name], here()
    own = case.options()
    model = load_towers(tiny.of_few_ids(tiny.RESNET if case.resnet else tiny.ONE_BLOCK), seed=1)
    lock = {"image_blocks": "all", "image_norm": True, "image_projection": True}
    lock |= {"text": own.reads.captions and not case.frozen_text}
    lock |= {"logit_scale": own.reads.logit_scale}
    prepare_model(
        model, lock=lock, lora=None, seed=0, precision=precision, grad_checkpointing=False
    )
    objective = own.build(
        ObjectiveInputs(
            model,
            context,
            SEED,
            precision,
            classes=Classes(),
            teacher=teacher_of,
        )  # fmt: skip
    )
    made = build_engine(
        engine,
        ModelWithObjective(model, objective, precision),
        lambda module: build_optimizer(module, weight_decay=0.1),
        context,
        blocks=model.blocks(),
        precision=precision,
        outside=objective.outside(),
        **options,
    )
    if made.scaler.is_enabled():  # a scale at which no step overflows
        made.scaler.load_state_dict(made.scaler.state_dict() | {"scale": 256.0})
    return made


def columns(name: str, step: int, dtype: torch.dtype) -> Batch:
    """This rank's columns of the global batch of a step."""
    batch = batch_of(CASES[name].options(), step, GLOBAL_BATCH, 2)
    batch.views = [view.to(dtype) for view in batch.views]
    batch.extras |= {n: v.to(dtype) for n, v in batch.extras.items() if v.is_floating_point()}
    local = GLOBAL_BATCH // collectives.world_size()
    return batch.slice(collectives.rank() * local, (collectives.rank() + 1) * local)


def train(engine: Engine, name: str, steps: range) -> list[dict[str, float]]:
    """Each step's parts over all ranks: the largest of those named so, the mean of others."""
    module: Any = engine.module
    dtype = torch.float64 if module.precision == "float64" else torch.float32
    found = []
    for step in steps:
        batch = columns(name, step, dtype)
        module.objective.begin(step, STEPS, step / 2)
        parts = engine.update(batch, lr=1e-2)
        module.objective.stepped(module.model)
        every = {n: collectives.gather(v.double().reshape(1)) for n, v in parts.items()}
        found.append({n: float(v.max() if "max_" in n else v.mean()) for n, v in every.items()})
    return found


def run(
    name: str, engine: str, precision: str, options: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """What the steps give, and the state after them."""
    made = make_engine(name, engine, precision, **options)
    return train(made, name, range(STEPS)), whole(made.state_dict())


def fits(case: Case, engine: str, options: dict[str, Any]) -> bool:
    """Whether the objective can be trained so, and its rules allow it."""
    how = {"name": engine} | {k: v for k, v in options.items() if k == "zero_stage"}
    training = {"objective": case.options(), "engine": how, "global_batch": GLOBAL_BATCH}
    cluster = {"num_clusters": 8, "labels_per_sample": 8}
    try:
        config.from_tree({"run_dir": "x", "train": training, "cluster": cluster})
    except ValueError:
        return False
    carried = case.zero or engine != "deepspeed"
    return carried and (case.cached or "micro_batch" not in options)


def cells(variants: list[tuple[int, str, dict[str, Any]]], quick: dict[str, int]) -> list[Any]:
    """Cases with their places in ``variants``; in the soak, every case under each that fits."""
    if not SOAK:
        return [(name, *variants[place]) for name, place in quick.items()]
    found = []
    for name, case in CASES.items():
        fitting = [n for n, variant in enumerate(variants) if fits(case, *variant[1:])]
        found += kept(
            [(name, *variants[n]) for n in fitting],
            *(at for at, n in enumerate(fitting) if quick.get(name) == n),
        )
    return found


RANKS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "ddp", {"clip_grad_norm": 0.02}),
    (3, "fsdp", {"clip_grad_norm": 0.02}),
    (4, "fsdp", {"shard_ranks": 2}),
    (2, "ddp", {"micro_batch": 4, "clip_grad_norm": 0.02}),
    (2, "fsdp", {"micro_batch": 4, "ema_decay": 0.9}),
]


COMPARED = dict.fromkeys(
    (
        "info_nce-edited_global", "info_nce-soft", "info_nce-margin", "supcon-near",
        "sigmoid-soft", "hcl", "moco-modified", "moco-v3-predictor", "simlap", "simlap-momentum",
        "feature_dropout", "sum", "preserve-exact", "sum-teachers", "toy_momentum",
        "toy_adversary",
    ),
    0,
) | {"info_nce": 2, "moco": 1, "mlcd": 1}  # fmt: skip
"""Cases of ``make test`` with their places in RANKS; they reach all collectives of objectives."""
ALIKE = {"ifm", "nt_xent", "single_label", "mlc", "preserve", "distill"}
"""Kinds whose collectives are those of ``hcl``, ``supcon``, ``mlcd`` or a sum in COMPARED. (Lazy
``mlc`` is in ``distributed/test_class_centers.py``.)"""


@pytest.mark.parametrize(
    ("name", "world_size", "engine", "options"), cells(RANKS, COMPARED), ids=str
)
def test_ranks_equal_one_process(
    ranks: Ranks, name: str, world_size: int, engine: str, options: dict[str, Any]
) -> None:
    """Losses and parts, weights and moments, and all that the objective owns, in float64."""
    alone = {n: v for n, v in options.items() if n in ("clip_grad_norm", "ema_decay")}
    figures, state = ranks(1, run, name, "ddp", "float64", alone)[0]
    assert len({parts["loss"] for parts in figures}) > STEPS // 2  # an empty queue gives 0
    if limit := options.get("clip_grad_norm"):
        assert max(parts["grad_norm"] for parts in figures) > limit, "nothing was clipped"
    for got_figures, got in ranks(world_size, run, name, engine, "float64", options):
        for parts, wanted in zip(got_figures, figures, strict=True):
            if "micro_batch" in options:  # the change is that of the part that it was cut into
                parts["view_change"] = wanted.get("view_change", 0.0)
            assert {n: parts[n] for n in wanted} == pytest.approx(wanted, rel=1e-9, abs=1e-9)
        assert_close(state, got, 1e-9)


ZERO: list[tuple[int, str, dict[str, Any]]] = [
    (2, "deepspeed", {"zero_stage": stage, "clip_grad_norm": 0.02}) for stage in (2, 1, 3)
]


@pytest.mark.parametrize(("name", "world_size", "engine", "options"), cells(ZERO, {}), ids=str)
@in_soak
def test_zero(
    ranks: Ranks, name: str, world_size: int, engine: str, options: dict[str, Any]
) -> None:
    """In fp32, which DeepSpeed trains in; its clipping counts parameters outside too.

    Compared with DDP on as many ranks: batch norms of few samples make 2e-3 of what one process
    rounds otherwise, and that DDP equals one process is shown in float64."""
    pytest.importorskip("deepspeed", reason="deepspeed cannot be installed here")
    figures, state = ranks(world_size, run, name, "ddp", "fp32", {"clip_grad_norm": 0.02})[0]
    got_figures, got = ranks(world_size, run, name, engine, "fp32", options)[0]
    for parts, wanted in zip(got_figures, figures, strict=True):
        for part, rel in (("loss", 1e-4), ("grad_norm", 1e-3)):
            assert parts[part] == pytest.approx(wanted[part], rel=rel), part
    assert state.keys() == got.keys()


def resumed(name: str, engine: str) -> bool:
    """Whether a training that goes on from the state after two steps gives the same bits."""
    made = make_engine(name, engine, "fp32")
    train(made, name, range(2))
    state = {n: tensor.detach().clone() for n, tensor in made.state_dict().items()}
    figures = train(made, name, range(2, STEPS))
    other = make_engine(name, engine, "fp32")
    other.load_state_dict(state)
    assert train(other, name, range(2, STEPS)) == figures
    one, two = whole(made.state_dict()), whole(other.state_dict())
    return all(np.array_equal(one[n], two[n]) for n in one) and one.keys() == two.keys()


RESUMED: list[tuple[int, str, dict[str, Any]]] = [(2, "ddp", {}), (2, "fsdp", {})]


# Those that own a state of their own, and one that owns none.
OWNERS = ("info_nce", "mlc", "moco", "simlap-momentum", "feature_dropout", "sum", "toy_momentum")


@pytest.mark.parametrize(
    ("name", "world_size", "engine", "options"),
    cells(RESUMED, dict.fromkeys(OWNERS, 0)),
    ids=str,
)
def test_a_state_goes_on_bit_for_bit(
    ranks: Ranks, name: str, world_size: int, engine: str, options: dict[str, Any]
) -> None:
    assert all(ranks(world_size, resumed, name, engine))
