"""A weighted sum of objectives on the same features, such as MCL's loss with a regulariser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveFloat
from torch import Tensor, nn

from mclclip.objectives.base import (
    AnyObjective,
    BatchFields,
    Objective,
    ObjectiveOptions,
    Reads,
    Setting,
)
from mclclip.ranks.collectives import OutsideParameters
from mclclip.util.options import STRICT, with_prefix


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Term:
    """One objective of a sum."""

    objective: AnyObjective
    """The objective that is added, by its ``kind``."""
    weight: PositiveFloat = 1.0
    """Factor of its loss."""


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """Several objectives, trained together."""

    terms: list[Term]
    """The objectives and their weights."""
    kind: Literal["weighted_sum"] = "weighted_sum"
    """Which objective."""

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("terms is empty: give at least one objective")
        views = {term.objective.num_views for term in self.terms}
        if len(views) > 1:
            raise ValueError(f"terms want {sorted(views)} views of an image: wanted one number")
        every = [term.objective.reads for term in self.terms]
        edits = [r.edits for r in every if r.edits]
        if any(e.drawn_by != edits[0].drawn_by for e in edits):
            raise ValueError(
                "terms want different hard_captions: give them the same, but for their scope"
            )
        reads = [r for r in every if r.num_classes_per_sample]
        if len({(r.clusters, r.threshold, r.attribute) for r in reads}) > 1:
            raise ValueError(
                "terms read different classes: give them one labels_per_sample, or one attribute"
            )

    @property
    def num_views(self) -> int:  # type: ignore[override]
        """Views that every term wants."""
        return self.terms[0].objective.num_views

    @property
    def controls(self) -> tuple[str, ...]:  # type: ignore[override]
        """Controls of any term."""
        return tuple(dict.fromkeys(name for t in self.terms for name in t.objective.controls))

    @property
    def starts_anew(self) -> bool:  # type: ignore[override]
        """True where all terms allow it."""
        return all(term.objective.starts_anew for term in self.terms)

    @property
    def refuses(self) -> Mapping[str, str]:  # type: ignore[override]
        """All that its terms refuse."""
        return {k: v for term in self.terms for k, v in term.objective.refuses.items()}

    @property
    def reads(self) -> Reads:
        """Returns what any of the terms reads."""
        every = [term.objective.reads for term in self.terms]

        def joined(name: str) -> Any:
            values = [getattr(reads, name) for reads in every]
            if isinstance(values[0], frozenset):
                return frozenset[Any]().union(*values)
            if isinstance(values[0], int):  # a number, or whether it is read
                return max(values)
            return next((value for value in values if value is not None), None)

        return Reads(**{item.name: joined(item.name) for item in fields(Reads)})

    def build(self, setting: Setting) -> Objective:
        """The sum of what every term builds."""
        built = [term.objective.build(setting) for term in self.terms]
        names = [f"{number}_{t.objective.kind}" for number, t in enumerate(self.terms)]
        return WeightedSum(built, [term.weight for term in self.terms], names)


def _makes_features(term: Objective) -> bool:
    if isinstance(term, WeightedSum):
        return any(map(_makes_features, term.terms))
    return type(term).features is not Objective.features


class WeightedSum(Objective):
    """The weighted sum of several losses of the same features.

    The parts of every term carry its number and kind, such as ``1_info_nce/loss``. At most one term
    may change what the model sees, and all terms get its features; any may add further ones.
    """

    terms: Any  # Objectives: a ModuleList is typed as one of modules

    def __init__(
        self, terms: Sequence[Objective], weights: Sequence[float], names: Sequence[str]
    ) -> None:
        super().__init__()
        self.terms, self.weights, self.names = nn.ModuleList(terms), list(weights), list(names)
        self.counterparts = next((t.counterparts for t in terms if t.counterparts), None)
        own = [n for n, t in zip(names, terms, strict=True) if _makes_features(t)]
        if len(own) > 1:
            raise ValueError(
                f"the terms {' and '.join(own)} of weighted_sum each make features of their own, "
                "such as those of a momentum copy: leave all but one of them out"
            )

    def outside(self) -> Sequence[OutsideParameters]:
        """The parameters outside of all terms."""
        return [part for term in self.terms for part in term.outside()]

    def chance(self, given: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor | None:
        """The weighted sum; None where it is not known of a term."""
        total = torch.zeros((), dtype=torch.float64)
        for term, weight, name in zip(self.terms, self.weights, self.names, strict=True):
            own = term.chance(given, with_prefix(parts, f"{name}/"))
            if own is None:
                return None
            total = total.to(own.device) + weight * own
        return total

    def features(self, model: nn.Module, batch: BatchFields) -> dict[str, Tensor]:
        """The features of the term that makes its own, and the model's of every view."""
        own = next(filter(_makes_features, self.terms), None)
        if own is None:
            return super().features(model, batch)
        features: dict[str, Tensor] = own.features(model, batch)
        for number, view in enumerate(batch.views[1:], 1):  # a momentum copy may have taken it
            if (name := f"image_features_{number}") not in features and len(self.terms) > 1:
                features[name] = model(image=view)["image_features"]
        return features

    def added_features(self, model: nn.Module, batch: BatchFields) -> dict[str, Tensor]:
        """The features that any of the terms adds."""
        added: dict[str, Tensor] = {}
        for term in self.terms:
            added |= term.added_features(model, batch)
        return added

    def forward(self, **features: Tensor) -> dict[str, Tensor]:
        """Returns the weighted sum as ``loss``, and every term's parts by its name."""
        losses: list[Tensor] = []
        parts: dict[str, Tensor] = {}
        for term, weight, name in zip(self.terms, self.weights, self.names, strict=True):
            own = term(**features)
            losses.append(weight * own["loss"])
            parts |= {f"{name}/{part}": value for part, value in own.items()}
        return {"loss": torch.stack(losses).sum()} | parts
