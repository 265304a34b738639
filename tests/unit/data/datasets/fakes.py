"""Tiny fakes of the layouts that published data sets come in."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.tars import write_tar


def pixels(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def image_file(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


def cifar_batches(root: Path, per_batch: int = 4) -> np.ndarray:
    """cifar-10-batches-py; the images [6 * per_batch, 32, 32, 3], the test batch last."""
    names = [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]
    images = pixels(1, len(names) * per_batch, 32, 32, 3)
    (root / "cifar-10-batches-py").mkdir(parents=True)
    for number, name in enumerate(names):
        part = images[number * per_batch :][:per_batch]
        data = part.transpose(0, 3, 1, 2).reshape(per_batch, 3072)
        batch = {b"data": data, b"labels": [(number + k) % 10 for k in range(per_batch)]}
        path = root / "cifar-10-batches-py" / name
        path.write_bytes(pickle.dumps(batch, protocol=2))
    return images


def archive(path: Path, members: dict[str, bytes]) -> Path:
    return write_tar(path, members.items(), mode="w:gz")


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def mnist(root: Path, count: int = 10, train: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Digits [count, 28, 28] and labels as t10k files, compressed; ``train`` as others, plain."""
    root.mkdir(parents=True, exist_ok=True)
    digits, labels = pixels(2, count, 28, 28), np.arange(count, dtype=np.uint8) % 10
    (root / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(digits)))
    (root / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    if train:
        raw = root / "MNIST" / "raw"
        raw.mkdir(parents=True)
        (raw / "train-images-idx3-ubyte").write_bytes(idx(pixels(3, train, 28, 28)))
        (raw / "train-labels-idx1-ubyte").write_bytes(idx(np.full(train, 7, np.uint8)))
    return digits, labels


def stl10(root: Path, unlabeled: int = 2) -> dict[str, np.ndarray]:
    """stl10_binary: 6 train and 3 test images [n, 96, 96, 3], and some without labels."""
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    images = {"train": pixels(4, 6, 96, 96, 3), "test": pixels(5, 3, 96, 96, 3)}
    images |= {"unlabeled": pixels(6, unlabeled, 96, 96, 3)} if unlabeled else {}
    for split, array in images.items():
        array.transpose(0, 3, 2, 1).tofile(folder / f"{split}_X.bin")
        if split != "unlabeled":
            (np.arange(len(array), dtype=np.uint8) % 10 + 1).tofile(folder / f"{split}_y.bin")
    return images


def celeba(root: Path, count: int = 240) -> np.ndarray:
    """The lists and JPEGs of CelebA; attributes [count, 3] in the order black hair, smiling, male,
    which depend on each other. The last third is test, a sixth before it validation."""
    random = np.random.default_rng(7)
    male = random.random(count) < 0.5
    values = np.stack(
        [random.random(count) < 0.3 + 0.4 * male, random.random(count) < 0.5, male], 1
    )
    folder = root / "celeba"
    names = [f"{number:06d}.jpg" for number in range(1, count + 1)]
    for name in names:
        image_file(folder / "img_align_celeba" / name, pixels(8, 12, 10, 3))
    rows = [
        f"{name} {2 * s - 1:2d} {2 * b - 1:2d} -1 {2 * m - 1:2d}"
        for name, (b, s, m) in zip(names, values.astype(int).tolist(), strict=True)
    ]
    text = "\n".join([str(count), "Smiling Black_Hair Bald Male", *rows])
    (folder / "list_attr_celeba.txt").write_text(text + "\n")
    parts = [0] * (count // 2) + [1] * (count // 6) + [2] * (count - count // 2 - count // 6)
    lines = [f"{name} {part}" for name, part in zip(names, parts, strict=True)]
    (folder / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    return values.astype(int)


def read(path: Path) -> list[tuple[dict[str, Any], np.ndarray]]:
    """Facts and pixels of every sample of the shards in a folder, in order."""
    found: dict[str, dict[str, Any]] = {}
    for shard in sorted(path.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, extension = member.name.partition(".")
                content = tar.extractfile(member)
                assert content is not None
                found.setdefault(f"{shard.name}/{key}", {})[extension] = content.read()
    return [(json.loads(sample.pop("json")), _pixels(*sample.items())) for sample in found.values()]


def _pixels(image: tuple[str, bytes]) -> np.ndarray:
    extension, data = image
    if extension == "npy":
        array: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
        return array
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
