"""Options as dataclasses: loaded from YAML, overridden by ``key.path=value``, checked, dumped."""

from mclclip.config.options import (
    Config,
    DataConfig,
    ModelConfig,
    TrainConfig,
)
from mclclip.config.reading import dump, from_tree, load, to_tree
from mclclip.config.sources import SourceConfig
from mclclip.config.suites import BenchmarkConfig

__all__ = [
    "BenchmarkConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "SourceConfig",
    "TrainConfig",
    "dump",
    "from_tree",
    "load",
    "to_tree",
]
