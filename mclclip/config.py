"""Every option as a dataclass: load from YAML, override by ``key.path=value``, check, dump.

Derived numbers are not options: they are computed once, by the verb that needs them, and logged.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeInt, PositiveFloat, PositiveInt

_strict = ConfigDict(extra="forbid")


@checked_dataclass(frozen=True, config=_strict)
class SourceConfig:
    """One data source: WebDataset shards with images and captions."""

    shards: str | list[str]
    """Tar shards: a brace list, a glob, a list of these, or ``@FILE`` with one per line."""
    captions: str = "txt"
    """``txt`` (one caption per sample) or ``json:FIELD`` (a string or a list of strings)."""


@checked_dataclass(frozen=True, config=_strict)
class DataConfig:
    """Where samples come from and how they are read."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Data sources by name; a sample's key is ``source/key``."""
    num_workers: NonNegativeInt = 2
    """Loader processes per rank (0: read in the training process)."""
    index_workers: PositiveInt = 2
    """Processes that scan shards side by side."""
    max_image_pixels: PositiveInt = 100_000_000
    """Images with more pixels are refused as decompression bombs."""
    max_bad_fraction: float = 0.01
    """Share of undecodable samples (of the index) above which every verb stops on all ranks."""
    max_open_files: PositiveInt = 64
    """Shards that one process keeps open at once."""


@checked_dataclass(frozen=True, config=_strict)
class ModelConfig:
    """The encoder that every stage starts from."""

    name: str | dict[str, Any] = "ViT-B-32"
    """An open_clip model name, ``local-dir:PATH``, the path of a JSON model config, or such a
    config in place (``embed_dim``, ``vision_cfg``, ``text_cfg``)."""
    pretrained: str | None = None
    """open_clip's tag of the weights, a file, or null (random weights from ``seed``)."""
    augmentation: dict[str, Any] = field(default_factory=dict)
    """Fields of open_clip's AugmentationCfg, such as ``scale: [0.4, 1.0]`` (its own default:
    RandomResizedCrop with scale 0.9 to 1)."""


@checked_dataclass(frozen=True, config=_strict)
class EmbedConfig:
    """How embeddings are made."""

    batch_size: PositiveInt = 256
    """Images per forward; batches are cut within a shard, so results do not depend on ranks."""
    dtype: Literal["float16", "float32"] = "float16"
    """Number format of embeddings on disk."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the encoder."""
    feature: Literal["projected", "pooled"] = "projected"
    """``projected``: after the projection (default); ``pooled``: before it."""


@checked_dataclass(frozen=True, config=_strict)
class ClusterConfig:
    """k-means over the embeddings of one stage, and the labels made of it."""

    num_clusters: PositiveInt | list[PositiveInt] = 10
    """K, clusters per stage: one number, or one for each clustered stage (0, 1, ...)."""
    algorithm: Literal["spherical", "euclidean"] = "spherical"
    """``spherical`` assigns by cosine; ``euclidean`` is what the MCL authors released."""
    restarts: PositiveInt = 3
    """Independent starts; the one with the lowest inertia is kept."""
    max_iterations: PositiveInt = 100
    """Lloyd iterations at most."""
    tolerance: float = 1e-5
    """Relative change of inertia at which iteration stops."""
    init_samples: PositiveInt = 100_000
    """Rows from which k-means++ draws its start (at least 256 K are used where there are)."""
    label_mode: Literal["prefix", "last"] = "prefix"
    """``prefix``: labels of all earlier stages (paper, Eq. 2); ``last``: only the last stage's."""

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


@checked_dataclass(frozen=True, config=_strict)
class PlanConfig:
    """Which samples come together."""

    policy: Literal["drop", "backoff", "mask", "wrap"] = "backoff"
    """What happens to samples that do not fill a batch of their group."""
    order: Literal["round_robin", "proportional"] = "proportional"
    """``round_robin``: Algorithm 1 of MCL; ``proportional``: a seeded shuffle of all batches."""


@checked_dataclass(frozen=True, config=_strict)
class LockConfig:
    """What is trained; everything else is frozen at the base weights."""

    image_blocks: NonNegativeInt | Literal["all"] = "all"
    """Last blocks of the image tower that are trained (ResNet: of stem and four layers)."""
    image_norm: bool = True
    """Train the final norm of the image tower (ResNet: batch norms of trained groups)."""
    image_projection: bool = True
    """Train the image projection (ResNet: the attention pool)."""
    text: bool = True
    """Train the text tower; false: frozen, its embeddings are computed once by ``embed``."""
    logit_scale: bool = True
    """Train the logit scale."""


@checked_dataclass(frozen=True, config=_strict)
class TrainConfig:
    """One training: its data order, its optimizer, its records."""

    global_batch: PositiveInt = 1024
    """Samples per optimizer step over all ranks."""
    epochs: PositiveFloat = 20
    """Passes over the plan; ignored where ``steps`` is set."""
    steps: PositiveInt | None = None
    """Optimizer steps in all."""
    plan: PlanConfig = PlanConfig()
    lock: LockConfig = LockConfig()
    lr: float = 5e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up."""
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises from zero."""
    weight_decay: float = 0.2
    """AdamW weight decay (none on norms, biases and the logit scale)."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW betas."""
    eps: float = 1e-6
    """AdamW epsilon."""
    clip_grad_norm: float | None = None
    """Largest gradient norm (null: no clipping)."""
    precision: Literal["fp32", "bf16", "float64"] = "fp32"
    """``bf16`` is autocast; ``float64`` serves checks of the arithmetic."""
    checkpoint_every: PositiveInt = 1000
    """Steps between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept (the newest)."""
    log_every: PositiveInt = 10
    """Steps between rows of metrics.jsonl."""
    cached_text: bool = True
    """With a locked text tower: read text embeddings from disk instead of running the tower."""


@checked_dataclass(frozen=True, config=_strict)
class BenchmarkConfig:
    """One benchmark of the suite that runs between stages and at the end."""

    kind: Literal["mmvp", "retrieval", "zeroshot"]
    """Which evaluator."""
    path: str
    """Folder of the benchmark (mmvp: in its published layout; zeroshot: a folder per class)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the evaluator, by its own names."""


@checked_dataclass(frozen=True, config=_strict)
class EvalConfig:
    """What the encoders are measured on."""

    suite: dict[str, BenchmarkConfig] = field(default_factory=dict)
    """Benchmarks by name."""
    batch_size: PositiveInt = 256
    """Images or texts per forward."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the encoder during evaluation."""


@checked_dataclass(frozen=True, config=_strict)
class ExportConfig:
    """What is joined at the end."""

    concat: list[Literal["raw", "stage_norm"]] = field(
        default_factory=lambda: ["raw", "stage_norm"]
    )
    """Variants of the concatenated encoder."""
    soup: bool = True
    """Write the uniform soup of all stages."""


@checked_dataclass(frozen=True, config=_strict)
class Config:
    """A whole run. ``mclclip config`` prints it resolved."""

    run_dir: str
    """Where everything of the run is written."""
    seed: NonNegativeInt = 0
    """Seed of weights, data order, augmentation and clustering."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; ``auto``: the GPU of this rank where there is one."""
    num_threads: PositiveInt | None = None
    """Intra-op threads per process (null: torch's choice)."""
    num_stages: PositiveInt = 3
    """MCL stages after stage 0."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    base: TrainConfig | None = None
    """Training of stage 0 from scratch; null: stage 0 is the given encoder."""
    embed: EmbedConfig = EmbedConfig()
    cluster: ClusterConfig = ClusterConfig()
    train: TrainConfig = TrainConfig()
    """Training of every stage s >= 1 (and of the controls)."""
    controls: list[Literal["ungrouped", "random_groups"]] = field(default_factory=list)
    """Controls at equal compute: each repeats every stage with another data seed."""
    eval: EvalConfig = EvalConfig()
    export: ExportConfig = ExportConfig()
    track: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Metric sinks beside metrics.jsonl."""

    def __post_init__(self) -> None:
        if len(set(self.controls)) != len(self.controls):
            raise ValueError(f"controls names one twice: {self.controls}")


# --- load, override, check, dump ---------------------------------------------------------------


def load(path: Path | str | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies ``key.path=value`` overrides and checks everything.

    Raises FileNotFoundError for a missing file and ValueError, one line, for anything else: an
    unknown key is named with the nearest valid one, a wrong value with its dotted path.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"no configuration file at {path}")
        tree = _parse_yaml(Path(path).read_text(), str(path)) or {}
        if not isinstance(tree, dict):
            raise ValueError(f"{path} holds {type(tree).__name__}, expected a mapping of options")
    for override in overrides:
        _apply(tree, override)
    return from_tree(tree)


def from_tree(tree: dict[str, Any]) -> Config:
    """Checks a nested mapping and returns the Config (see ``load`` for the errors)."""
    try:
        return TypeAdapter(Config).validate_python(tree)
    except ValidationError as error:
        raise ValueError(_message(error)) from None


def to_tree(config: Any) -> dict[str, Any]:
    """A config (or a part of one) as plain nested mappings."""
    tree: dict[str, Any] = dataclasses.asdict(config)
    return tree


def dump(config: Config) -> str:
    """The resolved configuration as YAML."""
    plain = TypeAdapter(Config).dump_python(config, mode="json")
    text: str = yaml.safe_dump(plain, sort_keys=False)
    return text


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def _apply(tree: dict[str, Any], override: str) -> None:
    """Sets one ``key.path=value`` in the tree; the value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"got the override {override!r}, expected key.path=value")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        below = node.setdefault(parent, {})
        if below is None:
            below = node[parent] = {}
        if not isinstance(below, dict):
            raise ValueError(f"override {override!r}: {parent!r} holds a value, not options")
        node = below
    node[last] = _parse_yaml(text, f"override {override!r}")
    if node[last] is None and parents in (["eval", "suite"], ["data", "sources"]):
        del node[last]  # eval.suite.coco=null drops a recipe's benchmark


_UNION_MEMBERS = ("int", "str", "constrained-int", "constrained-float")
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


def _message(error: ValidationError) -> str:
    """The first problem as one line: dotted path, what it got, what was wanted."""
    problems = error.errors()
    unknown = [item for item in problems if item["type"] in _UNKNOWN]
    # Of the tried members of a union the one that got farthest tells most.
    problem = unknown[0] if unknown else max(problems, key=lambda item: len(item["loc"]))
    path = [str(part) for part in problem["loc"]]
    if problem["type"] in _UNKNOWN:
        valid = _fields_at(path[:-1])
        near = difflib.get_close_matches(path[-1], valid, n=1, cutoff=0.0)
        hint = f": did you mean {near[0]!r}?" if near else ""
        return f"unknown option {'.'.join(path)!r}{hint} (valid here: {', '.join(valid)})"
    # pydantic adds the tried members of a union to the path: "image_blocks.int".
    name = ".".join(part for part in path if part not in _UNION_MEMBERS and "[" not in part)
    if problem["type"] in ("missing", "missing_argument"):
        return f"option {name!r} is required: set {name}=VALUE"
    got = "" if isinstance(problem["input"], dict) else f", got {problem['input']!r}"
    return f"option {name or 'configuration'!r}{got}: {problem['msg']}"


def _fields_at(path: list[str]) -> list[str]:
    """Names of the options valid below a dotted path."""
    current: Any = Config
    for part in path:
        current = _dataclass_in(typing.get_type_hints(current).get(part, current))
    return [item.name for item in dataclasses.fields(current)]


def _dataclass_in(annotation: Any) -> Any:
    """The options dataclass that an annotation mentions, such as the values of a mapping."""
    if dataclasses.is_dataclass(annotation):
        return annotation
    return next(filter(None, map(_dataclass_in, typing.get_args(annotation))), None)
