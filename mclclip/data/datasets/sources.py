"""The user's folders with a data set's files, and functions that make samples from pictures."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from mclclip.data.decode import (
    IMAGE_EXTENSIONS,
    MAX_IMAGE_PIXELS,
    DecodeError,
    decode_image,
    suffix_of,
)
from mclclip.data.shard_scan import ARRAY_EXTENSION
from mclclip.data.shard_writer import PackedSample, image_extension
from mclclip.util.files import digest_json

T = TypeVar("T")
Pixels = npt.NDArray[np.uint8]
# The data sets that torchvision can download, with its names for them.
_DOWNLOADERS = {"cifar10": "CIFAR10", "mnist": "MNIST", "stl10": "STL10", "celeba": "CelebA"}


@dataclass(frozen=True)
class Files:
    """A split that has no shards: (name below the split's folder, content) of each of its files."""

    files: Iterable[tuple[str, bytes]]


Splits = dict[str, Iterable[PackedSample] | Files]


@dataclass(frozen=True)
class Sources:
    """The folders of ``--source NAME=FOLDER``; with ``download`` torchvision fills them first."""

    folders: Mapping[str, Path] = field(default_factory=dict)
    download: bool = False
    _used: set[str] = field(default_factory=set, init=False)

    def folder(self, name: str) -> Path:
        """Returns the folder of a source, such as 'cifar10'.

        Raises ValueError if the user did not name it or it cannot be downloaded, FileNotFoundError
        if it is missing.
        """
        self._used.add(name)
        if name not in self.folders:
            raise ValueError(f"no folder of {name} is given: name it with --source {name}=FOLDER")
        folder = Path(self.folders[name]).expanduser()
        if self.download:
            _download(name, folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"--source {name}={folder}: there is no such folder")
        return folder

    def inputs(self) -> dict[str, str]:
        """Returns a digest of the names and sizes of the user's shards, if the data set reads some;
        the files of a published data set are always the same."""
        if "shards" not in self.folders:
            return {}
        root = self.folder("shards")
        files = sorted(path for path in root.rglob("*.tar") if path.is_file())
        facts = [(str(path.relative_to(root)), path.stat().st_size) for path in files]
        return {"shards": digest_json(facts)}

    def check_used(self) -> None:
        """Raises ValueError for a source that the user named, but the data set does not read."""
        if others := sorted(self.folders.keys() - self._used):
            reads = ", ".join(sorted(self._used)) or "none: its pictures are rendered"
            raise ValueError(f"--source {others[0]}: the data set reads {reads}; leave it out")


def _download(name: str, folder: Path) -> None:
    if name not in _DOWNLOADERS:
        raise ValueError(
            f"{name} cannot be downloaded: leave --download out; it fetches "
            f"{', '.join(sorted(_DOWNLOADERS))}"
        )
    import mclclip.util.torchvision_fix  # noqa: F401
    from torchvision import datasets  # isort: skip

    folder.mkdir(parents=True, exist_ok=True)
    try:
        getattr(datasets, _DOWNLOADERS[name])(str(folder), download=True)
    except (OSError, RuntimeError) as error:
        raise RuntimeError(f"{name} could not be downloaded into {folder}: {error}") from error


def in_random_order(items: Iterable[T], seed: int) -> Iterator[T]:
    """Yields the items in a random order; holds all of them in memory.

    Files are sorted by class. After shuffling, a few shards are a random sample of all.
    """
    every = list(items)
    order = np.random.default_rng([seed, len(every)]).permutation(len(every))
    return (every[place] for place in order)


# --- samples ---------------------------------------------------------------------------------


def png_sample(number: int, pixels: Pixels, attributes: Mapping[str, Any]) -> PackedSample:
    """Makes sample ``number`` of a split, a PNG of uint8 [H, W, 3]."""
    return _sample(number, _png(Image.fromarray(pixels)), "png", attributes)


def array_sample(number: int, pixels: Pixels, attributes: Mapping[str, Any]) -> PackedSample:
    """Makes sample ``number`` of a split, an array uint8 [H, W, C] of any number of channels."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(pixels), allow_pickle=False)
    return _sample(number, buffer.getvalue(), ARRAY_EXTENSION, attributes)


def file_sample(
    number: int, path: Path, attributes: Mapping[str, Any], size: int | None = None
) -> PackedSample:
    """Makes sample ``number`` of a split of an image file.

    The file is stored unchanged if it is of a format that shards hold. Otherwise, or with a
    ``size``, it becomes a PNG, whose shorter side has ``size`` pixels. Raises ValueError if it has
    to be decoded and cannot be, or would have more than MAX_IMAGE_PIXELS pixels.
    """
    data, suffix = path.read_bytes(), suffix_of(path)
    if size is None and suffix in IMAGE_EXTENSIONS and image_extension(data) is not None:
        return _sample(number, data, suffix, attributes)
    image = picture_of(data, str(path))
    if size is not None:
        scale = size / min(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        if width * height > MAX_IMAGE_PIXELS:
            raise ValueError(
                f"{path} would have {width:,} x {height:,} pixels at size {size}: lower the size, "
                "or take the file out"
            )
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return _sample(number, _png(image), "png", attributes)


def picture_of(data: bytes, name: str) -> Image.Image:
    """Decodes an image; ValueError, which names the file ``name``, if that fails."""
    try:
        return decode_image(data, MAX_IMAGE_PIXELS)
    except DecodeError as error:
        raise ValueError(f"{name} cannot be decoded ({error}): take it out") from error


def _sample(number: int, data: bytes, extension: str, facts: Mapping[str, Any]) -> PackedSample:
    return PackedSample(f"{number:09d}", data, extension, [], dict(facts))


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def jpeg(pixels: Pixels) -> bytes:
    """Encodes uint8 [H, W, 3] as JPEG; chroma subsampling would blur small colours."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def minimal_pairs(statements: Iterable[tuple[str, bytes, str]]) -> Files:
    """Lays minimal pairs out as MMVP-VLM does.

    ``statements`` are (Type, JPEG, statement); two that follow each other are a pair.
    """

    def files() -> Iterator[tuple[str, bytes]]:
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(("Question ID", "Type", "Statement"))
        for number, (kind, picture, statement) in enumerate(statements, start=1):
            writer.writerow((number, kind, statement))
            yield f"MLLM_VLM Images/{kind}/{number}.jpg", picture
        yield "Questions.csv", text.getvalue().encode()

    return Files(files())


# --- options ---------------------------------------------------------------------------------


def check_size(size: int | None) -> None:
    """Raises ValueError for a size below 1, and for one of too many pixels."""
    if size is not None and not 1 <= size**2 <= MAX_IMAGE_PIXELS:
        most = math.isqrt(MAX_IMAGE_PIXELS)
        raise ValueError(f"size is {size}: wanted pixels of a side, 1 to {most:,}")
