"""Objectives: a class of options that declares what a loss reads, and a module that computes it.

Data, model, engine, plan, method and export ask these two; nobody asks for an objective's type. A
new method is one module with two classes: ``Options(ObjectiveOptions)``, and the ``Objective`` that
its ``build`` returns. ``kind`` names the module: a file of this folder, or an entry point of the
group ``mclclip.objectives`` in another package. Only that module is imported.

A configuration names one objective, or a list of them whose weighted losses are added (``Sum``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from pydantic import PlainValidator, SerializeAsAny, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat
from pydantic_core import PydanticCustomError
from torch import Tensor, nn

from mclclip.ranks.collectives import UnwrappedParameters
from mclclip.ranks.process_group import Context
from mclclip.util import shipped
from mclclip.util.options import STRICT, nearest, with_prefix

ENTRY_POINTS = "mclclip.objectives"
# Kinds whose module has another name.
_MODULES = {"mlc": "mlcd", "preserve": "distill", "single_label": "mlcd"}
_ELSEWHERE = {"clip": "info_nce", "siglip": "sigmoid", "simclr": "nt_xent"}
"""Names that objectives have in other programs."""


EncoderOutput = Literal["image_features", "text_features", "model"]
"""What is read of a frozen encoder."""


def stored_name(encoder: str | None, what: str) -> str:
    """Returns the name of an encoder's stored embeddings in a batch, such as
    ``base_image_features`` for stage 0's."""
    return f"base_{what}" if encoder is None else f"{encoder}/{what}"


@dataclass(frozen=True)
class Reads:
    """The data and parts of model and training that an objective needs beside images.

    num_views        augmented views of every image
    captions         features of a sample's text; if no objective reads them, the text tower is
                     frozen
    logit_scale      the model's logit scale; it is frozen if it is not read
    logit_bias       the model's logit bias, if it has one; it is frozen if it is not read
    groups           batches are drawn from samples with the same pseudo label
    clusters         how many nearest clusters of each sample, of the stage before (0: none)
    centroids        the clusters' centroids, which must be as wide as the features
    drawn            share of the clusters that a step draws, which must be one at least (None: it
                     draws none)
    threshold        clusters of a smaller similarity are left out, but for the nearest (None: none)
    attribute        attribute of the samples that is their class, as data.sources names them, such
                     as ``shape`` (None: none); samples without it are left out
    encoders         what is read of frozen encoders, as pairs of an encoder (NAME@TAG or a folder;
                     None: that of stage 0) and what: stored embeddings, which come as the batch's
                     extras by the names of `stored_name`; or the ``model`` itself
    near_start       the objective holds the model near stage 0, from whose weights it starts
    near_copies      options of samples that are no negatives (`near_copies.NearCopies`); digests
                     tell them, or stage 0's embeddings
    widths           widths that are trained beside the whole width of the features
    edits            options of edited captions, which are wrong for their pictures; they come as
                     the batch's extras ``edited_text`` and ``has_edit``, or, if text embeddings are
                     stored, as ``edited_features``
    follows_weights  the model's weights after every step, for a momentum copy
    queue_size       how many features of earlier steps are kept, at least a batch's (0: none)
    changes_pixels   the pixels of the views are changed before the model sees them
    """

    num_views: int = 1
    captions: bool = False
    logit_scale: bool = False
    logit_bias: bool = False
    groups: bool = False
    clusters: int = 0
    centroids: bool = False
    drawn: float | None = None
    threshold: float | None = None
    attribute: str | None = None
    encoders: frozenset[tuple[str | None, EncoderOutput]] = frozenset()
    near_start: bool = False
    near_copies: frozenset[Any] = frozenset()
    widths: frozenset[int] = frozenset()
    edits: Any = None
    follows_weights: bool = False
    queue_size: int = 0
    changes_pixels: bool = False

    @property
    def stored(self) -> dict[str, tuple[str | None, EncoderOutput]]:
        """The stored embeddings by the names of the batch's extras, each with encoder and what."""
        pairs = sorted(self.encoders, key=lambda pair: (pair[0] or "", pair[1]))
        return {stored_name(*pair): pair for pair in pairs if pair[1] != "model"}

    @property
    def needs_stage_0(self) -> bool:
        """True if stage 0's encoder is read, or the training starts from its weights."""
        return self.near_start or bool(self.of_stage_0)

    @property
    def of_stage_0(self) -> list[EncoderOutput]:
        """Returns what is read of stage 0's encoder."""
        return [what for encoder, what in self.encoders if encoder is None]

    @property
    def of_encoders(self) -> list[EncoderOutput]:
        """Returns what is read of any encoder."""
        return [what for _, what in self.encoders]

    @property
    def teachers(self) -> list[str]:
        """The encoders that are read, but for that of stage 0, in order."""
        return sorted({encoder for encoder, _ in self.encoders if encoder is not None})

    @property
    def num_classes_per_sample(self) -> int:
        """Columns of a batch's ``classes``; 0 if it has none."""
        return 1 if self.attribute is not None else self.clusters

    @property
    def digests(self) -> frozenset[str]:
        """Names of a batch's extras that tell equal captions and pictures; none if not read."""
        return frozenset[str]().union(*(near.digests for near in self.near_copies))

    @classmethod
    def of_all(cls, every: Sequence[Reads]) -> Reads:
        """Returns what any of several objectives reads; they do not contradict each other."""
        union: dict[str, Any] = {}
        for item in fields(cls):
            values = [getattr(reads, item.name) for reads in every]
            if isinstance(values[0], frozenset):
                union[item.name] = frozenset[Any]().union(*values)
            elif isinstance(values[0], int):  # a number or a bool
                union[item.name] = max(values)
            else:
                union[item.name] = next((v for v in values if v is not None), None)
        return cls(**union)


class Classes(Protocol):
    """The classes of an objective: clusters, or the values of an attribute."""

    num_classes: int

    def centroids(self) -> npt.NDArray[np.float32]:
        """Returns the clusters' centroids, [K, D], memory-mapped. Raises RuntimeError if the
        classes are values of an attribute."""


@dataclass(frozen=True)
class Teacher:
    """A frozen encoder whose features an objective compares with those of the model.

    width        of its features
    logit_scale  None if it has none
    load         returns the encoder (``models.encoder.Encoder``), on the CPU
    """

    width: int
    logit_scale: float | None
    load: Callable[[], Any]


@dataclass(frozen=True)
class ObjectiveInputs:
    """The model, ranks and classes that an objective is built for.

    model        `models.model.Model`; objectives read its ``feature_dim`` and ``has_logit_bias``
    seed         differs from stage to stage
    betas, eps   ``train.betas`` and ``train.eps``, for objectives with an optimizer of their own
    classes      given if the objective reads clusters or an attribute
    teacher      returns an encoder of ``Reads.encoders``
    shapes_only  True while `--plan` counts memory: initial values are not needed, and no file must
                 be read for them
    """

    model: Any
    context: Context
    seed: int
    precision: str = "fp32"
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    classes: Classes | None = None
    teacher: Callable[[str | None], Teacher] | None = None
    shapes_only: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of trained weights."""
        return torch.float64 if self.precision == "float64" else torch.float32


class BatchFields(Protocol):
    """The fields of a batch that objectives read (``data.batches.Batch``); b samples of this rank.

    views          pictures [b, C, H, W], as many as ``Reads.num_views``
    group_ids      int64 [b, 1], the group of each sample at the prefix length
    sample_id      int64 [b]
    prefix_length  how many stages' cluster labels make a group at this step
    classes        int64 [b, l] in main memory, if clusters or an attribute are read
    text           tokens [b, T], or instead of them ``text_features`` [b, D], if captions are read
    extras         further tensors by name, such as ``caption_digest``
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
"""Features by name: of this rank's samples, such as ``image_features`` [b, D], or scalars, such as
``logit_scale``."""


class Stepping(nn.Module):
    """A module that is told of every step, and tells the modules of this kind in it."""

    def begin(self, step: int, total: int, epoch: float) -> None:
        """Is called before every step, with its number, the ``total`` of steps, and the epochs that
        have passed, such as 2.5."""
        for part in _steppings(self):
            part.begin(step, total, epoch)

    def stepped(self, model: nn.Module) -> None:
        """Is called after every step, with the model that the optimizer has moved."""
        for part in _steppings(self):
            part.stepped(model)


def _steppings(module: nn.Module) -> Iterator[Stepping]:
    for child in module.children():
        if isinstance(child, Stepping):
            yield child
        elif isinstance(child, nn.ModuleList):
            yield from _steppings(child)


class Objective(Stepping):
    """A loss of named features, with its own parameters and buffers.

    The engine's optimizer trains its parameters, and checkpoints hold parameters and buffers. A
    momentum copy of the model is a submodule whose parameters have no gradients.
    """

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Returns ``loss``, a scalar whose mean over the ranks is the loss of the global batch, and
        further scalars by name, which are logged."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Returns ``features``, which earlier objectives of a list have computed, and those that
        this one reads beside them; by default the model's (``encode``)."""
        return encode(model, batch, features)

    def outside(self) -> Sequence[UnwrappedParameters]:
        """Returns the parameters that engines must not wrap; none by default."""
        return ()

    def chance(
        self, features: Features, batch: BatchFields, parts: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Returns the loss of this batch if its features said nothing: for InfoNCE the logarithm of
        the number of candidates. Its mean over the ranks is that of the global batch.

        ``features`` and ``parts`` are the arguments and results of ``forward`` at this step. A
        collective. None, the default, if no such loss is known.
        """
        return None


def encode(
    model: nn.Module, batch: BatchFields, features: Features, num_views: int | None = None
) -> dict[str, Tensor]:
    """Runs the model for the features that ``features`` lacks; returns both together.

    ``image_features`` are of the first view, ``image_features_1`` of the second, and so on, up to
    ``num_views`` (None: all). The first run also gives ``text_features``, if captions are read, and
    the model's ``logit_scale`` and ``logit_bias``.
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
    """Options of an objective; ``kind`` says of which."""

    kind: str
    weight: NonNegativeFloat = 1.0
    """Factor of its loss in a list of objectives; with 0 it is only measured."""

    @property
    def reads(self) -> Reads:
        """The data and parts of the model that the objective needs beside images."""
        return Reads()

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """Returns the objective. All ranks call this together."""
        raise NotImplementedError(f"{type(self).__name__} builds nothing")


# --- sums --------------------------------------------------------------------------------------


class Sum(list[ObjectiveOptions]):
    """The options of several objectives whose weighted losses are added.

    A configuration writes a list. Its properties are those of a single objective's options.
    """

    @property
    def kind(self) -> str:
        """The kinds of all, such as ``info_nce + preserve``, for logs and messages."""
        return " + ".join(options.kind for options in self)

    @property
    def reads(self) -> Reads:
        """Returns what any of them reads."""
        return Reads.of_all([options.reads for options in self])

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """Builds each of them, and returns their sum."""
        names = [f"{number}_{options.kind}" for number, options in enumerate(self)]
        terms = [options.build(inputs) for options in self]
        return ObjectiveSum(terms, [options.weight for options in self], names)

    def refuse_contradictions(self) -> None:
        """Raises ValueError for objectives that cannot be trained together."""
        if not self:
            raise ValueError("the list of objectives is empty: give at least one")
        every = [options.reads for options in self]
        if len(views := {reads.num_views for reads in every}) > 1:
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
        encoding = [o.kind for o in self if o.reads.follows_weights or o.reads.changes_pixels]
        if len(encoding) > 1:
            raise ValueError(
                f"{' and '.join(encoding)} each make features of their own, by a momentum copy or "
                "of changed pixels: leave all but one of them out"
            )
        if any(reads.changes_pixels for reads in every[1:]):
            raise ValueError(
                f"{encoding[0]} changes the pixels that all objectives of a list see: put it first"
            )


class ObjectiveSum(Objective):
    """The weighted sum of several losses of the same features.

    The parts of each term are prefixed with its number and kind, such as ``1_preserve/loss``.
    """

    terms: Any  # a ModuleList of Objectives, which would be typed as modules

    def __init__(
        self, terms: Sequence[Objective], weights: Sequence[float], names: Sequence[str]
    ) -> None:
        super().__init__()
        self.terms, self.weights, self.names = nn.ModuleList(terms), list(weights), list(names)

    def outside(self) -> Sequence[UnwrappedParameters]:
        """Returns the parameters of all terms that engines must not wrap."""
        return [part for term in self.terms for part in term.outside()]

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Returns the features of all terms; each adds those that the terms before it have not."""
        for term in self.terms:
            features = term.features(model, batch, features)
        return dict(features)

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Returns the weighted sum as ``loss``, and the parts of every term."""
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
        """Returns the weighted sum; None if a term does not know its own."""
        total = torch.zeros((), dtype=torch.float64)
        for term, weight, name in zip(self.terms, self.weights, self.names, strict=True):
            of_term = term.chance(features, batch, with_prefix(parts, f"{name}/"))
            if of_term is None:
                return None
            total = total.to(of_term.device) + weight * of_term
        return total


# --- kinds -------------------------------------------------------------------------------------


def kinds() -> list[str]:
    """Returns every kind that a configuration may name, of this folder and of other packages."""
    others = shipped.installed(ENTRY_POINTS).names
    return sorted({*shipped.plugins("objectives"), *_MODULES, *others})


def options_class(kind: str) -> type[ObjectiveOptions]:
    """Returns the class of a kind's options, such as ``info_nce.Options``. Raises ValueError, with
    the nearest kinds, if there is none."""
    if kind not in kinds():
        near = _ELSEWHERE.get(kind) or ", ".join(nearest(kind, kinds()))
        raise ValueError(f"there is no objective {kind!r} (nearest: {near})")
    if points := shipped.installed(ENTRY_POINTS).select(name=kind):
        loaded = next(iter(points)).load()
        options = getattr(loaded, "Options", loaded)
    else:
        module = importlib.import_module(f"{__package__}.{_MODULES.get(kind, kind)}")
        options = module.Options
    if not (isinstance(options, type) and issubclass(options, ObjectiveOptions)):
        raise ValueError(f"objective {kind!r} has no class Options that is an ObjectiveOptions")
    return options


def parse(value: Any) -> Any:
    """Returns the checked options of a mapping such as ``{"kind": "hcl"}``, or a ``Sum`` of a list
    of mappings. Options, which are checked already, are returned as they are."""
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
"""The type of an option ``objective``: of any kind, or a list of objectives."""
