"""The cache of the trunk: what the frozen blocks make of every image, written once at stage 0.

Stages, controls and later embedding passes have the same frozen blocks, so they start from these
rows (``data.trunk_rows``) instead of images. The pass is cut into shards as that of embeddings.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mclclip import files
from mclclip.config import Config
from mclclip.data import trunk_rows
from mclclip.data.arrays import open_npy
from mclclip.data.bad_samples import BadSamples
from mclclip.data.embeddings import rows_path, shards_done
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_check import check_shards
from mclclip.data.trunk_rows import CHECKSUMS
from mclclip.embed import images
from mclclip.models import memory
from mclclip.models.loading import load_towers, prepare_model
from mclclip.models.model import Model
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import runlog
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
    fields: dict[str, Any] = {"blocks": blocks, "dtype": config.trunk_cache.dtype}
    fields["precision"] = config.embed.precision
    inputs = {"index": index.digest, "trunk": model.trunk_digest(blocks)}
    artifact = collectives.on_main(
        partial(_open, config, layout, index, fields, inputs, force=force)
    )
    if artifact.finished:
        log.info("%s is finished: skipped", artifact.directory)
        return
    workers, remote = config.data.index_workers, config.data.remote
    collectives.on_main(lambda: check_shards(index.directory, index.shards, workers, remote))
    collectives.together(images.dataset(config, index, model).check, "embed")
    shape = _shape(model, blocks)
    folder = layout.trunk_rows(config.trunk_cache.folder, artifact.identity)
    collectives.on_main(lambda: _check_room(folder, index, shape, config.trunk_cache.dtype))
    model.to(context.device)
    named = files.full_disk_names(folder, "trunk_cache.folder")
    work = named(partial(_work, config, context, index, model, folder, blocks, shape))
    found = collectives.together(work, "embed")
    num_bad = BadSamples(index, config.data.max_bad_fraction).share(found)
    without = collectives.gather_objects(sorted(found))

    def finish() -> None:
        trunk_rows.join_checksums(artifact.directory, folder, index)
        lost = sorted(sample_id for part in without for sample_id in part)
        artifact.finish(
            {"samples": len(index), "shards": len(index.shards), "bad_samples": num_bad}
            | {"shape": list(shape), "rows": trunk_rows.where(artifact.directory, folder)},
            dtype=config.trunk_cache.dtype,
            content_digest=files.digest_json([artifact.identity, lost]) if lost else None,
            records=files.records_of(artifact.directory, CHECKSUMS),
        )

        size = len(index) * int(np.prod(shape)) * np.dtype(config.trunk_cache.dtype).itemsize
        log.info(
            "embed: what %d blocks make of %d images is in %s (%.3g GiB); %d have no row",
            blocks, len(index), folder, size / 2**30, len(lost),
        )  # fmt: skip

    collectives.on_main(finish)


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


def _shape(model: Model, blocks: int) -> tuple[int, ...]:
    with torch.inference_mode():
        hidden = model.encode_trunk(torch.zeros(1, *images.row_shape(model)), blocks)
    return tuple(hidden.shape[1:])


def _open(
    config: Config,
    layout: Layout,
    index: SampleIndex,
    fields: dict[str, Any],
    inputs: dict[str, str],
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
        directory, kind=trunk_rows.KIND, config=fields, inputs=inputs, force=force
    )
    folder = layout.trunk_rows(given, artifact.identity)
    if artifact.manifest is not None and force:
        _mend(artifact, folder, index, config.data.index_workers)
    elif artifact.manifest is not None:
        _warn_of_restored(directory, index)
        _warn_of_folder(artifact, folder)
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
    damaged = [*trunk_rows.damaged_shards(folder, index, checksums, threads)]
    if damaged:
        log.warning("%s: %d shards of rows are damaged and made again", folder, len(damaged))
        for number in damaged:
            rows_path(folder, number).unlink(missing_ok=True)
        artifact.reopen()


def _warn_of_folder(artifact: Artifact, folder: Path) -> None:
    """Says where rows lie that are not where the options say."""
    assert artifact.manifest is not None, "it is finished"
    if written := trunk_rows.written_elsewhere(artifact.manifest, artifact.directory, folder):
        log.warning(
            "the rows of the trunk's cache were written to %s, and are looked for in %s: move "
            "them, or name trunk_cache.folder as it was", written, folder,
        )  # fmt: skip


def _warn_of_restored(directory: Path, index: SampleIndex) -> None:
    """Says how many samples have no row and could have one now."""
    without = np.flatnonzero(open_npy(directory / CHECKSUMS, trunk_rows.VERB) == -1)
    if restored := len(np.setdiff1d(without, index.bad_ids())):
        log.warning(
            "%s has no rows of %d samples that could not be read and have changed since: they are "
            "replaced in trainings; --force makes all rows again", directory, restored,
        )  # fmt: skip


def _check_room(folder: Path, index: SampleIndex, shape: tuple[int, ...], dtype: str) -> None:
    """Raises ValueError where the disk has no room for the shards that are not there yet."""
    needed = len(index) * int(np.prod(shape)) * np.dtype(dtype).itemsize
    there = sum(path.stat().st_size for path in folder.glob("*.npy"))
    free = shutil.disk_usage(files.existing(folder)).free
    if needed - there > free:
        raise ValueError(
            f"the trunk's cache needs about {(needed - there) / 2**30:.3g} GiB, the disk of "
            f"{folder} has {free / 2**30:.3g} GiB free: name another disk in trunk_cache.folder, "
            "or remove older rows (.old-1 and so on)"
        )


def _work(
    config: Config,
    context: Context,
    index: SampleIndex,
    model: Model,
    folder: Path,
    blocks: int,
    shape: tuple[int, ...],
) -> dict[int, str]:
    """Writes this rank's missing shards; returns its samples without a row, by reason."""
    mine = range(context.rank, len(index.shards), context.world_size)
    bad, missing = shards_done(folder, index, mine)
    shards = [index.shards[number] for number in missing]

    def encode(pixels: Tensor) -> np.ndarray:
        run = partial(model.encode_trunk, pixels, blocks)
        rows: np.ndarray = images.forward(config, context, run).cpu().numpy()
        return rows

    source = images.dataset(config, index, model)
    of_images = images.row_shape(model)
    shown = runlog.progress(missing, total=len(missing), description=trunk_rows.KIND)
    passes = images.by_shard(config, context, source, of_images, shards, encode)
    with closing(passes):
        for number, batches in zip(shown, passes, strict=True):
            dtype = config.trunk_cache.dtype
            bad |= trunk_rows.write_rows(folder, number, shape, dtype, batches, index)
            index.check_bad_fraction(len(bad), config.data.max_bad_fraction)
    return bad
