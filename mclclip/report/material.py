"""Reads the files of a run that a report is made of, bounded parts of each.

Neither rows of labels nor embeddings are read whole, since there may be many millions: pieces that
are spread evenly over the index stand for all. Only the blocks that hold them are compared with
their records. Nothing of a run is changed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mclclip import files
from mclclip.config import Config
from mclclip.data.row_store import RowStore
from mclclip.data.sample_index import SampleIndex
from mclclip.eval.results import Result
from mclclip.run import artifacts
from mclclip.run.artifacts import Manifest
from mclclip.run.layout import Layout

LABEL_ROWS = 200_000
"""Rows at most of which the clusters are read."""

FEATURE_ROWS = 20_000
"""Rows at most of which the embeddings are read."""

PIECES = 64
"""Pieces that these rows lie in: each costs the reading of a block of every file."""

MAX_BYTES = 4 << 20
"""Bytes at most of a file of metrics that are read; of a longer one lines spread evenly over it."""

POINTS = 400
"""Rows at most of a file of metrics."""

_LONGEST_LINE = 1 << 16

Integers = NDArray[np.int64]


def spread(count: int, wanted: int, pieces: int = PIECES) -> list[slice]:
    """Pieces of ``range(count)`` that lie evenly over it, with at most ``wanted`` numbers."""
    if count <= wanted:
        return [slice(0, count)]
    size = max(wanted // pieces, 1)
    starts = np.linspace(0, count - size, min(pieces, wanted)).astype(np.int64)
    return [slice(int(start), int(start) + size) for start in starts]


def numbers_in(cuts: Sequence[slice]) -> Integers:
    """The numbers of pieces."""
    return np.concatenate([np.arange(cut.start, cut.stop, dtype=np.int64) for cut in cuts])


@dataclass(frozen=True)
class Material:
    """A run directory. ``config`` is None where it holds no configuration; ``rows`` are those of
    results.jsonl."""

    run_dir: Path
    config: Config | None
    rows: Sequence[Result]

    @property
    def layout(self) -> Layout:
        """Paths of MCL's own stages."""
        return Layout(self.run_dir)

    @cached_property
    def stages(self) -> list[int]:
        """Numbers of the stages that have a folder, without gaps."""
        found: list[int] = []
        while self.layout.stage(len(found)).is_dir():
            found.append(len(found))
        return found

    @cached_property
    def variants(self) -> list[str]:
        """``mcl``, and the names of the controls."""
        folders = sorted(self.run_dir.glob("controls/*/"))
        return ["mcl", *(folder.name for folder in folders)]

    @property
    def seed(self) -> int:
        """The seed of what is drawn for the report."""
        return 0 if self.config is None else self.config.seed

    @cached_property
    def index(self) -> SampleIndex:
        """The sample index. Its table is not compared with its record, which would read it whole;
        captions are compared with the checksums in it, so that a damaged row is noticed.

        Raises FileNotFoundError where there is none.
        """
        manifest = artifacts.read_manifest(self.layout.index, "index")
        return SampleIndex(self.layout.index, manifest.digest)

    def manifest(self, directory: Path, kind: str) -> Manifest | None:
        """The manifest of an artifact; None where it is not finished."""
        if not artifacts.is_finished(directory):
            return None
        return artifacts.read_manifest(directory, kind)

    def finished(self, folder: Path) -> list[Path]:
        """The finished artifacts in a folder by name, without those that were moved aside."""
        found = [path.parent for path in folder.glob(f"*/{artifacts.MANIFEST}")]
        return sorted(path for path in found if ".old-" not in path.name)

    # --- rows of clusters and embeddings ---

    @cached_property
    def label_ids(self) -> Integers:
        """Sorted ids of the samples whose clusters are read."""
        return numbers_in(spread(len(self.index), LABEL_ROWS))

    @cached_property
    def feature_ids(self) -> Integers:
        """Sorted ids of the samples whose embeddings are read."""
        return numbers_in(spread(len(self.index), FEATURE_ROWS))

    @cached_property
    def clusters(self) -> dict[int, NDArray[np.int64]]:
        """Nearest clusters of ``label_ids`` by stage, of the stages that are clustered; -1: none.

        Raises RuntimeError where they were made from another index or are damaged.
        """
        found = {}
        for stage in self.stages:
            directory = self.layout.clusters(stage)
            if artifacts.is_finished(directory):
                manifest = self.index.manifest_of(directory, "clusters")
                name = "cluster_labels.npy"
                labels = RowStore([directory / name], [manifest.record(name)], "cluster")
                cuts = spread(len(self.index), LABEL_ROWS)
                parts = [np.asarray(labels[cut])[:, 0] for cut in cuts]
                found[stage] = np.concatenate(parts).astype(np.int64)
        return found

    @cached_property
    def features(self) -> dict[int, NDArray[np.float32]]:
        """Embeddings of ``feature_ids`` by stage, of the stages that have some; zeros for samples
        that could not be used. Raises the errors of ``clusters``."""
        found = {}
        for stage in self.stages:
            directory = self.layout.embeddings(stage)
            if artifacts.is_finished(directory):
                found[stage] = self._rows(directory)
        return found

    def _rows(self, directory: Path) -> NDArray[np.float32]:
        manifest = self.index.manifest_of(directory, "embeddings")
        rows = RowStore.open(directory, manifest, len(self.index.shards))
        cuts = spread(len(self.index), FEATURE_ROWS)
        return np.concatenate([np.asarray(rows[cut], np.float32) for cut in cuts])

    # --- records of trainings ---

    def recorded(self, variant: str, stage: int) -> list[dict[str, Any]]:
        """Rows of a training's metrics.jsonl, at most ``POINTS``; none where there are none yet."""
        path = Layout(self.run_dir, variant).train(stage) / "metrics.jsonl"
        return thinned(read_lines(path)[0])

    def epochs(self, variant: str, stage: int) -> list[dict[str, Any]] | None:
        """All rows of a training's epochs.jsonl; None where they are too many to read."""
        rows, whole = read_lines(Layout(self.run_dir, variant).train(stage) / "epochs.jsonl")
        return rows if whole else None


def thinned(rows: Sequence[dict[str, Any]], count: int = POINTS) -> list[dict[str, Any]]:
    """At most ``count`` rows, spread evenly, with the first and the last."""
    if len(rows) <= count:
        return list(rows)
    return [rows[int(place)] for place in np.linspace(0, len(rows) - 1, count)]


def read_lines(path: Path, max_bytes: int = MAX_BYTES) -> tuple[list[dict[str, Any]], bool]:
    """The objects of a file of JSON lines, and whether these are all of them.

    Of a file of more than ``max_bytes`` the first line, ``POINTS`` that are spread evenly over it,
    and the last one are read. A line that is being written, or is no object, is left out. No file:
    no lines.
    """
    if not path.is_file():
        return [], True
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= max_bytes:
            lines, whole = file.read(max_bytes).split(b"\n"), True
        else:
            lines, whole = [], False
            for start in np.linspace(0, size - _LONGEST_LINE, POINTS).astype(np.int64):
                file.seek(int(start))
                if start:
                    file.readline(_LONGEST_LINE)  # the rest of a line
                lines.append(file.readline(_LONGEST_LINE))
            file.seek(max(size - _LONGEST_LINE, 0))
            lines += file.read(_LONGEST_LINE).split(b"\n")[-2:]
    found = []
    for line in dict.fromkeys(lines):
        try:
            row = files.parse_json(line, str(path))
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            found.append(row)
    return sorted(found, key=lambda row: int(row["step"])), whole
