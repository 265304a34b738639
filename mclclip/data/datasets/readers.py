"""Reads pixels and class names from published data sets, in torchvision's layouts or as folders.

No file is executed or unpacked to disk: pickled CIFAR batches may hold only arrays and plain
values, and members of archives are decoded from the stream.
"""

from __future__ import annotations

import gzip
import pickle
import struct
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from mclclip.data.datasets.sources import SUFFIXES, Pixels, suffix_of
from mclclip.data.decode import MAX_IMAGE_PIXELS, DecodeError, decode_image

CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
_CIFAR10_BATCHES = {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]}
_MAX_IDX_BYTES = 1 << 30
_DIGITS_FOR_TRAINING = 8_000  # of the 10,000 test digits, where the 60,000 others are absent


# --- folders of classes ----------------------------------------------------------------------


def class_folders(folder: Path, only: Sequence[str] | None = None) -> dict[str, list[Path]]:
    """The image files of every class below ``folder``, both sorted; hidden ones are ignored.

    ``only`` names the classes that are wanted. Raises ValueError for a class without images and
    where there is no class, FileNotFoundError for a wanted class that is not there.
    """
    found = {path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."}
    names = sorted(found) if only is None else list(only)
    if missing := [name for name in names if name not in found]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(names)} classes have no folder in {folder}, such as "
            f"{missing[0]}"
        )
    if not names:
        raise ValueError(f"{folder} holds no folder: wanted one per class, with images in it")
    classes = {}
    for name in names:
        paths = sorted(p for p in (folder / name).iterdir() if p.name[0] != "." and p.is_file())
        classes[name] = [path for path in paths if suffix_of(path) in SUFFIXES]
        if not classes[name]:
            raise ValueError(
                f"the class folder {folder / name} holds no image ({', '.join(SUFFIXES)}): "
                "remove it, or put its images in"
            )
    return classes


# --- CIFAR-10 --------------------------------------------------------------------------------


def read_cifar10(folder: Path, split: str) -> Iterator[tuple[Pixels, str]]:
    """uint8 [32, 32, 3] and class name of every image of ``train`` or ``test``.

    Reads ``cifar-10-batches-py`` (in ``folder``, or ``folder`` itself), ``SPLIT/CLASS/*`` as
    folders, or as members of ``*.tar.gz``, ``*.tgz`` and ``*.tar`` files in ``folder``. Raises
    FileNotFoundError where there is none of these, ValueError for what does not decode.
    """
    names = _CIFAR10_BATCHES[split]
    for batches in (folder / "cifar-10-batches-py", folder):
        if (batches / names[0]).is_file():
            for name in names:
                yield from _read_batch(batches / name)
            return
    if (folder / split).is_dir():
        images: Iterator[tuple[Pixels, str]] = (
            (_decode(path.read_bytes(), str(path)), name)
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
    """Reads arrays and plain values; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        cores = ("numpy.core.multiarray", "numpy._core.multiarray")
        if module in cores and name == "_reconstruct":
            return _empty_array
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return _encode_latin1
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _empty_array(kind: type[np.ndarray], shape: tuple[int, ...], code: bytes) -> np.ndarray:
    return kind.__new__(kind, shape, code)  # type: ignore[arg-type]


def _encode_latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


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
        yield row.transpose(1, 2, 0), CIFAR10_CLASSES[label]


def read_archives(folder: Path, split: str) -> Iterator[tuple[Pixels, str]]:
    """Pixels and class of the members ``SPLIT/CLASS/NAME`` of all archives in a folder.

    Raises ValueError for a member whose path leaves the archive, and for a damaged archive.
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
                    wanted = len(parts) == 3 and parts[0] == split and member.isreg()
                    if wanted and suffix_of(Path(parts[2])) in SUFFIXES:
                        data = tar.extractfile(member)
                        assert data is not None  # of a regular file it never is
                        yield _decode(data.read(), f"{member.name} in {path}"), parts[1]
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}): fetch it again") from error


def _decode(data: bytes, name: str) -> Pixels:
    try:
        return np.asarray(decode_image(data, MAX_IMAGE_PIXELS))
    except DecodeError as error:
        raise ValueError(f"{name} cannot be decoded ({error}): take it out") from error


# --- MNIST -----------------------------------------------------------------------------------


def read_mnist(folder: Path, split: str) -> tuple[Pixels, Pixels]:
    """Digits uint8 [n, 28, 28] and their labels uint8 [n] of ``train`` or ``test``.

    Reads idx files, compressed or not, in ``folder/MNIST/raw``, ``folder/raw`` or ``folder``. Where
    there are only the 10,000 test digits, the first 8,000 are for training and the others for
    testing (in proportion where there are fewer).
    """
    digits, labels = (_idx(folder, stem) for stem in ("t10k-images-idx3", "t10k-labels-idx1"))
    whole = _idx(folder, "train-images-idx3")
    if whole is not None and split == "train":
        digits, labels = whole, _idx(folder, "train-labels-idx1")
    if digits is None or labels is None:
        raise FileNotFoundError(
            f"no {split} digits of MNIST in {folder}: wanted t10k-images-idx3-ubyte and "
            "t10k-labels-idx1-ubyte (or train-*), with .gz or without, there or in MNIST/raw"
        )
    if digits.shape != (len(labels), 28, 28) or labels.shape != (len(digits),):
        raise ValueError(
            f"MNIST in {folder} has digits {digits.shape} and labels {labels.shape}: wanted "
            "[n, 28, 28] and [n]"
        )
    if whole is None:
        cut = len(digits) * _DIGITS_FOR_TRAINING // 10_000
        part = slice(cut) if split == "train" else slice(cut, None)
        digits, labels = digits[part], labels[part]
    if not len(digits) or labels.max() > 9:
        found = f"a label {labels.max()}" if len(digits) else f"no {split} digit"
        raise ValueError(f"MNIST in {folder} has {found}: wanted digits with labels from 0 to 9")
    return digits, labels


def _idx(folder: Path, stem: str) -> Pixels | None:
    for base in (folder / "MNIST" / "raw", folder / "raw", folder):
        for ending, opened in (("-ubyte", open), ("-ubyte.gz", gzip.open)):
            path = base / (stem + ending)
            if path.is_file():
                try:
                    with opened(path, "rb") as file:
                        return _read_idx(file)  # type: ignore[arg-type]
                except (OSError, EOFError, struct.error, ValueError) as error:
                    raise ValueError(f"{path} is no idx file: {error}") from error
    return None


def _read_idx(file: BinaryIO) -> Pixels:
    """An idx file of bytes: 0, 0, 8, the number of dimensions, the sizes, the values."""
    zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
    if zeros or kind != 8 or not 1 <= dimensions <= 3:
        raise ValueError("its first bytes are not those of unsigned bytes in 1 to 3 dimensions")
    shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
    wanted = int(np.prod(shape, dtype=object))
    if wanted > _MAX_IDX_BYTES:
        raise ValueError(f"its header tells of {wanted:,} values")
    data = file.read(wanted + 1)
    if len(data) != wanted:
        raise ValueError(f"its header tells of {wanted:,} values, and it does not end there")
    return np.frombuffer(data, np.uint8).reshape(shape)


# --- STL-10 ----------------------------------------------------------------------------------

STL10_CLASSES = "airplane bird car cat deer dog horse monkey ship truck".split()


def read_stl10(folder: Path, split: str) -> Iterator[tuple[Pixels, str | None]]:
    """uint8 [96, 96, 3] and class name of ``train``, ``test`` or ``unlabeled`` (no class).

    Reads ``stl10_binary`` (in ``folder``, or ``folder`` itself); ``unlabeled_X.bin`` may be absent.
    Raises FileNotFoundError for other missing files, ValueError for sizes that do not fit.
    """
    inner = folder / "stl10_binary"
    folder = inner if inner.is_dir() else folder
    images = folder / f"{split}_X.bin"
    if not images.is_file():
        if split == "unlabeled":
            return
        raise FileNotFoundError(f"no {images}: wanted the files of stl10_binary")
    each = 3 * 96 * 96
    number, rest = divmod(images.stat().st_size, each)
    if rest or not number:
        raise ValueError(f"{images} has {images.stat().st_size} bytes: wanted {each} per image")
    labels = None
    if split != "unlabeled":
        file = folder / f"{split}_y.bin"
        if not file.is_file():
            raise FileNotFoundError(f"no {file}: wanted the files of stl10_binary")
        labels = np.fromfile(file, np.uint8)
        fitting = int(np.isin(labels, range(1, 11)).sum())
        if not len(labels) == fitting == number:
            raise ValueError(
                f"{file} has {len(labels)} labels, of which {fitting} are 1 to 10: wanted that of "
                f"all {number} images of {images.name}"
            )
    pixels = np.memmap(images, np.uint8, mode="r", shape=(number, 3, 96, 96))
    for row in range(number):  # columns of pixels come first in the file
        name = None if labels is None else STL10_CLASSES[int(labels[row]) - 1]
        yield np.asarray(pixels[row].transpose(2, 1, 0)), name
