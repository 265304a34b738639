"""Verb ``relocate``: samples and pseudo labels -> the same samples in shards, group after group.

A training reads the samples of a batch at random places. In these shards the samples of a group are
neighbours, and those that ``train.plan.block`` keeps together are read at once. Plan, batches and
results stay the same: ``locations.npy`` says where each sample is now.

Samples are in the order of the grouped index: by pseudo label, and by sample_id within a group. The
order decides which sample is in which shard, so processes write shards side by side, and a killed
process leaves only whole shards behind.

    00007.tar   SOURCE/KEY.jpg SOURCE/KEY.txt ...   as any WebDataset reader takes them
    00007.json  where image and captions of each sample are in the tar; written after the tar, and
                removed at the end

Of a sample only its image and the member with its captions are copied. A key that is an absolute
path or contains ``..`` would lead out of the folder in which somebody unpacks the tar; then the
sample_id names the members. A sample that is cut short or has changed since it was indexed is not
copied, and keeps its old place in the table.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from webdataset.writer import TarWriter

from mclclip.config import Config
from mclclip.data.arrays import npy_header
from mclclip.data.bytes import BadSample, Bytes, RawSample
from mclclip.data.groups import GroupedIndex, StageGroups, group_samples
from mclclip.data.index_tables import check_shards
from mclclip.data.labels import read_pseudo_labels
from mclclip.data.locations import KIND, TABLE, Locations, copied_of, shard_name
from mclclip.data.options import DataConfig
from mclclip.data.remote import RemoteOptions
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_scan import caption_fields
from mclclip.data.shard_writer import image_extension
from mclclip.data.tar_members import read_members
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.ranks.workers import map_in_pool
from mclclip.run import runlog
from mclclip.run.artifacts import INTENT, Artifact, RunPaths, is_finished, refuse_foreign
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util import files
from mclclip.util.options import protocol_of
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")

Integers = npt.NDArray[np.int64]
T = TypeVar("T")
_GROUPS = "grouped_index"  # a folder that is removed at the end
_HEADERS_BYTES = 2048  # most bytes of tar headers per sample, for names of usual length
_TAR_BYTES = 10_240  # at the end of every tar
_SHOWN = 3  # how many samples that are not copied a log line names
_WINDOW_BYTES = 1 << 26  # read at once before they are written
_AT_ONCE = 1 << 16  # rows of the table written at once


def run(config: Config, context: Context, *, stage: int, force: Remake = Remake.NOTHING) -> Path:
    """Copies every sample that has a pseudo label of ``stage``; returns the directory.

    Every rank writes some of the shards, by ``data.index_workers`` processes. A killed run goes on
    at the first missing shard. Samples that are cut short or have changed since
    they were indexed are not copied, but counted: they keep their place in the table. Once the
    stage is trained its copies may be deleted: they are made again only with ``force``. Raises
    ValueError where the stage has no groups, the disk has too little room, or more samples than
    ``data.max_bad_fraction`` cannot be copied.
    """
    layout = RunPaths.of(config)
    check(config, stage)
    directory = layout.relocated(stage, config.relocate.folder)

    def is_needless() -> bool:
        has_copies = is_finished(directory) or (directory / INTENT).exists()
        return is_finished(layout.train(stage)) and not has_copies

    if force is Remake.NOTHING and collectives.on_main(is_needless):
        log.info("relocate: stage %d is trained: skipped (--force copies its samples)", stage)
        return directory
    index = collectives.on_main(lambda: SampleIndex.open(layout.index))
    collectives.on_main(lambda: refuse_foreign(directory, "relocate.folder"))
    step = Relocated(stage, config.relocate.samples_per_shard)
    make_artifact(step, directory, Relocation(config, context, layout, index), force)
    collectives.on_main(lambda: _remove_notes(directory))
    return directory


@dataclass(frozen=True)
class Relocation:
    """The run whose samples are copied."""

    config: Config
    context: Context
    layout: RunPaths
    index: SampleIndex


@dataclass(frozen=True)
class Relocated(Step[Relocation]):
    """Shards with the samples of a stage, group after group, and the table of their places."""

    kind = KIND
    all_ranks = True
    stage: int
    samples_per_shard: int

    def reads(self, how: Relocation) -> dict[str, str]:
        """Returns the digests of the index, of what is copied, and of the pseudo labels."""
        _, _, digest = read_pseudo_labels(how.layout.pseudo_labels(self.stage), how.index)
        return {**copied_of(how.index), "pseudo_labels": digest}

    def make(self, out: Artifact, how: Relocation) -> Made:
        """Writes the missing shards, each rank some of them, and then the table."""
        data, context, index = how.config.data, how.context, how.index
        of, num_shards = collectives.on_main(partial(self._begin, out, how))
        mine = range(context.rank, num_shards, context.world_size)

        def copy() -> None:
            left: dict[int, str] = {}
            calls = [(of, number) for number in mine]
            try:
                with closing(map_in_pool(write_shard, calls, data.index_workers)) as copied:
                    what = "relocate, shards"
                    for of_shard in runlog.progress(copied, total=len(mine), description=what):
                        left |= of_shard
                        index.check_bad_fraction(left, data.max_bad_fraction)
            finally:
                _open_source.cache_clear()

        collectives.raise_on_every_rank(copy, "relocate")
        return collectives.on_main(partial(_write_table, of, num_shards, index))

    def _begin(self, out: Artifact, how: Relocation) -> tuple[Copies, int]:
        """Checks inputs and free space, and writes the samples sorted by group, unless a killed
        call has; returns the arguments of ``write_shard`` and the number of shards."""
        data, index, directory = how.config.data, how.index, out.directory
        labels, radices, _ = read_pseudo_labels(how.layout.pseudo_labels(self.stage), index)
        check_shards(index.directory, index.shards, data)
        needed = int(index.image_size.sum()) + int(index.text_size.sum())
        needed += (_HEADERS_BYTES + 64) * len(index)  # and the table's row
        needed += _TAR_BYTES * -(-len(index) // self.samples_per_shard)
        # Shards of a killed call take no further room; those of a finished one are moved aside.
        written_shards = [] if is_finished(directory) else directory.glob("*.tar")
        advice = "name another disk in relocate.folder"
        files.check_room(directory, needed, written_shards, "the copy", advice)
        grouped = group_samples(labels, radices)
        if not grouped.num_samples:
            raise ValueError(
                f"no sample has a pseudo label of stage {self.stage}: there is nothing to copy"
            )
        groups = StageGroups(out.begin() / _GROUPS)
        if not groups.is_written:
            groups.write(grouped, np.zeros(0, np.int64))
        of = Copies(
            index.directory, index.digest, groups.directory, directory,
            self.samples_per_shard, data.max_open_files, data.remote,
        )  # fmt: skip
        GroupedIndex.open(groups.directory, "relocate")  # checks the one of a killed call
        return of, -(-grouped.num_samples // of.samples_per_shard)


def _remove_notes(directory: Path) -> None:
    """Removes the notes on shards and the grouped index, which a finished table needs no more."""
    for path in directory.glob("*.tar"):
        path.with_suffix(".json").unlink(missing_ok=True)
    shutil.rmtree(directory / _GROUPS, ignore_errors=True)


def check(config: Config, stage: int = 1) -> None:
    """Raises ValueError if the stage is not trained on groups, or relocate.folder is no folder."""
    objective, folder = config.train.objective, config.relocate.folder
    if stage < 1 or not objective.reads.groups:
        raise ValueError(
            f"relocate: stage {stage} under train.objective.kind={objective.kind} is not trained "
            "on groups of samples: name a stage from 1 on, of a method that reads groups"
        )
    if folder is not None:
        is_url = protocol_of(folder) is not None
        if is_url or Path(folder).expanduser().is_file():
            kind = "url" if is_url else "file"
            raise ValueError(f"relocate.folder={folder} is a {kind}: give a folder of a disk")


def _write_table(of: Copies, num_shards: int, index: SampleIndex) -> Made:
    """Writes the table of places from the notes on all shards."""
    directory = of.directory
    num_labelled, num_groups = (g := GroupedIndex.open(of.grouped)).num_samples, g.num_groups
    records, left = dict[str, files.Record](), dict[int, str]()
    with files.whole_file(directory / TABLE) as file:
        shape = (len(index), 2, 4)
        header = npy_header(shape, np.int64)
        # Reserve the bytes now: on a full disk, writing to the mapping would kill the process.
        os.posix_fallocate(file.fileno(), 0, len(header) + 64 * len(index))
        file.write(header)
        file.flush()
        table = np.memmap(file.name, np.int64, "r+", len(header), shape)
        for start in range(0, len(index), _AT_ONCE):
            ids = np.arange(start, min(start + _AT_ONCE, len(index)))
            table[ids] = Locations(index).of(ids)
        for number in range(num_shards):
            if (note := of.read_note(number)) is None:
                raise RuntimeError(f"{of.tar(number)} is gone: run 'mclclip relocate' again")
            records[shard_name(number)] = files.Record(**note["record"])
            left |= _by_id(note["left"])
            if note["places"]:
                places = np.array([*note["places"].values()], np.int64)
                file_number = np.full((len(places), 2, 1), len(index.shards) + number)
                table[[*_by_id(note["places"])]] = np.concatenate([file_number, places], axis=2)
        table.flush()
    total_bytes = sum(record.size_bytes for record in records.values())
    reasons = Counter(left.values())
    num_samples = num_labelled - len(left)
    counts = {
        "samples": num_samples,
        "shards": num_shards,
        "size_bytes": total_bytes,
        "without_label": len(index) - num_labelled,
        "not_copied": dict(reasons),
    }
    log.info(
        "relocate: %s in %s are in %s (%.2f GiB) at %s; %d have no pseudo label and are not copied",
        runlog.count_of(num_samples, "sample"), runlog.count_of(num_groups, "group"),
        runlog.count_of(num_shards, "shard"), total_bytes / 2**30, directory,
        counts["without_label"],
    )  # fmt: skip
    if left:
        some = index.names(sorted(left)[:_SHOWN])
        log.warning(
            "relocate: %d samples cannot be copied (%s) and are read where they were, such as %s",
            len(left), ", ".join(f"{n} {why}" for why, n in reasons.items()),
            files.printable(", ".join(some)),
        )  # fmt: skip
    return Made(counts, records | files.records_of(directory, TABLE))


# --- one shard after the other, in any process ----------------------------------------------


@dataclass(frozen=True)
class Copies:
    """The arguments of ``write_shard`` that all shards share.

    index      folder of the sample index
    grouped    folder of the grouped index, in whose order samples are copied
    directory  folder for the shards
    """

    index: Path
    index_digest: str
    grouped: Path
    directory: Path
    samples_per_shard: int
    max_open_files: int
    remote: RemoteOptions

    def tar(self, number: int) -> Path:
        """Path of a shard."""
        return self.directory / shard_name(number)

    def note(self, number: int) -> Path:
        """Path of the note on a shard, which exists if the shard is written.

        record  size and checksum of the tar
        places  by sample_id [[offset, size, CRC-32] of the image, and the same of the captions]
        left    by sample_id why a sample was not copied: 'truncated' or 'changed'
        """
        return self.tar(number).with_suffix(".json")

    def read_note(self, number: int) -> dict[str, Any] | None:
        """Reads the note on a shard; None if the shard is not written or has another size."""
        try:
            note: dict[str, Any] = files.read_json(self.note(number))
            files.check_size(self.tar(number), note["record"]["size_bytes"], "it is made again")
        except (FileNotFoundError, RuntimeError):
            return None
        return note


class _Source:
    """Reads samples of the index, in the order of the groups."""

    def __init__(self, of: Copies) -> None:
        self.index = SampleIndex(of.index, of.index_digest)
        self.sample_ids = GroupedIndex.open(of.grouped).sample_ids
        data = DataConfig(max_open_files=of.max_open_files, remote=of.remote)
        self.bytes = Bytes(self.index, data)

    def read(self, ids: Integers) -> Iterator[RawSample | BadSample]:
        """Yields the samples in the order of ``ids``; reads about ``_WINDOW_BYTES`` at once."""
        sizes = self.index.image_size[ids] + self.index.text_size[ids]
        windows = np.cumsum(sizes) // _WINDOW_BYTES
        for window in np.split(ids, np.flatnonzero(np.diff(windows)) + 1):
            yield from self.bytes.read(window)

    def names(self, ids: Integers) -> list[tuple[str, str]]:
        """Returns for each sample its name in the tar, and the extension of its captions.

        The name is the key, such as 'pets/000000012', or the sample_id if the key is an absolute
        path or contains ``..``. Every key contains a slash and no number does, so names differ.
        """
        names = []
        for sample_id, key in zip(ids.tolist(), self.index.keys(ids), strict=True):
            leads_out = not {"", ".."}.isdisjoint(re.split(r"[/\\]", key))
            captions = self.index.shards[int(self.index.shard_of[sample_id])].captions
            extension = "json" if caption_fields(captions) else "txt"
            names.append((f"{sample_id:09d}" if leads_out else key, extension))
        return names


_open_source = lru_cache(maxsize=1)(_Source)  # opens it once per process


def write_shard(of: Copies, number: int) -> dict[int, str]:
    """Writes a shard and the note on it, unless both exist; returns for samples that were not
    copied the reason. Raises the errors of ``Bytes.read``."""
    source = _open_source(of)
    start = number * of.samples_per_shard
    ids = np.asarray(source.sample_ids[start : start + of.samples_per_shard])
    note = of.read_note(number)
    if note is None:
        note = _write(of.tar(number), source, ids)
        files.write_bytes(of.note(number), json.dumps(note).encode())
    return _by_id(note["left"])


def _by_id(part: Mapping[Any, T]) -> dict[int, T]:
    """Returns a part of a note by sample_id, for which JSON has texts."""
    return {int(sample_id): value for sample_id, value in part.items()}


def _write(path: Path, source: _Source, ids: Integers) -> dict[str, Any]:
    """Writes the samples to a tar, and reads their offsets from its headers; returns the note."""
    places: dict[int, list[list[int]]] = {}
    left: dict[int, str] = {}
    members: dict[str, list[int]] = {}  # entries of ``places`` by the name of the member
    options: dict[str, Any] = {"user": "mclclip", "group": "mclclip", "mtime": 0, "encoder": False}
    with files.whole_file(path) as file:
        # PAX takes names of any length, which the default (ustar) does not.
        with TarWriter(file, format="PAX_FORMAT", **options) as writer:
            for (name, extension), raw in zip(source.names(ids), source.read(ids), strict=True):
                if isinstance(raw, BadSample):
                    left[raw.sample_id] = raw.reason
                    continue
                # An image of an unknown format, which no reader will decode, is called .jpg.
                contents = {image_extension(raw.image) or "jpg": raw.image}
                contents |= {extension: raw.text} if raw.text else {}
                writer.write({"__key__": name, **contents})
                places[raw.sample_id] = place = [[0, 0, 0], [0, 0, 0]]
                for member, (suffix, data) in enumerate(contents.items()):  # PICTURE, CAPTION
                    place[member][1:] = len(data), zlib.crc32(data)
                    members[f"{name}.{suffix}"] = place[member]
        file.flush()
        if members:
            with open(file.name, "rb") as tar:
                for member_header in read_members(tar):
                    members[member_header.name][0] = member_header.offset
    return {"record": asdict(files.record_of(path)), "places": places, "left": left}
