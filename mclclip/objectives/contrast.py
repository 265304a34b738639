"""The shared part of contrastive losses: which queries meet which keys, under the group mask.

A loss is the mean over directions of the mean over rows. Between captions the directions are images
against the captions of the batch, and captions against its images (CLIP; Radford et al., 2021).
Between views they are each view against both views of all images, itself excluded: 2B - 2 negatives
of a global batch of B (NT-Xent, SimCLR; Chen et al., 2020). The mask is that of MCL's Eq. 3: a
column is a negative of a row where its group is the row's and its sample is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from mclclip.objectives.base import Cost, Objective, ObjectiveOptions, Reads, Setting, Sizes
from mclclip.objectives.row_losses import Pairs, log_sums
from mclclip.objectives.temperature import AnyTemperature, Temperature
from mclclip.options import STRICT
from mclclip.ranks import collectives
from mclclip.ranks.transfer import to_device

Between = Literal["captions", "views"]
Direction = Literal["both", "images", "texts"]
TILE = 2048
_NAMES = {
    "captions": ("image_features", "text_features"),
    "views": ("image_features", "image_features_1"),
}
_SIDES: dict[Direction, tuple[int, ...]] = {"both": (0, 1), "images": (0,), "texts": (1,)}


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class ContrastOptions(ObjectiveOptions):
    """Options of losses that tell a sample's own pair from the other pairs of the batch."""

    temperature: AnyTemperature = None
    """Divisor of cosines: a number; ``{schedule: cosine, min, max, half_period, per}``;
    ``{learnable: true, start, max_scale}``; or null: the model's logit scale between captions, 0.5
    between views."""

    between: ClassVar[Between]
    """``captions``: images against captions; ``views``: two views of every image."""
    controls: ClassVar[tuple[str, ...]] = ("ungrouped", "random_groups")

    @property
    def num_views(self) -> int:  # type: ignore[override]
        """Views of every image."""
        return 2 if self.between == "views" else 1

    @property
    def reads(self) -> Reads:
        """Groups; between captions these, and the logit scale where no temperature is given."""
        captions = self.between == "captions"
        own = captions and self.temperature is None
        return Reads(captions=captions, logit_scale=own, groups=True)

    def objective(self, temperature: Temperature) -> Contrast:
        """The loss, with its temperature."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def build(self, setting: Setting) -> Objective:
        """The loss; a learnable temperature is its only parameter."""
        return self.objective(self.new_temperature(setting.dtype))

    def new_temperature(self, dtype: torch.dtype) -> Temperature:
        """The temperature that the options give; a trained one is a parameter of ``dtype``."""
        given = self.temperature
        return Temperature(0.5 if given is None and self.between == "views" else given, dtype)

    def cost(self, sizes: Sizes) -> Cost:
        """Memory that the loss holds between the features and their gradients, all directions."""
        loss = self.objective(self.new_temperature(sizes.dtype))
        local, everywhere = sizes.local_batch, sizes.local_batch * sizes.num_ranks

        def empty(rows: int) -> list[Tensor]:
            shape = rows, sizes.dim
            return [torch.empty(shape, dtype=sizes.dtype, requires_grad=True) for _ in loss.names]

        def run() -> None:
            marks = [[torch.zeros(n, dtype=torch.int64)] * 3 for n in (local, everywhere)]
            contrasts = loss.contrasts(
                empty(local), empty(everywhere), marks[0], marks[1], torch.ones(())
            )
            losses = [loss.rows(contrast)[0].mean() for contrast in contrasts]
            torch.autograd.backward(torch.stack(losses).sum())

        # The parts of a gather are there for a moment beside what they are joined to.
        gathered = everywhere * sizes.dim * sizes.dtype.itemsize if sizes.num_ranks > 1 else 0
        return Cost(step=sizes.peak_bytes(run) + gathered)


@dataclass(frozen=True)
class Contrasted:
    """This rank's queries of one direction, and the keys of all ranks that they are held against.

    queries   [b, D], multiplied by ``scale`` [], the logit scale
    keys      [n, D], unit length, with gradient
    pairs     which keys are a query's own pair and its negatives
    classes   of the queries [b] and the keys [n], where the loss reads them
    """

    queries: Tensor
    keys: Tensor
    pairs: Pairs
    scale: Tensor
    tile: int
    classes: tuple[Tensor, Tensor] | None = None

    def positives(self) -> Tensor:
        """Logits of the own pairs, [b]."""
        return (self.queries * self.pairs.own(self.keys)).sum(dim=1)

    def log_sums(self, *factors: float) -> tuple[Tensor, ...]:
        """Log of the sum of exp(factor * logit) over each query's negatives, [b], by factor.

        -inf where it has none.
        """
        return tuple(log_sums(self.queries, self.keys, self.pairs, self.tile, factors).unbind())


class Contrast(Objective):
    """A contrastive loss over all ranks: ``rows`` says what is lost of a row.

    The similarity matrix is computed in tiles of at most ``tile`` rows and columns, so that memory
    is linear in the batch; the result does not depend on ``tile``. ``direction`` leaves out one of
    the directions between captions. Raises ValueError for a tile below 1.
    """

    reads_classes: ClassVar[bool] = False
    gathers_images = True

    def __init__(
        self,
        between: Between = "captions",
        temperature: Temperature | None = None,
        *,
        direction: Direction = "both",
        tile: int = TILE,
    ) -> None:
        super().__init__()
        if tile < 1:
            raise ValueError(f"tile is {tile}: wanted at least 1 row and column of the matrix")
        self.between, self.direction, self.tile = between, direction, tile
        self.names: tuple[str, ...] = _NAMES[between]
        self.temperature = temperature or Temperature()

    def rows(self, contrasted: Contrasted) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of every query [b], and rows to be counted, bool [b] by the part's name."""
        raise NotImplementedError(f"{type(self).__name__} has no loss of a row")

    def begin(self, step: int, total: int, epoch: float) -> None:
        """Moves the temperature."""
        self.temperature.begin(step, total, epoch)

    def forward(self, **features: Any) -> dict[str, Tensor]:
        """Computes this rank's rows of the loss over the global batch.

        Args:
            features: `image_features` and `text_features` (between captions) or `image_features_1`
                (between views), [b, D], unit length, of this rank; row i of both is one pair. All
                ranks have the same b. Other ranks' features are gathered with gradient.
                `logit_scale`: 0-dimensional, already exponentiated, where the temperature is the
                model's. `labels`: [b, 1] int64, group of each sample at the prefix where the mask
                compares. `sample_id`: [b] int64; equal ids are one sample, never each other's
                negatives. `classes`: [b, l] int64, of which the first counts, where the loss reads
                them. Others are ignored.

        Returns:
            `loss`: mean over this rank's rows and the directions, 0-dimensional. Its mean over the
            ranks is the global loss, and averaging gradients over ranks, as DDP does, gives the
            global gradient. `rows_without_negatives`: samples of the global batch, over all ranks,
            that have no negative and therefore loss 0 and gradient 0. `logit_scale`, and
            `temperature`, one over it.

        The arithmetic is fp32 (float64 for float64 features), under autocast too. Raises ValueError
        for shapes that do not fit, and for features that are not there.
        """
        _check(self.names, features, self.reads_classes)
        own = [_wide(features[name]) for name in self.names]
        scale = self.temperature.scale(own[0], features.get("logit_scale"))
        marks = [features["labels"][:, 0], features["sample_id"]]
        if self.reads_classes:
            marks.append(to_device(features["classes"][:, 0], own[0].device))
        by_direction = [
            self.rows(contrasted)
            for contrasted in self.contrasts(
                own,
                [collectives.gather_with_grad(side) for side in own],
                marks,
                [collectives.gather(mark) for mark in marks],
                scale,
            )
        ]
        counted = {n: collectives.all_reduce_sum(r.sum()) for n, r in by_direction[0][1].items()}
        means = [losses.mean() for losses, _ in by_direction]
        return {
            "loss": torch.stack(means).mean(),
            **counted,
            "logit_scale": scale,
            "temperature": 1.0 / scale.detach(),
        }

    def contrasts(
        self,
        own: Sequence[Tensor],
        every: Sequence[Tensor],
        marks: Sequence[Tensor],
        all_marks: Sequence[Tensor],
        scale: Tensor,
    ) -> list[Contrasted]:
        """The directions of the loss.

        ``own`` and ``every`` are features by name, of this rank [b, D] and of all [B, D]; ``marks``
        and ``all_marks`` their groups, sample ids and, where they are read, classes.
        """
        first = collectives.rank() * len(own[0])
        if self.between == "captions":
            sides = [(side, every[1 - side], first) for side in _SIDES[self.direction]]
        else:
            keys, num = torch.cat(list(every)), len(every)
            all_marks = [mark.repeat(num) for mark in all_marks]
            # The own pair is the next view, and with one view the query itself.
            starts = [first + (view + 1) % num * len(every[0]) for view in range(num)]
            sides = [(view, keys, start) for view, start in enumerate(starts)]
        classes = (marks[2], all_marks[2]) if self.reads_classes else None
        return [
            Contrasted(
                scale * own[side],
                keys,
                Pairs(marks[0], marks[1], all_marks[0], all_marks[1], first),
                scale,
                self.tile,
                classes,
            )
            for side, keys, first in sides
        ]


def excess(log_sums: Tensor, positives: Tensor) -> Tensor:
    """log(1 + exp(log_sums - positives)), exact for large differences too.

    It is the loss of rows with these log-sum-exps of negatives and logits of own pairs, [b]; 0,
    with gradient 0, for rows without negatives.
    """
    difference = log_sums - positives
    return torch.logaddexp(difference, torch.zeros_like(difference))


def _check(names: Sequence[str], features: Mapping[str, Any], reads_classes: bool) -> None:
    wanted = [*names, "labels", "sample_id", *(["classes"] if reads_classes else [])]
    if missing := [name for name in wanted if features.get(name) is None]:
        given = ", ".join(sorted(name for name, value in features.items() if value is not None))
        raise ValueError(f"the loss reads {', '.join(missing)}, and was given {given}")
    shapes = [f"{name} {tuple(features[name].shape)}" for name in names]
    first, labels, sample_id = features[names[0]], features["labels"], features["sample_id"]
    if first.ndim != 2 or any(features[name].shape != first.shape for name in names):
        both = "both " if len(names) > 1 else ""
        raise ValueError(f"{' and '.join(shapes)} must {both}be [b, D]")
    rows = len(first)
    if tuple(labels.shape) != (rows, 1) or tuple(sample_id.shape) != (rows,):
        raise ValueError(
            f"labels {tuple(labels.shape)} and sample_id {tuple(sample_id.shape)} must be "
            f"[{rows}, 1] and [{rows}]"
        )
    if reads_classes and (features["classes"].ndim != 2 or len(features["classes"]) != rows):
        raise ValueError(f"classes {tuple(features['classes'].shape)} must be [{rows}, l]")


def _wide(features: Tensor) -> Tensor:
    return features if features.dtype == torch.float64 else features.float()
