"""The groups that one training draws its batches from: read, permuted, kept on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mclclip import files
from mclclip.data.coverage import check_coverage
from mclclip.data.group_tree import Policy
from mclclip.data.npy_files import open_npy
from mclclip.data.pseudo_labels import GroupedIndex
from mclclip.data.sample_index import SampleIndex
from mclclip.run import artifacts


def read_pseudo_labels(
    directory: Path, index: SampleIndex
) -> tuple[np.ndarray, tuple[int, ...], str]:
    """Pseudo labels int64 [N] in index order, their radices, and their digest.

    Raises RuntimeError where they were made from another index.
    """
    manifest = artifacts.read_manifest(directory, "pseudo_labels")
    labels = open_npy(directory / "pseudo_labels.npy", "cluster").reshape(-1)
    if len(labels) != len(index) or manifest.inputs["index"] != index.digest:
        raise RuntimeError(
            f"pseudo_labels has {len(labels):,} rows, the index has {len(index):,} (or other "
            f"keys): run 'mclclip cluster' again after 'mclclip index'"
        )
    return labels, tuple(manifest.counts["radices"]), manifest.digest


def permute_labels(labels: np.ndarray, seed: int, stage: int) -> np.ndarray:
    """The labels of all labelled samples in random order: group sizes stay, meaning goes."""
    permuted = labels.copy()
    labelled = np.flatnonzero(labels >= 0)
    permuted[labelled] = np.random.default_rng([seed, stage, 1]).permutation(labels[labelled])
    return permuted


def build_groups(
    labels: np.ndarray,
    radices: tuple[int, ...],
    bad_ids: np.ndarray,
    global_batch: int,
    policy: Policy,
) -> GroupedIndex:
    """Groups the samples by label, those of ``bad_ids`` left out, and logs the coverage.

    Raises ValueError where the groups do not suit the batch (coverage.check_coverage).
    """
    usable = labels.copy()
    usable[bad_ids] = -1
    grouped = GroupedIndex.build(usable, radices)
    check_coverage(grouped, global_batch, policy)
    return grouped


class StageGroups:
    """The grouped index of one training, written once: a resumed run uses what it began with.

    Samples found undecodable meanwhile stay in the plan of a begun stage (and are replaced), so
    that the resumed run's order is the first run's; they are outside the plans of later stages.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)

    @property
    def written(self) -> bool:
        """True where the grouped index is whole on disk."""
        return (self.directory / "known_bad.json").exists()

    def write(self, grouped: GroupedIndex, bad_ids: np.ndarray) -> None:
        """Saves the grouped index and the ids that were left out of it."""
        grouped.save(self.directory)
        # Last: marks the grouped index as whole.
        files.write_json(self.directory / "known_bad.json", [int(i) for i in bad_ids])

    def read(self) -> tuple[GroupedIndex, np.ndarray]:
        """The grouped index (memory-mapped) and the ids that were left out of it."""
        known_bad = files.read_json(self.directory / "known_bad.json")
        return GroupedIndex.open(self.directory), np.asarray(known_bad, dtype=np.int64)
