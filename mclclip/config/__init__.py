"""The options of all rooms as one `Config`: loaded from YAML, overridden, checked, dumped."""

from mclclip.config.options import Config
from mclclip.config.reading import dump, from_tree, load
from mclclip.train.options import TrainConfig

__all__ = [
    "Config",
    "TrainConfig",
    "dump",
    "from_tree",
    "load",
]
