"""Every published data set as shards, from fakes of what users have, and from real files."""

from __future__ import annotations

import gzip
import itertools
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mclclip.util.torchvision_fix  # noqa: F401
from mclclip import config
from mclclip.data.datasets import sources
from mclclip.data.datasets.celeba import balance
from mclclip.data.datasets.cifar10 import CLASSES, read_cifar10
from mclclip.data.datasets.cifar10 import CLASSES as CIFAR10_CLASSES
from mclclip.data.datasets.cifar_mnist import read_mnist
from mclclip.data.datasets.folder import class_folders
from mclclip.data.datasets.imagenet_subset import SUBSETS
from mclclip.data.datasets.stl_digits import paste
from mclclip.data.groups import group_samples
from mclclip.data.labels import AttributeClasses
from mclclip.data.picture_transform import PictureTransform
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import read_manifest
from mclclip.verbs import index, make_dataset
from tests.batches import training_batches
from tests.unit.data.datasets import fakes


def make(name: str, out: Path, *sources: str, **options: Any) -> dict[str, list[Any]]:
    """What the shards of each split hold."""
    make_dataset.run(name, out, source=list(sources), **options)
    counts = read_manifest(out, "dataset").counts["samples"]
    found = {path.name: fakes.read(path) for path in out.iterdir() if path.is_dir()}
    assert {split: len(rows) for split, rows in found.items() if rows} == counts
    return found


def test_cifar10(tmp_path: Path) -> None:
    images = fakes.cifar_batches(tmp_path / "c")
    found = make("cifar10", tmp_path / "out", f"cifar10={tmp_path / 'c'}", samples_per_shard=7)
    assert len(list((tmp_path / "out" / "train").glob("*.tar"))) == 3
    for split, wanted in (("train", images[:20]), ("test", images[20:])):
        stored = np.array([array for _, array in found[split]])
        np.testing.assert_array_equal(in_order(stored), in_order(wanted))
        assert not np.array_equal(stored, wanted)  # any few shards are a sample of the whole
    (first,) = [facts for facts, array in found["test"] if np.array_equal(array, images[20])]
    assert first["class"] == CIFAR10_CLASSES[5]


def in_order(images: np.ndarray) -> np.ndarray:
    """Images [N, H, W, C] in an order of their own."""
    return images[np.lexsort(images.reshape(len(images), -1).T)]


def test_cifar_pairs(tmp_path: Path) -> None:
    """Every image once, on the left or on the right, beside another one; with both classes."""
    images = fakes.cifar_batches(tmp_path / "c")
    single = make("cifar10", tmp_path / "single", f"cifar10={tmp_path / 'c'}")
    pairs = make("cifar_pairs", tmp_path / "pairs", f"cifar10={tmp_path / 'c'}")
    for split, part in (("train", images[:20]), ("test", images[20:])):
        class_of = {array.tobytes(): facts["class"] for facts, array in single[split]}
        halves = []
        for facts, array in pairs[split]:
            assert array.shape == (64, 64, 3) and (array[[*range(16), *range(48, 64)]] == 128).all()
            assert facts["pair"].split(" and ") == sorted([facts["left"], facts["right"]])
            for side, half in (("left", array[16:48, :32]), ("right", array[16:48, 32:])):
                assert facts[side] == class_of[half.tobytes()]
                halves.append(half)
        np.testing.assert_array_equal(in_order(np.array(halves)), in_order(part))


def test_cifar_mnist(tmp_path: Path) -> None:
    images = fakes.cifar_batches(tmp_path / "c")
    digits, labels = fakes.mnist(tmp_path / "m")
    sources = (f"cifar10={tmp_path / 'c'}", f"mnist={tmp_path / 'm'}")
    found = make("cifar_mnist", tmp_path / "out", *sources)
    for split, part, cut in (
        ("train", images[:20], slice(8)),
        ("test", images[20:], slice(8, None)),
    ):
        stored = np.array([array[..., :3] for _, array in found[split]])
        np.testing.assert_array_equal(in_order(stored), in_order(part))
        used: Counter[int] = Counter()
        for facts, array in found[split]:
            assert array.shape == (32, 32, 4) and not array[[0, 1, -1, -2], :, 3].any()
            (row,) = np.flatnonzero((digits[cut] == array[2:-2, 2:-2, 3]).all(axis=(1, 2)))
            assert facts["mnist"] == labels[cut][row] and facts["cifar"] in CIFAR10_CLASSES
            used[int(row)] += 1
        assert max(used.values()) - min(used.values()) <= 1  # every digit equally often
    other = make("cifar_mnist", tmp_path / "other", *sources, seed=1, digits=3)
    assert [f["mnist"] for f, _ in other["train"]] != [f["mnist"] for f, _ in found["train"]]
    # Of few digits those of the training part alone, the same for both splits.
    few = {split: {array[2:-2, 2:-2, 3].tobytes() for _, array in other[split]} for split in other}
    assert few["train"] == few["test"] < {digit.tobytes() for digit in digits[:8]}
    assert len(few["train"]) == 3
    with pytest.raises(ValueError, match="--digits 9: wanted 1 to 8 of those in"):
        make("cifar_mnist", tmp_path / "more", *sources, digits=9)


def test_stl10(tmp_path: Path) -> None:
    images = fakes.stl10(tmp_path)
    found = make("stl10", tmp_path / "out", f"stl10={tmp_path}")
    for split, wanted in images.items():
        np.testing.assert_array_equal([array for _, array in found[split]], wanted)
    assert "class" not in found["unlabeled"][0][0] and found["train"][1][0]["class"] == "bird"
    names = [facts["class"] for facts, _ in found["train"]]
    assert names == ["airplane", "bird", "car", "cat", "deer", "dog"]


def test_stl_digits(tmp_path: Path) -> None:
    images = fakes.stl10(tmp_path / "s")
    fakes.mnist(tmp_path / "m")
    sources = (f"stl10={tmp_path / 's'}", f"mnist={tmp_path / 'm'}")
    found = make("stl_digits", tmp_path / "out", *sources, copies=2)
    assert {split: len(rows) for split, rows in found.items()} == {"train": 6, "test": 3}
    assert {facts["mnist"] for facts, _ in found["test"]} <= {8, 9}
    facts, array = found["train"][0]
    assert facts["stl10"] == "airplane" and (array != images["train"][0]).any()
    with pytest.raises(ValueError, match="copies is 10: wanted 1 to 9"):
        make("stl_digits", tmp_path / "more", *sources, copies=10)


def test_pasted_digits_cover_by_their_ink() -> None:
    image, digit = fakes.pixels(0, 96, 96, 3), np.zeros((28, 28), np.uint8)
    digit[10:18, 10:18] = 255
    for copies in (1, 4, 9):
        pasted = paste(image, digit, copies, np.random.default_rng(0))
        changed = (pasted != image).any(axis=2)
        assert (pasted[changed] == 255).all() and 0 < changed.sum() <= 64 * copies
        assert changed.reshape(3, 32, 3, 32).any(axis=(1, 3)).sum() == copies


def test_celeba_is_made_independent(tmp_path: Path) -> None:
    values = fakes.celeba(tmp_path)
    found = make("celeba", tmp_path / "out", f"celeba={tmp_path}")
    names = ("black_hair", "smiling", "male")
    for split, part in (("train", slice(0, 120)), ("test", slice(160, None))):
        rows = [tuple(facts[name] for name in names) for facts, _ in found[split]]
        cells = Counter(map(tuple, values[part].tolist()))
        assert Counter(rows) == dict.fromkeys(cells, min(cells.values())) and len(cells) == 8
        for facts, _ in found[split]:
            row = int(facts["file"].split(".")[0]) - 1
            assert values[row].tolist() == [facts[name] for name in names]
            assert row in range(240)[part]
    with pytest.raises(ValueError, match="7 images of CelebA lack a combination"):
        balance(np.arange(7), np.array([*itertools.product((0, 1), repeat=3)]), 0)
    small = make("celeba", tmp_path / "small", f"celeba={tmp_path}", size=5)
    assert small["train"][0][1].shape == (6, 5, 3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list_attr_celeba.txt", "1\nSmiling Male Black_Hair\n000001.jpg 1 1\n"),
        ("list_attr_celeba.txt", "1\nSmiling Male Black_Hair\n000001.jpg 1 1 2\n"),
        ("list_attr_celeba.txt", "1\nSmiling Male Black_Hair\n../../x.jpg 1 1 1\n"),
        ("list_eval_partition.txt", "000001.jpg 3\n"),
    ],
)
def test_damaged_lists_of_celeba(tmp_path: Path, name: str, text: str) -> None:
    fakes.celeba(tmp_path, count=12)
    (tmp_path / "celeba" / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} is not the list of CelebA"):
        make("celeba", tmp_path / "out", f"celeba={tmp_path}")


def test_a_folder_with_its_own_split(tmp_path: Path) -> None:
    for name in ("train/a/0.jpg", "train/b/1.bmp", "test/a/2.png"):
        fakes.image_file(tmp_path / "in" / name, fakes.pixels(0, 8, 16, 3))
    found = make("folder", tmp_path / "out", f"folder={tmp_path / 'in'}")
    assert [(f["class"], f["file"]) for f, _ in found["train"]] == [("a", "0.jpg"), ("b", "1.bmp")]
    assert [f["file"] for f, _ in found["test"]] == ["2.png"]
    small = make("folder", tmp_path / "small", f"folder={tmp_path / 'in'}", size=4)
    assert {array.shape for rows in small.values() for _, array in rows} == {(4, 8, 3)}


def test_a_folder_is_split_by_a_seed(tmp_path: Path) -> None:
    for name, count in (("a", 10), ("b", 3), ("one", 1)):
        for number in range(count):
            fakes.image_file(tmp_path / "in" / name / f"{number}.png", fakes.pixels(0, 4, 4, 3))
    runs = [
        make("folder", tmp_path / f"{k}", f"folder={tmp_path / 'in'}", seed=seed, test_share=0.3)
        for k, seed in enumerate((0, 0, 1))
    ]
    files = [{s: [(f["class"], f["file"]) for f, _ in r[s]] for s in r} for r in runs]
    assert files[0] == files[1] != files[2]
    assert Counter(name for name, _ in files[0]["test"]) == {"a": 3, "b": 1}
    assert len({*files[0]["train"], *files[0]["test"]}) == 14


def test_imagenet_subset(tmp_path: Path) -> None:
    for split, wnid in itertools.product(("train", "val"), [*SUBSETS["in1p"], "n00000001"]):
        fakes.image_file(tmp_path / "in" / split / wnid / f"{wnid}.JPEG", fakes.pixels(0, 4, 4, 3))
    found = make("imagenet_subset", tmp_path / "out", f"imagenet={tmp_path / 'in'}")
    assert {f["class"]: f["name"] for f, _ in found["test"]} == SUBSETS["in1p"]
    assert len(found["train"]) == 10
    subset = tmp_path / "list.txt"
    subset.write_text("# two\nn00000001 big cats\n\nn02108089\n")
    found = make("imagenet_subset", tmp_path / "2", f"imagenet={tmp_path / 'in'}", subset=subset)
    assert {f.get("superclass") for f, _ in found["train"]} == {"big cats", None}
    for text, message in (
        ("dogs\n", "line 1 begins with 'dogs'"),
        ("n00000001\nn00000001 x\n", "line 2 begins with 'n00000001'"),
        ("\n", "names no class"),
    ):
        subset.write_text(text)
        with pytest.raises(ValueError, match=message):
            make("imagenet_subset", tmp_path / "3", f"imagenet={tmp_path}", subset=str(subset))
    with pytest.raises(FileNotFoundError, match="wanted in1p, or a file"):
        make("imagenet_subset", tmp_path / "3", f"imagenet={tmp_path}", subset="in26")


# --- sources -----------------------------------------------------------------------------------


def test_wrong_sources_and_options_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder of cifar10 is given: name it with --source"):
        make("cifar10", tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        make("cifar10", tmp_path / "b", f"cifar10={tmp_path / 'none'}")
    for wrong in ("cifar10", "=x", "cifar10="):
        with pytest.raises(ValueError, match=f"--source {wrong}: wanted NAME=FOLDER"):
            make("cifar10", tmp_path / "c", wrong)
    with pytest.raises(ValueError, match="the data set cifar10 has no option size: it has downl"):
        make("cifar10", tmp_path / "d", size=3)
    with pytest.raises(ValueError, match="folder cannot be downloaded"):
        make("folder", tmp_path / "e", f"folder={tmp_path}", download=True)
    fakes.image_file(tmp_path / "in" / "a" / "0.tif", fakes.pixels(0, 4, 4, 3))
    (tmp_path / "in" / "a" / "1.tif").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"1.tif cannot be decoded \(unidentified"):
        make("folder", tmp_path / "f", f"folder={tmp_path / 'in'}")


def test_downloads_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets as published

    def fetch(root: str, download: bool) -> None:
        assert download
        fakes.cifar_batches(Path(root))

    monkeypatch.setattr(published, "CIFAR10", fetch)
    source = f"cifar10={tmp_path / 'c'}"
    with pytest.raises(FileNotFoundError, match="no such folder"):
        make("cifar10", tmp_path / "out", source)
    assert len(make("cifar10", tmp_path / "out2", source, download=True)["train"]) == 20

    def fail(root: str, download: bool) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(published, "CIFAR10", fail)
    with pytest.raises(RuntimeError, match="cifar10 could not be downloaded into .* no route"):
        make("cifar10", tmp_path / "out3", source, download=True)


# --- read by the index, and real files ---------------------------------------------------------


class Noisy(PictureTransform):
    """A transform of arrays, with a draw of its own in every view."""

    reads_arrays = True

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1) + torch.rand(())


def test_training_batches_of_four_channels_in_two_views_with_classes(tmp_path: Path) -> None:
    fakes.cifar_batches(tmp_path / "c")
    fakes.mnist(tmp_path / "m")
    make("cifar_mnist", tmp_path / "o", f"cifar10={tmp_path / 'c'}", f"mnist={tmp_path / 'm'}")
    source = {"shards": f"{tmp_path}/o/train/*.tar", "attributes": ["mnist"]}
    data = {"sources": {"train": source}, "index_workers": 1}
    opened = index.run(config.from_tree({"run_dir": str(tmp_path / "run"), "data": data}), SINGLE)
    batches = training_batches(
        index=opened, grouped=group_samples(np.zeros(len(opened), np.int64), (1,)),
        transform=Noisy(), num_views=2, global_batch=8,
        class_labels=AttributeClasses(opened, "mnist"),
    )  # fmt: skip
    batch = batches[1]
    assert [view.shape for view in batch.views] == [(8, 4, 32, 32)] * 2
    assert not torch.equal(*batch.views)
    assert batch.classes is not None and batch.classes.dtype == torch.int64
    codes = opened.attribute("mnist")[0]
    assert batch.classes.tolist() == codes[batch.sample_id.numpy()][:, None].tolist()


# --- readers of published layouts --------------------------------------------------------------


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
    ],
    ids=range(6),  # what gzip writes holds the time, which names of tests must not
)
def test_a_damaged_idx_file_is_one_line(tmp_path: Path, data: bytes) -> None:
    fakes.mnist(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(data)
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte.gz is no idx file: "):
        read_mnist(tmp_path, "test")


def test_digits_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no train digits of MNIST in"):
        read_mnist(tmp_path, "train")
    for count, labels, message in (
        (10, np.zeros(3, np.uint8), r"digits \(10, 28, 28\) and labels \(3,\)"),
        (1, np.full(1, 200, np.uint8), "has a label 200: wanted .* 0 to 9"),
    ):
        fakes.mnist(tmp_path, count=count)
        path = tmp_path / "t10k-labels-idx1-ubyte.gz"
        path.write_bytes(gzip.compress(fakes.idx(labels)))
        with pytest.raises(ValueError, match=message):
            read_mnist(tmp_path, "test")


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
