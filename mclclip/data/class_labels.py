"""The classes that a sample is positive for: the clusters whose centroids are nearest to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from mclclip import artifacts
from mclclip.data.sample_index import SampleIndex


class ClassLabels:
    """The first ``labels_per_sample`` clusters of each sample, nearest first, from ``clusters/``.

    With ``threshold`` only those of at least this similarity, and the nearest in any case. Arrays
    are memory-mapped. Raises RuntimeError where the clusters are those of another index, ValueError
    where fewer clusters per sample are stored.
    """

    def __init__(
        self,
        directory: Path,
        index: SampleIndex,
        labels_per_sample: int,
        threshold: float | None = None,
    ) -> None:
        manifest = artifacts.read_manifest(directory, "clusters")
        self.directory, self.digest = Path(directory), manifest.digest
        self.labels_per_sample, self.threshold = labels_per_sample, threshold
        self._labels = self._open("cluster_labels")
        self._similarities = self._open("similarities")
        if len(self._labels) != len(index) or manifest.inputs["index"] != index.digest:
            raise RuntimeError(
                f"clusters at {directory} have {len(self._labels):,} rows, the index has "
                f"{len(index):,} (or other keys): run 'mclclip cluster' again after 'mclclip index'"
            )
        if self._labels.shape[1] < labels_per_sample:
            raise ValueError(
                f"clusters at {directory} have {self._labels.shape[1]} labels per sample, "
                f"wanted {labels_per_sample}: raise cluster.labels_per_sample and run 'mclclip "
                "cluster --force' again"
            )

    def centroids(self) -> npt.NDArray[np.float32]:
        """[K, D], memory-mapped."""
        return self._open("centroids")

    def __getitem__(self, sample_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 [n, l]: the classes of these samples; -1 where there is none."""
        labels = self._labels[sample_ids, : self.labels_per_sample].astype(np.int64)
        if self.threshold is not None:
            near = self._similarities[sample_ids, : self.labels_per_sample] >= self.threshold
            near[:, 0] = True
            labels[~near] = -1
        return labels

    def _open(self, name: str) -> npt.NDArray[np.float32]:
        path = self.directory / f"{name}.npy"
        array: npt.NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
        return array

    # A mapping would travel to a loader worker by its content.
    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_labels", "_similarities")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._labels = self._open("cluster_labels")
        self._similarities = self._open("similarities")
