"""A step makes one artifact; ``make`` is the runner of all steps.

A verb describes what it makes as a frozen dataclass whose every field counts for the identity of
the artifact, and calls ``make``. What changes no result (processes, devices, sizes of forward
passes) is in the ``how`` of the call, which is never compared, or in options that say so where they
are declared (``NO_RESULT``)::

    @dataclass(frozen=True)
    class Lengths(Step[SampleIndex]):
        kind = "lengths"
        longest: int

        def reads(self, how: SampleIndex) -> dict[str, str]:
            return {"index": how.digest}

        def make(self, out: Artifact, how: SampleIndex) -> Made:
            counts = count(how, self.longest)  # an error up to here leaves nothing behind
            save_npy(out.begin() / "lengths.npy", counts)
            return Made({"captions": counts.sum()}, records_of(out.directory, "lengths.npy"))
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from mclclip.run.artifacts import Artifact, Manifest
from mclclip.util import files
from mclclip.util.options import NO_RESULT
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")
How = TypeVar("How", contravariant=True)


@dataclass(frozen=True)
class Made:
    """The part of a finished artifact's manifest that its step determines.

    records  of its files, by name, with which they are compared later
    digest   identifies the content (None: the step and its inputs do, of which it is a function)
    """

    counts: Mapping[str, Any]
    records: Mapping[str, files.Record] = field(default_factory=dict)
    dtype: str | None = None
    digest: str | None = None


class Step(ABC, Generic[How]):
    """Makes an artifact: a frozen dataclass, whose fields and inputs are its identity."""

    kind: ClassVar[str]
    all_ranks: ClassVar[bool] = False
    """Whether all ranks call ``make`` together, or rank 0 alone does."""

    def reads(self, how: How) -> Mapping[str, str]:
        """Returns the digests of what the artifact is made from, by name. Rank 0 calls it."""
        return {}

    @abstractmethod
    def make(self, out: Artifact, how: How) -> Made:
        """Makes the files, and goes on with those of a call that was killed.

        Nothing on disk changes before ``out.begin()``, which returns the directory.
        """


def identity_of(options: Any) -> Any:
    """Returns a step or options as plain mappings and lists, without what changes no result."""
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
    """Returns the artifact of a step as it is on disk: finished, begun or neither.

    Writes nothing. Raises ValueError where it was made by another step or from other inputs. Call
    it on one rank.
    """
    inputs = dict(step.reads(how))
    return Artifact.open(
        directory, kind=step.kind, config=identity_of(step), inputs=inputs, force=force, write=False
    )


def make(step: Step[How], directory: Path, how: How, force: Remake = Remake.NOTHING) -> Manifest:
    """Makes the artifact of a step in ``directory``, unless it is finished; returns its manifest.

    Goes on with one that was begun. One of another step or of other inputs is refused with
    ValueError, or moved aside (``force``). Rank 0 alone touches the disk, and all ranks call this,
    or rank 0 does within ``collectives.on_main``.
    """
    from mclclip.ranks import collectives  # seconds, for torch: what a verb refuses comes before

    artifact = collectives.on_main(partial(find_artifact, step, directory, how, force))
    if artifact.manifest is not None:
        log.info("%s is finished: skipped", directory)
        return artifact.manifest
    made = step.make(artifact, how) if step.all_ranks else None

    def finish() -> Manifest:
        what = made or step.make(artifact, how)
        return artifact.finish(
            what.counts, dtype=what.dtype, content_digest=what.digest, records=what.records
        )

    return collectives.on_main(finish)
