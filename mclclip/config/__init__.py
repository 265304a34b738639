"""Every option as a dataclass: load from YAML, override by ``key.path=value``, check, dump."""

from mclclip.config.options import (
    BenchmarkConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EmbedConfig,
    EvalConfig,
    ExportConfig,
    ModelConfig,
    SourceConfig,
)
from mclclip.config.reading import dump, from_tree, load, to_tree
from mclclip.config.training import (
    CheckpointConfig,
    EngineConfig,
    LockConfig,
    LoraConfig,
    PlanConfig,
    TrainConfig,
)

__all__ = [
    "BenchmarkConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "EmbedConfig",
    "EngineConfig",
    "EvalConfig",
    "ExportConfig",
    "LockConfig",
    "LoraConfig",
    "ModelConfig",
    "PlanConfig",
    "SourceConfig",
    "TrainConfig",
    "dump",
    "from_tree",
    "load",
    "to_tree",
]
