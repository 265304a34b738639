"""Verb: index + encoder -> embeddings, one file per shard of the index.

Batches are cut within a shard, so a file's content does not depend on the number of ranks, and a
killed run resumes at the first missing file. Undecodable samples keep their row (zeros), are
listed beside it and in the index's ``bad_samples.json``, and get the label -1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mclclip.config import Config
from mclclip.data import trunk_rows
from mclclip.data.bad_samples import BadSamples
from mclclip.data.captions import tokenized
from mclclip.data.embeddings import (
    Note,
    num_restored,
    read_note,
    rows_path,
    shards_done,
    write_shard,
)
from mclclip.data.sample_index import SampleIndex, Shard
from mclclip.data.samples import TarDataset
from mclclip.data.shard_check import check_shards
from mclclip.data.trunk_rows import TrunkRows
from mclclip.embed import images, trunk
from mclclip.files import digest_json
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import artifacts, runlog
from mclclip.run.artifacts import Artifact, Force
from mclclip.run.layout import Layout

log = logging.getLogger("mclclip")


def run(
    config: Config,
    context: Context,
    *,
    stage: int,
    variant: str = "mcl",
    text: bool | None = None,
    force: Force = False,
) -> Path:
    """Embeds every image of the index with the export of ``stage``; returns the directory.

    ``embeddings/NNNNN.npy`` holds the unit features [n, D] of shard NNNNN in index order.
    With ``text`` (default: at stage 0, if clustering or training uses them) the same export embeds
    the captions too, into stage 0's ``text_embeddings``: one row per (sample, caption number), none
    for samples without a caption. Raises ValueError for text where no sample has a caption, and for
    text of another stage, whose text tower is not what later stages are compared with. Finished
    embeddings that lack samples which have been restored since are kept, with a warning, and made
    again with any ``force``.

    With ``trunk_cache.enabled`` stage 0 first writes what its frozen blocks make of every image
    (``embed.trunk``), and the images of every stage are embedded from that.
    """
    if text and stage != 0:
        raise ValueError(
            f"--text with --stage {stage}: captions are embedded by stage 0 alone, leave one out"
        )
    layout = Layout.of(config, variant)
    index = SampleIndex.open(layout.index)
    if config.trunk_cache.enabled and stage == 0:
        trunk.write(config, context, layout, index, force)
    if text is None:
        text = stage == 0 and config.needs_text_embeddings
    jobs = [(layout.embeddings(stage), "embeddings")]
    if text:
        without = len(index.without_caption("embed with text"))
        if without:
            log.info("embed: %d of %d samples have no caption to embed", without, len(index))
        jobs.append((layout.text_embeddings, "text_embeddings"))
    for directory, kind in jobs:
        artifact = collectives.on_main(
            partial(_open, config, layout, stage, index, directory, kind, force)
        )
        if artifact.finished:
            log.info("%s is finished: skipped", directory)
            continue
        model = load_towers(layout.export(stage)).eval()
        rows = None
        if kind == "embeddings" and config.trunk_cache.enabled:
            rows = TrunkRows.open_together(layout, config.trunk_cache.folder, index)
            collectives.together(partial(rows.start, model), "embed")
        model.to(context.device)
        workers, remote = config.data.index_workers, config.data.remote
        collectives.on_main(partial(check_shards, index.directory, index.shards, workers, remote))
        source = images.dataset(config, index, model, rows)
        collectives.together(source.check, "embed")
        embed_shards = _embed_images if kind == "embeddings" else _embed_texts
        of_shards = partial(embed_shards, config, context, source, model)
        _embed(config, context, index, artifact, of_shards)
    return layout.embeddings(stage)


def _open(
    config: Config,
    layout: Layout,
    stage: int,
    index: SampleIndex,
    directory: Path,
    kind: str,
    force: Force,
) -> Artifact:
    options = config.embed
    # The batch size is left out, since it changes results by rounding only.
    fields: dict[str, Any] = {"dtype": options.dtype, "precision": options.precision}
    if kind == "embeddings":
        fields["feature"] = options.feature
    inputs = {
        "index": index.digest,
        "encoder": artifacts.read_manifest(layout.export(stage), "export").digest,
    }
    if kind == "embeddings" and config.trunk_cache.enabled:
        inputs["trunk_cache"] = artifacts.read_manifest(layout.trunk_cache, trunk_rows.KIND).digest
    restored = num_restored(directory, index) if artifacts.is_finished(directory) else 0
    if restored and not force:
        log.warning(
            "%s has no rows of %d samples that could not be read and have changed since: --force "
            "embeds them", directory, restored,
        )  # fmt: skip
    again = force if not restored else bool(force)
    return Artifact.open(directory, kind=kind, config=fields, inputs=inputs, force=again)


def _embed(
    config: Config,
    context: Context,
    index: SampleIndex,
    artifact: Artifact,
    embed_shards: Callable[[Sequence[Shard]], Generator[images.Rows, None, None]],
) -> None:
    """Embeds this rank's missing shards, then finishes the artifact together."""
    directory = artifact.directory

    def work() -> dict[int, str]:
        mine = range(context.rank, len(index.shards), context.world_size)
        bad, missing = shards_done(directory, index, mine)
        shown = runlog.progress(missing, total=len(missing), description=artifact.kind)
        shards = [index.shards[number] for number in missing]
        with closing(embed_shards(shards)) as found:
            for number, (values, reasons) in zip(shown, found, strict=True):
                values = values.astype(config.embed.dtype)
                bad |= write_shard(directory, number, values, reasons, index).reasons
                index.check_bad_fraction(len(bad), config.data.max_bad_fraction)
        return bad

    found = collectives.together(work, "embed")
    num_bad = BadSamples(index, config.data.max_bad_fraction).share(found)
    counts = {"samples": len(index), "shards": len(index.shards), "bad_samples": num_bad}
    if artifact.kind == "text_embeddings":
        counts |= {
            "captions": int(index.num_captions.sum()),
            "without_caption": int((index.num_captions == 0).sum()),
        }

    def finish() -> None:
        notes = _notes(directory, len(index.shards))
        without = sorted(sample_id for note in notes.values() for sample_id in note.reasons)
        artifact.finish(
            counts,
            dtype=config.embed.dtype,
            # Which samples have no row depends on the shards' bytes too.
            content_digest=digest_json([artifact.identity, without]) if without else None,
            records={name: note.record for name, note in notes.items()},
        )

    collectives.on_main(finish)


def _notes(directory: Path, num_shards: int) -> dict[str, Note]:
    """The notes on all shards, which were made when the rows were written, by file of rows."""
    notes = {}
    for number in range(num_shards):
        note, path = read_note(directory, number), rows_path(directory, number)
        if note is None:
            raise RuntimeError(
                f"{path} is not what was written: run 'mclclip embed' again, which makes it again"
            )
        notes[path.name] = note
    return notes


def _unit(features: Tensor) -> np.ndarray:
    array: np.ndarray = torch.nn.functional.normalize(features, dim=-1).cpu().numpy()
    return array


def _embed_images(
    config: Config,
    context: Context,
    source: TarDataset,
    model: Model,
    shards: Sequence[Shard],
) -> Generator[images.Rows, None, None]:
    """Yields unit features [n, D] of each shard's images."""

    def encode(pixels: Tensor) -> np.ndarray:
        return _unit(images.forward(config, context, partial(features, pixels)))

    def features(pixels: Tensor) -> Tensor:
        if config.embed.feature == "pooled":
            return model.encode_tail(pixels, model.first_block, project=False)
        return model.encode_image(pixels)

    shape = images.row_shape(model, source.trunk)
    with closing(images.by_shard(config, context, source, shape, shards, encode)) as passes:
        for batches in passes:
            parts: list[np.ndarray] = []
            bad: dict[int, str] = {}
            for rows, reasons in batches:
                parts.append(rows)
                bad |= reasons
            yield _joined(parts, model), bad


def _joined(parts: list[np.ndarray], model: Model) -> np.ndarray:
    """The concatenated parts [n, D]; n is 0 if there are none."""
    return np.concatenate(parts) if parts else np.zeros((0, model.embed_dim), np.float32)


def _embed_texts(
    config: Config,
    context: Context,
    source: TarDataset,
    model: Model,
    shards: Sequence[Shard],
) -> Generator[images.Rows, None, None]:
    """Yields unit features [captions of the shard, D] of each shard, in the order of (sample,
    caption number)."""
    size = config.embed.batch_size
    for shard in shards:
        captions = [c for of in source.captions_of(range(shard.start, shard.stop)) for c in of]
        parts = []
        for start in range(0, len(captions), size):
            tokens = tokenized(model.tokenizer, captions[start : start + size])
            tokens = tokens.to(context.device)
            encode = partial(model.encode_text, tokens)
            parts.append(_unit(images.forward(config, context, encode)))
        yield _joined(parts, model), {}
