"""Verb ``index``: tar shards -> sample index.

The first call fixes the order of the shards: sources as configured, and the paths of each sorted.
Later calls append new shards, so the sample_id of a sample never changes. Shards that were moved to
another folder or store keep their places, also in an index that is made again.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mclclip.config import Config
from mclclip.data.findings import LEFT_OUT, UNREADABLE, Findings
from mclclip.data.index_tables import (
    ATTRIBUTES,
    SAMPLES,
    SHARDS,
    Shard,
    check_shards,
    join_rows,
    note_times,
    read_shards,
    read_table,
    read_values,
    scan_shards,
    stem_of,
    times_of,
    write_tables,
)
from mclclip.data.options import DataConfig, SourceConfig
from mclclip.data.remote import Remote, RemoteOptions
from mclclip.data.sample_index import KIND, SampleIndex
from mclclip.data.shard_filter import ShardFilter
from mclclip.data.shard_paths import expand_shards
from mclclip.data.shard_scan import IMAGE_CRC, PER_FIELD, caption_fields, captions_text, check_names
from mclclip.data.shard_writer import refuse_unfinished
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import (
    MANIFEST,
    Artifact,
    Manifest,
    RunPaths,
    find_damage,
    is_finished,
    read_manifest,
)
from mclclip.run.runlog import count_of, progress
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util.files import move_aside, printable, records_of, remove_leftovers
from mclclip.util.options import prefix_errors
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")


def run(config: Config, context: Context, force: Remake = Remake.NOTHING) -> SampleIndex:
    """Indexes the shards of ``data.sources`` into the run's ``index`` directory and opens it.

    Scans new shards and appends them. Does nothing if all shards are indexed already, unless
    ``data.verify=full`` needs checksums of pixels that the index lacks: then it scans all. The log
    and the manifest count, by reason, the samples that are left out of the index and those without
    a caption. Rank 0 works and the others wait; an error is raised on all ranks.

    Raises FileNotFoundError for missing shards, and ValueError for sources that are wrong, hold no
    usable sample, or differ from the indexed ones (a changed shard, one that is not listed any
    more, other captions, attributes or subset; new ones after the run's first stage began).
    ``force`` moves the old index aside and makes a new one, in the old order of shards: ``ALL`` in
    any case, ``UNFIT`` if the old index is damaged or differs. Otherwise it appends new shards.
    """
    directory = RunPaths.of(config).index
    collectives.on_main(lambda: _index(config, directory, force))
    return SampleIndex.open(directory)


def _index(config: Config, directory: Path, force: Remake) -> None:
    filters = _read_filters(config.data.sources)
    configured = _list_shards(config.data.sources, filters, config.data.remote)
    indexed, new = _compare_with_index(directory, configured, config.data, force)
    old = read_manifest(directory, KIND) if is_finished(directory) else None
    moved = old is not None and indexed != read_shards(directory)
    pixels = config.data.verify == "full"
    if old is not None:
        pixels = pixels or old.counts.get("pixels", False)
        whole = old.counts.get("pixels", False) == pixels
        if not (new or moved) and (whole or not pixels):
            log.info("index: up to date, %d shards", len(indexed))
            return
        old.check(directory)
        if directory.is_symlink():
            raise ValueError(
                f"{directory} is a link to the index of another run, which has other shards or "
                "lacks the checksums of data.verify=full: call 'mclclip index' for that run first, "
                "or 'mclclip index --force' for an index of this run's own"
            )
        if not whole:  # only a scan of all shards gives the checksums that it lacks
            old = None
    if old is not None:
        table, num_kept, to_scan = read_table(directory), len(indexed), new
    else:  # all shards are scanned, those of an old index in its order
        table, num_kept, to_scan = None, 0, [*indexed, *new]
    findings = Findings(old.counts["findings"] if old is not None else None)
    before = old.counts["sources"] if old is not None else {}
    left_out = {s: Counter(before.get(s, {}).get("left_out", {})) for s in filters}
    times, rows, scanned = times_of(to_scan), [], []
    scans = scan_shards(to_scan, config.data, pixels=pixels, filters=filters)
    shown = progress(scans, total=len(to_scan), description="index")
    with closing(scans):
        for shard, scan in zip(to_scan, shown, strict=True):
            rows.append(scan.rows)
            scanned.append(dataclasses.replace(shard, digest=scan.digest))
            findings.merge(scan.findings)
            for reason, entry in scan.findings.only(LEFT_OUT).to_json().items():
                left_out[shard.source][reason] += entry["count"]
    bound = config.data.max_bad_fraction
    _check_share(findings.only(UNREADABLE), len(indexed) + len(new), bound)
    shards = [*indexed[:num_kept], *scanned]
    table, shards = join_rows(table, rows, shards, len(indexed), findings, config.data)
    findings.settle_lines(len(table))
    lost = findings.only(["duplicate_key", "dotted_name"])
    _check_share(lost, len(table) + lost.total(), bound)
    if num_kept == 0 and is_finished(directory):
        # The shards are unchanged, so another choice of samples comes from the parquets.
        keys = read_table(directory)["key"]
        if not table["key"].slice(0, len(keys)).equals(keys):
            raise ValueError(
                "the parquets beside the shards choose other samples than those of "
                f"{directory}: restore them, or use --force"
            )
    manifest = _write(directory, table, shards, findings, left_out)
    note_times(directory, times)
    _log_summary(manifest, findings, len(to_scan), config.reads_captions or not config.trainings)


def _check_share(lost: Findings, whole: int, bound: float) -> None:
    """Raises ValueError if a larger share of ``whole`` shards or samples is lost than ``bound``."""
    if lost.total() > bound * whole:
        raise ValueError(
            f"{lost.total()} of {whole} shards or samples are lost, data.max_bad_fraction={bound} "
            f"allows {int(bound * whole)}: {'; '.join(lost.lines())}. Mend them, leave them out of "
            "data.sources, or raise data.max_bad_fraction"
        )


def _compare_with_index(
    directory: Path, configured: list[Shard], data: DataConfig, force: Remake
) -> tuple[list[Shard], list[Shard]]:
    """Returns the shards of the old index, in its order, and the configured shards that it lacks.

    An old index that ``force`` makes again is moved aside, and all shards are new.
    """
    before: list[Shard] = []
    try:
        if is_finished(directory):
            read_manifest(directory, KIND).check(directory, SHARDS)
        old = read_shards(directory)  # of an unfinished index too
        indexed = before = _follow(old, configured, data)
        if old:
            check_shards(directory, indexed, data)
        new = _new_shards(indexed, configured, directory)
        if old and new and force is Remake.NOTHING and any(directory.parent.glob("stage_*")):
            raise ValueError(
                f"{count_of(len(new), 'shard')} came to data.sources after the run began, such as "
                f"{printable(new[0].path)}: name only the {len(indexed)} that {directory} has, or "
                "make all again with more of them"
            )
        if not is_finished(directory):
            return indexed, new
        reason = "it is made again" if force is Remake.ALL else None
        reason = find_damage(directory) if force is Remake.UNFIT else reason
        if reason is None:
            return indexed, new
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        if force is Remake.NOTHING:
            raise type(error)(f"{error} (--force moves the old index aside)") from error
        reason = str(error)
    log.info("index: %s: the old index is moved aside", reason)
    move_aside(directory)
    places = {(shard.source, shard.path): place for place, shard in enumerate(before)}
    last = len(places)
    return [], sorted(configured, key=lambda shard: places.get((shard.source, shard.path), last))


def _write(
    directory: Path,
    table: pa.Table,
    shards: Sequence[Shard],
    findings: Findings,
    left_out: Mapping[str, Mapping[str, int]],
) -> Manifest:
    if not len(table):
        check = ": check the file of subset" if any(left_out.values()) else ""
        raise ValueError(
            f"no usable sample in {count_of(len(shards), 'shard')} of data.sources: "
            f"{'; '.join(findings.lines()) or 'they are empty'}{check}"
        )
    ends = np.cumsum(np.bincount(table["shard"].to_numpy(), minlength=len(shards))).tolist()
    placed = [
        dataclasses.replace(shard, start=start, stop=stop)
        for shard, start, stop in zip(shards, [0, *ends], ends, strict=False)
    ]
    # Remove the old manifest first: it does not describe the files that are written now.
    (directory / MANIFEST).unlink(missing_ok=True)
    return make_artifact(IndexTables(), directory, (table, placed, findings, left_out))


Scanned = tuple[pa.Table, list[Shard], Findings, Mapping[str, Mapping[str, int]]]
"""The table of samples, the shards, the findings, and for each source the samples that its subset
left out, by reason."""


@dataclass(frozen=True)
class IndexTables(Step[Scanned]):
    """The tables of an index. It has no fields: `_new_shards` has compared the sources already."""

    kind = KIND

    def make(self, out: Artifact, how: Scanned) -> Made:
        """Writes the tables of samples and of shards; counts samples, captions and shards."""
        (table, shards, findings, left_out), directory = how, out.begin()
        remove_leftovers(directory)
        digest = write_tables(directory, table, shards)
        num_captions = table["num_captions"].to_numpy()
        counts = {
            "samples": len(table),
            "captions": int(np.sum(num_captions, dtype=np.int64)),
            "without_caption": int((num_captions == 0).sum()),
            "shards": len(shards),
            "sources": _count_sources(shards, num_captions, left_out),
            "findings": findings.to_json(),
        }
        if IMAGE_CRC in table.column_names:
            counts["pixels"] = True
        names = [SHARDS, SAMPLES]
        if values := read_values(directory):
            shown = {name: len(values[name]) for name in values if name != PER_FIELD}
            counts |= {"attributes": shown} if shown else {}
            names.append(ATTRIBUTES)
        return Made(counts, records_of(directory, *names), digest=digest)


def _count_sources(
    shards: Sequence[Shard], num_captions: np.ndarray, left_out: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, Any]]:
    counts: dict[str, dict[str, Any]] = {}
    for shard in shards:
        zero = {"captions": shard.captions, "shards": 0, "samples": 0, "without_caption": 0}
        entry = counts.setdefault(shard.source, zero)
        entry["shards"] += 1
        entry["samples"] += shard.stop - shard.start
        entry["without_caption"] += int((num_captions[shard.start : shard.stop] == 0).sum())
    for source in counts.keys() & left_out.keys():
        counts[source]["left_out"] = dict(sorted(left_out[source].items()))
    return counts


def _log_summary(
    manifest: Manifest, findings: Findings, num_scanned: int, wants_captions: bool
) -> None:
    counts = manifest.counts
    log.info(
        "index: %s with %s in %s (%d scanned now)",
        *(count_of(counts[name + "s"], name) for name in ("sample", "caption", "shard")),
        num_scanned,
    )
    for source, entry in counts["sources"].items():
        if "left_out" in entry:
            reasons = ", ".join(f"{number} {name}" for name, number in entry["left_out"].items())
            log.info(
                "index: source %s has %d samples, its subset left out %d (%s)", source,
                entry["samples"], sum(entry["left_out"].values()), reasons or "none",
            )  # fmt: skip
        if not entry["samples"]:
            log.warning("index: no usable sample in source %s", source)
        elif wants_captions and entry["samples"] == entry["without_caption"]:
            log.warning(
                "index: no sample of source %s has a caption in %s", source, entry["captions"]
            )
    # The lines above count what subsets left out. Captions that nothing reads are not missed.
    untold = ["subset"] if wants_captions else ["subset", "no_caption"]
    for line in findings.without(untold).lines():
        log.warning("index: %s", line)


# --- which shards, in which order --------------------------------------------------------------


def _read_filters(sources: Mapping[str, SourceConfig]) -> dict[str, ShardFilter]:
    """Reads the ``subset`` of every source that has one; returns filters by the source's name."""
    filters = {}
    for name, source in sources.items():
        if source.subset is not None:
            with prefix_errors(f"data.sources.{name}.subset"):
                filters[name] = ShardFilter.of(source.subset)
    return filters


def _list_shards(
    sources: Mapping[str, SourceConfig], filters: Mapping[str, ShardFilter], remote: RemoteOptions
) -> list[Shard]:
    """Returns the shards of all sources in the order of a first indexing, without row numbers."""
    if not sources:
        raise ValueError("data.sources is empty: set data.sources.NAME.shards=...")
    shards = []
    owners: dict[tuple[str, str, str], str] = {}  # sources by path, and by what they take of it
    for name, source in sources.items():
        option = f"data.sources.{name}"
        if not name or "/" in name:
            raise ValueError(f"source name {name!r}: a key is 'source/key', use a name without /")
        with prefix_errors(f"{option}.captions"):
            captions = captions_text(source.captions)
            caption_fields(captions)
            shares = [1.0] if isinstance(source.captions, str) else source.captions.values()
            if abs(sum(shares) - 1.0) > 1e-6:
                raise ValueError(f"the probabilities sum to {sum(shares):g}, wanted 1: change some")
        with prefix_errors(f"{option}.attributes"):
            attributes = tuple(check_names(source.attributes))
        subset = filters[name].digest if name in filters else ""
        paths = expand_shards(source.shards, f"{option}.shards", remote)
        for path in paths:
            if (owner := owners.setdefault((path, subset, captions), name)) != name:
                raise ValueError(
                    f"{option}.shards and data.sources.{owner}.shards name {printable(path)}: list "
                    "each shard in one source"
                )
        refuse_unfinished(paths)
        for path, stat in zip(paths, Remote(remote).stat(paths), strict=True):
            if stat is None:
                raise FileNotFoundError(f"{option}.shards: {printable(path)} is not there any more")
            size, tag = stat.size, stat.tag
            shards.append(Shard(path, name, captions, 0, 0, size, attributes, "", tag, subset))
    return shards


def _follow(indexed: Sequence[Shard], configured: Sequence[Shard], data: DataConfig) -> list[Shard]:
    """Returns the indexed shards, those that were moved with their new paths.

    A shard that is not configured any more was moved to the new one of its source that has its file
    name and size. If several new ones have both, they are read, and it is the one that has its
    content.
    """
    old_paths = {(shard.source, shard.path) for shard in indexed}
    now_paths = {(shard.source, shard.path) for shard in configured}
    lost = {_file_of(shard) for shard in indexed if (shard.source, shard.path) not in now_paths}
    places: dict[tuple[str, str, int], list[Shard]] = {}
    for shard in configured:
        if (shard.source, shard.path) not in old_paths and _file_of(shard) in lost:
            places.setdefault(_file_of(shard), []).append(shard)
    alike = [shard for group in places.values() if len(group) > 1 for shard in group]
    with closing(scan_shards(alike, data)) as scans:
        digests = {shard.path: scan.digest for shard, scan in zip(alike, scans, strict=True)}
    shards = []
    for shard in indexed:
        if (shard.source, shard.path) not in now_paths:
            group = places.get(_file_of(shard), [])
            same = [
                new
                for new in group
                if digests.get(new.path, shard.digest) == shard.digest
                and stem_of(new.path).endswith(shard.name)
            ]
            for new in same[:1]:
                group.remove(new)
                shard = dataclasses.replace(shard, path=new.path, tag=new.tag)
        shards.append(shard)
    return shards


def _file_of(shard: Shard) -> tuple[str, str, int]:
    return shard.source, os.path.basename(stem_of(shard.path)), shard.size_bytes


def _new_shards(
    indexed: Sequence[Shard], configured: Sequence[Shard], directory: Path
) -> list[Shard]:
    """Returns the configured shards that the index lacks. If the keys of their source contain the
    names of shards, they get such names too.

    Raises ValueError for an indexed shard that is configured otherwise or not any more, and for a
    new one that lies in another folder.
    """
    by_name = {(shard.source, shard.path): shard for shard in configured}
    folders: dict[str, set[str]] = {}
    for old in indexed:
        now = by_name.pop((old.source, old.path), None)
        where = old.describe(directory)
        if now is None:
            raise ValueError(f"{where} is not in data.sources any more: name it again")
        for name, was, is_now in (
            ("captions=", old.captions, now.captions),
            ("attributes=", list(old.attributes), list(now.attributes)),
            ("subset of digest ", old.subset[:12] or None, now.subset[:12] or None),
        ):
            if was != is_now:
                raise ValueError(f"{where} was indexed with {name}{was}, now {is_now}")
        if old.name:
            folders.setdefault(old.source, set()).add(old.folder)
    return [_keep_name(shard, folders.get(shard.source, set())) for shard in by_name.values()]


def _keep_name(shard: Shard, folders: Set[str]) -> Shard:
    """Returns the shard; its name is its path below one of ``folders``, unless there are none."""
    stem = stem_of(shard.path)
    for folder in sorted(folders):
        if stem.startswith(folder):
            return dataclasses.replace(shard, name=stem[len(folder) :])
    if folders:
        raise ValueError(
            f"keys of the source {shard.source} have the names of shards in "
            f"{printable(min(folders))}, and {printable(shard.path)} lies elsewhere: put it there"
        )
    return shard
