"""What every objective keeps, each by its settings and loop in ``objective_cases.CASES``.

Value and gradient are the paper's formula in float64; N ranks equal one on real processes under
every engine; a state goes on bit for bit.
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
from tests.contracts.objective_cases import CASES, TEACHERS, teacher_of
from tests.distributed.conftest import here
from tests.distributed.test_engines import assert_close, whole
from tests.engines import build_engine
from tests.matrix import in_soak, kept
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
    compared = {CASES[name].kind for name, *_ in RANKS}
    assert {*kinds()} <= compared | ALIKE, "add a case of it to RANKS"


@pytest.mark.parametrize("kind", kinds())
def test_the_example_in_the_docstring_is_read(kind: str) -> None:
    text = sys.modules[options_class(kind).__module__].__doc__ or ""
    (example,) = re.findall(r"^Example: ``train\.objective=(.+)``\.$", text, re.MULTILINE)
    parse(yaml.safe_load(example))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("seed", "rows", "groups", "tile", "steps"), [(1, 5, 3, 2, STEPS), (5, 4, 1, 9, 2)]
)
def test_value_and_gradient_are_the_formula_with_loops(
    name: str, seed: int, rows: int, groups: int, tile: int, steps: int
) -> None:
    """Over steps, of which the later ones depend on what the earlier ones left. Samples of another
    group have no influence in the loops, and so none here."""
    options, loop = CASES[name].options(), CASES[name].loop()
    model, objective = built(options, tile)
    leaves = leaves_of(model, objective)
    for step in range(steps):
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


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if not case.autocast])
def test_arithmetic_is_fp32_under_autocast(name: str) -> None:
    for got, wanted in zip(pulled_back(name, True), pulled_back(name, False), strict=True):
        assert got is wanted is None or (got.dtype == torch.float32 and torch.equal(got, wanted))


@pytest.mark.parametrize("name", ["info_nce", "simlap", "mlcd", "preserve"])
def test_a_second_derivative_of_written_gradients_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match="create_graph"):
        pulled_back(name, False, again=True)


def wrong(kind: str, message: str, **options: Any) -> Any:
    return pytest.param({"kind": kind, **options}, message, id=f"{kind}: {message}"[:60])


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
BOUNDS: dict[str, dict[str, Any]] = {  # a value beyond the bound of each option
    "hcl": {"tau_plus": 1.0, "beta": -1.0},
    "ifm": {"epsilon": -0.1, "weight": -0.5},
    "supcon": {"num_views": 3},
    "sigmoid": {"between": "texts"},
    "info_nce": {"widths": [0, 4]},
    "mlcd": {"sample_rate": 1.5, "margin_size": 3, "threshold": 91, "scale": 257.0},
    "feature_dropout": {"epsilon": -0.1, "adversary_lr": 0.0, "width": 0, "residual_blocks": -1,
                        "between": "captions"},
    "preserve": {"what": "weights"},
}  # fmt: skip
WRONG = [
    *(wrong(kind, name, **{name: value})
      for kind, values in BOUNDS.items() for name, value in values.items()),
    wrong("info_nce", "near_copies.threshold", near_copies={"threshold": 0.0}),
    wrong("info_nce", "near_copies.margin", near_copies={"margin": -0.1}),
    wrong("info_nce", "near_copies.of", near_copies={"of": ["images"]}),
    wrong("info_nce", "per_caption", hard_captions={"per_caption": 0}),
    wrong("mlcd", "scale", scale=0.0),
    wrong("mlcd", "scale", scale=float("inf")),
    # Rules between options of one objective.
    wrong("ifm", "direction=images is for betw", between="views", direction="images"),
    wrong("ifm", "near_copies: role=positives is for", near_copies={"role": "positives"}),
    wrong("nt_xent", "near_copies between views compares pictures",
          near_copies={"of": ["captions"]}),
    wrong("sigmoid", "near_copies between views compares pictures", between="views",
          near_copies={"margin": 0.1}),
    wrong("info_nce", "leave one out", near_copies={"margin": 0.1, "threshold": 0.9}),
    wrong("info_nce", "near_copies: of=", near_copies={"of": ["pairs"]}),
    wrong("info_nce", "each of them once", near_copies={"of": ["captions", "captions"]}),
    wrong("sigmoid", r"widths=\[8, 4\] do not ascend", widths=[8, 4]),
    wrong("info_nce", r"no rule 'color' for captions \(nearest: colour",
          hard_captions={"rules": ["color"]}),
    wrong("info_nce", "rules and field are given",
          hard_captions={"rules": ["colour"], "field": "wrong"}),
    wrong("info_nce", "each once", hard_captions={"rules": []}),
    wrong("moco", "term=modified with epsilon=0 modifies nothing", term="modified"),
    wrong("moco", "predictor belongs to version=v3", predictor=[4, 4]),
    wrong("moco", "queue_size belongs to version=v2", version="v3", queue_size=4),
    wrong("simlap", "attribute=breed has no class means: give class_means=", **CLOSEST,
          attribute="breed"),
    wrong("simlap", "class_means is given, and is read only with pairs=", class_means="x.npy"),
    wrong("simlap", "penalty_weight=0.1 is for the gates of a label filter", gates="open",
          penalty_weight=0.1),
    wrong("simlap", "gates=open has no label embeddings to say which classes", **CLOSEST,
          gates="open", closest_by="label_embeddings"),
    wrong("mlc", "raise sample_rate", sample_rate=0),
    wrong("mldc", r"there is no objective 'mldc' \(nearest: mlc, mlcd"),
    wrong("siglip", r"there is no objective 'siglip' \(nearest: sigmoid\)"),
    wrong("single_label", "attribute=class have no centroids.*set centers=normal",
          attribute="class"),
    wrong("preserve", "temperature belongs to what=similarities", what="features",
          temperature=0.1),
    wrong("preserve", "teacher belongs to kind=distill", teacher="ViT-B-32@openai"),
    wrong("distill", "distance belongs to what=features", distance="squared"),
    wrong("ifm", "weight=0.5 is for one of several objectives", weight=0.5),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "message"), [*WRONG, *WRONG_LISTS])
def test_wrong_options_are_one_line(tree: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        config.from_tree({"run_dir": "x", "train": {"objective": tree}})
    assert "\n" not in str(caught.value)


# --- ranks and engines -------------------------------------------------------------------------


def make_engine(
    name: str, engine: str, precision: str, start_decay: float = 0.0, **options: Any
) -> Engine:
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
        ObjectiveInputs(model, context, SEED, precision, classes=Classes(), teacher=teacher_of)
    )
    made = build_engine(
        engine,
        ModelWithObjective(model, objective, precision),
        lambda module: build_optimizer(module, weight_decay=0.1, start_decay=start_decay),
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


CLIPPED: dict[str, Any] = {"clip_grad_norm": 0.02}
IN_PARTS: dict[str, Any] = {"micro_batch": 4, "ema_decay": 0.9}
RANKS: list[tuple[str, int, str, dict[str, Any]]] = [
    # They reach all collectives of objectives.
    ("info_nce", 4, "fsdp", {"shard_ranks": 2}),
    ("info_nce-edited_global", 2, "ddp", CLIPPED),
    ("info_nce-soft", 2, "ddp", CLIPPED),
    ("supcon-near", 2, "ddp", CLIPPED),
    ("sigmoid-soft", 2, "ddp", CLIPPED),
    ("moco", 3, "fsdp", CLIPPED),
    ("moco-modified", 2, "ddp", CLIPPED),
    ("moco-v3-predictor", 2, "ddp", CLIPPED),
    ("simlap-momentum", 2, "ddp", CLIPPED),
    ("mlcd", 3, "fsdp", CLIPPED),
    ("feature_dropout", 2, "ddp", CLIPPED),
    ("sum-teachers", 2, "ddp", CLIPPED),
]
IN_THE_SOAK: list[tuple[str, int, str, dict[str, Any]]] = [
    *((name, 2, "fsdp", IN_PARTS) for name in ("hcl", "sigmoid-frozen_text", "moco", "mlc")),
    *((name, 2, "ddp", IN_PARTS | CLIPPED) for name in ("single_label", "feature_dropout", "sum")),
    *(
        (name, 3, "fsdp", CLIPPED)
        for name in ("moco-v3-predictor", "simlap-open", "preserve-exact")
    ),
    *((name, 4, "fsdp", {"shard_ranks": 2}) for name in ("ifm", "distill-squared", "nt_xent-near")),
    *((name, 2, "ddp", CLIPPED) for name in ("simlap-code", "toy_momentum", "toy_adversary")),
    ("toy_prototypes", 3, "fsdp", CLIPPED),
]
ALIKE = {"ifm", "hcl", "nt_xent", "single_label", "mlc", "preserve", "distill"}
"""Kinds whose collectives are those of ``info_nce``, ``supcon``, ``mlcd`` or a sum in RANKS. (Lazy
``mlc`` is in ``distributed/test_class_centers.py``.)"""


@pytest.mark.parametrize(
    ("name", "world_size", "engine", "options"),
    kept([*RANKS, *IN_THE_SOAK], *range(len(RANKS))),
    ids=str,
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


@in_soak
@pytest.mark.parametrize("name", ["mlcd", "moco", "feature_dropout"])
def test_zero(ranks: Ranks, name: str) -> None:
    """In fp32, which DeepSpeed trains in; its clipping counts parameters outside too."""
    pytest.importorskip("deepspeed", reason="deepspeed cannot be installed here")
    clipped = {"clip_grad_norm": 0.02}
    figures, state = ranks(2, run, name, "ddp", "fp32", clipped)[0]
    options = {"zero_stage": 2, **clipped}
    got_figures, got = ranks(2, run, name, "deepspeed", "fp32", options)[0]
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


@pytest.mark.parametrize("name", ["mlc", "simlap-momentum", "feature_dropout", "sum"])
def test_a_state_goes_on_bit_for_bit(ranks: Ranks, name: str) -> None:
    """Of objectives with a state of their own."""
    assert all(ranks(2, resumed, name, "ddp"))
