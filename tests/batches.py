"""Batches of a training over an index, in one call."""

from __future__ import annotations

from typing import Any

from mclclip.data.batches import TrainingBatches
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.groups import GroupedIndex
from mclclip.data.options import DataConfig, Order, Policy
from mclclip.data.row_store import StoredRows
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import TarDataset, Tokenizer


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
