"""Verb: samples and pseudo labels -> copies of the samples, in shards in the order of the groups.

A training reads the samples of a batch at random places. In these shards a group lies in one piece,
and neighbours in it that ``train.plan.block`` keeps together are read at once. The plan is the same
for both forms, and so are batches, weights and results.

The order is that of a grouped index: by pseudo label, and by sample_id within a group. Which sample
stands in which shard follows from it alone, so that processes write shards side by side, and a
killed one leaves nothing but whole shards behind. A shard is read again before it gets its name:
its members must have the names, sizes and checksums of what was copied.

    00007.tar  SOURCE/KEY.jpg SOURCE/KEY.txt ...   as any WebDataset reader takes them
    00007.npy  int64 [n, 4]: where image and captions of each sample begin, and the CRC-32 of each;
               written last

A sample has its image and the member with its captions there; its other members stay behind. Where
its key is an absolute path or has ``..``, which would lead out of the folder that somebody unpacks
the tar in, its sample_id names its members; a training does not read their names. A sample
whose bytes are not those of the index, or are cut short, is not copied, and read where it was.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from webdataset.writer import TarWriter

from mclclip import files
from mclclip.config import Config
from mclclip.data.arrays import open_npy, save_npy, write_npy_parts
from mclclip.data.groups import GroupedIndex, LabelBlocks, StageGroups
from mclclip.data.index_tables import check_shards
from mclclip.data.labels import read_pseudo_labels
from mclclip.data.locations import GROUPS, KIND, MEMBERS, SIZES, Locations, SampleRanges, shard_name
from mclclip.data.options import DataConfig
from mclclip.data.remote import RemoteOptions
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_reader import ShardReader
from mclclip.data.shard_scan import caption_fields
from mclclip.data.shard_writer import image_extension
from mclclip.data.tar_members import TarFault, read_members
from mclclip.options import protocol_of
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.ranks.workers import map_in_pool
from mclclip.run import runlog
from mclclip.run.artifacts import Artifact, Force, Layout, is_finished, refuse_foreign

log = logging.getLogger("mclclip")

Integers = npt.NDArray[np.int64]
TRUNCATED, CHANGED = -1, -2
REASONS = {TRUNCATED: "truncated", CHANGED: "changed"}
"""Negative offset of an image -> reason why its sample was not copied."""

Left = dict[int, int]
"""Sample id -> its negative offset, of samples that were not copied."""

_HEADERS_BYTES = 2048  # of a sample in a tar at most, for names of usual length
_TAR_BYTES = 10_240  # of a tar's end
_SHOWN = 3  # samples that are not copied, in a log line
_WINDOW_BYTES = 1 << 26  # of samples that are read before they are written


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
                for of_shard in runlog.progress(written, total=len(mine), description=what):
                    left |= of_shard
                    index.check_bad_fraction(left, config.data.max_bad_fraction)
        finally:
            _opened.cache_clear()
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
) -> tuple[Artifact, Copies, int] | None:
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
    check_shards(index.directory, index.shards, config.data)
    needed = int(index.image_size.sum()) + int(index.text_size.sum()) + _HEADERS_BYTES * len(index)
    needed += _TAR_BYTES * -(-len(index) // config.reshard.samples_per_shard)
    begun = [] if is_finished(directory) else directory.glob("*.tar")  # a finished one is moved
    files.check_room(directory, needed, begun, "the copy", "name another disk in reshard.folder")
    blocks = LabelBlocks(labels, radices)
    sizes = blocks.sizes()
    if not sizes.num_samples:
        raise ValueError(f"no sample has a pseudo label of stage {stage}: there is nothing to copy")
    artifact = open_artifact(write=True)
    groups = StageGroups(directory / GROUPS)
    if not groups.written:
        groups.write(blocks, sizes, np.zeros(0, np.int64))
    of = Copies(
        index.directory, index.digest, groups.directory, directory,
        config.reshard.samples_per_shard, config.data.max_open_files, config.data.remote,
    )  # fmt: skip
    GroupedIndex.open(groups.directory, "reshard")  # of a call that was killed, perhaps
    return artifact, of, -(-sizes.num_samples // of.samples_per_shard)


def _finish(
    artifact: Artifact, of: Copies, num_shards: int, index: SampleIndex, left: list[Left]
) -> None:
    """Joins the notes of all shards, and removes them once the artifact is finished."""
    directory = artifact.directory
    grouped = GroupedIndex.open(of.grouped, compare=False)
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
        some = index.names(sorted(not_copied)[:_SHOWN])
        log.warning(
            "reshard: %d samples cannot be copied (%s) and are read where they were, such as %s",
            len(not_copied), ", ".join(f"{n} {why}" for why, n in reasons.items()),
            files.clean(", ".join(some)),
        )  # fmt: skip


# --- one shard after the other, in any process ----------------------------------------------


@dataclass(frozen=True)
class Copies:
    """Arguments of ``write_shard`` that are the same for all shards.

    grouped  folder of the grouped index, whose samples are copied in its order
    """

    index: Path
    index_digest: str
    grouped: Path
    directory: Path
    samples_per_shard: int
    max_open_files: int
    remote: RemoteOptions

    def tar(self, number: int) -> Path:
        """A shard."""
        return self.directory / shard_name(number)

    def note(self, number: int) -> Path:
        """Where the samples of a shard are in it; marks it as done."""
        return self.tar(number).with_suffix(".npy")

    def members(self, number: int) -> Integers | None:
        """int64 [n, 4] of a shard that is done; None for another."""
        try:
            return open_npy(self.note(number), "reshard") if self.tar(number).exists() else None
        except (FileNotFoundError, RuntimeError):  # it was not written, or lost in a crash
            return None


class _Source:
    """The index and the shards that samples are read from."""

    def __init__(self, of: Copies) -> None:
        self.index = SampleIndex(of.index, of.index_digest)
        self.sample_ids = GroupedIndex.open(of.grouped, compare=False).sample_ids
        self.locations = Locations(self.index)
        data = DataConfig(max_open_files=of.max_open_files, remote=of.remote)
        self.reader = ShardReader(self.locations.files, data)

    def read(self, ids: Integers) -> Iterator[tuple[int, list[bytes]]]:
        """Yields for each sample 0 and its image and captions (empty: there are none), or a number
        of ``REASONS`` and nothing. Some are read at once, in the order in which they lie."""
        sizes = self.index.image_size[ids] + self.index.text_size[ids]
        windows = np.cumsum(sizes) // _WINDOW_BYTES
        for window in np.split(ids, np.flatnonzero(np.diff(windows)) + 1):
            located = self.locations.of(window)
            self.reader.prefetch(r for own in located for r in (own.image, own.text) if r[2])
            order = sorted(range(len(window)), key=lambda k: located[k])
            samples = {k: self._sample(int(window[k]), located[k]) for k in order}
            yield from (samples[k] for k in range(len(window)))

    def _sample(self, sample_id: int, located: SampleRanges) -> tuple[int, list[bytes]]:
        ranges = (located.image, located.text)
        members = [self.reader.read(*r) if r[2] else b"" for r in ranges]
        if [len(data) for data in members] != [size for _, _, size in ranges]:
            return TRUNCATED, []
        crc32s = (self.index.image_crc32, self.index.text_crc32)
        for data, known in zip(members, crc32s, strict=True):
            if data and known is not None and zlib.crc32(data) != known[sample_id]:
                return CHANGED, []
        return 0, members

    def names(self, ids: Integers) -> list[tuple[str, str]]:
        """The names of samples in a tar, and the extensions of their captions.

        A name is the key, or the sample_id where the key, a stranger's, is an absolute path or has
        ``..``. A key has its source before a slash, and a number has no slash: no two samples have
        one name.
        """
        names = []
        for sample_id, key in zip(ids.tolist(), self.index.keys(ids), strict=True):
            leads_out = not {"", ".."}.isdisjoint(re.split(r"[/\\]", key))
            captions = self.index.shards[int(self.index.shard_of[sample_id])].captions
            extension = "json" if caption_fields(captions) else "txt"
            names.append((f"{sample_id:09d}" if leads_out else key, extension))
        return names


_opened = lru_cache(maxsize=1)(_Source)  # once in a process


def write_shard(of: Copies, number: int) -> Left:
    """Writes a shard and the note on it, unless they are there; returns the samples that were not
    copied, and why.

    Raises RuntimeError where a shard does not hold what was written, and the errors of the reader.
    """
    source = _opened(of)
    start = number * of.samples_per_shard
    ids = np.asarray(source.sample_ids[start : start + of.samples_per_shard])
    members = of.members(number)
    if members is None or not _is_whole(of.tar(number), members, source.index, ids):
        members = _write(of.tar(number), source, ids)
        save_npy(of.note(number), members)
    left = np.flatnonzero(members[:, 0] < 0)
    return {int(ids[row]): int(members[row, 0]) for row in left}


def _is_whole(path: Path, members: Integers, index: SampleIndex, ids: Integers) -> bool:
    """Whether a note is one on these samples, and the shard is as long as it says."""
    if members.shape != (len(ids), 4):
        return False
    sizes = np.stack([index.image_size[ids], index.text_size[ids]], axis=1)
    end = int((members[:, :2] + sizes)[members[:, 0] >= 0].max(initial=0))
    return path.stat().st_size >= end


def _write(path: Path, source: _Source, ids: Integers) -> Integers:
    """Writes the samples to a tar; returns what its note holds, int64 [n, 4]."""
    members = np.zeros((len(ids), 4), dtype=np.int64)
    written: dict[str, tuple[int, int, int]] = {}  # row, column and CRC-32 of each member
    options: dict[str, Any] = {"user": "mclclip", "group": "mclclip", "mtime": 0, "encoder": False}
    with files.whole_file(path) as file:
        # Names of any length, which the default (ustar) does not take.
        with TarWriter(file, format="PAX_FORMAT", **options) as writer:
            samples = zip(source.names(ids), source.read(ids), strict=True)
            for row, ((name, extension), (reason, data)) in enumerate(samples):
                members[row, 0] = reason
                if not data:
                    continue
                # An image that no reader will decode is named as a JPEG.
                kind = image_extension(data[0]) or "jpg"
                own = {kind: data[0], extension: data[1]} if data[1] else {kind: data[0]}
                writer.write({"__key__": name, **own})
                for column, (suffix, content) in enumerate(own.items()):
                    written[f"{name}.{suffix}"] = row, column, zlib.crc32(content)
        file.flush()
        _read_back(Path(file.name), path, written, members)
    return members


def _read_back(
    temporary: Path, path: Path, written: dict[str, tuple[int, int, int]], members: Integers
) -> None:
    """Compares the members of a tar with what was written, and notes where they begin.

    Raises RuntimeError where they differ.
    """
    with open(temporary, "rb") as file:
        try:
            for member in read_members(file) if written else ():
                row, column, crc32 = written.pop(member.name, (0, 0, None))
                data = os.pread(file.fileno(), member.size, member.offset)
                if zlib.crc32(data) != crc32:
                    raise TarFault("damaged_shard", f"{member.name} is not what was written")
                members[row, [column, 2 + column]] = member.offset, crc32
        except TarFault as fault:
            raise RuntimeError(f"{path} does not hold what was written: {fault}") from fault
    if written:
        raise RuntimeError(f"{path} lacks {len(written)} members, such as {next(iter(written))!r}")
