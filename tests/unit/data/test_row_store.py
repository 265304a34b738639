"""Rows per shard on disk: written with their notes, cut and chosen like one array, in blocks."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.data.arrays import write_npy_parts
from mclclip.data.row_store import (
    MeanBlocks,
    RowBlocks,
    RowStore,
    find_done_shards,
    left_out,
    read_notes,
    rows_path,
    write_shard,
)
from mclclip.run.artifacts import Manifest
from mclclip.util.files import record_of, records_of
from tests.nearest_checks import fit
from tests.unit.data.test_samples import PER_SHARD, make_index

SIZES = (4, 0, 1, 7, 3)
CAPTIONS = np.array([1, 2, 0, 1, 3, 0, 1, 0, 0, 1, 2, 1])


def save(folder: Path, rows: np.ndarray, sizes: Any = SIZES) -> Manifest:
    """Rows in files of these sizes, and the manifest with their records."""
    folder.mkdir(exist_ok=True)
    paths = [rows_path(folder, number) for number in range(len(sizes))]
    for path, part in zip(paths, np.split(rows, np.cumsum(sizes)[:-1]), strict=True):
        np.save(path, part)
    records = records_of(folder, *(path.name for path in paths))
    return Manifest("embeddings", {}, {}, {"shards": len(sizes)}, "", records=records)


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(sum(SIZES), 3)).astype(np.float16)


# --- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, PER_SHARD])
def test_a_shard_is_the_same_wherever_its_batches_are_cut(tmp_path: Path, size: int) -> None:
    index = make_index(tmp_path)
    rows = np.random.default_rng(0).standard_normal((len(index), 3, 2), np.float32)
    bad = {1: "truncated", 5: "broken", 8: "bomb", 9: "timeout", 21: "broken"}
    for number, shard in enumerate(index.shards):
        cuts = [
            range(start, min(start + size, shard.stop))
            for start in range(shard.start, shard.stop, size)
        ]
        batches = [(rows[c.start : c.stop], {i: bad[i] for i in c if i in bad}) for c in cuts]
        reasons = write_shard(
            tmp_path, number, batches, index,
            num_rows=shard.stop - shard.start, dtype="float32",
        )  # fmt: skip
        assert reasons == {i: bad[i] for i in bad if shard.start <= i < shard.stop}
    assert np.array_equal(np.load(tmp_path / "00001.npy"), rows[5:10])
    mine = range(len(index.shards))
    assert find_done_shards(tmp_path, index, mine) == (bad, [])
    assert left_out(tmp_path, len(mine)).tolist() == sorted(bad)
    for name, note in read_notes(tmp_path, len(mine)).items():
        assert note.record == record_of(tmp_path / name)  # computed while it was written
    (tmp_path / "00002.json").write_text("{")  # damaged
    (tmp_path / "00003.npy").write_bytes(b"short")
    assert find_done_shards(tmp_path, index, mine)[1] == [2, 3]
    with pytest.raises(RuntimeError, match="00002.json is damaged: run 'mclclip embed --force'"):
        left_out(tmp_path, len(mine))


# --- reading -------------------------------------------------------------------------------------


def test_they_are_cut_and_chosen_like_the_array(tmp_path: Path, rows: np.ndarray) -> None:
    stored = RowStore.open(tmp_path, save(tmp_path, rows))
    assert len(stored) == 15
    for start in range(16):
        for stop in range(start, 18):
            assert np.array_equal(stored[start:stop], rows[start:stop])
    assert np.array_equal(stored[:], rows)
    for ids in ([0], [3, 4], [4], [0, 5, 11, 12, 14], [*range(15)], [2, 2, 13], []):
        chosen = np.array(ids, np.int64)
        assert np.array_equal(stored[chosen], rows[chosen])
    assert stored[np.zeros(0, np.int64)].shape == (0, 3)


def test_there_may_be_more_files_than_file_handles(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number:05d}.npy" for number in range(60)]
    for path in paths:
        np.save(path, np.ones((2, 3), np.float16))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        store = RowStore(paths)
        assert len(store) == 120 and store[np.arange(120)].shape == (120, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_file_of_another_size_or_without_a_header_is_refused(
    tmp_path: Path, rows: np.ndarray
) -> None:
    manifest = save(tmp_path, rows)
    path = rows_path(tmp_path, 3)
    data = path.read_bytes()
    for damaged in (data[:-1], data.replace(b"\x93NUMPY", b"PK\x03\x04PY")):
        path.write_bytes(damaged)
        with pytest.raises(RuntimeError, match="00003.npy is damaged.*mclclip embed --force"):
            RowStore.open(tmp_path, manifest)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="no .*00003.npy: run 'mclclip embed --force'"):
        RowStore.open(tmp_path, manifest)


# --- blocks --------------------------------------------------------------------------------------


def test_blocks_never_cross_two_files_and_hold_none(tmp_path: Path, rows: np.ndarray) -> None:
    blocks = RowBlocks(RowStore.open(tmp_path, save(tmp_path, rows)), 2)
    assert [len(block) for block in blocks] == [2, 2, 1, 2, 2, 2, 1, 2, 1]
    assert np.array_equal(np.concatenate(list(blocks)), rows)
    assert blocks.layouts() == [(block.shape, block.dtype) for block in blocks]
    with pytest.raises(IndexError):
        blocks[len(blocks)]
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()


def means(
    folder: Path, sizes: Any = (8, 0, 4), dim: int = 6, rows_per_block: int = 100
) -> tuple[MeanBlocks, list[np.ndarray]]:
    """Means of 12 images in three files and of their captions; and the same, row by row."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(12, 6)).astype(np.float16)
    texts = rng.normal(size=(sum(sizes), 6)).astype(np.float32)
    save(folder / "images", images, (7, 0, 5))
    save(folder / "texts", texts[:, :dim], sizes)
    stores = (RowStore(sorted((folder / name).glob("*.npy"))) for name in ("images", "texts"))
    slowly, caption = [], 0
    for image, count in zip(images, CAPTIONS, strict=True):
        row = image.astype(np.float64) / np.linalg.norm(image.astype(np.float64))
        if count:
            row = row + texts[caption] / np.linalg.norm(texts[caption])
            row /= np.linalg.norm(row)
        slowly.append(row)
        caption = min(caption + count, len(texts) - 1)
    return MeanBlocks(*stores, CAPTIONS, rows_per_block), slowly


@pytest.mark.parametrize("rows_per_block", (2, 100))
def test_the_mean_with_the_first_caption_or_the_image_alone(
    tmp_path: Path, rows_per_block: int
) -> None:
    blocks, slowly = means(tmp_path, rows_per_block=rows_per_block)
    assert blocks.layouts() == [(block.shape, block.dtype) for block in blocks]
    assert {block.dtype for block in blocks} == {np.dtype(np.float32)}
    assert max(map(len, blocks)) <= rows_per_block
    np.testing.assert_allclose(np.concatenate(list(blocks)), slowly, atol=1e-6)
    wanted = fit([np.array(block) for block in blocks], 4)
    assert np.array_equal(fit(blocks, 4).centroids, wanted.centroids)


def test_texts_that_do_not_fit_the_images(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="11 rows.* 12 captions .*embed --stage 0 --text"):
        means(tmp_path, (8, 0, 3))
    with pytest.raises(RuntimeError, match="compared per shard"):
        means(tmp_path, (7, 1, 4))
    with pytest.raises(ValueError, match=r"cluster.feature=mean: .*\[\(5,\), \(6,\)\]: wanted one"):
        means(tmp_path, dim=5)


# --- files part by part ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (np.int32, np.float16, np.float32))
@pytest.mark.parametrize("shape", ((7, 3), (7, 1), (7,), (0, 3)))
def test_the_bytes_are_those_of_numpy(tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    np.save(tmp_path / "wanted.npy", array)
    with write_npy_parts(tmp_path / "found.npy", shape, dtype) as append:
        append(array[:2])
        append(np.asfortranarray(array[2:], dtype=np.float64))  # becomes what the file holds
        assert not (tmp_path / "found.npy").exists()
    assert (tmp_path / "found.npy").read_bytes() == (tmp_path / "wanted.npy").read_bytes()


@pytest.mark.parametrize("rows", (4, 6))
def test_too_few_or_too_many_rows_are_no_file(tmp_path: Path, rows: int) -> None:
    with (
        pytest.raises(AssertionError, match=rf"{10 - 2 * rows} numbers are missing"),
        write_npy_parts(tmp_path / "x.npy", (5, 2), np.int32) as append,
    ):
        append(np.zeros((rows, 2), dtype=np.int32))
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    with (
        pytest.raises(KeyboardInterrupt),
        write_npy_parts(tmp_path / "x.npy", (5,), np.int32) as append,
    ):
        append(np.zeros(2, dtype=np.int32))
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
    assert np.load(tmp_path / "x.npy").tolist() == [0, 1, 2]
