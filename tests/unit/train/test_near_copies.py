"""What is said of near copies before a training."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from mclclip.data.batches import TrainingBatches
from mclclip.data.bytes import Bytes, RawSample
from mclclip.data.options import SentencesConfig
from mclclip.data.sample_index import SampleIndex
from mclclip.models.clip import clean_caption
from mclclip.objectives.near_copies import NearCopies
from mclclip.train.near_copies import report_near
from tests.unit.data.test_equality import PICTURES, ROWS, batches_of, index_of

LABELS = [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    return index_of(tmp_path_factory.mktemp("rows"), ROWS)


class Stored:
    """Embeddings of stage 0 in the place of `BaseFeatures`, at random."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        self.rows = functional.normalize(torch.randn(len(ROWS), 3, generator=random))

    def __call__(self, raw: RawSample, *_: Any) -> dict[str, torch.Tensor]:
        row = self.rows[raw.sample_id]
        return {"base_image_features": row, "base_text_features": row.roll(1)}


def report(
    caplog: pytest.LogCaptureFixture, batches: TrainingBatches, base: Any = None, **near: Any
) -> tuple[list[float], list[str]]:
    """Returns the six figures that are reported of one kind of near copies, and the warnings."""
    caplog.clear()
    caplog.set_level("INFO", "mclclip")
    report_near(batches, [NearCopies(**near).resolved(views=False)], base, clean_caption)
    (line,) = (m for m in caplog.messages if m.startswith("coverage of near copies"))
    figures = re.search(
        r"of (\d+) rows .* (\S+) % have some, (\S+) each; (\S+) % have no .* (\d+) of the (\d+)",
        line,
    )
    assert figures is not None
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    return [float(each) for each in figures.groups()], warnings


def count_slowly(
    batches: TrainingBatches, near: NearCopies, base: Stored, captions: list[str], nth: int = 1
) -> list[float]:
    """Returns the figures of ``report`` in loops over the batches; of each every ``nth`` row."""
    images = base.rows.numpy()
    texts = np.roll(images, 1, axis=1)
    with_near, copies, without, rows = 0, 0, 0, 0

    def is_near(i: int, j: int) -> bool:
        by_what = {
            "captions": (captions[i] == captions[j], texts[i] @ texts[j]),
            "pictures": (PICTURES[i] == PICTURES[j], images[i] @ images[j]),
            "pairs": (False, max(images[i] @ texts[j], texts[i] @ images[j])),
        }
        equal, cosines = zip(*(by_what[each] for each in near.of or ()), strict=True)
        bound = near.threshold
        if near.margin is not None:
            bound = images[i] @ texts[i] - near.margin
        return i == j or (any(equal) if near.by_bytes else max(cosines) > bound)

    for step in range(batches.steps_per_epoch):
        batch = batches[step]
        marks = zip(batch.sample_id.tolist(), batch.group_ids[:, 0].tolist(), strict=True)
        every = list(enumerate(marks))
        for row, (i, group) in every[::nth]:
            others = [j for other, (j, g) in every if other != row and g == group]
            num = sum(is_near(i, j) for j in others)
            rows, copies, with_near = rows + 1, copies + num, with_near + bool(num)
            without += bool(num) and num == len(others)
    return [100 * with_near / rows, copies / max(with_near, 1), 100 * without / rows]


KINDS = [
    {"threshold": 0.8}, {"margin": 0.1}, {"threshold": 1.0}, {"of": ("captions",)},
    {"of": ("pictures",)},
]  # fmt: skip


@pytest.mark.parametrize("labels", [None, LABELS])
@pytest.mark.parametrize("near", KINDS)
@pytest.mark.parametrize("plan", [("mask", 6), ("wrap", 6), ("mask", 12)])
def test_the_counts_are_those_of_the_batches(
    index: SampleIndex, caplog: pytest.LogCaptureFixture, labels: Any, near: Any, plan: Any
) -> None:
    """Of a batch that is too large every n-th row is compared with all others."""
    policy, global_batch = plan
    nth = 3 if global_batch == 12 else 1
    batches = batches_of(index, labels=labels, policy=policy, global_batch=global_batch)
    base, captions = Stored(), [clean_caption(text) for _, text in ROWS]
    resolved = NearCopies(**near).resolved(views=False)
    expected = count_slowly(batches, resolved, base, captions, nth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mclclip.train.near_copies.MOST_ROWS", 4 if nth == 3 else 4096)
        (rows, *shares, counted, steps), warnings = report(caplog, batches, base, **near)
    assert (rows, counted, steps) == (global_batch, batches.steps_per_epoch, counted)
    assert shares == pytest.approx(expected, abs=0.051) and shares[0] > 0
    assert bool(warnings) == (expected[2] > 5.0)


def test_of_drawn_sentences_those_that_are_drawn_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [(n, f"The same. And {n} more.") for n in range(12)]
    index = index_of(tmp_path, rows)
    for sentences, is_counted in ((None, False), (SentencesConfig(number=1), True)):
        batches = batches_of(index, global_batch=6, sentences=sentences)
        figures, _ = report(caplog, batches, of=("captions",))
        assert (figures[1] > 0) == is_counted


def test_captions_that_are_all_equal_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for last, said in (("The same", (100.0, 1)), ("Another", (0.0, 0))):
        index = index_of(tmp_path / last, [*((n, "The same") for n in range(11)), (11, last)])
        figures, warnings = report(caplog, batches_of(index, global_batch=12), of=("captions",))
        assert (figures[3], len(warnings)) == said


def test_what_is_read_before_a_training_is_bounded(
    index: SampleIndex, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[int] = []
    whole = Bytes.captions_of
    monkeypatch.setattr(
        Bytes, "captions_of", lambda self, ids: read.extend(ids) or whole(self, ids)
    )
    monkeypatch.setattr("mclclip.train.near_copies.MOST_ROWS", 5)
    figures, _ = report(caplog, batches_of(index))
    assert figures[4:] == [1, 3] and len(read) == 4


def test_captions_that_cannot_be_read_leave_the_count_open(
    index: SampleIndex, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise FileNotFoundError("there is no shard")

    monkeypatch.setattr(Bytes, "captions_of", fails)
    caplog.set_level("INFO", "mclclip")
    report_near(batches_of(index), [NearCopies().resolved(views=False)], None, clean_caption)
    assert caplog.messages == ["coverage of near copies is not known: there is no shard"]
