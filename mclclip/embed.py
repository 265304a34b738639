"""Verb: index + encoder -> embeddings, one file per shard of the index.

Batches are cut within a shard, so a file's content does not depend on the number of ranks, and a
killed run resumes at the first missing file. Undecodable samples keep their row (zeros), are
listed beside it and in the index's ``bad_samples.json``, and get the label -1.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mclclip.config import Config
from mclclip.data.embeddings import Note, num_restored, read_note, rows_path, write_shard
from mclclip.data.loader import Loader
from mclclip.data.sample_index import SampleIndex, Shard
from mclclip.data.samples import BadSample, BadSamples, Sample, TarDataset
from mclclip.data.shard_check import check_shards
from mclclip.files import digest_json
from mclclip.models.loading import AnyModel, load_any
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
    """
    if text and stage != 0:
        raise ValueError(
            f"--text with --stage {stage}: captions are embedded by stage 0 alone, leave one out"
        )
    layout = Layout.of(config, variant)
    index = SampleIndex.open(layout.index)
    images = layout.embeddings(stage)
    if text is None:
        text = stage == 0 and config.needs_text_embeddings
    jobs: list[tuple[Path, str, _EmbedShards]] = [(images, "embeddings", _embed_images)]
    if text:
        without = len(index.without_caption("embed with text"))
        if without:
            log.info("embed: %d of %d samples have no caption to embed", without, len(index))
        jobs.append((layout.text_embeddings, "text_embeddings", _embed_texts))
    for directory, kind, embed_shards in jobs:
        artifact = collectives.on_main(
            partial(_open, config, layout, stage, index, directory, kind, force)
        )
        if artifact.finished:
            log.info("%s is finished: skipped", directory)
            continue
        model = load_any(layout.export(stage)).to(context.device).eval()
        collectives.on_main(
            partial(check_shards, index.directory, index.shards, config.data.index_workers)
        )
        collectives.together(_image_dataset(config, index, model).check, "embed")
        _embed(config, context, index, model, artifact, embed_shards)
    return images


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
    restored = num_restored(directory, index) if artifacts.is_finished(directory) else 0
    if restored and not force:
        log.warning(
            "%s has no rows of %d samples that could not be read and have changed since: --force "
            "embeds them", directory, restored,
        )  # fmt: skip
    again = force if not restored else bool(force)
    return Artifact.open(directory, kind=kind, config=fields, inputs=inputs, force=again)


_Rows = tuple[np.ndarray, dict[int, str]]  # of a shard, and its undecodable samples by reason
_EmbedShards = Callable[
    [Config, Context, SampleIndex, AnyModel, Sequence[Shard]], Generator[_Rows, None, None]
]


def _embed(
    config: Config,
    context: Context,
    index: SampleIndex,
    model: AnyModel,
    artifact: Artifact,
    embed_shards: _EmbedShards,
) -> None:
    """Embeds this rank's missing shards, then finishes the artifact together."""
    directory = artifact.directory

    def work() -> dict[int, str]:
        mine = range(context.rank, len(index.shards), context.world_size)
        bad, missing = _done(directory, index, mine)
        shown = runlog.progress(missing, total=len(missing), description=artifact.kind)
        shards = [index.shards[number] for number in missing]
        with closing(embed_shards(config, context, index, model, shards)) as found:
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


def _done(
    directory: Path, index: SampleIndex, mine: Sequence[int]
) -> tuple[dict[int, str], list[int]]:
    """The undecodable samples, by reason, of the shards that are done and whose undecodable samples
    are what they were; and the numbers of the others."""
    bad: dict[int, str] = {}
    missing = []
    for number in mine:
        note = read_note(directory, number)
        if note is None or not note.is_of(index):
            missing.append(number)
        else:
            bad |= note.reasons
    return bad, missing


def _encode(config: Config, context: Context, encode: Callable[[], Tensor]) -> np.ndarray:
    bf16 = config.embed.precision == "bf16"
    with (
        torch.inference_mode(),
        torch.autocast(context.device.type, dtype=torch.bfloat16, enabled=bf16),
    ):
        features = encode()
    unit = torch.nn.functional.normalize(features.float(), dim=-1)
    array: np.ndarray = unit.cpu().numpy()
    return array


def _embed_images(
    config: Config,
    context: Context,
    index: SampleIndex,
    model: AnyModel,
    shards: Sequence[Shard],
) -> Generator[_Rows, None, None]:
    """Yields unit features [n, D] of each shard's images.

    One loader reads all shards, so that it does not stand still between them.
    """
    batches = _image_batches(config, index, model, shards)
    for shard in shards:
        parts: list[np.ndarray] = []
        bad: dict[int, str] = {}
        for samples in itertools.islice(batches, len(_cuts(config, shard))):
            bad |= {s.sample_id: s.reason for s in samples if isinstance(s, BadSample)}
            parts.append(_features_of(config, context, model, samples))
        yield _rows(parts, model), bad
    next(batches, None)  # the loader's own end


def _features_of(
    config: Config, context: Context, model: AnyModel, samples: Sequence[Sample | BadSample]
) -> np.ndarray:
    """Unit features [n, D] of a batch of images, zeros for undecodable ones."""
    size = model.image_size
    height, width = (size, size) if isinstance(size, int) else size
    good = torch.tensor([isinstance(sample, Sample) for sample in samples])
    # Zeros replace bad samples: the batch keeps its shape, so the others keep their bits.
    images = torch.zeros(len(samples), model.num_channels, height, width)
    if good.any():
        images[good] = torch.stack([s.views[0] for s in samples if isinstance(s, Sample)])
    pooled = config.embed.feature == "pooled"
    encode = partial(_image_features, model, images.to(context.device), pooled)
    features = _encode(config, context, encode)
    features[~good.numpy()] = 0.0
    return features


def _rows(parts: list[np.ndarray], model: AnyModel) -> np.ndarray:
    """The concatenated parts [n, D]; n is 0 if there are none."""
    return np.concatenate(parts) if parts else np.zeros((0, model.embed_dim), np.float32)


def _image_features(model: AnyModel, images: Tensor, pooled: bool) -> Tensor:
    if pooled:
        return model.encode_tail(model.encode_trunk(images, 0), 0, project=False)
    return model.encode_image(images)


def _image_dataset(config: Config, index: SampleIndex, model: AnyModel) -> TarDataset:
    return TarDataset(
        index,
        transform=model.preprocess_val,
        reads_captions=False,
        max_image_pixels=config.data.max_image_pixels,
        max_open_files=config.data.max_open_files,
        check_pixels=config.data.verify == "full",
        remote=config.data.remote,
    )


def _cuts(config: Config, shard: Shard) -> list[range]:
    """The batches of a shard, as ranges of sample ids."""
    size = config.embed.batch_size
    starts = range(shard.start, shard.stop, size)
    return [range(start, min(start + size, shard.stop)) for start in starts]


def _image_batches(
    config: Config, index: SampleIndex, model: AnyModel, shards: Sequence[Shard]
) -> Iterator[list[Sample | BadSample]]:
    dataset = _image_dataset(config, index, model)
    cuts = [cut for shard in shards for cut in _cuts(config, shard)]
    workers = min(config.data.num_workers, max(len(cuts) - 1, 0))  # none for a single batch

    def describe(ids: range, place: int) -> str:
        path = index.shards[int(index.shard_of[ids[0]])].path
        return f"the batch of samples {ids[0]} to {ids[-1]} of shard {path}"

    return iter(Loader(dataset, cuts, num_workers=workers, describe=describe, batched=True))


def _embed_texts(
    config: Config,
    context: Context,
    index: SampleIndex,
    model: AnyModel,
    shards: Sequence[Shard],
) -> Generator[_Rows, None, None]:
    """Yields unit features [captions of the shard, D] of each shard, in the order of (sample,
    caption number)."""
    dataset = TarDataset(
        index,
        transform=None,
        reads_captions=False,
        max_image_pixels=config.data.max_image_pixels,
        max_open_files=config.data.max_open_files,
        remote=config.data.remote,
    )
    size = config.embed.batch_size
    for shard in shards:
        captions = [c for of in dataset.captions_of(range(shard.start, shard.stop)) for c in of]
        parts = []
        for start in range(0, len(captions), size):
            tokens = model.tokenizer(captions[start : start + size]).to(context.device)
            parts.append(_encode(config, context, partial(model.encode_text, tokens)))
        yield _rows(parts, model), {}
