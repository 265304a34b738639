"""Every option of a run as a dataclass."""

from __future__ import annotations

from dataclasses import asdict, field
from typing import Any, Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mclclip.clustering.rows import Algorithm
from mclclip.clustering.start import Init
from mclclip.config.exports import ExportConfig
from mclclip.config.image_blocks import check_image_blocks, check_patch_dropout, num_blocks
from mclclip.config.pixels import settle
from mclclip.config.plan import PlanConfig
from mclclip.config.resharding import ReshardConfig
from mclclip.config.sources import SourceConfig
from mclclip.config.suites import EvalConfig
from mclclip.config.trunk_cache import TrunkCacheConfig, check_trunk_cache
from mclclip.config.verdicts import EvaluateConfig, PilotConfig
from mclclip.data.decode import MAX_IMAGE_PIXELS, Pixels
from mclclip.data.labels import LabelMode
from mclclip.data.remote import RemoteOptions
from mclclip.models.lora import Targets
from mclclip.objectives.base import AnyObjective, Facts, parse
from mclclip.options import STRICT, BelowOne, Decay, PositiveShare, Share


@checked_dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Where samples come from and how they are read."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Data sources by name; a sample's key is ``source/key``."""
    num_workers: NonNegativeInt = 2
    """Loader processes per rank (0: read in the training process)."""
    index_workers: PositiveInt = 2
    """Processes that scan shards side by side."""
    max_image_pixels: PositiveInt = MAX_IMAGE_PIXELS
    """Images with more pixels (width times height) are refused as decompression bombs. So are JPEGs
    whose scans times pixels exceed 20 times this number (or its default, if that is more)."""
    pixels: Pixels | Literal["auto"] = "auto"
    """How training makes pixels. ``exact``: open_clip's own transform, by PIL; ``fast``: simplejpeg
    and torch's resize, the same crops within 2/255 of its pixels; ``auto``: ``fast``, and ``exact``
    where an augmentation does more than to crop. Everything but training is exact."""
    max_bad_fraction: Share = 0.01
    """Share of the index's samples that may be undecodable, and of the shards that may be damaged
    or cut short; above it a verb stops on all ranks."""
    max_open_files: PositiveInt = 64
    """Shards that one process keeps open at once."""
    verify: Literal["captions", "full"] = "captions"
    """What of a shard is compared with the index. ``captions``: its size, and the caption of every
    sample that is read; a shard with another time of change is scanned again first. ``full``: every
    image that is read too; indexing then reads all images once, for their checksums."""
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    """How shards behind urls are read."""


@checked_dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The encoder that every stage starts from."""

    name: str | dict[str, Any] = "ViT-B-32"
    """An open_clip model name, ``local-dir:PATH``, the path of a JSON model config, or such a
    config in place (``embed_dim``, ``vision_cfg``, ``text_cfg``)."""
    pretrained: str | None = None
    """open_clip's tag of the weights, a file, or null (random weights from ``seed``)."""
    text: bool = True
    """False: the image tower alone, for objectives that read no captions. A config without
    ``text_cfg`` has no text tower anyway; its ``vision_cfg`` may name a backbone of timm or
    torchvision."""
    projector: list[PositiveInt] = field(default_factory=list)
    """Widths of the projector's layers, on top of an image tower alone; trained, not exported."""
    augmentation: dict[str, Any] = field(default_factory=dict)
    """Fields of open_clip's AugmentationCfg, such as ``scale: [0.4, 1.0]`` (its own default:
    RandomResizedCrop with scale 0.9 to 1), or ``kind: simclr`` with its options, or
    ``kind: none``. The default is ``kind: simclr`` for backbones, else open_clip's."""


@checked_dataclass(frozen=True, config=STRICT)
class EmbedConfig:
    """How embeddings are made."""

    batch_size: PositiveInt = 256
    """Images per forward pass; no batch spans two shards, so results do not depend on ranks."""
    dtype: Literal["float16", "float32"] = "float16"
    """Number format of embeddings on disk."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the encoder."""
    feature: Literal["projected", "pooled"] = "projected"
    """``projected``: after the projection (default); ``pooled``: before it."""


@checked_dataclass(frozen=True, config=STRICT)
class ClusterConfig:
    """k-means over the embeddings of one stage, and the labels made of it."""

    num_clusters: PositiveInt | list[PositiveInt] = 10
    """K, clusters per stage: one number, or one for each clustered stage (0, 1, ...)."""
    algorithm: Algorithm = "spherical"
    """``spherical`` assigns by cosine; ``euclidean`` is what the MCL authors released."""
    method: Literal["flat", "two_level"] = "flat"
    """``flat``: Lloyd over all rows; ``two_level``: rows are split into groups, which are clustered
    one by one (for a million clusters and more)."""
    num_splits: PositiveInt | None = None
    """two_level: groups of the first level (null: about the square root of K)."""
    init: Init = "auto"
    """First centroids: greedy k-means++ (``plus_plus``), whose cost grows with the square of K;
    ``random`` rows; or ``auto``: k-means++ up to 1,000 clusters, else random."""
    feature: Literal["image", "mean"] = "image"
    """What is clustered: image embeddings, or the mean of a sample's image and text embedding."""
    labels_per_sample: PositiveInt = 1
    """L: number of nearest centroids stored for every sample, with their similarities."""
    restarts: PositiveInt = 3
    """Independent starts; the one with the lowest inertia is kept."""
    max_iterations: PositiveInt = 100
    """Largest number of Lloyd iterations."""
    tolerance: NonNegativeFloat = 1e-5
    """Relative change of inertia at which iteration stops."""
    init_samples: PositiveInt = 100_000
    """Rows from which k-means++ draws its start (at least 256 K, or all if there are fewer)."""
    label_mode: LabelMode = "prefix"
    """``prefix``: labels of all earlier stages (paper, Eq. 2); ``last``: only the last stage's."""

    def __post_init__(self) -> None:
        if self.num_clusters == []:
            raise ValueError(
                "cluster.num_clusters has 0 entries: give one K per clustered stage, or one number "
                "for all"
            )
        if self.labels_per_sample > self.fewest:
            raise ValueError(
                f"cluster.labels_per_sample={self.labels_per_sample} is more than "
                f"cluster.num_clusters={self.num_clusters}: lower it"
            )

    @property
    def fewest(self) -> int:
        """The smallest K of any stage."""
        return self.num_clusters if isinstance(self.num_clusters, int) else min(self.num_clusters)

    def clusters_of(self, stage: int) -> int:
        """K of the clustering of ``stage``; ValueError where the list is too short."""
        if isinstance(self.num_clusters, int):
            return self.num_clusters
        if stage >= len(self.num_clusters):
            raise ValueError(
                f"cluster.num_clusters has {len(self.num_clusters)} entries, stage {stage} needs "
                f"entry {stage}: give one K per clustered stage, or one number for all"
            )
        return self.num_clusters[stage]


@checked_dataclass(frozen=True, config=STRICT)
class LockConfig:
    """Parts of the model that are trained; everything else stays at its first weights."""

    image_blocks: NonNegativeInt | Literal["all"] = "all"
    """How many of the image tower's last blocks are trained (a ResNet's are the stem and the
    residual blocks: 1 + 16 in an RN50)."""
    image_norm: bool = True
    """Train the final norm of the image tower (ResNet: batch norms of trained blocks)."""
    image_projection: bool = True
    """Train the image projection (ResNet: the attention pool)."""
    text: bool = True
    """Train the text tower; false: frozen, its embeddings are computed once by ``embed``."""
    text_blocks: NonNegativeInt | Literal["all"] = "all"
    """How many of the text tower's last blocks are trained; its final norm and projection are
    too."""
    logit_scale: bool = True
    """Train the logit scale, and with it the logit bias where the model has one and the objective
    reads it."""

    def __post_init__(self) -> None:
        if self.text_blocks != "all" and not self.text:
            raise ValueError(
                f"text_blocks={self.text_blocks} names blocks of a text tower that text=false "
                "freezes: leave one of them out"
            )


@checked_dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """Low-rank adapters (LoRA) on the image tower: only they are trained in its linear layers."""

    rank: PositiveInt = 8
    """Rank of each adapter."""
    alpha: PositiveFloat = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    dropout: BelowOne = 0.0
    """Dropout on an adapter's input."""
    targets: Targets = "all"
    """Linear layers of the blocks ``lock.image_blocks`` that get an adapter."""
    text: bool = False
    """Adapters on the unlocked blocks of the text tower too."""


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
    """Samples per rank and forward pass; a bigger local batch is computed by exact gradient
    caching, in two passes (null: the local batch at once)."""
    grad_checkpointing: bool = False
    """Recompute the blocks' activations in the backward pass instead of keeping them."""
    compile: Literal["off", "model", "step"] = "off"
    """torch.compile: ``model`` compiles each block, ``step`` the whole forward pass with the
    objective."""


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
    """Continue training while a copy of the state is written to disk."""
    mirror: str | None = None
    """fsspec url of a folder that gets a copy of every checkpoint, such as ``s3://bucket/run``."""
    on_error: Literal["stop", "continue"] = "stop"
    """When a checkpoint cannot be written, such as on a full disk: end the run, or continue
    training and try again at the next checkpoint."""


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
    """What is minimised, by its ``kind``."""
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
    engine: EngineConfig = EngineConfig()
    optimizer: str = "adamw"
    """``adamw``, ``lars``, ``lion``, or ``timm:NAME`` for any other of timm's."""
    lr: PositiveFloat = 5e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up."""
    warmup: Share = 0.1
    """Share of the steps over which the learning rate rises from zero."""
    layer_decay: PositiveShare | None = None
    """Each block's learning rate is this factor times that of the block after it (null: equal)."""
    weight_decay: NonNegativeFloat = 0.2
    """Weight decay (none on norms, biases and the logit scale)."""
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
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    log_every: PositiveInt = 10
    """Steps between rows of metrics.jsonl."""
    profile_steps: list[NonNegativeInt] = field(default_factory=list)
    """Steps recorded by torch.profiler, as traces below ``profile/``."""
    cached_text: bool = True
    """With a locked text tower: read text embeddings from disk instead of running the tower."""

    def reader(self, name: str) -> str:
        """Name of this training's objective in messages; ``name`` is the training's option."""
        return f"{name}.objective.kind={self.objective.kind}"

    @property
    def reads_text_embeddings(self) -> bool:
        """Whether captions come as embeddings from disk (in stages after stage 0)."""
        return self.objective.reads.captions and self.cached_text and not self.lock.text

    def model_arguments(self) -> dict[str, Any]:
        """Arguments of ``models.loading.prepare_model`` beside the model and the seed."""
        reads = self.objective.reads
        unused = {} if reads.captions else {"text": False}
        unused |= {} if reads.logit_scale else {"logit_scale": False}
        bias = {"logit_bias": self.lock.logit_scale and reads.logit_bias}
        return {
            "lock": asdict(self.lock) | unused | bias,
            "lora": None if self.lora is None else asdict(self.lora),
            "precision": self.precision,
            "grad_checkpointing": self.engine.grad_checkpointing,
            "patch_dropout": self.patch_dropout,
        }

    def optimizer_arguments(self) -> dict[str, Any]:
        """Arguments of ``models.optimizer.build_optimizer`` beside the module."""
        same = ("weight_decay", "betas", "eps", "momentum", "layer_decay", "lr")
        return {"name": self.optimizer} | {name: getattr(self, name) for name in same}


@checked_dataclass(frozen=True, config=STRICT)
class Config:
    """A whole run. ``mclclip config`` prints it resolved."""

    run_dir: str
    """Where everything of the run is written."""
    seed: NonNegativeInt = 0
    """Seed of weights, data order, augmentation and clustering."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; ``auto``: the GPU of this rank where there is one."""
    deterministic: bool = True
    """On a GPU: the same bits in every run and after every kill, by torch's deterministic
    algorithms; an operation that has none raises. False may be faster (a CPU gives the same
    bits anyway)."""
    num_threads: PositiveInt | None = None
    """Intra-op threads per process (null: torch's choice)."""
    wall_time_s: PositiveFloat | None = None
    """Seconds after which a training saves and the run leaves as if pre-empted (null: no limit)."""
    peer_timeout_s: PositiveFloat = 600.0
    """Seconds without a report from a rank, without progress in training, or without the data that
    is waited for, after which the job ends and names that rank or worker."""
    poll_s: PositiveFloat = 5.0
    """Seconds between checks for the files ``save_now`` and ``stop`` in the run directory."""
    num_stages: NonNegativeInt = 3
    """Stages after stage 0."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    trained_model: ModelConfig | None = None
    """Another encoder that stages s >= 1 start from, such as one with random weights (null: they
    start as ``train.start`` says). Only for objectives that allow it, such as those with class
    centers."""
    base: TrainConfig | None = None
    """Training of stage 0 from scratch; null: stage 0 is the given encoder."""
    embed: EmbedConfig = EmbedConfig()
    cluster: ClusterConfig = ClusterConfig()
    reshard: ReshardConfig = ReshardConfig()
    trunk_cache: TrunkCacheConfig = TrunkCacheConfig()
    train: TrainConfig = TrainConfig()
    """Training of every stage s >= 1 (and of the controls)."""
    controls: list[Literal["ungrouped", "random_groups"]] = field(default_factory=list)
    """Controls: each repeats every stage from the same base weights for as many steps, with the
    same locks and learning rates, and with captions and augmentations from the same keys. They
    differ in which samples form a batch, in the order of the samples, and in the mask of Eq. 3.
    A single pair of runs cannot tell a difference from noise: repeat both with other seeds."""
    pilot: PilotConfig = PilotConfig()
    """A small form of the run that is judged before the rest of it begins."""
    eval: EvalConfig = EvalConfig()
    export: ExportConfig = ExportConfig()
    track: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Metric sinks besides metrics.jsonl."""

    def __post_init__(self) -> None:
        if len(set(self.controls)) != len(self.controls):
            raise ValueError(f"controls names one twice: {self.controls}")
        objective = self.train.objective
        if self.base is not None and self.base.objective.reads.clusters:
            raise ValueError(
                f"base.objective.kind={self.base.objective.kind} needs the clusters of a stage "
                "before: set it in train.objective"
            )
        if self.trained_model is not None and not objective.starts_anew:
            raise ValueError(
                "trained_model is for a train.objective that may start from an encoder of its own "
                f"(mlcd, mlc, single_label): with {objective.kind} every stage starts from the "
                "base model"
            )
        if other := [name for name in self.controls if name not in objective.controls]:
            raise ValueError(
                f"controls={other} do not apply to train.objective.kind={objective.kind}, which "
                f"has {', '.join(objective.controls) or 'none'}: leave them out"
            )
        self._check_start()
        self._check_pooled()
        if self.trunk_cache.enabled:
            others = self.trained_model is not None, self.reshard.enabled
            trained = self.train.lock.image_blocks, num_blocks(self.model.name)
            start, augmentation = self.train.start, self.model.augmentation
            check_trunk_cache(objective, *trained, start, augmentation, *others)
        for options in filter(None, (self.base, self.train)):
            options.objective.check(self.facts(options))
        for name, options in self.trainings.items():
            model, blocks = self.model_of(name).name, options.lock.image_blocks
            check_image_blocks(f"{name}.lock.image_blocks", blocks, model)
            check_patch_dropout(name, options.patch_dropout, blocks, model)
            self.pixels_of(name)

    def _check_start(self) -> None:
        """Raises ValueError where ``start`` contradicts other options."""
        if self.base is not None and self.base.start != "base":
            raise ValueError(
                f"base.start={self.base.start} says where stages after stage 0 start: set "
                "train.start"
            )
        own = self.train.start
        if own != "base" and self.trained_model is not None:
            raise ValueError(
                f"train.start={own} and trained_model both say where stages start: leave one out"
            )
        if own == "random" and self.has_stages and self.export.soup:
            raise ValueError(
                "with train.start: random every stage has weights of its own, and a soup averages "
                "models of one base only: set export.soup=false"
            )

    def _check_pooled(self) -> None:
        """Raises ValueError for a benchmark that the encoders made at the end cannot answer."""
        for name, benchmark in self.eval.suite.items():
            pooled = benchmark.options.get("feature") == "pooled"
            if pooled and self.has_stages and self.export.concat:
                raise ValueError(
                    f"eval.suite.{name}.options.feature=pooled, which the joined encoders of "
                    f"export.concat={self.export.concat} do not have: set export.concat=[], or "
                    "feature=projected"
                )

    def facts(self, options: TrainConfig) -> Facts:
        """The options that an objective checks before the run begins."""
        return Facts(
            num_clusters=self.cluster.fewest,
            stored=self.cluster.labels_per_sample,
            precision=options.precision,
            engine=options.engine.name,
            global_batch=options.global_batch,
            zero_stage=options.engine.zero_stage,
            micro_batch=options.engine.micro_batch,
        )

    @property
    def has_stages(self) -> bool:
        """Whether anything comes after stage 0: a clustering, a training, encoders to join."""
        return self.num_stages > 0

    @property
    def clusters(self) -> list[int]:
        """K of every stage that is clustered: 0 to num_stages - 1."""
        return [self.cluster.clusters_of(stage) for stage in range(self.num_stages)]

    @property
    def trainings(self) -> dict[str, TrainConfig]:
        """The trainings that a run has, by the name of their option: ``base``, ``train``."""
        base = {} if self.base is None else {"base": self.base}
        return base | ({"train": self.train} if self.has_stages else {})

    def weight_options(self, training: TrainConfig, share: float = 1.0) -> dict[str, Any]:
        """How often a training draws samples: arguments of ``SampleWeights.open``."""
        by_source = {name: source.weight for name, source in self.data.sources.items()}
        return training.plan.weight_options(by_source, share)

    def model_of(self, training: str) -> ModelConfig:
        """Options of the encoder that the training ``base`` or ``train`` starts from."""
        return (self.trained_model if training == "train" else None) or self.model

    def pixels_of(self, training: str) -> Pixels:
        """How the training ``base`` or ``train`` makes pixels. Raises the error of ``settle``."""
        model = self.model_of(training)
        return settle(self.data.pixels, model.augmentation, model.name)

    @property
    def needs_text_embeddings(self) -> bool:
        """Whether ``embed`` writes embeddings of the captions at stage 0."""
        return self.cluster.feature == "mean" or self.train.reads_text_embeddings

    @property
    def shares_text_tower(self) -> bool:
        """Whether all stages have stage 0's text tower, so that its text embeddings are theirs."""
        train = self.train
        return self.trained_model is None and train.start == "base" and not train.lock.text
