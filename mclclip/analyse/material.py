"""The material of the figures: a run's files, and a seeded sample of its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mclclip import checkpoint
from mclclip.config import Config
from mclclip.data.arrays import open_npy
from mclclip.data.decode import DecodeError, as_picture, decode
from mclclip.data.embeddings import left_out, rows_path
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import BadSample, TarDataset
from mclclip.objectives.base import with_prefix
from mclclip.objectives.label_filter import Subspaces
from mclclip.run import artifacts
from mclclip.run.layout import Layout
from mclclip.train.options import TrainConfig

log = logging.getLogger("mclclip")

MAX_SAMPLES = 5_000  # of the figures that compare all pairs
MAX_CLASSES = 1_000  # whose gates are looked at, the first ones; as many as the paper's


def of_clusters(directory: Path, name: str) -> np.ndarray:
    """An array of finished clusters, compared with its record."""
    record = artifacts.read_manifest(directory, "clusters").record(name)
    return open_npy(directory / name, "cluster", record)


@dataclass(frozen=True)
class ClassGates:
    """The gates that a stage has learned, of the classes that it was trained with.

    names      [K] of the classes
    codes      [N] of all samples of the index; -1 for none
    subspaces  label filter and layer norm
    projector  the tensors of the model's projector, by name; empty where it has none
    """

    names: Sequence[str]
    codes: NDArray[np.integer]
    subspaces: Subspaces
    projector: Mapping[str, torch.Tensor]

    def of_classes(self) -> NDArray[np.float32]:
        """[C, D]: the gates of each of the first ``MAX_CLASSES`` classes by itself."""
        return self.of_pairs(np.column_stack([np.arange(len(self.names[:MAX_CLASSES]))] * 2))

    def of_pairs(self, pairs: NDArray[np.int64]) -> NDArray[np.float32]:
        """[P, D]: the gates of pairs [P, 2] of classes."""
        first, second = torch.from_numpy(pairs).T
        gates: NDArray[np.float32] = self.subspaces.gates(first, second).numpy()
        return gates


@dataclass(frozen=True)
class Material:
    """A run and a seeded sample of its rows, of which the figures are made.

    ``attributes`` are those of the index, ``device`` is where an encoder runs.
    """

    config: Config
    index: SampleIndex
    attributes: tuple[str, ...]
    seed: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def layout(self) -> Layout:
        """Paths of MCL's own stages."""
        return Layout.of(self.config)

    @property
    def stages(self) -> dict[int, str]:
        """Names of the stages by their numbers."""
        return {stage: f"stage_{stage}" for stage in range(self.config.num_stages + 1)}

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """Sorted ids of at most ``MAX_SAMPLES`` decodable samples, drawn by the seed."""
        good = np.setdiff1d(np.arange(len(self.index)), self.index.bad_ids())
        for directory in map(self.layout.embeddings, self.stages):
            if artifacts.is_finished(directory):
                good = np.setdiff1d(good, left_out(directory, len(self.index.shards)))
        drawn = np.random.default_rng([self.seed, 4]).permutation(good)[:MAX_SAMPLES]
        return np.sort(drawn)

    def some(self, count: int, purpose: int) -> NDArray[np.int64]:
        """Sorted places in ``ids`` of at most ``count`` samples, drawn by the seed."""
        drawn = np.random.default_rng([self.seed, purpose]).permutation(len(self.ids))[:count]
        return np.sort(drawn)

    @cached_property
    def features(self) -> dict[str, NDArray[np.float32]]:
        """Features [n, D] of ``ids`` by stage, of the stages that have embeddings."""
        found = {}
        for stage, name in self.stages.items():
            directory = self.layout.embeddings(stage)
            if self._is_finished(directory, "embeddings"):
                found[name] = self._rows(directory)
            else:
                log.info(
                    "%s has no embeddings and is left out of figures of features: run "
                    "'mclclip embed --stage %d' to have it in them", name, stage,
                )  # fmt: skip
        return found

    def _rows(self, directory: Path) -> NDArray[np.float32]:
        parts, manifest = [], artifacts.read_manifest(directory, "embeddings")
        for number, shard in enumerate(self.index.shards):
            here = self.ids[(shard.start <= self.ids) & (self.ids < shard.stop)] - shard.start
            if len(here):
                path = rows_path(directory, number)
                rows = open_npy(path, "embed", manifest.record(path.name))
                parts.append(np.asarray(rows[here], np.float32))
        return np.concatenate(parts)

    @cached_property
    def clusters(self) -> dict[str, NDArray[np.int32]]:
        """Clusters [N, L] by stage, nearest first, of the stages that are clustered."""
        places = {name: self.layout.clusters(stage) for stage, name in self.stages.items()}
        return {
            name: of_clusters(place, "cluster_labels.npy")
            for name, place in places.items()
            if self._is_finished(place, "clusters")
        }

    def _is_finished(self, directory: Path, kind: str) -> bool:
        """Whether the artifact is there; RuntimeError where it was made from another index."""
        if not artifacts.is_finished(directory):
            return False
        self.index.manifest_of(directory, kind)
        return True

    def codes(self, attribute: str) -> NDArray[np.int32]:
        """Codes [N] of an attribute's values; -1 for none."""
        return self.index.attribute(attribute)[0]

    @cached_property
    def gates(self) -> dict[str, ClassGates]:
        """The gates of classes by stage, of the stages whose objective has learned some."""
        found = {}
        for stage, name in self.stages.items():
            options = self.config.train if stage else self.config.base
            if options is None or not options.objective.has_gates:
                continue
            directory = self.layout.train(stage)
            if not artifacts.is_finished(directory) or not checkpoint.steps(
                directory / "checkpoints"
            ):
                log.info(
                    "%s is left out of figures of gates, which are read from the last checkpoint "
                    "of a finished training: run 'mclclip train --stage %d'", name, stage,
                )  # fmt: skip
                continue
            found[name] = self._gates(stage, options)
        return found

    def _gates(self, stage: int, options: TrainConfig) -> ClassGates:
        averaged = self.config.export.ema and options.ema_decay is not None
        state = checkpoint.trained_state(self.layout.train(stage), averaged=averaged)
        subspaces = options.objective.subspaces(with_prefix(state, "objective."))
        attribute, names = options.objective.reads.attribute, []
        trained = artifacts.read_manifest(self.layout.train(stage), "train").inputs
        if attribute is not None:
            codes: NDArray[np.integer] = self.codes(attribute)
            names = self.index.attribute(attribute)[1]
            same = trained["index"] == self.index.digest
        else:
            clusters = artifacts.read_manifest(self.layout.clusters(stage - 1), "clusters")
            codes = self.clusters[f"stage_{stage - 1}"][:, 0]
            names = [f"cluster {number}" for number in range(subspaces.num_classes)]
            same = trained["clusters"] == clusters.digest
        if not same or len(names) != subspaces.num_classes:
            raise RuntimeError(
                f"stage_{stage} was trained with other classes ({subspaces.num_classes}) than "
                f"those of {attribute or 'its clusters'} now ({len(names)}): the index or the "
                "clusters have changed since, train again"
            )
        projector = with_prefix(state, "model.projector.")
        return ClassGates(names, codes, subspaces, projector)

    def raw_images(self, ids: Sequence[int]) -> list[Any]:
        """The images of samples as they are stored: pictures, or arrays [H, W, C]."""
        data = self.config.data
        dataset = TarDataset(
            self.index, transform=None, reads_captions=False,
            max_image_pixels=data.max_image_pixels, max_open_files=data.max_open_files,
            check_pixels=data.verify == "full", remote=data.remote,
        )  # fmt: skip
        found = []
        for raw in dataset.read_many(ids):
            if isinstance(raw, BadSample):
                raise RuntimeError(
                    f"sample {self.index.keys([raw.sample_id])[0]} cannot be read ({raw.reason}): "
                    "its shard has changed since it was indexed, put it back"
                )
            try:
                found.append(decode(raw.image, data.max_image_pixels, reads_arrays=True))
            except DecodeError as error:
                raise RuntimeError(
                    f"sample {self.index.keys([raw.sample_id])[0]} cannot be decoded ({error}): "
                    "run 'mclclip embed', which finds such samples and leaves them out"
                ) from None
        return found

    def images(self, ids: Sequence[int]) -> list[NDArray[np.uint8]]:
        """The images of samples as pictures [H, W, 3] (``as_picture``)."""
        return [as_picture(np.asarray(image)) for image in self.raw_images(ids)]


def pair_title(names: Sequence[str], pair: Sequence[int]) -> str:
    """The names of two classes."""
    return " and ".join(names[code] for code in pair)


class Lacking(Exception):
    """Says what a run lacks for a figure, where it is not what ``Figure.needs`` says."""


def check_attributes(material: Material) -> None:
    """Raises Lacking for a run whose index has no attributes."""
    if not material.attributes:
        raise Lacking(
            "attributes: set data.sources.NAME.attributes to fields of the samples' .json, and run "
            "'mclclip index' again"
        )


@dataclass(frozen=True)
class Figure:
    """One figure, which is drawn at a path and whose data are returned.

    draw     the data, or None where the run has nothing for it; may raise Lacking
    needs    the artifacts that the run must have for it, for messages
    encoder  whether an encoder runs; such a figure is drawn only where it is named
    """

    draw: Callable[[Material, Path], dict[str, Any] | None]
    needs: str
    encoder: bool = False
