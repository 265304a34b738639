"""One pass of an encoder over an index: batches of images in, features or the trunk's output out.

Batches are cut within a shard, so that what is written of it does not depend on the number of
ranks. Samples that cannot be used keep their row, which is zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mclclip.config import Config
from mclclip.data.bad_samples import BadSamples
from mclclip.data.loader import Loader
from mclclip.data.row_store import Batch, shards_done, write_shard
from mclclip.data.sample_index import SampleIndex, Shard
from mclclip.data.samples import BadSample, Sample, TarDataset
from mclclip.data.trunk_rows import TrunkRows
from mclclip.files import shown
from mclclip.models.model import Model
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import runlog

Passes = Generator[Iterator[Batch], None, None]
"""For each of some shards its batches, which must be taken before the next shard is asked for."""


def write_missing(
    config: Config,
    context: Context,
    index: SampleIndex,
    directory: Path,
    passes: Callable[[Sequence[Shard]], Passes],
    *,
    kind: str,
    full_disk: AbstractContextManager[object] | None = None,
    **how: Any,
) -> int:
    """Writes the shards that ``directory`` lacks, of which each rank takes its part; returns the
    number of the index's samples that cannot be used. All ranks call it.

    ``passes`` makes the batches of these shards: a row per sample, or per caption where ``kind`` is
    ``text_embeddings``. ``how`` are further arguments of ``write_shard``. Errors of a full disk are
    raised through ``full_disk``.
    """

    def work() -> dict[int, str]:
        mine = range(context.rank, len(index.shards), context.world_size)
        bad, missing = shards_done(directory, index, mine)
        shards = [index.shards[number] for number in missing]
        numbers = runlog.progress(missing, total=len(missing), description=kind)
        with full_disk or nullcontext(), closing(passes(shards)) as made:
            for number, shard, batches in zip(numbers, shards, made, strict=True):
                num_rows = shard.stop - shard.start
                if kind == "text_embeddings":
                    num_rows = int(index.num_captions[shard.start : shard.stop].sum())
                bad |= write_shard(directory, number, batches, index, num_rows=num_rows, **how)
                index.check_bad_fraction(len(bad), config.data.max_bad_fraction)
        return bad

    reasons = collectives.together(work, "embed")
    return BadSamples(index, config.data.max_bad_fraction).share(reasons)


class ImagePass:
    """The images of the index as ``model`` takes them, or (``trunk``) the rows of a cache of its
    trunk.

    source  the samples
    shape   of one image, or of a row of the cache
    """

    def __init__(
        self,
        config: Config,
        context: Context,
        index: SampleIndex,
        model: Model,
        trunk: TrunkRows | None = None,
    ) -> None:
        self.config, self.context, self.index = config, context, index
        self.source = TarDataset(index, config.data, model.preprocess_val, trunk=trunk)
        self.shape = model.image_shape if trunk is None else trunk.shape

    def by_shard(self, shards: Sequence[Shard], encode: Callable[[Tensor], np.ndarray]) -> Passes:
        """Yields the batches of each shard; ``encode`` takes [n, *shape] on the device to rows.

        One loader reads all shards, so that it does not stand still between them.
        """
        size = self.config.embed.batch_size
        cuts = [
            [range(at, min(at + size, s.stop)) for at in range(s.start, s.stop, size)]
            for s in shards
        ]
        batches = iter(self._loader([cut for of_shard in cuts for cut in of_shard]))
        for of_shard in cuts:
            own = itertools.islice(batches, len(of_shard))
            yield (self._encoded(samples, encode) for samples in own)
        next(batches, None)  # the loader's own end

    def _loader(self, cuts: list[range]) -> Loader[list[Sample | BadSample]]:
        def describe(ids: range, place: int) -> str:
            path = self.index.shards[int(self.index.shard_of[ids[0]])].path
            return f"the batch of samples {ids[0]} to {ids[-1]} of shard {shown(path)}"

        # No workers for a single batch.
        workers = min(self.config.data.num_workers, max(len(cuts) - 1, 0))
        note_slow = self.index.note_slow
        return Loader(
            self.source, cuts, num_workers=workers, describe=describe, note_slow=note_slow,
            batched=True,
        )  # fmt: skip

    def _encoded(
        self, samples: Sequence[Sample | BadSample], encode: Callable[[Tensor], np.ndarray]
    ) -> Batch:
        good = torch.tensor([isinstance(sample, Sample) for sample in samples])
        # Zeros replace bad samples: the batch keeps its shape, so the others keep their bits.
        images = torch.zeros(len(samples), *self.shape)
        if good.any():
            views = [sample.views[0] for sample in samples if isinstance(sample, Sample)]
            images[good] = torch.stack(views).float()
        rows = encode(images.to(self.context.device))
        rows[~good.numpy()] = 0.0
        return rows, {s.sample_id: s.reason for s in samples if isinstance(s, BadSample)}


def forward(config: Config, context: Context, encode: Callable[[], Tensor]) -> Tensor:
    """Calls ``encode`` without a graph, in the arithmetic of ``embed.precision``; returns fp32."""
    bf16 = config.embed.precision == "bf16"
    with (
        torch.inference_mode(),
        torch.autocast(context.device.type, dtype=torch.bfloat16, enabled=bf16),
    ):
        return encode().float()
