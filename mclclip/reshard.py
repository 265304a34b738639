"""Verb: samples and pseudo labels -> copies of the samples, in shards in the order of the groups.

A training reads the samples of a batch at random places. In these shards a group lies in one piece,
and neighbours in it that ``train.plan.block`` keeps together are read at once. The plan is the same
for both forms, and so are batches, weights and results.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from mclclip import files
from mclclip.config import Config
from mclclip.data import resharding
from mclclip.data.arrays import write_npy_parts
from mclclip.data.grouping import LabelBlocks
from mclclip.data.groups import GroupedIndex, StageGroups
from mclclip.data.labels import read_pseudo_labels
from mclclip.data.locations import GROUPS, KIND, MEMBERS, SIZES
from mclclip.data.remote import protocol_of
from mclclip.data.resharding import REASONS, Resharding, write_shard
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_check import check_shards
from mclclip.ranks import collectives
from mclclip.ranks.parent_death import map_in_pool
from mclclip.ranks.process_group import Context
from mclclip.run import runlog
from mclclip.run.artifacts import Artifact, Force, is_finished, refuse_foreign
from mclclip.run.layout import Layout

log = logging.getLogger("mclclip")

_HEADERS_BYTES = 2048  # of a sample in a tar at most, for names of usual length
_TAR_BYTES = 10_240  # of a tar's end
_SHOWN = 3  # samples that are not copied, in a log line
Left = dict[int, int]  # sample_id -> one of ``REASONS``


def run(config: Config, context: Context, *, stage: int, force: Force = False) -> Path:
    """Copies every sample that has a pseudo label of ``stage``; returns the directory.

    Shards are dealt out to ranks, and of a rank to ``data.index_workers`` processes. A killed run
    goes on at the first shard that is missing. Samples that are cut short or have changed since
    they were indexed are not copied, but counted: a training finds them where they were. Raises
    ValueError where the stage has no groups, the disk has too little room, or more samples than
    ``data.max_bad_fraction`` cannot be copied.
    """
    layout = Layout.of(config)
    check(config, stage)
    directory = layout.resharded(stage, config.reshard.folder)
    named = files.full_disk_names(directory, "reshard.folder")
    index = collectives.on_main(lambda: SampleIndex.open(layout.index))
    begun = collectives.on_main(named(partial(_begin, config, layout, stage, index, force)))
    if begun is None:
        log.info("%s is finished: skipped", directory)
        return directory
    artifact, of, num_shards = begun
    mine = range(context.rank, num_shards, context.world_size)

    def copy() -> Left:
        left: Left = {}
        calls = [(of, number) for number in mine]
        try:
            with closing(map_in_pool(write_shard, calls, config.data.index_workers)) as written:
                what = "reshard, shards"
                for found in runlog.progress(written, total=len(mine), description=what):
                    left |= found
                    index.check_bad_fraction(len(left), config.data.max_bad_fraction)
        finally:
            resharding.close()
        return left

    left = collectives.gather_objects(collectives.together(named(copy), "reshard"))
    collectives.on_main(named(partial(_finish, artifact, of, num_shards, index, left)))
    return directory


def check(config: Config, stage: int = 1) -> None:
    """Raises ValueError where a stage is not trained on groups, or the folder is none."""
    objective, folder = config.train.objective, config.reshard.folder
    if stage < 1 or not objective.reads.groups:
        raise ValueError(
            f"reshard: stage {stage} under train.objective.kind={objective.kind} is not trained on "
            "groups of samples: name a stage from 1 on, of a method that reads groups"
        )
    if folder is not None and protocol_of(folder) is not None:
        raise ValueError(f"reshard.folder={folder} is a url: give a folder of a disk")
    if folder is not None and Path(folder).expanduser().is_file():
        raise ValueError(f"reshard.folder={folder} is a file: give a folder")


def _begin(
    config: Config, layout: Layout, stage: int, index: SampleIndex, force: Force
) -> tuple[Artifact, Resharding, int] | None:
    """Checks the inputs, and sorts the samples by group on disk, unless they are; returns what is
    to be written and the number of shards, None where all is finished."""
    directory = layout.resharded(stage, config.reshard.folder)
    refuse_foreign(directory, "reshard.folder")
    labels, radices, digest = read_pseudo_labels(layout.pseudo_labels(stage), index)
    open_artifact = partial(
        Artifact.open, directory, kind=KIND,
        config={"stage": stage, "samples_per_shard": config.reshard.samples_per_shard},
        inputs={"index": index.digest, "pseudo_labels": digest}, force=force,
    )  # fmt: skip
    if open_artifact(write=False).finished:
        return None
    check_shards(index.directory, index.shards, config.data.index_workers, config.data.remote)
    _check_room(directory, index, config.reshard.samples_per_shard)
    blocks = LabelBlocks(labels, radices)
    sizes = blocks.sizes()
    if not sizes.num_samples:
        raise ValueError(f"no sample has a pseudo label of stage {stage}: there is nothing to copy")
    artifact = open_artifact(write=True)
    groups = StageGroups(directory / GROUPS)
    if not groups.written:
        groups.write(blocks, sizes, np.zeros(0, np.int64))
    of = Resharding(
        artifact.identity, index.directory, index.digest, groups.directory, directory,
        config.reshard.samples_per_shard, config.data.max_open_files, config.data.remote,
    )  # fmt: skip
    GroupedIndex.open(groups.directory, "reshard")  # of a call that was killed, perhaps
    return artifact, of, -(-sizes.num_samples // of.samples_per_shard)


def _check_room(directory: Path, index: SampleIndex, per_shard: int) -> None:
    """Raises ValueError where the disk has no room for the shards that are not there yet."""
    bytes_ = int(index.image_size.sum()) + int(index.text_size.sum())
    needed = bytes_ + _HEADERS_BYTES * len(index) + _TAR_BYTES * -(-len(index) // per_shard)
    begun = [] if is_finished(directory) else directory.glob("*.tar")  # a finished one is moved
    there = sum(path.stat().st_size for path in begun)
    free = shutil.disk_usage(files.existing(directory)).free
    if needed - there > free:
        raise ValueError(
            f"{directory} needs about {(needed - there) / 2**30:.3g} GiB, its disk has "
            f"{free / 2**30:.3g} GiB free: name another disk in reshard.folder"
        )


def _finish(
    artifact: Artifact, of: Resharding, num_shards: int, index: SampleIndex, left: list[Left]
) -> None:
    """Joins the notes of all shards, and removes them once the artifact is finished."""
    directory = artifact.directory
    grouped = GroupedIndex.mapped(of.grouped)
    with write_npy_parts(directory / MEMBERS, (grouped.num_samples, 4), np.int64) as append:
        for number in range(num_shards):
            members = of.members(number)
            if members is None:
                raise RuntimeError(f"{of.tar(number)} is gone: run 'mclclip reshard' again")
            append(members)
    sizes = [of.tar(number).stat().st_size for number in range(num_shards)]
    files.write_json(directory / SIZES, sizes)
    not_copied = {sample_id: why for part in left for sample_id, why in part.items()}
    reasons = Counter(REASONS[why] for why in not_copied.values())
    counts = {
        "samples": grouped.num_samples - len(not_copied),
        "shards": num_shards,
        "size_bytes": sum(sizes),
        "without_label": len(index) - grouped.num_samples,
        "not_copied": dict(reasons),
    }
    artifact.finish(counts, records=files.records_of(directory, MEMBERS, SIZES))
    for number in range(num_shards):
        of.note(number).unlink(missing_ok=True)
    log.info(
        "reshard: %d samples in %d groups are in %d shards (%.2f GiB) at %s; %d have no pseudo "
        "label and are not copied",
        counts["samples"], grouped.num_groups, num_shards, sum(sizes) / 2**30, directory,
        counts["without_label"],
    )  # fmt: skip
    if not_copied:
        some = index.keys(sorted(not_copied)[:_SHOWN])
        log.warning(
            "reshard: %d samples cannot be copied (%s) and are read where they were, such as %s",
            len(not_copied), ", ".join(f"{n} {why}" for why, n in reasons.items()),
            files.shown(", ".join(some)),
        )  # fmt: skip
