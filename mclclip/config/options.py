"""Every option of a run as one dataclass, composed of the options of its rooms."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveFloat, PositiveInt

from mclclip.clustering.options import ClusterConfig
from mclclip.data.decode import Pixels
from mclclip.data.options import DataConfig, EmbedConfig, ImageRowsConfig, RelocateConfig
from mclclip.eval.protocols import EvalConfig
from mclclip.models.options import ExportConfig, ModelConfig, more_than_crops
from mclclip.train.options import TrainConfig
from mclclip.util.caption_rules import HardCaptions
from mclclip.util.options import STRICT, Seed, each_once


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
    relocate: RelocateConfig = RelocateConfig()
    image_rows: ImageRowsConfig = ImageRowsConfig()
    train: TrainConfig = TrainConfig()
    """Training of every stage s >= 1 (and of the controls)."""
    controls: Annotated[list[Literal["ungrouped", "random_groups"]], AfterValidator(each_once)] = (
        field(default_factory=list)
    )
    """Controls: each repeats every stage from the same base weights for as many steps, with the
    same locks and learning rates, and with captions and augmentations from the same keys. They
    differ in which samples form a batch, in the order of the samples, and in the mask of Eq. 3.
    A single pair of runs cannot tell a difference from noise: repeat both with other seeds."""
    eval: EvalConfig = EvalConfig()
    export: ExportConfig = ExportConfig()
    track: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Metric sinks besides metrics.jsonl."""

    @property
    def has_stages(self) -> bool:
        """True where anything comes after stage 0: a clustering, a training, encoders to join."""
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
        transform only crops."""
        if self.data.pixels == "auto":
            return "exact" if more_than_crops(self.model_of(training)) else "fast"
        return self.data.pixels

    @property
    def reads_captions(self) -> bool:
        """True where the objective of any training reads captions."""
        return any(each.objective.reads.captions for each in self.trainings.values())

    @property
    def needs_text_embeddings(self) -> bool:
        """True where ``embed`` writes embeddings of the captions at stage 0."""
        return bool(self.stored_texts)

    @property
    def writes_image_rows(self) -> bool:
        """True where `embed` writes rows that stand for images, beside its embeddings."""
        return self.image_rows.enabled and not self.train.lock.freezes_images

    @property
    def stored_texts(self) -> tuple[HardCaptions | None, ...]:
        """The texts whose embeddings ``embed`` writes at stage 0: those that the training of stages
        reads (``TrainConfig.stored_texts``), and the captions where clustering reads them."""
        trained = self.train.stored_texts if self.has_stages else ()
        clustered = self.cluster.feature == "mean" and None not in trained
        return (None, *trained) if clustered else trained

    @property
    def shares_text_tower(self) -> bool:
        """True where all stages have stage 0's text tower, whose text embeddings are theirs."""
        train = self.train
        return self.trained_model is None and train.start == "base" and not train.lock.text
