"""The settings of every objective that its contract tries, each with its loop."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from mclclip.objectives.base import Teacher, options_class, parse
from tests import objective_loops as loops
from tests import toys


@dataclass(frozen=True)
class Case:
    """Settings of an objective, and what makes its loop (the loop may remember earlier steps).

    ``resnet``: its model has batch norms; ``frozen_text``: the text tower is locked; ``autocast``:
    under autocast it is computed in bf16, or a network of its own is, where all other objectives
    are computed in fp32.
    """

    settings: Any
    loop: Callable[[], loops.Loop]
    resnet: bool = False
    frozen_text: bool = False
    autocast: bool = False

    @property
    def kind(self) -> str:
        return "sum" if isinstance(self.settings, list) else self.settings["kind"]

    def options(self) -> Any:
        return options_of(self.settings)


def options_of(settings: Any) -> Any:
    """The checked options; those of toys are found by their modules."""
    if isinstance(settings, list):
        return parse([options_of(each) for each in settings])
    if settings["kind"] in toys.KINDS:
        return importlib.import_module(toys.KINDS[settings["kind"]]).Options(**settings)
    return TypeAdapter(options_class(settings["kind"])).validate_python(settings)


WIDTH = 8  # of the models' features
TEACHERS: dict[str | None, int] = {"wide": 11, "other": 5}


class SmallTeacher(nn.Module):
    """A frozen encoder of smaller pictures and other pixels."""

    image_shape = (3, 16, 16)
    normalization = torch.full((3, 1, 1), 0.4), torch.full((3, 1, 1), 0.3)

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(4)
        self.register_buffer("weight", torch.randn(WIDTH, 3 * 16 * 16, generator=random))

    def encode_image(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.get_buffer("weight").T.to(images)


def teacher_of(encoder: str | None) -> Teacher:
    return Teacher(TEACHERS.get(encoder, WIDTH), math.exp(1.5), SmallTeacher)


LEARNABLE = {"learnable": True, "start": 0.3}
HEAD = {"labels_per_sample": 2, "scale": 16.0, "centers": "normal", "sample_rate": 0.6}
SMALL = {"label_dim": 3, "hidden_dim": 4, "temperature": 0.2}
MAKER = {"kind": "feature_dropout", "width": 2, "residual_blocks": 1, "temperature": 0.4}
BYTES, BYTES_TOO = {"threshold": 1.0}, {"threshold": 1.0, "role": "positives"}
# Of stage 0's embeddings, which are random here: cosines of eight numbers.
SOFT = {"threshold": 0.3, "of": ["captions", "pictures", "pairs"], "role": "positives"}
V3 = {"kind": "moco", "version": "v3", "momentum": 0.7}
COPY = "exact_base_"
CASES: dict[str, Case] = {
    "info_nce": Case({"kind": "info_nce"}, loops.contrastive("captions", loops.info_nce)),
    "info_nce-masked": Case(
        {"kind": "info_nce", "near_copies": BYTES},
        loops.contrastive("captions", loops.info_nce),
    ),
    "info_nce-positives": Case(
        {"kind": "info_nce", "near_copies": BYTES_TOO},
        loops.contrastive("captions", loops.info_nce_of_near),
    ),
    "info_nce-edited": Case(
        {"kind": "info_nce", "hard_captions": {}}, lambda: loops.edited("own", 1)
    ),
    "info_nce-edited_global": Case(
        {"kind": "info_nce", "hard_captions": {"per_caption": 2, "scope": "global"}},
        lambda: loops.edited("global", 2),
    ),
    "info_nce-margin": Case(
        {"kind": "info_nce", "near_copies": {"margin": 0.05}},
        loops.contrastive("captions", loops.info_nce),
    ),
    "info_nce-soft": Case(
        {"kind": "info_nce", "near_copies": SOFT},
        loops.contrastive("captions", loops.info_nce_of_near),
    ),
    "info_nce-widths": Case(
        {"kind": "info_nce", "widths": [2, 5], "hard_captions": {}},
        loops.at_widths((2, 5, 8), lambda: loops.edited("own", 1)),
    ),
    "nt_xent-near": Case(
        {"kind": "nt_xent", "near_copies": {"threshold": 0.2}, "widths": [3, 8]},
        loops.at_widths((3, 8), loops.contrastive("views", loops.info_nce, 0.5)),
    ),
    "supcon-near": Case(
        {"kind": "supcon", "attribute": "shape", "near_copies": {"threshold": 1.0}},
        loops.contrastive("views", loops.supervised, 0.1),
    ),
    "sigmoid-soft": Case(
        {"kind": "sigmoid", "near_copies": SOFT, "widths": [4]},
        loops.at_widths((4, 8), lambda: loops.sigmoid),
    ),
    "nt_xent": Case(
        {"kind": "nt_xent", "temperature": None}, loops.contrastive("views", loops.info_nce, 0.5)
    ),
    "ifm": Case({"kind": "ifm"}, loops.contrastive("captions", loops.modified(0.1, 0.5, 0.5))),
    "ifm-views": Case(
        {"kind": "ifm", "between": "views", "temperature": LEARNABLE, "epsilon": 0.7, "alpha": 0.5},
        loops.contrastive("views", loops.modified(0.7, 0.5, 0.25), "learnable"),
    ),
    "ifm-modified": Case(
        {"kind": "ifm", "term": "modified"},
        loops.contrastive("captions", loops.modified(0.1, 0.0, 1.0)),
    ),
    "hcl": Case(
        {"kind": "hcl", "beta": 2.0, "tau_plus": 0.6},
        loops.contrastive("captions", loops.hard(2.0, 0.6)),
    ),
    "hcl-masked": Case(
        {"kind": "hcl", "near_copies": BYTES},
        loops.contrastive("captions", loops.hard(1.0, 0.1)),
    ),
    "hcl-views": Case(
        {"kind": "hcl", "between": "views", "temperature": LEARNABLE},
        loops.contrastive("views", loops.hard(1.0, 0.1), "learnable"),
    ),
    "supcon": Case(
        {"kind": "supcon", "attribute": "shape", "temperature": LEARNABLE},
        loops.contrastive("views", loops.supervised, "learnable"),
    ),
    "supcon-one_view": Case(
        {"kind": "supcon", "num_views": 1, "temperature": 0.5},
        loops.contrastive("views", loops.supervised, 0.5, num_views=1),
    ),
    "sigmoid": Case({"kind": "sigmoid"}, lambda: loops.sigmoid),
    "sigmoid-masked": Case({"kind": "sigmoid", "near_copies": BYTES}, lambda: loops.sigmoid),
    "sigmoid-frozen_text": Case({"kind": "sigmoid"}, lambda: loops.sigmoid, frozen_text=True),
    "sigmoid-views": Case({"kind": "sigmoid", "between": "views"}, lambda: loops.sigmoid),
    "mlcd": Case({"kind": "mlcd", **HEAD}, lambda: loops.class_centers),
    "mlc": Case(
        {"kind": "mlc", "negatives": "partial_fc", "margin": "cos", "lazy": True, **HEAD},
        lambda: loops.class_centers,
    ),
    "mlcd-excluding": Case(
        {"kind": "mlcd", "negatives": "exclude_positives", **HEAD}, lambda: loops.class_centers
    ),
    "single_label": Case(
        {"kind": "single_label", **HEAD, "margin": "none", "sample_rate": 1.0},
        lambda: loops.class_centers,
    ),
    "moco": Case(
        {"kind": "moco", "queue_size": 14, "momentum": 0.7}, lambda: loops.QueuedKeys(14, 0.2)
    ),
    "moco-modified": Case(
        {"kind": "moco", "queue_size": 14, "momentum": 0.7, "epsilon": 0.1},
        lambda: loops.QueuedKeys(14, 0.2, 0.1, 0.5),
        resnet=True,
    ),
    "moco-v3-predictor": Case(
        V3 | {"predictor": [6, 8], "temperature": 0.4, "epsilon": 0.1, "term": "modified"},
        lambda: loops.batch_keys(0.4, 0.1, 0.0),
        autocast=True,
    ),
    "simlap": Case(
        {"kind": "simlap", **SMALL, "penalty": "bernoulli", "penalty_weight": 0.3},
        lambda: loops.simlap("arbitrary", 0.2, penalty=0.3),
        autocast=True,
    ),
    "simlap-momentum": Case(
        {"kind": "simlap", **SMALL, "momentum": 0.9, "groups": True, "temperature": LEARNABLE},
        lambda: loops.simlap("arbitrary", "learnable"),
        autocast=True,
    ),
    "simlap-code": Case(
        {"kind": "simlap", **SMALL, "norm": "none", "score": "code", "pairs": "distinct"},
        lambda: loops.simlap("distinct", 0.2, code=True),
        autocast=True,
    ),
    "simlap-open": Case(
        {"kind": "simlap", "gates": "open", "pairs": "identical", "temperature": None},
        lambda: loops.simlap("identical", None),
        autocast=True,
    ),
    "feature_dropout": Case(MAKER, loops.contrastive("views", loops.info_nce, 0.4), autocast=True),
    "sum": Case(
        [V3 | {"temperature": 0.4, "weight": 0.25}, {"kind": "nt_xent", "weight": 0.75}],
        loops.weighted(
            (0.25, lambda: loops.batch_keys(0.4)),
            (0.75, loops.contrastive("views", loops.info_nce, 0.5)),
        ),
    ),
    "preserve": Case({"kind": "preserve"}, loops.distilled("similarities")),
    "preserve-images": Case(
        {"kind": "preserve", "between": "images", "temperature": 0.3, "num_views": 2}
        | {"end_factor": 0.25},
        loops.distilled("similarities", "image_features", temperature=0.3, views=2, end=0.25),
    ),
    "preserve-features": Case(
        {"kind": "preserve", "what": "features", "end_factor": 3.0},
        loops.distilled("features", end=3.0),
    ),
    "preserve-exact": Case(
        [
            {"kind": "info_nce"},
            {"kind": "preserve", "exact": True, "weight": 0.5},
            {"kind": "preserve", "exact": True, "what": "features"},
        ],
        loops.weighted(
            (1.0, loops.contrastive("captions", loops.info_nce)),
            (0.5, loops.distilled("similarities", prefix=COPY, exact=COPY)),
            (1.0, loops.distilled("features", prefix=COPY, exact=COPY)),
        ),
    ),
    "distill": Case(
        {"kind": "distill", "teacher": "wide"}, loops.distilled("similarities", prefix="wide/")
    ),
    "distill-features": Case(
        {"kind": "distill", "teacher": "wide", "what": "features", "end_factor": 0.5},
        loops.distilled("features", prefix="wide/", end=0.5),
    ),
    "distill-squared": Case(
        {"kind": "distill", "teacher": "wide", "what": "features", "distance": "squared"}
        | {"between": "images", "num_views": 2},
        loops.distilled("features", "image_features", prefix="wide/", views=2, squared=True),
    ),
    "sum-teachers": Case(
        [
            {"kind": "info_nce", "weight": 0.5},
            {"kind": "distill", "teacher": "wide", "weight": 2.0},
            {"kind": "distill", "teacher": "other", "what": "features", "distance": "squared"},
            {"kind": "distill", "exact": True, "between": "images", "weight": 0.5},
        ],
        loops.weighted(
            (0.5, loops.contrastive("captions", loops.info_nce)),
            (2.0, loops.distilled("similarities", prefix="wide/")),
            (1.0, loops.distilled("features", prefix="other/", squared=True)),
            (0.5, loops.distilled("similarities", "image_features", exact=COPY)),
        ),
    ),
    "toy_momentum": Case({"kind": "toy_momentum"}, lambda: loops.toy_momentum, autocast=True),
    "toy_adversary": Case({"kind": "toy_adversary"}, loops.contrastive("captions", loops.info_nce)),
    "toy_prototypes": Case({"kind": "toy_prototypes"}, lambda: loops.toy_prototypes, autocast=True),
}
