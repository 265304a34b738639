"""What is said of near copies before a training."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from mclclip.data.bytes import Bytes, RawSample
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.models.clip import clean_caption
from mclclip.objectives.near_copies import NearCopies
from mclclip.train.near_copies import report_near
from tests.unit.data.test_batches import png
from tests.unit.data.test_equality import PICTURES, ROWS, batches_of
from tests.unit.data.test_samples import build_index

LABELS = [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    folder = tmp_path_factory.mktemp("rows")
    samples = [PackedSample(f"{n:03d}", png(p), "png", [c]) for n, (p, c) in enumerate(ROWS)]
    paths = write_shards(samples, folder / "shards", 5)
    return build_index(folder / "index", paths, "json:captions", pixels=True)


class Stored:
    """Embeddings of stage 0 in the place of `BaseFeatures`, at random."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        self.rows = functional.normalize(torch.randn(len(ROWS), 3, generator=random))

    def __call__(self, raw: RawSample, *_: Any) -> dict[str, torch.Tensor]:
        row = self.rows[raw.sample_id]
        return {"base_image_features": row, "base_text_features": row.roll(1)}


def said(caplog: pytest.LogCaptureFixture) -> tuple[list[float], list[str]]:
    """The four figures of the report, and its warnings."""
    (line,) = (m for m in caplog.messages if m.startswith("coverage of near copies"))
    shares = re.search(r"of (\d+) rows .* (\S+) % have some, (\S+) each; (\S+) % have no", line)
    assert shares is not None
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    return [float(each) for each in shares.groups()], warnings


@pytest.mark.parametrize("labels", [None, LABELS])
@pytest.mark.parametrize("near", [{"threshold": 0.8}, {"margin": 0.1}, {"threshold": 1.0}])
def test_the_counts_are_those_of_the_batches(
    index: SampleIndex, caplog: pytest.LogCaptureFixture, labels: Any, near: dict[str, float]
) -> None:
    caplog.set_level("INFO", "mclclip")
    options, base = NearCopies(**near).resolved(views=False), Stored()
    batches = batches_of(index, labels=labels, policy="mask", global_batch=6)
    report_near(batches, options, base, clean_caption)  # type: ignore[arg-type]
    images = base.rows.numpy()
    texts = np.roll(images, 1, axis=1)
    captions = np.array([clean_caption(text) for _, text in ROWS])
    with_near, copies, without, rows = 0, 0, 0, 0
    for step in range(batches.steps_per_epoch):
        batch = batches[step]
        ids, groups = batch.sample_id.tolist(), batch.group_ids[:, 0].tolist()
        for i, group in zip(ids, groups, strict=True):
            others = [j for j, g in zip(ids, groups, strict=True) if j != i and g == group]
            if near.get("threshold") == 1.0:
                found = [
                    j for j in others if captions[i] == captions[j] or PICTURES[i] == PICTURES[j]
                ]
            elif "threshold" in near:
                found = [
                    j for j in others
                    if max(images[i] @ images[j], texts[i] @ texts[j]) > near["threshold"]
                ]  # fmt: skip
            else:
                bound = images[i] @ texts[i] - near["margin"]
                found = [
                    j for j in others if max(images[i] @ texts[j], texts[i] @ images[j]) > bound
                ]
            rows, copies, with_near = rows + 1, copies + len(found), with_near + bool(found)
            without += bool(found) and len(found) == len(others)
    (num_rows, share, each, left_without), warnings = said(caplog)
    assert num_rows == 6 and share == pytest.approx(100 * with_near / rows, abs=0.051)
    assert each == pytest.approx(copies / with_near, abs=0.051) and copies > 0
    assert left_without == pytest.approx(100 * without / rows, abs=0.051)
    assert bool(warnings) == (without / rows > 0.05)


@pytest.mark.parametrize(("threshold", "warns"), [(-1.0, False), (0.001, True)])
def test_a_threshold_that_leaves_no_negatives_is_warned_of(
    index: SampleIndex, caplog: pytest.LogCaptureFixture, threshold: float, warns: bool
) -> None:
    caplog.set_level("INFO", "mclclip")
    base = Stored()
    base.rows = functional.normalize(base.rows.abs() if warns else torch.eye(12))
    near = NearCopies(threshold=abs(threshold)).resolved(views=False)
    report_near(batches_of(index), near, base, clean_caption)  # type: ignore[arg-type]
    (_, _, _, without), warnings = said(caplog)
    assert (without, len(warnings)) == ((100.0, 1) if warns else (0.0, 0))


def test_captions_that_cannot_be_read_leave_the_count_open(
    index: SampleIndex, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise FileNotFoundError("there is no shard")

    monkeypatch.setattr(Bytes, "captions_of", fails)
    caplog.set_level("INFO", "mclclip")
    report_near(batches_of(index), NearCopies().resolved(views=False), None, clean_caption)
    assert caplog.messages == ["coverage of near copies is not known: there is no shard"]
