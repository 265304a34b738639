"""CIFAR-10 (Krizhevsky, 2009): 32 pixels, 10 classes, 50,000 train and 10,000 test images.

Nothing in the files is executed, and no archive is unpacked to disk: pickled batches may hold only
arrays and plain values, and members of archives are decoded from the stream.
"""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from mclclip.data.datasets.folder import class_folders
from mclclip.data.datasets.sources import (
    Pixels,
    Sources,
    Splits,
    in_random_order,
    picture_of,
    png_sample,
)
from mclclip.data.decode import IMAGE_EXTENSIONS, suffix_of
from mclclip.data.shard_writer import PackedSample

CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
_BATCHES = {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]}


def build(sources: Sources, seed: int) -> Splits:
    """Reads the images of ``--source cifar10=FOLDER`` and makes PNGs; attribute class."""
    folder = sources.folder("cifar10")

    def samples(split: str) -> Iterator[PackedSample]:
        for number, (pixels, name) in enumerate(in_random_order(read_cifar10(folder, split), seed)):
            yield png_sample(number, pixels, {"class": name})

    return {split: samples(split) for split in ("train", "test")}


def read_cifar10(folder: Path, split: str) -> Iterator[tuple[Pixels, str]]:
    """Yields pixels uint8 [32, 32, 3] and class name of every image of ``train`` or ``test``.

    They are in ``cifar-10-batches-py`` (in ``folder``, or ``folder`` itself), or in
    ``SPLIT/CLASS/*``, as folders or in ``*.tar.gz``, ``*.tgz`` and ``*.tar`` files in ``folder``.
    Raises FileNotFoundError if there is none of these, ValueError for files that do not decode.
    """
    names = _BATCHES[split]
    for batches in (folder / "cifar-10-batches-py", folder):
        if (batches / names[0]).is_file():
            for name in names:
                yield from _read_batch(batches / name)
            return
    if (folder / split).is_dir():
        images: Iterator[tuple[Pixels, str]] = (
            (np.asarray(picture_of(path.read_bytes(), str(path))), name)
            for name, paths in class_folders(folder / split).items()
            for path in paths
        )
    else:
        images = read_archives(folder, split)
    number = 0
    for number, (pixels, name) in enumerate(images, start=1):  # noqa: B007
        if pixels.shape != (32, 32, 3):
            raise ValueError(f"an image of {name} in {folder} is {pixels.shape}: wanted 32 x 32")
        yield pixels, name
    if not number:
        raise FileNotFoundError(
            f"no {split} images of CIFAR-10 in {folder}: wanted cifar-10-batches-py, or "
            f"{split}/CLASS/* as folders or in a .tar.gz"
        )


class _ArraysOnly(pickle.Unpickler):
    """Unpickles arrays and plain values, and refuses a pickle that names anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        cores = ("numpy.core.multiarray", "numpy._core.multiarray")
        if module in cores and name == "_reconstruct":
            return lambda kind, shape, code: kind.__new__(kind, shape, code)
        if (module, name) == ("_codecs", "encode"):  # for bytes that Python 3 wrote for Python 2
            return lambda text, _: text.encode("latin1")
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _read_batch(path: Path) -> Iterator[tuple[Pixels, str]]:
    try:
        with open(path, "rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
        fits = pixels.dtype == np.uint8 and pixels.shape == (len(labels), 3072)
        if not fits or not np.isin(labels, range(10)).all():
            raise ValueError(f"{pixels.dtype} {pixels.shape} with {len(labels)} labels")
    except Exception as error:  # pickle raises errors of many kinds for damaged data
        raise ValueError(f"{path} is no batch of CIFAR-10: {error}") from error
    for row, label in zip(pixels.reshape(-1, 3, 32, 32), labels.tolist(), strict=True):
        yield row.transpose(1, 2, 0), CLASSES[label]


def read_archives(folder: Path, split: str) -> Iterator[tuple[Pixels, str]]:
    """Yields pixels and class of the members ``SPLIT/CLASS/NAME`` of all archives in a folder.

    Raises ValueError for a member whose path leads out of the archive, and for a damaged archive.
    """
    endings = (".tar.gz", ".tgz", ".tar")
    for path in sorted(p for p in folder.iterdir() if p.name.endswith(endings)):
        try:
            with tarfile.open(path, "r:*") as tar:
                for member in tar:
                    parts = PurePosixPath(member.name).parts
                    if ".." in parts or member.name.startswith("/"):
                        raise ValueError(
                            f"{path} has a member {member.name!r} that leads out of it"
                        )
                    is_of_split = len(parts) == 3 and parts[0] == split and member.isreg()
                    if is_of_split and suffix_of(parts[2]) in IMAGE_EXTENSIONS:
                        data = tar.extractfile(member)
                        assert data is not None  # since it is a regular file
                        picture = picture_of(data.read(), f"{member.name} in {path}")
                        yield np.asarray(picture), parts[1]
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}): fetch it again") from error
