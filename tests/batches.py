"""Batches of a training over an index, in one call."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mclclip.data.batches import TrainingBatches
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.groups import GroupedIndex, LabelBlocks
from mclclip.data.labels import SampleWeights
from mclclip.data.options import DataConfig, Order, Policy
from mclclip.data.row_store import StoredRows
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import TarDataset, Tokenizer


def grouped_index(
    labels: npt.NDArray[np.integer],
    radices: tuple[int, ...],
    weights: SampleWeights | None = None,
) -> GroupedIndex:
    """Of pseudo labels int64 [N], -1 left out; in memory, so that it cannot be pickled."""
    return in_memory(LabelBlocks(labels, radices, weights=weights))


def in_memory(blocks: LabelBlocks) -> GroupedIndex:
    """The grouped index of labels that are read in these blocks."""
    sizes, weights = blocks.sizes(), blocks.weights
    with tempfile.TemporaryFile() as runs:
        ids = np.concatenate([np.zeros(0, np.int64), *blocks.sorted_ids(sizes, runs)])
    sums = None if weights is None else np.cumsum(weights.units(ids))
    plain = sizes.group_starts, sizes.group_labels, sizes.radices
    return GroupedIndex(*plain, ids, Path("in memory"), sums, draws=sizes.draws)


def training_batches(
    index: SampleIndex,
    grouped: GroupedIndex,
    transform: Any,
    global_batch: int,
    *,
    tokenizer: Tokenizer | None = None,
    text_features: StoredRows | None = None,
    policy: Policy = "backoff",
    order: Order = "proportional",
    seed: int = 0,
    stage: int = 1,
    options: DataConfig | None = None,
    **further: Any,
) -> TrainingBatches:
    """``further``: arguments of `TrainingBatches` beside the data set and the plan."""
    given = {"tokenizer": tokenizer, "text_features": text_features}
    dataset = TarDataset(index, options or DataConfig(), transform, **given)  # type: ignore[arg-type]
    plan = EpochPlan(grouped, global_batch, policy, order, seed, stage, 0)
    return TrainingBatches(dataset, plan, **further)
