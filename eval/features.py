"""Extracts unit features of images and texts, and ranks candidates for queries by cosine, on any
number of processes."""

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
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

import mclclip.util.torchvision_fix  # noqa: F401
from mclclip.data.decode import MAX_IMAGE_PIXELS, DecodeError, decode
from mclclip.data.loader import Loader, run_ahead
from mclclip.data.picture_transform import PictureTransform
from mclclip.data.samples import tokenize
from mclclip.data.training_images import Readable
from mclclip.eval.images import Region
from mclclip.eval.metrics import IntArray, ranks_with_ties
from mclclip.models.encoder import Encoder
from mclclip.models.transforms import defer_normalization
from mclclip.ranks.collectives import gather_objects, raise_on_every_rank
from mclclip.ranks.process_group import SINGLE, Context, choose_memory
from mclclip.run.runlog import progress
from mclclip.util.options import first_few

T = TypeVar("T")

Features = NDArray[np.float32]
"""Unit rows [N, E]."""

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def over_ranks(context: Context, count: int, work: Callable[[slice], T], what: str = "") -> list[T]:
    """Cuts ``count`` rows into one contiguous slice per rank, and calls ``work`` with it on each.

    Returns the results of all ranks, in rank order, on every rank. An error of one rank is raised
    on all (``raise_on_every_rank``, which also explains ``what``).
    """
    start, stop = (count * rank // context.world_size for rank in (context.rank, context.rank + 1))
    return gather_objects(raise_on_every_rank(lambda: work(slice(start, stop)), what))


def over_chunks(context: Context, count: int, step: int, work: Callable[[slice], T]) -> list[T]:
    """Calls ``work`` with chunks of at most ``step`` of ``count`` rows, and at least of one; the
    ranks share them. Returns all results, in order, on every rank."""

    def of_share(share: slice) -> list[T]:
        starts = range(share.start, share.stop, max(step, 1))
        return [work(slice(start, min(start + starts.step, share.stop))) for start in starts]

    return [each for of_rank in over_ranks(context, count, of_share) for each in of_rank]


@dataclass(frozen=True)
class Extractor:
    """Extracts the features of an encoder. They do not depend on the number of ranks.

    context      the ranks that share the work, and the device on which the encoder lies
    precision    'fp32' (TF32 is switched off), or 'bf16' or 'fp16' by autocast
    num_workers  processes that decode images
    timeout_s    a worker must deliver a batch of images within this time
    on_images    is called on every rank with the images, before they are encoded
    """

    encoder: Encoder
    context: Context = SINGLE
    batch_size: int = 64
    precision: str = "fp32"
    max_image_pixels: int = MAX_IMAGE_PIXELS
    num_workers: int = 0
    timeout_s: float = 600.0
    on_images: Callable[[Sequence[Readable]], None] | None = None

    def images(self, paths: Sequence[Readable]) -> Features:
        """Unit features [N, E] of images, in their order, on every rank.

        Raises ValueError on all ranks if files cannot be read or decoded, and names at most ten:
        figures without some of the images could not be compared with others.
        """
        if self.on_images is not None:
            self.on_images(paths)
        transform = defer_normalization(self.encoder.preprocess_val)
        read = partial(_read_images, transform, self.max_image_pixels)
        batches = _Batches(paths, read, self.batch_size)

        def encode(views: Tensor) -> Tensor:
            return self.encoder.encode_image(transform.to_floats(views))

        return self._extract(batches, encode, "images", self.num_workers)

    def texts(self, texts: Sequence[str]) -> Features:
        """Unit features [N, E] of texts, in their order, on every rank.

        Equal texts are encoded once, so that their features are equal bit for bit and tie exactly.
        """
        position = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        read = partial(tokenize, self.encoder.tokenizer)
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
        problems: list[str] = []

        def compute(batch: Tensor | list[str]) -> tuple[Tensor, None]:
            if isinstance(batch, list):
                problems.extend(batch)
            if isinstance(batch, list) or problems:  # the others are read to find all problems
                return torch.empty(0, self.encoder.embed_dim), None
            features = encode(batch.to(self.context.device, non_blocking=True)).float()
            # Under autocast the encoder's features are off by a few thousandths in length.
            return features / features.norm(dim=1, keepdim=True).clamp_min(1e-12), None

        def run(share: slice) -> Features:
            numbers = range(share.start, share.stop)
            loader = Loader[Tensor | list[str]](
                batches,
                numbers,
                num_workers=num_workers,
                timeout_s=self.timeout_s,
                describe=batches.describe,
                pin_memory=choose_memory(self.context.device) == "pinned",
            )
            parts = [np.empty((0, self.encoder.embed_dim), np.float32)]
            with _inference(self.encoder, self.precision, self.context.device):
                results = run_ahead(compute, loader)
                for rows, _ in progress(results, total=len(numbers), description=f"encode {what}"):
                    if not np.isfinite(rows).all():
                        raise RuntimeError(
                            f"the encoder gave {what} features that are not finite in "
                            f"{self.precision}: the model has diverged, or needs precision=fp32"
                        )
                    parts.append(rows)
            if problems:
                raise ValueError(first_few(problems, 10, "; "))
            return np.concatenate(parts)

        count = -(-len(batches.items) // self.batch_size)
        return np.concatenate(over_ranks(self.context, count, run, f"encoding {what}"))


@dataclass(frozen=True)
class _Batches(Dataset[Any]):
    """A data set of batches. A batch is the tensor [b, ...] that ``make`` makes of its items, or a
    list of error messages of one line each.

    Messages are returned, not raised, since an exception would arrive with the traceback of the
    loader's worker.
    """

    items: Sequence[Any]
    make: Callable[[Any], Tensor | list[str]]
    size: int

    def __getitem__(self, number: int) -> Tensor | list[str]:
        return self.make(self.items[number * self.size : (number + 1) * self.size])

    def describe(self, number: int) -> tuple[str, list[str]]:
        """Describes a batch for a loader's messages; the list, of keys of samples, is empty."""
        return f"the batch that begins with {self.items[number * self.size]}", []


def _read_images(
    transform: PictureTransform, max_image_pixels: int, paths: Sequence[Readable]
) -> Tensor | list[str]:
    """Reads and transforms images; returns [b, C, H, W], or messages, of one line, about those that
    cannot be used."""
    images, problems = list[Tensor](), list[str]()
    for path in paths:
        try:
            image = decode(path.read_bytes(), max_image_pixels, transform.reads_arrays)
            if isinstance(path, Region):
                image = _cut_out(image, path.box, max_image_pixels)
            images.append(transform(image))
        except DecodeError as error:
            problems.append(f"image {path} cannot be decoded ({error}): replace the file")
        except OSError as error:
            problems.append(f"image {path} cannot be read: {error.strerror or error}")
        except ValueError as error:  # the transform cannot take this image
            problems.append(f"image {path}: {error}")
    return problems or default_collate(images)


def _cut_out(image: Any, box: tuple[int, int, int, int], max_image_pixels: int) -> Image.Image:
    """Cuts a part out of a picture; ValueError for an array, and for a part that is too large."""
    left, top, right, bottom = box
    if (right - left) * (bottom - top) > max_image_pixels:
        raise ValueError(f"its box has more than {max_image_pixels} pixels: correct it")
    if not isinstance(image, Image.Image):
        raise ValueError("an array has no part that can be cut out")
    return image.crop(box)


@contextlib.contextmanager
def _inference(encoder: object, precision: str, device: torch.device) -> Iterator[None]:
    """Runs a block of code without gradients, with the encoder in eval mode and in this precision.

    The caller's settings of mode, autocast and TF32 are restored afterwards.
    """
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
    """Runs a block of code with TF32 switched off; restores the caller's settings afterwards."""
    convolutions, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (convolutions.allow_tf32, matmul.allow_tf32)
    convolutions.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        convolutions.allow_tf32, matmul.allow_tf32 = before


# --- ranks by cosine --------------------------------------------------------------------------

CHUNK_BYTES = 128 * 2**20
"""Size of the block of float32 similarities that is held at once; a few copies come on top."""


def rank_queries(
    queries: Features,
    candidates: Features,
    is_right: csr_array,
    *,
    context: Context = SINGLE,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[IntArray, IntArray]:
    """For each query, the rank of its best right candidate by cosine, in bounded memory.

    ``queries`` [Q, E] and ``candidates`` [C, E] are unit rows. ``is_right``, sparse bool [Q, C],
    says which candidates are right for a query; at least one is. Returns two int64 [Q], ranks with
    ties against and for the model (``ranks_with_ties``).

    Similarities are float64 sums, rounded to float32, so that equal features tie exactly. The ranks
    of ``context`` share the queries; each holds a few blocks of ``chunk_bytes``, and the candidates
    in float64.
    """
    right = torch.from_numpy(candidates).to(context.device, torch.float64).T

    def of_chunk(chunk: slice) -> IntArray:
        left = torch.from_numpy(queries[chunk]).to(context.device, torch.float64)
        near = (left @ right).float().cpu().numpy()
        return np.stack(ranks_with_ties(near, is_right[chunk].toarray()))

    step = chunk_bytes // (4 * len(candidates))
    strict, optimistic = np.hstack(over_chunks(context, len(queries), step, of_chunk))
    return strict, optimistic


def similarity(
    queries: Features, candidates: Features, device: torch.device | None = None, block: int = 8192
) -> Features:
    """Dot products float32 [q, C], summed in float64 for ``block`` candidates at a time."""
    out = np.empty((len(queries), len(candidates)), dtype=np.float32)
    left = torch.from_numpy(queries).to(device, torch.float64)
    for start in range(0, len(candidates), block):
        right = torch.from_numpy(candidates[start : start + block]).to(device, torch.float64)
        out[:, start : start + block] = (left @ right.T).float().cpu().numpy()
    return out
