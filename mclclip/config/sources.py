"""Options of a data source."""

from __future__ import annotations

from dataclasses import field

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat

from mclclip.options import STRICT


@checked_dataclass(frozen=True, config=STRICT)
class SourceConfig:
    """One data source: WebDataset shards with images and captions."""

    shards: str | list[str]
    """Tar shards: a brace list, a glob, a list of these, or ``@FILE`` with one per line; paths, or
    urls of S3, GS and HTTP."""
    captions: str = "txt"
    """``txt`` (one caption per sample) or ``json:FIELD`` (a string or a list of strings)."""
    attributes: list[str] = field(default_factory=list)
    """Fields of each sample's ``.json`` that the index keeps as attributes: strings or integers."""
    subset: str | None = None
    """A ``.npy`` of the uids that are taken, as DataComp writes it: dtype ``u8,u8``, sorted, the
    upper and lower 64 bits of each. Samples have their uids in the parquet beside their shard, or
    in their ``.json``. Null: all."""
    where: list[str] = field(default_factory=list)
    """Conditions on the columns of the parquet beside each shard, such as ``similarity>=0.28`` and
    ``status==success``; a sample is taken if all hold. Operators: < <= > >= == !=."""
    weight: NonNegativeFloat = 1.0
    """How often an epoch of a training draws each of its samples (0: never; they are still indexed,
    embedded and clustered)."""
