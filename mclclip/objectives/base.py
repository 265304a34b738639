"""Objectives: options that declare what one reads, and a module that computes the loss.

Data, model, engine, plan, method and export ask these two; nobody asks for an objective's type. A
new method is one module with two classes: ``Options(ObjectiveOptions)``, whose ``build`` makes the
``Objective``. ``kind`` names the module: one of this folder, or an entry point of the group
``mclclip.objectives`` in another package. Only that module is imported.

A configuration names one objective, or a list of them whose losses are added up (``Sum``).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoints, entry_points
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from pydantic import PlainValidator, SerializeAsAny, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveFloat
from pydantic_core import PydanticCustomError
from torch import Tensor, nn

from mclclip.ranks.collectives import UnwrappedParameters
from mclclip.ranks.process_group import Context
from mclclip.util.options import STRICT, nearest, with_prefix

ENTRY_POINTS = "mclclip.objectives"
# Kinds that share the module of another one.
_ELSEWHERE = {"mlc": "mlcd", "single_label": "mlcd"}
# Modules of this folder that hold parts of objectives.
_PARTS = ("base", "class_centers", "contrast", "gated_pairs", "row_losses")


@dataclass(frozen=True)
class Reads:
    """Data and parts of the model that an objective reads beside images.

    views         augmented views of every image
    captions      features of a sample's text; the text tower is frozen where they are not read
    logit_scale   the model's logit scale; it is frozen where it is not read
    logit_bias    the model's logit bias, where it has one; it is frozen where it is not read
    groups        batches are drawn from samples with one pseudo label
    clusters      this many nearest clusters of each sample, found at the stage before (0: none)
    centroids     the clusters' centroids, beside which the features must be as wide
    drawn         this share of the clusters at every step, of which it must draw one (None: none)
    threshold     clusters less similar than this are left out, but for the nearest (None: none are)
    attribute     an attribute of the samples, as data.sources names them, is taken for their class
                  (None: none is); samples without it are left out
    digests       ``caption_digest`` and ``picture_digest`` of the drawn captions and the pictures
    base          what is read of stage 0, from whose weights the training then starts: stored
                  embeddings of ``images`` and of ``texts``, which come as the batch's extras
                  ``base_image_features`` and ``base_text_features``, or the ``model`` itself
    edits         captions that are wrong for their picture, as these options say; they come as the
                  batch's extras ``edited_text`` and ``has_edit``, or where texts are stored as
                  ``edited_features`` (``data.extras``)
    weights       the model's weights after every step, which a momentum copy follows
    queued        this many features of earlier steps, of at least one batch (0: none)
    pixels        the pixels of the views, which it changes before the model sees them
    """

    views: int = 1
    captions: bool = False
    logit_scale: bool = False
    logit_bias: bool = False
    groups: bool = False
    clusters: int = 0
    centroids: bool = False
    drawn: float | None = None
    threshold: float | None = None
    attribute: str | None = None
    digests: bool = False
    base: frozenset[Literal["images", "texts", "model"]] = frozenset()
    edits: Any = None
    weights: bool = False
    queued: int = 0
    pixels: bool = False

    @property
    def num_classes_per_sample(self) -> int:
        """Columns of a batch's ``classes``; 0: it has none."""
        return 1 if self.attribute is not None else self.clusters

    @classmethod
    def of_all(cls, every: Sequence[Reads]) -> Reads:
        """Returns what any of several objectives reads, of which none contradicts another."""

        def joined(name: str) -> Any:
            values = [getattr(reads, name) for reads in every]
            if isinstance(values[0], frozenset):
                return frozenset[Any]().union(*values)
            if isinstance(values[0], int):  # a number, or whether it is read
                return max(values)
            return next((value for value in values if value is not None), None)

        return cls(**{item.name: joined(item.name) for item in fields(cls)})


class Classes(Protocol):
    """The clusters, or values of an attribute, that an objective takes for classes."""

    num_classes: int

    def centroids(self) -> npt.NDArray[np.float32]:
        """[K, D], memory-mapped; RuntimeError where the classes are no clusters."""


@dataclass(frozen=True)
class ObjectiveInputs:
    """The model, ranks and classes that an objective is built for.

    ``model`` has the width of its features, ``feature_dim``, and says whether ``logit_bias`` is
    among them, ``has_logit_bias`` (``models.model.Model``). ``betas`` and ``eps`` are those of
    the training's AdamW; ``seed`` depends on the stage too. ``classes`` are there where the
    objective reads clusters or an attribute. ``shapes_only``: initial values are not needed, and
    must not be read, since the plan asks only for the memory of a step.
    """

    model: Any
    context: Context
    seed: int
    precision: str = "fp32"
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    classes: Classes | None = None
    shapes_only: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of trained weights."""
        return torch.float64 if self.precision == "float64" else torch.float32


class BatchFields(Protocol):
    """The fields of a batch that objectives read (``data.batches.Batch``).

    ``views`` are pictures [b, C, H, W]; ``group_ids`` [b, 1] int64 the groups; ``sample_id`` [b]
    int64; ``prefix_length`` the number of stages whose labels make the group ids; ``classes``
    [b, l] int64, in main memory, where clusters or an attribute are read; ``text`` tokens [b, T] or
    ``text_features`` [b, D], where captions are; ``extras`` further tensors by name.
    """

    views: list[Tensor]
    group_ids: Tensor
    sample_id: Tensor
    prefix_length: int
    classes: Tensor | None
    text: Tensor | None
    text_features: Tensor | None
    extras: dict[str, Tensor]


Features = Mapping[str, Tensor]
"""Features by name: [b, ...] of this rank's samples, or without axes of the whole batch."""


class Stepping(nn.Module):
    """A module that hears of every step, with all modules of this kind in it."""

    def begin(self, step: int, total: int, epoch: float) -> None:
        """Called before every step, of which there are ``total``, after ``epoch`` epochs."""
        for part in _steppings(self):
            part.begin(step, total, epoch)

    def stepped(self, model: nn.Module) -> None:
        """Called after every step, with the model as the optimizer has left it."""
        for part in _steppings(self):
            part.stepped(model)


def _steppings(module: nn.Module) -> Iterator[Stepping]:
    for child in module.children():
        if isinstance(child, Stepping):
            yield child
        elif isinstance(child, nn.ModuleList):
            yield from _steppings(child)


class Objective(Stepping):
    """A loss of named features, with the parameters and buffers it owns.

    Its parameters are trained by the engine's optimizer and its buffers are saved with them. A
    copy of the model that moves, such as a momentum encoder, is a submodule without gradients.
    """

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Returns ``loss``, whose mean over the ranks is the loss of the global batch, and other
        0-dimensional parts by name."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Returns ``features``, those of the objectives before it in a list, and what it reads
        beside them of this rank's batch: here the model's own (``encode``)."""
        return encode(model, batch, features)

    def outside(self) -> Sequence[UnwrappedParameters]:
        """Returns the parameters that engines do not wrap; none by default."""
        return ()

    def chance(
        self, features: Features, batch: BatchFields, parts: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Returns the loss of this batch for features that say nothing, whose mean over the ranks
        is that of the global batch: for InfoNCE the logarithm of the number of candidates.

        ``features`` are what ``forward`` was given at this step and ``parts`` what it returned. A
        collective; None, the default, where no such loss is known.
        """
        return None


def encode(
    model: nn.Module, batch: BatchFields, features: Features, num_views: int | None = None
) -> dict[str, Tensor]:
    """Returns ``features`` and those of the model that they lack, of the first ``num_views`` views
    (None: of all).

    ``image_features`` are those of the first view, ``image_features_1`` of the second, and so on.
    The first view brings ``text_features`` along where captions are read, and the model's
    ``logit_scale`` and ``logit_bias``.
    """
    encoded = dict(features)
    for number, view in enumerate(batch.views[:num_views]):
        if not number and "image_features" not in encoded:
            encoded |= model(image=view, text=batch.text, text_features=batch.text_features)
        elif number and (name := f"image_features_{number}") not in encoded:
            encoded[name] = model(image=view)["image_features"]
    return encoded


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class ObjectiveOptions:
    """Options of an objective, distinguished by ``kind``."""

    kind: str
    weight: PositiveFloat = 1.0
    """Factor of its loss, in a list of objectives."""

    @property
    def reads(self) -> Reads:
        """Returns what it reads beside images."""
        return Reads()

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """Returns the objective. All ranks call it together."""
        raise NotImplementedError(f"{type(self).__name__} builds nothing")


# --- sums --------------------------------------------------------------------------------------


class Sum(list[ObjectiveOptions]):
    """The options of several objectives that are trained together: their weighted losses are added.

    It has the properties of a single objective's options, and is written as a list of them.
    """

    @property
    def kind(self) -> str:
        """Names it in logs and messages, such as ``info_nce + preserve``."""
        return " + ".join(options.kind for options in self)

    @property
    def reads(self) -> Reads:
        """Returns what any of them reads."""
        return Reads.of_all([options.reads for options in self])

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """Returns the sum of what each of them builds."""
        names = [f"{number}_{options.kind}" for number, options in enumerate(self)]
        terms = [options.build(inputs) for options in self]
        return ObjectiveSum(terms, [options.weight for options in self], names)

    def refuse_contradictions(self) -> None:
        """Raises ValueError for objectives that cannot be trained together."""
        if not self:
            raise ValueError("the list of objectives is empty: give at least one")
        every = [options.reads for options in self]
        if len(views := {reads.views for reads in every}) > 1:
            raise ValueError(
                f"{self.kind} want {sorted(views)} views of an image: wanted one number"
            )
        edits = [reads.edits for reads in every if reads.edits]
        if any(each.drawn_by != edits[0].drawn_by for each in edits):
            raise ValueError(
                f"{self.kind} want different hard_captions: give them the same, but for their scope"
            )
        classes = {
            (r.clusters, r.threshold, r.attribute) for r in every if r.num_classes_per_sample
        }
        if len(classes) > 1:
            raise ValueError(
                f"{self.kind} read different classes: give them one labels_per_sample, or one "
                "attribute"
            )
        encoding = [o.kind for o in self if o.reads.weights or o.reads.pixels]
        if len(encoding) > 1:
            raise ValueError(
                f"{' and '.join(encoding)} each make features of their own, by a momentum copy or "
                "of changed pixels: leave all but one of them out"
            )
        if any(reads.pixels for reads in every[1:]):
            raise ValueError(
                f"{encoding[0]} changes the pixels that all objectives of a list see: put it first"
            )


class ObjectiveSum(Objective):
    """The weighted sum of several losses of the same features.

    The parts of every term carry its number and kind, such as ``1_info_nce/loss``.
    """

    terms: Any  # Objectives: a ModuleList is typed as one of modules

    def __init__(
        self, terms: Sequence[Objective], weights: Sequence[float], names: Sequence[str]
    ) -> None:
        super().__init__()
        self.terms, self.weights, self.names = nn.ModuleList(terms), list(weights), list(names)

    def outside(self) -> Sequence[UnwrappedParameters]:
        """Returns the parameters outside of all terms."""
        return [part for term in self.terms for part in term.outside()]

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Returns what the terms read; each adds what those before it have not made."""
        for term in self.terms:
            features = term.features(model, batch, features)
        return dict(features)

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Returns the weighted sum as ``loss``, and every term's parts by its name."""
        by_term = [term(features, batch) for term in self.terms]
        losses = [w * parts["loss"] for w, parts in zip(self.weights, by_term, strict=True)]
        parts_by_name = {
            f"{name}/{part}": value
            for name, parts in zip(self.names, by_term, strict=True)
            for part, value in parts.items()
        }
        return {"loss": torch.stack(losses).sum()} | parts_by_name

    def chance(
        self, features: Features, batch: BatchFields, parts: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Returns the weighted sum; None where it is not known of a term."""
        total = torch.zeros((), dtype=torch.float64)
        for term, weight, name in zip(self.terms, self.weights, self.names, strict=True):
            of_term = term.chance(features, batch, with_prefix(parts, f"{name}/"))
            if of_term is None:
                return None
            total = total.to(of_term.device) + weight * of_term
        return total


# --- kinds -------------------------------------------------------------------------------------


def kinds() -> list[str]:
    """Every kind that can be named: those of this folder and those of other packages."""
    here = importlib.import_module(__package__)
    shipped = [module.name for module in pkgutil.iter_modules(here.__path__)]
    return sorted({*shipped, *_ELSEWHERE, *_others(tuple(sys.path)).names} - {*_PARTS})


@functools.cache
def _others(path: tuple[str, ...]) -> EntryPoints:
    """The kinds of other packages on ``sys.path``, all of whose metadata this reads."""
    return entry_points(group=ENTRY_POINTS)


def options_class(kind: str) -> type[ObjectiveOptions]:
    """The options of a kind. ValueError, with the nearest kinds, where there is none."""
    if kind not in kinds():
        near = ", ".join(nearest(kind, kinds()))
        raise ValueError(f"there is no objective {kind!r} (nearest: {near})")
    if points := _others(tuple(sys.path)).select(name=kind):
        loaded = next(iter(points)).load()
        options = getattr(loaded, "Options", loaded)
    else:
        module = importlib.import_module(f"{__package__}.{_ELSEWHERE.get(kind, kind)}")
        options = module.Options
    if not (isinstance(options, type) and issubclass(options, ObjectiveOptions)):
        raise ValueError(f"objective {kind!r} has no class Options that is an ObjectiveOptions")
    return options


def parse(value: Any) -> Any:
    """Returns checked ObjectiveOptions of a mapping with ``kind``, or a ``Sum`` of a list of them;
    options that are checked already are returned as they are."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        every = Sum(TypeAdapter(list[_Term]).validate_python(list(value)))
        every.refuse_contradictions()
        return every
    options = _parse_term(value)
    if options.weight != 1.0:
        raise ValueError(
            f"weight={options.weight:g} is for one of several objectives: leave it out, or give a "
            "list"
        )
    return options


def _parse_term(value: Any) -> ObjectiveOptions:
    if isinstance(value, ObjectiveOptions):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("wanted options of an objective, such as {kind: info_nce}")
    if not isinstance(value.get("kind"), str):
        raise PydanticCustomError("union_tag_not_found", "option kind is required")
    return TypeAdapter(options_class(value["kind"])).validate_python(dict(value))


_Term = Annotated[ObjectiveOptions, PlainValidator(_parse_term)]
AnyObjective = SerializeAsAny[Annotated[ObjectiveOptions | Sum, PlainValidator(parse)]]
"""The type of an option that is an objective of any kind, or a list of them."""
