"""Says before a training how many near copies the samples of a batch have, and what they cost."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
    SurveyedBatch,
    caption_digest,
    picture_marks,
    survey,
)
from mclclip.objectives.near_copies import NearCopies, pairs_of
from mclclip.objectives.pairs import TILE
from mclclip.objectives.row_losses import count_columns

log = logging.getLogger("mclclip")
MOST_WITHOUT = 0.05
"""If near copies leave a larger share of the rows without negatives, that is a warning."""


def report_near(
    batches: TrainingBatches,
    near: NearCopies,
    base: BaseFeatures | None,
    clean: Callable[[str], str],
) -> None:
    """Logs how many rows of a global batch have near copies, and which share of the rows these
    leave without negatives, counted in the batches of ``extras.survey``; warns above
    ``MOST_WITHOUT``.

    ``near`` are options with ``of`` filled in, ``base`` the embeddings of stage 0 if it compares
    them. Equal pictures are those of equal checksums in the index, if it has any.
    """
    rows, with_near, without, copies, num_batches = 0, 0, 0, 0, 0
    for surveyed in survey(batches):
        try:
            batch = _fields(batches, surveyed, near, base, clean)
        except (RuntimeError, OSError) as error:
            log.info("coverage of near copies is not known: %s", error)
            return
        pairs = pairs_of(batch, TILE, near, alone=True)
        near_per_row = count_columns(replace(pairs, columns="near"))
        copies += int(near_per_row.sum())
        with_near += int((near_per_row > 0).sum())
        without += int(((near_per_row > 0) & (count_columns(pairs) == 0)).sum())
        rows, num_batches = rows + len(near_per_row), num_batches + 1
    share, per_batch = without / max(rows, 1), rows // max(num_batches, 1)
    log.info(
        "coverage of near copies (%s): of %s rows of a global batch %.1f %% have some, %.1f each; "
        "%.1f %% have no other negatives; counted in %s of the %s batches of an epoch",
        ", ".join(near.of or ()), f"{per_batch:,}", 100 * with_near / max(rows, 1),
        copies / max(with_near, 1), 100 * share, f"{num_batches:,}", f"{batches.steps_per_epoch:,}",
    )  # fmt: skip
    if share > MOST_WITHOUT and near.role == "masked":
        log.warning(
            "near_copies leaves %.0f %% of the rows without negatives, and nothing is learned from "
            "these: %s, or compare fewer things (of)", 100 * share,
            "raise the threshold" if near.margin is None else "lower the margin",
        )  # fmt: skip


def _fields(
    batches: TrainingBatches,
    surveyed: SurveyedBatch,
    near: NearCopies,
    base: BaseFeatures | None,
    clean: Callable[[str], str],
) -> Any:
    """Returns the fields of a batch (`objectives.base.BatchFields`) that near copies are told by.
    Raises OSError or RuntimeError for rows and captions that cannot be read."""
    extras: dict[str, torch.Tensor] = {}
    if CAPTION_DIGEST in near.digests:
        digests = [caption_digest(text, clean) for text in surveyed.texts(batches)]
        extras[CAPTION_DIGEST] = torch.tensor(digests)
    if PICTURE_DIGEST in near.digests:
        has_checksums = batches.dataset.index.image_crc32 is not None
        marks = picture_marks(batches.dataset.index, surveyed.ids) if has_checksums else None
        extras[PICTURE_DIGEST] = torch.tensor(surveyed.ids if marks is None else marks)
    if base is not None and near.base:
        numbers = zip(surveyed.ids.tolist(), surveyed.captions.tolist(), strict=True)
        stored = [base(RawSample(i, b"", b""), (), number, 0) for i, number in numbers]
        extras |= {name: torch.stack([row[name] for row in stored]) for name in stored[0]}
    return SimpleNamespace(
        group_ids=torch.tensor(np.asarray(surveyed.group_ids))[:, None],
        sample_id=torch.tensor(np.asarray(surveyed.ids)),
        extras=extras,
    )
