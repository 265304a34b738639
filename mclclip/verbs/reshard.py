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

import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from webdataset.writer import TarWriter

from mclclip.config import Config
from mclclip.data.arrays import write_npy_parts
from mclclip.data.groups import GroupedIndex, LabelBlocks, StageGroups
from mclclip.data.index_tables import check_shards
from mclclip.data.labels import read_pseudo_labels
from mclclip.data.locations import GROUPS, KIND, MEMBERS, Locations, SampleRanges, shard_name
from mclclip.data.options import DataConfig
from mclclip.data.remote import RemoteOptions
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_reader import ShardReader
from mclclip.data.shard_scan import caption_fields
from mclclip.data.shard_writer import image_extension
from mclclip.data.tar_members import read_members
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.ranks.workers import map_in_pool
from mclclip.run import runlog
from mclclip.run.artifacts import Artifact, Force, Layout, is_finished, refuse_foreign
from mclclip.util import files
from mclclip.util.options import protocol_of

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
    GroupedIndex.open(groups.directory, "reshard")  # a call that was killed may have written it
    return artifact, of, -(-sizes.num_samples // of.samples_per_shard)


def _finish(
    artifact: Artifact, of: Copies, num_shards: int, index: SampleIndex, left: list[Left]
) -> None:
    """Joins the notes of all shards, and removes them once the artifact is finished."""
    directory = artifact.directory
    grouped = GroupedIndex.open(of.grouped)
    records: dict[str, files.Record] = {}
    with write_npy_parts(directory / MEMBERS, (grouped.num_samples, 4), np.int64) as append:
        for number in range(num_shards):
            if (note := of.read_note(number)) is None:
                raise RuntimeError(f"{of.tar(number)} is gone: run 'mclclip reshard' again")
            append(note.members)
            records[shard_name(number)] = note.record
    total_bytes = sum(record.size_bytes for record in records.values())
    not_copied = {sample_id: why for part in left for sample_id, why in part.items()}
    reasons = Counter(REASONS[why] for why in not_copied.values())
    counts = {
        "samples": grouped.num_samples - len(not_copied),
        "shards": num_shards,
        "size_bytes": total_bytes,
        "without_label": len(index) - grouped.num_samples,
        "not_copied": dict(reasons),
    }
    records |= files.records_of(directory, MEMBERS) | StageGroups(directory / GROUPS).records()
    artifact.finish(counts, records=records)
    for number in range(num_shards):
        of.note(number).unlink(missing_ok=True)
    log.info(
        "reshard: %d samples in %d groups are in %d shards (%.2f GiB) at %s; %d have no pseudo "
        "label and are not copied",
        counts["samples"], grouped.num_groups, num_shards, total_bytes / 2**30, directory,
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


@dataclass(frozen=True, eq=False)
class WrittenShard:
    """Where the samples of a shard are in it (``Resharded.members``), and its record."""

    members: Integers
    record: files.Record


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
        return self.tar(number).with_suffix(".json")

    def read_note(self, number: int) -> WrittenShard | None:
        """The note of a shard that is done; None for another."""
        try:
            fields = files.read_json(self.note(number))
            record = files.Record(**fields["record"])
            files.check_size(self.tar(number), record.size_bytes, "it is made again")
            return WrittenShard(np.array(fields["members"], np.int64).reshape(-1, 4), record)
        except (OSError, RuntimeError, ValueError, TypeError, KeyError):
            return None  # it was not written, or lost in a crash


class _Source:
    """The index and the shards that samples are read from."""

    def __init__(self, of: Copies) -> None:
        self.index = SampleIndex(of.index, of.index_digest)
        self.sample_ids = GroupedIndex.open(of.grouped).sample_ids
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
    note = of.read_note(number)
    if note is None or len(note.members) != len(ids):
        members = _write(of.tar(number), source, ids)
        note = WrittenShard(members, files.record_of(of.tar(number)))
        fields = {"record": asdict(note.record), "members": members.tolist()}
        files.write_bytes(of.note(number), json.dumps(fields).encode())
    left = np.flatnonzero(note.members[:, 0] < 0)
    return {int(ids[row]): int(note.members[row, 0]) for row in left}


def _write(path: Path, source: _Source, ids: Integers) -> Integers:
    """Writes the samples to a tar; returns where they are in it, int64 [n, 4]."""
    members = np.zeros((len(ids), 4), dtype=np.int64)
    places: dict[str, tuple[int, int]] = {}  # row and column of each member
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
                contents = {kind: data[0], extension: data[1]} if data[1] else {kind: data[0]}
                writer.write({"__key__": name, **contents})
                for column, (suffix, content) in enumerate(contents.items()):
                    places[f"{name}.{suffix}"] = row, column
                    members[row, 2 + column] = zlib.crc32(content)
        file.flush()
        if places:
            with open(file.name, "rb") as written:
                for member in read_members(written):
                    members[places[member.name]] = member.offset
    return members
