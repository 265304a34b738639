"""Says before a training how many near copies the samples of a batch have, and what they cost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mclclip.data.batches import TrainingBatches
from mclclip.data.bytes import RawSample
from mclclip.data.extras import (
    CAPTION_DIGEST,
    PICTURE_DIGEST,
    BaseFeatures,
    caption_digest,
    picture_marks,
)
from mclclip.objectives.near_copies import NearCopies, pairs_of
from mclclip.objectives.pairs import TILE
from mclclip.objectives.row_losses import count_columns

log = logging.getLogger("mclclip")
MOST_ROWS = 4096  # rows that are counted before a training
MOST_WITHOUT = 0.05
"""If near copies leave a larger share of the rows without negatives, that is a warning."""


def report_near(
    batches: TrainingBatches,
    compared: Sequence[NearCopies],
    base: BaseFeatures | None,
    clean: Callable[[str], str],
) -> None:
    """Logs for each of ``compared`` how many rows of a global batch have near copies in it, and
    which share of the rows these leave without negatives; warns above ``MOST_WITHOUT``.

    Rows of some batches of the first epoch are counted, evenly spaced: at most 4,096 together, or
    every n-th row of a larger batch. Each is compared with all of its batch. Samples that prove
    unusable are among them.

    ``compared`` are options with ``of`` filled in, ``base`` the embeddings of stage 0 if they are
    compared. Equal pictures are those of equal checksums in the index, if it has any.
    """
    plan = batches.plan(0)
    num_batches = min(plan.steps_per_epoch, max(1, MOST_ROWS // plan.global_batch))
    # A row for each sum: of rows, of those with near copies, of these copies, and of the rows
    # whose negatives are all near copies.
    sums = np.zeros((len(compared), 4), np.int64)
    for step in np.arange(num_batches) * plan.steps_per_epoch // num_batches:
        try:
            batch, num_rows = _read_batch(batches, int(step), compared, base, clean)
        except (RuntimeError, OSError) as error:
            log.info("coverage of near copies is not known: %s", error)
            return
        for near, sum_of in zip(compared, sums, strict=True):
            pairs = pairs_of(batch, TILE, near, num_rows=num_rows)
            per_row = count_columns(replace(pairs, columns="near"))
            has_none = (per_row > 0) & (count_columns(pairs) == 0)
            sum_of += (num_rows, int((per_row > 0).sum()), int(per_row.sum()), int(has_none.sum()))
    for near, (rows, with_near, copies, without) in zip(compared, sums.tolist(), strict=True):
        share, of = without / rows, ", ".join(near.of or ())
        log.info(
            "coverage of near copies (%s%s): of %s rows of a global batch %.1f %% have some, %.1f "
            "each; %.1f %% have no other negatives; counted in %s of the %s batches of an epoch",
            "equal " if near.by_bytes else "", of, f"{plan.global_batch:,}",
            100 * with_near / rows, copies / max(with_near, 1), 100 * share, f"{num_batches:,}",
            f"{plan.steps_per_epoch:,}",
        )  # fmt: skip
        if share > MOST_WITHOUT and near.role == "masked":
            higher = "raise the threshold" if near.margin is None else "lower the margin"
            remedy = f"{higher}, or compare fewer things (near_copies.of)"
            if near.by_bytes:
                remedy = (
                    "see data.sources.NAME.captions and the data ('mclclip doctor --data CONFIG')"
                )
            log.warning(
                "%.0f %% of the rows are compared with near copies (%s) alone, and nothing is "
                "learned from these: %s",
                100 * share, of, remedy,
            )  # fmt: skip


def _read_batch(
    batches: TrainingBatches,
    step: int,
    compared: Sequence[NearCopies],
    base: BaseFeatures | None,
    clean: Callable[[str], str],
) -> tuple[Any, int]:
    """Returns what near copies of a batch of the first epoch are told by, as its fields
    (`objectives.base.BatchFields`), and how many of its rows are counted: the first ones. Raises
    OSError or RuntimeError for rows and captions that cannot be read."""
    planned = batches.plan(0).batch(step)
    drawn = planned.ids, 0, planned.occurrence
    is_counted = np.arange(len(planned.ids)) % -(-len(planned.ids) // MOST_ROWS) == 0
    order = np.argsort(~is_counted, kind="stable")
    ids, numbers = planned.ids[order], batches.caption_numbers(*drawn)[order].tolist()
    digests = frozenset[str]().union(*(near.digests for near in compared))
    extras: dict[str, torch.Tensor] = {}
    if CAPTION_DIGEST in digests:
        draws = batches.sentence_draws(*drawn)
        parts = [draws[row] for row in order]
        read = zip(batches.dataset.bytes.captions_of(ids.tolist()), numbers, parts, strict=True)
        texts = [part(captions[n]) if part else captions[n] for captions, n, part in read]
        extras[CAPTION_DIGEST] = torch.tensor([caption_digest(text, clean) for text in texts])
    if PICTURE_DIGEST in digests:
        has_checksums = batches.dataset.index.image_crc32 is not None
        marks = picture_marks(batches.dataset.index, ids) if has_checksums else ids
        extras[PICTURE_DIGEST] = torch.tensor(marks)
    if base is not None and any(near.base for near in compared):
        numbered = zip(ids.tolist(), numbers, strict=True)
        stored = [base(RawSample(i, b"", b""), (), number, 0) for i, number in numbered]
        extras |= {name: torch.stack([row[name] for row in stored]) for name in stored[0]}
    batch = SimpleNamespace(
        group_ids=torch.tensor(planned.group_ids[order])[:, None],
        sample_id=torch.tensor(ids),
        extras=extras,
    )
    return batch, int(is_counted.sum())
