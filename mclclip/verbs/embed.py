"""Verb ``embed``: index + encoder -> embeddings, one file per shard of the index.

A batch never crosses the border of a shard, so a file's content does not depend on the number of
ranks, and a killed run resumes at the first missing file. A sample that cannot be decoded has a row
of zeros, and is listed beside the file and in the index's ``bad_samples.json``.

A teacher, from which objectives learn (`distill`), is copied into the run directory once, and
embedded like a stage.

With ``image_rows.enabled`` stage 0 first writes the outputs of its frozen blocks for every image,
in the same way. All trainings and later embedding passes have the same frozen blocks, so they start
from these rows instead of images (`preparing.start_from_rows`).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mclclip.config import Config, rules
from mclclip.data.bytes import RawSample, read_excluded
from mclclip.data.extras import directory_of, draw_edits
from mclclip.data.index_tables import Shard, check_shards
from mclclip.data.row_store import IMAGE_ROWS, RowBatch, StoredRows, num_restored
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import TarDataset, tokenize
from mclclip.data.text_rows import KIND, TextRows
from mclclip.export import ExportStep
from mclclip.models import memory, weights
from mclclip.models.encoder import Encoder, counts_of, load_model
from mclclip.models.encoder_names import READS_ROWS, identify_encoder, resolve_name
from mclclip.models.loading import load_towers
from mclclip.models.model import Model, unit
from mclclip.models.options import ModelConfig
from mclclip.models.preparing import start_from_rows
from mclclip.models.transforms import defer_normalization
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import Artifact, RunPaths, is_finished, read_identity, read_manifest
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util import files
from mclclip.util.caption_rules import HardCaptions
from mclclip.util.randomness import mix
from mclclip.util.remake import Remake
from mclclip.verbs.embed_passes import Passes, forward, image_passes, made_of_shards, write_missing

log = logging.getLogger("mclclip")


def run(
    config: Config,
    context: Context,
    *,
    stage: int | None = None,
    encoder: str | None = None,
    text: bool | None = None,
    readers: Sequence[Config] = (),
    force: Remake = Remake.NOTHING,
) -> Path:
    """Embeds every image of the index with the export of ``stage``, or with a teacher (``encoder``,
    NAME@TAG or a folder); returns the directory.

    Writes ``embeddings/NNNNN.npy``, the unit features [n, D] of shard NNNNN in index order.

    With ``text`` it embeds the captions too, into ``text_embeddings``: one row per caption, in the
    order of samples. The default: those of stage 0 if clustering or training uses them, and of a
    teacher if a training does. If a training reads embeddings of ``h`` edits of each caption,
    stage 0's ``edited_texts`` has rows [h D] in the same order. The edits are drawn once, equally
    for every seed; zeros stand for missing ones. ``readers``: configurations of other runs that
    start from this stage 0; the texts that their trainings read are embedded too.

    Finished embeddings without rows for samples that have been restored since are kept, with a
    warning; any ``force`` makes them again. Raises ValueError for text if no sample has a caption,
    and for text of another stage than 0: all stages are compared with the texts of stage 0.
    """
    if text and stage:
        raise ValueError(
            f"--text with --stage {stage}: captions are embedded by stage 0 alone, leave one out"
        )
    stage = stage or 0  # a teacher has none
    layout, every = RunPaths.of(config), (config, *readers)
    index = SampleIndex.open(layout.index)
    texts: list[HardCaptions | None] = []
    parts = set[str]().union(*(reader.teachers.get(encoder or "", set()) for reader in every))
    if encoder is not None:
        texts = [None] if "text_features" in parts else []
    elif stage == 0:
        texts = [edits for reader in every for edits in reader.stored_texts]
    if text is not None:
        texts = [None, *texts] if text else []
    if texts and (without := len(index.without_caption("embed with text"))):
        log.info("embed: %d of %d samples have no caption to embed", without, len(index))
    folder = layout.stage(stage) if encoder is None else layout.encoder(encoder)
    how, options = Pass(config, context, layout, index, stage, folder, encoder), config.embed
    precision = options.dtype, options.precision
    if encoder is not None:
        collectives.on_main(partial(_export_teacher, encoder, folder / "export", force))
    elif config.writes_image_rows and stage == 0:
        blocks = collectives.on_main(partial(_count_frozen_blocks, config, layout, force))
        rows = ImageRows(config.image_rows.dtype, options.precision, blocks)
        how.embed(rows, layout.image_rows, force)
    feature = options.feature if encoder is None else "projected"
    if not parts or "image_features" in parts:  # an exact teacher sees the crops instead
        how.embed(Embeddings(*precision, feature), folder / "embeddings", force)
    for edits in texts:
        step = TextEmbeddings(*precision, None if edits is None else edits.drawn_by)
        directory = folder / "text_embeddings" if edits is None else directory_of(layout, edits)
        replace(how, edits=edits).embed(step, directory, force)
    return folder / "embeddings"


@dataclass(frozen=True)
class Pass:
    """A pass of an encoder over the images or captions of the index, or over ``edits`` of the
    captions.

    folder    that of the stage, or of the teacher ``encoder``; its ``export`` is the encoder
    """

    config: Config
    context: Context
    layout: RunPaths
    index: SampleIndex
    stage: int
    folder: Path
    encoder: str | None = None
    edits: HardCaptions | None = None

    def embed(self, step: Step[Pass], directory: Path, force: Remake) -> None:
        """Makes the embeddings of ``step``, unless they are finished."""
        make_artifact(
            step, directory, self, collectives.on_main(partial(self._remake, directory, force))
        )

    def _remake(self, directory: Path, force: Remake) -> Remake:
        """Returns ``ALL`` for any ``force`` if samples have been restored since the embeddings
        were finished; without force it warns of these samples, which have no row."""
        if not is_finished(directory):
            return force
        excluded = read_excluded(self.index, self.config.data.exclude)
        restored = num_restored(directory, self.index, excluded)
        if restored and force is Remake.NOTHING:
            log.warning(
                "%s has no rows of %d samples that have changed since, or were in data.exclude "
                "then: --force embeds them", directory, restored,
            )  # fmt: skip
        return Remake.ALL if restored and force is not Remake.NOTHING else force

    def inputs(self) -> dict[str, str]:
        """Returns the digests of the index and of the encoder."""
        kind = "export" if self.encoder is None else "teacher"
        encoder = read_manifest(self.folder / "export", kind)
        return {"index": self.index.digest, "encoder": encoder.digest}

    def load(self) -> Model | Encoder:
        """Loads the encoder on the CPU: of a stage its model, which may start from rows."""
        export = self.folder / "export"
        return load_towers(export).eval() if self.encoder is None else load_model(export)

    def source(self, model: Model | Encoder, rows: StoredRows | None = None) -> TarDataset:
        """Opens the samples as ``model`` takes them; raises if a shard has changed or is gone."""
        data = self.config.data
        collectives.on_main(partial(check_shards, self.index.directory, self.index.shards, data))
        transform = defer_normalization(model.preprocess_val)
        source = TarDataset(self.index, data, transform, image_rows=rows)
        collectives.raise_on_every_rank(source.check, "embed")
        return source

    def write(
        self, out: Artifact, passes: Callable[[Sequence[Shard]], Passes], dtype: str, *shape: int,
        **counts: object,
    ) -> Made:  # fmt: skip
        """Writes the missing files, with a row of ``shape`` per sample or caption. ``passes``
        computes the rows; ``counts`` are recorded in the manifest."""
        num_bad = write_missing(
            self.config, self.context, self.index, out.begin(), passes,
            kind=out.kind, dtype=dtype, empty=shape,
        )  # fmt: skip
        return collectives.on_main(lambda: made_of_shards(out, self.index, num_bad, counts, dtype))


@dataclass(frozen=True)
class ImageRows(Step[Pass]):
    """Outputs of the frozen blocks of stage 0's encoder, for every image."""

    kind = IMAGE_ROWS
    all_ranks = True
    dtype: str
    precision: str
    blocks: int

    def reads(self, how: Pass) -> dict[str, str]:
        """Returns the digests of the index, its pictures and the frozen blocks."""
        trunk = load_towers(how.layout.export(0)).trunk_digest(self.blocks)
        digests = {"index": how.index.digest, "pictures": how.index.pictures_digest}
        return digests | {"trunk": trunk}

    def make(self, out: Artifact, how: Pass) -> Made:
        """Writes the missing files. Raises ValueError if the disk has too little room, or a value
        is too large for ``dtype``."""
        config, context = how.config, how.context
        model = load_towers(how.layout.export(0)).eval().to(context.device)
        image = torch.zeros(1, *model.image_shape, device=context.device)

        def encode(pixels: Tensor) -> Tensor:
            return forward(config, context, partial(model.encode_trunk, pixels, self.blocks))

        def check(rows: np.ndarray) -> None:
            if not (largest := float(np.abs(rows).max())) <= float(np.finfo(self.dtype).max):
                raise ValueError(
                    f"the image rows have values (up to {largest:.3g}) that {self.dtype} does not "
                    "hold: set image_rows.dtype=float32, or look at the encoder if they are not "
                    "numbers"
                )

        shape = encode(image).shape[1:]
        size = len(how.index) * int(np.prod(shape)) * np.dtype(self.dtype).itemsize
        advice = "free some, or take another run_dir"
        room = partial(files.check_room, out.directory, size, out.directory.glob("*.npy"))
        collectives.on_main(lambda: room("writing image rows", advice))
        passes = image_passes(config, context, how.source(model), model, encode, check)
        return how.write(out, passes, self.dtype, *shape, shape=list(shape))


def _export_teacher(encoder: str, directory: Path, force: Remake) -> None:
    """Writes a teacher into the run directory, unless it is there. Raises ValueError for a name
    without weights, and the errors of ``load_model``."""
    teacher = resolve_name(encoder)
    identity = identify_encoder(ModelConfig(str(teacher.where), teacher.pretrained))

    def write(out: Path) -> dict[str, Any]:
        if teacher.concat is not None:  # it has no one model that could be saved
            for file in weights.files_of(teacher.concat):
                shutil.copyfile(teacher.concat / file, out / file)
        else:
            load_towers(teacher.where, teacher.pretrained).save(out)
        return counts_of(load_model(out))

    make_artifact(TeacherExport(identity), directory, ({}, write), force)


@dataclass(frozen=True)
class TeacherExport(ExportStep):
    """An encoder from which trainings learn; ``model``: the fields that determine it."""

    kind = "teacher"
    model: Mapping[str, Any]


def _refuse_not_finite(rows: np.ndarray) -> None:
    """Raises ValueError for features that are no numbers."""
    if not np.isfinite(rows).all():
        raise ValueError(
            "the encoder gives features that are not numbers, such as NaN: set embed.precision="
            "fp32, or take another encoder"
        )


def _count_frozen_blocks(config: Config, layout: RunPaths, force: Remake) -> int:
    """Returns the number of first blocks that no stage trains. Raises ValueError if there are none,
    and if finished embeddings were computed from images."""
    export, trained = layout.export(0), config.train.lock.image_blocks
    read_manifest(export, "export")  # if it is missing, the error says which verb makes it
    rules.check(replace(config, model=replace(config.model, name=f"local-dir:{export}")))
    embeddings = read_identity(layout.embeddings(0))
    if embeddings and "image_rows" not in embeddings["inputs"] and force is Remake.NOTHING:
        raise ValueError(
            f"{layout.embeddings(0)} was made from images, and image_rows.enabled starts from "
            "rows: use another run_dir, leave image_rows out, or --force to make it again"
        )
    assert isinstance(trained, int), "a rule refuses to train all blocks"
    return memory.load_shapes(str(export), text=False).num_blocks - trained


@dataclass(frozen=True)
class Embeddings(Step[Pass]):
    """Unit features of every image."""

    kind = "embeddings"
    all_ranks = True
    dtype: str
    precision: str
    feature: str

    def reads(self, how: Pass) -> dict[str, str]:
        """Returns the digests of the index, its pictures and the encoder, and of the image rows if
        they are read."""
        inputs = how.inputs() | {"pictures": how.index.pictures_digest}
        if how.encoder is not None:
            return inputs
        if how.config.writes_image_rows:
            inputs["image_rows"] = read_manifest(how.layout.image_rows, IMAGE_ROWS).digest
        elif how.config.image_rows.enabled and how.stage:
            inputs["image_rows"] = read_manifest(how.layout.embeddings(0), self.kind).digest
        return inputs

    def make(self, out: Artifact, how: Pass) -> Made:
        """Writes the missing files."""
        config, context = how.config, how.context
        model, rows = how.load(), None
        if "image_rows" in out.inputs:
            assert isinstance(model, Model)
            whole = not config.writes_image_rows
            open_rows = partial(StoredRows.of_images, how.layout, how.index, whole=whole)
            rows = collectives.on_main(open_rows)
            collectives.raise_on_every_rank(partial(start_from_rows, model, rows), "embed")
        source = how.source(model.to(context.device), rows)

        def features(pixels: Tensor) -> Tensor:
            if self.feature == "pooled":
                assert isinstance(model, Model)
                encode = partial(model.encode_tail, pixels, model.first_block, project=False)
            else:
                encode = partial(model.encode_image, pixels)
            return unit(forward(config, context, encode))

        passes = image_passes(config, context, source, model, features, _refuse_not_finite)
        return how.write(out, passes, self.dtype, model.embed_dim)


@dataclass(frozen=True)
class TextEmbeddings(Step[Pass]):
    """Unit features of every caption, or of the edits of each."""

    kind = "text_embeddings"
    all_ranks = True
    dtype: str
    precision: str
    drawn_by: tuple[object, ...] | None
    """All that edits depend on (``HardCaptions.drawn_by``); None for the captions themselves."""

    def reads(self, how: Pass) -> dict[str, str]:
        """Returns the digests of the index, the captions and the encoder, and of the rows that
        stand for texts."""
        inputs = how.inputs() | {"captions": how.index.captions_digest}
        if how.encoder is None and how.config.model.text_rows:
            inputs[KIND] = read_manifest(how.layout.text_rows, KIND).digest
        return inputs

    def make(self, out: Artifact, how: Pass) -> Made:
        """Writes the missing files."""
        model = how.load().to(how.context.device)
        source = how.source(model)
        if isinstance(model.tokenizer, TextRows):
            if how.encoder is not None:
                raise ValueError(f"{how.encoder} cannot embed captions: {READS_ROWS}")
            model.tokenizer = TextRows([how.layout.text_rows], model.tokenizer.width)
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
    model: Model | Encoder,
    edits: HardCaptions | None,
    shards: Sequence[Shard],
) -> Passes:
    """Yields for each shard batches of unit features [n, D] of its captions, sample after sample;
    with ``edits`` those of the h edits of each caption, [n, h D]. A caption without a row of
    ``model.text_rows`` has zeros."""
    rows = model.tokenizer if isinstance(model.tokenizer, TextRows) else None

    def caption_of(raw: RawSample, captions: Sequence[str], n: int) -> list[Any]:
        """Returns the texts that are encoded for a caption, or the places of their rows."""
        if edits is not None:
            return draw_edits(edits, raw.text, captions, n, int(mix(raw.sample_id, n)))
        if rows is None:
            return [captions[n]]
        place = rows.find_caption(source.index.keys([raw.sample_id])[0], n, captions[n])
        return [] if place is None else [place]

    num = 1 if edits is None else edits.per_caption
    size = max(config.embed.batch_size // num, 1)
    for shard in shards:
        read = source.bytes.texts_of(range(shard.start, shard.stop))
        texts = [
            caption_of(raw, captions, n) for raw, captions in read for n in range(len(captions))
        ]

        def encode_some(start: int, texts: list[list[Any]] = texts) -> RowBatch:
            some = texts[start : start + size]
            features = np.zeros((len(some), num, model.embed_dim), np.float32)
            if flat := [text for of_one in some for text in of_one]:
                tokens = tokenize(model.tokenizer, flat) if rows is None else rows.read(flat)
                encode = partial(model.encode_text, tokens.to(context.device))
                present = np.arange(num) < np.array([[len(of_one)] for of_one in some])
                features[present] = unit(forward(config, context, encode)).cpu().numpy()
                _refuse_not_finite(features)
            return features.reshape(len(some), -1), {}

        yield map(encode_some, range(0, len(texts), size))
