"""One pass over an index: all ranks compute rows of images or captions, one file per shard.

A batch never crosses the border of a shard, so a file's content does not depend on the number of
ranks, and a killed pass goes on at the first missing file.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from mclclip.config import Config
from mclclip.data.bytes import BadSample, read_excluded
from mclclip.data.index_tables import Shard
from mclclip.data.loader import Loader, run_ahead
from mclclip.data.row_store import RowBatch, find_done_shards, read_notes, write_shard
from mclclip.data.sample_index import SampleIndex, SharedBadSamples
from mclclip.data.samples import Sample, TarDataset
from mclclip.engines import EngineConfig
from mclclip.engines.build import choose_compile
from mclclip.models.encoder import Encoder
from mclclip.models.memory import StepMeter
from mclclip.models.model import Model
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context, choose_memory
from mclclip.run import runlog
from mclclip.run.artifacts import Artifact
from mclclip.run.steps import Made
from mclclip.util import files

log = logging.getLogger("mclclip")

Passes = Generator[Iterator[RowBatch], None, None]
"""Yields for each shard its batches. All batches of a shard must be taken before the next shard."""


def image_passes(
    config: Config,
    context: Context,
    source: TarDataset,
    model: Model | Encoder,
    encode: Callable[[Tensor], Tensor],
    check: Callable[[np.ndarray], None],
) -> Callable[[Sequence[Shard]], Passes]:
    """Returns a function that yields for each shard batches of rows. All ranks call it.

    ``encode`` computes the rows of images [n, C, H, W] on the device, or of image rows if
    ``source`` reads these instead; ``check`` raises an error for rows that are not to be stored.

    If torch compiles the blocks, all batches of the pass have one size, so that it compiles once
    and a row has the same bits in whatever order ranks reach the shards.
    """
    shape = model.image_shape if source.image_rows is None else source.image_rows.shape
    models = [*model.stages] if isinstance(model, Encoder) else [model]

    def choose() -> str:
        with StepMeter() as meter:
            encode(torch.zeros(1, *shape, device=context.device))
        operations = float(meter.operations) * len(source)  # of all ranks: they make equal rows
        blocks = [block for each in models for block in each.blocks()]
        return choose_compile(
            EngineConfig(compile=config.embed.compile), context.device, blocks, operations
        )

    size, least = config.embed.batch_size, 0
    if collectives.on_main(choose) == "model":
        log.info("embed: torch compiles the blocks of the encoder")
        for each in models:
            each.compile_blocks()
        longest = max(shard.stop - shard.start for shard in source.index.shards)
        size = least = -(-longest // -(-longest // size))  # cuts the longest shard evenly
    return partial(_image_batches, config, context, source, shape, encode, check, size, least)


def _image_batches(
    config: Config,
    context: Context,
    source: TarDataset,
    shape: Sequence[int],
    encode: Callable[[Tensor], Tensor],
    check: Callable[[np.ndarray], None],
    size: int,
    least: int,
    shards: Sequence[Shard],
) -> Passes:
    """Yields for each shard its batches of up to ``size`` rows, which are computed with zeros up to
    ``least``.

    One loader reads all shards, so it does not stand still between them.
    """
    cuts = [
        [range(at, min(at + size, s.stop)) for at in range(s.start, s.stop, size)] for s in shards
    ]
    all_cuts = [cut for of_shard in cuts for cut in of_shard]

    def compute(batch: _Batch) -> tuple[Tensor, _Batch]:
        images = batch.images.to(context.device, non_blocking=True)
        return encode(source.transform.to_floats(images)), batch

    def finish(rows: np.ndarray, batch: _Batch) -> RowBatch:
        rows = rows[: batch.num_samples]
        rows[batch.empty] = 0.0
        check(rows)
        return rows, batch.reasons

    loader: Loader[_Batch] = Loader(
        source,
        all_cuts,
        num_workers=min(config.data.num_workers, max(len(all_cuts) - 1, 0)),  # none for one batch
        timeout_s=config.peer_timeout_s,
        describe=lambda ids: source.bytes.describe(
            f"the batch of samples {ids[0]} to {ids[-1]}", ids
        ),
        collate=partial(_collate, shape, least),
        pin_memory=choose_memory(context.device) == "pinned",
        fresh=bool(source.bytes.reader.urls),
    )
    results = run_ahead(compute, loader)
    for of_shard in cuts:
        yield itertools.starmap(finish, itertools.islice(results, len(of_shard)))
    next(results, None)  # lets the loader end its workers


class _Batch(NamedTuple):
    """Images that a worker has made ready for the device.

    images       [n, C, H, W], or image rows [n, ...]
    empty        places of samples without an image, where zeros stand
    reasons      why samples have no image, by sample id
    num_samples  how many of the n are samples; anything may follow
    """

    images: Tensor
    empty: list[int]
    reasons: dict[int, str]
    num_samples: int


def _collate(shape: Sequence[int], least: int, samples: Sequence[Sample | BadSample]) -> _Batch:
    good = [sample for sample in samples if isinstance(sample, Sample)]
    zeros = torch.zeros_like(good[0].views[0]) if good else torch.zeros(*shape)
    views = [sample.views[0] if isinstance(sample, Sample) else zeros for sample in samples]
    return _Batch(
        default_collate(views + [zeros] * (least - len(views))),  # in a worker: shared memory
        [place for place, sample in enumerate(samples) if isinstance(sample, BadSample)],
        {s.sample_id: s.reason for s in samples if isinstance(s, BadSample)},
        len(samples),
    )


def forward(config: Config, context: Context, encode: Callable[[], Tensor]) -> Tensor:
    """Calls ``encode`` without a graph, in the precision of ``embed.precision``; returns fp32."""
    bf16 = config.embed.precision == "bf16"
    with (
        torch.no_grad(),
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
