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
from mclclip.run.trackers import TrackerName
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
    """Where tensors live; ``auto``: this rank's GPU if there is one, else the CPU."""
    deterministic: bool = True
    """On a GPU, use torch's deterministic algorithms, which give the same bits in every run and
    after every kill; an operation that has none raises an error. This takes 5 to 8 % of a step of a
    ViT-L-14, and 16 % if its blocks are compiled (one H200). A CPU gives the same bits anyway."""
    num_threads: PositiveInt | None = None
    """Torch's threads in each process. Null: OMP_NUM_THREADS if it is set, else torch's choice, but
    at most all cores but one."""
    wall_time_s: PositiveFloat | None = None
    """Seconds after which a training saves and the run ends, to be resumed (null: no limit)."""
    peer_timeout_s: PositiveFloat = 600.0
    """Seconds that ranks wait for each other in a collective operation, and for data from a loader
    worker; then the job ends. For work of one rank alone, such as indexing, and for the first
    compilation, they wait without a limit."""
    poll_s: PositiveFloat = 5.0
    """Seconds between checks for the files ``save_now`` and ``stop`` in the run directory."""
    num_stages: Annotated[int, Field(ge=0, le=100)] = 3
    """Stages after stage 0."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    trained_model: ModelConfig | None = None
    """Another encoder from which stages s >= 1 start, for example one with random weights, or a
    student of stage 0's encoder. Null: they start as ``train.start`` says."""
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
    """Controls. Each repeats every stage from the same base weights for as many steps, with the
    same locks and learning rates, and with the same draws of captions and augmentations. It differs
    in which samples form a batch, in their order, and in the mask of Eq. 3 (MCL). A single pair of
    runs cannot tell a difference from noise: repeat both with other seeds."""
    eval: EvalConfig = EvalConfig()
    export: ExportConfig = ExportConfig()
    track: Annotated[list[TrackerName], AfterValidator(each_once)] = field(default_factory=list)
    """Trackers that get the metrics besides metrics.jsonl, and at the end of a run its verdict and
    its report: tensorboard, wandb, mlflow, trackio, or the name of an entry point of the group
    mclclip.trackers. The environment variables of each apply."""

    @property
    def has_stages(self) -> bool:
        """True if there are stages after stage 0."""
        return self.num_stages > 0

    @property
    def encoders(self) -> list[str]:
        """The names of all encoders that a run makes, such as ``stage_1`` and ``concat_raw``.

        Controls make encoders of the same names, with the control's name before them.
        """
        names = [f"stage_{stage}" for stage in range(self.num_stages + 1)]
        if self.has_stages:
            names += [f"concat_{kind}" for kind in self.export.concat]
            names += ["soup_uniform"] if self.export.soup else []
        return names

    @property
    def clusters(self) -> list[int]:
        """The number of clusters of every stage that is clustered, 0 to num_stages - 1."""
        return [self.cluster.clusters_of(stage) for stage in range(self.num_stages)]

    @property
    def trainings(self) -> dict[str, TrainConfig]:
        """The run's trainings by the name of their option, ``base`` or ``train``."""
        base = {} if self.base is None else {"base": self.base}
        return base | ({"train": self.train} if self.has_stages else {})

    def model_of(self, training: str) -> ModelConfig:
        """Returns options of the encoder that the training ``base`` or ``train`` starts from."""
        return (self.trained_model if training == "train" else None) or self.model

    def pixels_of(self, training: str) -> Pixels:
        """Returns how the training ``base`` or ``train`` computes pixels.

        ``auto`` becomes ``fast`` if the model's augmentation only crops, else ``exact``.
        """
        if self.data.pixels == "auto":
            return "exact" if more_than_crops(self.model_of(training)) else "fast"
        return self.data.pixels

    @property
    def reads_captions(self) -> bool:
        """True if the objective of any training reads captions."""
        return any(each.objective.reads.captions for each in self.trainings.values())

    @property
    def teachers(self) -> dict[str, set[str]]:
        """The encoders that trainings learn from, but for that of stage 0, each with what is read
        of it: 'image_features', 'text_features', 'model'."""
        every = [each.objective.reads.encoders for each in self.trainings.values()]
        names = sorted({name for encoders in every for name, _ in encoders if name is not None})
        parts = [pair for encoders in every for pair in encoders]
        return {name: {what for of, what in parts if of == name} for name in names}

    @property
    def text_rows(self) -> list[str]:
        """The files of ``text_rows`` of all models, whose rows lie in one folder of the run."""
        models = (self.model, self.trained_model)
        files = (file for model in models if model is not None for file in model.text_rows)
        return [*dict.fromkeys(files)]

    @property
    def widths(self) -> list[int]:
        """The widths at which encoders are evaluated beside the whole: all that are trained."""
        every = (each.objective.reads.widths for each in self.trainings.values())
        return sorted(set().union(*every))

    @property
    def writes_image_rows(self) -> bool:
        """True if `embed` writes outputs of the image tower's frozen blocks, beside embeddings."""
        return self.image_rows.enabled and not self.train.lock.freezes_images

    @property
    def stored_texts(self) -> tuple[HardCaptions | None, ...]:
        """The texts whose embeddings ``embed`` writes at stage 0; None stands for the captions.

        They are those that the training of stages reads (``TrainConfig.stored_texts``), and the
        captions if clustering reads them.
        """
        trained = self.train.stored_texts if self.has_stages else ()
        clustered = self.cluster.feature == "mean" and None not in trained
        return (None, *trained) if clustered else trained

    @property
    def shares_text_tower(self) -> bool:
        """True if all stages share stage 0's text tower, and so its text embeddings."""
        train = self.train
        return self.trained_model is None and train.start == "base" and not train.lock.text
