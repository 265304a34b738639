"""Extracts unit features of images and texts, over any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

import mclclip.torchvision_fix  # noqa: F401
from mclclip.data.captions import tokenized
from mclclip.data.decode import MAX_IMAGE_PIXELS, DecodeError, decode
from mclclip.data.loader import Loader
from mclclip.eval.images import Readable, Region
from mclclip.models.encoder import Encoder
from mclclip.ranks.collectives import gather_objects, together
from mclclip.ranks.process_group import SINGLE, Context
from mclclip.run.runlog import progress

T = TypeVar("T")

Features = NDArray[np.float32]
"""Unit rows [N, E]."""

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def over_ranks(context: Context, count: int, work: Callable[[slice], T], what: str = "") -> list[T]:
    """Runs ``work`` on each rank's contiguous share of ``count`` rows; all results on every rank.

    Where it fails on one rank, it raises on all of them (see ``together``, also for ``what``).
    """
    start, stop = (count * rank // context.world_size for rank in (context.rank, context.rank + 1))
    return gather_objects(together(lambda: work(slice(start, stop)), what))


@dataclass(frozen=True)
class Extractor:
    """An encoder with the settings under which all its features are extracted.

    ``precision``: ``fp32`` (default; TF32 is switched off for it), ``bf16`` or ``fp16`` (autocast).
    ``context`` says which ranks share the work and on which device the encoder lies. Batches are
    cut at the same rows for any number of ranks, so the features do not depend on it.
    ``on_images`` is called on every rank with images before they are encoded.
    """

    encoder: Encoder
    context: Context = SINGLE
    batch_size: int = 64
    precision: str = "fp32"
    max_image_pixels: int = MAX_IMAGE_PIXELS
    num_workers: int = 0
    on_images: Callable[[Sequence[Readable]], None] | None = None

    def __post_init__(self) -> None:
        if self.precision != "fp32" and self.precision not in AUTOCAST:
            raise ValueError(
                f"precision is {self.precision!r}: use fp32, {' or '.join(sorted(AUTOCAST))}"
            )
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, wanted at least 1")

    def images(self, paths: Sequence[Readable]) -> Features:
        """Unit features [N, E] of images, in their order, on every rank.

        Raises ValueError on all ranks for a file that cannot be read or decoded: without one of
        its images a benchmark's figures could not be compared.
        """
        if self.on_images is not None:
            self.on_images(paths)
        read = partial(_read_images, self.encoder.preprocess_val, self.max_image_pixels)
        batches = _Batches(paths, read, self.batch_size)
        return self._extract(batches, self.encoder.encode_image, "images", self.num_workers)

    def texts(self, texts: Sequence[str]) -> Features:
        """Unit features [N, E] of texts, in their order, on every rank.

        Equal texts are encoded once, so equal captions get equal features bit for bit and tie
        exactly, wherever they are in a batch.
        """
        position = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        read = partial(tokenized, self.encoder.tokenizer)
        batches = _Batches([*position], read, self.batch_size)
        features = self._extract(batches, self.encoder.encode_text, "texts")
        return features[[position[text] for text in texts]]

    def _extract(
        self,
        batches: _Batches,
        encode: Callable[[Tensor], Tensor],
        what: str,
        num_workers: int = 0,
    ) -> Features:
        if not batches.items:
            raise ValueError(f"there are no {what} to encode")

        def run(own: slice) -> Features:
            numbers = range(own.start, own.stop)
            loader = Loader[Tensor | str](
                batches, numbers, num_workers=num_workers, describe=batches.describe
            )
            parts = [torch.empty(0, self.encoder.embed_dim, device=self.context.device)]
            with _inference(self.encoder, self.precision, self.context.device):
                for batch in progress(loader, total=len(numbers), description=f"encode {what}"):
                    if isinstance(batch, str):
                        raise ValueError(batch)
                    features = encode(batch.to(self.context.device)).float()
                    self._check(features, len(batch), what)
                    # Normalised once more: autocast leaves lengths a few thousandths off.
                    parts.append(features / features.norm(dim=1, keepdim=True).clamp_min(1e-12))
                return torch.cat(parts).cpu().numpy()

        count = -(-len(batches.items) // self.batch_size)
        return np.concatenate(over_ranks(self.context, count, run, f"encoding {what}"))

    def _check(self, features: Tensor, rows: int, what: str) -> None:
        wanted = (rows, self.encoder.embed_dim)
        if tuple(features.shape) != wanted:
            raise RuntimeError(
                f"the encoder gave {what} features of shape {tuple(features.shape)}, "
                f"expected {wanted}"
            )
        if not bool(torch.isfinite(features).all()):
            raise RuntimeError(
                f"the encoder gave {what} features that are not finite in {self.precision}: "
                f"the model has diverged, or needs precision=fp32"
            )


@dataclass(frozen=True)
class _Batches(Dataset[Any]):
    """Batch number -> ``make`` of its items: a tensor [b, ...], or an error message of one line.

    The message is returned, not raised, since an exception from a loader worker would arrive
    wrapped in the worker's traceback.
    """

    items: Sequence[Any]
    make: Callable[[Any], Tensor | str]
    size: int

    def __getitem__(self, number: int) -> Tensor | str:
        return self.make(self.items[number * self.size : (number + 1) * self.size])

    def describe(self, number: int, _: int) -> str:
        """Names a batch, for messages."""
        return f"the batch that begins with {self.items[number * self.size]}"


def _read_images(
    transform: Callable[[Any], Tensor], max_image_pixels: int, paths: Sequence[Readable]
) -> Tensor | str:
    """Images -> [b, C, H, W], or an error message of one line."""
    images, arrays = [], bool(getattr(transform, "reads_arrays", False))
    for path in paths:
        try:
            image = decode(path.read_bytes(), max_image_pixels, arrays)
            images.append(transform(_cut(image, path, max_image_pixels)))
        except DecodeError as error:
            return f"image {path} cannot be decoded ({error}): replace the file"
        except OSError as error:
            return f"image {path} cannot be read: {error.strerror or error}"
        except ValueError as error:  # of the transform, or of what it cannot take
            return f"image {path}: {error}"
    return torch.stack(images)


def _cut(image: Any, path: Readable, max_image_pixels: int) -> Any:
    """The part of a picture that ``path`` stands for: all of it unless it is a ``Region``."""
    if not isinstance(path, Region):
        return image
    left, top, right, bottom = path.box
    if (right - left) * (bottom - top) > max_image_pixels:
        raise ValueError(f"the part has more than {max_image_pixels} pixels: correct its box")
    if not isinstance(image, Image.Image):
        raise ValueError("a part is cut out of a picture, and this is an array")
    return image.crop(path.box)


@contextlib.contextmanager
def _inference(encoder: object, precision: str, device: torch.device) -> Iterator[None]:
    """Runs the block without gradients, in eval mode and in the given precision, whatever autocast,
    TF32 and mode the caller has set; restores these afterwards."""
    trained = encoder if isinstance(encoder, nn.Module) and encoder.training else None
    dtype = AUTOCAST.get(precision)
    if trained:
        trained.eval()
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
    arithmetic = exact_float32() if dtype is None else contextlib.nullcontext()
    try:
        with torch.inference_mode(), autocast, arithmetic:
            yield
    finally:
        if trained:
            trained.train()


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Runs the block with TF32 switched off; restores what the caller has set."""
    convolutions, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (convolutions.allow_tf32, matmul.allow_tf32)
    convolutions.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        convolutions.allow_tf32, matmul.allow_tf32 = before
