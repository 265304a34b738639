"""Which clusters a sample is positive for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mclclip.data.labels import ClassLabels
from mclclip.data.sample_index import SampleIndex
from mclclip.run.artifacts import Artifact

LABELS = np.array([[3, 1, 2], [0, 4, 1], [2, 0, 3], [-1, -1, -1]], dtype=np.int32)
SIMILARITIES = np.array(
    [[0.9, 0.8, 0.7], [0.5, 0.4, 0.3], [0.95, 0.75, 0.1], [0, 0, 0]], dtype=np.float16
)

CONFIG = {"cluster": {"num_clusters": 5, "labels_per_sample": 3}}


@pytest.fixture
def clusters(tmp_path: Path) -> tuple[Path, Any]:
    """Clusters of four samples, and what an index of them looks like to the labels."""
    directory = tmp_path / "clusters"
    artifact = Artifact.open(directory, kind="clusters", config=CONFIG, inputs={"index": "abc"})
    np.save(directory / "cluster_labels.npy", LABELS)
    np.save(directory / "similarities.npy", SIMILARITIES)
    np.save(directory / "centroids.npy", np.ones((5, 2), np.float32))
    artifact.finish({"samples": 4})

    class Index(SimpleNamespace):
        manifest_of = SampleIndex.manifest_of

        def __len__(self) -> int:
            return 4

    return directory, Index(digest="abc")


def test_the_nearest_first(clusters: tuple[Path, Any]) -> None:
    labels = ClassLabels(*clusters, labels_per_sample=2)
    found = labels[np.array([2, 0, 2])]
    assert found.dtype == np.int64 and found.tolist() == [[2, 0], [3, 1], [2, 0]]
    assert labels.centroids().shape == (5, 2)


@pytest.mark.parametrize(
    ("threshold", "wanted"),
    [
        (0.75, [[3, 1, -1], [0, -1, -1], [2, 0, -1]]),
        (0.99, [[3, -1, -1], [0, -1, -1], [2, -1, -1]]),  # the nearest in any case
        (0.0, [[3, 1, 2], [0, 4, 1], [2, 0, 3]]),
    ],
)
def test_a_threshold(clusters: tuple[Path, Any], threshold: float, wanted: Any) -> None:
    labels = ClassLabels(*clusters, labels_per_sample=3, threshold=threshold)
    assert labels[np.arange(3)].tolist() == wanted


def test_mistakes(clusters: tuple[Path, Any]) -> None:
    directory, index = clusters
    with pytest.raises(ValueError, match="have 3 labels per sample, wanted 4: raise cluster"):
        ClassLabels(directory, index, labels_per_sample=4)
    index.digest = "other"
    with pytest.raises(RuntimeError, match="run 'mclclip cluster --force'"):
        ClassLabels(directory, index, labels_per_sample=1)
