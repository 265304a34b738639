"""The training loop, which ``verbs.train`` calls and which calls an engine at every step.

All methods share ``Trainer``. Each step it reads a batch, updates the weights, records and saves.
Between steps it evaluates a checkpoint if one is due, and ends if the ranks agreed to leave.

Everything at step t is a function of t, so a run that resumes at t repeats an uninterrupted one.

An evaluation after step t reads the checkpoint of step t, which is saved first, and changes nothing
of the training. That checkpoint holds the figures of earlier evaluations only. So a training that
resumes at step t evaluates step t again, with the same figures, and then goes on or ends as an
undisturbed one does.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mclclip.checkpoint.checkpoints import Checkpoints, Stateful
from mclclip.data.batches import Batch
from mclclip.engines.engine import HALF, Engine
from mclclip.models.model import Model
from mclclip.models.transforms import normalize
from mclclip.objectives.base import Objective
from mclclip.ranks import failures, signals
from mclclip.ranks.process_group import seed_everything, without_limit
from mclclip.ranks.step_boundary import StepBoundary
from mclclip.run.recorder import NotFinite, Recorder, StepProfiler
from mclclip.train.options import EvaluateConfig
from mclclip.train.symptoms import Symptoms

log = logging.getLogger("mclclip")

# Seconds to copy checkpoints to the mirror when the run must leave; the next start copies the rest.
MIRROR_S = 60.0
MODEL = "model"  # name of the model within a ModelWithObjective, and so in checkpoints


Evaluate = Callable[[int], Mapping[str, float]]
"""Takes a step and returns the figures of its checkpoint by name, the same on all ranks. All ranks
call it together."""


class ModelWithObjective(nn.Module):
    """Model and objective as one module, so that engine and optimizer see the parameters of both.

    ``precision``: under ``bf16`` and ``fp16`` the model runs in autocast.
    """

    def __init__(self, model: Model, objective: Objective, precision: str = "fp32") -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.precision = precision
        # The features of the last forward pass, without gradients, and its batch; for ``Symptoms``.
        self.seen: tuple[dict[str, Tensor], Batch] | None = None
        # The dtype in which the model's frozen blocks return the rows that stand for images.
        self._rows_dtype: torch.dtype | None = None
        if model.first_block:
            weight = next(model.parameters())
            image = torch.zeros(1, *model.image_shape, dtype=weight.dtype, device=weight.device)
            with torch.no_grad(), self._autocast(weight.device):
                blocks = min(model.first_block, model.num_blocks)
                self._rows_dtype = model.encode_trunk(image, blocks).dtype

    def forward(
        self,
        batch: Batch,
        finish: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        features: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Returns this rank's {"loss": ..., parts}.

        ``features`` are used instead of those of the batch if they are known already. ``finish``
        takes the features by name, and its result is returned instead of a loss; both serve
        gradient caching (``engines.gradient_cache``)."""
        if features is None:
            with self._autocast(batch.views[0].device):
                features = self.objective.features(self.model, batch, {})
        if finish is not None:
            return finish(features)
        self.seen = {name: value.detach() for name, value in features.items()}, batch
        parts: dict[str, Tensor] = self.objective(features, batch)
        return parts

    def on_device(self, batch: Batch, device: torch.device) -> Batch:
        """Returns a copy of the batch on ``device``. Views of uint8 (pixels from 0 to 255) are
        normalized as the model expects. Under ``float64`` all its numbers become float64."""
        batch = batch.to(device)
        views = []
        for view in batch.views:
            if self._rows_dtype is not None:
                view = view.to(self._rows_dtype)
            if view.dtype == torch.uint8:
                colours = self.model.config["preprocess_cfg"]
                view = normalize(view, colours["mean"], colours["std"])
            views.append(view.double() if self.precision == "float64" else view)
        batch.views = views
        if self.precision == "float64":
            if batch.text is not None and batch.text.is_floating_point():
                batch.text = batch.text.double()
            if batch.text_features is not None:
                batch.text_features = batch.text_features.double()
            doubled = {n: t.double() for n, t in batch.extras.items() if t.is_floating_point()}
            batch.extras |= doubled
        return batch

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        dtype = HALF.get(self.precision)
        return torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext()


@contextlib.contextmanager
def hold_garbage_collector() -> Iterator[None]:
    """Python's garbage collector does not run by itself in the block. There it would halt a step,
    on one rank at a time, while all others wait. Objects that exist already are left out of
    collections that the block asks for, so these take a millisecond."""
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@dataclass
class PeriodicEvaluation:
    """The evaluations of one training of ``total`` steps, every ``every`` steps and after the last.

    ``options.metric`` names the figure by which the best checkpoint is chosen; of equal figures the
    earliest is the best, and ``is_loss`` says that smaller ones are better. Without a metric,
    figures are only recorded. Checkpoints hold the figures (``values``) beside the state of
    ``engine``.
    """

    engine: Stateful
    evaluate: Evaluate
    options: EvaluateConfig
    every: int
    total: int
    is_loss: bool = False
    values: list[float] = field(default_factory=list)

    def is_due(self, done: int) -> bool:
        """Returns True if the checkpoint after ``done`` steps is evaluated."""
        return done > 0 and (done % self.every == 0 or done == self.total)

    def measure(self, done: int) -> Mapping[str, float]:
        """Evaluates the checkpoint after ``done`` steps and returns its figures by name.

        Raises ValueError if ``metric`` is none of them.
        """
        figures, metric = self.evaluate(done), self.options.metric
        if metric is None:
            return figures
        if metric not in figures:
            raise ValueError(
                f"evaluate.metric={metric!r} is not measured: name one of {', '.join(figures)}"
            )
        num_before = (done - 1) // self.every  # a resumed training evaluates its first step again
        self.values = [*self.values[:num_before], float(figures[metric])]
        return figures

    @property
    def best_step(self) -> int | None:
        """The first step with the best figure so far; None without a metric or a figure."""
        if not self.values:
            return None
        best = min(self.values) if self.is_loss else max(self.values)
        return min((self.values.index(best) + 1) * self.every, self.total)

    @property
    def exported_step(self) -> int | None:
        """The step whose checkpoint is kept and exported; None: the last step."""
        return self.best_step if self.options.best else None

    @property
    def patience_is_over(self) -> bool:
        """True if the last ``patience`` evaluations brought no better figure."""
        if self.options.patience is None or (best := self.best_step) is None:
            return False
        return len(self.values) - -(-best // self.every) >= self.options.patience

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the engine's state and the figures so far. The figures fill a tensor whose shape
        does not depend on how many there are. A collective."""
        state = self.engine.state_dict()
        if self.options.metric is None:
            return state
        values = torch.zeros(-(-self.total // self.every), dtype=torch.float64)
        values[: len(self.values)] = torch.tensor(self.values, dtype=torch.float64)
        count = torch.tensor(len(self.values))
        return {**state, "evaluation.values": values, "evaluation.count": count}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads a state that ``state_dict`` returned; a collective."""
        state = dict(state)
        if self.options.metric is not None:
            count = int(state.pop("evaluation.count"))
            self.values = state.pop("evaluation.values")[:count].tolist()
        self.engine.load_state_dict(state)


@dataclass(kw_only=True)
class Trainer:
    """Runs the steps of one training, from ``recorder.start`` to ``recorder.total``.

    module             model and objective, which the engine runs
    batches            this rank's batches of these steps, in order
    learning_rate      step -> learning rate
    checkpoints        saves and finds the states of steps
    recorder           writes rows of metrics; its ``start`` and ``total`` are the steps
    symptoms           warns of known failures
    boundary           agrees with the other ranks, between steps, to leave or to save
    seed_words         integers that seed dropout, together with the step and the rank
    checkpoint_every   steps between checkpoints
    profiler           traces the steps that the options name
    evaluation         evaluates the checkpoints of some steps; None: no evaluations
    compile_steps      steps that compile the model, for which ranks wait without a limit
    done               number of finished steps, counted from the start of the whole training
    """

    module: ModelWithObjective
    engine: Engine
    batches: Iterable[Batch]
    checkpoints: Checkpoints
    recorder: Recorder
    symptoms: Symptoms
    boundary: StepBoundary
    learning_rate: Callable[[int], float]
    seed_words: tuple[int, ...]
    checkpoint_every: int
    profiler: StepProfiler
    evaluation: PeriodicEvaluation | None = None
    compile_steps: Set[int] = frozenset()
    done: int = field(init=False)

    def __post_init__(self) -> None:
        self.done = self.recorder.start

    def run(self) -> int:
        """Trains, and returns the number of the last step. It is below ``recorder.total`` if
        evaluations ended the training early.

        Raises Preempted, with everything saved, if the ranks agreed to leave. Raises RuntimeError
        with one line, on all ranks, if the training has diverged; a state that is not finite is
        never saved.
        """
        held = hold_garbage_collector()
        with held, signals.defer_requests(), contextlib.closing(self.recorder), self._errors():
            # A training that resumes at a step that is evaluated evaluates it again.
            if not self._evaluate():
                self._take_steps()
            decision = self.boundary.finish()
            self.checkpoints.wait()
            if decision.leave is not None:
                raise decision.make_error()
        return self.done

    def _take_steps(self) -> None:
        for batch in self.recorder.read_batches(self.batches):
            self._step(batch)
            if self._evaluate():
                self.recorder.end_epoch(self.done, leaving=True)
                return
            if self.done == self.recorder.total:
                continue  # so that the loader ends its workers
            decision = self.boundary.decide()  # all ranks decide the same
            if decision.leave is not None or decision.save:
                self._save(self.done)
            if decision.leave is not None:
                self.checkpoints.wait(mirror_s=MIRROR_S)
                self.recorder.end_epoch(self.done, leaving=True)
                self.boundary.finish()
                raise decision.make_error()

    # ---------------------------------------------------------------------------------------------
    # One step, on every rank: batch, forward, backward, step, record, save

    def _step(self, batch: Batch) -> None:
        objective, context, step = self.module.objective, self.engine.context, batch.step
        compiles = step in self.compile_steps
        with without_limit() if compiles else contextlib.nullcontext(), self.profiler.step(step):
            batch = self.module.on_device(batch, context.device)
            seed_everything(*self.seed_words, step, context.rank)  # of dropout
            objective.begin(step, self.recorder.total, step / self.recorder.steps_per_epoch)
            self.symptoms.before(batch)
            lr = self.learning_rate(step)
            parts = self.engine.update(batch, lr)  # forward, backward, optimizer
            parts |= self.symptoms.figures(step + 1, parts)
            objective.stepped(self.module.model)  # momentum copies follow the weights
        done = step + 1
        self.symptoms.warn_of(self.recorder.take(done, parts, lr))
        if done % self.checkpoint_every == 0 or done == self.recorder.total:
            self._save(done)
        self.recorder.end_epoch(done)
        if self.recorder.is_row_due(done):
            gc.collect()  # of the few objects that are new since the loop began
        self.done = done

    # ---------------------------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Saves and evaluates the present state if an evaluation is due; returns True if the
        training ends here."""
        done = self.done
        if self.evaluation is None or not self.evaluation.is_due(done):
            return False
        self._save(self.done)
        self.checkpoints.wait(mirror_s=0.0)
        since = time.perf_counter()
        figures = self.evaluation.measure(done)
        gc.collect()
        self.recorder.write_evaluation(done, figures, time.perf_counter() - since)
        self.checkpoints.best = self.evaluation.exported_step
        if self.evaluation.patience_is_over:
            log.info(
                "step %d is the last: %s was best at step %s",
                done, self.evaluation.options.metric, self.evaluation.best_step,
            )  # fmt: skip
        return self.evaluation.patience_is_over

    def _save(self, done: int) -> None:
        """Saves the state after ``done`` steps, unless it is saved already."""
        try:
            self.checkpoints.save(done, self.evaluation or self.engine)
        except NotFinite:
            # Raises the first bad step since the last row of metrics, if there is one.
            self.recorder.raise_if_diverged(done)
            raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns errors of the block into one line for the user. Where the training has diverged,
        waits for the checkpoint that is being written (a collective)."""
        try:
            yield
        except NotFinite as error:
            self.boundary.finish()
            try:
                self.checkpoints.wait(mirror_s=MIRROR_S)
            except RuntimeError as failure:  # then an older checkpoint is the last
                log.warning("%s", failure)
            clip, saved = self.engine.clip_grad_norm, self.checkpoints.steps()
            remedy = "set clip_grad_norm" if clip is None else f"clip_grad_norm ({clip:g})"
            last = "no checkpoint had been saved"
            if saved:
                last = "the last good checkpoint, from which the same command goes on, is step "
                last += str(saved[-1])
            raise RuntimeError(
                f"{error} ({self.recorder.name}): lower lr "
                f"({self.learning_rate(error.step - 1):.3g} there) or {remedy}; {last} in "
                f"{self.checkpoints.directory}. Other settings want another run directory, or "
                "--force to move this training aside and make it again"
            ) from error
        except RuntimeError as error:
            if (lost := failures.as_lost(error, f"in step {self.done + 1}")) is error:
                raise
            raise lost from error
