"""The classes that a sample is positive for: the clusters whose centroids are nearest to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from mclclip.data.npy_files import open_npy
from mclclip.data.sample_index import SampleIndex
from mclclip.run import artifacts


class ClassLabels:
    """The first ``labels_per_sample`` clusters of each sample, nearest first, from ``clusters/``.

    With ``threshold`` only those of at least this similarity, and the nearest in any case. Arrays
    are memory-mapped. Raises RuntimeError where the clusters are those of another index or their
    files do not fit each other, ValueError where fewer clusters per sample are stored.
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
        self.num_classes = int(manifest.config["num_clusters"])
        self._map()
        if manifest.inputs["index"] != index.digest:
            raise RuntimeError(
                f"clusters at {directory} are those of another index: run 'mclclip cluster' again "
                "after 'mclclip index'"
            )
        stored = manifest.config["labels_per_sample"]
        for array in (self._labels, self._similarities):
            self._check(array.shape == (len(index), stored), f"rows of {list(array.shape)}")
        found = self.centroids()
        self._check(len(found) == self.num_classes, f"{len(found):,} centroids")
        if stored < labels_per_sample:
            raise ValueError(
                f"clusters at {directory} have {stored} labels per sample, wanted "
                f"{labels_per_sample}: raise cluster.labels_per_sample and run 'mclclip cluster "
                "--force' again"
            )

    def centroids(self) -> npt.NDArray[np.float32]:
        """[K, D], memory-mapped."""
        return self._open("centroids")

    def __getitem__(self, sample_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 [n, l]: the classes of these samples; -1 where there is none."""
        labels = self._labels[sample_ids, : self.labels_per_sample].astype(np.int64)
        most = labels.max(initial=-1)
        self._check(most < self.num_classes, f"a label {most:,}")
        if self.threshold is not None:
            near = self._similarities[sample_ids, : self.labels_per_sample] >= self.threshold
            near[:, 0] = True
            labels[~near] = -1
        return labels

    def _check(self, fits: bool, found: str) -> None:
        if not fits:
            raise RuntimeError(
                f"clusters at {self.directory} hold {found}, and their manifest tells of "
                f"{self.num_classes:,} clusters: run 'mclclip cluster --force' to make them again"
            )

    def _open(self, name: str) -> np.ndarray:
        return open_npy(self.directory / f"{name}.npy", "cluster")

    def _map(self) -> None:
        self._labels, self._similarities = self._open("cluster_labels"), self._open("similarities")

    # A mapping would travel to a loader worker by its content.
    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_labels", "_similarities")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()
