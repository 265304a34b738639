"""`Run` reads everything that the verbs wrote into a run directory.

    run = Run.open("runs/mine")
    run.results                                        # pandas.DataFrame, a row per figure
    ids = run.spread_ids(1_000)                        # ids of samples, spread over the index
    run.captions(ids[:8]), run.images(ids[:8])
    run.stage(0).embeddings_of(ids)                    # float32 [1000, D]
    run.stage(0).clusters.labels                       # [N, L], memory-mapped
    run.stage(1).metrics                               # pandas.DataFrame, a row per recorded step
    run.controls["ungrouped"].stage(1).encoder()

Each part is read at its first use, after the sizes of its files were compared with its manifest. A
missing part raises an error that names the verb which makes it. There may be many millions of rows
and records, so both can be read in part. Nothing is written and no lock is taken, so a run can be
read while it trains. What reads an index is imported at its first use, as are pandas and torch, so
that results are read at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mclclip.data.arrays import open_npy
from mclclip.eval import results
from mclclip.eval.results import Result
from mclclip.run import artifacts
from mclclip.run.artifacts import Manifest, RunPaths
from mclclip.run.runlog import POINTS, read_records

if TYPE_CHECKING:
    import torch
    from pandas import DataFrame
    from PIL.Image import Image

    from mclclip.config import Config
    from mclclip.data.bytes import Bytes
    from mclclip.data.row_store import RowStore
    from mclclip.data.sample_index import SampleIndex
    from mclclip.models.encoder import Encoder

Ids = Sequence[int] | NDArray[np.int64]
Integers = NDArray[np.int64]
Kind = Literal["embeddings", "clusters", "pseudo_labels", "train", "export"]
"""Kinds of artifacts in a stage's folder."""

PIECES = 64
"""Into how many runs of neighbours `spread` cuts its numbers: reading each costs one block of a
file."""

JOINED = ("concat_raw", "concat_stage_norm", "soup_uniform")
"""The encoders joined from all stages that a run may have."""

log = logging.getLogger("mclclip")


class Run:
    """A run directory, or one of its controls; it may still be empty.

    directory   the run's folder
    config      its configuration; None if it has none, such as a folder that holds evaluations only
    layout      paths of everything in it
    seed        seeds `draw_ids`; 0 if there is no configuration
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
        self._parent: Run | None = None  # for a control: its run, whose index it shares

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        config: Config | None = None,
    ) -> Self:
        """Opens the run in the folder ``directory``; ``config`` (default) is its config.yaml.

        Raises FileNotFoundError if the folder is missing or holds none of a run's files, and
        ValueError if its config.yaml is wrong.
        """
        from mclclip import config as configuration

        folder = Path(directory).absolute()
        recorded = folder / "config.yaml"
        if not any(
            path.exists() for path in (recorded, folder / "results.jsonl", folder / "stage_0")
        ):
            raise FileNotFoundError(
                f"there is no run at {folder}: name the folder of a run, which has config.yaml, "
                "results.jsonl or stage_0"
            )
        if config is None and recorded.is_file():
            config = configuration.load(str(recorded), [])
        return cls(folder, config)

    @classmethod
    def of(cls, config: Config, variant: str = "mcl") -> Run:
        """Opens the run that ``config`` names, or its control ``variant``, such as ``ungrouped``.
        The folder need not exist yet."""
        return cls(Path(config.run_dir), config, variant)

    # --- its parts ---

    @cached_property
    def index(self) -> SampleIndex:
        """The sample index. Raises FileNotFoundError if there is none, and RuntimeError if a file
        of it has another size than was recorded."""
        from mclclip.data.sample_index import SampleIndex

        return SampleIndex.open(self.layout.index) if self._parent is None else self._parent.index

    def stage(self, number: int) -> Stage:
        """Returns stage ``number``, which need not exist yet."""
        if not isinstance(number, int | np.integer) or number < 0:
            raise ValueError(f"got the stage {number!r}: wanted a whole number, such as 1")
        return Stage(self, int(number))

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages 0, 1, ... up to the first that has no folder."""
        stages: list[Stage] = []
        while self.layout.stage(len(stages)).is_dir():
            stages.append(Stage(self, len(stages)))
        return stages

    @cached_property
    def controls(self) -> dict[str, Run]:
        """The controls that have a folder, by name; they share this run's index and stage 0."""
        controls = {}
        for folder in sorted(self.directory.glob("controls/*/")):
            control = Run(self.directory, self.config, folder.name)
            control._parent = self
            controls[folder.name] = control
        return controls

    def exports(self) -> dict[str, Path]:
        """Maps the name of each exported encoder, also of controls, in `results` to its folder."""
        from mclclip.models.weights import has_config

        return {name: path for name, path in self._exports().items() if has_config(path)}

    def _exports(self) -> dict[str, Path]:
        exports: dict[str, Path] = {}
        for run in (self, *self.controls.values()):
            stages = [stage for stage in run.stages if stage.number or run is self]
            exports |= {stage.name: stage.directory("export") for stage in stages}
            exports |= {run.layout.model_name(name): run.layout.joined(name) for name in JOINED}
        return exports

    @cached_property
    def result_rows(self) -> list[Result]:
        """The rows of results.jsonl in order; empty if there is no such file yet.

        Rows of an encoder that was exported again since are left out, with a warning. Raises
        ValueError with the line's number if a line is not a row.
        """
        rows = results.read(self.layout.results)
        present = {n: export_digest(folder) for n, folder in self._exports().items()}

        def is_present(row: Result) -> bool:
            """Of a width, such as stage_1:64, the export is that of stage_1."""
            digest = present.get(row.model.partition(":")[0])
            return digest is None or row.protocol.get("export", digest) == digest

        if stale := dict.fromkeys(row.model for row in rows if not is_present(row)):
            log.warning("left out figures of earlier exports: evaluate %s again", ", ".join(stale))
        return [row for row in rows if is_present(row)]

    @property
    def results(self) -> DataFrame:
        """The `result_rows` as a table: encoder, benchmark, metric, value, interval (two bounds),
        unit (of value and bounds), count and protocol."""
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
        """Maps the name of each finished artifact of ``mclclip filter`` or ``blindspots`` to its
        folder; leaves out those that ``--force`` moved aside."""
        folders = (path.parent for path in self.directory.glob(f"{folder}/*/{artifacts.MANIFEST}"))
        return {path.name: path for path in sorted(folders) if ".old-" not in path.name}

    # --- samples ---

    def spread_ids(self, count: int) -> Integers:
        """Returns sorted ids of at most ``count`` samples from all over the index, see `spread`."""
        return spread(len(self.index), count)

    def draw_ids(self, count: int, purpose: int) -> Integers:
        """Draws at most ``count`` samples at random and returns their sorted ids.

        Only draws samples that can be decoded and that all finished embeddings have. The run's seed
        and ``purpose``, a constant of the caller, determine the draw.
        """
        from mclclip.data.row_store import left_out

        usable = np.setdiff1d(np.arange(len(self.index)), self.index.bad_ids())
        num_stages = len(self.stages) if self.config is None else self.config.num_stages + 1
        for stage in map(self.stage, range(num_stages)):
            if stage.has("embeddings"):
                folder = stage.directory("embeddings")
                usable = np.setdiff1d(usable, left_out(folder, len(self.index.shards)))
        return np.sort(np.random.default_rng([self.seed, purpose]).permutation(usable)[:count])

    @cached_property
    def samples(self) -> Bytes:
        """Reads the bytes of images and captions, by the options ``data`` of the run."""
        from mclclip.data.bytes import Bytes
        from mclclip.data.options import DataConfig

        data = DataConfig() if self.config is None else self.config.data
        if self.index.image_crc32 is None:
            data = replace(data, verify="captions")
        return Bytes(self.index, data)

    def captions(self, ids: Ids) -> list[list[str]]:
        """Returns the list of captions of each sample, which may be empty.

        Raises RuntimeError if a shard has changed since it was indexed.
        """
        return self.samples.captions_of(self.index.checked(ids).tolist())

    def stored_images(self, ids: Ids) -> list[bytes]:
        """Returns the stored bytes of each sample's image, such as a JPEG file's.

        Raises RuntimeError for the first image that cannot be read.
        """
        from mclclip.data.bytes import BadSample
        from mclclip.data.locations import PICTURE

        stored = []
        for raw in self.samples.read(self.index.checked(ids), [PICTURE]):
            if isinstance(raw, BadSample):
                raise RuntimeError(
                    f"sample {self.index.names([raw.sample_id])[0]} cannot be read ({raw.reason}): "
                    "its shard has changed since it was indexed, put it back"
                )
            stored.append(raw.image)
        return stored

    def images(self, ids: Ids) -> list[Image | NDArray[np.uint8]]:
        """Decodes the images of samples: upright RGB pictures, or arrays [H, W, C] from .npy files.

        Raises RuntimeError for the first image that cannot be read or decoded.
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
        """Decodes the images of samples as uint8 [H, W, 3], to be shown.

        An image with more channels shows its first three; one with fewer shows its first in grey.
        """
        from mclclip.data.decode import as_picture

        return [as_picture(np.asarray(image)) for image in self.images(ids)]


@dataclass(frozen=True)
class Stage:
    """Reads one stage of a run or of a control. Properties raise FileNotFoundError if the artifact
    that they read is not finished, and RuntimeError if it was made for another index."""

    run: Run
    number: int

    @property
    def name(self) -> str:
        """The name of the stage's encoder in results.jsonl, such as ``stage_1``."""
        return self.run.layout.model_name(f"stage_{self.number}")

    def directory(self, kind: Kind) -> Path:
        """Returns the folder of the stage's artifact ``kind``."""
        path: Path = getattr(self.run.layout, kind)(self.number)
        return path

    def has(self, kind: Kind) -> bool:
        """Returns True if the stage's artifact ``kind`` is finished."""
        return artifacts.is_finished(self.directory(kind))

    def manifest(self, kind: Kind) -> Manifest:
        """Reads the manifest of the stage's artifact ``kind``."""
        directory = self.directory(kind)
        if kind in ("train", "export"):
            return artifacts.read_manifest(directory, kind)
        return self.run.index.manifest_of(directory, kind)

    @property
    def embeddings(self) -> RowStore:
        """Image embeddings [N, D] in index order; the store also lists samples without one."""
        from mclclip.data.row_store import RowStore

        return RowStore.open(self.directory("embeddings"), self.manifest("embeddings"), self.name)

    @property
    def text_embeddings(self) -> RowStore:
        """Embeddings [number of captions, D] of all captions by stage 0's text tower, in index
        order: the rows of sample i begin at ``index.caption_start[i]``."""
        from mclclip.data.row_store import RowStore

        directory = self.run.layout.text_embeddings
        return RowStore.open(directory, self.run.index.manifest_of(directory, "text_embeddings"))

    @property
    def clusters(self) -> Clusters:
        """The k-means clusters of the stage's embeddings."""
        return Clusters(self.directory("clusters"), self.manifest("clusters"))

    @property
    def labels(self) -> Integers:
        """int64 [N]: the pseudo label of each sample, which the stage is trained on; -1: none."""
        from mclclip.data.labels import read_pseudo_labels

        return read_pseudo_labels(self.directory("pseudo_labels"), self.run.index)[0]

    def embeddings_of(self, ids: Ids) -> NDArray[np.float32]:
        """Returns the embeddings [n, D] of n samples; a sample that has none gives zeros.

        Reads only the rows of these samples from disk.
        """
        distinct, order = self._distinct(ids)
        return np.asarray(self.embeddings[distinct], np.float32)[order]

    def clusters_of(self, ids: Ids) -> NDArray[np.integer]:
        """Returns the L nearest clusters [n, L] of n samples, nearest first; -1: the sample has no
        embedding. Reads only the rows of these samples from disk."""
        from mclclip.data.row_store import RowStore

        distinct, order = self._distinct(ids)
        self.manifest("clusters").check(self.directory("clusters"))
        labels = RowStore([self.directory("clusters") / "cluster_labels.npy"], "cluster")
        clusters: NDArray[Any] = labels[distinct]
        return clusters[order]

    def _distinct(self, ids: Ids) -> tuple[Integers, Integers]:
        """Returns the distinct ids, sorted, and for each of ``ids`` its position among them."""
        return np.unique(self.run.index.checked(ids), return_inverse=True)

    @property
    def metrics(self) -> DataFrame:
        """The metrics of the stage's training so far, a row per recorded step: loss, lr, speed and
        more. Of many steps at most `POINTS` are returned, evenly spaced."""
        import pandas

        return pandas.DataFrame(read_records(self.directory("train") / "metrics.jsonl", POINTS))

    def encoder(self, device: str | torch.device = "cpu") -> Encoder:
        """Loads the stage's exported encoder, like ``mclclip.load_model``."""
        from mclclip.models.encoder import load_model

        self.manifest("export")
        return load_model(self.directory("export"), device=device)


@dataclass(frozen=True)
class Clusters:
    """The k-means clusters of a stage's embeddings, as memory-mapped arrays.

    Raises RuntimeError if a file has another size than was recorded.
    """

    directory: Path
    manifest: Manifest

    @cached_property
    def labels(self) -> NDArray[np.integer]:
        """[N, L]: the L nearest clusters of each sample, nearest first; -1: it has no embedding."""
        return self._array("cluster_labels.npy")

    @cached_property
    def similarities(self) -> NDArray[np.floating]:
        """[N, L]: the similarity of each sample to the centroids of its `labels`."""
        return self._array("similarities.npy")

    @cached_property
    def centroids(self) -> NDArray[np.float32]:
        """[K, D]: the centroid of each of the K clusters."""
        return self._array("centroids.npy")

    def _array(self, name: str) -> np.ndarray:
        self.manifest.check(self.directory, name)
        return open_npy(self.directory / name, "cluster")


def spread(count: int, most: int) -> Integers:
    """Returns at most ``most`` numbers of ``range(count)``, sorted: `PIECES` runs of neighbours,
    evenly spaced, since neighbouring rows of a file are read together."""
    if count <= most:
        return np.arange(count, dtype=np.int64)
    size = max(most // PIECES, 1)
    starts = np.linspace(0, count - size, min(PIECES, most)).astype(np.int64)
    return (starts[:, None] + np.arange(size)).ravel()


def export_digest(directory: Path) -> str | None:
    """Returns the digest that an export's manifest records; None without a manifest of ours."""
    try:
        return artifacts.parse_manifest(directory / artifacts.MANIFEST).digest
    except (ValueError, OSError):
        return None
