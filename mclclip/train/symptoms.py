"""Warnings of known failures of a training, each once, with the remedy.

``FAILURES`` is the table. A warning follows once a failure's condition has held in ``ROWS``
consecutive rows of metrics.jsonl, over at least ``STEPS`` steps and 1/50 of the training. Only rows
decide, so a resumed training, which reads its rows again, warns as an undisturbed one does.
``FAR_FROM_BASE`` is checked once, at the first step.

Steps that write a row add three figures, computed from the step's features over all ranks:

    chance_loss       the loss of this batch if all features were equal (``Objective.chance``)
    feature_spread    1 - |mean|^2 of unit features, which is the mean of 1 - cosine over all pairs
                      of the global batch: 0 if all are equal; of images and texts the smaller one
    top_answer_share  the share of ``QUERIES`` samples, spread evenly over the global batch, that
                      have the same nearest counterpart; of both directions the larger one
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from mclclip.engines.engine import Engine
from mclclip.models.towers import PatchDropout
from mclclip.ranks import collectives
from mclclip.run.recorder import Recorder

log = logging.getLogger("mclclip")

ROWS, STEPS, SHARE = 5, 50, 50
QUERIES = 256
# Shares of the way of a loss from chance to 0:
AT_CHANCE = 0.02  # below it, nothing is learned
FROM_CHANCE = 0.2  # a loss must have held it before a later rise counts as lost
BASE_LEARNED = 0.1  # the base must have it for a first step to be called far from the base
ONE_ANSWER = 0.9
# Random weights begin with a spread of about 0.01; a training that has collapsed is below 0.001.
ALIKE = 0.002
AT_LIMIT, BELOW_LIMIT = 0.999, 0.9  # of the largest logit scale
_HELD = 3  # consecutive rows that a level must last to count as reached

Row = Mapping[str, float]


# --- the table ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """A known failure: its name, its condition in a row, its message and its remedy.

    {names} in message and remedy are fields of the row. ``may_begin``: a healthy training may show
    this at its start, so rows of the warm-up do not count.
    """

    name: str
    holds: Callable[[Row, Course], bool]
    message: str
    remedy: str
    may_begin: bool = False


class Course:
    """The course of a training, as its rows have shown it so far.

    steps         how many steps a failure must last
    limit         largest logit scale; None: it is not trained
    first         the first row
    learned       share of the way from chance to 0 that the loss has come (from the first row's
                  loss if chance is unknown); None if the loss is not finite
    most_learned  the largest ``learned`` that lasted for ``_HELD`` rows, or that of the first row
    """

    def __init__(self, steps: int = STEPS, limit: float | None = None) -> None:
        self.steps, self.limit = steps, limit
        self.first: Row | None = None
        self.learned: float | None = None
        self.most_learned = 0.0
        self._last_learned: deque[float] = deque(maxlen=_HELD)
        self._last_lr = math.inf
        self._since: dict[str, tuple[int, int]] = {}  # first step and number of rows that hold
        self._told: set[str] = set()

    def take(self, row: Row) -> list[Failure]:
        """Adds a row and returns the failures that have now lasted long enough to warn of."""
        row = {name: math.nan if value is None else value for name, value in row.items()}
        self.first = self.first or row
        from_loss = row.get("chance_loss", self.first["loss"])
        learned = 1.0 - row["loss"] / from_loss if from_loss > 0.0 else math.nan
        self.learned = learned if math.isfinite(learned) else None
        if self.learned is not None:
            self._last_learned.append(self.learned)
        if len(self._last_learned) in (1, _HELD):  # the first row is of the base, nearly
            self.most_learned = max(self.most_learned, min(self._last_learned))
        rising, self._last_lr = row["lr"] > self._last_lr, row["lr"]
        return [each for each in FAILURES if self._lasts(each, row, rising)]

    def _lasts(self, failure: Failure, row: Row, rising: bool) -> bool:
        counts = failure.name not in self._told and not (rising and failure.may_begin)
        if not counts or not failure.holds(row, self):
            self._since.pop(failure.name, None)
            return False
        first, number = self._since.get(failure.name, (int(row["step"]), 0))
        self._since[failure.name] = first, number + 1
        lasts = number + 1 >= ROWS and row["step"] - first >= self.steps
        if lasts:
            self._told.add(failure.name)
        return lasts


def logit_scale(row: Row) -> float:
    """Returns the largest logit scale among a row's terms of the loss; 0 without one."""
    return max((v for n, v in row.items() if n.rpartition("/")[2] == "logit_scale"), default=0.0)


def _stands_at_chance(row: Row, course: Course) -> bool:
    return "chance_loss" in row and course.learned is not None and abs(course.learned) < AT_CHANCE


def _is_at_limit(row: Row, course: Course) -> bool:
    """Returns True if the logit scale rose to its limit; pretrained CLIPs begin there."""
    assert course.first is not None
    limit = course.limit or math.inf
    began = logit_scale(course.first) < BELOW_LIMIT * limit
    return began and logit_scale(row) >= AT_LIMIT * limit


def _has_lost(row: Row, course: Course) -> bool:
    if course.learned is None or course.most_learned < FROM_CHANCE:
        return False
    return course.learned < course.most_learned / 2


def _is_far(row: Row, course: Course) -> bool:
    of_base, of_first = (row["chance_loss"] - row[name] for name in ("base_loss", "first_loss"))
    return of_base > BASE_LEARNED * row["chance_loss"] and of_first < of_base / 2


FAILURES = (
    Failure(
        "loss_at_chance",
        _stands_at_chance,
        "the loss stands at {loss:.3f}, and features that say nothing have {chance_loss:.3f} (the "
        "logarithm of the number of candidates, for InfoNCE)",
        "see that captions fit their images and differ within a batch ('mclclip doctor --data "
        "CONFIG'), raise lr or unlock more (lock) where little can move, lower lr where the "
        "loss was below",
        may_begin=True,
    ),
    Failure(
        "one_answer",
        lambda row, course: row.get("top_answer_share", 0.0) >= ONE_ANSWER,
        "{top_answer_share:.0%} of the samples have one and the same nearest counterpart",
        "see that images and captions of a batch differ ('mclclip doctor --data CONFIG'), "
        "lower lr, or start from pretrained weights",
        may_begin=True,
    ),
    Failure(
        "logit_scale_at_limit",
        _is_at_limit,
        "the logit scale has risen to its limit, {scale:.4g}: the loss is lowered by sharper "
        "softmaxes, no longer by better features",
        "set lock.logit_scale=false or a fixed objective.temperature, look for repeated samples, "
        "or end the training earlier",
    ),
    Failure(
        "features_collapse",
        lambda row, course: row.get("feature_spread", 1.0) < ALIKE,
        "the features are nearly one vector: 1 - cosine is {feature_spread:.2g} in the mean",
        "lower lr or weight_decay, raise the temperature, or unlock fewer blocks",
        may_begin=True,
    ),
    Failure(
        "lr_too_high",
        _has_lost,
        "the loss has risen to {loss:.3f}, and more than half of what had been learned is lost",
        "lower lr ({lr:.3g} now), raise warmup, or set clip_grad_norm",
    ),
)
FAR_FROM_BASE = Failure(
    "far_from_base",
    _is_far,
    "the loss of the first step is {first_loss:.3f}, and the same weights as they were given have "
    "{base_loss:.3f} on the same batch ({chance_loss:.3f} is chance): in training the model "
    "computes something else",
    "set lock.image_norm=false where batch norms take the batch's statistics in place of the "
    "base's, and lower dropout and patch_dropout",
)


# --- what is watched ---------------------------------------------------------------------------


class Symptoms:
    """Watches one training and warns of failures, in the log and in warnings.jsonl.

    ``module`` is a ``ModelWithObjective``. All ranks call the methods at the same steps. Nothing of
    the training changes.
    """

    def __init__(self, module: Any, engine: Engine, recorder: Recorder) -> None:
        self.module, self.engine, self.recorder = module, engine, recorder
        self._base: Tensor | None = None  # loss of the weights as they were given
        self.course = Course(max(STEPS, recorder.total // SHARE), _limit(module))
        for row in recorder.earlier_rows():  # the earlier process has warned of what they show
            self.course.take(row)

    def before(self, batch: Any) -> None:
        """Before the first step, measures the base's loss in evaluation mode on the step's batch,
        if batch norms or dropout make the model compute something else in training.

        Skipped where batches are drawn by pseudo labels: there batch norms remove from the features
        what the samples of a group share, which a stage of MCL wants.
        """
        differs = any(map(_has_two_modes, self.module.model.modules()))
        if batch.step == 0 and batch.prefix_length == 0 and differs:
            self.module.model.eval()
            self._base = self.engine.measure(batch)["loss"]
            self.module.model.train()

    def figures(self, done: int, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the figures (0-dimensional) of step number ``done`` if it writes a row, else
        an empty mapping."""
        (features, batch), self.module.seen = self.module.seen, None
        base, self._base = self._base, None
        if base is None and not self.recorder.is_row_due(done):
            return {}
        with torch.no_grad():
            chance = self.module.objective.chance(features, batch, parts)
            if base is not None and chance is not None:
                self._compare(parts["loss"], base, chance)
            figures = {} if chance is None else {"chance_loss": chance}
            # Where samples of a class belong together, another's counterpart may be the nearest.
            pairs = chance is not None or batch.classes is None
            return figures | _of_features(features, pairs)

    def warn_of(self, row: Row | None) -> None:
        """Warns of the failures that have lasted long enough with this row; None: no row."""
        for failure in self.course.take(row) if row else ():
            assert row is not None
            self._warn(failure, {**row, "scale": logit_scale(row)})

    def _compare(self, *losses: Tensor) -> None:
        """Logs the losses of the first step, of the base and of chance; warns if the first step is
        far from the base."""
        losses = tuple(each.double().reshape(()) for each in losses)
        means = collectives.all_reduce_sum(torch.stack(losses)) / collectives.world_size()
        names = "first_loss", "base_loss", "chance_loss"
        row = dict(zip(names, means.tolist(), strict=True)) | {"step": 1}
        log.info(
            "the first step's loss is {first_loss:.4f}; the same weights have {base_loss:.4f} in "
            "evaluation mode, and features that say nothing {chance_loss:.4f}".format(**row)
        )
        if _is_far(row, self.course):
            self._warn(FAR_FROM_BASE, row)

    def _warn(self, failure: Failure, row: Row) -> None:
        text = f"{failure.message.format(**row)}: {failure.remedy.format(**row)}"
        self.recorder.warn(int(row["step"]), failure.name, text)


def _limit(module: nn.Module) -> float | None:
    """Returns the largest logit scale that training allows; None if it is not trained."""
    bounds = [
        bound
        for module in module.modules()
        for name, bound in getattr(module, "upper_bounds", {}).items()
        if module.get_parameter(name).requires_grad
    ]
    return math.exp(min(bounds)) if bounds else None


def _has_two_modes(module: nn.Module) -> bool:
    """Returns True if a module is in training mode and computes something else in evaluation."""
    drops = isinstance(module, _DropoutNd) and module.p > 0.0
    return module.training and (drops or isinstance(module, _BatchNorm | PatchDropout))


# --- figures of features -----------------------------------------------------------------------


def _of_features(features: Mapping[str, Tensor], pairs: bool) -> dict[str, Tensor]:
    """Returns ``feature_spread`` and, with ``pairs``, ``top_answer_share``. The counterpart of an
    image is its momentum copy's feature, its caption's, or its other view's."""
    others = ("keys", "text_features", "image_features_1") if pairs else ()
    second = next((features[name] for name in others if name in features), None)
    sides = [features["image_features"]] + ([] if second is None else [second])
    figures = {"feature_spread": torch.stack([_spread(side) for side in sides]).min()}
    if len(sides) == 2 and sides[0].shape == sides[1].shape:
        cosines = _sampled(sides[0]) @ _sampled(sides[1]).T
        shares = [_top_share(cosines), _top_share(cosines.T)]
        figures["top_answer_share"] = torch.stack(shares).max()
    return figures


def _spread(features: Tensor) -> Tensor:
    """Returns 1 - |mean|^2 of the features [b, D] of all ranks, in float64."""
    total = collectives.all_reduce_sum(features.double().sum(dim=0))
    mean = total / (len(features) * collectives.world_size())
    return (1.0 - mean.square().sum()).clamp_min(0.0)


def _sampled(features: Tensor) -> Tensor:
    """Takes each rank's features [b, D] and returns [n, D] on all ranks: at most ``QUERIES`` rows,
    spread evenly over the global batch."""
    num = len(features) * collectives.world_size()
    places = torch.linspace(0, num - 1, min(num, QUERIES), dtype=torch.float64).long()
    rows_here = places - collectives.rank() * len(features)
    mine = (rows_here >= 0) & (rows_here < len(features))
    rows = features.new_zeros(len(places), features.shape[1])
    rows[mine.to(rows.device)] = features[rows_here[mine].to(rows.device)]
    return collectives.all_reduce_sum(rows)


def _top_share(cosines: Tensor) -> Tensor:
    """Returns the share of the rows whose largest cosine is in the most frequent column."""
    answers = torch.bincount(cosines.argmax(dim=1), minlength=cosines.shape[1])
    return answers.max() / len(cosines)
