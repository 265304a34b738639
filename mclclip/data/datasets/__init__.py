"""The data sets that ``mclclip make-dataset`` writes as shards: one module each.

Its function ``build(sources, seed, **options)`` returns the samples of each split. The keyword
arguments, with their types and defaults, are the options of the data set. Files are read from the
user's folders; nothing is downloaded unless the user asks for it (`sources.Sources`).
"""

from pathlib import Path

NAMES = tuple(
    sorted(p.stem for p in Path(__file__).parent.glob("[a-z]*.py") if p.stem != "sources")
)
