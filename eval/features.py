"""Images and texts -> unit features, extracted once per benchmark, over any number of ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import mclclip.torchvision_fix  # noqa: F401
from mclclip.data.decode import DecodeError, decode_image
from mclclip.models.encoder import Encoder
from mclclip.ranks.collectives import gather, together
from mclclip.ranks.process_group import SINGLE, Context, start_loader_worker
from mclclip.run.runlog import progress

log = logging.getLogger("mclclip")

Features = NDArray[np.float32]
"""Unit rows [N, E]."""

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Extractor:
    """An encoder with the settings under which all its features are extracted.

    ``precision``: ``fp32`` (default; TF32 is switched off for it), ``bf16`` or ``fp16`` (autocast).
    ``context`` says which ranks share the work and on which device the encoder lies. Batches are
    cut at the same rows for any number of ranks, so the features do not depend on it.
    """

    encoder: Encoder
    context: Context = SINGLE
    batch_size: int = 64
    precision: str = "fp32"
    max_image_pixels: int = 100_000_000
    num_workers: int = 0

    def __post_init__(self) -> None:
        if self.precision != "fp32" and self.precision not in AUTOCAST:
            raise ValueError(
                f"precision is {self.precision!r}: use fp32, {' or '.join(sorted(AUTOCAST))}"
            )
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, wanted at least 1")

    def images(self, paths: Sequence[Path]) -> Features:
        """Unit features [N, E] of image files, in their order, on every rank.

        Raises on all ranks together: FileNotFoundError for a missing file, ValueError for one that
        cannot be decoded. A benchmark without one of its images is another benchmark.
        """
        batches = _ImageBatches(
            paths, self.encoder.preprocess_val, self.batch_size, self.max_image_pixels
        )
        return self._extract(len(paths), self._load(batches), self.encoder.encode_image, "images")

    def texts(self, texts: Sequence[str]) -> Features:
        """Unit features [N, E] of texts, in their order, on every rank.

        Equal texts are encoded once: equal captions get equal features bit for bit, so that ties
        between them are ties and not a matter of where in a batch they stood.
        """
        unique = list(dict.fromkeys(texts))
        position = {text: row for row, text in enumerate(unique)}

        def load(batch_numbers: range) -> Iterator[Tensor]:
            for number in batch_numbers:
                start = number * self.batch_size
                yield self.encoder.tokenizer(unique[start : start + self.batch_size])

        features = self._extract(len(unique), load, self.encoder.encode_text, "texts")
        return features[[position[text] for text in texts]]

    def _load(self, batches: _ImageBatches) -> Callable[[range], Iterator[Tensor]]:
        def load(batch_numbers: range) -> Iterator[Tensor]:
            # batch_size=None: the data set itself returns whole batches.
            loader: DataLoader[Tensor | str] = DataLoader(
                batches,
                batch_size=None,
                sampler=batch_numbers,
                num_workers=min(self.num_workers, len(batch_numbers)),
                worker_init_fn=start_loader_worker,
            )
            for batch in loader:
                if isinstance(batch, str):
                    raise ValueError(batch)
                yield batch

        return load

    def _extract(
        self,
        count: int,
        load: Callable[[range], Iterable[Tensor]],
        encode: Callable[[Tensor], Tensor],
        what: str,
    ) -> Features:
        if count == 0:
            raise ValueError(f"there are no {what} to encode")
        own = self._batches_of(self.context.rank, count)
        local = together(lambda: self._run(load(own), len(own), encode, what), f"encoding {what}")
        return self._gather(local, count)

    def _run(
        self,
        batches: Iterable[Tensor],
        num_batches: int,
        encode: Callable[[Tensor], Tensor],
        what: str,
    ) -> Tensor:
        device = self.context.device
        parts = []
        with torch.inference_mode(), _evaluating(self.encoder), _arithmetic(self.precision, device):
            for batch in progress(batches, total=num_batches, description=f"encode {what}"):
                features = encode(batch.to(device)).float()
                self._check(features, len(batch), what)
                # Normalised once more: autocast leaves lengths a few thousandths off.
                norms = features.norm(dim=1, keepdim=True).clamp_min(1e-12)
                parts.append(features / norms)
        if not parts:
            return torch.empty(0, self.encoder.embed_dim, device=device)
        return torch.cat(parts)

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

    def _batches_of(self, rank: int, count: int) -> range:
        """The contiguous run of whole batches that ``rank`` encodes."""
        num_batches, ranks = -(-count // self.batch_size), self.context.world_size
        return range(num_batches * rank // ranks, num_batches * (rank + 1) // ranks)

    def _rows_of(self, rank: int, count: int) -> int:
        own = self._batches_of(rank, count)
        return max(0, min(own.stop * self.batch_size, count) - own.start * self.batch_size)

    def _gather(self, local: Tensor, count: int) -> Features:
        """Joins the ranks' rows in order; padded to one length, which all_gather asks for."""
        sizes = [self._rows_of(rank, count) for rank in range(self.context.world_size)]
        longest = max(sizes)
        padded = nn.functional.pad(local, (0, 0, 0, longest - len(local)))
        joined = gather(padded).float().cpu().numpy()
        parts = [joined[r * longest : r * longest + size] for r, size in enumerate(sizes)]
        return np.concatenate(parts)


class _ImageBatches(Dataset[Any]):
    """Batch number -> images [b, 3, H, W], or one line on what is wrong with a file.

    The line is returned, not raised: from a loader's worker an exception would arrive wrapped in
    the worker's traceback.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        transform: Callable[[Any], Tensor],
        batch_size: int,
        max_image_pixels: int,
    ) -> None:
        self.paths, self.transform = paths, transform
        self.batch_size, self.max_image_pixels = batch_size, max_image_pixels

    def __getitem__(self, number: int) -> Tensor | str:
        images = []
        start = number * self.batch_size
        for path in self.paths[start : start + self.batch_size]:
            try:
                data = Path(path).read_bytes()
                images.append(self.transform(decode_image(data, self.max_image_pixels)))
            except DecodeError as error:
                return f"image {path} cannot be decoded ({error}): replace the file"
            except OSError as error:
                return f"image {path} cannot be read: {error.strerror or error}"
        return torch.stack(images)


@contextlib.contextmanager
def _evaluating(encoder: object) -> Iterator[None]:
    """Puts a module into evaluation mode and back; anything else is left alone."""
    if not (isinstance(encoder, nn.Module) and encoder.training):
        yield
        return
    encoder.eval()
    try:
        yield
    finally:
        encoder.train()


@contextlib.contextmanager
def _arithmetic(precision: str, device: torch.device) -> Iterator[None]:
    """The arithmetic of one precision, whatever the caller's autocast or TF32 settings are."""
    if precision in AUTOCAST:
        with torch.autocast(device.type, dtype=AUTOCAST[precision]):
            yield
        return
    convolutions, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (convolutions.allow_tf32, matmul.allow_tf32)
    convolutions.allow_tf32 = matmul.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        convolutions.allow_tf32, matmul.allow_tf32 = before
