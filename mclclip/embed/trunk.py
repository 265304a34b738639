"""The cache of the trunk: what the frozen blocks make of every image, written once at stage 0.

Stages, controls and later embedding passes have the same frozen blocks, so they start from these
rows (``data.trunk_rows``) instead of images. The pass is cut into shards as that of embeddings.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mclclip import files
from mclclip.config import Config
from mclclip.data import trunk_rows
from mclclip.data.arrays import open_npy
from mclclip.data.row_store import all_notes, is_damaged, join_checksums, rows_path
from mclclip.data.sample_index import SampleIndex, Shard
from mclclip.data.shard_check import check_shards
from mclclip.data.trunk_rows import CHECKSUMS, recorded_folder
from mclclip.embed import images as image_pass
from mclclip.models import memory
from mclclip.models.loading import load_towers, prepare_model
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import Artifact, Force, is_finished, made_of, read_manifest
from mclclip.run.layout import Layout

log = logging.getLogger("mclclip")


def write(
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
    artifact = collectives.on_main(lambda: _open(config, layout, index, blocks, trunk, force))
    if artifact.finished:
        log.info("%s is finished: skipped", artifact.directory)
        return
    collectives.on_main(lambda: check_shards(index.directory, index.shards, config.data))
    images = image_pass.ImagePass(config, context, index, model)
    collectives.together(images.source.check, "embed")
    with torch.inference_mode():
        of_one = model.encode_trunk(torch.zeros(1, *images.shape), blocks)
    shape, dtype = tuple(of_one.shape[1:]), config.trunk_cache.dtype
    folder = layout.trunk_rows(config.trunk_cache.folder, artifact.identity)
    size = len(index) * int(np.prod(shape)) * np.dtype(dtype).itemsize
    collectives.on_main(lambda: _check_room(folder, size))
    model.to(context.device)

    def encode(pixels: Tensor) -> np.ndarray:
        run = partial(model.encode_trunk, pixels, blocks)
        return image_pass.forward(config, context, run).cpu().numpy()

    def passes(shards: Sequence[Shard]) -> image_pass.Passes:
        with closing(images.by_shard(shards, encode)) as made:
            for batches in made:
                yield ((_stored(rows, dtype), bad) for rows, bad in batches)

    full_disk = files.full_disk_names(folder, "trunk_cache.folder")
    num_bad = image_pass.write_missing(
        config, context, index, folder, passes, kind=trunk_rows.KIND, full_disk=full_disk,
        dtype=dtype, empty=shape, checksums=True,
    )  # fmt: skip

    def finish() -> None:
        join_checksums(artifact.directory / CHECKSUMS, folder, index)
        notes = all_notes(folder, len(index.shards)).values()
        without = sorted(sample_id for note in notes for sample_id in note.reasons)
        artifact.finish(
            {"samples": len(index), "shards": len(index.shards), "bad_samples": num_bad}
            | {"shape": list(shape), "rows": recorded_folder(artifact.directory, folder)},
            dtype=dtype,
            content_digest=files.digest_json([artifact.identity, without]) if without else None,
            records=files.records_of(artifact.directory, CHECKSUMS),
        )
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
    """Number of first blocks that no stage trains; ValueError for none."""
    model = memory.load_shapes(str(layout.export(0)), text=config.model.text)
    with memory.faked(model):
        arguments = config.train.model_arguments() | {"precision": "fp32"}
        prepare_model(model, **arguments, seed=config.seed)
    if not model.num_frozen_blocks:
        raise ValueError(
            f"trunk_cache.enabled, but train.lock.image_blocks={config.train.lock.image_blocks} "
            f"trains all of the image tower's {model.layout.counted}: lower it, or leave "
            "trunk_cache out"
        )
    return model.num_frozen_blocks


def _open(
    config: Config,
    layout: Layout,
    index: SampleIndex,
    blocks: int,
    trunk: str,
    force: Force,
) -> Artifact:
    check_folder(config)
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
        kind=trunk_rows.KIND,
        config={
            "blocks": blocks,
            "dtype": config.trunk_cache.dtype,
            "precision": config.embed.precision,
        },
        inputs={"index": index.digest, "trunk": trunk},
        force=force,
    )
    folder = layout.trunk_rows(given, artifact.identity)
    if artifact.manifest is not None and force:
        _mend(artifact, folder, index, config.data.index_workers)
    elif artifact.manifest is not None:
        _warn_of_what_differs(artifact, folder, index)
    elif was_finished and folder.exists():  # it is made again
        files.move_aside(folder)
    elif was_begun:  # another run of this name may be writing the same rows otherwise
        files.remove_leftovers(folder)
    return artifact


def check_folder(config: Config) -> None:
    """Raises ValueError where ``trunk_cache.folder`` is none or, while rows are still to be
    written, cannot be written."""
    given = config.trunk_cache.folder
    if given is None:
        return
    above = files.existing(Path(given).expanduser())
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


def _mend(artifact: Artifact, folder: Path, index: SampleIndex, threads: int) -> None:
    """Reads all rows; removes the shards that are damaged, which are then made again.

    Rows that are all gone were deleted on purpose, as one may once all is trained.
    """
    if not folder.exists():
        return
    checksums = open_npy(artifact.directory / CHECKSUMS, trunk_rows.VERB)

    def damaged_in(number: int) -> bool:
        shard = index.shards[number]
        return is_damaged(folder, number, checksums[shard.start : shard.stop].tolist())

    with ThreadPoolExecutor(threads) as pool:
        checked = pool.map(damaged_in, range(len(index.shards)))
        damaged = [number for number, is_so in enumerate(checked) if is_so]
    if damaged:
        log.warning("%s: %d shards of rows are damaged and made again", folder, len(damaged))
        for number in damaged:
            rows_path(folder, number).unlink(missing_ok=True)
        artifact.reopen()


def _warn_of_what_differs(artifact: Artifact, folder: Path, index: SampleIndex) -> None:
    """Warns of samples that have no row and could have one now, and where the rows lie if that is
    not where the options say."""
    assert artifact.manifest is not None, "it is finished"
    directory = artifact.directory
    without = np.flatnonzero(open_npy(directory / CHECKSUMS, trunk_rows.VERB) == -1)
    if restored := len(np.setdiff1d(without, index.bad_ids())):
        log.warning(
            "%s has no rows of %d samples that could not be read and have changed since: they are "
            "replaced in trainings; --force makes all rows again", directory, restored,
        )  # fmt: skip
    if written := trunk_rows.written_elsewhere(artifact.manifest, directory, folder):
        log.warning(
            "the rows of the trunk's cache were written to %s, and are looked for in %s: move "
            "them, or name trunk_cache.folder as it was", written, folder,
        )  # fmt: skip


def _check_room(folder: Path, needed: int) -> None:
    """Raises ValueError where the disk has no room for the shards that are not there yet."""
    there = sum(path.stat().st_size for path in folder.glob("*.npy"))
    free = shutil.disk_usage(files.existing(folder)).free
    if needed - there > free:
        raise ValueError(
            f"the trunk's cache needs about {(needed - there) / 2**30:.3g} GiB, the disk of "
            f"{folder} has {free / 2**30:.3g} GiB free: name another disk in trunk_cache.folder, "
            "or remove older rows (.old-1 and so on)"
        )
