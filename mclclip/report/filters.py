"""Filters of a run: the samples that each keeps, and how many of the others by reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mclclip import files
from mclclip.report.material import Material
from mclclip.run.artifacts import MANIFEST


@dataclass(frozen=True)
class Filter:
    """One artifact of ``mclclip filter``: its name, its options as flags, and numbers of samples:
    all, and by reason, the first of which is ``kept``."""

    name: str
    flags: str
    samples: int
    reasons: Mapping[str, int]


def filters(material: Material) -> list[Filter]:
    """The filters of a run by name; none where there are none.

    Raises RuntimeError where one is of another index, or its manifest is damaged.
    """
    found = []
    for directory in material.finished(material.layout.filters("")):
        manifest = material.index.manifest_of(directory, "filter")
        with files.own(directory / MANIFEST, "run 'mclclip filter --force' to make it again"):
            given = {k: v for k, v in manifest.config.items() if v is not None and v != []}
            flags = " ".join(f"--{name.replace('_', '-')} {_shown(given[name])}" for name in given)
            reasons = {str(name): int(n) for name, n in manifest.counts["reasons"].items()}
            found.append(Filter(directory.name, flags, int(manifest.counts["samples"]), reasons))
    return found


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
