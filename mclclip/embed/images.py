"""One pass of an encoder over images: batches of the index in, features or the trunk's output out.

Batches are cut within a shard, so that what is written of it does not depend on the number of
ranks. Samples that cannot be used keep their row, which is zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mclclip.config import Config
from mclclip.data.loader import Loader
from mclclip.data.sample_index import SampleIndex, Shard
from mclclip.data.samples import BadSample, Sample, TarDataset
from mclclip.data.trunk_rows import TrunkRows
from mclclip.files import shown
from mclclip.models.model import Model
from mclclip.models.towers import pair
from mclclip.ranks.process_group import Context

Rows = tuple[np.ndarray, dict[int, str]]
"""Rows of a batch or of a shard, and why samples among them have none, by sample id."""


def dataset(
    config: Config, index: SampleIndex, model: Model, trunk: TrunkRows | None = None
) -> TarDataset:
    """The images of the index as ``model`` takes them, or the rows of a cache of its trunk."""
    return TarDataset(
        index,
        transform=model.preprocess_val,
        reads_captions=False,
        max_image_pixels=config.data.max_image_pixels,
        max_open_files=config.data.max_open_files,
        check_pixels=config.data.verify == "full" and trunk is None,
        remote=config.data.remote,
        trunk=trunk,
    )


def row_shape(model: Model, trunk: TrunkRows | None = None) -> tuple[int, ...]:
    """The shape of one image, or of a row of the cache."""
    if trunk is not None:
        return trunk.shape
    return (model.num_channels, *pair(model.image_size))


def by_shard(
    config: Config,
    context: Context,
    images: TarDataset,
    shape: tuple[int, ...],
    shards: Sequence[Shard],
    encode: Callable[[Tensor], np.ndarray],
) -> Generator[Iterator[Rows], None, None]:
    """Yields for each shard its batches, which must be taken before the next shard is asked for.

    ``shape`` is that of an item of ``images``, and ``encode`` takes [n, *shape] on the device to
    rows. One loader reads all shards, so that it does not stand still between them.
    """
    batches = _batches(config, images, shards)
    for shard in shards:
        ours = itertools.islice(batches, len(_cuts(config, shard)))
        yield (_encoded(context, shape, samples, encode) for samples in ours)
    next(batches, None)  # the loader's own end


def _encoded(
    context: Context,
    shape: tuple[int, ...],
    samples: Sequence[Sample | BadSample],
    encode: Callable[[Tensor], np.ndarray],
) -> Rows:
    good = torch.tensor([isinstance(sample, Sample) for sample in samples])
    # Zeros replace bad samples: the batch keeps its shape, so the others keep their bits.
    images = torch.zeros(len(samples), *shape)
    if good.any():
        images[good] = torch.stack([s.views[0] for s in samples if isinstance(s, Sample)]).float()
    rows = encode(images.to(context.device))
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


def _cuts(config: Config, shard: Shard) -> list[range]:
    """The batches of a shard, as ranges of sample ids."""
    size = config.embed.batch_size
    starts = range(shard.start, shard.stop, size)
    return [range(start, min(start + size, shard.stop)) for start in starts]


def _batches(
    config: Config, images: TarDataset, shards: Sequence[Shard]
) -> Iterator[list[Sample | BadSample]]:
    index = images.index
    cuts = [cut for shard in shards for cut in _cuts(config, shard)]
    workers = min(config.data.num_workers, max(len(cuts) - 1, 0))  # none for a single batch

    def describe(ids: range, place: int) -> str:
        path = index.shards[int(index.shard_of[ids[0]])].path
        return f"the batch of samples {ids[0]} to {ids[-1]} of shard {shown(path)}"

    note = images.note_slow
    loader: Loader[list[Sample | BadSample]] = Loader(
        images, cuts, num_workers=workers, describe=describe, note_slow=note, batched=True
    )
    return iter(loader)
