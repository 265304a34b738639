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
"""How samples are used that fill no batch of their own group (see ``data.epoch_plan``)."""
Order = Literal["round_robin", "proportional"]
"""The order of the batches of an epoch (see ``data.epoch_plan``)."""
LabelMode = Literal["prefix", "last"]
"""The stages whose cluster labels make pseudo labels (see ``data.labels``)."""
MOST_DRAWS = 2 * 10**9
"""Most draws of an epoch; the square of this number fits int64."""


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
    """A ``.npy`` file of the uids of the samples that are used, as DataComp writes it: dtype
    ``u8,u8``, sorted, the upper and lower 64 bits of each. Samples have their uids in the parquet
    file beside their shard, or in their ``.json``. Null: all samples are used."""
    weight: NonNegativeFloat = 1.0
    """How often an epoch of a training draws each sample of this source (0: never; the samples are
    still indexed, embedded and clustered)."""


@checked_dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Where samples come from and how they are read."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Data sources by name; the name begins the keys of their samples, ``source/key``."""
    num_workers: NonNegativeInt = 2
    """Processes of each rank that read data (0: the training process reads)."""
    index_workers: PositiveInt = 2
    """Processes that scan shards side by side."""
    max_image_pixels: PositiveInt = MAX_IMAGE_PIXELS
    """Images with more pixels (width times height) are refused as decompression bombs. So are JPEGs
    whose scans times pixels exceed 20 times this number (or its default, if that is more)."""
    pixels: Pixels | Literal["auto"] = "auto"
    """How training turns pictures into pixels. ``exact``: PIL and open_clip's own transform.
    ``fast``: simplejpeg and torch's resize; crops are the same, and pixels differ by at most 2 of
    255. ``auto``: ``fast``, or ``exact`` if an augmentation does more than crop. Everything except
    training is exact."""
    max_bad_fraction: Share = 0.01
    """Largest share of the samples that may be undecodable, and of the shards that may be damaged
    or cut short. If there are more, a verb stops."""
    exclude: str | None = None
    """File with the keys ``source/key`` of samples to leave out, one on each line, such as a
    picture whose decoding does not end. A batch replaces them as it replaces bad samples, and they
    are counted as ``excluded``. A resumed training accepts another file. If a sample is taken off
    the list, `mclclip embed --force` adds its row to finished embeddings. Null: none."""
    max_open_files: PositiveInt = 64
    """Most shards that one process keeps open at once."""
    verify: Literal["captions", "full"] = "captions"
    """Parts of a shard that are compared with the index. ``captions``: its size, and the caption of
    every sample that is read; a shard with another time of change is scanned again first. ``full``:
    also every image that is read. Indexing then reads all images once, for their checksums."""
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    """How shards behind urls are read."""


@checked_dataclass(frozen=True, config=STRICT)
class PlanConfig:
    """The plan of an epoch: how samples form batches, and how often each is drawn."""

    policy: Policy = "backoff"
    """How samples are used that do not fill a batch of their group (see ``data.epoch_plan``)."""
    order: Order = "proportional"
    """``round_robin``: Algorithm 1 of MCL; ``proportional``: a seeded shuffle of all batches."""
    weights: str | None = field(default=None, metadata=NO_RESULT)  # but for what the file holds
    """``.npy`` file with one number per sample, in the order of the index: how often an epoch draws
    the sample (0: never). ``blindspots`` and ``filter`` write such a weights.npy. The number is
    multiplied by ``data.sources.NAME.weight``."""
    samples_per_epoch: Annotated[int, Field(ge=1, le=MOST_DRAWS)] | None = None
    """Number of draws of an epoch; all weights are scaled to it. Null: the sum of the weights,
    which is the number of samples if there are no weights."""
    block: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Number of samples of a group, neighbours in the index, that stay together in every epoch, so
    that they can be read in one piece from the shards of ``mclclip relocate``. Small groups have
    smaller blocks; 1 shuffles single samples, as do trainings without groups."""


@checked_dataclass(frozen=True, config=STRICT)
class SentencesConfig:
    """A training reads some sentences of a caption instead of all, other ones in every epoch."""

    number: PositiveInt | Literal["all"] = 1
    """How many sentences are drawn; they keep their order. If a caption has fewer, all are read."""
    leave_out_first: Share = 0.0
    """Probability that the first sentence is left out before the others are drawn; a caption of
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
    """``projected``: the features after the projection; ``pooled``: those before it."""
    compile: Literal["auto", "none", "model"] = "auto"
    """torch.compile: ``model`` compiles each block of the image tower, ``none`` nothing; rows
    differ by rounding. ``auto``: ``model`` for transformers on a GPU, if the pass has more than
    1e17 operations over all ranks (600,000 pictures by a ViT-L-14) and Triton can compile."""


@checked_dataclass(frozen=True, config=STRICT)
class RelocateConfig:
    """Copies samples into new shards, in the order of a stage's groups (``mclclip relocate``)."""

    enabled: bool = False
    """Makes copies before each stage is trained on groups, and its training reads them. Batches are
    the same, from fewer and longer reads if ``train.plan.block`` is above 1."""
    folder: str | None = None
    """Folder of the copies, on a disk that all ranks share: those of stage 1 go to
    ``FOLDER/RUN-1f2e3d/stage_1``, by the run's name and a digest of its path, so a run that was
    moved copies again. Null: the run directory. The copies of each stage take as much room as the
    data."""
    url: str | None = None
    """Url from which trainings read the copies instead, such as ``s3://bucket/copies``. Upload
    the shards of stage 1 to ``URL/stage_1``, and so on, after ``relocate`` and before ``train``."""
    samples_per_shard: PositiveInt = 10_000
    """Number of samples of each shard."""

    def __post_init__(self) -> None:
        if self.url is not None:
            check_protocol(self.url, "relocate.url")


@checked_dataclass(frozen=True, config=STRICT)
class ImageRowsConfig:
    """Stores the output of the frozen part of the image tower, which is then read, not images."""

    enabled: bool = False
    """Writes the output of the frozen blocks at stage 0; all later trainings and embedding passes
    start from it. If ``train.lock`` freezes the whole tower, they start from stage 0's embeddings,
    and nothing more is written. Every epoch then sees the same crop of an image, that of
    validation."""
    dtype: Literal["float16", "float32"] = "float16"
    """Number format of the rows that are written."""
