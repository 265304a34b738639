"""A run directory, opened: everything that its verbs wrote there, by name.

    run = Run.open("runs/mine")
    run.results                                        # pandas.DataFrame, a row per figure
    ids = run.spread_ids(1_000)                        # of samples, evenly over the index
    run.captions(ids[:8]), run.images(ids[:8])
    run.stage(0).embeddings_of(ids)                    # float32 [1000, D]
    run.stage(0).clusters.labels                       # [N, L], memory-mapped
    run.stage(1).metrics                               # pandas.DataFrame, a row per recorded step
    run.controls["ungrouped"].stage(1).encoder()

Each part is read at its first use, after a comparison of its files' sizes. Rows and records can be
read in part, since there may be many millions. A missing part raises an error of one line that
names the verb which makes it. Nothing is written and no lock is taken, so a run can be opened while
it trains. torch is imported only to read images or to load an encoder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mclclip.data.arrays import open_npy
from mclclip.data.labels import read_pseudo_labels
from mclclip.data.row_store import RowStore, left_out
from mclclip.data.sample_index import SampleIndex
from mclclip.eval import results
from mclclip.eval.results import Result
from mclclip.run import artifacts
from mclclip.run.artifacts import Manifest, RunPaths
from mclclip.util import files

if TYPE_CHECKING:
    import torch
    from pandas import DataFrame
    from PIL.Image import Image

    from mclclip.config import Config
    from mclclip.data.bytes import Bytes
    from mclclip.models.encoder import Encoder
    from mclclip.models.model import Model

Ids = Sequence[int] | NDArray[np.int64]
Integers = NDArray[np.int64]
Kind = Literal["embeddings", "clusters", "pseudo_labels", "train", "export"]
"""Kinds of artifacts in a stage's folder."""

PIECES = 64
"""Pieces that rows which are spread over the index lie in: each costs the reading of a block of a
file."""

MAX_BYTES = 4 << 20
"""Bytes at most of a file of records that are read; of a longer one lines spread evenly over it."""

POINTS = 400
"""Rows at most of a training's records."""

JOINED = ("concat_raw", "concat_stage_norm", "soup_uniform")
"""The joined encoders that a run may have."""

_LONGEST_LINE = 1 << 16


class Run:
    """A run directory, of which nothing needs to be there yet.

    directory   the run's folder
    config      its configuration; None where there is none, as in a folder of evaluations alone
    layout      paths of everything in it
    seed        of what is drawn from the run; 0 where it has no configuration
    """

    def __init__(
        self,
        directory: Path,
        config: Config | None = None,
        variant: str = "mcl",
    ) -> None:
        self.directory, self.config = Path(directory), config
        self.layout = RunPaths(self.directory, variant)
        self.seed = 0 if config is None else config.seed
        self._whole: Run | None = None  # the run that this one is a control of

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        config: Config | None = None,
    ) -> Self:
        """The run in a folder, with the configuration that it recorded, or the given one.

        Raises FileNotFoundError where there is no such folder or it holds none of a run's files,
        and ValueError where the recorded configuration is wrong.
        """
        from mclclip import config as configuration

        folder = Path(directory)
        recorded = folder / "config.yaml"
        some = (recorded, folder / "results.jsonl", folder / "stage_0")
        if not any(path.exists() for path in some):
            raise FileNotFoundError(
                f"there is no run at {folder}: name the folder of a run, which has config.yaml, "
                "results.jsonl or stage_0"
            )
        if config is None and recorded.is_file():
            config = configuration.load(str(recorded), [])
        return cls(folder, config)

    @classmethod
    def of(cls, config: Config, variant: str = "mcl") -> Run:
        """The run of a configuration, or one of its controls (``RunPaths.variant``)."""
        return cls(Path(config.run_dir), config, variant)

    # --- its parts ---

    def __repr__(self) -> str:
        """The folder, what it holds, and how many figures there are; nothing is read or cached."""
        stages, controls = (
            ", ".join(sorted(path.name for path in self.directory.glob(f"{kind}/"))) or "none"
            for kind in ("stage_*", "controls/*")
        )
        rows = self.layout.results
        figures = rows.read_bytes().count(b"\n") if rows.is_file() else 0
        what = f"stages: {stages}; controls: {controls}; figures: {figures}"
        return f"{type(self).__name__}: {self.directory}\n  {what}"

    @cached_property
    def index(self) -> SampleIndex:
        """The sample index. Raises FileNotFoundError where there is none, and RuntimeError where
        its tables have other sizes than were written."""
        return SampleIndex.open(self.layout.index) if self._whole is None else self._whole.index

    def stage(self, number: int) -> Stage:
        """A stage, of which nothing needs to be there yet; 0 is the base."""
        return Stage(self, number)

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages that have a folder, without gaps."""
        stages: list[Stage] = []
        while self.layout.stage(len(stages)).is_dir():
            stages.append(Stage(self, len(stages)))
        return stages

    @cached_property
    def controls(self) -> dict[str, Run]:
        """The controls that have a folder, by name, each opened as this run is; they share its
        index and its stage 0."""
        controls = {}
        for folder in sorted(self.directory.glob("controls/*/")):
            control = Run(self.directory, self.config, folder.name)
            control._whole = self
            controls[folder.name] = control
        return controls

    def exports(self) -> dict[str, Path]:
        """The folders of all exported encoders, of controls too, by their names in ``results``."""
        from mclclip.models.weights import has_config

        exports: dict[str, Path] = {}
        for run in (self, *self.controls.values()):
            stages = [stage for stage in run.stages if stage.number or run is self]
            exports |= {stage.name: stage.directory("export") for stage in stages}
            exports |= {run.layout.model_name(name): run.layout.joined(name) for name in JOINED}
        return {name: path for name, path in exports.items() if has_config(path)}

    @cached_property
    def result_rows(self) -> list[Result]:
        """The rows of results.jsonl in order, none where there is no such file yet.

        Raises ValueError, naming the line, where a line is not a row.
        """
        return results.read(self.layout.results)

    @property
    def results(self) -> DataFrame:
        """``result_rows`` as a table, a row per figure: encoder, benchmark, metric, value, interval
        (both bounds), unit, count and protocol; values and bounds in the row's unit."""
        import pandas

        columns = ["encoder", "benchmark", "metric", "value", "interval", "unit", "count"]
        rows = [
            (
                *(row.model, row.benchmark, row.metric, row.value),
                *((row.ci_low, row.ci_high), row.unit.name, row.count, row.protocol),
            )
            for row in self.result_rows
        ]
        return pandas.DataFrame(rows, columns=[*columns, "protocol"])

    def finished(self, folder: Literal["filters", "blindspots"]) -> dict[str, Path]:
        """The finished artifacts of ``mclclip filter`` or ``blindspots`` by name, without those
        that were moved aside."""
        folders = (path.parent for path in self.directory.glob(f"{folder}/*/{artifacts.MANIFEST}"))
        return {path.name: path for path in sorted(folders) if ".old-" not in path.name}

    # --- samples ---

    def spread_ids(self, count: int) -> Integers:
        """Sorted ids of at most ``count`` samples, in pieces that lie evenly over the index."""
        return spread(len(self.index), count)

    def draw_ids(self, count: int, purpose: int) -> Integers:
        """Sorted ids of at most ``count`` samples that can be decoded and have a row in every
        finished embedding, drawn by the seed and a number for the ``purpose``."""
        usable = np.setdiff1d(np.arange(len(self.index)), self.index.bad_ids())
        num_stages = len(self.stages) if self.config is None else self.config.num_stages + 1
        for stage in map(self.stage, range(num_stages)):
            if stage.has("embeddings"):
                folder = stage.directory("embeddings")
                usable = np.setdiff1d(usable, left_out(folder, len(self.index.shards)))
        return np.sort(np.random.default_rng([self.seed, purpose]).permutation(usable)[:count])

    @cached_property
    def samples(self) -> Bytes:
        """Reads images and captions as the run's options of data say."""
        from mclclip.data.bytes import Bytes
        from mclclip.data.options import DataConfig

        data = DataConfig() if self.config is None else self.config.data
        if self.index.image_crc32 is None:
            data = replace(data, verify="captions")
        return Bytes(self.index, data)

    def captions(self, ids: Ids) -> list[list[str]]:
        """All captions of each sample, none for one without captions.

        Raises RuntimeError where a shard does not hold what was indexed.
        """
        return self.samples.captions_of([int(sample_id) for sample_id in ids])

    def stored_images(self, ids: Ids) -> list[bytes]:
        """The bytes of the images of samples, in whatever format they are stored.

        Raises RuntimeError, one line, for the first that cannot be read.
        """
        from mclclip.data.bytes import BadSample
        from mclclip.data.locations import PICTURE

        stored = []
        for raw in self.samples.read(ids, [PICTURE]):
            if isinstance(raw, BadSample):
                raise RuntimeError(
                    f"sample {self.index.names([raw.sample_id])[0]} cannot be read ({raw.reason}): "
                    "its shard has changed since it was indexed, put it back"
                )
            stored.append(raw.image)
        return stored

    def images(self, ids: Ids) -> list[Image | NDArray[np.uint8]]:
        """The images of samples as they are stored: upright RGB pictures, or arrays [H, W, C].

        Raises RuntimeError, one line, for the first that cannot be read or decoded.
        """
        from mclclip.data.decode import DecodeError, decode

        images, max_pixels = [], self.samples.options.max_image_pixels
        for sample_id, stored in zip(ids, self.stored_images(ids), strict=True):
            try:
                images.append(decode(stored, max_pixels, reads_arrays=True))
            except DecodeError as error:
                raise RuntimeError(
                    f"sample {self.index.names([int(sample_id)])[0]} cannot be decoded ({error}): "
                    "run 'mclclip embed', which finds such samples and leaves them out"
                ) from None
        return images

    def pictures(self, ids: Ids) -> list[NDArray[np.uint8]]:
        """The ``images`` as pictures uint8 [H, W, 3]: of other channels the first three, or the
        first one in grey."""
        from mclclip.data.decode import as_picture

        return [as_picture(np.asarray(image)) for image in self.images(ids)]


@dataclass(frozen=True)
class Stage:
    """A stage of a run, or of one of its controls. What is missing raises FileNotFoundError."""

    run: Run
    number: int

    @property
    def name(self) -> str:
        """Its encoder's name in results.jsonl, such as ``stage_1``."""
        return self.run.layout.model_name(f"stage_{self.number}")

    def directory(self, kind: Kind) -> Path:
        """Where an artifact of the stage lies."""
        path: Path = getattr(self.run.layout, kind)(self.number)
        return path

    def has(self, kind: Kind) -> bool:
        """Returns True if an artifact of the stage is finished."""
        return artifacts.is_finished(self.directory(kind))

    def manifest(self, kind: Kind) -> Manifest:
        """The manifest of a finished artifact.

        Raises RuntimeError where it has rows of another index than the run's.
        """
        directory = self.directory(kind)
        if not self.has(kind):
            stage = self.number - (kind == "pseudo_labels")  # the one that was clustered
            raise FileNotFoundError(
                f"no finished {kind.replace('_', ' ')} at {directory}: run 'mclclip "
                f"{artifacts.verb_of(kind)} --stage {stage}' first"
            )
        if kind in ("train", "export"):
            return artifacts.read_manifest(directory, kind)
        return self.run.index.manifest_of(directory, kind)

    @property
    def embeddings(self) -> RowStore:
        """Image embeddings [N, D] in index order, and the samples without any.

        Raises RuntimeError where they do not fit the index.
        """
        manifest, index = self.manifest("embeddings"), self.run.index
        return RowStore.of_samples(self.name, self.directory("embeddings"), manifest, index)

    @property
    def text_embeddings(self) -> RowStore:
        """Embeddings of all captions by stage 0's text tower, [captions, D], in index order: those
        of sample i begin at ``index.caption_start[i]``.

        Raises RuntimeError where they do not fit the index.
        """
        directory, index = self.run.layout.text_embeddings, self.run.index
        if not artifacts.is_finished(directory):
            raise FileNotFoundError(
                f"no finished text embeddings at {directory}: run 'mclclip embed --stage 0 --text' "
                "first"
            )
        manifest = index.manifest_of(directory, "text_embeddings")
        rows = RowStore.open(directory, manifest)
        if len(rows) != (needed := int(index.num_captions.sum())):
            raise RuntimeError(
                f"text embeddings at {directory} has {len(rows):,} rows, the index has {needed:,} "
                "captions: run 'mclclip embed --stage 0 --text --force' after 'mclclip index'"
            )
        return rows

    @property
    def clusters(self) -> Clusters:
        """The clusters of its embeddings."""
        return Clusters(self.directory("clusters"), self.manifest("clusters"))

    @property
    def labels(self) -> Integers:
        """int64 [N]: the pseudo labels that the stage is trained on; -1 outside of all groups."""
        self.manifest("pseudo_labels")
        return read_pseudo_labels(self.directory("pseudo_labels"), self.run.index)[0]

    def embeddings_of(self, ids: Ids) -> NDArray[np.float32]:
        """float32 [n, D]: the embeddings of samples; zeros for those that could not be used.

        Only the parts of the files that hold them are read.
        """
        distinct, order = self._distinct(ids)
        return np.asarray(self.embeddings[distinct], np.float32)[order]

    def clusters_of(self, ids: Ids) -> NDArray[np.integer]:
        """[n, L]: the clusters of samples, nearest first; -1 for none.

        Only what holds them is read.
        """
        distinct, order = self._distinct(ids)
        self.manifest("clusters").check(self.directory("clusters"))
        labels = RowStore([self.directory("clusters") / "cluster_labels.npy"], "cluster")
        clusters: NDArray[Any] = labels[distinct]
        return clusters[order]

    def _distinct(self, ids: Ids) -> tuple[Integers, Integers]:
        """The different ones of ``ids``, sorted, and where each of ``ids`` is among these."""
        numbers, count = np.asarray(ids, np.int64), len(self.run.index)
        if len(outside := numbers[(numbers < 0) | (numbers >= count)]):
            raise IndexError(f"sample_id {outside[0]}, the index has 0..{count - 1}")
        return np.unique(numbers, return_inverse=True)

    @property
    def metrics(self) -> DataFrame:
        """The records of its training so far, a row per recorded step: loss, lr, speed and more;
        at most ``POINTS`` rows that lie evenly over it, and none before it begins."""
        import pandas

        rows = self.records("metrics")[0]
        if len(rows) > POINTS:
            rows = [rows[int(place)] for place in np.linspace(0, len(rows) - 1, POINTS)]
        return pandas.DataFrame(rows)

    def records(self, name: Literal["metrics", "epochs"]) -> tuple[list[dict[str, Any]], bool]:
        """The rows of metrics.jsonl or epochs.jsonl, and True if these are all of them."""
        return read_records(self.directory("train") / f"{name}.jsonl")

    def encoder(self, device: str | torch.device = "cpu") -> Encoder:
        """Its exported encoder, as ``mclclip.load_model`` gives it."""
        from mclclip.models.encoder import load_model

        self.manifest("export")
        return load_model(self.directory("export"), device=device)

    def model(self, projector: Sequence[int] = ()) -> Model:
        """The model that it trains, in evaluation mode, with its exported weights; a ``projector``
        of these widths behind it has random weights, since exports have none."""
        from mclclip.models.loading import load_towers

        self.manifest("export")
        return load_towers(self.directory("export"), projector=projector)


@dataclass(frozen=True)
class Clusters:
    """Clusters of a stage's embeddings. Arrays are memory-mapped, after a comparison of the file's
    size, which raises RuntimeError where it is another than was written."""

    directory: Path
    manifest: Manifest

    @cached_property
    def labels(self) -> NDArray[np.integer]:
        """[N, L]: the clusters of every sample, nearest first; -1 for none."""
        return self._array("cluster_labels.npy")

    @cached_property
    def similarities(self) -> NDArray[np.floating]:
        """[N, L]: the similarity of every sample to these clusters' centroids."""
        return self._array("similarities.npy")

    @cached_property
    def centroids(self) -> NDArray[np.float32]:
        """[K, D]: the centroids."""
        return self._array("centroids.npy")

    def _array(self, name: str) -> np.ndarray:
        self.manifest.check(self.directory, name)
        return open_npy(self.directory / name, "cluster")


def spread(count: int, most: int) -> Integers:
    """At most ``most`` numbers of ``range(count)``, sorted, in pieces that lie evenly over it."""
    if count <= most:
        return np.arange(count, dtype=np.int64)
    size = max(most // PIECES, 1)
    starts = np.linspace(0, count - size, min(PIECES, most)).astype(np.int64)
    return (starts[:, None] + np.arange(size)).ravel()


def read_records(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The objects of a file of JSON lines by their ``step``, and whether these are all of them.

    If a file has more than ``MAX_BYTES``, the first line, ``POINTS`` lines spread evenly over it,
    and the last one are read. A line that is being written, or is no object, is left out. A missing
    file has no lines.
    """
    if not path.is_file():
        return [], True
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= MAX_BYTES:
            lines, whole = file.read(MAX_BYTES).split(b"\n"), True
        else:
            lines, whole = [], False
            for start in np.linspace(0, size - _LONGEST_LINE, POINTS).astype(np.int64):
                file.seek(int(start))
                if start:
                    file.readline(_LONGEST_LINE)  # the rest of a line
                lines.append(file.readline(_LONGEST_LINE))
            file.seek(max(size - _LONGEST_LINE, 0))
            lines += file.read(_LONGEST_LINE).split(b"\n")[-2:]
    rows = []
    for line in dict.fromkeys(lines):
        try:
            row = files.parse_json(line, str(path))
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return sorted(rows, key=lambda row: int(row["step"])), whole
