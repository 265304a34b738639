"""Verb: index + encoder -> embeddings, one file per shard of the index.

Batches are cut within a shard, so a file's content does not depend on the number of ranks, and a
killed run resumes at the first missing file. Undecodable samples keep their row (zeros), are
listed beside it and in the index's ``bad_samples.json``, and get the label -1.

With ``trunk_cache.enabled`` stage 0 first writes what its frozen blocks make of every image, in the
same way. Stages, controls and later embedding passes have the same frozen blocks, so they start
from these rows (``data.locations``) instead of images.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mclclip.config import Config, rules
from mclclip.data import locations
from mclclip.data.arrays import open_npy, save_npy
from mclclip.data.extras import directory_of, drawn
from mclclip.data.index_tables import Shard, check_shards
from mclclip.data.locations import WITHOUT, TrunkRows
from mclclip.data.row_store import RowBatch, left_out, num_restored, shards_done
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import TarDataset, read_excluded, tokenized
from mclclip.models import memory
from mclclip.models.loading import load_towers
from mclclip.models.model import Model, unit
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import Artifact, Force, Layout, is_finished, made_of, read_manifest
from mclclip.run.steps import Made, Step, make
from mclclip.util import files
from mclclip.util.caption_rules import HardCaptions
from mclclip.util.randomness import mix
from mclclip.verbs.embed_passes import Passes, forward, image_batches, made_of_shards, write_missing

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
    if config.trunk_cache.enabled and stage == 0:
        write_trunk(config, context, layout, index, force)
    every = (config, *readers) if stage == 0 else ()
    texts = [edits for reader in every for edits in reader.stored_texts]
    if text is not None:
        texts = [None, *texts] if text else []
    if texts:
        if without := len(index.without_caption("embed with text")):
            log.info("embed: %d of %d samples have no caption to embed", without, len(index))
    how, options = Pass(config, context, layout, index, stage), config.embed
    precision = options.dtype, options.precision

    def embed(step: Step[Pass], directory: Path, how: Pass) -> None:
        make(step, directory, how, collectives.on_main(partial(how.remake, directory, force)))

    embed(Embeddings(*precision, options.feature), layout.embeddings(stage), how)
    for edits in texts:
        step = TextEmbeddings(*precision, None if edits is None else edits.drawn_by)
        embed(step, directory_of(layout, edits), replace(how, edits=edits))
    return layout.embeddings(stage)


@dataclass(frozen=True)
class Pass:
    """A pass of a stage's encoder over the samples of the index, of texts with these ``edits``."""

    config: Config
    context: Context
    layout: Layout
    index: SampleIndex
    stage: int
    edits: HardCaptions | None = None

    def remake(self, directory: Path, force: Force) -> Force:
        """How finished embeddings are treated: any force makes them again where samples that have
        no row have been restored since, and a warning counts these without one."""
        if not is_finished(directory):
            return force
        excluded = read_excluded(self.index, self.config.data.exclude)
        restored = num_restored(directory, self.index, excluded)
        if restored and not force:
            log.warning(
                "%s has no rows of %d samples that have changed since, or were in data.exclude "
                "then: --force embeds them", directory, restored,
            )  # fmt: skip
        return bool(force) if restored else force

    def inputs(self) -> dict[str, str]:
        """The digests of the index and of the encoder."""
        encoder = read_manifest(self.layout.export(self.stage), "export")
        return {"index": self.index.digest, "encoder": encoder.digest}

    def source(self, model: Model, rows: TrunkRows | None = None) -> TarDataset:
        """The samples as the model takes them, after a check of their shards."""
        data = self.config.data
        collectives.on_main(partial(check_shards, self.index.directory, self.index.shards, data))
        source = TarDataset(self.index, data, model.preprocess_val, trunk=rows)
        collectives.together(source.check, "embed")
        return source

    def write(
        self, out: Artifact, passes: Callable[[Sequence[Shard]], Passes], dtype: str, width: int,
        **counts: int,
    ) -> Made:  # fmt: skip
        """Writes the shards that are missing, rows [width] of each sample or caption."""
        num_bad = write_missing(
            self.config, self.context, self.index, out.begin(), passes,
            kind=out.kind, dtype=dtype, empty=(width,),
        )  # fmt: skip
        written = out.identity, self.index, out.directory, num_bad, counts, dtype
        return collectives.on_main(lambda: made_of_shards(*written))


@dataclass(frozen=True)
class Embeddings(Step[Pass]):
    """Unit features of every image."""

    kind = "embeddings"
    all_ranks = True
    dtype: str
    precision: str
    feature: str

    def reads(self, how: Pass) -> dict[str, str]:
        """The index and the encoder, and what stands for images."""
        inputs = how.inputs()
        if how.config.trunk_cache.enabled:
            cache = read_manifest(how.layout.trunk_cache, locations.TRUNK_CACHE)
            inputs["trunk_cache"] = cache.digest
        return inputs

    def make(self, out: Artifact, how: Pass) -> Made:
        """Embeds the shards that are missing."""
        config, context = how.config, how.context
        model, rows = load_towers(how.layout.export(how.stage)).eval(), None
        if config.trunk_cache.enabled:
            rows = TrunkRows.open_together(how.layout, config.trunk_cache.folder, how.index)
            collectives.together(partial(rows.start, model), "embed")
        source = how.source(model.to(context.device), rows)

        def features(pixels: Tensor) -> np.ndarray:
            if self.feature == "pooled":
                encode = partial(model.encode_tail, pixels, model.first_block, project=False)
            else:
                encode = partial(model.encode_image, pixels)
            return unit(forward(config, context, encode)).cpu().numpy()

        passes = partial(image_batches, config, context, source, model, encode=features)
        return how.write(out, passes, self.dtype, model.embed_dim)


@dataclass(frozen=True)
class TextEmbeddings(Step[Pass]):
    """Unit features of every caption, or of the edits of each."""

    kind = "text_embeddings"
    all_ranks = True
    dtype: str
    precision: str
    drawn_by: tuple[object, ...] | None
    """Of edits (``HardCaptions.drawn_by``)."""

    def reads(self, how: Pass) -> dict[str, str]:
        """The index and the encoder."""
        return how.inputs()

    def make(self, out: Artifact, how: Pass) -> Made:
        """Embeds the shards that are missing."""
        model = load_towers(how.layout.export(how.stage)).eval().to(how.context.device)
        source = how.source(model)
        passes = partial(_caption_batches, how.config, how.context, source, model, how.edits)
        per_caption = 1 if how.edits is None else how.edits.per_caption
        captions = how.index.num_captions
        return how.write(
            out, passes, self.dtype, per_caption * model.embed_dim,
            captions=int(captions.sum()), without_caption=int((captions == 0).sum()),
        )  # fmt: skip


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
        ids = range(shard.start, shard.stop)
        texts = [
            [caption]
            if edits is None
            else drawn(edits, member, captions, n, int(mix(sample_id, n)))
            for sample_id, (member, captions) in zip(ids, source.texts_of(ids), strict=True)
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


# --- the cache of the trunk ------------------------------------------------------------------


def write_trunk(
    config: Config, context: Context, layout: Layout, index: SampleIndex, force: Force
) -> None:
    """Writes the cache of stage 0's encoder, unless it is finished. All ranks call it.

    A killed call goes on at the first shard that is missing. Raises ValueError where the training
    freezes no block, embeddings were made without the cache, the disk has too little room, or
    ``trunk_cache.dtype`` does not hold a value.
    """
    read_manifest(layout.export(0), "export")  # says which verb makes it
    model = load_towers(layout.export(0)).eval()
    blocks = collectives.on_main(lambda: _frozen_blocks(config, layout))
    trunk = model.trunk_digest(blocks)
    artifact = collectives.on_main(lambda: _open_trunk(config, layout, index, blocks, trunk, force))
    if artifact.finished:
        log.info("%s is finished: skipped", artifact.directory)
        return
    collectives.on_main(lambda: check_shards(index.directory, index.shards, config.data))
    source = TarDataset(index, config.data, model.preprocess_val)
    collectives.together(source.check, "embed")
    with torch.inference_mode():
        of_one = model.encode_trunk(torch.zeros(1, *model.image_shape), blocks)
    shape, dtype = tuple(of_one.shape[1:]), config.trunk_cache.dtype
    folder = layout.trunk_rows(config.trunk_cache.folder, artifact.identity)
    size = len(index) * int(np.prod(shape)) * np.dtype(dtype).itemsize
    advice = "name another disk in trunk_cache.folder, or remove older rows (.old-1 and so on)"
    rows = folder.glob("*.npy")
    collectives.on_main(lambda: files.check_room(folder, size, rows, "the trunk's cache", advice))
    model.to(context.device)

    def encode(pixels: Tensor) -> np.ndarray:
        run = partial(model.encode_trunk, pixels, blocks)
        return forward(config, context, run).cpu().numpy()

    def passes(shards: Sequence[Shard]) -> Passes:
        # Stored after the rows of bad samples are zeros: what the trunk makes of them is not kept.
        for batches in image_batches(config, context, source, model, shards, encode):
            yield ((_stored(rows, dtype), bad) for rows, bad in batches)

    num_bad = write_missing(
        config, context, index, folder, passes,
        kind=locations.TRUNK_CACHE, full_disk=files.full_disk_names(folder, "trunk_cache.folder"),
        dtype=dtype, empty=shape,
    )  # fmt: skip

    def finish() -> None:
        directory = artifact.directory
        without = left_out(folder, len(index.shards))
        save_npy(directory / WITHOUT, without)
        counts = {"shape": list(shape), "rows": locations.recorded_folder(directory, folder)}
        records = files.records_of(directory, WITHOUT)
        written = folder, num_bad, counts, dtype, records
        made = made_of_shards(artifact.identity, index, *written)
        artifact.finish(made.counts, dtype=dtype, content_digest=made.digest, records=made.records)
        log.info(
            "embed: what %d blocks make of %d images is in %s (%.3g GiB); %d have no row",
            blocks, len(index), folder, size / 2**30, len(without),
        )  # fmt: skip

    collectives.on_main(finish)


def _stored(rows: np.ndarray, dtype: str) -> np.ndarray:
    """The rows in ``dtype``; ValueError where it does not hold one of their values."""
    with np.errstate(over="ignore"):  # it is refused below
        stored = rows.astype(dtype)
    if not np.isfinite(stored).all():
        largest = float(np.abs(rows).max())
        raise ValueError(
            f"the trunk's output has values (up to {largest:.3g}) that {dtype} does not hold: set "
            "trunk_cache.dtype=float32, or look at the encoder if they are not numbers"
        )
    return stored


def _frozen_blocks(config: Config, layout: Layout) -> int:
    """Number of first blocks that no stage trains. Raises ValueError for none."""
    export, trained = layout.export(0), config.train.lock.image_blocks
    rules.check(replace(config, model=replace(config.model, name=f"local-dir:{export}")))
    assert isinstance(trained, int), "a rule has refused all blocks"
    return memory.load_shapes(str(export), text=False).num_blocks - trained


def _open_trunk(
    config: Config, layout: Layout, index: SampleIndex, blocks: int, trunk: str, force: Force
) -> Artifact:
    check_trunk_folder(config)
    given = config.trunk_cache.folder
    directory, embeddings = layout.trunk_cache, layout.embeddings(0)
    made_by = made_of(embeddings)
    if made_by and "trunk_cache" not in made_by["inputs"] and not force:
        raise ValueError(
            f"{embeddings} was made from images, and trunk_cache.enabled starts from the trunk's "
            "output: use another run_dir, leave trunk_cache out, or --force to make it again"
        )
    was_finished, was_begun = is_finished(directory), directory.exists()
    artifact = Artifact.open(
        directory,
        kind=locations.TRUNK_CACHE,
        config={
            "blocks": blocks,
            "dtype": config.trunk_cache.dtype,
            "precision": config.embed.precision,
        },
        inputs={"index": index.digest, "trunk": trunk},
        force=force,
    )
    folder = layout.trunk_rows(given, artifact.identity)
    excluded = read_excluded(index, config.data.exclude)
    if artifact.manifest is not None and force:
        # Rows that are all gone were deleted on purpose, as one may once all is trained.
        if folder.exists() and shards_done(folder, index, range(len(index.shards)), excluded)[1]:
            artifact.reopen()
    elif artifact.manifest is not None:
        without = open_npy(directory / WITHOUT, locations.VERB)
        if restored := len(np.setdiff1d(without, [*index.bad_ids(), *excluded])):
            log.warning(
                "%s has no rows of %d samples that have changed since, or were in data.exclude "
                "then: trainings replace them; --force makes all rows again", directory, restored,
            )  # fmt: skip
        if written := locations.written_elsewhere(artifact.manifest, directory, folder):
            log.warning(
                "the rows of the trunk's cache were written to %s, and are looked for in %s: move "
                "them, or name trunk_cache.folder as it was", written, folder,
            )  # fmt: skip
    elif was_finished and folder.exists():  # it is made again
        files.move_aside(folder)
    elif was_begun:  # another run of this name may be writing the same rows otherwise
        files.remove_leftovers(folder)
    return artifact


def check_trunk_folder(config: Config) -> None:
    """Raises ValueError where ``trunk_cache.folder`` is none or, while rows are still to be
    written, cannot be written."""
    given = config.trunk_cache.folder
    if given is None:
        return
    above = files.nearest_existing(Path(given).expanduser())
    if not above.is_dir():
        raise ValueError(f"trunk_cache.folder={given} is a file, or below one: give a folder")
    if is_finished(Layout.of(config).trunk_cache):
        return
    try:
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        raise ValueError(
            f"trunk_cache.folder={given} cannot be written ({above}: {error.strerror}): give "
            "another folder, or have its permissions changed"
        ) from None
