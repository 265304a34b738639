"""The shared part of contrastive losses: which queries meet which keys, under the group mask.

A loss has directions, and is their mean; each direction is a mean over queries. Between captions,
images look for their captions among those of the batch, and captions for their images (CLIP).
Between views, each view looks for its other view among both views of all images but itself: a
global batch of B images has 2B - 2 negatives (NT-Xent of SimCLR).

The group mask is Eq. 3 of MCL: sample q is a negative of sample p if both have the same pseudo
label, and q is not p itself. ``Contrast.pairs`` says which samples are negatives of which, and
``near_copies`` leaves more of them out (`near_copies`).

With ``widths`` a loss is the mean over widths: each sees the first numbers of the features alone,
at unit length, and the last width is the whole of them. What such a model says in 64 numbers is
then nearly as good as what it says in all, and ``mclclip export --width 64`` cuts it.

Sources: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision"
(CLIP, 2021), arXiv:2103.00020; Chen et al., "A Simple Framework for Contrastive Learning of Visual
Representations" (SimCLR, 2020), arXiv:2002.05709; Zhang et al., "Learning the Unlearned: Mitigating
Feature Suppression in Contrastive Learning" (MCL, 2024), arXiv:2402.11816. Widths: Kusupati et al.,
"Matryoshka Representation Learning" (NeurIPS 2022), arXiv:2205.13147, Eq. 1, as a mean instead of a
sum.

A loss multiplies cosines by the logit scale, which is one over the temperature. The temperature is
fixed, follows a schedule, is trained, or is the model's own. The schedule is that of Kukleva et
al., "Temperature Schedules for Self-Supervised Contrastive Methods on Long-Tail Data" (2023),
arXiv:2303.13664. Their code counts epochs from 1; here the first epoch is 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PlainValidator, SerializeAsAny, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from mclclip.objectives.base import (
    BatchFields,
    Features,
    Objective,
    ObjectiveInputs,
    ObjectiveOptions,
    Reads,
    Stepping,
)
from mclclip.objectives.near_copies import NearCopies, count_near, pairs_of
from mclclip.objectives.pairs import TILE, Pairs
from mclclip.objectives.row_losses import to_fp32
from mclclip.ranks import collectives
from mclclip.ranks.process_group import not_compiled
from mclclip.util.options import STRICT

Between = Literal["captions", "views"]
WhichDirections = Literal["both", "images", "texts"]
_FEATURES = {
    "captions": ("image_features", "text_features"),
    "views": ("image_features", "image_features_1"),
}
_QUERIES: dict[WhichDirections, tuple[int, ...]] = {"both": (0, 1), "images": (0,), "texts": (1,)}


# --- temperature --------------------------------------------------------------------------------


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class CosineSchedule:
    """The temperature falls from ``max`` to ``min`` and rises again, along a cosine."""

    schedule: Literal["cosine"] = "cosine"
    """Which schedule."""
    min: PositiveFloat = 0.1
    """Lowest temperature."""
    max: PositiveFloat = 1.0
    """Highest temperature, that of the start."""
    half_period: PositiveFloat = 200.0
    """Epochs from the highest to the lowest."""
    per: Literal["epoch", "step"] = "epoch"
    """Moves it once per epoch, or at every step."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}: exchange them")

    def at(self, epoch: float) -> float:
        """Returns the temperature after ``epoch`` epochs, such as 2.5."""
        passed = epoch if self.per == "step" else math.floor(epoch)
        share = (1.0 + math.cos(math.pi * passed / self.half_period)) / 2.0
        return self.min + (self.max - self.min) * share


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Learnable:
    """The temperature is trained: the logarithm of the logit scale is the objective's parameter."""

    learnable: Literal[True] = True
    """The temperature is trained."""
    start: PositiveFloat = 0.07
    """Temperature at the start."""
    max_scale: PositiveFloat = 100.0
    """Largest logit scale: the temperature never falls below one over it."""

    def __post_init__(self) -> None:
        if self.start * self.max_scale < 1.0:
            raise ValueError(
                f"start={self.start} is below 1 / max_scale={1.0 / self.max_scale:g}: raise one"
            )


_Fixed = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


def parse(value: Any) -> float | CosineSchedule | Learnable | None:
    """Returns the checked options of a temperature as a configuration writes it, such as 0.5 or
    ``{"learnable": True}``."""
    if value is None or isinstance(value, CosineSchedule | Learnable):
        return value
    if isinstance(value, Mapping):
        if "schedule" in value:
            return TypeAdapter(CosineSchedule).validate_python(value)
        if "learnable" in value:
            return TypeAdapter(Learnable).validate_python(value)
    if isinstance(value, bool | Mapping):
        raise ValueError(
            "wanted a number such as 0.5, {schedule: cosine, min: 0.1, max: 1.0, "
            "half_period: 200}, {learnable: true, start: 0.07}, or null"
        )
    return TypeAdapter(_Fixed).validate_python(value)


AnyTemperature = SerializeAsAny[
    Annotated[float | CosineSchedule | Learnable | None, PlainValidator(parse)]
]
"""The type of an option ``temperature``."""


class Temperature(Stepping):
    """Gives a loss its logit scale, which is one over the temperature; a part of an objective.

    ``options`` is a value of ``AnyTemperature``; None means the model's logit scale. ``dtype`` is
    the dtype of a trained temperature. Its parameter ``log_scale`` has shape [1], because FSDP and
    DeepSpeed refuse parameters without axes; the optimizer keeps it at most ``upper_bounds``.
    """

    def __init__(
        self,
        options: float | CosineSchedule | Learnable | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.options = options
        self.now = options.at(0.0) if isinstance(options, CosineSchedule) else options
        self.upper_bounds: dict[str, float] = {}
        if isinstance(options, Learnable):
            start = torch.full((1,), -math.log(options.start), dtype=dtype)
            self.log_scale = nn.Parameter(start)
            self.upper_bounds["log_scale"] = math.log(options.max_scale)

    def begin(self, step: int, total: int, epoch: float) -> None:
        """Sets a scheduled temperature to its value after ``epoch`` epochs."""
        if isinstance(self.options, CosineSchedule):
            self.now = self.options.at(epoch)

    # Not compiled, because a compiler would compile again for every new temperature.
    @not_compiled
    def scale(self, features: Tensor, logit_scale: Tensor | None) -> Tensor:
        """Returns the logit scale, a scalar with dtype and device of ``features``.

        ``logit_scale`` is the model's. Raises ValueError if the temperature is the model's and the
        model has none.
        """
        if isinstance(self.now, float):
            return features.new_full((), 1.0 / self.now)
        if isinstance(self.now, Learnable):
            return self.log_scale.exp().reshape(()).to(features.dtype)
        if logit_scale is None:
            raise ValueError(
                "temperature=null takes the logit scale of the model, which gives none: set "
                "temperature to a number, such as 0.5"
            )
        return logit_scale.to(features.dtype)


# --- the loss -----------------------------------------------------------------------------------


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class PairOptions(ObjectiveOptions):
    """Options of losses that compare a sample's own pair with the other pairs of the batch."""

    near_copies: NearCopies | None = None
    """Samples whose captions or pictures are so alike that they are no negatives, such as
    ``{threshold: 0.95}`` (null: all others are negatives, as in open_clip)."""
    widths: tuple[PositiveInt, ...] = ()
    """Trains the first so many numbers of the features too, such as ``[64, 128, 256]``, so that
    exports may be cut to them (Matryoshka); the whole width is always trained."""
    takes_positives: ClassVar[bool] = False  # whether near copies may be positives

    @property
    def between(self) -> Between:
        """``captions``: images against captions; ``views``: two views of every image."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it compares")

    @property
    def near(self) -> NearCopies | None:
        """``near_copies`` with what is compared filled in. Raises ValueError for what a loss of
        views cannot compare."""
        views = self.between == "views"
        return None if self.near_copies is None else self.near_copies.resolved(views=views)

    def __post_init__(self) -> None:
        if (near := self.near) and near.role == "positives" and not self.takes_positives:
            raise ValueError(
                "near_copies: role=positives is for kind=info_nce and kind=sigmoid, and kind="
                f"{self.kind} can mask near copies alone: set role=masked"
            )
        if any(upper <= lower for lower, upper in itertools.pairwise(self.widths)):
            raise ValueError(
                f"widths={list(self.widths)} do not ascend: wanted each larger than the one "
                "before, such as [64, 128, 256]"
            )

    @property
    def reads(self) -> Reads:
        """Reads groups; two views, or captions with the model's logit scale; what near copies are
        told by."""
        captions, near = self.between == "captions", self.near
        return Reads(
            num_views=1 if captions else 2,
            captions=captions,
            logit_scale=captions,
            groups=True,
            near_copies=frozenset([near] if near else []),
            encoders=near.encoders if near else frozenset(),
            widths=frozenset(self.widths),
        )

    def refuse_width(self, dim: int) -> None:
        """Raises ValueError if ``widths`` exceed ``dim``, that of the model's features."""
        if max(self.widths, default=0) > dim:
            raise ValueError(
                f"objective.widths={list(self.widths)} exceed the width of the model's features, "
                f"{dim}: leave out those above it"
            )


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class ContrastOptions(PairOptions):
    """Options of losses that tell a sample's own pair from the others by a softmax."""

    temperature: AnyTemperature = None
    """Divisor of cosines: a number; ``{schedule: cosine, min, max, half_period, per}``;
    ``{learnable: true, start, max_scale}``; or null: the model's logit scale between captions, 0.5
    between views."""

    @property
    def reads(self) -> Reads:
        """Reads what all of these losses read, but a logit scale only without a temperature."""
        reads = super().reads
        return replace(reads, logit_scale=reads.logit_scale and self.temperature is None)

    def new_temperature(self, inputs: ObjectiveInputs) -> Temperature:
        """Returns the temperature that the options describe."""
        between_views = self.temperature is None and self.between == "views"
        return Temperature(0.5 if between_views else self.temperature, inputs.dtype)

    def how(self, inputs: ObjectiveInputs) -> dict[str, Any]:
        """Returns the arguments of ``Contrast`` that these options give. Raises ValueError if
        ``widths`` exceed the model's."""
        self.refuse_width(inputs.model.feature_dim)
        temperature = self.new_temperature(inputs)
        return {"temperature": temperature, "near": self.near, "widths": self.widths}


def cut(features: Tensor, width: int) -> Tensor:
    """Returns the first ``width`` numbers of features [b, D], at unit length; of the whole width
    the same tensor. Features of zeros keep them."""
    if width == features.shape[1]:
        return features
    return functional.normalize(features[:, :width], dim=1)


def mean_of_widths(by_width: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Returns ``loss``, the mean of the losses of all widths, and ``loss_at_WIDTH`` of every width
    but the last, which is the whole."""
    *narrow, whole = by_width
    return {
        "loss": torch.stack([*by_width.values()]).mean() if narrow else by_width[whole],
        **{f"loss_at_{each}": by_width[each].detach() for each in narrow},
    }


@dataclass(frozen=True)
class Direction:
    """One direction of a loss: this rank's queries, each of which looks for its own key.

    queries  [b, D]: features times the logit scale, so that logits are queries @ keys.T
    keys     [n, D]: features of all ranks, unit length
    pairs    the own key and the negatives of each query
    scale    the logit scale, a scalar
    edits    [m, D]: further keys, which are negatives alone (`info_nce.InfoNCEWithEdits`)
    """

    queries: Tensor
    keys: Tensor
    pairs: Pairs
    scale: Tensor
    edits: Tensor | None = None


class Contrast(Objective):
    """A contrastive loss over all ranks; subclasses say what the loss of a query is.

    The similarity matrix is computed in tiles of at most ``tile`` rows and columns, so that memory
    is linear in the batch; the result does not depend on ``tile``. ``which`` leaves out one of the
    directions between captions. ``near``: options of near copies, with ``of`` filled in. ``widths``
    are trained beside the whole width.
    """

    def __init__(
        self,
        between: Between = "captions",
        temperature: Temperature | None = None,
        *,
        which: WhichDirections = "both",
        tile: int = TILE,
        near: NearCopies | None = None,
        widths: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.between, self.which, self.tile = between, which, tile
        self.near, self.widths = near, tuple(widths)
        self.names: tuple[str, ...] = _FEATURES[between]
        self.temperature = temperature or Temperature()

    def loss_per_query(self, direction: Direction) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of each query, [b], and which queries are counted, as bool [b] by the
        name of the count, such as ``rows_without_negatives``."""
        raise NotImplementedError(f"{type(self).__name__} has no loss of a query")

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Computes the loss of this rank's queries over the global batch.

        Args:
            features: `image_features` and `text_features` (between captions) or `image_features_1`
                (between views), [b, D], unit length, of this rank; row i of both is one pair. All
                ranks have the same b. Other ranks' features are gathered with their gradient.
                `logit_scale`: a scalar, already exponentiated, if the temperature is the model's.
            batch: `group_ids` [b, 1], the group of each sample at this step (`BatchFields`);
                `sample_id` [b]; repeated samples are never each other's negatives. What near
                copies are told by: the extras `caption_digest` and `picture_digest` [b], or
                `base_image_features` and `base_text_features` [b, D'].

        Returns:
            `loss`: mean over this rank's queries, the directions and the widths, a scalar. Its mean
            over the ranks is the global loss, and averaging gradients over ranks, as DDP does,
            gives the global gradient. `rows_without_negatives`: number of samples of the global
            batch that have no negative, and therefore loss 0 and gradient 0. It is of the first
            direction, as other counts are: images, first views, or texts if they alone are queries.
            `near_copies`, where they are no negatives: how many the samples of the global batch
            have, each its own. `loss_at_WIDTH` of every width that is trained beside the whole one.
            `logit_scale`, and `temperature`, one over it.

        The arithmetic is fp32 (float64 for float64 features), under autocast too.
        """
        sides = [to_fp32(features[name]) for name in self.names]
        scale = self.temperature.scale(sides[0], features.get("logit_scale"))
        pairs = self.pairs(batch)
        by_width: dict[int, Tensor] = {}
        for width in dict.fromkeys([*self.widths, sides[0].shape[1]]):
            directions = self.directions([cut(side, width) for side in sides], pairs, scale)
            results = [self.loss_per_query(each) for each in directions]
            by_width[width] = torch.stack([losses.mean() for losses, _ in results]).mean()
        _, counted = results[0]  # the counts of all widths are the same
        return {
            **mean_of_widths(by_width),
            **{name: collectives.all_reduce_sum(rows.sum()) for name, rows in counted.items()},
            **(count_near(pairs) if self.near else {}),
            "logit_scale": scale,
            "temperature": 1.0 / scale.detach(),
        }

    def chance(self, features: Features, batch: BatchFields, parts: Features) -> Tensor:
        """Returns the loss of features that are all alike, under the same mask and logit scale."""
        sides = [to_fp32(features[name]) for name in self.names]
        # Absent edited captions have zeros for features, and keep them.
        alike = [side.ne(0).any(dim=1, keepdim=True).to(side.dtype) for side in sides]
        directions = self.directions(alike, self.pairs(batch), parts["logit_scale"])
        return torch.stack([self.loss_per_query(each)[0].mean() for each in directions]).mean()

    def pairs(self, batch: BatchFields) -> Pairs:
        """Returns which samples of all ranks are negatives of which of this rank's samples."""
        return pairs_of(batch, self.tile, self.near)

    def directions(self, sides: Sequence[Tensor], pairs: Pairs, scale: Tensor) -> list[Direction]:
        """Returns the directions between ``sides``, this rank's features [b, D] of each name in
        ``names``; gathers those of other ranks."""
        everywhere = [collectives.gather_with_grad(side) for side in sides]
        if self.between == "captions":
            return [
                Direction(scale * sides[side], everywhere[1 - side], pairs, scale)
                for side in _QUERIES[self.which]
            ]
        # The own key is the next view; with one view it is the query itself.
        num, keys = len(sides), torch.cat(everywhere)
        return [
            Direction(scale * side, keys, pairs.among_views(num, (view + 1) % num), scale)
            for view, side in enumerate(sides)
        ]
