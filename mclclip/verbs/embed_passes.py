"""One pass over an index: batches of images, and rows of them, shard by shard, by all ranks.

Batches are cut within a shard, so a file's content does not depend on the number of ranks, and a
killed pass goes on at the first file that is missing.
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
from mclclip.models.model import Model
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import runlog
from mclclip.run.artifacts import Artifact
from mclclip.run.steps import Made
from mclclip.util import files

Passes = Generator[Iterator[RowBatch], None, None]
"""For each of some shards its batches, which must be taken before the next shard is asked for."""


def image_batches(
    config: Config,
    context: Context,
    source: TarDataset,
    model: Model,
    shards: Sequence[Shard],
    encode: Callable[[Tensor], np.ndarray],
) -> Passes:
    """Yields for each shard batches of rows, which ``encode`` makes of images as ``model`` takes
    them, or of rows that stand for images: [n, ...] on the device.

    One loader reads all shards, so that it does not stand still between them.
    """
    size = config.embed.batch_size
    shape = model.image_shape if source.image_rows is None else source.image_rows.shape
    cuts = [
        [range(at, min(at + size, s.stop)) for at in range(s.start, s.stop, size)] for s in shards
    ]
    all_cuts = [cut for of_shard in cuts for cut in of_shard]

    def encoded(samples: Sequence[Sample | BadSample]) -> RowBatch:
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
        yield map(encoded, itertools.islice(batches, len(of_shard)))
    next(batches, None)  # the loader's own end


def forward(config: Config, context: Context, encode: Callable[[], Tensor]) -> Tensor:
    """Calls ``encode`` without a graph, in the arithmetic of ``embed.precision``; returns fp32."""
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
    """Writes the shards that ``directory`` lacks, of which each rank takes its part; returns the
    number of the index's samples that cannot be used. All ranks call it.

    ``passes`` makes the batches of these shards: a row per sample, or per caption where ``kind`` is
    ``text_embeddings``. ``how`` are further arguments of ``write_shard``.
    """

    def work() -> dict[int, str]:
        mine = range(context.rank, len(index.shards), context.world_size)
        excluded = read_excluded(index, config.data.exclude)
        bad, missing = find_done_shards(directory, index, mine, excluded)
        shards = [index.shards[number] for number in missing]
        numbers = runlog.progress(missing, total=len(missing), description=kind)
        with closing(passes(shards)) as made:
            for number, shard, batches in zip(numbers, shards, made, strict=True):
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
    """Returns what the manifest says of shards that have all been written, with these further
    ``counts``."""
    notes = read_notes(out.directory, len(index.shards))
    without = sorted(sample_id for note in notes.values() for sample_id in note.reasons)
    common = {"samples": len(index), "shards": len(index.shards), "bad_samples": num_bad}
    # Which samples have no row depends on the shards' bytes too.
    digest = files.digest_json([out.identity, without]) if without else None
    beside = (str(Path(name).with_suffix(".json")) for name in notes)
    records = {name: note.record for name, note in notes.items()}
    records |= files.records_of(out.directory, *beside)
    return Made(common | dict(counts), records, dtype, digest)
