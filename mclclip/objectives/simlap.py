"""SimLAP: samples of any two classes may be a positive pair, in dimensions that the two share.

A sample of class y1 is paired with a class y2 of the batch. Its positives k are the samples of y2,
its negatives q those of neither class, all seen through gates g(y1, y2) in (0, 1)^D that a label
filter makes. With the cosine c of gated features z * g, the temperature tau and the P positives,

    L = 1/P sum over k of -log( exp(c_k / tau) / (exp(c_k / tau) + sum over q of exp(c_q / tau)) )

Source: Wu et al., "Rethinking Positive Pairs in Contrastive Learning" (2024), Eq. 1 to 5, Table 5c.

Inputs: ``image_features`` and ``image_features_1`` [b, D] of this rank, two views of an image;
``classes`` [b, 1] int64; ``group_ids`` [b, 1] and ``sample_id`` [b]; with a momentum copy ``keys``
and ``keys_1`` [b, D]. Captions are not read.

Use it where images have classes, by an ``attribute`` or by clusters, and the samples of two classes
have something in common. Keep the layer norm, without which the paper's training diverges.

Relations: ``supcon`` pairs samples of one class in all dimensions. ``gates: open`` is our reading
of Fig. 8's SupCon with pairs of other classes: the same pairs and the same loss in all dimensions
(SupCon itself has all positives of a row in its denominator). ``momentum`` is SimLAP-MoCo.

Where the paper is silent or contradicts itself:

- y2 is drawn over the classes of the global batch, once for both views of a sample (the authors'
  code permutes the local batch).
- Candidates pass the gates of the row (Eq. 2 and the code; Algorithm 1 has those of their pair).
- A sample's other view is no positive of it, also where y2 is y1.
- SimLAP-MoCo has no predictor, and its candidates go through the layer norm of the rows, which has
  no copy of its own. Each view is compared with the copy's other one, as in MoCo v3.
- The gates are sigmoids (Eq. 3; Algorithm 1 omits them); the loss is -log of what Eq. 2 prints.
- Every positive has a term of its own with one positive in the denominator, and a row's loss is
  their mean. A row whose class y2 has no other sample is left out of the mean.
- ``score=code`` is the score of the authors' code: features of unit length, both gated, are
  multiplied, and not brought to unit length again.

Its slow reference is ``simlap`` in tests/objective_loops.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from mclclip.objectives.base import (
    BatchFields,
    Classes,
    Features,
    Objective,
    ObjectiveInputs,
    ObjectiveOptions,
    Reads,
)
from mclclip.objectives.contrast import AnyTemperature, Temperature
from mclclip.objectives.gated_pairs import (
    ClassPairs,
    LabelFilter,
    OpenGates,
    Pairing,
    Penalty,
    closest_classes,
    draw_partners,
    gate_penalty,
    gated_queries,
    normed,
    pair_losses,
)
from mclclip.objectives.moco import MomentumCopy
from mclclip.objectives.row_losses import to_fp32
from mclclip.ranks import collectives
from mclclip.ranks.process_group import to_device
from mclclip.util.options import STRICT, Share
from mclclip.util.randomness import Integers, mix

_TILE = 1024
Gates = Literal["labels", "open"]


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """Two views of images, with positives of any class, compared in gated dimensions."""

    kind: Literal["simlap"] = "simlap"
    """Which objective."""
    attribute: str | None = None
    """Attribute of the samples that is their class (null: the nearest cluster of the stage
    before)."""
    groups: bool = False
    """Compare only within groups of samples with one pseudo label, as MCL does."""
    pairs: Pairing = "arbitrary"
    """Classes that a sample is paired with: any of the batch; its own (``identical``); any other
    (``distinct``); its own and its closest of all classes, as far as the batch has them
    (``n_closest``)."""
    num_closest: NonNegativeInt = 5
    """N of ``n_closest``; 0: the sample's own class alone."""
    closest_by: Literal["class_means", "label_embeddings"] = "class_means"
    """Vectors of which ``n_closest`` takes the cosine: the classes' means, or the label filter's
    embeddings as they are at the step."""
    class_means: str | None = None
    """An .npy file [num_classes, E] with the classes' means (null: the clusters' centroids)."""
    gates: Gates = "labels"
    """``labels``: a label filter makes them of the two classes; ``open``: all are 1, so that pairs
    of any classes are compared in all dimensions."""
    score: Literal["exact", "code"] = "exact"
    """``exact``: the cosine of gated features; ``code``: the gated product of unit features."""
    temperature: AnyTemperature = 0.05
    """Divisor of scores, as for other contrastive losses. The paper tries 0.05, 0.1 and 0.15; the
    authors' code is ``{learnable: true, start: 0.1}``; null: one over the model's logit scale."""
    norm: Literal["layer", "none"] = "layer"
    """Layer norm at the end of the projector, without which the paper's training diverges."""
    penalty: Penalty = "neg_glog"
    """Penalty of gates: ``paper`` is Eq. 5 as printed, which draws gates to 1/e; ``neg_glog`` has
    the other sign, which its text wants; ``bernoulli`` is a gate's entropy as a probability."""
    penalty_weight: NonNegativeFloat = 0.0
    """Weight of the penalty."""
    momentum: Share | None = None
    """Share of itself that a momentum copy of the model keeps at a step, such as 0.99; it rises to
    1 by a cosine. Candidates are the copy's features (SimLAP-MoCo); null: there is no copy."""
    label_dim: PositiveInt = 512
    """Width of the label embedding."""
    hidden_dim: PositiveInt = 1024
    """Width of the label filter's hidden layer."""

    def __post_init__(self) -> None:
        if self.class_means is not None and not self._reads_means:
            raise ValueError(
                "class_means is given, and is read only with pairs=n_closest and "
                "closest_by=class_means: set these, or leave it out"
            )
        if self._reads_means and self.class_means is None and self.attribute is not None:
            raise ValueError(
                f"pairs=n_closest with attribute={self.attribute} has no class means: give "
                "class_means=FILE.npy, or set closest_by=label_embeddings"
            )
        if self.gates == "open" and self.penalty_weight:
            raise ValueError(
                f"penalty_weight={self.penalty_weight} is for the gates of a label filter, and "
                "gates=open has none: leave it out, or set gates=labels"
            )
        by_embeddings = self.pairs == "n_closest" and self.closest_by == "label_embeddings"
        if self.gates == "open" and by_embeddings:
            raise ValueError(
                "gates=open has no label embeddings to say which classes are closest: set "
                "closest_by=class_means"
            )

    @property
    def _reads_means(self) -> bool:
        return self.pairs == "n_closest" and self.closest_by == "class_means"

    @property
    def reads(self) -> Reads:
        """Returns a class per sample, groups where they are set, and the weights that a copy
        follows."""
        clusters = 1 if self.attribute is None else 0
        return Reads(
            num_views=2,
            follows_weights=self.momentum is not None,
            logit_scale=self.temperature is None,
            groups=self.groups,
            clusters=clusters,
            attribute=self.attribute,
        )

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """The loss with a new label filter, alike on all ranks."""
        return (SimLAP if self.momentum is None else MomentumSimLAP)(self, inputs)

    def new_filter(
        self, num_classes: int, dim: int, dtype: torch.dtype, seed: int = 0
    ) -> LabelFilter | OpenGates:
        """The module that makes gates [n, dim] of two classes [n], int64."""
        if self.gates == "open":
            return OpenGates(num_classes, dim, dtype=dtype)
        return LabelFilter(
            num_classes,
            dim,
            label_dim=self.label_dim,
            hidden_dim=self.hidden_dim,
            seed=seed,
            dtype=dtype,
        )

    def means_of(self, classes: Classes) -> Tensor | None:
        """The means of classes [K, E] by which some are closest; None where closeness is not
        theirs. Raises FileNotFoundError or ValueError for a file that does not fit."""
        if not self._reads_means:
            return None
        if self.class_means is None:
            return torch.from_numpy(np.array(classes.centroids()))
        if not Path(self.class_means).is_file():
            raise FileNotFoundError(f"class_means={self.class_means} is no file")
        means = np.load(self.class_means, allow_pickle=False)
        if means.ndim != 2 or len(means) != classes.num_classes:
            raise ValueError(
                f"class_means={self.class_means} is {list(means.shape)}, wanted a row for each of "
                f"{classes.num_classes} classes"
            )
        return torch.from_numpy(np.array(means, dtype=np.float32))


class SimLAP(Objective):
    """The loss of two views, or of a view and the momentum copy's other one, in gated dimensions.

    With class means, ``pairs=n_closest`` is by their cosine; without them, by that of the label
    embeddings. The norm is applied to features that are brought to length sqrt(D), so that its
    epsilon does not count. Scores are computed in tiles of at most ``tile`` rows and columns; the
    result does not depend on it. Raises ValueError for more closest classes than there are others,
    and the errors of ``Options.means_of``.
    """

    def __init__(self, options: Options, inputs: ObjectiveInputs) -> None:
        super().__init__()
        assert inputs.classes is not None
        num_classes, dim = inputs.classes.num_classes, inputs.model.feature_dim
        self.filter = options.new_filter(num_classes, dim, inputs.dtype, inputs.seed)
        self.norm = nn.LayerNorm(dim, dtype=inputs.dtype) if options.norm == "layer" else None
        self.pairs, self.score, self.tile = options.pairs, options.score, _TILE
        self.penalty, self.penalty_weight = options.penalty, options.penalty_weight
        self.seed, self.step = inputs.seed, 0
        self.num_closest = num_closest = options.num_closest
        if self.pairs == "n_closest" and num_closest >= num_classes:
            raise ValueError(
                f"num_closest is {num_closest}, with {num_classes} classes: wanted at most "
                f"{num_classes - 1}"
            )
        self._closest: Tensor | None = None
        means = None if inputs.shapes_only else options.means_of(inputs.classes)
        if means is not None:
            self._closest = closest_classes(means, torch.arange(num_classes), num_closest)
        self.temperature = Temperature(options.temperature, inputs.dtype)

    def begin(self, step: int, total: int, epoch: float) -> None:
        """Takes note of the step, on which the draw of pairs depends; moves the temperature."""
        self.step = step
        super().begin(step, total, epoch)

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Computes this rank's rows of the loss over the global batch.

        Args:
            features: `image_features` and `image_features_1` [b, D] of this rank, the first and the
                second view. `keys` and `keys_1` [b, D], a momentum copy's features of them: with
                both, each view is compared with the copy's other one, without gradient through the
                copy, as in MoCo v3. `keys` alone (MoCo v2's) are those of the second view, and
                only the first view's rows count. Without them each view is compared with the other.
                `logit_scale`: 0-dimensional, where the temperature is the model's.
            batch: `group_ids` [b, 1], groups, which are compared within; `sample_id` [b], of which
                equal ones are one sample, never each other's positives; `classes` [b, 1], 0 or
                more.

        Returns:
            `loss`, whose mean over the ranks is the global loss. `rows_without_positives`, samples
            of the global batch that are left out; `rows_without_negatives`, others of loss 0.
            `open_gates`, share above a half; `temperature`; with a penalty, `gate_penalty`.
        """
        assert batch.classes is not None
        views = self._views(features, batch.classes)
        scale = self.temperature.scale(views[0][0], features.get("logit_scale"))
        pairs = self._pairs(batch.classes[:, 0], batch.group_ids[:, 0], batch.sample_id)
        # Rows without a partner are left out.
        gates = self.filter(pairs.labels, pairs.partners.clamp_min(0))
        by_view = [self._losses(scale, rows, gates, others, pairs) for rows, others in views]
        _, positives, negatives = by_view[0]  # their numbers are those of every view
        left_out = collectives.all_reduce_sum((positives == 0).sum())
        silent = collectives.all_reduce_sum(((positives > 0) & (negatives == 0)).sum())
        counted = (len(pairs.all_labels) - left_out).clamp_min(1) * len(views)
        loss = torch.stack([losses.sum() for losses, _, _ in by_view]).sum()
        parts = {
            "loss": loss * collectives.world_size() / counted,
            "rows_without_positives": left_out,
            "rows_without_negatives": silent,
            "open_gates": (gates.detach() > 0.5).to(gates.dtype).mean(),
            "temperature": 1.0 / scale.detach(),
        }
        if self.penalty_weight:
            assert isinstance(self.filter, LabelFilter)  # options refuse it with open gates
            parts["gate_penalty"] = gate_penalty(self.filter.of_classes(), self.penalty)
            parts["loss"] = parts["loss"] + self.penalty_weight * parts["gate_penalty"]
        return parts

    def _views(self, features: Features, classes: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of rows [b, D] and their candidates [B, D]; ValueError for what is
        missing."""
        first, second = features["image_features"], features.get("image_features_1")
        keys, keys_1 = features.get("keys"), features.get("keys_1")
        if tuple(classes.shape) != (len(first), 1):
            raise ValueError(f"classes {tuple(classes.shape)} must be [{len(first)}, 1]")
        if second is None and (keys is None or keys_1 is not None):
            raise ValueError("simlap compares two views of an image, and image_features_1 is none")

        rows = [normed(to_fp32(view), self.norm) for view in (first, second) if view is not None]
        if keys is None:
            every = [collectives.gather_with_grad(view) for view in rows]
            return [(rows[0], every[1]), (rows[1], every[0])]
        # The first view's rows are compared with the copy's second view, and the other way round.
        copies = [view for view in (keys_1, keys) if view is not None]
        candidates = [collectives.gather(normed(to_fp32(view), self.norm)) for view in copies]
        return list(zip(rows, candidates, strict=False))

    def _pairs(self, classes: Tensor, groups: Tensor, ids: Tensor) -> ClassPairs:
        """The positives and negatives of this rank's rows, whose partners are drawn.

        Raises ValueError, on all ranks, for a class that the label filter does not have.
        """
        device = ids.device
        all_classes, all_ids = collectives.gather(classes.cpu()), collectives.gather(ids)
        num_classes, numbers = self.filter.num_classes, all_classes.numpy()
        if numbers.min() < 0 or numbers.max() >= num_classes:
            raise ValueError(
                f"classes of a batch are {numbers.min()} to {numbers.max()}, and the label filter "
                f"has those of 0 to {num_classes - 1}: the labels are of other data"
            )
        closest: Integers | None = None
        if self.pairs == "n_closest":
            present = torch.from_numpy(np.unique(numbers))
            if self._closest is not None:
                closest = self._closest[present].numpy()
            else:
                assert isinstance(self.filter, LabelFilter)
                vectors = self.filter.labels.weight
                rows = to_device(present, vectors.device)
                closest = closest_classes(vectors, rows, self.num_closest).cpu().numpy()
        key = mix(self.seed, self.step)
        # A plan's ids have no values, and its partners may be any others.
        ids_here = torch.arange(len(all_classes)) if all_ids.is_meta else all_ids.cpu()
        drawn = draw_partners(numbers, ids_here.numpy(), key, self.pairs, closest)
        first = collectives.rank() * len(classes)
        partners = to_device(torch.from_numpy(drawn[first : first + len(classes)]), device)
        classes, all_classes = to_device(classes, device), to_device(all_classes, device)
        everywhere = collectives.gather(groups)
        return ClassPairs(classes, partners, ids, groups, all_classes, all_ids, everywhere)

    def _losses(
        self, scale: Tensor, rows: Tensor, gates: Tensor, candidates: Tensor, pairs: ClassPairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``pair_losses``: of rows and gates [b, D] of this rank and candidates [B, D]."""
        weights: Tensor | None = None
        if self.score == "exact":
            queries, weights = gated_queries(rows, gates)
        else:
            queries = functional.normalize(rows) * gates.square()
            candidates = functional.normalize(candidates)
        return pair_losses(scale * queries, weights, candidates, pairs, self.tile)


class MomentumSimLAP(SimLAP):
    """SimLAP whose candidates are a momentum copy's features of the other view (SimLAP-MoCo)."""

    def __init__(self, options: Options, inputs: ObjectiveInputs) -> None:
        super().__init__(options, inputs)
        assert options.momentum is not None
        self.copy = MomentumCopy(inputs.model, options.momentum, "cosine")

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Adds the model's features of both views, and the copy's as ``keys`` and ``keys_1``."""
        return super().features(model, batch, features) | self.copy.keys(batch.views)
