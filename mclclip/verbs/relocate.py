"""Verb: samples and pseudo labels -> the same samples in shards in the order of the groups.

A training reads the samples of a batch at random places. In these shards a group lies in one piece,
and neighbours in it that ``train.plan.block`` keeps together are read at once. The plan is the same
for both, and so are batches, weights and results: ``locations.npy`` says where each sample is now.

The order is that of a grouped index: by pseudo label, and by sample_id within a group. Which sample
stands in which shard follows from it alone, so that processes write shards side by side, and a
killed one leaves nothing but whole shards behind.

    00007.tar   SOURCE/KEY.jpg SOURCE/KEY.txt ...   as any WebDataset reader takes them
    00007.json  where image and captions of each sample are in it; written last, gone at the end

A sample has its image and the member with its captions there; its other members stay behind. Where
its key is an absolute path or has ``..``, which would lead out of the folder that somebody unpacks
the tar in, its sample_id names its members; a training does not read their names. A sample whose
bytes are not those of the index, or are cut short, is not copied, and keeps its place in the table.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
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
from mclclip.data.arrays import npy_header
from mclclip.data.bytes import BadSample, Bytes, RawSample
from mclclip.data.groups import GroupedIndex, LabelBlocks, StageGroups
from mclclip.data.index_tables import check_shards
from mclclip.data.labels import read_pseudo_labels
from mclclip.data.locations import KIND, TABLE, Locations, shard_name
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
from mclclip.run.steps import Made, Step, make
from mclclip.util import files
from mclclip.util.options import protocol_of
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")

Integers = npt.NDArray[np.int64]
_GROUPS = "grouped_index"  # folder, gone at the end
_HEADERS_BYTES = 2048  # of a sample in a tar at most, for names of usual length
_TAR_BYTES = 10_240  # of a tar's end
_SHOWN = 3  # samples that are not copied, in a log line
_WINDOW_BYTES = 1 << 26  # of samples that are read before they are written
_AT_ONCE = 1 << 16  # rows of the table that are written at once


def run(config: Config, context: Context, *, stage: int, force: Remake = Remake.NOTHING) -> Path:
    """Copies every sample that has a pseudo label of ``stage``; returns the directory.

    Shards are dealt out to ranks, and of a rank to ``data.index_workers`` processes. A killed run
    goes on at the first shard that is missing. Samples that are cut short or have changed since
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
    make(step, directory, Relocation(config, context, layout, index), force)
    collectives.on_main(lambda: _remove_notes(directory))
    return directory


@dataclass(frozen=True)
class Relocation:
    """A call of the verb."""

    config: Config
    context: Context
    layout: RunPaths
    index: SampleIndex


@dataclass(frozen=True)
class Relocated(Step[Relocation]):
    """Samples of a stage in shards in the order of its groups, and the table of their places."""

    kind = KIND
    all_ranks = True
    stage: int
    samples_per_shard: int

    def reads(self, how: Relocation) -> dict[str, str]:
        """The index and the pseudo labels."""
        _, _, digest = read_pseudo_labels(how.layout.pseudo_labels(self.stage), how.index)
        return {"index": how.index.digest, "pseudo_labels": digest}

    def make(self, out: Artifact, how: Relocation) -> Made:
        """Writes the shards that are missing, each rank its part, and the table."""
        data, context, index = how.config.data, how.context, how.index
        named = files.full_disk_names(out.directory, "relocate.folder")
        of, num_shards = collectives.on_main(named(partial(self._begin, out, how)))
        mine = range(context.rank, num_shards, context.world_size)

        def copy() -> None:
            left: dict[int, str] = {}
            calls = [(of, number) for number in mine]
            try:
                with closing(map_in_pool(write_shard, calls, data.index_workers)) as written:
                    what = "relocate, shards"
                    for of_shard in runlog.progress(written, total=len(mine), description=what):
                        left |= of_shard
                        index.check_bad_fraction(left, data.max_bad_fraction)
            finally:
                _opened.cache_clear()

        collectives.raise_on_every_rank(named(copy), "relocate")
        return collectives.on_main(named(partial(_write_table, of, num_shards, index)))

    def _begin(self, out: Artifact, how: Relocation) -> tuple[Copies, int]:
        """Checks the inputs, and sorts the samples by group on disk, unless they are; returns what
        is to be written and the number of shards."""
        data, index, directory = how.config.data, how.index, out.directory
        labels, radices, _ = read_pseudo_labels(how.layout.pseudo_labels(self.stage), index)
        check_shards(index.directory, index.shards, data)
        needed = int(index.image_size.sum()) + int(index.text_size.sum())
        needed += (_HEADERS_BYTES + 64) * len(index)  # and the table's row
        needed += _TAR_BYTES * -(-len(index) // self.samples_per_shard)
        begun = [] if is_finished(directory) else directory.glob("*.tar")  # finished: moved aside
        advice = "name another disk in relocate.folder"
        files.check_room(directory, needed, begun, "the copy", advice)
        blocks = LabelBlocks(labels, radices)
        sizes = blocks.sizes()
        if not sizes.num_samples:
            raise ValueError(
                f"no sample has a pseudo label of stage {self.stage}: there is nothing to copy"
            )
        groups = StageGroups(out.begin() / _GROUPS)
        if not groups.is_written:
            groups.write(blocks, sizes, np.zeros(0, np.int64))
        of = Copies(
            index.directory, index.digest, groups.directory, directory,
            self.samples_per_shard, data.max_open_files, data.remote,
        )  # fmt: skip
        GroupedIndex.open(groups.directory, "relocate")  # a killed call may have written it
        return of, -(-sizes.num_samples // of.samples_per_shard)


def _remove_notes(directory: Path) -> None:
    """Removes what a finished table was made from."""
    for path in directory.glob("*.tar"):
        path.with_suffix(".json").unlink(missing_ok=True)
    shutil.rmtree(directory / _GROUPS, ignore_errors=True)


def check(config: Config, stage: int = 1) -> None:
    """Raises ValueError where a stage is not trained on groups, or the folder is none."""
    objective, folder = config.train.objective, config.relocate.folder
    if stage < 1 or not objective.reads.groups:
        raise ValueError(
            f"relocate: stage {stage} under train.objective.kind={objective.kind} is not trained "
            "on groups of samples: name a stage from 1 on, of a method that reads groups"
        )
    if folder is not None and protocol_of(folder) is not None:
        raise ValueError(f"relocate.folder={folder} is a url: give a folder of a disk")
    if folder is not None and Path(folder).expanduser().is_file():
        raise ValueError(f"relocate.folder={folder} is a file: give a folder")


def _write_table(of: Copies, num_shards: int, index: SampleIndex) -> Made:
    """Writes the table of places by the notes on all shards."""
    directory = of.directory
    num_labelled, num_groups = (g := GroupedIndex.open(of.grouped)).num_samples, g.num_groups
    records, left = dict[str, files.Record](), dict[int, str]()
    with files.whole_file(directory / TABLE) as file:
        shape = (len(index), 2, 4)
        header = npy_header(shape, np.int64)
        # A full disk would be a signal (SIGBUS) later, where a row is written.
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
            records[shard_name(number)], left = note.record, left | note.left
            if note.places:
                places = np.array([*note.places.values()], np.int64)
                file_number = np.full((len(places), 2, 1), len(index.shards) + number)
                table[[*note.places]] = np.concatenate([file_number, places], axis=2)
        table.flush()
    total_bytes = sum(record.size_bytes for record in records.values())
    reasons = Counter(left.values())
    counts = {
        "samples": num_labelled - len(left),
        "shards": num_shards,
        "size_bytes": total_bytes,
        "without_label": len(index) - num_labelled,
        "not_copied": dict(reasons),
    }
    log.info(
        "relocate: %d samples in %d groups are in %d shards (%.2f GiB) at %s; %d have no pseudo "
        "label and are not copied",
        counts["samples"], num_groups, num_shards, total_bytes / 2**30, directory,
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
class CopiedShard:
    """Samples of a shard that is written, by their ids.

    record  of its file
    places  [[offset, size, CRC-32] of the image, the same of the captions] of each sample in it
    left    why samples were not copied: ``truncated`` or ``changed``
    """

    record: files.Record
    places: dict[int, list[list[int]]]
    left: dict[int, str]


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
        """The file that lists the samples of a shard, and marks it as done."""
        return self.tar(number).with_suffix(".json")

    def read_note(self, number: int) -> CopiedShard | None:
        """The note of a shard that is done; None for another."""
        try:
            fields = files.read_json(self.note(number))
            record = files.Record(**fields["record"])
            files.check_size(self.tar(number), record.size_bytes, "it is made again")
            places = {int(i): place for i, place in fields["places"].items()}
            return CopiedShard(record, places, {int(i): why for i, why in fields["left"].items()})
        except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError):
            return None  # it was not written, or lost in a crash


class _Source:
    """The index and the shards that samples are read from."""

    def __init__(self, of: Copies) -> None:
        self.index = SampleIndex(of.index, of.index_digest)
        self.sample_ids = GroupedIndex.open(of.grouped).sample_ids
        data = DataConfig(max_open_files=of.max_open_files, remote=of.remote)
        self.bytes = Bytes(self.index, data)

    def read(self, ids: Integers) -> Iterator[RawSample | BadSample]:
        """Yields the samples. Some are read at once, in the order in which they lie."""
        sizes = self.index.image_size[ids] + self.index.text_size[ids]
        windows = np.cumsum(sizes) // _WINDOW_BYTES
        for window in np.split(ids, np.flatnonzero(np.diff(windows)) + 1):
            yield from self.bytes.read(window)

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


def write_shard(of: Copies, number: int) -> dict[int, str]:
    """Writes a shard and the note on it, unless they are there; returns why samples were not
    copied, by sample id.

    Raises the errors of the reader.
    """
    source = _opened(of)
    start = number * of.samples_per_shard
    ids = np.asarray(source.sample_ids[start : start + of.samples_per_shard])
    note = of.read_note(number)
    if note is None or len(note.places) + len(note.left) != len(ids):
        note = _write(of.tar(number), source, ids)
        files.write_bytes(of.note(number), json.dumps(asdict(note)).encode())
    return note.left


def _write(path: Path, source: _Source, ids: Integers) -> CopiedShard:
    """Writes the samples to a tar, and reads from its headers where they are."""
    places: dict[int, list[list[int]]] = {}
    left: dict[int, str] = {}
    members: dict[str, list[int]] = {}  # entries of ``places`` by the name of the member
    options: dict[str, Any] = {"user": "mclclip", "group": "mclclip", "mtime": 0, "encoder": False}
    with files.whole_file(path) as file:
        # Names of any length, which the default (ustar) does not take.
        with TarWriter(file, format="PAX_FORMAT", **options) as writer:
            for (name, extension), raw in zip(source.names(ids), source.read(ids), strict=True):
                if isinstance(raw, BadSample):
                    left[raw.sample_id] = raw.reason
                    continue
                # An image that no reader will decode is named as a JPEG.
                contents = {image_extension(raw.image) or "jpg": raw.image}
                contents |= {extension: raw.text} if raw.text else {}
                writer.write({"__key__": name, **contents})
                places[raw.sample_id] = place = [[0, 0, 0], [0, 0, 0]]
                for member, (suffix, data) in enumerate(contents.items()):  # PICTURE, CAPTION
                    place[member][1:] = len(data), zlib.crc32(data)
                    members[f"{name}.{suffix}"] = place[member]
        file.flush()
        if members:
            with open(file.name, "rb") as written:
                for found in read_members(written):
                    members[found.name][0] = found.offset
    return CopiedShard(files.record_of(path), places, left)
