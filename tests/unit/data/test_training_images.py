"""Images of benchmarks that a run is trained on, found by their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mclclip import config as configuration
from mclclip.config import Config
from mclclip.data import training_images
from mclclip.data.shard_reader import ShardReader
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.data.training_images import TrainingImages
from mclclip.eval.images import read_shards
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import index, pack

NUM = 40


def images(seed: int, size: Callable[[int], int]) -> list[bytes]:
    """Bytes that no decoder reads, of a size by number."""
    rng = np.random.default_rng(seed)
    return [rng.bytes(size(number)) for number in range(NUM)]


def written(folder: Path, contents: Sequence[bytes], key: str = "{}") -> Path:
    samples = [
        PackedSample(key.format(f"{number:05d}"), data, "png", ["a caption"])
        for number, data in enumerate(contents)
    ]
    write_shards(samples, folder, 16)
    return folder


def run_on(folder: Path, run_dir: Path, **plan: Any) -> Config:
    """A run with an index of the shards in a folder."""
    tree = {
        "run_dir": str(run_dir),
        "data": {"sources": {"own": {"shards": f"{folder}/*.tar"}}, "index_workers": 1},
        "train": {"plan": plan},
    }
    config = configuration.from_tree(tree)
    index.run(config, SINGLE)
    return config


def known(config: Config, folder: Path) -> int:
    found = TrainingImages.of(config)
    assert found is not None
    return found.count(read_shards(folder)[0])


@pytest.mark.parametrize("size", [lambda n: 100 + n // 4, lambda _: 100])
def test_equal_bytes_are_found_wherever_they_lie(
    tmp_path: Path, size: Callable[[int], int]
) -> None:
    own, others = images(0, size), images(1, size)
    config = run_on(written(tmp_path / "own", own), tmp_path / "run")
    assert known(config, tmp_path / "own") == NUM
    assert known(config, written(tmp_path / "renamed", own[::-1], "other{}")) == NUM
    assert known(config, written(tmp_path / "others", others)) == 0
    assert known(config, written(tmp_path / "mixed", [*others[:-3], *own[:3]], "m{}")) == 3
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for path, data in zip(files, (own[7], others[7], own[7][:-1]), strict=True):
        path.write_bytes(data)
    found = TrainingImages.of(config)
    assert found is not None and found.count(files) == 1


@pytest.mark.parametrize("size", [lambda n: 100 + n, lambda _: 100])
def test_few_training_images_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: Callable[[int], int]
) -> None:
    """Of arrays of one size those with an equal key are; of pictures the rarest sizes."""
    monkeypatch.setattr(training_images, "MOST_READ", 8)
    config = run_on(written(tmp_path / "own", images(0, size)), tmp_path / "run")
    read: list[int] = []
    plain = ShardReader.read

    def counted(self: ShardReader, *place: int) -> bytes:
        read.append(place[1])
        return plain(self, *place)

    monkeypatch.setattr(ShardReader, "read", counted)
    assert known(config, tmp_path / "own") == 8 == len(read)


def test_samples_that_no_training_draws_are_not_trained_on(tmp_path: Path) -> None:
    own = images(0, lambda n: 100 + n)
    written(tmp_path / "own", own)
    np.save(tmp_path / "weights.npy", (np.arange(NUM) >= 5).astype(np.float32))
    config = run_on(tmp_path / "own", tmp_path / "run", weights=str(tmp_path / "weights.npy"))
    assert known(config, tmp_path / "own") == NUM - 5


def test_without_the_training_shards_it_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = images(0, lambda n: 100 + n)
    config = run_on(written(tmp_path / "own", own), tmp_path / "run")
    written(tmp_path / "copied", own)
    for path in (tmp_path / "own").glob("*.tar"):
        path.unlink()
    assert known(config, tmp_path / "copied") == 0
    assert "is not known: shard " in caplog.text


def test_a_run_without_an_index_has_none(tmp_path: Path) -> None:
    assert TrainingImages.of(configuration.from_tree({"run_dir": str(tmp_path)})) is None


def test_pictures_that_were_packed_smaller_are_found(tmp_path: Path) -> None:
    """Their originals are a benchmark of files, beside one that was not trained on."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(4):
        side = 20 + 20 * number  # two are larger than 50
        pixels = rng.integers(0, 256, (side, side + 9, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a caption")
    Image.fromarray(255 - pixels).save(folder.parent / "other.png")
    pack.pack(folder, tmp_path / "shards", size=50)
    found = TrainingImages.of(run_on(tmp_path / "shards", tmp_path / "run"))
    files = [*sorted(folder.glob("*.png")), folder.parent / "other.png"]
    assert found is not None and found.count(files) == 4
    assert [found.count([file]) for file in files] == [1, 1, 1, 1, 0]
