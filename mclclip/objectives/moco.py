"""MoCo: an image's view picks the features that a momentum copy has of the image's other view.

The momentum copy has the model's architecture, and weights that are a moving average of the
model's. Let x_p be the unit feature of a view, k_p the copy's of the image's other view (its key),
and tau the temperature:

    L_p = -log( exp(x_p . k_p / tau) /
                (exp(x_p . k_p / tau) + sum over other keys k of exp(x_p . k / tau)) )

``v2``  compares first views with a queue of keys of earlier steps. Loss and queue are MoCo's; v2
        changed projector, augmentation and learning rate, and set the temperature to 0.2.
``v3``  compares both views with the keys of the global batch. It has no queue, and a predictor on
        the queries. The loss is 2 tau times the sum of both directions.

Both have MCL's group mask (its Eq. 3): a key is a negative of a row if its group is the row's and
its sample is not. Entries of the queue carry group and sample. At some steps (back-off) groups are
made of fewer stages' labels, and numbers of such groups cannot be compared with others; so only
keys of steps with the same prefix length are negatives.

Source: He et al., "Momentum Contrast for Unsupervised Visual Representation Learning" (MoCo, CVPR
2020), arXiv:1911.05722, Eq. 1 and Algorithm 1; Chen et al., "Improved Baselines with Momentum
Contrastive Learning" (v2, 2020), arXiv:2003.04297; Chen et al., "An Empirical Study of Training
Self-Supervised Vision Transformers" (v3, ICCV 2021), arXiv:2104.02057, Algorithm 1.

Inputs: two views of every image; ``image_features`` and ``keys`` [b, D] of this rank, with v3
``image_features_1`` and ``keys_1`` too; ``group_ids`` [b, 1] and ``sample_id`` [b]. Captions are
not read.

Use it for views where batches are small: the queue supplies the negatives. It costs the memory of a
second model and a forward pass. With C groups about 1/C of the queue counts for a row. ZeRO-3
(``engine.zero_stage: 3``) cannot hold the copy.

Relations: ``nt_xent`` compares views without a copy. With ``epsilon`` above 0 the loss of a row is
that of ``ifm`` at alpha = 1, as IFM-MoCo-v2 (arXiv:2106.11230, section 4.2). ``simlap`` takes the
same copy with ``momentum``.

Departures. From MoCo: the queue starts empty instead of with noise, and empty entries are masked;
its size need not be a multiple of the batch; earlier keys of the same sample are not negatives.
From MoCo-v3's code: features have unit length before the predictor too, because models return them
so. In both versions the copy moves after a step, not before the next one, which gives the same
keys.

Example: ``train.objective={kind: moco, queue_size: 16384, temperature: 0.2}``.

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
from mclclip.objectives.pairs import TILE, Pairs
from mclclip.objectives.row_losses import log_sums, row_losses, to_fp32
from mclclip.ranks import collectives
from mclclip.util.options import STRICT, Share

_QUEUE_SIZE = 65_536
Schedule = Literal["constant", "cosine"]
_NO_GROUP = torch.iinfo(torch.int64).min  # of keys that are negatives of no row


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """Two views of an image, one of them encoded by a momentum copy of the model."""

    kind: Literal["moco"] = "moco"
    """Which objective."""
    version: Literal["v2", "v3"] = "v2"
    """``v2``: keys come from a queue of earlier steps; ``v3``: from the batch, in both
    directions."""
    queue_size: PositiveInt | None = None
    """v2: keys in the queue, at least ``global_batch`` (null: 65,536)."""
    momentum: Share | None = None
    """Weight of the old average in a step of the copy (null: 0.999 with v2, 0.99 with v3)."""
    momentum_schedule: Schedule | None = None
    """``constant``; or ``cosine``, which rises from ``momentum`` to 1 (null: constant with v2,
    cosine with v3)."""
    temperature: PositiveFloat | None = None
    """Cosines are divided by it (null: 0.2 with v2, 1.0 with v3)."""
    predictor: list[PositiveInt] | None = None
    """v3: widths of the predictor's layers, such as [4096, 256]; the last is that of the features
    (null: no predictor)."""
    epsilon: NonNegativeFloat = 0.0
    """How far the cosines of keys are moved against the loss, as in ``ifm``; 0: not at all."""
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
        """Number of keys in the queue; 0 without one."""
        return (self.queue_size or _QUEUE_SIZE) if self.version == "v2" else 0

    @property
    def reads(self) -> Reads:
        """Reads two views and groups; follows the model's weights; keeps a queue."""
        return Reads(num_views=2, groups=True, follows_weights=True, queue_size=self.num_queued)

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """Returns the loss with a momentum copy of the model."""
        return (QueuedKeys if self.version == "v2" else BatchKeys)(self, inputs)


def new_predictor(
    dim: int, widths: Sequence[int], seed: int, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    """Returns MoCo-v3's predictor of features [b, dim] -> [b, widths[-1]].

    It has linear layers without bias, a batch norm after each, and a ReLU between layers; the last
    batch norm has no weights. The seed gives its initial weights, the same on every rank. Raises
    ValueError if ``widths`` does not end in ``dim``.
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
    """A copy of ``model`` (an encoder with its projector) without gradients.

    Its weights are a moving average of the model's (MoCo, section 3.2, "Momentum update"). It is a
    submodule of an objective, so that checkpoints hold it. ``begin`` is called before a step;
    calling the copy gives features; ``stepped`` is called once the optimizer has moved the model:
    ``weight <- m * weight + (1 - m) * model's weight``, for every trained parameter.

    Buffers are not averaged, as in MoCo's code. The copy's batch norms are in the mode of the
    model's: in training they normalize by the batch that the copy sees, and their running
    statistics are of the copy's features. MoCo shuffles samples over the GPUs, because the
    statistics of one GPU would tell a query which key is its own. Here engines compute the
    statistics of all batch norms over the global batch, as MoCo-v3 does, so nothing is shuffled.

    Frozen parameters are copied too, and so is a text tower, though it never runs. Factors of
    adapters (LoRA) are averaged one by one. Blocks that torch has compiled run uncompiled in the
    copy. FSDP2 shards the copy in one piece, so that every rank holds all of it during a step.
    ZeRO-3 cannot hold it, because its ranks have parameters neither whole nor as a DTensor.
    """

    def __init__(self, model: nn.Module, base: float, schedule: Schedule = "constant") -> None:
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.base, self.schedule = base, schedule
        self.momentum = base

    def train(self, mode: bool = True) -> Self:
        """Leaves the copy's modules in the modes (training or evaluation) that they were copied
        in."""
        self.training = mode
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Returns the features [b, D] of images [b, C, H, W], unit length, without gradient."""
        features: Tensor = self.model(image=images)["image_features"]
        return features

    def keys(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns the features of two views, ``keys`` and ``keys_1`` [b, D], without gradient."""
        first, second = views
        return {"keys": self(first), "keys_1": self(second)}

    def begin(self, step: int, total: int, epoch: float = 0.0) -> None:
        """Sets the momentum of the update that follows ``step``, one of ``total`` steps.

        ``constant``: ``base``. ``cosine``: 1 - (1 - base) (1 + cos(pi (step + 1) / total)) / 2,
        which rises from ``base`` to 1 (BYOL, arXiv:2006.07733, and MoCo-v3). MoCo-v3's code moves
        the copy before a step and counts the steps before it, which gives the same sequence.
        """
        self.momentum = self.base
        if self.schedule == "cosine":
            share = (1.0 + math.cos(math.pi * (step + 1) / total)) / 2.0
            self.momentum = 1.0 - (1.0 - self.base) * share

    @torch.no_grad()
    def stepped(self, model: nn.Module) -> None:
        """Moves the copy's weights towards those of ``model``."""
        both = zip(self.model.parameters(), model.parameters(), strict=True)
        trained = [(old, new) for old, new in both if new.requires_grad]
        if trained:
            old, new = map(list, zip(*trained, strict=True))
            torch._foreach_lerp_(old, new, 1.0 - self.momentum)


class _WithCopy(Objective):
    """Shared part of both versions: the momentum copy, and the loss of rows among keys.

    Similarities are computed in tiles of at most ``tile`` rows and columns.
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
        """Returns L_p of each row, [b], or its IFM loss, of features [b, D] among keys [B, D]; and
        which rows have no negatives, bool [b]."""
        queries, keys = to_fp32(features) / self.temperature, to_fp32(keys)
        if not self.epsilon:
            return row_losses(queries, keys, pairs)
        (negatives,) = log_sums(queries, keys, pairs)
        positives = pairs.positive_logits(queries, keys)
        shift = self.epsilon / self.temperature
        weights = (0.0, 1.0) if self.term == "modified" else (0.5, 0.5)
        return modified_losses(negatives, positives, shift, weights), negatives == float("-inf")


class QueuedKeys(_WithCopy):
    """MoCo's loss with a queue: a ring buffer of the keys of global batches, in the order of ranks.

    ``queue`` is [Q, D]. Its keys have ``queue_groups``, ``queue_sample_ids`` and
    ``queue_prefix_lengths``, [Q] each (-1: not filled yet). All are the same on every rank. The
    keys of the next batch go to ``position``.
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
        """Computes the loss of this rank's rows among their own keys and the queue.

        Args:
            features: `image_features` and `keys` [b, D], unit length, of this rank; row i of both
                is one sample.
            batch: `group_ids` [b, 1], the group of each sample at `prefix_length`; `sample_id` [b].

        Returns:
            `loss`: mean of L_p over this rank's rows. `rows_without_negatives`: number of samples
            of the global batch with loss 0 and gradient 0; all of them while the queue is empty.
        """
        keys = to_fp32(features["keys"].detach())
        groups, sample_id = batch.group_ids[:, 0], batch.sample_id
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
        losses, has_none = self._row_losses(features["image_features"], columns, pairs)
        return {
            "loss": losses.mean(),
            "rows_without_negatives": collectives.all_reduce_sum(has_none.sum()),
        }

    @torch.no_grad()
    def stepped(self, model: nn.Module) -> None:
        """Moves the copy, and replaces the queue's oldest keys by those of the global batch."""
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
    """MoCo-v3's loss: each view among the copy's features of the global batch's other views."""

    def __init__(self, options: Options, inputs: ObjectiveInputs) -> None:
        super().__init__(options, inputs)
        self.predictor: nn.Module = nn.Identity()
        if options.predictor:
            dim = inputs.model.feature_dim
            self.predictor = new_predictor(dim, options.predictor, inputs.seed, inputs.dtype)

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Adds the model's features of both views, and the copy's as ``keys`` and ``keys_1``."""
        return encode(model, batch, features) | self.copy.keys(batch.views)

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Computes the loss of this rank's rows over the global batch.

        Args:
            features: `image_features` and `image_features_1` [b, D], unit length, of this rank's
                two views; `keys` and `keys_1` [b, D], the copy's features of the same views.
            batch: `group_ids` [b, 1], the group of each sample at the step's prefix length;
                `sample_id` [b].

        Returns:
            `loss`: 2 tau times the sum over both directions of the mean of L_p over this rank's
            rows. `rows_without_negatives`: number of samples of the global batch with loss 0 and
            gradient 0 (both directions have the same).
        """
        pairs = Pairs.over_ranks(batch.group_ids[:, 0], batch.sample_id, self.tile)
        total = torch.zeros_like(features["image_features"][0, 0])
        has_none = torch.zeros(())
        for view, others in (("image_features", "keys_1"), ("image_features_1", "keys")):
            queries = functional.normalize(self.predictor(features[view]), dim=-1)
            losses, has_none = self._row_losses(
                queries, collectives.gather(features[others]), pairs
            )
            total = total + losses.mean()
        return {
            "loss": 2.0 * self.temperature * total,
            "rows_without_negatives": collectives.all_reduce_sum(has_none.sum()),
        }
