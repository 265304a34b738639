"""Data sets that ``mclclip make-dataset`` writes as shards: one module per data set.

Each has a function ``build(sources, seed, **options)`` that returns the samples of each split; its
keyword options, with their types and defaults, are the options of the data set. The files are read
from the user's folders; nothing is downloaded unless the user asks for it (`sources.Sources`).
"""

NAMES = (
    "attributed_patterns",
    "celeba",
    "cifar10",
    "cifar_mnist",
    "folder",
    "imagenet_subset",
    "stl10",
    "stl_digits",
    "trifeature",
)
