"""Readers of published layouts, and what they refuse."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mclclip.data.datasets import sources
from mclclip.data.datasets.cifar10 import CLASSES, read_cifar10
from mclclip.data.datasets.cifar_mnist import read_mnist
from mclclip.data.datasets.folder import class_folders
from mclclip.data.datasets.stl10 import read_stl10
from tests.unit.data.datasets import fakes


def test_cifar_batches(tmp_path: Path) -> None:
    images = fakes.cifar_batches(tmp_path)
    for folder in (tmp_path, tmp_path / "cifar-10-batches-py"):
        train, test = (list(read_cifar10(folder, split)) for split in ("train", "test"))
        np.testing.assert_array_equal([p for p, _ in train + test], images)
        assert [name for _, name in test] == CLASSES[5:9]


def test_cifar_folders_and_archives_give_the_same(tmp_path: Path) -> None:
    images = {f"{s}/{c}/{n}.png": fakes.pixels(n, 32, 32, 3) for s in ("train", "test")
              for c in ("cat", "dog") for n in range(2)}  # fmt: skip
    for name, array in images.items():
        fakes.image_file(tmp_path / "folders" / name, array)
    members = {name: fakes.png(array) for name, array in images.items()}
    (tmp_path / "tars").mkdir()
    fakes.archive(tmp_path / "tars" / "all.tar.gz", {**members, "train/README": b"no image"})
    for split in ("train", "test"):
        one, two = (list(read_cifar10(tmp_path / f, split)) for f in ("folders", "tars"))
        assert [name for _, name in one] == ["cat", "cat", "dog", "dog"]
        for (left, _), (right, _) in zip(one, two, strict=True):
            np.testing.assert_array_equal(left, right)


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("harm"),))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({b"data": Harmful(), b"labels": []}),
        pickle.dumps({b"data": np.array([Harmful()]), b"labels": [0]}),
        pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, 2),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, 2),
        pickle.dumps([1]),
        b"no pickle",
        b"",
    ],
)
def test_a_batch_that_is_none_is_refused_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_batch").write_bytes(data)
    with pytest.raises(ValueError, match="test_batch is no batch of CIFAR-10: "):
        list(read_cifar10(tmp_path, "test"))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["../train/cat/0.png", "train/../../0.png", "/train/cat/0.png"])
def test_members_that_lead_out_of_an_archive_are_not_read(tmp_path: Path, name: str) -> None:
    fakes.archive(tmp_path / "a.tar.gz", {name: fakes.png(fakes.pixels(0, 32, 32, 3))})
    with pytest.raises(FileNotFoundError, match="no train images"):
        list(read_cifar10(tmp_path, "train"))


def test_where_the_training_digits_are_all_are_used(tmp_path: Path) -> None:
    digits, _ = fakes.mnist(tmp_path, train=5)
    assert read_mnist(tmp_path, "train")[1].tolist() == [7] * 5
    np.testing.assert_array_equal(read_mnist(tmp_path, "test")[0], digits)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        gzip.compress(b"\0\0\x08\x03"),
        gzip.compress(b"\0\0\x0d\x01\0\0\0\x01\0"),
        gzip.compress(b"\0\0\x08\x03" + b"\xff" * 12),
        gzip.compress(fakes.idx(fakes.pixels(0, 2, 28, 28)) + b"x"),
        gzip.compress(fakes.idx(fakes.pixels(0, 2, 28, 28)))[:-20],
        b"no gzip",
    ],
    ids=range(7),  # what gzip writes holds the time, which names of tests must not
)
def test_a_damaged_idx_file_is_one_line(tmp_path: Path, data: bytes) -> None:
    fakes.mnist(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(data)
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte.gz is no idx file: "):
        read_mnist(tmp_path, "test")


def test_digits_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no train digits of MNIST in"):
        read_mnist(tmp_path, "train")
    fakes.mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(
        gzip.compress(fakes.idx(np.zeros(3, np.uint8)))
    )
    with pytest.raises(ValueError, match=r"digits \(10, 28, 28\) and labels \(3,\)"):
        read_mnist(tmp_path, "test")
    fakes.mnist(tmp_path, count=1)
    with pytest.raises(ValueError, match="no train digit"):
        read_mnist(tmp_path, "train")
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(
        gzip.compress(fakes.idx(np.full(1, 200, np.uint8)))
    )
    with pytest.raises(ValueError, match="has a label 200: wanted .* 0 to 9"):
        read_mnist(tmp_path, "test")


def test_stl10(tmp_path: Path) -> None:
    images = fakes.stl10(tmp_path)
    for split, wanted in images.items():
        found = list(read_stl10(tmp_path, split))
        np.testing.assert_array_equal([pixels for pixels, _ in found], wanted)
    names = [name for _, name in read_stl10(tmp_path / "stl10_binary", "train")]
    assert names == ["airplane", "bird", "car", "cat", "deer", "dog"]
    assert {name for _, name in found} == {None}


def test_class_folders(tmp_path: Path) -> None:
    for name in ("b/2.JPEG", "b/1.png", "a/0.gif", "a/.hidden.png", ".git/0.png"):
        fakes.image_file(tmp_path / name, fakes.pixels(0, 4, 4, 3))
    (tmp_path / "a" / "notes.txt").write_text("x")
    found = class_folders(tmp_path)
    assert {name: [p.name for p in paths] for name, paths in found.items()} == {
        "a": ["0.gif"],
        "b": ["1.png", "2.JPEG"],
    }
    with pytest.raises(FileNotFoundError, match="1 of 2 classes have no folder in .* c"):
        class_folders(tmp_path, ["a", "c"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no image"):
        class_folders(tmp_path)
    with pytest.raises(ValueError, match="holds no folder: wanted one per class"):
        class_folders(tmp_path / "empty")


def test_a_narrow_picture_is_not_blown_up(tmp_path: Path) -> None:
    """With the shorter side at 1,000 pixels it would have 400 million."""
    Image.new("RGB", (1, 400)).save(tmp_path / "narrow.png")
    with pytest.raises(ValueError, match=r"narrow\.png .*size 1000"):
        sources.file_sample(0, tmp_path / "narrow.png", {}, size=1000)
