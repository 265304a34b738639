"""A step makes one artifact; `make_artifact` runs every step.

A verb describes its artifact as a frozen dataclass, a `Step`, and calls `make_artifact`. All fields
of the step and the digests of its inputs are the identity of the artifact. What changes no result,
such as the device, is passed as ``how``, which is never compared, or is an option declared with
``NO_RESULT``::

    @dataclass(frozen=True)
    class Lengths(Step[SampleIndex]):
        kind = "lengths"
        longest: int

        def reads(self, how: SampleIndex) -> dict[str, str]:
            return {"index": how.digest}

        def make(self, out: Artifact, how: SampleIndex) -> Made:
            counts = count(how, self.longest)  # nothing is on disk yet if this fails
            save_npy(out.begin() / "lengths.npy", counts)
            return Made({"captions": counts.sum()}, records_of(out.directory, "lengths.npy"))
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from mclclip.run.artifacts import KINDS, Artifact, Manifest
from mclclip.run.lock import Lock
from mclclip.util import files
from mclclip.util.options import NO_RESULT
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")
How = TypeVar("How", contravariant=True)


@dataclass(frozen=True)
class Made:
    """The values that a step returns for the manifest of its artifact, see `Manifest`.

    records  size and SHA-256 of each file, by name
    digest   identifies the content (None: equal fields and inputs always give equal content)
    """

    counts: Mapping[str, Any]
    records: Mapping[str, files.Record] = field(default_factory=dict)
    dtype: str | None = None
    digest: str | None = None


class Step(ABC, Generic[How]):
    """Base class of frozen dataclasses, each of which makes one kind of artifact."""

    kind: ClassVar[str]
    """Names the artifact in its manifest, such as 'clusters'."""
    all_ranks: ClassVar[bool] = False
    """True: all ranks call ``make`` together. False: only rank 0 calls it."""

    def reads(self, how: How) -> Mapping[str, str]:
        """Returns the digest of each input, such as ``{"index": "3f..."}``. Rank 0 calls it."""
        return {}

    @abstractmethod
    def make(self, out: Artifact, how: How) -> Made:
        """Writes the artifact's files; resumes those of an earlier call that was killed.

        Call ``out.begin()`` before the first file: it returns the directory, made ready. An error
        before that call leaves the artifact as it was.
        """


def identity_of(options: Any) -> Any:
    """Converts a step or options to mappings and lists, without the ``NO_RESULT`` fields."""
    if is_dataclass(options):
        counted = [f.name for f in fields(options) if f.metadata != NO_RESULT]
        return {name: identity_of(getattr(options, name)) for name in counted}
    if isinstance(options, Mapping):
        return {name: identity_of(value) for name, value in options.items()}
    if isinstance(options, list | tuple):
        return [identity_of(value) for value in options]
    return options


def find_artifact(
    step: Step[How], directory: Path, how: How, force: Remake = Remake.NOTHING
) -> Artifact:
    """Compares ``directory`` with the identity of ``step``, and writes nothing.

    The returned artifact has a ``manifest`` if it is finished. Raises ValueError if the directory
    holds work of another identity, unless ``force`` allows to move it aside. Call it on one rank.
    """
    identity = step.kind, identity_of(step), dict(step.reads(how))
    return Artifact(directory, *identity, force=force).compare()


def make_artifact(
    step: Step[How], directory: Path, how: How, force: Remake = Remake.NOTHING
) -> Manifest:
    """Makes the artifact of ``step`` in ``directory`` unless it is finished; returns its manifest.

    Resumes begun work of the same identity. Raises ValueError for work of another identity; with
    ``force`` it is moved aside instead. All ranks call this together, or rank 0 alone within
    ``collectives.on_main``; only rank 0 compares and writes the manifest.
    """
    from mclclip.ranks import collectives  # imports torch, which takes seconds

    artifact = collectives.on_main(partial(find_artifact, step, directory, how, force))
    if artifact.manifest is not None:
        log.info("%s is finished: skipped", directory)
        return artifact.manifest
    place = directory.resolve()
    has_lock = step.kind not in KINDS or KINDS[step.kind].place  # of its run directory
    if has_lock or (place.is_dir() and not os.access(place.parent, os.W_OK)):  # a mounted folder
        return _make(step, artifact, how)

    def make_alone() -> Manifest:
        """Makes an artifact that lies in no run directory, whose lock would keep others out."""
        with Lock(place.with_name(f".{place.name}.lock"), wait_s=0.0, place=directory):
            # It may have waited for a process that has made it.
            return artifact.compare().manifest or _make(step, artifact, how)

    return collectives.on_main(make_alone)


def _make(step: Step[How], artifact: Artifact, how: How) -> Manifest:
    from mclclip.ranks import collectives

    values = step.make(artifact, how) if step.all_ranks else None

    def finish() -> Manifest:
        result = values or step.make(artifact, how)
        return artifact.finish(
            result.counts, dtype=result.dtype, content_digest=result.digest, records=result.records
        )

    return collectives.on_main(finish)
