"""Joint rows of image and text embeddings on disk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.clustering import kmeans
from mclclip.data.row_store import MeanBlocks, RowBlocks, RowStore

SIZES = (7, 0, 5)
CAPTIONS = np.array([1, 2, 0, 1, 3, 0, 1, 0, 0, 1, 2, 1])


def write(folder: Path, name: str, sizes: Any, dim: int = 6, dtype: Any = np.float16) -> list[Path]:
    rng = np.random.default_rng(len(name))
    paths = []
    for number, size in enumerate(sizes):
        rows = rng.normal(size=(size, dim)) * rng.uniform(0.5, 2.0, size=(size, 1))
        paths.append(folder / f"{name}{number}.npy")
        np.save(paths[-1], rows.astype(dtype))
    return paths


def unit(row: np.ndarray) -> np.ndarray:
    wide: np.ndarray = row.astype(np.float64)
    return wide / np.linalg.norm(wide)


def slowly(images: list[Path], texts: list[Path]) -> list[np.ndarray]:
    """Row by row, caption by caption."""
    rows, sample = [], 0
    for image_path, text_path in zip(images, texts, strict=True):
        caption = 0
        for image in np.load(image_path):
            row = unit(image)
            if CAPTIONS[sample]:
                row = unit(row + unit(np.load(text_path)[caption]))
            rows.append(row)
            caption += CAPTIONS[sample]
            sample += 1
    return rows


@pytest.mark.parametrize("rows_per_block", (1, 2, 3, 100))
def test_the_mean_with_the_first_caption_or_the_image_alone(
    tmp_path: Path, rows_per_block: int
) -> None:
    images = write(tmp_path, "image", SIZES)
    texts = write(tmp_path, "text", (8, 0, 4), dtype=np.float32)
    blocks = MeanBlocks(RowStore(images), RowStore(texts), CAPTIONS, rows_per_block)
    plain = RowBlocks(RowStore(images), rows_per_block)
    assert [block.shape for block in blocks] == [block.shape for block in plain]
    assert blocks.layouts() == [(block.shape, np.dtype(np.float32)) for block in plain]
    assert plain.layouts() == [(block.shape, block.dtype) for block in plain]
    found = np.concatenate(list(blocks))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, slowly(images, texts), atol=1e-6)


def test_zeros_stay_zeros(tmp_path: Path) -> None:
    """An undecodable sample, which takes no part anyway, makes no NaN."""
    np.save(tmp_path / "image.npy", np.zeros((2, 3), np.float16))
    np.save(tmp_path / "text.npy", np.zeros((1, 3), np.float16))
    blocks = MeanBlocks(
        RowStore([tmp_path / "image.npy"]), RowStore([tmp_path / "text.npy"]), np.array([0, 1])
    )
    assert (blocks[0] == 0.0).all()


def test_k_means_reads_them_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, texts = write(tmp_path, "image", SIZES), write(tmp_path, "text", (8, 0, 4))
    blocks = MeanBlocks(RowStore(images), RowStore(texts), CAPTIONS, 3)
    wanted = kmeans.fit([np.array(block) for block in blocks], 4)
    read: list[int] = []
    whole = MeanBlocks.read

    def count(self: MeanBlocks, file: int, cut: slice) -> Any:
        read.append(cut.stop - cut.start)
        return whole(self, file, cut)

    monkeypatch.setattr(MeanBlocks, "read", count)
    assert np.array_equal(kmeans.fit(blocks, 4).centroids, wanted.centroids)
    assert max(read) <= 3


def test_what_does_not_fit(tmp_path: Path) -> None:
    images = RowStore(write(tmp_path, "image", SIZES))
    with pytest.raises(
        RuntimeError, match="have 11 rows, the index has 12 captions .*embed --text"
    ):
        MeanBlocks(images, RowStore(write(tmp_path, "few", (8, 0, 3))), CAPTIONS)
    with pytest.raises(RuntimeError, match="compared per shard"):
        MeanBlocks(images, RowStore(write(tmp_path, "moved", (7, 1, 4))), CAPTIONS)
    with pytest.raises(ValueError, match=r"cluster.feature=mean: .*\[\(5,\), \(6,\)\]: wanted one"):
        MeanBlocks(images, RowStore(write(tmp_path, "narrow", (8, 0, 4), dim=5)), CAPTIONS)
