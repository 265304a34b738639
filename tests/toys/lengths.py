"""A verb that makes an artifact, as short as one can be: it counts captions by their length."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from mclclip.run.artifacts import Artifact
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util import files
from mclclip.util.options import NO_RESULT
from mclclip.util.remake import Remake


@dataclass(frozen=True)
class Counting:
    """Options of the counting."""

    longest: int = 10
    words: tuple[str, ...] = ()
    show: bool = field(default=False, metadata=NO_RESULT)


@dataclass(frozen=True)
class Lengths(Step[Path]):
    """How many captions of a file have a length."""

    kind = "lengths"
    counting: Counting
    unit: str

    def reads(self, how: Path) -> dict[str, str]:
        """The captions."""
        return {"captions": files.digest_file(how)}

    def make(self, out: Artifact, how: Path) -> Made:
        """Raises ValueError for a caption that is too long; then nothing is written."""
        lengths = Counter(len(line.split()) for line in how.read_text().splitlines())
        if max(lengths) > self.counting.longest:
            raise ValueError(
                f"longest is {self.counting.longest}, and a caption has {max(lengths)}"
            )
        path = out.begin() / "lengths.json"
        if not path.exists():  # of a call that was killed
            files.write_json(path, lengths)
        return Made({"captions": lengths.total()}, files.records_of(out.directory, path.name))


def run(captions: Path, out: Path, step: Lengths, *, force: Remake = Remake.NOTHING) -> Path:
    """Counts the captions of a file, unless they are counted; returns the directory."""
    make_artifact(step, out, captions, force)
    return out
