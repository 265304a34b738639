"""One pass over an index: all ranks compute rows of images or captions, one file per shard.

A batch never crosses the border of a shard, so a file's content does not depend on the number of
ranks, and a killed pass goes on at the first missing file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mclclip.config import Config
from mclclip.data.bytes import BadSample, read_excluded
from mclclip.data.index_tables import Shard
from mclclip.data.loader import Loader
from mclclip.data.row_store import RowBatch, find_done_shards, read_notes, write_shard
from mclclip.data.sample_index import SampleIndex, SharedBadSamples
from mclclip.data.samples import Sample, TarDataset
from mclclip.models.encoder import Encoder
from mclclip.models.model import Model
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import runlog
from mclclip.run.artifacts import Artifact
from mclclip.run.steps import Made
from mclclip.util import files

Passes = Generator[Iterator[RowBatch], None, None]
"""Yields for each shard its batches. All batches of a shard must be taken before the next shard."""


def image_batches(
    config: Config,
    context: Context,
    source: TarDataset,
    model: Model | Encoder,
    shards: Sequence[Shard],
    encode: Callable[[Tensor], np.ndarray],
) -> Passes:
    """Yields for each shard batches of rows, which ``encode`` computes from images [n, C, H, W] on
    the device, or from image rows if ``source`` reads these instead.

    One loader reads all shards, so it does not stand still between them.
    """
    size = config.embed.batch_size
    shape = model.image_shape if source.image_rows is None else source.image_rows.shape
    cuts = [
        [range(at, min(at + size, s.stop)) for at in range(s.start, s.stop, size)] for s in shards
    ]
    all_cuts = [cut for of_shard in cuts for cut in of_shard]

    def encode_batch(samples: Sequence[Sample | BadSample]) -> RowBatch:
        good = torch.tensor([isinstance(sample, Sample) for sample in samples])
        # Zeros replace bad samples: the batch keeps its shape, so the others keep their bits.
        images = torch.zeros(len(samples), *shape)
        if good.any():
            views = [sample.views[0] for sample in samples if isinstance(sample, Sample)]
            images[good] = torch.stack(views).float()
        rows = encode(images.to(context.device))
        rows[~good.numpy()] = 0.0
        return rows, {s.sample_id: s.reason for s in samples if isinstance(s, BadSample)}

    loader: Loader[list[Sample | BadSample]] = Loader(
        source,
        all_cuts,
        num_workers=min(config.data.num_workers, max(len(all_cuts) - 1, 0)),  # none for one batch
        timeout_s=config.peer_timeout_s,
        describe=lambda ids: source.bytes.describe(
            f"the batch of samples {ids[0]} to {ids[-1]}", ids
        ),
        batched=True,
        fresh=bool(source.bytes.reader.urls),
    )
    batches = iter(loader)
    for of_shard in cuts:
        yield map(encode_batch, itertools.islice(batches, len(of_shard)))
    next(batches, None)  # lets the loader end its workers


def forward(config: Config, context: Context, encode: Callable[[], Tensor]) -> Tensor:
    """Calls ``encode`` without a graph, in the precision of ``embed.precision``; returns fp32."""
    bf16 = config.embed.precision == "bf16"
    with (
        torch.inference_mode(),
        torch.autocast(context.device.type, dtype=torch.bfloat16, enabled=bf16),
    ):
        return encode().float()


def write_missing(
    config: Config,
    context: Context,
    index: SampleIndex,
    directory: Path,
    passes: Callable[[Sequence[Shard]], Passes],
    *,
    kind: str,
    **how: Any,
) -> int:
    """Writes the files that ``directory`` lacks, each rank some of them; returns the number of
    samples of the index that cannot be used. All ranks call it.

    ``passes`` computes the rows of these shards: one per sample, or one per caption if ``kind`` is
    'text_embeddings'. ``how`` are further arguments of ``write_shard``.
    """

    def work() -> dict[int, str]:
        mine = range(context.rank, len(index.shards), context.world_size)
        excluded = read_excluded(index, config.data.exclude)
        bad, missing = find_done_shards(directory, index, mine, excluded)
        shards = [index.shards[number] for number in missing]
        numbers = runlog.progress(missing, total=len(missing), description=kind)
        with closing(passes(shards)) as rows:
            for number, shard, batches in zip(numbers, shards, rows, strict=True):
                num_rows = shard.stop - shard.start
                if kind == "text_embeddings":
                    num_rows = int(index.num_captions[shard.start : shard.stop].sum())
                bad |= write_shard(directory, number, batches, index, num_rows=num_rows, **how)
                index.check_bad_fraction(bad, config.data.max_bad_fraction)
        return bad

    reasons = collectives.raise_on_every_rank(work, "embed")
    return SharedBadSamples(index, config.data.max_bad_fraction).add(reasons)


def made_of_shards(
    out: Artifact, index: SampleIndex, num_bad: int, counts: Mapping[str, Any], dtype: str
) -> Made:
    """Describes finished embeddings for their manifest, with further ``counts``."""
    notes = read_notes(out.directory, len(index.shards))
    without = sorted(sample_id for note in notes.values() for sample_id in note.reasons)
    common = {"samples": len(index), "shards": len(index.shards), "bad_samples": num_bad}
    # The digest names samples without a row: they follow from the bytes, not from the options.
    digest = files.digest_json([out.identity, without]) if without else None
    beside = (str(Path(name).with_suffix(".json")) for name in notes)
    records = {name: note.record for name, note in notes.items()}
    records |= files.records_of(out.directory, *beside)
    return Made(common | dict(counts), records, dtype, digest)
