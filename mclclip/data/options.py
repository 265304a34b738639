"""Options of the data: sources, how they are read, in which order, and what is stored of them."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mclclip.data.decode import MAX_IMAGE_PIXELS, Pixels
from mclclip.data.remote import RemoteOptions, check_protocol
from mclclip.util.options import NO_RESULT, STRICT, Share

Policy = Literal["drop", "backoff", "mask", "wrap", "carry"]
"""Use of the samples that fill no batch of their own group (see ``data.epoch_plan``)."""
Order = Literal["round_robin", "proportional"]
"""In which order the batches of groups come (see ``data.epoch_plan``)."""
LabelMode = Literal["prefix", "last"]
"""Which stages' cluster labels make pseudo labels (see ``data.labels``)."""
MOST_DRAWS = 2 * 10**9
"""Draws of an epoch at most: the square of their number fits int64."""


@checked_dataclass(frozen=True, config=STRICT)
class SourceConfig:
    """One data source: WebDataset shards with images and captions."""

    shards: str | list[str]
    """Tar shards: a brace list, a glob, a list of these, or ``@FILE`` with one per line; paths, or
    urls of S3, GS and HTTP."""
    captions: str | dict[str, PositiveFloat] = "txt"
    """``txt`` (one caption per sample), ``lines`` (a .txt with a caption on each line),
    ``json:FIELD`` (a string or a list of strings), or several fields by the probability that an
    epoch draws from each, such as ``{json:long: 0.3, json:short: 0.7}``; they sum to 1. A sample
    that lacks one is drawn from the others."""
    attributes: list[str] = field(default_factory=list)
    """Fields of each sample's ``.json`` that the index keeps as attributes: strings or integers."""
    subset: str | None = None
    """A ``.npy`` of the uids that are taken, as DataComp writes it: dtype ``u8,u8``, sorted, the
    upper and lower 64 bits of each. Samples have their uids in the parquet beside their shard, or
    in their ``.json``. Null: all."""
    weight: NonNegativeFloat = 1.0
    """How often an epoch of a training draws each of its samples (0: never; they are still indexed,
    embedded and clustered)."""


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
    exclude: str | None = None
    """File of samples to leave out, a key ``source/key`` on each line, such as a picture whose
    decoding does not end. A batch replaces them as it replaces a bad sample, and they are counted
    as ``excluded``. A training that goes on accepts another file; samples that are listed no more
    get rows of finished embeddings by `mclclip embed --force`. Null: none."""
    max_open_files: PositiveInt = 64
    """Shards that one process keeps open at once."""
    verify: Literal["captions", "full"] = "captions"
    """Parts of a shard that are compared with the index. ``captions``: its size, and the caption of
    every sample that is read; a shard with another time of change is scanned again first. ``full``:
    every image that is read too; indexing then reads all images once, for their checksums, and
    whoever reads from such an index compares them."""
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    """How shards behind urls are read."""


@checked_dataclass(frozen=True, config=STRICT)
class PlanConfig:
    """The plan of an epoch: how samples form batches, and how often each is drawn."""

    policy: Policy = "backoff"
    """Use of the samples that do not fill a batch of their group (see ``data.epoch_plan``)."""
    order: Order = "proportional"
    """``round_robin``: Algorithm 1 of MCL; ``proportional``: a seeded shuffle of all batches."""
    weights: str | None = field(default=None, metadata=NO_RESULT)  # but for what the file holds
    """``.npy`` file of one number per sample of the index, in its order: how often an epoch draws
    the sample (0: never), such as weights.npy of ``blindspots`` or of ``filter``. Multiplied by
    ``data.sources.NAME.weight``."""
    samples_per_epoch: Annotated[int, Field(ge=1, le=MOST_DRAWS)] | None = None
    """Draws of an epoch, to which all weights are scaled (null: the sum of the weights, which is
    the number of samples where none is set)."""
    block: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Samples of a group, neighbours in the index, that stay together in every epoch, so that they
    can be read in one piece from the shards of ``mclclip relocate`` (1: none do; small groups have
    smaller blocks). Trainings without groups have none."""


@checked_dataclass(frozen=True, config=STRICT)
class SentencesConfig:
    """Sentences of a caption that a training reads in its place, drawn anew in every epoch."""

    number: PositiveInt | Literal["all"] = 1
    """How many are drawn; they stay in their order. A caption with fewer has all of its own."""
    leave_out_first: Share = 0.0
    """Probability with which the first one is left out before the others are drawn; a caption of
    one sentence keeps it."""

    def __post_init__(self) -> None:
        if self.number == "all" and not self.leave_out_first:
            raise ValueError(
                "sentences has number=all and leave_out_first=0, which is the whole caption: give "
                "a number, a probability, or sentences=null"
            )


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
class RelocateConfig:
    """Copies of the samples in the order of a stage's groups (``mclclip relocate``)."""

    enabled: bool = False
    """Make them before each stage is trained on groups, and let its training read them: the same
    batches, from fewer and longer reads where ``train.plan.block`` is above 1."""
    folder: str | None = None
    """Where they lie, as ``FOLDER/NAME_OF_RUN/stage_1`` and so on, on a disk that all ranks share
    (null: in the run directory). They take as much room as the data, for each stage."""
    url: str | None = None
    """Where trainings read these shards instead, such as ``s3://bucket/copies``: upload those of
    each stage to ``stage_1`` and so on below it, after ``relocate`` and before ``train``."""
    samples_per_shard: PositiveInt = 10_000
    """Samples of a shard."""

    def __post_init__(self) -> None:
        if self.url is not None:
            check_protocol(self.url, "relocate.url")


@checked_dataclass(frozen=True, config=STRICT)
class ImageRowsConfig:
    """Rows on disk that stand for images: the output of the frozen part of the image tower."""

    enabled: bool = False
    """Write the output of the frozen blocks at stage 0, and start every training after that and
    every embedding pass from it. Where ``train.lock`` freezes the whole tower, stage 0's embeddings
    are read, and nothing else is written. Every epoch then sees the same crop of an image, that of
    validation."""
    dtype: Literal["float16", "float32"] = "float16"
    """Number format of the rows that are written."""
