"""Distil: a term by which a model learns the features or similarities of a frozen encoder.

Let V and T be the unit features of the images and texts of the global batch, V' and T' those that
the teacher has for them, s the teacher's logit scale, and W a linear map that is trained.

    similarities       mean over rows p of KL( softmax_q(s V'_p . T'_q) || softmax_q(s V_p . T_q) ),
                       and the same over columns; of images alone V_p . V_q, where q is not p
    features, cosine   mean over p of (1 - cos(W V_p, V'_p)), and the same of the texts
    features, squared  mean over p of |W V_p - V'_p|^2, and the same of the texts

``similarities`` lets both towers rotate together, and the widths may differ. ``features`` holds
coordinates: it punishes a common rotation of all features, which changes no similarity. The map W
is one for images and texts, it has no bias, and starts with orthonormal rows or columns; where the
widths are equal there is none. It belongs to the objective, so an export has nothing of it. Pairs
count under MCL's group mask (its Eq. 3), as in ``info_nce``; the own pair always counts between
captions, and never between images.

Source: Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015),
arXiv:1503.02531, Eq. 1, with the captions of the batch for classes; for CLIP: Wu et al., "TinyCLIP"
(ICCV 2023), arXiv:2309.12314, and Yang et al., "CLIP-KD" (CVPR 2024), arXiv:2307.12732. The map:
Romero et al., "FitNets" (ICLR 2015), arXiv:1412.6550. Departures: the student's similarities are
divided by the teacher's temperature, not by its own; the map is linear. The mask: Zhang et al.,
"Learning the Unlearned: Mitigating Feature Suppression in Contrastive Learning" (MCL, 2024),
arXiv:2402.11816.

Inputs: ``image_features`` and ``text_features`` [b, D] of this rank, unit length; the teacher's of
the same samples, [b, D'], as ``Reads.stored`` names them; ``group_ids`` [b, 1] and ``sample_id``
[b].

Use ``distill`` in a list beside another objective, for a student that is smaller than its teacher
or of another architecture. The student is ``trained_model`` where stage 0's encoder is the teacher
and gives the groups, or it is trained as ``base``. Several teachers are several terms of the list.
A teacher's features come from disk, where ``embed`` stored them for the centre crop and every
caption, at no cost; or, with ``exact``, it sees the same crop, resized and normalised as it needs.
Captions are not changed in training, so their stored features are exact.

Use ``preserve`` if a fine-tuned model must keep what its base knows: there the teacher is stage 0's
encoder, from which the training starts (Li and Hoiem, "Learning without Forgetting", ECCV 2016,
arXiv:1606.09282). With ``exact`` a copy of the model sees the same crops and texts; then value and
gradient are exactly 0 as long as the weights are the base's and the model computes the same in
training as in evaluation (no dropout, no batch statistics).

Relations: ``train.start_decay`` holds the weights instead of the outputs, and WiSE-FT averages the
weights afterwards.

Example: ``train.objective=[{kind: info_nce}, {kind: distill, teacher: ViT-L-14@openai}]``.

Its slow reference is ``distilled`` in tests/objective_loops.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional

from mclclip.objectives.base import (
    BatchFields,
    Features,
    Objective,
    ObjectiveInputs,
    ObjectiveOptions,
    Reads,
    Teacher,
    encode,
    stored_name,
)
from mclclip.objectives.pairs import TILE, Pairs
from mclclip.objectives.row_losses import divergences, to_fp32
from mclclip.ranks import collectives
from mclclip.ranks.process_group import choose_no_autocast, not_compiled
from mclclip.util.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """Learns features or similarities of a frozen encoder; a term beside another objective."""

    kind: Literal["distill", "preserve"] = "distill"
    """Which objective; the teacher of ``preserve`` is stage 0, from which its training starts."""
    teacher: str | None = None
    """The encoder to learn from, NAME@TAG or a folder with an encoder (null: that of stage 0)."""
    what: Literal["features", "similarities"] = "similarities"
    """``similarities``: the softmax of every row and column, so that both towers may rotate
    together; ``features``: the features themselves."""
    distance: Literal["cosine", "squared"] = "cosine"
    """With ``features``: one minus the cosine, or the squared error, after a trained linear map
    where the widths differ."""
    between: Literal["captions", "images"] = "captions"
    """``captions``: images against captions (with ``features``: images and captions); ``images``:
    images alone."""
    exact: bool = False
    """True: the frozen teacher sees the same crop, which costs its memory and a forward pass.
    False: its stored embeddings are taken, which are of the centre crop."""
    temperature: PositiveFloat | None = None
    """With ``similarities``: divisor of the cosines of both (null: the teacher's temperature)."""
    end_factor: NonNegativeFloat = 1.0
    """Factor of the loss at the last step; it moves along a straight line from 1 at the first."""
    num_views: Literal[1, 2] = 1
    """Views of every image that are compared: as many as the other objectives of the list read."""

    def __post_init__(self) -> None:
        if self.what == "features" and self.temperature is not None:
            raise ValueError("temperature belongs to what=similarities: leave it out")
        if self.what == "similarities" and self.distance != "cosine":
            raise ValueError("distance belongs to what=features: leave it out")
        if self.kind == "preserve" and self.teacher is not None:
            raise ValueError("teacher belongs to kind=distill: leave it out")

    @property
    def copies(self) -> bool:
        """True if the teacher is a copy of the model as its training starts."""
        return self.kind == "preserve" and self.exact

    @property
    def reads(self) -> Reads:
        """Reads captions, groups (for ``similarities``), and the teacher's embeddings or model."""
        captions = self.between == "captions"
        of_images: Any = "model" if self.exact else "image_features"
        whats: list[Any] = [of_images, *(["text_features"] if captions else [])]
        return Reads(
            num_views=self.num_views,
            captions=captions,
            groups=self.what == "similarities",
            encoders=frozenset((self.teacher, what) for what in whats if not self.copies),
            near_start=self.kind == "preserve",
        )

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """Returns the loss.

        Raises ValueError if ``temperature`` is null and the teacher has no logit scale, and if the
        teacher sees crops with other channels than it takes.
        """
        teacher = _copy_of(inputs) if self.kind == "preserve" else _teacher_of(self, inputs)
        scale = 1.0
        if self.temperature is not None:
            scale = 1.0 / self.temperature
        elif self.what == "similarities":
            if teacher.logit_scale is None:
                raise ValueError(
                    f"objective.kind={self.kind}: temperature=null takes the logit scale of the "
                    "teacher, which has none: set temperature to a number, such as 0.1"
                )
            scale = teacher.logit_scale
        projection = None
        if self.what == "features" and inputs.model.feature_dim != teacher.width:
            projection = _projection(inputs, inputs.model.feature_dim, teacher.width)
        return Distill(self, scale, teacher.load() if self.exact else None, projection)


def _teacher_of(options: Options, inputs: ObjectiveInputs) -> Teacher:
    """Returns the teacher; ``load`` gives it with the model's pixels as its input."""
    assert inputs.teacher is not None, "an objective that reads encoders is given them"
    teacher = inputs.teacher(options.teacher)

    def load() -> Any:
        encoder, model = teacher.load(), inputs.model
        if encoder.image_shape[0] != model.image_shape[0]:
            raise ValueError(
                f"objective.exact: the teacher takes pictures of {encoder.image_shape[0]} channels "
                f"and the model of {model.image_shape[0]}: leave exact out, which reads stored "
                "embeddings"
            )
        pixels = [*model.normalization, *encoder.normalization]
        encoder.to(inputs.dtype)
        if not inputs.shapes_only:
            encoder.to(inputs.context.device)
            pixels = [each.to(inputs.context.device) for each in pixels]
        return partial(_encode_view, encoder, *pixels)

    return Teacher(teacher.width, teacher.logit_scale, load)


def _copy_of(inputs: ObjectiveInputs) -> Teacher:
    """Returns the model as a teacher; ``load`` copies it."""
    model = inputs.model
    scale = model().get("logit_scale")
    if scale is not None:
        scale = 1.0 if inputs.shapes_only else float(scale.detach())

    def load() -> Any:
        copied = copy.deepcopy(model).requires_grad_(False).eval()
        for of_model, of_copy in zip(model.modules(), copied.modules(), strict=True):
            # In evaluation mode torch takes another kernel, which rounds otherwise.
            if isinstance(of_copy, nn.MultiheadAttention) and not of_copy.dropout:
                of_copy.training = of_model.training
        return copied

    return Teacher(model.feature_dim, scale, load)


def _projection(inputs: ObjectiveInputs, width: int, of_teacher: int) -> nn.Linear:
    """Returns the linear map from the model's features to the teacher's."""
    projection = nn.Linear(width, of_teacher, bias=False, dtype=inputs.dtype)
    if not inputs.shapes_only:
        random = torch.Generator().manual_seed(inputs.seed)
        weight = torch.empty(of_teacher, width, dtype=inputs.dtype)
        with torch.no_grad():
            projection.weight.copy_(nn.init.orthogonal_(weight, generator=random))
    return projection


def _encode_view(
    encoder: Any, mean: Tensor, deviation: Tensor, of_encoder: Tensor, deviation_of_encoder: Tensor,
    view: Tensor,
) -> Tensor:  # fmt: skip
    """Returns an encoder's features [b, D], of unit length, of a view [b, C, H, W] that has the
    size of another model's pictures and is normalized by their ``mean`` and ``deviation``;
    ``of_encoder`` and ``deviation_of_encoder`` are those of the encoder's pixels."""
    pixels, size = view * deviation + mean, tuple(encoder.image_shape[1:])
    if pixels.shape[2:] != size:
        how: dict[str, Any] = {"mode": "bicubic", "antialias": True}
        pixels = functional.interpolate(pixels.float(), size, **how).clamp(0.0, 1.0)
    pixels = ((pixels - of_encoder) / deviation_of_encoder).to(view.dtype)
    return functional.normalize(encoder.encode_image(pixels), dim=1)


class Distill(Objective):
    """The distance between the model's and the teacher's features, over all ranks.

    scale       the logit scale of both
    teacher     returns features of a view, or, as a copy of the model, of a batch; None: all of
                the teacher's features are among the batch's extras
    projection  the linear map from the model's features to the teacher's, or None

    ``names`` has for each view the features that are compared, and ``of_teacher`` the names of the
    teacher's. The teacher is not a submodule: every start loads it again, so it is neither saved
    nor averaged over ranks.
    """

    def __init__(
        self, options: Options, scale: float, teacher: Any, projection: nn.Linear | None
    ) -> None:
        super().__init__()
        self.what, self.captions = options.what, options.between == "captions"
        self.distance, self.copies = options.distance, options.copies
        self.scale, self.tile = scale, TILE
        images = ("image_features", "image_features_1")[: options.num_views]
        self.names = [(name, "text_features") if self.captions else (name,) for name in images]
        # One embedding is stored for all views.
        stored = {name: name.removesuffix("_1") for names in self.names for name in names}
        self.of_teacher = {name: stored_name(options.teacher, of) for name, of in stored.items()}
        if options.exact:
            seen = [*stored] if self.copies else images
            self.of_teacher |= {n: f"exact_{stored_name(options.teacher, n)}" for n in seen}
        self.factor, self.end_factor = 1.0, options.end_factor
        self.projection = projection
        self._teacher: tuple[Any] = (teacher,)  # in a tuple, so that it is not a submodule

    def begin(self, step: int, total: int, epoch: float) -> None:
        """Sets the factor of ``step``, one of ``total`` steps."""
        self.factor = 1.0 + (self.end_factor - 1.0) * step / max(total - 1, 1)

    @not_compiled
    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Adds the teacher's features of the same crops, such as ``exact_base_image_features``, and
        of the same texts if it is a copy; none if they come from disk. The batch keeps them among
        its extras, so that another term, or a second pass of gradient caching, does not compute
        them again. A frozen teacher draws no random numbers, so these are the model's own."""
        features, (teacher,) = super().features(model, batch, features), self._teacher
        if teacher is None:
            return features
        with torch.no_grad():
            if self.copies and not {*self.of_teacher.values()} <= batch.extras.keys():
                of_copy = encode(teacher, batch, {})
                batch.extras |= {new: of_copy[n] for n, new in self.of_teacher.items()}
            for names, view in zip(self.names, batch.views, strict=False):
                if (new := self.of_teacher[names[0]]) not in batch.extras:
                    batch.extras[new] = teacher(view)
        extras = batch.extras
        return features | {n: extras[n] for n in self.of_teacher.values() if n in extras}

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Computes the distance of this rank's rows over the global batch.

        Args:
            features: those in ``names``, [b, D], unit length, of this rank, and those that
                ``features`` added of the teacher, [b, D'].
            batch: `group_ids` [b, 1], the group of each sample; `sample_id` [b]; the teacher's
                stored embeddings as extras, of images for all views.

        Returns:
            `loss`: mean over the views and this rank's rows, times the factor of the step; its mean
            over the ranks is the global loss. `teacher_cosine`: mean cosine of this rank's images
            with the teacher's, of the first view, if they have one width.

        The arithmetic is fp32 (float64 for float64 features), under autocast too.
        """
        sides = self._sides({**batch.extras, **features})
        marks = batch.group_ids[:, 0], batch.sample_id
        distances = [self._distance(local, teachers, *marks) for local, teachers in sides]
        parts = {"loss": self._scheduled(torch.stack(distances).mean())}
        (images, *_), (of_teacher, *_) = sides[0]
        if images.shape == of_teacher.shape:
            cosines = functional.cosine_similarity(images.detach(), of_teacher, dim=1)
            parts["teacher_cosine"] = cosines.mean()
        return parts

    def chance(self, features: Features, batch: BatchFields, parts: Features) -> Tensor:
        """Returns the smallest distance of features that are all alike: with ``features`` these are
        the teacher's mean."""
        marks, distances = (batch.group_ids[:, 0], batch.sample_id), []
        for _, of_teacher in self._sides({**batch.extras, **features}):
            if self.what == "similarities":
                alike = [side.new_ones(len(side), 1) for side in of_teacher]
                distances.append(self._distance(alike, of_teacher, *marks))
                continue
            num = len(of_teacher[0]) * collectives.world_size()
            means = [collectives.all_reduce_sum(side.sum(dim=0)) / num for side in of_teacher]
            lengths = torch.stack([mean.norm() for mean in means])
            if self.distance == "cosine":
                distances.append((1.0 - lengths).sum())
            elif self.projection is None:  # of unit length
                distances.append((2.0 - 2.0 * lengths).sum())
            else:
                distances.append((1.0 - lengths.square()).sum())
        return self._scheduled(torch.stack(distances).mean())

    # Not compiled, because a compiler would compile again for every new factor.
    @not_compiled
    def _scheduled(self, distance: Tensor) -> Tensor:
        return distance * self.factor

    def _sides(self, features: Features) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Returns the model's features, mapped to the teacher's, and the teacher's, per view."""
        by_view = []
        for names in self.names:
            local = [self._mapped(to_fp32(features[name])) for name in names]
            teachers = [features[self.of_teacher[name]].detach() for name in names]
            by_view.append((local, [t.to(o.dtype) for t, o in zip(teachers, local, strict=True)]))
        return by_view

    def _mapped(self, features: Tensor) -> Tensor:
        if self.projection is None:
            return features
        with choose_no_autocast(features.device):
            mapped: Tensor = self.projection(features)
            return functional.normalize(mapped, dim=1) if self.distance == "cosine" else mapped

    def _distance(
        self, local: Sequence[Tensor], teachers: Sequence[Tensor], groups: Tensor, ids: Tensor
    ) -> Tensor:
        """Returns the mean distance of this rank's rows, a scalar. ``local`` and ``teachers`` are
        the model's and the teacher's features of images and, with captions, of texts, [b, D]
        each."""
        if self.what == "features":
            # |x - y|^2 / 2 of unit vectors is 1 - cosine, and exactly 0 if they are equal.
            halves = 2.0 if self.distance == "cosine" else 1.0
            sides = zip(local, teachers, strict=True)
            means = [(x - y).square().sum(dim=1).mean() / halves for x, y in sides]
            return torch.stack(means).sum()
        every = [collectives.gather_with_grad(side) for side in local]
        every_teacher = [collectives.gather(side) for side in teachers]
        pairs = Pairs.over_ranks(groups, ids, self.tile)
        means = []
        for side, other in ((0, 1), (1, 0)) if self.captions else ((0, 0),):
            queries, of_teacher = self.scale * local[side], self.scale * teachers[side]
            rows = divergences(
                queries, every[other], of_teacher, every_teacher[other], pairs,
                with_own=self.captions,
            )  # fmt: skip
            means.append(rows.mean())
        return torch.stack(means).mean()
