"""Options of a training and of its evaluations."""

from __future__ import annotations

import math
from dataclasses import asdict, field
from typing import Any, Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mclclip.checkpoint import CheckpointConfig
from mclclip.data.options import PlanConfig, SentencesConfig
from mclclip.engines import EngineConfig
from mclclip.models.options import LockConfig, LoraConfig
from mclclip.models.patterns import ParameterConfig
from mclclip.objectives.base import AnyObjective, parse
from mclclip.util.caption_rules import HardCaptions
from mclclip.util.options import NO_RESULT, STRICT, BelowOne, Decay, Share


@checked_dataclass(frozen=True, config=STRICT)
class EvaluateConfig:
    """Evaluations within a training, of the checkpoint at that step as it would be exported."""

    every: PositiveInt | None = None
    """Steps (or epochs, see ``unit``) between two evaluations; one more follows the last step.
    Null: no evaluations."""
    unit: Literal["steps", "epochs"] = "steps"
    """The unit of ``every``."""
    suite: list[str] = field(default_factory=list)
    """Benchmarks of ``eval.suite`` by their names; empty: all of them. The training waits."""
    metric: str | None = None
    """``BENCHMARK/METRIC``, such as ``mmvp/average``: the figure that ``patience`` and ``best`` go
    by: of losses the smallest is the best, of others the largest. Null: figures are only
    recorded."""
    patience: PositiveInt | None = None
    """Evaluations in a row without a better figure after which the training ends; null: never."""
    best: bool = False
    """Export the checkpoint with the best figure, which is kept, instead of the last one."""

    def __post_init__(self) -> None:
        if self.every is None and (self.metric is not None or self.suite):
            raise ValueError("evaluate has no effect without evaluate.every: set it")
        if self.metric is None and (self.best or self.patience is not None):
            raise ValueError("patience and best go by a figure: set evaluate.metric")
        if self.metric is not None and "/" not in self.metric:
            raise ValueError(f"metric={self.metric!r}: wanted BENCHMARK/METRIC, as mmvp/average")


@checked_dataclass(frozen=True, config=STRICT)
class ImageSizeConfig:
    """Pictures of another size than the model's own, for some epochs of a training."""

    size: PositiveInt
    """Height and width in pixels."""
    epochs: PositiveFloat | None = None
    """For how many epochs, which may be a part of one; null: for all that remain."""


@checked_dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """One training: its data order, its optimizer, its records."""

    global_batch: PositiveInt = 1024
    """Samples per optimizer step over all ranks."""
    epochs: PositiveFloat = 20
    """Passes over the plan; ignored where ``steps`` is set."""
    steps: PositiveInt | None = None
    """Optimizer steps in all (null: as many as ``epochs`` gives)."""
    objective: AnyObjective = field(default_factory=lambda: parse({"kind": "info_nce"}))
    """The loss that is minimised, by its ``kind``; of a list, such as ``[{kind: info_nce}, {kind:
    preserve, weight: 0.5}]``, the sum of the losses, each times its ``weight``."""
    start: Literal["base", "random", "previous"] = "base"
    """Weights that a stage s >= 1 starts from: those of stage 0 (``base``), random weights with
    another seed for each stage (``random``: MCL from scratch), or those of the stage before
    (``previous``: MCL's Table 5). A projector is always new."""
    plan: PlanConfig = PlanConfig()
    lock: LockConfig = LockConfig()
    lora: LoraConfig | None = None
    """Adapters on the image tower; the adapted layers' own weights are frozen (null: none)."""
    patch_dropout: BelowOne = 0.0
    """Share of a picture's patches that an unlocked ViT does not see in training (FLIP)."""
    image_size: list[ImageSizeConfig] = field(default_factory=list)
    """Train on smaller (or larger) pictures first, and on the model's own size after the epochs
    listed: ``[{size: 160, epochs: 19}]`` of 20 epochs (FixRes, CLIPA). Position embeddings are
    resized in every step; the model keeps its own. Empty: its own size throughout."""
    engine: EngineConfig = field(default=EngineConfig(), metadata=NO_RESULT)
    optimizer: str = "adamw"
    """``adamw``, ``lars``, ``lion``, or ``timm:NAME`` for any other of timm's."""
    lr: PositiveFloat = 5e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up."""
    warmup: Share = 0.1
    """Share of the steps over which the learning rate rises from zero."""
    parameters: list[ParameterConfig] = field(default_factory=list)
    """Learning rates, weight decay and freezing by patterns of names, such as ``[{match: "image.*",
    lr_scale: 0.1, layer_decay: 0.7}, {match: "*embedding*", weight_decay: 0}]``. For each property,
    the first entry that matches a parameter and states the property counts."""
    weight_decay: NonNegativeFloat = 0.2
    """Weight decay (none on norms, biases and the logit scale)."""
    start_decay: NonNegativeFloat = 0.0
    """Decay of the trained weights towards the weights that the training started with, not towards
    zero (L2-SP). Each step reduces the distance by this value times the learning rate, under every
    optimizer. ``weight_decay`` pulls towards zero at the same time: lower it. 0: none."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.98)
    """Betas of AdamW and Lion."""
    eps: PositiveFloat = 1e-6
    """AdamW epsilon."""
    momentum: BelowOne = 0.9
    """Momentum of LARS."""
    ema_decay: Decay | None = None
    """Decay per step of an exponential moving average of the weights (null: none kept)."""
    clip_grad_norm: PositiveFloat | None = None
    """Largest gradient norm (null: no clipping)."""
    precision: Literal["fp32", "bf16", "fp16", "float64"] = "fp32"
    """``bf16`` is autocast, ``fp16`` autocast with loss scaling; ``float64`` serves checks."""
    checkpoint: CheckpointConfig = field(default=CheckpointConfig(), metadata=NO_RESULT)
    evaluate: EvaluateConfig = EvaluateConfig()
    log_every: PositiveInt = field(default=10, metadata=NO_RESULT)
    """Steps between rows of metrics.jsonl."""
    profile_steps: list[NonNegativeInt] = field(default_factory=list, metadata=NO_RESULT)
    """Steps recorded by torch.profiler, as traces below ``profile/``."""
    cached_text: bool = True
    """With a locked text tower: read text embeddings from disk instead of running the tower."""

    sentences: SentencesConfig | None = None
    """Train on sentences drawn from a caption instead of the whole caption (null: the whole). A
    sentence ends with . ! or ? before white space and a capital letter. The draw depends on sample
    and epoch alone."""

    def reader(self, name: str) -> str:
        """Returns for example 'train.objective.kind=info_nce', for messages; ``name``: 'base' or
        'train'."""
        return f"{name}.objective.kind={self.objective.kind}"

    @property
    def reads_text_embeddings(self) -> bool:
        """True if stages after stage 0 read embeddings of captions from disk, not captions."""
        return self.objective.reads.captions and self.cached_text and not self.lock.text

    @property
    def stored_texts(self) -> tuple[HardCaptions | None, ...]:
        """The texts whose embeddings stages after stage 0 read from disk, written by `embed`. None
        stands for the captions as they are, ``HardCaptions`` for captions edited so."""
        reads = self.objective.reads
        if not self.reads_text_embeddings:
            return (None,) if "text_features" in reads.of_stage_0 else ()
        return (None,) if reads.edits is None else (None, reads.edits)

    @property
    def listed_sizes(self) -> list[int]:
        """The image sizes of ``image_size``, each once."""
        return [*dict.fromkeys(part.size for part in self.image_size)]

    def image_sizes(self, total: int, steps_per_epoch: float) -> list[tuple[int, int | None]]:
        """Returns the first step of each image size of a training of ``total`` steps, with the
        size; None: the model's own.

        Epochs are shares of the steps, so that a control changes the size at the same steps; where
        ``steps`` is set they are ``steps_per_epoch`` each, the samples divided by the batch, which
        depends on no groups.
        """
        per_epoch = total / self.epochs if self.steps is None else steps_per_epoch
        starts, epochs = list[tuple[int, int | None]](), 0.0
        for part in self.image_size:
            starts.append((round(epochs * per_epoch), part.size))
            epochs += math.inf if part.epochs is None else part.epochs
        if not math.isinf(epochs):
            starts.append((round(epochs * per_epoch), None))
        return [start for start in starts if start[0] < max(total, 1)]

    def model_arguments(self) -> dict[str, Any]:
        """Arguments of ``models.preparing.prepare_model`` beside the model and the seed."""
        reads = self.objective.reads
        unused = {} if reads.captions else {"text": False}
        unused |= {} if reads.logit_scale else {"logit_scale": False}
        bias = {"logit_bias": self.lock.logit_scale and reads.logit_bias}
        return {
            "lock": asdict(self.lock) | unused | bias,
            "lora": None if self.lora is None else asdict(self.lora),
            "parameters": self.parameters,
            "precision": self.precision,
            "grad_checkpointing": self.engine.grad_checkpointing,
            "patch_dropout": self.patch_dropout,
            "image_sizes": self.listed_sizes,
        }

    def optimizer_arguments(self) -> dict[str, Any]:
        """Arguments of ``models.optimizer.build_optimizer`` beside the module."""
        same = ("weight_decay", "betas", "eps", "momentum", "parameters", "start_decay", "lr")
        return {"name": self.optimizer} | {name: getattr(self, name) for name in same}
