"""Objectives: options that declare what one reads, and a module that computes the loss.

Data, model, engine, plan, method and export ask these two; nobody asks for an objective's type. A
new method is one module with two classes: ``Options(ObjectiveOptions)``, whose ``build`` makes the
``Objective``. ``kind`` names the module: one of this folder, or an entry point of the group
``mclclip.objectives`` in another package. Only that module is imported.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoints, entry_points
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from pydantic import PlainValidator, SerializeAsAny, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic_core import PydanticCustomError
from torch import Tensor, nn

from mclclip.ranks.collectives import UnwrappedParameters
from mclclip.ranks.process_group import Context
from mclclip.util.options import STRICT, nearest

ENTRY_POINTS = "mclclip.objectives"
# Kinds that share the module of another one.
_ELSEWHERE = {"mlc": "mlcd", "single_label": "mlcd"}
# Modules of this folder that hold parts of objectives.
_PARTS = ("base", "class_centers", "contrast", "gated_pairs", "row_losses")


@dataclass(frozen=True)
class Reads:
    """Data and parts of the model that an objective reads beside images.

    captions      features of a sample's text; the text tower is frozen where they are not read
    logit_scale   the model's logit scale; it is frozen where it is not read
    logit_bias    the model's logit bias, where it has one; it is frozen where it is not read
    groups        batches are drawn from samples with one pseudo label
    clusters      this many nearest clusters of each sample, found at the stage before (0: none)
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
    """

    captions: bool = False
    logit_scale: bool = False
    logit_bias: bool = False
    groups: bool = False
    clusters: int = 0
    threshold: float | None = None
    attribute: str | None = None
    digests: bool = False
    base: frozenset[Literal["images", "texts", "model"]] = frozenset()
    edits: Any = None

    @property
    def num_classes_per_sample(self) -> int:
        """Columns of a batch's ``classes``; 0: it has none."""
        return 1 if self.attribute is not None else self.clusters


class Classes(Protocol):
    """The clusters, or values of an attribute, that an objective takes for classes."""

    num_classes: int

    def centroids(self) -> npt.NDArray[np.float32]:
        """[K, D], memory-mapped; RuntimeError where the classes are no clusters."""


@dataclass(frozen=True)
class Setting:
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


@dataclass(frozen=True)
class Facts:
    """Facts of a run before it begins; None where one is not known yet.

    num_clusters  fewest clusters of any stage
    stored        clusters that are stored of every sample
    engine        name of the engine
    widths        of the features that were clustered, and of those that are trained
    global_batch  samples per step over all ranks
    zero_stage    how much deepspeed shares out, where that is the engine
    micro_batch   samples per rank and forward, where gradients are cached
    """

    num_clusters: int
    stored: int
    precision: str
    engine: str
    widths: tuple[int, int] | None = None
    global_batch: int | None = None
    zero_stage: int | None = None
    micro_batch: int | None = None


class BatchFields(Protocol):
    """The fields of a batch that objectives read (``data.batches.Batch``)."""

    views: list[Tensor]
    labels: Tensor
    sample_id: Tensor
    prefix_length: int
    classes: Tensor | None
    text: Tensor | None
    text_features: Tensor | None
    extras: dict[str, Tensor]


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

    ``forward`` takes features by name, ``labels`` [b, 1] (groups), ``sample_id`` [b], ``classes``
    [b, l], in main memory, where clusters or an attribute are read, and the batch's extras. It
    returns
    ``loss``, whose mean over the ranks is the loss of the global batch, and other 0-dimensional
    parts.
    Its parameters are trained by the engine's optimizer and its buffers are saved with them. A
    copy of the model that moves, such as a momentum encoder, is a submodule without gradients.

    counterparts  names of two of the features, whose rows i belong together and whose other rows
                  mostly do not; None: the loss compares no features with each other
    """

    counterparts: tuple[str, str] | None = None

    def outside(self) -> Sequence[UnwrappedParameters]:
        """Parameters that engines do not wrap; none by default."""
        return ()

    def chance(self, given: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor | None:
        """The loss of this batch for features that say nothing, whose mean over the ranks is that
        of the global batch: for InfoNCE the logarithm of the number of candidates.

        ``given`` and ``parts`` are what ``forward`` was given and returned at this step. A
        collective; None, the default, where no such loss is known.
        """
        return None

    def features(self, model: nn.Module, batch: BatchFields) -> dict[str, Tensor]:
        """Returns the model's features of this rank's batch, by name.

        ``image_features`` are those of the first view, ``image_features_1`` of the second, and so
        on. Features with a first axis belong to the samples, others to the whole batch. An
        objective may change what the model sees here, differentiably; of a sum one term may.
        """
        first, *others = batch.views
        features: dict[str, Tensor] = dict(
            model(image=first, text=batch.text, text_features=batch.text_features)
        )
        for number, view in enumerate(others, 1):
            features[f"image_features_{number}"] = model(image=view)["image_features"]
        return features

    def added_features(self, model: nn.Module, batch: BatchFields) -> dict[str, Tensor]:
        """Further features by names of their own, such as those of more texts or of a frozen copy
        of the model; none by default. Any number of a sum's terms may add some."""
        return {}


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class ObjectiveOptions:
    """Options of an objective, distinguished by ``kind``."""

    kind: str

    num_views: ClassVar[int] = 1
    """Augmented views of every image."""
    controls: ClassVar[tuple[str, ...]] = ()
    """Controls that make sense for it, of ``ungrouped`` and ``random_groups``."""
    starts_anew: ClassVar[bool] = False
    """Whether stages may start from another encoder than the one that was clustered."""
    engines: ClassVar[tuple[str, ...]] = ("ddp", "fsdp", "deepspeed")
    """Engines that can carry its parameters and buffers."""

    @property
    def reads(self) -> Reads:
        """Returns what it reads beside images."""
        return Reads()

    def check(self, facts: Facts) -> None:
        """Raises ValueError where the run cannot give what the objective needs."""
        if facts.engine not in self.engines:
            raise ValueError(
                f"engine.name={facts.engine} does not run objective.kind={self.kind}: set it to "
                f"{' or '.join(self.engines)}"
            )
        if self.reads.clusters > facts.stored:
            raise ValueError(
                f"train.objective.labels_per_sample={self.reads.clusters} is more than "
                f"cluster.labels_per_sample={facts.stored}, what is stored: raise the latter"
            )

    def build(self, inputs: Setting) -> Objective:
        """The objective. All ranks call it together."""
        raise NotImplementedError(f"{type(self).__name__} builds nothing")


# --- kinds -------------------------------------------------------------------------------------


def kinds() -> list[str]:
    """Every kind that can be named: those of this folder and those of other packages."""
    here = importlib.import_module(__package__)
    own = [module.name for module in pkgutil.iter_modules(here.__path__)]
    return sorted({*own, *_ELSEWHERE, *_others(tuple(sys.path)).names} - {*_PARTS})


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


def parse(value: Any) -> ObjectiveOptions:
    """A mapping with ``kind``, or options already, as checked options."""
    if isinstance(value, ObjectiveOptions):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("wanted options of an objective, such as {kind: info_nce}")
    if not isinstance(value.get("kind"), str):
        raise PydanticCustomError("union_tag_not_found", "option kind is required")
    return TypeAdapter(options_class(value["kind"])).validate_python(dict(value))


AnyObjective = SerializeAsAny[Annotated[ObjectiveOptions, PlainValidator(parse)]]
"""The type of an option that is an objective of any kind."""
