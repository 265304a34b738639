"""Every option of one training: its data order, its optimizer, its engine, its records."""

from __future__ import annotations

from dataclasses import asdict, field
from typing import Any, Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mclclip.objectives.base import AnyObjective, parse
from mclclip.options import STRICT


@checked_dataclass(frozen=True, config=STRICT)
class PlanConfig:
    """Which samples come together."""

    policy: Literal["drop", "backoff", "mask", "wrap"] = "backoff"
    """What happens to samples that do not fill a batch of their group."""
    order: Literal["round_robin", "proportional"] = "proportional"
    """``round_robin``: Algorithm 1 of MCL; ``proportional``: a seeded shuffle of all batches."""


@checked_dataclass(frozen=True, config=STRICT)
class LockConfig:
    """What is trained; everything else is frozen at the base weights."""

    image_blocks: NonNegativeInt | Literal["all"] = "all"
    """Last blocks of the image tower that are trained (ResNet: of the stem and the residual
    blocks, which are 1 + 16 in an RN50)."""
    image_norm: bool = True
    """Train the final norm of the image tower (ResNet: batch norms of trained blocks)."""
    image_projection: bool = True
    """Train the image projection (ResNet: the attention pool)."""
    text: bool = True
    """Train the text tower; false: frozen, its embeddings are computed once by ``embed``."""
    logit_scale: bool = True
    """Train the logit scale."""


@checked_dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """Low-rank adapters (LoRA) on the image tower: only they are trained in its linear layers."""

    rank: PositiveInt = 8
    """Rank of each adapter."""
    alpha: PositiveFloat = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    dropout: NonNegativeFloat = 0.0
    """Dropout on an adapter's input."""
    targets: Literal["attention", "mlp", "all"] = "all"
    """Linear layers of the blocks ``lock.image_blocks`` that get an adapter."""


@checked_dataclass(frozen=True, config=STRICT)
class EngineConfig:
    """How a step runs on the hardware: speed and memory, not results (a resume may change it)."""

    name: Literal["ddp", "fsdp", "deepspeed"] = "ddp"
    """``ddp``: whole copies; ``fsdp``: FSDP2, sharded by block; ``deepspeed``: ZeRO."""
    zero_stage: Literal[1, 2, 3] = 2
    """deepspeed: shards optimizer state (1), gradients too (2), parameters too (3)."""
    shard_ranks: PositiveInt | None = None
    """fsdp: ranks that share one copy, such as those of a node (null: all ranks)."""
    micro_batch: PositiveInt | None = None
    """Samples per rank and forward; a bigger local batch is computed by exact gradient caching,
    in two passes (null: the local batch at once)."""
    grad_checkpointing: bool = False
    """Recompute the blocks' activations in the backward instead of keeping them."""
    compile: Literal["off", "model", "step"] = "off"
    """torch.compile: ``model`` block by block, ``step`` the whole forward with the objective."""


@checked_dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """Resumable state: when it is saved, how long it is kept, and where else."""

    every: PositiveInt = 1000
    """Steps between checkpoints."""
    keep: PositiveInt = 2
    """Checkpoints kept (the newest)."""
    keep_every: PositiveInt | None = None
    """Checkpoints of steps divisible by this are kept for good (null: none)."""
    asynchronous: bool = False
    """Train on while the copy is written to disk."""
    mirror: str | None = None
    """fsspec url of a folder that gets a copy of every checkpoint, such as ``s3://bucket/run``."""
    on_error: Literal["stop", "continue"] = "stop"
    """When a checkpoint cannot be written, such as on a full disk: end the run, or train on with
    the one before until the next is due."""


@checked_dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """One training: its data order, its optimizer, its records."""

    global_batch: PositiveInt = 1024
    """Samples per optimizer step over all ranks."""
    epochs: PositiveFloat = 20
    """Passes over the plan; ignored where ``steps`` is set."""
    steps: PositiveInt | None = None
    """Optimizer steps in all."""
    objective: AnyObjective = field(default_factory=lambda: parse({"kind": "info_nce"}))
    """What is minimised, by its ``kind``."""
    plan: PlanConfig = PlanConfig()
    lock: LockConfig = LockConfig()
    lora: LoraConfig | None = None
    """Adapters on the image tower; its other weights in those layers stay as they are."""
    engine: EngineConfig = EngineConfig()
    optimizer: str = "adamw"
    """``adamw``, ``lars``, ``lion``, or ``timm:NAME`` for any other of timm's."""
    lr: float = 5e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up."""
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises from zero."""
    layer_decay: PositiveFloat | None = None
    """Each block's learning rate is this times that of the block above it (null: all the same)."""
    weight_decay: float = 0.2
    """Weight decay (none on norms, biases and the logit scale)."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Betas of AdamW and Lion."""
    eps: float = 1e-6
    """AdamW epsilon."""
    momentum: float = 0.9
    """Momentum of LARS."""
    ema_decay: PositiveFloat | None = None
    """Decay per step of an exponential moving average of the weights (null: none kept)."""
    clip_grad_norm: float | None = None
    """Largest gradient norm (null: no clipping)."""
    precision: Literal["fp32", "bf16", "fp16", "float64"] = "fp32"
    """``bf16`` is autocast, ``fp16`` autocast with loss scaling; ``float64`` serves checks."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    log_every: PositiveInt = 10
    """Steps between rows of metrics.jsonl."""
    profile_steps: list[NonNegativeInt] = field(default_factory=list)
    """Steps recorded by torch.profiler, as traces below ``profile/``."""
    cached_text: bool = True
    """With a locked text tower: read text embeddings from disk instead of running the tower."""

    def reader(self, name: str) -> str:
        """What messages call the objective of this training, which is the option ``name``."""
        return f"{name}.objective.kind={self.objective.kind}"

    @property
    def reads_text_embeddings(self) -> bool:
        """Whether captions come as embeddings from disk (in stages after stage 0)."""
        return self.objective.reads.captions and self.cached_text and not self.lock.text

    def model_arguments(self) -> dict[str, Any]:
        """What trainer.prepare_model takes beside the model and the seed."""
        reads = self.objective.reads
        unused = {} if reads.captions else {"text": False}
        unused |= {} if reads.logit_scale else {"logit_scale": False}
        return {
            "lock": asdict(self.lock) | unused,
            "lora": None if self.lora is None else asdict(self.lora),
            "precision": self.precision,
            "grad_checkpointing": self.engine.grad_checkpointing,
        }

    def optimizer_arguments(self) -> dict[str, Any]:
        """What models.optimizer.build_optimizer takes beside the module."""
        same = ("weight_decay", "betas", "eps", "momentum", "layer_decay", "lr")
        return {"name": self.optimizer} | {name: getattr(self, name) for name in same}
