"""The shared part of contrastive losses: which queries meet which keys, under the group mask.

A loss is the mean over directions of the mean over rows. Between captions the directions are images
against the captions of the batch, and captions against its images (CLIP; Radford et al., 2021).
Between views they are each view against both views of all images, itself excluded: 2B - 2 negatives
of a global batch of B (NT-Xent, SimCLR; Chen et al., 2020). The mask is that of MCL's Eq. 3: a
column is a negative of a row where its group is the row's and its sample is not.

Between captions, rows whose captions are equal after open_clip's cleaning, or whose pictures are
the same bytes, may be left out of each other's negatives, or be each other's positives
(``equal_captions``). Samples bring two 64-bit digests for that, which travel over the ranks with
their labels.

A loss multiplies cosines by the logit scale, which is one over the temperature: fixed, on a
schedule, trained, or the model's own. References for the schedule: Kukleva et al., "Temperature
Schedules for Self-Supervised Contrastive Methods on Long-Tail Data" (2023), whose code counts
epochs from 1; here the first one is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PlainValidator, SerializeAsAny, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveFloat
from torch import Tensor, nn

from mclclip.objectives.base import (
    BatchFields,
    Features,
    Objective,
    ObjectiveInputs,
    ObjectiveOptions,
    Reads,
    Stepping,
)
from mclclip.objectives.row_losses import TILE, Pairs, count_columns, to_fp32
from mclclip.ranks import collectives
from mclclip.ranks.process_group import not_compiled, to_device
from mclclip.util.options import STRICT

Between = Literal["captions", "views"]
Direction = Literal["both", "images", "texts"]
EqualCaptions = Literal["negatives", "masked", "positives"]
DIGESTS = ("caption_digest", "picture_digest")
"""Names of the extras of a batch, int64 [b], that ``Reads.digests`` asks for."""
_NAMES = {
    "captions": ("image_features", "text_features"),
    "views": ("image_features", "image_features_1"),
}
_SIDES: dict[Direction, tuple[int, ...]] = {"both": (0, 1), "images": (0,), "texts": (1,)}


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
    """Whether it moves once per epoch or at every step."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}: exchange them")

    def at(self, epoch: float) -> float:
        """The temperature after ``epoch`` epochs."""
        passed = epoch if self.per == "step" else math.floor(epoch)
        share = (1.0 + math.cos(math.pi * passed / self.half_period)) / 2.0
        return self.min + (self.max - self.min) * share


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Learnable:
    """The logarithm of the logit scale is a parameter of the objective."""

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
    """A temperature as it is written in a configuration, or ready options, checked."""
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
"""The type of an option that is a temperature."""


class Temperature(Stepping):
    """One over the logit scale of a loss: a part of an objective.

    ``options`` are those of ``AnyTemperature``; None: the model's logit scale. ``dtype`` is that of
    the trained parameter. The parameter has shape [1], because FSDP and DeepSpeed refuse
    0-dimensional ones; the optimizer keeps it below ``max_scale`` (``upper_bounds``).
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
        """Moves a scheduled temperature to its value after ``epoch`` epochs."""
        if isinstance(self.options, CosineSchedule):
            self.now = self.options.at(epoch)

    # A compiler would compile again whenever the number moves.
    @not_compiled
    def scale(self, features: Tensor, logit_scale: Tensor | None) -> Tensor:
        """The logit scale, 0-dimensional, with the type and device of ``features``.

        ``logit_scale`` is the model's; ValueError where that is wanted and there is none.
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
class ContrastOptions(ObjectiveOptions):
    """Options of losses that tell a sample's own pair from the other pairs of the batch."""

    temperature: AnyTemperature = None
    """Divisor of cosines: a number; ``{schedule: cosine, min, max, half_period, per}``;
    ``{learnable: true, start, max_scale}``; or null: the model's logit scale between captions, 0.5
    between views."""

    between: ClassVar[Between]
    """``captions``: images against captions; ``views``: two views of every image."""
    equal_captions: ClassVar[EqualCaptions] = "negatives"
    """Role of rows with equal captions or pictures for each other; a field of losses that read
    captions."""

    def __post_init__(self) -> None:
        check_equal_captions(self.equal_captions, self.between)

    @property
    def reads(self) -> Reads:
        """Groups, and two views, or captions with the logit scale where no temperature is given and
        digests where equal captions are no negatives."""
        captions = self.between == "captions"
        return Reads(
            views=1 if captions else 2,
            captions=captions,
            logit_scale=captions and self.temperature is None,
            groups=True,
            digests=self.equal_captions != "negatives",
        )

    def new_temperature(self, inputs: ObjectiveInputs) -> Temperature:
        """Returns the temperature that the options give."""
        between_views = self.temperature is None and self.between == "views"
        return Temperature(0.5 if between_views else self.temperature, inputs.dtype)


def check_equal_captions(equal_captions: EqualCaptions, between: Between) -> None:
    """Raises ValueError for an option that says something of captions between views."""
    if between == "views" and equal_captions != "negatives":
        raise ValueError(
            f"equal_captions={equal_captions} is for between=captions, and views read none: leave "
            "it out"
        )


class Contrast(Objective):
    """A contrastive loss over all ranks: ``rows`` says what is lost of a row.

    The similarity matrix is computed in tiles of at most ``tile`` rows and columns, so that memory
    is linear in the batch; the result does not depend on ``tile``. ``direction`` leaves out one of
    the directions between captions. Where ``equal_captions`` is not ``negatives``, batches have
    ``DIGESTS``.
    """

    reads_classes: ClassVar[bool] = False

    def __init__(
        self,
        between: Between = "captions",
        temperature: Temperature | None = None,
        *,
        direction: Direction = "both",
        tile: int = TILE,
        equal_captions: EqualCaptions = "negatives",
    ) -> None:
        super().__init__()
        self.between, self.direction, self.tile = between, direction, tile
        self.equal_captions = equal_captions
        of_samples: tuple[str, ...] = ("classes",) if self.reads_classes else ()
        self.marks = DIGESTS if equal_captions != "negatives" else of_samples
        self.names: tuple[str, ...] = _NAMES[between]
        self.temperature = temperature or Temperature()

    def rows(
        self, queries: Tensor, keys: Tensor, pairs: Pairs, scale: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of every query [b], and rows to be counted, bool [b] by the part's name.

        ``queries`` [b, D] of this rank are multiplied by ``scale`` [], the logit scale; ``keys``
        [n, D] of all ranks have unit length; ``pairs`` are the own pairs and the negatives.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss of a row")

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Computes this rank's rows of the loss over the global batch.

        Args:
            features: `image_features` and `text_features` (between captions) or `image_features_1`
                (between views), [b, D], unit length, of this rank; row i of both is one pair. All
                ranks have the same b. Other ranks' features are gathered with gradient.
                `logit_scale`: 0-dimensional, already exponentiated, where the temperature is the
                model's.
            batch: `group_ids` [b, 1], group of each sample at the prefix where the mask compares;
                `sample_id` [b], of which equal ones are one sample, never each other's negatives;
                `classes` [b, l], of which the first counts, where the loss reads them; and the
                extras `caption_digest` and `picture_digest` [b] int64.

        Returns:
            `loss`: mean over this rank's rows and the directions, 0-dimensional. Its mean over the
            ranks is the global loss, and averaging gradients over ranks, as DDP does, gives the
            global gradient. `rows_without_negatives`: samples of the global batch, over all ranks,
            that have no negative and therefore loss 0 and gradient 0. `equal_captions`, where
            digests are read: pairs of rows of the global batch, within groups, with an equal
            caption or picture. `logit_scale`, and `temperature`, one over it.

        The arithmetic is fp32 (float64 for float64 features), under autocast too. Raises ValueError
        for shapes that do not fit, and for features that are not there.
        """
        _check(self.names, features, batch, self.marks)
        local = [to_fp32(features[name]) for name in self.names]
        scale = self.temperature.scale(local[0], features.get("logit_scale"))
        directions = self._directions(local, batch, scale)
        by_direction = [self.rows(*direction, scale) for direction in directions]
        counted = {n: collectives.all_reduce_sum(r.sum()) for n, r in by_direction[0][1].items()}
        means = [losses.mean() for losses, _ in by_direction]
        return {
            "loss": torch.stack(means).mean(),
            **counted,
            **(count_equal(directions[0][2]) if self.equal_captions != "negatives" else {}),
            "logit_scale": scale,
            "temperature": 1.0 / scale.detach(),
        }

    def chance(self, features: Features, batch: BatchFields, parts: Features) -> Tensor:
        """Returns the loss where all features are alike, under the same mask and logit scale."""
        first, scale = to_fp32(features[self.names[0]]), parts["logit_scale"]
        alike = [first.new_ones(len(first), 1) for _ in self.names]
        directions = self._directions(alike, batch, scale)
        means = [self.rows(*direction, scale)[0].mean() for direction in directions]
        return torch.stack(means).mean()

    def _directions(
        self, local: Sequence[Tensor], batch: BatchFields, scale: Tensor
    ) -> list[tuple[Tensor, Tensor, Pairs]]:
        """Returns the ``directions`` between the features ``local`` [b, D] by name."""
        marks = [batch.group_ids[:, 0], batch.sample_id]
        further = {} if batch.classes is None else {"classes": batch.classes[:, 0]}
        further |= batch.extras
        marks += [to_device(further[name], local[0].device) for name in self.marks]
        everywhere = [collectives.gather_with_grad(side) for side in local]
        all_marks = [collectives.gather(mark) for mark in marks]
        return self.directions(local, everywhere, marks, all_marks, scale)

    def directions(
        self,
        local: Sequence[Tensor],
        everywhere: Sequence[Tensor],
        marks: Sequence[Tensor],
        all_marks: Sequence[Tensor],
        scale: Tensor,
    ) -> list[tuple[Tensor, Tensor, Pairs]]:
        """The queries [b, D], which are features times ``scale``, the keys [n, D] that they are
        held against, and the pairs of both, for each direction of the loss.

        ``local`` and ``everywhere`` are features by name, of this rank [b, D] and of all [B, D];
        ``marks`` and ``all_marks`` their groups, sample ids and the further ``self.marks``.
        """
        first = collectives.rank() * len(local[0])
        if self.between == "captions":
            sides = [(side, everywhere[1 - side], first) for side in _SIDES[self.direction]]
        else:
            keys, num = torch.cat(list(everywhere)), len(everywhere)
            all_marks = [mark.repeat(num) for mark in all_marks]
            # The own pair is the next view, and with one view the query itself.
            starts = [first + (view + 1) % num * len(everywhere[0]) for view in range(num)]
            sides = [(view, keys, start) for view, start in enumerate(starts)]
        (groups, ids, *further), (all_groups, all_ids, *all_further) = marks, all_marks
        read: dict[str, Any] = {"digests": tuple(further), "all_digests": tuple(all_further)}
        if self.reads_classes:
            read = {"classes": further[0], "all_classes": all_further[0]}
        directions = []
        for side, keys, start in sides:
            pairs = Pairs(groups, ids, all_groups, all_ids, start, self.tile, **read)
            directions.append((scale * local[side], keys, pairs))
        return directions


def count_equal(pairs: Pairs) -> dict[str, Tensor]:
    """`equal_captions`: pairs of rows of the global batch, within groups, that have an equal
    caption or picture, or are one sample. A collective."""
    rows = count_columns(replace(pairs, columns="equal")).sum()
    return {"equal_captions": collectives.all_reduce_sum(rows) // 2}


def _check(
    names: Sequence[str], features: Features, batch: BatchFields, marks: Sequence[str]
) -> None:
    fields = {**batch.extras, **({} if batch.classes is None else {"classes": batch.classes})}
    fields |= features
    if missing := [name for name in (*names, *marks) if name not in fields]:
        raise ValueError(
            f"the loss reads {', '.join(missing)}, and was given {', '.join(sorted(fields))}"
        )
    shapes = [f"{name} {tuple(features[name].shape)}" for name in names]
    first, group_ids, sample_id = features[names[0]], batch.group_ids, batch.sample_id
    if first.ndim != 2 or any(features[name].shape != first.shape for name in names):
        both = "both " if len(names) > 1 else ""
        raise ValueError(f"{' and '.join(shapes)} must {both}be [b, D]")
    rows = len(first)
    if tuple(group_ids.shape) != (rows, 1) or tuple(sample_id.shape) != (rows,):
        raise ValueError(
            f"group_ids {tuple(group_ids.shape)} and sample_id {tuple(sample_id.shape)} must be "
            f"[{rows}, 1] and [{rows}]"
        )
    if "classes" in marks and (fields["classes"].ndim != 2 or len(fields["classes"]) != rows):
        raise ValueError(f"classes {tuple(fields['classes'].shape)} must be [{rows}, l]")
