"""Inputs of figures: a run, a seeded sample of its rows, the gates that it learned, and its
encoders for pixels between 0 and 1.

Gates act on the features of the projector, which is not exported and is read from the last
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from mclclip import checkpoint
from mclclip.config import Config, TrainConfig
from mclclip.models.model import Model
from mclclip.objectives.gated_pairs import LabelFilter, normed
from mclclip.opened_run import Clusters, Run, Stage
from mclclip.options import with_prefix

log = logging.getLogger("mclclip")

MAX_SAMPLES = 5_000  # of the figures that compare all pairs
MAX_CLASSES = 1_000  # whose gates are drawn, the first ones; as many as the paper's

EMBEDDINGS = "embeddings: run 'mclclip embed --stage 0'"
CLUSTERS = "clusters: run 'mclclip cluster --stage 0'"
GATES = "a finished training whose objective learns gates, such as simlap, with its last checkpoint"
EXPORTS = "exports of its stages: run 'mclclip export --stage 0'"


class MissingInput(Exception):
    """Says what a run lacks for a figure, where it is not what ``Figure.needs`` says."""


@dataclass(frozen=True)
class ClassGates:
    """The gates that a stage has learned, of the classes that it was trained with.

    names      [K] of the classes
    codes      [N] of all samples of the index; -1 for none
    filter     the label filter
    norm       of the features that the gates are applied to, if there is one
    projector  the tensors of the model's projector, by name; empty where it has none
    """

    names: Sequence[str]
    codes: NDArray[np.integer]
    filter: LabelFilter
    norm: torch.nn.Module | None
    projector: Mapping[str, torch.Tensor]

    def of_classes(self) -> NDArray[np.float32]:
        """[C, D]: the gates of each of the first ``MAX_CLASSES`` classes by itself."""
        return self.of_pairs(np.column_stack([np.arange(len(self.names[:MAX_CLASSES]))] * 2))

    def of_pairs(self, pairs: NDArray[np.int64]) -> NDArray[np.float32]:
        """[P, D]: the gates of pairs [P, 2] of classes."""
        first, second = torch.from_numpy(pairs).T
        with torch.no_grad():
            gates: NDArray[np.float32] = self.filter(first, second).numpy()
        return gates

    def title(self, pair: Sequence[int]) -> str:
        """The names of two classes."""
        return " and ".join(self.names[code] for code in pair)


class PixelEncoder(nn.Module):
    """A stage's encoder for pixels [n, C, H, W] between 0 and 1, which it normalises itself.

    Its features are those of the export, at unit length; with ``gates`` those that the gates act
    on, behind projector and layer norm.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model, gates: ClassGates | None = None) -> None:
        super().__init__()
        self.model, self.gated = model, gates is not None
        self.norm = None if gates is None else gates.norm
        for name, values in zip(("mean", "std"), model.normalization, strict=True):
            self.register_buffer(name, values)

    def forward(self, pixels: Tensor) -> Tensor:
        """[n, C, H, W] -> [n, D]."""
        images = (pixels - self.mean) / self.std
        if self.gated:
            return normed(self.model(image=images)["image_features"], self.norm)
        return self.model.encode_image(images, normalize=True)

    def pixels(self, images: Sequence[Any]) -> Tensor:
        """Stored images -> pixels [n, C, H, W] between 0 and 1, of the encoder's size."""
        prepared = torch.stack([self.model.preprocess_val(image) for image in images])
        return (prepared.to(self.mean.device) * self.std + self.mean).clamp(0.0, 1.0)

    def of_all(self, pixels: Tensor, batch_size: int) -> NDArray[np.float32]:
        """[N, D]: the features of pixels [N, C, H, W], a batch at a time."""
        with torch.no_grad():
            parts = [self(batch).cpu() for batch in torch.split(pixels, batch_size)]
        return torch.cat(parts).numpy()

    def of_samples(self, inputs: Inputs, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """[n, D]: the features of samples, which are read a batch at a time."""
        size = inputs.config.embed.batch_size
        parts = []
        for start in range(0, len(ids), size):
            images = inputs.run.images(ids[start : start + size])
            parts.append(self.of_all(self.pixels(images), size))
        return np.concatenate(parts)


@dataclass(frozen=True)
class Inputs:
    """The run of a configuration and a seeded sample of its rows, read as figures ask for them.

    ``device`` is where an encoder runs.
    """

    config: Config
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @cached_property
    def run(self) -> Run:
        """The run. Raises FileNotFoundError where it has no index yet."""
        run = Run.of(self.config)
        _ = run.index
        return run

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of the configuration, whether they are there yet or not."""
        return [self.run.stage(number) for number in range(self.config.num_stages + 1)]

    @cached_property
    def attributes(self) -> list[str]:
        """Names of the index's attributes."""
        sources = self.config.data.sources.values()
        return sorted({name for source in sources for name in source.attributes})

    def require_attributes(self) -> None:
        """Raises MissingInput for a run whose index has no attributes."""
        if not self.attributes:
            raise MissingInput(
                "attributes: set data.sources.NAME.attributes to fields of the samples' .json, and "
                "run 'mclclip index' again"
            )

    def require_samples(self, fewest: int) -> None:
        """Raises MissingInput for a run of fewer samples."""
        if len(self.ids) < fewest:
            raise MissingInput(f"{fewest} samples or more: {len(self.ids)} can be used")

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """Sorted ids of at most ``MAX_SAMPLES`` samples that can be used, drawn by the seed."""
        return self.run.draw_ids(MAX_SAMPLES, purpose=4)

    def draw_places(self, count: int, purpose: int) -> NDArray[np.int64]:
        """Sorted places in ``ids`` of at most ``count`` samples, drawn by the seed."""
        drawn = np.random.default_rng([self.config.seed, purpose]).permutation(len(self.ids))
        return np.sort(drawn[:count])

    @cached_property
    def features(self) -> dict[str, NDArray[np.float32]]:
        """Features [n, D] of ``ids`` by stage, of the stages that have embeddings.

        Raises RuntimeError where some are of another index.
        """
        features = {}
        for stage in self.stages:
            if stage.has("embeddings"):
                features[stage.name] = stage.embeddings_of(self.ids)
            else:
                log.info(
                    "%s has no embeddings and is left out of figures of features: run "
                    "'mclclip embed --stage %d' to have it in them", stage.name, stage.number,
                )  # fmt: skip
        return features

    @cached_property
    def clusters(self) -> dict[str, Clusters]:
        """The clusters by stage, of the stages that are clustered.

        Raises RuntimeError where some are of another index.
        """
        return {stage.name: stage.clusters for stage in self.stages if stage.has("clusters")}

    @cached_property
    def gates(self) -> dict[str, ClassGates]:
        """The gates of classes by stage, of the stages whose objective has learned some."""
        gates = {}
        for stage in self.stages:
            options = self.config.train if stage.number else self.config.base
            if options is None or not options.objective.has_gates:
                continue
            if stage.has("train") and checkpoint.steps(stage.directory("train") / "checkpoints"):
                gates[stage.name] = self._learned_gates(stage, options)
            else:
                log.info(
                    "%s is left out of figures of gates, which are read from the last checkpoint "
                    "of a finished training: run 'mclclip train --stage %d'",
                    stage.name, stage.number,
                )  # fmt: skip
        return gates

    def _learned_gates(self, stage: Stage, options: TrainConfig) -> ClassGates:
        averaged = self.config.export.ema and options.ema_decay is not None
        state = checkpoint.trained_state(stage.directory("train"), averaged=averaged)
        label_filter, norm = options.objective.subspaces(with_prefix(state, "objective."))
        attribute = options.objective.reads.attribute
        trained = stage.manifest("train").inputs
        if attribute is not None:
            codes: NDArray[np.integer]
            codes, names = self.run.index.attribute(attribute)
            same = trained["index"] == self.run.index.digest
        else:
            clusters = self.run.stage(stage.number - 1).clusters
            codes = clusters.labels[:, 0]
            names = [f"cluster {number}" for number in range(label_filter.num_classes)]
            same = trained["clusters"] == clusters.manifest.digest
        if not same or len(names) != label_filter.num_classes:
            raise RuntimeError(
                f"{stage.name} was trained with other classes ({label_filter.num_classes}) than "
                f"those of {attribute or 'its clusters'} now ({len(names)}): the index or the "
                "clusters have changed since, train again"
            )
        projector = with_prefix(state, "model.projector.")
        return ClassGates(names, codes, label_filter, norm, projector)

    def encoder(self, stage: Stage, gates: ClassGates | None = None) -> PixelEncoder | None:
        """A stage's export on the device; None, and a line in the log, without one. With ``gates``
        it has the projector that was trained."""
        if not stage.has("export"):
            log.info(
                "%s has no export and is left out: run 'mclclip export --stage %d' to have it in",
                stage.name, stage.number,
            )  # fmt: skip
            return None
        projector: Sequence[int] = ()
        if gates is not None:
            projector = self.config.model_of("train" if stage.number else "base").projector
        model = stage.model(projector)
        if gates is not None and projector:
            model.get_submodule("projector").load_state_dict(gates.projector)
        return PixelEncoder(model, gates).to(self.device).eval()


@dataclass(frozen=True)
class Figure:
    """One figure, which is drawn at a path and whose data are returned.

    draw     the data, or None where the run has nothing for it; may raise MissingInput
    needs    the artifacts that the run must have for it, to end the message "NAME needs ...": what
             they are, and the command that makes them, as in ``EMBEDDINGS``
    encoder  whether an encoder runs; such a figure is drawn only where it is named
    """

    draw: Callable[[Inputs, Path], dict[str, Any] | None]
    needs: str
    encoder: bool = False


def unit_rows(features: ArrayLike) -> NDArray[np.float64]:
    """[N, D] -> rows of unit length, float64. ValueError for another shape, or a row of zeros."""
    rows = np.asarray(features, dtype=np.float64)
    if rows.ndim != 2:
        raise ValueError(f"features are {list(rows.shape)}, wanted [N, D]")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(lengths) & (lengths > 0.0)).all():
        raise ValueError("a row of the features is zero or not finite: it has no direction")
    unit: NDArray[np.float64] = rows / lengths
    return unit


def without_nan(matrix: ArrayLike) -> list[list[float | None]]:
    """A matrix as nested lists for JSON, which has no nan: there stands None."""
    return [[float(v) if np.isfinite(v) else None for v in row] for row in np.asarray(matrix)]
