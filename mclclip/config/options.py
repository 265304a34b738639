"""Every option of a run as one dataclass, composed of the options of its rooms."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveFloat, PositiveInt

from mclclip.clustering.options import ClusterConfig
from mclclip.data.decode import Pixels
from mclclip.data.options import DataConfig, EmbedConfig, ReshardConfig, TrunkCacheConfig
from mclclip.eval.protocols import EvalConfig
from mclclip.models.options import (
    ExportConfig,
    ModelConfig,
    check_image_blocks,
    check_long_context,
    check_patch_dropout,
    more_than_crops,
    num_blocks,
)
from mclclip.objectives.base import Facts
from mclclip.train.options import TrainConfig
from mclclip.util.caption_rules import HardCaptions
from mclclip.util.options import STRICT, Seed


@checked_dataclass(frozen=True, config=STRICT)
class Config:
    """A whole run. ``mclclip config`` prints it resolved."""

    run_dir: str
    """Where everything of the run is written."""
    seed: Seed = 0
    """Seed of weights, data order, augmentation and clustering."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; ``auto``: the GPU of this rank where there is one."""
    deterministic: bool = True
    """On a GPU: the same bits in every run and after every kill, by torch's deterministic
    algorithms; an operation that has none raises. It takes 5 to 8 % of a step of a ViT-L-14 (a
    CPU gives the same bits anyway)."""
    num_threads: PositiveInt | None = None
    """Intra-op threads per process (null: OMP_NUM_THREADS where it is set, else torch's choice, but
    at most all cores but one)."""
    wall_time_s: PositiveFloat | None = None
    """Seconds after which a training saves and the run leaves as if pre-empted (null: no limit)."""
    peer_timeout_s: PositiveFloat = 600.0
    """Seconds that ranks wait for each other in a collective operation, and for data from a loader
    worker, after which the job ends. The work of one rank alone, such as indexing, is waited for
    without a limit, and so is a first compilation."""
    poll_s: PositiveFloat = 5.0
    """Seconds between checks for the files ``save_now`` and ``stop`` in the run directory."""
    num_stages: Annotated[int, Field(ge=0, le=100)] = 3
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
        if self.trained_model is not None and not objective.reads.num_classes_per_sample:
            raise ValueError(
                "trained_model is for a train.objective that may start from an encoder of its own, "
                f"such as mlcd or simlap: with {objective.kind} every stage starts from the base "
                "model"
            )
        if other := [name for name in self.controls if name not in objective.reads.controls]:
            raise ValueError(
                f"controls={other} do not apply to train.objective.kind={objective.kind}, which "
                f"has {', '.join(objective.reads.controls) or 'none'}: leave them out"
            )
        self._check_start()
        self._check_pooled()
        self._check_encoders()
        if self.trunk_cache.enabled:
            self._check_trunk_cache()
        self._check_held()
        for options in filter(None, (self.base, self.train)):
            options.objective.check(self.facts(options))
        check_long_context(self.model, "model")
        if self.trained_model is not None:
            check_long_context(self.trained_model, "trained_model")
        for name, options in self.trainings.items():
            model, blocks = self.model_of(name), options.lock.image_blocks
            check_image_blocks(model, f"{name}.lock.image_blocks", blocks)
            check_patch_dropout(model, name, options.patch_dropout, blocks)
            self.pixels_of(name)
            if options.sentences is not None and not options.objective.reads.captions:
                raise ValueError(
                    f"{name}.sentences draws sentences of captions, and {options.reader(name)} "
                    "reads none: leave it out"
                )
        if self.train.sentences is not None and self.train.reads_text_embeddings:
            raise ValueError(
                "train.sentences draws other texts in every epoch, and with train.lock.text=false "
                "text embeddings are stored once: set train.cached_text=false, which runs the text "
                "tower, or leave train.sentences out"
            )

    def _check_start(self) -> None:
        """Raises ValueError where ``start`` contradicts other options."""
        if self.base is not None and self.base.start != "base":
            raise ValueError(
                f"base.start={self.base.start} says where stages after stage 0 start: set "
                "train.start"
            )
        start = self.train.start
        if start != "base" and self.trained_model is not None:
            raise ValueError(
                f"train.start={start} and trained_model both say where stages start: leave one out"
            )
        if start == "random" and self.has_stages and self.export.soup:
            raise ValueError(
                "with train.start: random every stage has weights of its own, and a soup averages "
                "models of one base only: set export.soup=false"
            )

    def _check_trunk_cache(self) -> None:
        """Raises ValueError where the stages cannot start from the trunk's cache."""
        objective, start = self.train.objective, self.train.start
        blocks, augmentation = self.train.lock.image_blocks, self.model.augmentation
        problems = {
            f"train.objective.kind={objective.kind} trains on {objective.reads.views} views of an "
            "image, which would be equal: take an objective of one view": objective.reads.views > 1,
            f"train.lock.image_blocks={blocks} freezes no block: give the number of the last "
            "blocks that are trained, fewer than there are": (
                blocks in ("all", num_blocks(self.model))
            ),
            f"train.start={start} gives stages other first blocks than stage 0 has: leave it out": (
                start == "random"
            ),
            "trained_model has other first blocks than stage 0 has: leave it out": (
                self.trained_model is not None
            ),
            f"model.augmentation={dict(augmentation)} would have no effect, since every epoch has "
            "the same crops: leave it out": augmentation not in ({}, {"kind": "none"}),
            "reshard.enabled copies images, which are not read then: leave one out": (
                self.reshard.enabled
            ),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise ValueError(f"trunk_cache.enabled, but {problem}")

    def _check_held(self) -> None:
        """Raises ValueError where a training cannot be held near stage 0."""
        base = self.train.objective.reads.base
        if self.base is not None and self.base.objective.reads.base:
            raise ValueError(
                "base.objective reads what stage 0 has, which it makes: set it in train.objective"
            )
        problems = {
            "trained_model is another encoder: leave it out": self.trained_model is not None,
            f"train.start={self.train.start} gives stages other weights than stage 0's: leave it "
            "out": self.train.start != "base",
            f"model.projector={self.model.projector} stands between the encoder and the objective: "
            "leave it out": bool(self.model.projector),
            "embed.feature=pooled stores features that are not those of training: set "
            "embed.feature=projected, or exact: true in the objective": (
                "images" in base and self.embed.feature == "pooled"
            ),
            "train.sentences trains on parts of captions, and whole ones are stored: leave it out, "
            "or set exact: true in the objective": (
                "texts" in base and self.train.sentences is not None
            ),
        }
        for problem, is_there in problems.items():
            if base and is_there:
                raise ValueError(f"train.objective holds the model near stage 0, but {problem}")

    def _check_encoders(self) -> None:
        """Raises ValueError where an encoder is to be measured that is not made."""
        absent = [name for name in self.eval.encoders or [] if name not in self.encoders]
        if absent:
            raise ValueError(
                f"eval.encoders names {absent[0]!r}, which the run does not make: wanted some of "
                f"{', '.join(self.encoders)}, without the prefix of a control"
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
    def encoders(self) -> list[str]:
        """The names of all encoders that a run makes, those of controls without their prefix."""
        names = [f"stage_{stage}" for stage in range(self.num_stages + 1)]
        if self.has_stages:
            names += [f"concat_{kind}" for kind in self.export.concat]
            names += ["soup_uniform"] if self.export.soup else []
        return names

    @property
    def clusters(self) -> list[int]:
        """K of every stage that is clustered: 0 to num_stages - 1."""
        return [self.cluster.clusters_of(stage) for stage in range(self.num_stages)]

    @property
    def trainings(self) -> dict[str, TrainConfig]:
        """The trainings that a run has, by the name of their option: ``base``, ``train``."""
        base = {} if self.base is None else {"base": self.base}
        return base | ({"train": self.train} if self.has_stages else {})

    def model_of(self, training: str) -> ModelConfig:
        """Options of the encoder that the training ``base`` or ``train`` starts from."""
        return (self.trained_model if training == "train" else None) or self.model

    def pixels_of(self, training: str) -> Pixels:
        """How the training ``base`` or ``train`` makes pixels; ``auto`` is ``fast`` where its
        transform only crops.

        Raises ValueError where data.pixels is ``fast`` and the augmentation does more than crop.
        """
        asked = more_than_crops(self.model_of(training))
        if self.data.pixels == "fast" and asked:
            raise ValueError(
                "data.pixels=fast only crops and resizes, and the augmentation asks for "
                f"{', '.join(asked)}: set data.pixels=exact, or leave that out of "
                "model.augmentation"
            )
        if self.data.pixels == "auto":
            return "exact" if asked else "fast"
        return self.data.pixels

    @property
    def reads_captions(self) -> bool:
        """Whether the objective of any training reads captions."""
        return any(each.objective.reads.captions for each in self.trainings.values())

    @property
    def needs_text_embeddings(self) -> bool:
        """Whether ``embed`` writes embeddings of the captions at stage 0."""
        return bool(self.stored_texts)

    @property
    def stored_texts(self) -> tuple[HardCaptions | None, ...]:
        """The texts whose embeddings ``embed`` writes at stage 0: those that the training of stages
        reads (``TrainConfig.stored_texts``), and the captions where clustering reads them."""
        trained = self.train.stored_texts if self.has_stages else ()
        clustered = self.cluster.feature == "mean" and None not in trained
        return (None, *trained) if clustered else trained

    @property
    def shares_text_tower(self) -> bool:
        """Whether all stages have stage 0's text tower, so that its text embeddings are theirs."""
        train = self.train
        return self.trained_model is None and train.start == "base" and not train.lock.text
