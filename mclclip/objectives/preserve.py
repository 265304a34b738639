"""Preserve: a term that holds features or similarities near those of stage 0, the base.

Let V and T be the unit features of the images and texts of the global batch, V' and T' those that
the base has for them, and s the base's logit scale.

    features       mean over p of (1 - V_p . V'_p), and the same of the texts
    similarities   mean over rows p of KL( softmax_q(s V'_p . T'_q) || softmax_q(s V_p . T_q) ), and
                   the same over columns; of images alone V_p . V_q, where q is not p

``features`` holds coordinates: it punishes a common rotation of all features, which changes no
similarity. ``similarities`` lets both towers rotate together. Pairs count under MCL's group mask
(its Eq. 3), as in ``info_nce``; the own pair always counts between captions, and never between
images.

Source: Li and Hoiem, "Learning without Forgetting" (ECCV 2016), arXiv:1606.09282, with the captions
of the batch for classes. The mask: Zhang et al., "Learning the Unlearned: Mitigating Feature
Suppression in Contrastive Learning" (MCL, 2024), arXiv:2402.11816.

Inputs: ``image_features`` and ``text_features`` [b, D] of this rank, unit length; the base's of the
same samples, ``base_image_features`` and ``base_text_features`` [b, D]; ``group_ids`` [b, 1] and
``sample_id`` [b].

Use it in a list beside another objective, if a fine-tuned model must keep what its base knows. The
base's features come from disk, where ``embed`` stored them for the centre crop and every caption,
at no cost; or, with ``exact``, from a frozen copy of the model that sees the same crop. With the
copy, value and gradient are exactly 0 as long as the weights are the base's and the model computes
the same in training as in evaluation (no dropout, no batch statistics).

Relations: ``train.start_decay`` holds the weights instead of the outputs, and WiSE-FT averages the
weights afterwards.

Example: ``train.objective=[{kind: info_nce}, {kind: preserve, weight: 0.5}]``.

Its slow reference is ``preserved`` in tests/objective_loops.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from mclclip.objectives.base import (
    BatchFields,
    Features,
    Objective,
    ObjectiveInputs,
    ObjectiveOptions,
    Reads,
    encode,
)
from mclclip.objectives.pairs import TILE, Pairs
from mclclip.objectives.row_losses import divergences, to_fp32
from mclclip.ranks import collectives
from mclclip.ranks.process_group import not_compiled
from mclclip.util.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """Holds features or similarities near those of stage 0; a term beside another objective."""

    kind: Literal["preserve"] = "preserve"
    """Which objective."""
    what: Literal["features", "similarities"] = "similarities"
    """``similarities``: the softmax of every row and column, so that both towers may rotate
    together; ``features``: the features themselves, by their cosine."""
    between: Literal["captions", "images"] = "captions"
    """``captions``: images against captions (with ``features``: images and captions); ``images``:
    images alone."""
    exact: bool = False
    """True: a frozen copy of the base sees the same crop, which costs its memory and a forward
    pass. False: its stored embeddings are taken, which are of the centre crop."""
    temperature: PositiveFloat | None = None
    """With ``similarities``: divisor of the cosines of both (null: the base's temperature)."""
    end_factor: NonNegativeFloat = 1.0
    """Factor of the loss at the last step; it moves along a straight line from 1 at the first."""
    num_views: Literal[1, 2] = 1
    """Views of every image that are held: as many as the other objectives of the list read."""

    def __post_init__(self) -> None:
        if self.what == "features" and self.temperature is not None:
            raise ValueError("temperature belongs to what=similarities: leave it out")

    @property
    def reads(self) -> Reads:
        """Reads captions, groups (for ``similarities``), and stage 0's embeddings or model."""
        captions = self.between == "captions"
        base: set[Any] = {"image_features", "text_features"} if captions else {"image_features"}
        return Reads(
            num_views=self.num_views,
            captions=captions,
            groups=self.what == "similarities",
            base=frozenset({"model"} if self.exact else base),
        )

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """Returns the loss; ``inputs.model`` has the base's weights.

        Raises ValueError if ``temperature`` is null and the base has no logit scale.
        """
        scale = 1.0
        if self.temperature is not None:
            scale = 1.0 / self.temperature
        elif self.what == "similarities":
            if (of_base := inputs.model().get("logit_scale")) is None:
                raise ValueError(
                    "objective.kind=preserve: temperature=null takes the logit scale of the base, "
                    "which has none: set temperature to a number, such as 0.1"
                )
            scale = 1.0 if inputs.shapes_only else float(of_base.detach())
        return Preserve(self, scale, inputs.model if self.exact else None)


class Preserve(Objective):
    """The distance between the model's and the base's features, over all ranks.

    scale  the logit scale of both
    model  is copied as the base; None: the base's features are among the batch's extras

    ``names`` has for each view the features that are compared. The copy is not a submodule: every
    start copies it from the base again, so it is neither saved nor averaged over ranks.
    """

    def __init__(self, options: Options, scale: float, model: nn.Module | None) -> None:
        super().__init__()
        self.what, self.captions = options.what, options.between == "captions"
        self.scale, self.tile = scale, TILE
        images = ("image_features", "image_features_1")[: options.num_views]
        self.names = [(name, "text_features") if self.captions else (name,) for name in images]
        self.factor, self.end_factor = 1.0, options.end_factor
        self._copy: tuple[Any] = (None,)  # in a tuple, so that it is not a submodule
        if model is not None:
            copied = copy.deepcopy(model).requires_grad_(False).eval()
            for of_model, of_copy in zip(model.modules(), copied.modules(), strict=True):
                # In evaluation mode torch takes another kernel, which rounds otherwise.
                if isinstance(of_copy, nn.MultiheadAttention) and not of_copy.dropout:
                    of_copy.training = of_model.training
            self._copy = (copied,)

    def begin(self, step: int, total: int, epoch: float) -> None:
        """Sets the factor of ``step``, one of ``total`` steps."""
        self.factor = 1.0 + (self.end_factor - 1.0) * step / max(total - 1, 1)

    @not_compiled
    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Adds the copy's features of the same crops and texts, such as ``copied_image_features``;
        none if the base's features come from disk."""
        features, (copied,) = super().features(model, batch, features), self._copy
        if copied is None:
            return features
        with torch.no_grad():
            of_base = encode(copied, batch, {})
        every = [name for names in self.names for name in names]
        return features | {f"copied_{name}": of_base[name] for name in every}

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Computes the distance of this rank's rows over the global batch.

        Args:
            features: those in ``names``, [b, D], unit length, of this rank, and with a copy its
                features of the same samples, ``copied_NAME``.
            batch: `group_ids` [b, 1], the group of each sample; `sample_id` [b]; without a copy the
                extras ``base_image_features`` (for all views) and ``base_text_features``.

        Returns:
            `loss`: mean over the views and this rank's rows, times the factor of the step; its mean
            over the ranks is the global loss. `base_cosine`: mean cosine of this rank's images with
            the base's, of the first view.

        The arithmetic is fp32 (float64 for float64 features), under autocast too.
        """
        sides = self._sides({**batch.extras, **features})
        marks = batch.group_ids[:, 0], batch.sample_id
        distances = [self.distance(local, base, *marks) for local, base in sides]
        (images, *_), (base_images, *_) = sides[0]
        return {
            "loss": self._scheduled(torch.stack(distances).mean()),
            "base_cosine": (images.detach() * base_images).sum(dim=1).mean(),
        }

    def chance(self, features: Features, batch: BatchFields, parts: Features) -> Tensor:
        """Returns the smallest distance of features that are all alike: with ``features`` these are
        the base's mean."""
        marks, distances = (batch.group_ids[:, 0], batch.sample_id), []
        for _, base in self._sides({**batch.extras, **features}):
            if self.what == "similarities":
                alike = [side.new_ones(len(side), 1) for side in base]
                distances.append(self.distance(alike, base, *marks))
                continue
            num = len(base[0]) * collectives.world_size()
            means = [collectives.all_reduce_sum(side.sum(dim=0)) / num for side in base]
            distances.append(torch.stack([1.0 - mean.norm() for mean in means]).sum())
        return self._scheduled(torch.stack(distances).mean())

    # Not compiled, because a compiler would compile again for every new factor.
    @not_compiled
    def _scheduled(self, distance: Tensor) -> Tensor:
        return distance * self.factor

    def _sides(self, features: Features) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Returns the model's features and the base's, of each view."""
        stored = {"image_features_1": "image_features"}  # one embedding for all views
        by_view = []
        for names in self.names:
            of_base = [
                f"base_{stored.get(name, name)}" if self._copy[0] is None else f"copied_{name}"
                for name in names
            ]
            local = [to_fp32(features[name]) for name in names]
            base = [features[n].detach().to(o.dtype) for n, o in zip(of_base, local, strict=True)]
            by_view.append((local, base))
        return by_view

    def distance(
        self, local: Sequence[Tensor], base: Sequence[Tensor], groups: Tensor, sample_id: Tensor
    ) -> Tensor:
        """Returns the mean distance of this rank's rows, a scalar. ``local`` and ``base`` are the
        model's and the base's features of images and, with captions, of texts, [b, D] each."""
        if self.what == "features":
            # |x - y|^2 / 2 of unit vectors is 1 - cosine, and exactly 0 if they are equal.
            sides = zip(local, base, strict=True)
            means = [(x - y).square().sum(dim=1).mean() / 2.0 for x, y in sides]
            return torch.stack(means).sum()
        every = [collectives.gather_with_grad(side) for side in local]
        every_base = [collectives.gather(side) for side in base]
        pairs = Pairs.over_ranks(groups, sample_id, self.tile)
        means = []
        for side, other in ((0, 1), (1, 0)) if self.captions else ((0, 0),):
            queries, base_queries = self.scale * local[side], self.scale * base[side]
            keys, base_keys = every[other], every_base[other]
            rows = divergences(
                queries, keys, base_queries, base_keys, pairs, with_own=self.captions
            )
            means.append(rows.mean())
        return torch.stack(means).mean()
