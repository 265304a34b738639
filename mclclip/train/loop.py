"""The training loop, one for every method: read a step, update, record, save, or leave.

Everything at step t is a function of t, so a run that resumes at t repeats an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mclclip.checkpoint import Checkpoints
from mclclip.data.batches import Batch
from mclclip.engines.engine import HALF, Engine
from mclclip.engines.gradient_cache import Pullback
from mclclip.models.model import Model
from mclclip.objectives.base import Objective
from mclclip.ranks import data_wait, peer_watch, signals
from mclclip.ranks.finiteness import NotFinite
from mclclip.ranks.process_group import seed_everything
from mclclip.ranks.signals import Preempted
from mclclip.ranks.step_boundary import StepBoundary
from mclclip.run import runlog
from mclclip.run.profiling import StepProfiler
from mclclip.run.recorder import Recorder
from mclclip.train.judging import Judging, Together

log = logging.getLogger("mclclip")

MIRROR_S = 60.0  # time for the mirror when the run must leave; the next start copies the rest
MODEL = "model"  # name of the model within a Trainee, and so in checkpoints


class Trainee(nn.Module):
    """Model and objective as one module, so that engine and optimizer see both's parameters.

    It can be trained in micro-batches (``engines.gradient_cache``). ``precision``:
    ``bf16`` and ``fp16`` are autocast around the model.
    """

    def __init__(self, model: Model, objective: Objective, precision: str = "fp32") -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.precision = precision

    def forward(
        self, batch: Batch, only_features: bool = False, pullback: Pullback | None = None
    ) -> dict[str, Tensor]:
        """This rank's loss and parts by name; or features; or the pulled-back loss.

        ``only_features`` returns the features by name; ``pullback`` the sum of products with it.
        """
        if not torch.compiler.is_compiling():  # a compiler would break its graph between the towers
            self.objective.loss_follows = not only_features and pullback is None
        with self._autocast(batch.views[0].device):
            features = self.objective.features(self.model, batch)
        if only_features:
            return features
        if pullback is None:
            return self.loss(features, batch)
        products = [(features[name] * g).sum() for name, g in pullback.features.items()]
        own = [p for p in self.objective.parameters() if p.requires_grad]
        products += [
            (p * g).sum() for p, g in zip(own, pullback.parameters, strict=False) if g is not None
        ]
        return {"loss": torch.stack(products).sum()}

    def loss(self, features: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Features of the local batch -> {"loss": ..., parts}."""
        parts: dict[str, Tensor] = self.objective(
            **features, labels=batch.labels, sample_id=batch.sample_id, classes=batch.classes
        )
        return parts

    def trunk_dtype(self, device: torch.device, num_blocks: int) -> torch.dtype:
        """Number format of the output of the model's first blocks in this precision."""
        shape = 1, *self.model.image_shape
        kind = next(self.model.parameters()).dtype
        image = torch.zeros(shape, dtype=kind, device=device)
        with torch.no_grad(), self._autocast(device):
            return self.model.encode_trunk(image, num_blocks).dtype

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        dtype = HALF.get(self.precision)
        return torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext()


@dataclass(kw_only=True)
class Trainer:
    """Runs the steps of one training.

    trainee            model and objective, which the engine runs
    learning_rate      step -> learning rate
    prepare            moves a batch to the device, in the training's number format
    seed_words         integers that, with the step and the rank, seed dropout
    checkpoint_every   steps between checkpoints
    steps_per_epoch    steps in one pass over the plan
    profiler           records the chosen steps
    judging            evaluates the checkpoints of some steps; None: none
    """

    trainee: Trainee
    engine: Engine
    checkpoints: Checkpoints
    recorder: Recorder
    boundary: StepBoundary
    learning_rate: Callable[[int], float]
    prepare: Callable[[Batch], Batch]
    seed_words: tuple[int, ...]
    checkpoint_every: int
    steps_per_epoch: int
    profiler: StepProfiler
    judging: Judging | None = None

    def __post_init__(self) -> None:
        self.engine.phase_ended = self.recorder.peaks.ended
        self.recorder.watch.leaves_out = self.engine.leaves_out

    def run(self, batches: Iterable[Batch], start: int, total: int, description: str) -> int:
        """Trains on ``batches``, those of the steps ``start`` to ``total`` in order; returns the
        number of steps done in all, which are fewer where evaluations have ended the training.

        Raises Preempted, with everything saved, where the ranks agreed to leave. Raises
        RuntimeError, one line and on all ranks, where the training has diverged; then the state
        that is not finite is not saved.
        """
        reading = self.recorder.reading(batches)
        progress = runlog.progress(reading, total=total - start, description=description)
        # The recorder is closed after the peer watch: slow sinks must not count as a hanging rank.
        with signals.deferred(), contextlib.closing(self.recorder), peer_watch.training():
            try:
                with data_wait.obeying(self.boundary.standing):
                    return self._steps(progress, start, total)
            except NotFinite as error:
                raise self._diverged(error, description) from error

    def _steps(self, batches: Iterable[Batch], start: int, total: int) -> int:
        done = start
        try:
            ended = self._evaluate(start)
            for batch in () if ended else batches:
                if batch.step == start:
                    self.engine.settle(self.prepare(batch))
                self._step(batch, total)
                done = batch.step + 1
                if self._evaluate(done):
                    self.recorder.end_epoch(done, leaving=True)
                    break
                if done < total:
                    self._obey(done)
        except Preempted as request:
            # Raised while this rank waited for data. One rank is between two steps and can save;
            # the others of several may be in the midst of one.
            if not request.agreed and done > start and self.engine.context.world_size == 1:
                self._leave(done)
            raise
        decision = self.boundary.finish()
        self.checkpoints.wait()
        if decision.leave is not None:
            raise decision.preempted()
        return done

    def _evaluate(self, done: int) -> bool:
        """Evaluates what ``done`` steps have made, if that is due, after it is saved; returns
        whether the training ends here."""
        if self.judging is None or not self.judging.due(done):
            return False
        self._save(done)
        self.checkpoints.wait(mirror_s=0.0)
        since = time.perf_counter()
        with peer_watch.pausing():
            figures = self.judging.judge(done)
        self.recorder.evaluated(done, figures, time.perf_counter() - since)
        self.checkpoints.best = self.judging.kept_step
        if self.judging.patience_is_over:
            log.info(
                "step %d is the last: %s was best at step %s",
                done, self.judging.options.metric, self.judging.best_step,
            )  # fmt: skip
        return self.judging.patience_is_over

    def _step(self, batch: Batch, total: int) -> None:
        """One update, then the row, checkpoint and epoch row that are due."""
        peer_watch.note()
        lr = self.learning_rate(batch.step)
        with self.profiler.step(batch.step):
            batch = self.prepare(batch)
            seed_everything(*self.seed_words, batch.step, self.engine.context.rank)
            self.recorder.peaks.restart()
            epoch = batch.step / self.steps_per_epoch
            self.trainee.objective.begin(batch.step, total, epoch)
            parts = self.engine.update(batch, lr)
            self.trainee.objective.stepped(self.trainee.model)
        peer_watch.note()
        done = batch.step + 1
        self.recorder.take(done, parts, lr)
        if done % self.checkpoint_every == 0 or done == total:
            self._save(done)
        self.recorder.end_epoch(done)
        peer_watch.note()

    def _obey(self, done: int) -> None:
        """Saves or leaves after ``done`` steps if all ranks have agreed on it."""
        decision = self.boundary.decide()
        if decision.leave is not None:
            self._leave(done)
            raise decision.preempted()
        if decision.save:
            self._save(done)

    def _leave(self, done: int) -> None:
        """Saves what ``done`` steps have made."""
        self._save(done)
        self.checkpoints.wait(mirror_s=MIRROR_S)
        self.recorder.end_epoch(done, leaving=True)
        self.boundary.finish()

    def _save(self, done: int) -> None:
        """Saves what ``done`` steps have made, unless it is saved already."""
        with self.recorder.peaks.phase("checkpoint"):
            try:
                saved = Together(self.engine, self.judging) if self.judging else self.engine
                self.checkpoints.save(done, saved)
            except NotFinite:
                self.recorder.judge(done)  # raises the first bad step since the last row, if any
                raise

    def _diverged(self, error: NotFinite, description: str) -> RuntimeError:
        """Returns the error for the user; waits for the checkpoint being written, a collective."""
        self.boundary.finish()
        try:
            self.checkpoints.wait(mirror_s=MIRROR_S)
        except RuntimeError as failure:  # then an older checkpoint is the last
            log.warning("%s", failure)
        clip, saved = self.engine.clip_grad_norm, self.checkpoints.steps()
        kept = (
            f"the last good checkpoint, from which the same command goes on, is step {saved[-1]}"
            if saved
            else "no checkpoint had been saved"
        )
        return RuntimeError(
            f"{error} ({description}): lower lr ({self.learning_rate(error.step - 1):.3g} there) "
            f"or {'set clip_grad_norm' if clip is None else f'clip_grad_norm ({clip:g})'}; "
            f"{kept} in {self.checkpoints.directory}. Other settings want another run directory, "
            "or --force to move this training aside and make it again"
        )
