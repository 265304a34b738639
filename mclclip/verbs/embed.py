"""Verb: index + encoder -> embeddings, one file per shard of the index.

Batches are cut within a shard, so a file's content does not depend on the number of ranks, and a
killed run resumes at the first missing file. Undecodable samples keep their row (zeros), are
listed beside it and in the index's ``bad_samples.json``, and get the label -1.

With ``image_rows.enabled`` stage 0 first writes what its frozen blocks make of every image, in the
same way. Stages, controls and later embedding passes have the same frozen blocks, so they start
from these rows instead of images (``models.image_rows``).
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
from mclclip.data.bytes import read_excluded
from mclclip.data.extras import directory_of, drawn
from mclclip.data.index_tables import Shard, check_shards
from mclclip.data.row_store import IMAGE_ROWS, RowBatch, StoredRows, num_restored
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import TarDataset, tokenized
from mclclip.models.image_rows import start_from_rows
from mclclip.models.loading import load_towers
from mclclip.models.model import Model, unit
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import Artifact, Force, Layout, is_finished, made_of, read_manifest
from mclclip.util import files
from mclclip.util.caption_rules import HardCaptions
from mclclip.util.randomness import mix
from mclclip.verbs.embed_passes import Passes, finish_shards, forward, image_batches, write_missing

log = logging.getLogger("mclclip")


def run(
    config: Config,
    context: Context,
    *,
    stage: int,
    text: bool | None = None,
    readers: Sequence[Config] = (),
    force: Force = False,
) -> Path:
    """Embeds every image of the index with the export of ``stage``; returns the directory.

    ``embeddings/NNNNN.npy`` holds the unit features [n, D] of shard NNNNN in index order.
    With ``text`` (default: at stage 0, if clustering or training uses them) the same export embeds
    the captions too, into stage 0's ``text_embeddings``: one row per (sample, caption number), none
    for samples without a caption. Where a training reads embeddings of edited captions too, ``h``
    of each, ``edited_texts`` has rows [h D] in the same order: one draw, the same for every seed,
    with zeros for edits that there are not. ``readers`` are further configurations whose trainings
    start from stage 0, of whose texts the same is made.

    Finished embeddings that lack samples which have been restored since are kept, with a warning,
    and made again with any ``force``. Raises ValueError for text where no sample has a caption, and
    for text of another stage, whose text tower is not what later stages are compared with.
    """
    if text and stage != 0:
        raise ValueError(
            f"--text with --stage {stage}: captions are embedded by stage 0 alone, leave one out"
        )
    layout = Layout.of(config)
    index = SampleIndex.open(layout.index)
    every = (config, *readers) if stage == 0 else ()
    texts = [edits for reader in every for edits in reader.stored_texts]
    if text is not None:
        texts = [None, *texts] if text else []
    wanted: dict[Path, HardCaptions | None] = {}
    if config.writes_image_rows and stage == 0:
        wanted[layout.image_rows] = None
    wanted[layout.embeddings(stage)] = None
    wanted |= {directory_of(layout, edits): edits for edits in texts}
    if texts:
        if without := len(index.without_caption("embed with text")):
            log.info("embed: %d of %d samples have no caption to embed", without, len(index))
    for directory, edits in wanted.items():
        artifact = collectives.on_main(
            partial(_open, config, layout, stage, index, directory, edits, force)
        )
        if artifact.finished:
            log.info("%s is finished: skipped", artifact.directory)
            continue
        model, rows = load_towers(layout.export(stage)).eval(), None
        if artifact.kind == "embeddings" and "image_rows" in artifact.inputs:
            make = partial(StoredRows.of_images, layout, index, whole=not config.writes_image_rows)
            rows = collectives.on_main(make)
            collectives.together(partial(start_from_rows, model, rows), "embed")
        model.to(context.device)
        collectives.on_main(partial(check_shards, index.directory, index.shards, config.data))
        source = TarDataset(index, config.data, model.preprocess_val, image_rows=rows)
        collectives.together(source.check, "embed")
        _embed(config, context, source, model, artifact, edits)
    return layout.embeddings(stage)


def _open(
    config: Config,
    layout: Layout,
    stage: int,
    index: SampleIndex,
    directory: Path,
    edits: HardCaptions | None,
    force: Force,
) -> Artifact:
    kinds = {layout.embeddings(stage): "embeddings", layout.image_rows: IMAGE_ROWS}
    kind = kinds.get(directory, "text_embeddings")
    # The batch size is left out, since it changes results by rounding only.
    fields: dict[str, Any] = {"dtype": config.embed.dtype, "precision": config.embed.precision}
    encoder = read_manifest(layout.export(stage), "export")
    inputs = {"index": index.digest, "encoder": encoder.digest}
    if kind == "embeddings":
        fields["feature"] = config.embed.feature
        if config.writes_image_rows:
            inputs["image_rows"] = read_manifest(layout.image_rows, IMAGE_ROWS).digest
        elif config.image_rows.enabled and stage:
            inputs["image_rows"] = read_manifest(layout.embeddings(0), kind).digest
    elif kind == IMAGE_ROWS:
        blocks, trunk = _frozen_part(config, layout)
        fields |= {"dtype": config.image_rows.dtype, "blocks": blocks}
        inputs = {"index": index.digest, "trunk": trunk}
        embeddings = made_of(layout.embeddings(0))
        if embeddings and "image_rows" not in embeddings["inputs"] and not force:
            raise ValueError(
                f"{layout.embeddings(0)} was made from images, and image_rows.enabled starts from "
                "rows: use another run_dir, leave image_rows out, or --force to "
                "make it again"
            )
    if edits is not None:
        fields["drawn_by"] = [*edits.drawn_by]
    excluded = read_excluded(index, config.data.exclude)
    restored = num_restored(directory, index, excluded) if is_finished(directory) else 0
    if restored and not force:
        log.warning(
            "%s has no rows of %d samples that have changed since, or were in data.exclude then: "
            "--force embeds them", directory, restored,
        )  # fmt: skip
    force = bool(force) if restored else force
    return Artifact.open(directory, kind=kind, config=fields, inputs=inputs, force=force)


def _frozen_part(config: Config, layout: Layout) -> tuple[int, str]:
    """Number of first blocks that no stage trains, and the digest of what their output depends on;
    ValueError where there are none."""
    model = load_towers(layout.export(0))
    model.lock(**config.train.model_arguments()["lock"])
    if not model.num_frozen_blocks:
        stem = f" (the stem and {model.num_blocks - 1} residual blocks)"
        raise ValueError(
            f"image_rows.enabled, but train.lock.image_blocks={config.train.lock.image_blocks} "
            f"trains all of the image tower's {model.num_blocks} blocks"
            f"{'' if model.layout.embedding else stem}: lower it, or leave image_rows out"
        )
    return model.num_frozen_blocks, model.trunk_digest(model.num_frozen_blocks)


def _embed(
    config: Config,
    context: Context,
    source: TarDataset,
    model: Model,
    artifact: Artifact,
    edits: HardCaptions | None,
) -> None:
    """Embeds the missing shards of images, of captions, or of their edits, then finishes the
    artifact together."""
    index, kind, dtype = source.index, artifact.kind, artifact.config["dtype"]
    row, counts = [model.embed_dim * (1 if edits is None else edits.per_caption)], dict[str, Any]()
    blocks = artifact.config.get("blocks", 0)

    def features(pixels: Tensor) -> np.ndarray:
        if kind == IMAGE_ROWS:
            encode = partial(model.encode_trunk, pixels, blocks)
            return _checked(forward(config, context, encode).cpu().numpy(), dtype)
        if config.embed.feature == "pooled":
            encode = partial(model.encode_tail, pixels, model.first_block, project=False)
        else:
            encode = partial(model.encode_image, pixels)
        return unit(forward(config, context, encode)).cpu().numpy()

    passes = partial(image_batches, config, context, source, model, encode=features)
    if kind == IMAGE_ROWS:
        image = torch.zeros(1, *model.image_shape, device=context.device)
        row = list(forward(config, context, lambda: model.encode_trunk(image, blocks)).shape[1:])
        counts = {"shape": row}
        size = len(index) * int(np.prod(row)) * np.dtype(dtype).itemsize
        begun, advice = artifact.directory.glob("*.npy"), "free some, or take another run_dir"
        room = partial(files.check_room, artifact.directory, size, begun)
        collectives.on_main(lambda: room("writing image rows", advice))
    elif kind == "text_embeddings":
        passes = partial(_caption_batches, config, context, source, model, edits)
        counts = {
            "captions": int(index.num_captions.sum()),
            "without_caption": int((index.num_captions == 0).sum()),
        }
    num_bad = write_missing(
        config, context, index, artifact.directory, passes,
        kind=kind, dtype=dtype, empty=tuple(row),
    )  # fmt: skip
    collectives.on_main(lambda: finish_shards(artifact, index, num_bad, counts, dtype))


def _checked(rows: np.ndarray, dtype: str) -> np.ndarray:
    """The rows; ValueError where ``dtype`` does not hold one of their values."""
    largest = float(np.abs(rows).max())
    if not largest <= float(np.finfo(dtype).max):
        raise ValueError(
            f"the image rows have values (up to {largest:.3g}) that {dtype} does not hold: set "
            "image_rows.dtype=float32, or look at the encoder if they are not numbers"
        )
    return rows


def _caption_batches(
    config: Config,
    context: Context,
    source: TarDataset,
    model: Model,
    edits: HardCaptions | None,
    shards: Sequence[Shard],
) -> Passes:
    """Yields for each shard batches of unit features [n, D] of its captions, in the order of
    (sample, caption number); with ``edits`` of the edits of each, [n, h D]."""
    num = 1 if edits is None else edits.per_caption
    size = max(config.embed.batch_size // num, 1)
    for shard in shards:
        texts = [
            [caption]
            if edits is None
            else drawn(edits, raw.text, captions, n, int(mix(raw.sample_id, n)))
            for raw, captions in source.bytes.texts_of(range(shard.start, shard.stop))
            for n, caption in enumerate(captions)
        ]

        def encoded(start: int, texts: list[list[str]] = texts) -> RowBatch:
            some = texts[start : start + size]
            rows = np.zeros((len(some), num, model.embed_dim), np.float32)
            if flat := [text for of_one in some for text in of_one]:
                tokens = tokenized(model.tokenizer, flat)
                encode = partial(model.encode_text, tokens.to(context.device))
                present = np.arange(num) < np.array([[len(of_one)] for of_one in some])
                rows[present] = unit(forward(config, context, encode)).cpu().numpy()
            return rows.reshape(len(some), -1), {}

        yield map(encoded, range(0, len(texts), size))
