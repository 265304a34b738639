"""SimLAP: samples of any two classes may be a positive pair, in dimensions that the two share.

A sample of class y1 is paired with a class y2 of the batch. Its positives k are the samples of y2,
its negatives q those of neither class. All are compared through gates g(y1, y2) in (0, 1)^D, which
a label filter computes. With the cosine c of gated features z * g, the temperature tau and P
positives,

    L = 1/P sum over k of -log( exp(c_k / tau) / (exp(c_k / tau) + sum over q of exp(c_q / tau)) )

Source: Wu et al., "Rethinking Positive Pairs in Contrastive Learning" (SimLAP, 2024),
arXiv:2410.18200, Eq. 1 to 5, Table 5c.

Inputs: ``image_features`` and ``image_features_1`` [b, D] of this rank, two views of an image;
``classes`` [b, 1] int64; ``group_ids`` [b, 1] and ``sample_id`` [b]; with a momentum copy
``keys`` and ``keys_1`` [b, D]. Captions are not read.

Use it where images have classes (an ``attribute``, or clusters) and samples of two classes have
something in common. Keep the layer norm, without which the paper's training diverges.

Relations: ``supcon`` pairs samples of one class in all dimensions. ``gates: open`` is our reading
of SupCon with pairs of other classes in Fig. 8: the same pairs and the same loss in all dimensions
(SupCon itself has all positives of a row in its denominator). ``momentum`` is SimLAP-MoCo.

Where the paper is silent or contradicts itself:

- y2 is drawn over the classes of the global batch, once for both views of a sample (the authors'
  code permutes the local batch).
- Candidates pass through the row's gates (Eq. 2 and the code; in Algorithm 1 through those of
  their own pair).
- A sample's other view is not a positive of it, even if y2 is y1.
- SimLAP-MoCo has no predictor. Its candidates pass through the same layer norm as the rows, of
  which there is no copy. Each view is compared with the copy's other one, as in MoCo v3.
- The gates are sigmoids (Eq. 3; Algorithm 1 omits them); the loss is -log of what Eq. 2 prints.
- Every positive has a term of its own with one positive in the denominator, and a row's loss is
  their mean. A row is left out of the mean if the batch has no other sample of its class y2.
- ``score: code`` is the score of the authors' code: features of unit length are gated and
  multiplied, without being normalized again.

Example: ``train.objective={kind: simlap, attribute: breed, momentum: 0.99}``.

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
    Pairing,
    Penalty,
    apply_norm,
    closest_classes,
    draw_partners,
    gate_penalty,
    gated_queries,
    pair_losses,
)
from mclclip.objectives.moco import MomentumCopy
from mclclip.objectives.row_losses import to_fp32
from mclclip.ranks import collectives
from mclclip.ranks.process_group import not_compiled, to_device
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
    """Attribute of the samples that is their class, such as ``breed`` (null: the nearest cluster of
    the stage before)."""
    groups: bool = False
    """Compare only samples with the same pseudo label, as MCL does."""
    pairs: Pairing = "arbitrary"
    """Classes of the batch that a sample may be paired with: any (``arbitrary``); its own
    (``identical``); any other (``distinct``); its own and those closest to it (``n_closest``)."""
    num_closest: NonNegativeInt = 5
    """Number of closest classes for ``n_closest``; 0: the sample's own class alone."""
    closest_by: Literal["class_means", "label_embeddings"] = "class_means"
    """How near two classes are, for ``n_closest``: the cosine of their means, or of the label
    filter's current embeddings of them."""
    class_means: str | None = None
    """An .npy file with the classes' means, [num_classes, E] (null: the clusters' centroids)."""
    gates: Gates = "labels"
    """``labels``: a label filter computes them from the two classes; ``open``: all are 1, so that
    all pairs are compared in all dimensions."""
    score: Literal["exact", "code"] = "exact"
    """``exact``: the cosine of gated features; ``code``: the product of gated unit features."""
    temperature: AnyTemperature = 0.05
    """Divisor of scores, as for other contrastive losses. The paper tries 0.05, 0.1 and 0.15; the
    authors' code is ``{learnable: true, start: 0.1}``; null: one over the model's logit scale."""
    norm: Literal["layer", "none"] = "layer"
    """``layer``: a layer norm at the end of the projector, without which the paper's training
    diverges."""
    penalty: Penalty = "neg_glog"
    """Penalty of gates: ``paper`` is Eq. 5 as printed, which draws gates to 1/e; ``neg_glog`` has
    the other sign, as the paper's text wants; ``bernoulli`` is the entropy of a coin that is heads
    with the gate's probability."""
    penalty_weight: NonNegativeFloat = 0.0
    """Weight of the penalty."""
    momentum: Share | None = None
    """Momentum, such as 0.99, of a copy of the model whose features are the candidates
    (SimLAP-MoCo); it rises to 1 along a cosine. Null: there is no copy."""
    label_dim: PositiveInt = 512
    """Width of the label filter's embedding of a class."""
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
        """Reads two views and a class of every sample; groups and the model's weights if options
        ask for them."""
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
        """Returns the loss with a new label filter, the same on all ranks."""
        return SimLAP(self, inputs)

    def means_of(self, classes: Classes) -> Tensor | None:
        """Returns the means of classes, [K, E], if ``n_closest`` compares them, else None. Raises
        FileNotFoundError or ValueError for a file that does not fit."""
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
    """SimLAP's loss between two views, or between a view and a momentum copy's other view.

    Scores are computed in tiles of at most ``tile`` rows and columns; the result does not depend on
    ``tile``. Building it raises ValueError if ``num_closest`` is not below the number of classes,
    and the errors of ``Options.means_of``.
    """

    def __init__(self, options: Options, inputs: ObjectiveInputs) -> None:
        super().__init__()
        assert inputs.classes is not None
        num_classes, dim = inputs.classes.num_classes, inputs.model.feature_dim
        self.filter: LabelFilter | None = None  # None: all gates are open
        if options.gates == "labels":
            self.filter = LabelFilter(
                num_classes, dim, label_dim=options.label_dim, hidden_dim=options.hidden_dim,
                seed=inputs.seed, dtype=inputs.dtype,
            )  # fmt: skip
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
        # Its features of the other view are the candidates (SimLAP-MoCo).
        self.copy: MomentumCopy | None = None
        if options.momentum is not None:
            self.copy = MomentumCopy(inputs.model, options.momentum, "cosine")

    def begin(self, step: int, total: int, epoch: float) -> None:
        """Remembers the step, which the draw of pairs depends on, and moves the temperature."""
        self.step = step
        super().begin(step, total, epoch)

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Adds the model's features of both views, and the copy's as ``keys`` and ``keys_1``."""
        encoded = super().features(model, batch, features)
        return encoded if self.copy is None else encoded | self.copy.keys(batch.views)

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Computes the loss of this rank's rows over the global batch.

        Args:
            features: `image_features` and `image_features_1` [b, D] of this rank, the first and the
                second view. Without keys each view is compared with the other. With `keys` and
                `keys_1` [b, D], a momentum copy's features of both views, each view is compared
                with the copy's other one, as in MoCo v3. With `keys` alone, which the objective
                `moco` v2 gives if it stands earlier in a list of objectives, only the first view's
                rows count. `logit_scale`: a scalar, if the temperature is the model's.
            batch: `group_ids` [b, 1], the groups; `sample_id` [b]; copies of a repeated sample are
                never each other's positives; `classes` [b, 1].

        Returns:
            `loss`, whose mean over the ranks is the global loss. `rows_without_positives`: number
            of samples of the global batch that are left out. `rows_without_negatives`: number of
            other samples with loss 0. `open_gates`: share of gates above a half. `temperature`.
            `gate_penalty`, if it has a weight.
        """
        assert batch.classes is not None
        views = self._views(features)
        scale = self.temperature.scale(views[0][0], features.get("logit_scale"))
        pairs = self._pairs(batch.classes[:, 0], batch.group_ids[:, 0], batch.sample_id)
        gates = torch.ones_like(views[0][0])
        if self.filter is not None:
            # Rows without a partner (-1) are left out, so their gates do not matter.
            gates = self.filter(pairs.labels, pairs.partners.clamp_min(0))
        by_view = [self._losses(scale, rows, gates, others, pairs) for rows, others in views]
        _, positives, negatives = by_view[0]  # the same in every view
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
            assert self.filter is not None  # options refuse it with open gates
            parts["gate_penalty"] = gate_penalty(self.filter.of_classes(), self.penalty)
            parts["loss"] = parts["loss"] + self.penalty_weight * parts["gate_penalty"]
        return parts

    def _views(self, features: Features) -> list[tuple[Tensor, Tensor]]:
        """Returns for each view its rows [b, D] and their candidates [B, D]."""
        views = [features[name] for name in ("image_features", "image_features_1")]
        rows = [apply_norm(to_fp32(view), self.norm) for view in views]
        if "keys" not in features:
            every = [collectives.gather_with_grad(view) for view in rows]
            return [(rows[0], every[1]), (rows[1], every[0])]
        # First views are compared with the copy's second views, and the other way round.
        copies = [features[name] for name in ("keys_1", "keys") if name in features]
        candidates = [collectives.gather(apply_norm(to_fp32(view), self.norm)) for view in copies]
        return list(zip(rows, candidates, strict=False))

    @not_compiled  # it draws with numpy's integers without a sign, which torch does not know
    def _pairs(self, classes: Tensor, groups: Tensor, ids: Tensor) -> ClassPairs:
        """Draws the partners of this rank's rows; returns their positives and negatives."""
        device = ids.device
        all_classes, all_ids = collectives.gather(classes.cpu()), collectives.gather(ids)
        numbers = all_classes.numpy()
        closest: Integers | None = None
        if self.pairs == "n_closest":
            present = torch.from_numpy(np.unique(numbers))
            if self._closest is not None:
                closest = self._closest[present].numpy()
            else:
                assert self.filter is not None
                vectors = self.filter.labels.weight
                rows = to_device(present, vectors.device)
                closest = closest_classes(vectors, rows, self.num_closest).cpu().numpy()
        key = mix(self.seed, self.step)
        # The ids of a plan have no values; any partners will do for it.
        ids_here = torch.arange(len(all_classes)) if all_ids.is_meta else all_ids.cpu()
        drawn = draw_partners(numbers, ids_here.numpy(), key, self.pairs, closest)
        first = collectives.rank() * len(classes)
        partners = to_device(torch.from_numpy(drawn[first : first + len(classes)]), device)
        classes, all_classes = to_device(classes, device), to_device(all_classes, device)
        all_groups = collectives.gather(groups)
        return ClassPairs(classes, partners, ids, groups, all_classes, all_ids, all_groups)

    def _losses(
        self, scale: Tensor, rows: Tensor, gates: Tensor, candidates: Tensor, pairs: ClassPairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the losses of rows, and the numbers of their positives and negatives, [b] each
        (``pair_losses``); ``rows`` and ``gates`` are [b, D], ``candidates`` [B, D]."""
        weights: Tensor | None = None
        if self.score == "exact":
            queries, weights = gated_queries(rows, gates)
        else:
            queries = functional.normalize(rows) * gates.square()
            candidates = functional.normalize(candidates)
        return pair_losses(scale * queries, weights, candidates, pairs, self.tile)
