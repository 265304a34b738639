"""Extracts unit features of images and texts, and ranks queries among candidates by their cosine,
over any number of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

import mclclip.util.torchvision_fix  # noqa: F401
from mclclip.data.decode import MAX_IMAGE_PIXELS, DecodeError, decode
from mclclip.data.loader import Loader
from mclclip.data.picture_transform import as_transform
from mclclip.data.samples import tokenize
from mclclip.data.training_images import Readable
from mclclip.eval.images import Region
from mclclip.eval.metrics import BoolArray, IntArray, ranks_with_ties
from mclclip.models.encoder import Encoder
from mclclip.ranks.collectives import gather_objects, raise_on_every_rank
from mclclip.ranks.process_group import SINGLE, Context
from mclclip.run.runlog import progress
from mclclip.util.pair_products import pair_products

T = TypeVar("T")

Features = NDArray[np.float32]
"""Unit rows [N, E]."""

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def over_ranks(context: Context, count: int, work: Callable[[slice], T], what: str = "") -> list[T]:
    """Runs ``work`` on each rank's contiguous share of ``count`` rows; all results on every rank.

    If it fails on one rank, it raises on all (see ``raise_on_every_rank``, also for ``what``).
    """
    start, stop = (count * rank // context.world_size for rank in (context.rank, context.rank + 1))
    return gather_objects(raise_on_every_rank(lambda: work(slice(start, stop)), what))


@dataclass(frozen=True)
class Extractor:
    """An encoder with the settings under which all its features are extracted.

    ``precision``: ``fp32`` (default; TF32 is switched off for it), ``bf16`` or ``fp16`` (autocast).
    ``context`` says which ranks share the work and on which device the encoder lies. Batches are
    cut at the same rows for any number of ranks, so the features do not depend on it.
    A batch of images has to come from its worker within ``timeout_s``.
    ``on_images`` is called on every rank with images before they are encoded.
    """

    encoder: Encoder
    context: Context = SINGLE
    batch_size: int = 64
    precision: str = "fp32"
    max_image_pixels: int = MAX_IMAGE_PIXELS
    num_workers: int = 0
    timeout_s: float = 600.0
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
        if not batches.items:
            raise ValueError(f"there are no {what} to encode")

        def run(share: slice) -> Features:
            numbers = range(share.start, share.stop)
            loader = Loader[Tensor | str](
                batches,
                numbers,
                num_workers=num_workers,
                timeout_s=self.timeout_s,
                describe=batches.describe,
            )
            parts = [torch.empty(0, self.encoder.embed_dim, device=self.context.device)]
            with _inference(self.encoder, self.precision, self.context.device):
                for batch in progress(loader, total=len(numbers), description=f"encode {what}"):
                    if isinstance(batch, str):
                        raise ValueError(batch)
                    features = encode(batch.to(self.context.device)).float()
                    got, expected = tuple(features.shape), (len(batch), self.encoder.embed_dim)
                    if got != expected:
                        raise RuntimeError(
                            f"the encoder gave {what} features of shape {got}, expected {expected}"
                        )
                    if not bool(torch.isfinite(features).all()):
                        raise RuntimeError(
                            f"the encoder gave {what} features that are not finite in "
                            f"{self.precision}: the model has diverged, or needs precision=fp32"
                        )
                    # Normalised once more: autocast leaves lengths a few thousandths off.
                    parts.append(features / features.norm(dim=1, keepdim=True).clamp_min(1e-12))
                return torch.cat(parts).cpu().numpy()

        count = -(-len(batches.items) // self.batch_size)
        return np.concatenate(over_ranks(self.context, count, run, f"encoding {what}"))


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

    def describe(self, number: int) -> tuple[str, list[str]]:
        """Names a batch, for messages, without keys of samples."""
        return f"the batch that begins with {self.items[number * self.size]}", []


def _read_images(
    transform: Callable[[Any], Tensor], max_image_pixels: int, paths: Sequence[Readable]
) -> Tensor | str:
    """Images -> [b, C, H, W], or an error message of one line."""
    images, arrays = [], as_transform(transform).reads_arrays
    for path in paths:
        try:
            image = decode(path.read_bytes(), max_image_pixels, arrays)
            if isinstance(path, Region):
                left, top, right, bottom = path.box
                if (right - left) * (bottom - top) > max_image_pixels:
                    raise ValueError(
                        f"the part has more than {max_image_pixels} pixels: correct its box"
                    )
                if not isinstance(image, Image.Image):
                    raise ValueError("a part is cut out of a picture, and this is an array")
                image = image.crop(path.box)
            images.append(transform(image))
        except DecodeError as error:
            return f"image {path} cannot be decoded ({error}): replace the file"
        except OSError as error:
            return f"image {path} cannot be read: {error.strerror or error}"
        except ValueError as error:  # of the transform, or of what it cannot take
            return f"image {path}: {error}"
    return torch.stack(images)


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


# --- ranks by cosine --------------------------------------------------------------------------

CHUNK_BYTES = 128 * 2**20
"""Size of the float32 similarity block that is held at once, without a few working copies."""

Counting = Literal["by_row", "whole"]
"""How candidates above a bound are counted: a row of the block at a time, which stays in the cache
of a processor, or over the whole block."""


def choose_counting(device: torch.device) -> Counting:
    """The faster way to count: rows on a CPU (ten times), the whole block elsewhere."""
    return "by_row" if device.type == "cpu" else "whole"


def rank_queries(
    queries: Features,
    query_image: IntArray,
    candidates: Features,
    candidate_image: IntArray,
    *,
    context: Context = SINGLE,
    chunk_bytes: int = CHUNK_BYTES,
    counting: Counting | None = None,
) -> tuple[IntArray, IntArray]:
    """Rank of each query's best candidate of the same image, in bounded memory.

    queries [Q, E], candidates [C, E]; ``query_image`` [Q] and ``candidate_image`` [C] say which
    image each row is or describes. Returns ranks with ties against and for the model (see
    ``ranks_with_ties``), equal to those of the whole matrix for any ``chunk_bytes``: similarities
    are summed in float64 and rounded to float32, so that equal features tie exactly wherever they
    stand in a block. A product in float32 comes first, and only candidates so near to the right one
    that its rounding may hide their order are summed in float64. The ranks of ``context`` divide
    the queries. Memory: some blocks of ``chunk_bytes``, and the candidates in float64. ValueError
    where features are not finite or a query has no right candidate.
    """
    if not (np.isfinite(queries).all() and np.isfinite(candidates).all()):
        raise ValueError("similarities hold NaN: the encoder's features are not finite")
    counting = counting or choose_counting(context.device)
    ranker = _Ranker(candidates, candidate_image, context.device, counting)
    step = max(1, chunk_bytes // (4 * len(candidates)))

    def of_share(share: slice) -> IntArray:
        ranks = np.empty((2, share.stop - share.start), dtype=np.int64)
        block = torch.empty(min(step, max(len(ranks[0]), 1)), len(candidates), device=ranker.device)
        for start in range(share.start, share.stop, step):
            chunk = slice(start, min(start + step, share.stop))
            of_chunk = ranker.ranks(queries[chunk], query_image[chunk], block)
            ranks[:, start - share.start : chunk.stop - share.start] = of_chunk
        return ranks

    strict, optimistic = np.concatenate(over_ranks(context, len(queries), of_share), axis=1)
    return strict, optimistic


class _Ranker:
    """Candidates [C, E] as they are, on the device, and in float64; and their images [C].

    order    [C] candidates sorted by image, so that those of an image are a slice of it
    longest  largest norm of a candidate
    """

    def __init__(
        self, candidates: Features, images: IntArray, device: torch.device, counting: Counting
    ) -> None:
        self.candidates, self.images, self.device = candidates, images, device
        self.count = {"by_row": _count_by_row, "whole": _count_whole}[counting]
        self.on_device = torch.from_numpy(candidates).to(device)
        self.exact = torch.from_numpy(candidates).double()
        self.longest = float(self.exact.norm(dim=1).max())
        self.order = np.argsort(images, kind="stable")

    def ranks(self, queries: Features, images: IntArray, block: Tensor) -> IntArray:
        """[2, q] ranks of a chunk; ``block`` [>= q, C] is overwritten by its similarities."""
        left = torch.from_numpy(queries)
        exact = left.double()
        starts, right = self._right(images)
        best = np.maximum.reduceat(self._products(exact, starts, right), starts[:-1])
        near = block[: len(queries)]
        with exact_float32():
            torch.mm(left.to(self.device), self.on_device.T, out=near)
        # Rounding of a sum of E products, in any order, and of the bounds themselves.
        width = (queries.shape[1] + 8) * 2.0**-24 * exact.norm(dim=1) * self.longest
        middle = torch.from_numpy(best).double()
        low, high = ((middle + side * width).float().to(self.device) for side in (-1, 1))
        # How many right candidates of each query are between its bounds.
        row = torch.from_numpy(np.repeat(np.arange(len(near)), np.diff(starts))).to(self.device)
        values = near[row, torch.from_numpy(right).to(self.device)]
        within = (values >= low[row]) & (values <= high[row])
        right_near = np.bincount(row[within].cpu().numpy(), minlength=len(near))
        # More candidates than these are cheaper in one product of matrices than one by one.
        most = 64 + len(self.candidates) / 16
        greater, rows, columns, dense = self.count(near, low, high, right_near, most)
        wrong = images[rows] != self.images[columns]
        rows, columns = rows[wrong], columns[wrong]
        ends = np.searchsorted(rows, np.arange(len(queries) + 1))
        products = self._products(exact, ends, columns)
        greater = greater + np.bincount(rows[products > best[rows]], minlength=len(queries))
        equal = np.bincount(rows[products == best[rows]], minlength=len(queries))
        ranks = np.stack([1 + greater + equal, 1 + greater])
        if dense.any():
            whole = similarity(queries[dense], self.candidates, self.device)
            positive = images[dense, None] == self.images[None, :]
            ranks[:, dense] = ranks_with_ties(whole, positive)
        return ranks

    def _right(self, images: IntArray) -> tuple[IntArray, IntArray]:
        """The candidates of the queries' images, one query after the other, and where each begins
        [q + 1]."""
        ranked = self.images[self.order]
        first, last = (np.searchsorted(ranked, images, side=side) for side in ("left", "right"))
        if (first == last).any():
            query = int(np.flatnonzero(first == last)[0])
            raise ValueError(f"query {query} has no positive candidate: it cannot be ranked")
        starts = np.append(0, np.cumsum(last - first))
        shift = np.repeat(first - starts[:-1], last - first)
        return starts, self.order[np.arange(starts[-1]) + shift]

    def _products(self, queries: Tensor, starts: IntArray, columns: IntArray) -> Features:
        """Products of query q with the candidates columns[starts[q]:starts[q + 1]], one query after
        the other; summed in float64, returned in float32."""
        ends, ids = torch.from_numpy(starts), torch.from_numpy(columns)
        return pair_products(queries, self.exact, ends, ids).float().numpy()


_Counted = tuple[IntArray, IntArray, IntArray, BoolArray]
"""Candidates above the bounds [q]; rows and columns of those between them, in order; and queries
[q] with more than ``most`` of these, which are not listed. Queries with no others between the
bounds than ``right_near`` [q] list none."""


def _count_by_row(
    near: Tensor, low: Tensor, high: Tensor, right_near: IntArray, most: float
) -> _Counted:
    values, bounds = near.numpy(), (low.numpy(), high.numpy())
    num, width = near.shape
    higher, enough = np.empty((2, width), dtype=np.bool_)
    above, dense = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.bool_)
    columns: list[IntArray] = [np.empty(0, dtype=np.int64)] * num
    for row in range(num):
        np.greater(values[row], bounds[1][row], out=higher)
        np.greater_equal(values[row], bounds[0][row], out=enough)
        above[row] = np.count_nonzero(higher)
        in_doubt = np.count_nonzero(enough) - above[row]
        dense[row] = in_doubt > most
        if right_near[row] < in_doubt and not dense[row]:
            columns[row] = np.flatnonzero(enough ^ higher)
    rows = np.repeat(np.arange(num), [len(listed) for listed in columns])
    return above, rows, np.concatenate(columns), dense


def _count_whole(
    near: Tensor, low: Tensor, high: Tensor, right_near: IntArray, most: float
) -> _Counted:
    higher = near > high[:, None]
    between = (near >= low[:, None]) & ~higher
    in_doubt = between.sum(dim=1).cpu().numpy()
    dense = in_doubt > most
    listed = torch.from_numpy(np.flatnonzero((right_near < in_doubt) & ~dense)).to(near.device)
    row, column = between[listed].nonzero(as_tuple=True)
    above = higher.sum(dim=1).cpu().numpy()
    return above, listed[row].cpu().numpy(), column.cpu().numpy(), dense


def similarity(
    queries: Features, candidates: Features, device: torch.device | None = None, block: int = 8192
) -> Features:
    """Dot products float32 [q, C], by blocks of candidates, whose float64 copies take memory."""
    out = np.empty((len(queries), len(candidates)), dtype=np.float32)
    left = torch.from_numpy(queries).to(device, torch.float64)
    for start in range(0, len(candidates), block):
        right = torch.from_numpy(candidates[start : start + block]).to(device, torch.float64)
        out[:, start : start + block] = (left @ right.T).float().cpu().numpy()
    return out
