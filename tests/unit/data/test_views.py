"""Several views of an image, and batches of samples of which some have no caption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.data.batches import Batch, TrainingBatches, preserve_rng, seed_generators
from mclclip.data.bytes import RawSample
from mclclip.data.decode import decode_image
from mclclip.data.row_store import StoredRows
from mclclip.data.sample_index import SampleIndex
from mclclip.models.transforms import PixelFormat, SimCLROptions, SimCLRTransform
from mclclip.util.randomness import mix
from tests.unit.data.test_batches import (
    NUM_SAMPLES,
    assert_equal,
    augment,
    make,
    make_index,
    plain,
    text_of,
)

AUGMENTATION = int.from_bytes(b"augment", "big")  # a word of the key
BAD = set(range(2, NUM_SAMPLES, 9))
BARE = set(range(0, NUM_SAMPLES, 3)) | set(range(100, 150))  # among them a whole shard


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    return make_index(tmp_path_factory.mktemp("views"), BAD, BARE)


def batches_of(batches: TrainingBatches, num_steps: int = 2) -> list[Batch]:
    first = batches.steps_per_epoch - num_steps // 2  # over the end of an epoch
    return [batches[step] for step in range(first, first + num_steps)]


# --- views -------------------------------------------------------------------------------------


def test_the_first_view_is_the_only_one_and_others_are_drawn_anew(index: SampleIndex) -> None:
    one, three = make(index, tokenizer=None), make(index, tokenizer=None, num_views=3)
    for alone, batch in zip(batches_of(one), batches_of(three), strict=True):
        assert len(alone.views) == 1 and len(batch.views) == 3
        assert torch.equal(batch.views[0], alone.views[0]) and batch.replaced == alone.replaced
        for row, (sample_id, *views) in enumerate(zip(batch.sample_id, *batch.views, strict=True)):
            noise = {float(view[0, 0, 0]) - int(sample_id) % 256 for view in views}
            assert len(noise) == 3
            for number, view in enumerate(views[1:], start=1):
                assert torch.equal(view, expected(three, batch, row, number))
    assert any(batch.replaced for batch in batches_of(three))


def test_views_that_are_finished_together_are_those_that_are_made_alone(index: SampleIndex) -> None:
    look = PixelFormat((6, 6), [0.5], [0.25], 3)
    augment = SimCLRTransform(look, SimCLROptions(strength=1.0, blur=0.3, plain_channels=[2]))
    batches = make(index, tokenizer=None, num_views=2, transform=augment)
    for batch in batches_of(batches):
        for row in range(len(batch.sample_id)):
            wanted = expected(batches, batch, row, 1, augment)
            assert torch.equal(batch.views[1][row], wanted)
    assert any(batch.replaced for batch in batches_of(batches))


def expected(
    batches: TrainingBatches, batch: Batch, row: int, view: int, augment: Any = augment
) -> torch.Tensor:
    """A view written out: the image transformed under the key that names the view."""
    sample_id, epoch = int(batch.sample_id[row]), batch.step // batches.steps_per_epoch
    raw = batches.dataset.read_many([sample_id])[0]
    assert isinstance(raw, RawSample)
    with preserve_rng():
        seed_generators(int(mix(3, 1, epoch, AUGMENTATION, sample_id, view)))
        return augment(decode_image(raw.image, 10_000))  # type: ignore[no-any-return]


def test_every_view_is_cut_and_moved(index: SampleIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make(index, num_views=2, tokenizer=None)[0]
    part = batch.slice(3, 7)
    assert [view.tolist() for view in part.views] == [view[3:7].tolist() for view in batch.views]
    assert all(tensor.is_meta for tensor in batch.to("meta").tensors())
    pinned: list[int] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x.data_ptr()) or x)
    assert_equal(batch.pin_memory(), batch)
    assert set(pinned) == {tensor.data_ptr() for tensor in batch.tensors()} and len(pinned) == 4


# --- samples without captions --------------------------------------------------------------------


def test_without_captions_every_image_is_used(index: SampleIndex) -> None:
    batches = make(index, tokenizer=None, transform=plain)
    found = [batches[step] for step in range(batches.steps_per_epoch)]
    used = {int(i) for batch in found for i in batch.sample_id}
    assert len(used & BARE) > 0.8 * len(BARE - BAD)
    assert all(batch.text is None and batch.text_features is None for batch in found)
    assert {reason for batch in found for reason in batch.replaced.values()} == {"unidentified"}


@pytest.mark.parametrize("cached", [False, True])
def test_replacements_have_captions_where_captions_are_read(
    index: SampleIndex, cached: bool, tmp_path: Path
) -> None:
    """Of a plan that holds samples without a caption too, which those of a training do not."""
    text: dict[str, Any] = {}
    if cached:
        for number, shard in enumerate(index.shards):
            ids = np.arange(shard.start, shard.stop).repeat(
                index.num_captions[shard.start : shard.stop]
            )
            np.save(tmp_path / f"{number:05d}.npy", ids[:, None].astype(np.float32))
        text = {"text_features": StoredRows(tmp_path, index)}
    batches = make(index, num_views=2, transform=plain, global_batch=8, **text)
    reasons = set()
    for step in range(0, batches.steps_per_epoch, 3):
        batch = batches[step]
        ids = batch.sample_id.tolist()
        assert not set(ids) & (BARE | BAD) and len(set(ids)) == 8
        reasons |= set(batch.replaced.values())
        planned = batches.plan(0).batch(step).ids.tolist()
        assert set(batch.replaced) == set(planned) & (BARE | BAD)
        for view in batch.views:
            assert view[:, 0, 0, 0].tolist() == ids
        if cached:
            assert batch.text_features is not None and batch.text_features[:, 0].tolist() == ids
        else:
            assert batch.text is not None
            assert [int(text_of(row).split()[0]) for row in batch.text] == ids
    assert reasons == {"no_caption", "unidentified"}
