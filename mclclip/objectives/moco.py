"""MoCo: an image's view picks the momentum copy's features of its other view.

The momentum copy has the model's architecture and a moving average of its weights. With the unit
feature x_p of a view, the copy's k_p of the image's other view (its key) and the temperature tau,

    L_p = -log( exp(x_p . k_p / tau) /
                (exp(x_p . k_p / tau) + sum over other keys k of exp(x_p . k / tau)) )

``v2``  takes the first view and a queue of keys of earlier steps. Loss and queue are those of MoCo
        (He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", 2020, Eq. 1
        and Algorithm 1); v2 (Chen, Fan, Girshick and He, 2020) changed projector, augmentation and
        learning rate, and set the temperature to 0.2.
``v3``  takes both views, with the keys of the global batch for negatives, no queue, and a predictor
        on the queries. The loss is 2 tau times the sum of both directions (Chen, Xie and He, "An
        Empirical Study of Training Self-Supervised Vision Transformers", 2021, Algorithm 1).

Both have the mask of MCL's Eq. 3: a key is a negative where its group is the row's and its sample
is not. Entries of the queue carry both. Back-off batches compare shorter labels than others; a
label of another length says nothing of the group, so only keys of batches that were masked at the
same length are negatives.

Inputs: two views of every image; ``image_features`` and ``keys`` [b, D] of this rank, with v3
``image_features_1`` and ``keys_1`` too; ``group_ids`` [b, 1] and ``sample_id`` [b]. Captions are
not read.

Use it for views where batches are small: the queue supplies the negatives. It costs the memory of a
second model and a forward pass. Of C groups about 1/C of the queue counts for a row. ZeRO-3
(``engine.zero_stage: 3``) cannot carry the copy.

Relations: ``nt_xent`` compares views without a copy. With ``epsilon`` above 0 the loss of a row is
that of ``ifm`` at alpha = 1, as in IFM-MoCo-v2 (Robinson et al., 2021, section 4.2). ``simlap``
takes the same copy with ``momentum``.

Departures. From MoCo: the queue starts empty and not with noise, and what is not filled yet is
masked; its size need not be a multiple of the batch; earlier keys of the same sample are no
negatives. From MoCo-v3's code: features have unit length before the predictor too, since models
give them so. In both the copy has moved before the next step and not at its beginning, which gives
the same keys.

Its slow references are ``QueuedKeys`` and ``batch_keys`` in tests/objective_loops.py.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Literal, Self

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, PositiveFloat, PositiveInt
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
    encode,
)
from mclclip.objectives.ifm import Term, modified_losses
from mclclip.objectives.row_losses import TILE, Pairs, log_sums, row_losses
from mclclip.ranks import collectives
from mclclip.util.options import STRICT, Share

_QUEUE_SIZE = 65_536
Schedule = Literal["constant", "cosine"]
_NO_GROUP = torch.iinfo(torch.int64).min  # the group of keys that are no row's negative


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """Two views of an image, one of them encoded by a momentum copy of the model."""

    kind: Literal["moco"] = "moco"
    """Which objective."""
    version: Literal["v2", "v3"] = "v2"
    """``v2``: a queue of keys of earlier steps; ``v3``: both directions, keys of the batch."""
    queue_size: PositiveInt | None = None
    """v2: keys that are kept, at least ``global_batch`` (null: 65,536)."""
    momentum: Share | None = None
    """Share of itself that the copy keeps at a step (null: 0.999 with v2, 0.99 with v3)."""
    momentum_schedule: Schedule | None = None
    """``constant``, or ``cosine`` from ``momentum`` to 1 (null: the former with v2, the latter with
    v3)."""
    temperature: PositiveFloat | None = None
    """Cosines are divided by it (null: 0.2 with v2, 1.0 with v3)."""
    predictor: list[PositiveInt] | None = None
    """v3: widths of the predictor, such as [4096, 256]; the last is that of the features (null:
    none)."""
    epsilon: NonNegativeFloat = 0.0
    """How far keys are modified against the loss, in units of the cosine (IFM); 0: not at all."""
    term: Term = "both"
    """With ``epsilon``: the mean of the plain and the modified loss, or ``modified`` alone."""

    def __post_init__(self) -> None:
        if self.version == "v2" and self.predictor:
            raise ValueError("predictor belongs to version=v3: leave it out, or set version=v3")
        if self.version == "v3" and self.queue_size is not None:
            raise ValueError("queue_size belongs to version=v2: leave it out, or set version=v2")
        if self.term == "modified" and not self.epsilon:
            raise ValueError("term=modified with epsilon=0 modifies nothing: set epsilon, or both")

    @property
    def num_queued(self) -> int:
        """Keys in the queue; 0 without one."""
        return (self.queue_size or _QUEUE_SIZE) if self.version == "v2" else 0

    @property
    def reads(self) -> Reads:
        """Returns two views, groups, the weights that the copy follows, and the queue."""
        return Reads(num_views=2, groups=True, follows_weights=True, queue_size=self.num_queued)

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """The loss with a momentum copy of the model."""
        return (QueuedKeys if self.version == "v2" else BatchKeys)(self, inputs)


def predictor_of(
    dim: int, widths: Sequence[int], seed: int, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    """[b, dim] -> [b, widths[-1]]: linear layers without bias, each followed by a batch norm, and a
    ReLU between them; the last batch norm has no weights. As MoCo-v3's code has it.

    Its weights are drawn by the seed, the same on every rank. Raises ValueError where it does not
    end in ``dim``.
    """
    if widths[-1] != dim:
        raise ValueError(
            f"train.objective.predictor ends in {widths[-1]}, but the model's features have {dim} "
            f"dimensions, and the two are compared: let it end in {dim}"
        )
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for before, after in itertools.pairwise([dim, *widths]):
            linear = nn.Linear(before, after, bias=False, dtype=dtype)
            layers += [linear, nn.BatchNorm1d(after, dtype=dtype), nn.ReLU()]
    return nn.Sequential(*layers[:-2], nn.BatchNorm1d(dim, affine=False, dtype=dtype))


class MomentumCopy(Stepping):
    """A copy of ``model`` (an encoder with its projector) that no gradient reaches.

    Its weights follow those of the model as a moving average (MoCo, section 3.2, "Momentum
    update"). It is a submodule of an objective, so that checkpoints hold it. The objective calls
    ``begin`` before a step, the copy itself for features, and ``stepped`` once the optimizer has
    moved the model: ``weight <- m * weight + (1 - m) * model's weight``, for every trained
    parameter.

    Buffers are neither copied nor averaged, as in MoCo's code: the batch norms of the copy are in
    the mode of the model's, so where those are trained the copy normalises by the statistics of its
    own batch, and its running statistics are of its own features. MoCo shuffles the samples over
    the GPUs, since statistics of one GPU alone would tell a query its key. Here engines compute the
    statistics of all batch norms, the copy's too, over the global batch of all ranks, as MoCo-v3
    does, and nothing is shuffled.

    Frozen parameters are copied too, and so is a text tower, which is never run. Adapters (LoRA)
    are averaged factor by factor. Blocks that torch has compiled run uncompiled in the copy. Under
    FSDP2 the copy is sharded as the rest of the model outside of its blocks is: in one piece, whole
    on every rank while a step runs. ZeRO-3, whose ranks hold parameters neither whole nor as a
    DTensor, cannot carry it.
    """

    def __init__(self, model: nn.Module, base: float, schedule: Schedule = "constant") -> None:
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.base, self.schedule = base, schedule
        self.momentum = base

    def train(self, mode: bool = True) -> Self:
        """Leaves the modules of the copy in the modes that the model's had when it was copied."""
        self.training = mode
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """[b, C, H, W] -> [b, D], unit length, without gradient."""
        features: Tensor = self.model(image=images)["image_features"]
        return features

    def keys(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """The features [b, D] of two views as ``keys`` and ``keys_1``, without gradient."""
        first, second = views
        return {"keys": self(first), "keys_1": self(second)}

    def begin(self, step: int, total: int, epoch: float = 0.0) -> None:
        """Sets the momentum of the update after ``step``, of which there are ``total``.

        ``constant``: ``base``; ``cosine``: 1 - (1 - base) (1 + cos(pi done / total)) / 2, which
        rises from ``base`` to 1 (BYOL; MoCo-v3). MoCo-v3's code moves the copy before a step and
        counts the steps before it, which is the same sequence.
        """
        self.momentum = self.base
        if self.schedule == "cosine":
            left = (1.0 + math.cos(math.pi * (step + 1) / total)) / 2.0
            self.momentum = 1.0 - (1.0 - self.base) * left

    @torch.no_grad()
    def stepped(self, model: nn.Module) -> None:
        """Moves the copy towards the weights of ``model``, from which it was copied."""
        both = zip(self.model.parameters(), model.parameters(), strict=True)
        moved = [(old, new) for old, new in both if new.requires_grad]
        if moved:
            old, new = map(list, zip(*moved, strict=True))
            torch._foreach_lerp_(old, new, 1.0 - self.momentum)


class _WithCopy(Objective):
    """Base of both versions: holds the momentum copy, and compares with keys.

    ``tile`` is how many rows and columns of the similarities are computed at a time.
    """

    def __init__(self, options: Options, inputs: ObjectiveInputs) -> None:
        super().__init__()
        v2 = options.version == "v2"
        base = (0.999 if v2 else 0.99) if options.momentum is None else options.momentum
        schedule = options.momentum_schedule or ("constant" if v2 else "cosine")
        self.copy = MomentumCopy(inputs.model, base, schedule)
        self.epsilon, self.term, self.tile = options.epsilon, options.term, TILE
        self.temperature = options.temperature or (0.2 if v2 else 1.0)

    def _row_losses(self, features: Tensor, keys: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """The cross-entropies [b] of the own keys of features [b, D] among keys [B, D], or those of
        modified keys; and which rows have no negatives."""
        queries = features / self.temperature
        if not self.epsilon:
            return row_losses(queries, keys, pairs)
        (negatives,) = log_sums(queries, keys, pairs)
        positives = pairs.positive_logits(queries, keys)
        shift = self.epsilon / self.temperature
        weights = (0.0, 1.0) if self.term == "modified" else (0.5, 0.5)
        return modified_losses(negatives, positives, shift, weights), negatives == float("-inf")


class QueuedKeys(_WithCopy):
    """MoCo's loss with a queue, a ring buffer over the global batches in the order of ranks.

    ``queue`` [Q, D], and of each key ``queue_groups``, ``queue_sample_ids`` and
    ``queue_prefix_lengths`` [Q] (-1: never filled) are the same on every rank; ``position`` is
    where the next batch goes.
    """

    queue: Tensor
    queue_groups: Tensor
    queue_sample_ids: Tensor
    queue_prefix_lengths: Tensor
    position: Tensor

    def __init__(self, options: Options, inputs: ObjectiveInputs) -> None:
        super().__init__(options, inputs)
        size, dim = options.num_queued, inputs.model.feature_dim
        self.register_buffer("queue", torch.zeros(size, dim, dtype=inputs.dtype))
        for name in ("groups", "sample_ids", "prefix_lengths"):
            self.register_buffer(f"queue_{name}", torch.full((size,), -1))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self._new: tuple[Tensor, Tensor, Tensor, int] | None = None

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Adds the model's features of the first view, and as ``keys`` the copy's of the second."""
        features = encode(model, batch, features, num_views=1)
        return features | {"keys": self.copy(batch.views[1])}

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Computes this rank's rows of the loss over the global batch.

        Args:
            features: `image_features` and `keys` [b, D], unit length, of this rank; row i of both
                is one sample.
            batch: `group_ids` [b, 1], group of each sample at `prefix_length`, and `sample_id` [b].

        Returns:
            `loss`: mean over this rank's rows of the cross-entropy of the own key among it and the
            negatives in the queue. `rows_without_negatives`: of the global batch, with loss 0 and
            gradient 0; before the queue has keys these are all.
        """
        keys, groups, sample_id = features["keys"].detach(), batch.group_ids[:, 0], batch.sample_id
        self._new = keys, groups, sample_id, batch.prefix_length
        is_comparable = self.queue_prefix_lengths == batch.prefix_length
        queued = torch.where(is_comparable, self.queue_groups, _NO_GROUP)
        pairs = Pairs(
            groups,
            sample_id,
            torch.cat([torch.full_like(groups, _NO_GROUP), queued]),
            torch.cat([sample_id, self.queue_sample_ids]),
            0,
            self.tile,
        )
        columns = torch.cat([keys, self.queue])
        losses, alone = self._row_losses(features["image_features"], columns, pairs)
        return {
            "loss": losses.mean(),
            "rows_without_negatives": collectives.all_reduce_sum(alone.sum()),
        }

    @torch.no_grad()
    def stepped(self, model: nn.Module) -> None:
        """Moves the copy, and puts the keys of the global batch in place of the oldest."""
        super().stepped(model)
        assert self._new is not None
        *of_samples, prefix_length = self._new
        self._new = None
        keys, groups, sample_ids = (collectives.gather(values) for values in of_samples)
        slots = torch.arange(len(keys), device=keys.device).add_(self.position)
        slots.remainder_(len(self.queue))
        self.queue[slots] = keys
        self.queue_groups[slots] = groups
        self.queue_sample_ids[slots] = sample_ids
        self.queue_prefix_lengths[slots] = prefix_length
        self.position.add_(len(keys)).remainder_(len(self.queue))


class BatchKeys(_WithCopy):
    """MoCo-v3's loss: each view against the copy's other view of the global batch."""

    def __init__(self, options: Options, inputs: ObjectiveInputs) -> None:
        super().__init__(options, inputs)
        self.predictor: nn.Module = nn.Identity()
        if options.predictor:
            dim = inputs.model.feature_dim
            self.predictor = predictor_of(dim, options.predictor, inputs.seed, inputs.dtype)

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Adds the model's features of both views, and the copy's as ``keys`` and ``keys_1``."""
        return encode(model, batch, features) | self.copy.keys(batch.views)

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Computes this rank's rows of the loss over the global batch.

        Args:
            features: `image_features` and `image_features_1` [b, D], unit length, of this rank's
                two views; `keys` and `keys_1` [b, D], the copy's features of the same views.
            batch: `group_ids` [b, 1], group of each sample at the prefix where the mask compares,
                and `sample_id` [b].

        Returns:
            `loss`: 2 tau times the sum over both directions of the mean over this rank's rows.
            `rows_without_negatives`: of the global batch, with loss 0 and gradient 0.
        """
        pairs = Pairs.over_ranks(batch.group_ids[:, 0], batch.sample_id, self.tile)
        total = torch.zeros_like(features["image_features"][0, 0])
        alone = torch.zeros(())
        for view, others in (("image_features", "keys_1"), ("image_features_1", "keys")):
            queries = functional.normalize(self.predictor(features[view]), dim=-1)
            losses, alone = self._row_losses(queries, collectives.gather(features[others]), pairs)
            total = total + losses.mean()
        return {
            "loss": 2.0 * self.temperature * total,
            "rows_without_negatives": collectives.all_reduce_sum(alone.sum()),
        }
