"""Every option as a dataclass: load from YAML, override by ``key.path=value``, check, dump."""

from mclclip.config.options import BenchmarkConfig, Config, ModelConfig, SourceConfig, TrainConfig
from mclclip.config.reading import dump, from_tree, load, to_tree

__all__ = [
    "BenchmarkConfig",
    "Config",
    "ModelConfig",
    "SourceConfig",
    "TrainConfig",
    "dump",
    "from_tree",
    "load",
    "to_tree",
]
