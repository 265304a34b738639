"""Data sets that ``mclclip make-dataset`` writes as shards, found by the names of their modules.

Each has a function ``build(sources, seed, **options)`` that returns the samples of each split; its
keyword options, with their types and defaults, are the options of the data set. The files are read
from the user's folders; nothing is downloaded unless the user asks for it (`sources.Sources`).
"""

from mclclip.util import shipped

NAMES = shipped.plugins("data/datasets")
