"""Verb: index + encoder -> embeddings, one file per shard of the index.

Batches are cut within a shard, so a file's content does not depend on the number of ranks, and a
killed run resumes at the first missing file. Undecodable samples keep their row (zeros), are
listed beside it and in the index's ``bad_samples.json``, and get the label -1.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mclclip.config import Config
from mclclip.data import trunk_rows
from mclclip.data.captions import tokenized
from mclclip.data.row_store import Batch, all_notes, num_restored
from mclclip.data.sample_index import SampleIndex, Shard
from mclclip.data.shard_check import check_shards
from mclclip.data.trunk_rows import TrunkRows
from mclclip.embed import trunk
from mclclip.embed.images import ImagePass, Passes, forward, write_missing
from mclclip.files import digest_json
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import artifacts
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
    kinds = ["embeddings"]
    if text:
        without = len(index.without_caption("embed with text"))
        if without:
            log.info("embed: %d of %d samples have no caption to embed", without, len(index))
        kinds.append("text_embeddings")
    for kind in kinds:
        artifact = collectives.on_main(partial(_open, config, layout, stage, index, kind, force))
        if artifact.finished:
            log.info("%s is finished: skipped", artifact.directory)
            continue
        model = load_towers(layout.export(stage)).eval()
        rows = None
        if kind == "embeddings" and config.trunk_cache.enabled:
            rows = TrunkRows.open_together(layout, config.trunk_cache.folder, index)
            collectives.together(partial(rows.start, model), "embed")
        model.to(context.device)
        collectives.on_main(partial(check_shards, index.directory, index.shards, config.data))
        images = ImagePass(config, context, index, model, rows)
        collectives.together(images.source.check, "embed")
        _embed(images, model, artifact)
    return layout.embeddings(stage)


def _open(
    config: Config, layout: Layout, stage: int, index: SampleIndex, kind: str, force: Force
) -> Artifact:
    of_images = kind == "embeddings"
    directory = layout.embeddings(stage) if of_images else layout.text_embeddings
    # The batch size is left out, since it changes results by rounding only.
    fields: dict[str, Any] = {"dtype": config.embed.dtype, "precision": config.embed.precision}
    inputs = {
        "index": index.digest,
        "encoder": artifacts.read_manifest(layout.export(stage), "export").digest,
    }
    if of_images:
        fields["feature"] = config.embed.feature
    if of_images and config.trunk_cache.enabled:
        inputs["trunk_cache"] = artifacts.read_manifest(layout.trunk_cache, trunk_rows.KIND).digest
    restored = num_restored(directory, index) if artifacts.is_finished(directory) else 0
    if restored and not force:
        log.warning(
            "%s has no rows of %d samples that could not be read and have changed since: --force "
            "embeds them", directory, restored,
        )  # fmt: skip
    again = force if not restored else bool(force)
    return Artifact.open(directory, kind=kind, config=fields, inputs=inputs, force=again)


def _embed(images: ImagePass, model: Model, artifact: Artifact) -> None:
    """Embeds the missing shards of images, or of captions, then finishes the artifact together."""
    config, index, directory, kind = images.config, images.index, artifact.directory, artifact.kind
    of_images = partial(images.by_shard, encode=partial(_features, images, model))
    num_bad = write_missing(
        config, images.context, index, directory,
        of_images if kind == "embeddings" else partial(_caption_batches, images, model),
        kind=kind, dtype=config.embed.dtype, empty=(model.embed_dim,),
    )  # fmt: skip
    counts = {"samples": len(index), "shards": len(index.shards), "bad_samples": num_bad}
    if kind == "text_embeddings":
        counts |= {
            "captions": int(index.num_captions.sum()),
            "without_caption": int((index.num_captions == 0).sum()),
        }

    def finish() -> None:
        notes = all_notes(directory, len(index.shards))
        without = sorted(sample_id for note in notes.values() for sample_id in note.reasons)
        artifact.finish(
            counts,
            dtype=config.embed.dtype,
            # Which samples have no row depends on the shards' bytes too.
            content_digest=digest_json([artifact.identity, without]) if without else None,
            records={name: note.record for name, note in notes.items()},
        )

    collectives.on_main(finish)


def _features(images: ImagePass, model: Model, pixels: Tensor) -> np.ndarray:
    """Unit features [n, D] of a batch of images."""

    def encode() -> Tensor:
        if images.config.embed.feature == "pooled":
            return model.encode_tail(pixels, model.first_block, project=False)
        return model.encode_image(pixels)

    return _unit(forward(images.config, images.context, encode))


def _caption_batches(images: ImagePass, model: Model, shards: Sequence[Shard]) -> Passes:
    """Yields for each shard batches of unit features [n, D] of its captions, in the order of
    (sample, caption number)."""
    size = images.config.embed.batch_size
    for shard in shards:
        of_samples = images.source.captions_of(range(shard.start, shard.stop))
        captions = [caption for of_sample in of_samples for caption in of_sample]

        def encoded(start: int, captions: list[str] = captions) -> Batch:
            tokens = tokenized(model.tokenizer, captions[start : start + size])
            encode = partial(model.encode_text, tokens.to(images.context.device))
            return _unit(forward(images.config, images.context, encode)), {}

        yield map(encoded, range(0, len(captions), size))


def _unit(features: Tensor) -> np.ndarray:
    array: np.ndarray = torch.nn.functional.normalize(features, dim=-1).cpu().numpy()
    return array
