"""Saves and resumes the state of a training with torch.distributed.checkpoint (DCP).

Each saved step is a directory, which any engine and any number of ranks can load::

    checkpoints/
      step_00002000/           .metadata  __0_0.distcp  __1_0.distcp ...  state.json
      .step_00004000.tmp/      unfinished: being written, or left by a killed process until the
                               next start removes it
      .damaged_step_00003000/  a start found it damaged, and nothing uses it again

The state is a flat mapping from names to tensors. All ranks write a step under a temporary name and
rank 0 renames it, so a directory with the final name is complete. ``state.json`` lists the size and
the SHA-256 of every file: sizes are compared before a step is loaded, and ``mclclip doctor RUN``
compares the SHA-256. DCP reads its metadata with pickle, so load only checkpoints of runs that you
trust.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveInt

from mclclip.util import files
from mclclip.util.options import STRICT, protocol_of

_PROTOCOLS = (None, "s3", "gs", "az")


@checked_dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """When checkpoints are saved, how long they are kept, and where they are copied to."""

    every: PositiveInt = 1000
    """Steps between checkpoints."""
    keep: PositiveInt = 2
    """A running training keeps this many checkpoints, the newest. A finished one keeps the last
    checkpoint and the exported one."""
    keep_every: PositiveInt | None = None
    """Checkpoints of steps divisible by this number are never removed (null: none)."""
    asynchronous: bool = False
    """Continue training while a copy of the state in main memory is written to disk."""
    mirror: str | None = None
    """A folder that gets a copy of every checkpoint: the path of another disk, or a url of an
    object store, such as ``s3://bucket/run`` (``gs://`` and ``az://`` too). A training without
    checkpoints of its own, also one that ``--force`` moved aside, goes on from its copies there."""

    def __post_init__(self) -> None:
        url = self.mirror
        if url is not None and (not url or protocol_of(url) not in _PROTOCOLS):
            raise ValueError(
                f"mirror={files.printable(url)!r} cannot be used: give a folder by its path, or a "
                "url of s3://, gs:// or az://"
            )
        if url is not None and protocol_of(url) is not None and ("?" in url or "@" in url):
            raise ValueError(
                f"mirror={files.printable(url.rpartition('@')[2])!r} holds a query or a password: "
                "leave it out, and put it into the environment, since warnings show this url"
            )
