"""Verb: tar shards -> sample index.

The order of shards is fixed when they are first indexed (sources as configured, paths sorted), and
new shards come after the known ones, so that the sample_id of a sample never changes.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from webdataset.shardlists import expand_urls

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
from mclclip.data.remote import Remote, RemoteOptions, check_protocol
from mclclip.data.sample_index import KIND, SampleIndex
from mclclip.data.shard_filter import ShardFilter
from mclclip.data.shard_scan import IMAGE_CRC, PER_FIELD, caption_fields, captions_text, check_names
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
from mclclip.run.steps import Made, Step, make
from mclclip.util.files import move_aside, printable, records_of, remove_leftovers
from mclclip.util.options import protocol_of
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")
MAX_PATHS = 1_000_000  # that one pattern of shards may stand for
_IN_URL = re.compile(r"::(?![\w.+-]+://|[/.~@${])")  # a ``::`` that separates no patterns
MAX_FOLDERS = 50_000  # that ** of a pattern may look into


def run(config: Config, context: Context, force: Remake = Remake.NOTHING) -> SampleIndex:
    """Indexes the shards of ``data.sources`` into the run's ``index`` directory and opens it.

    New shards are scanned and appended; if all are known, nothing is done, unless
    ``data.verify=full`` asks for checksums of pixels that the index lacks: then all are scanned.
    The log and the manifest count, by reason, what is left out of the index and the samples without
    a caption. Rank 0 works and the others wait; an error is raised on all. Raises ValueError for
    sources that are wrong, hold no usable sample, or differ from the indexed ones (a changed shard,
    one that is not named any more, other captions, attributes or subset), and FileNotFoundError for
    missing shards. With ``force`` an old index is moved aside
    instead: any, or with ``unfit`` one that is damaged or that raised these errors.
    """
    directory = RunPaths.of(config).index
    collectives.on_main(lambda: _index(config, directory, force))
    return SampleIndex.open(directory)


def _index(config: Config, directory: Path, force: Remake) -> None:
    filters = _filters(config.data.sources)
    wanted = _list_shards(config.data.sources, filters, config.data.remote)
    known, new = _known_and_new(directory, wanted, config.data, force)
    old = read_manifest(directory, KIND) if is_finished(directory) else None
    pixels = config.data.verify == "full"
    if old is not None:
        pixels = pixels or old.counts.get("pixels", False)
        whole = old.counts.get("pixels", False) == pixels
        if not new and (whole or not pixels):
            log.info("index: up to date, %d shards", len(known))
            return
        old.check(directory)
        if not whole:  # it lacks checksums, which only a scan of all shards gives
            old = None
    if old is not None:
        table, num_known, to_scan = read_table(directory), len(known), new
    else:  # all shards are scanned, in the order of the index that there is
        table, num_known, to_scan = None, 0, [*known, *new]
    findings = Findings(old.counts["findings"] if old is not None else None)
    before = old.counts["sources"] if old is not None else {}
    left_out = {s: Counter(before.get(s, {}).get("left_out", {})) for s in filters}
    times, rows, scanned = times_of(to_scan), [], []
    scans = scan_shards(to_scan, config.data, pixels=pixels, filters=filters)
    with closing(scans):
        seen = progress(scans, total=len(to_scan), description="index")
        for shard, scan in zip(to_scan, seen, strict=True):
            if shard.digest and is_finished(directory) and scan.digest != shard.digest:
                raise ValueError(
                    f"shard {printable(shard.path)} has changed since it was indexed: restore it, "
                    "or use --force"
                )
            rows.append(scan.rows)
            scanned.append(dataclasses.replace(shard, digest=scan.digest))
            findings.merge(scan.findings)
            for reason, entry in scan.findings.only(LEFT_OUT).to_json().items():
                left_out[shard.source][reason] += entry["count"]
    bound = config.data.max_bad_fraction
    _check_faults(findings, len(known) + len(new), bound)
    shards = [*known[:num_known], *scanned]
    table, shards = join_rows(table, rows, shards, len(known), findings, config.data)
    findings.settle_lines(len(table))
    _check_lost(findings, len(table), bound)
    if num_known == 0 and is_finished(directory):
        # The shards are what they were, so the parquets that filters read are not.
        keys = read_table(directory)["key"]
        if not table["key"].slice(0, len(keys)).equals(keys):
            raise ValueError(
                "the parquets beside the shards choose other samples than those of "
                f"{directory}: restore them, or use --force"
            )
    manifest = _write(directory, table, shards, findings, left_out)
    note_times(directory, times)
    _log_summary(manifest, findings, len(to_scan), config.reads_captions or not config.trainings)


def _check_faults(findings: Findings, num_shards: int, bound: float) -> None:
    """Raises ValueError where too many shards cannot be read to their end."""
    faults = findings.only(UNREADABLE)
    if faults.total() > bound * num_shards:
        raise ValueError(
            f"{faults.total()} of {num_shards} shards cannot be read to their end, "
            f"data.max_bad_fraction={bound} allows {int(bound * num_shards)}: "
            f"{'; '.join(faults.lines())}. Fetch them again or leave them out of "
            "data.sources, or raise data.max_bad_fraction"
        )


def _check_lost(findings: Findings, num_samples: int, bound: float) -> None:
    """Raises ValueError where too many samples are left out since their key came before."""
    lost = findings.only(["duplicate_key"])
    if lost.total() > bound * (num_samples + lost.total()):
        raise ValueError(
            f"{'; '.join(lost.lines())}: data.max_bad_fraction={bound} allows "
            f"{int(bound * (num_samples + lost.total()))}; that bound may be raised"
        )


def _known_and_new(
    directory: Path, wanted: list[Shard], data: DataConfig, force: Remake
) -> tuple[list[Shard], list[Shard]]:
    """The shards of the index that there is, in its order, and those that it lacks."""
    try:
        if is_finished(directory):
            read_manifest(directory, KIND).check(directory, SHARDS)
        known = read_shards(directory)  # also those of an index that was not finished
        new = _new_shards(known, wanted, directory)
        if is_finished(directory):
            if force is Remake.ALL:
                raise ValueError("it is made again")
            if force is Remake.UNFIT and (damage := find_damage(directory)) is not None:
                raise ValueError(damage)
            check_shards(directory, known, data)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        if force is Remake.NOTHING:
            raise type(error)(f"{error} (--force moves the old index aside)") from error
        log.info("index: %s: the old index is moved aside", error)
        move_aside(directory)
        return [], wanted
    return known, new


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
    # The old manifest is removed first, since it does not fit the files that are written now.
    (directory / MANIFEST).unlink(missing_ok=True)
    return make(IndexTables(), directory, (table, placed, findings, left_out))


Scanned = tuple[pa.Table, list[Shard], Findings, Mapping[str, Mapping[str, int]]]


@dataclass(frozen=True)
class IndexTables(Step[Scanned]):
    """The tables of an index. It has no fields, since it grows by what is compared before it."""

    kind = KIND

    def make(self, out: Artifact, how: Scanned) -> Made:
        """Writes the table of the samples and that of the shards, and counts what they hold."""
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
            reasons = [f"{number} {reason}" for reason, number in entry["left_out"].items()]
            log.info(
                "index: source %s has %d samples, its subset left out %d (%s)",
                source,
                entry["samples"],
                sum(entry["left_out"].values()),
                ", ".join(reasons) or "none",
            )
        if not entry["samples"]:
            log.warning("index: no usable sample in source %s", source)
        elif wants_captions and entry["samples"] == entry["without_caption"]:
            log.warning(
                "index: no sample of source %s has a caption in %s", source, entry["captions"]
            )
    # What a subset is there to leave out stands above; captions that nothing reads are not missed.
    untold = ["subset"] if wants_captions else ["subset", "no_caption"]
    for line in findings.without(untold).lines():
        log.warning("index: %s", line)


# --- which shards, in which order --------------------------------------------------------------


def _filters(sources: Mapping[str, SourceConfig]) -> dict[str, ShardFilter]:
    """The filters of those sources that have one; reads the files of subsets."""
    found = {}
    for name, source in sources.items():
        if source.subset is not None:
            try:
                found[name] = ShardFilter.of(source.subset)
            except (ValueError, FileNotFoundError) as error:
                raise type(error)(f"data.sources.{name}.subset: {error}") from None
    return found


def _list_shards(
    sources: Mapping[str, SourceConfig], filters: Mapping[str, ShardFilter], remote: RemoteOptions
) -> list[Shard]:
    """The shards of all sources in the order of a first indexing, without their rows."""
    if not sources:
        raise ValueError("data.sources is empty: set data.sources.NAME.shards=...")
    wanted = []
    for name, source in sources.items():
        option = f"data.sources.{name}"
        if not name or "/" in name:
            raise ValueError(f"source name {name!r}: a key is 'source/key', use a name without /")
        try:
            captions = captions_text(source.captions)
            caption_fields(captions)
            shares = [1.0] if isinstance(source.captions, str) else source.captions.values()
            if abs(sum(shares) - 1.0) > 1e-6:
                raise ValueError(f"the probabilities sum to {sum(shares):g}, wanted 1: change some")
        except ValueError as error:
            raise ValueError(f"{option}.captions: {error}") from None
        try:
            attributes = check_names(source.attributes)
        except ValueError as error:
            raise ValueError(f"{option}.attributes: {error}") from None
        subset = filters[name].digest if name in filters else ""
        paths = expand_shards(source.shards, f"{option}.shards", remote)
        for path, stat in zip(paths, Remote(remote).stat(paths), strict=True):
            if stat is None:
                raise FileNotFoundError(f"{option}.shards: {printable(path)} is not there any more")
            shard = Shard(path, name, captions, 0, 0, stat.size, attributes, tag=stat.tag)
            wanted.append(dataclasses.replace(shard, subset=subset))
    return wanted


def expand_shards(
    patterns: str | Sequence[str], option: str, remote: RemoteOptions | None = None
) -> list[str]:
    """Sorted absolute paths and urls of brace lists, globs, single ones and ``@FILE`` lists.

    Braces expand as in webdataset (``::`` separates patterns, ``${x}`` is the environment's
    WDS_x). Where there is a url, ``::`` separates only before another url or path, so that it may
    stand in an address of IPv6 and in a query.
    A path that exists as it stands is taken as it is, and so is a glob whose folder does.
    Urls are not looked at, but for a glob. ``option`` names the source in messages. Raises
    FileNotFoundError for a pattern without files and for missing shards; ValueError for pipes and
    urls that are not read, broken braces, and a shard named twice.
    """
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    lines: list[str] = []
    for entry in listed:
        if not entry.startswith("@"):
            lines.append(entry)
            continue
        file = os.path.expanduser(entry[1:])
        if not os.path.isfile(file):
            raise FileNotFoundError(f"{option}: no list of shards at {file}")
        stripped = [line.strip() for line in Path(file).read_text().splitlines()]
        lines += [line for line in stripped if line and not line.startswith("#")]
    paths = sorted(
        path if protocol_of(path) else os.path.abspath(path)
        for line in lines
        for path in _expand(line, option, Remote(remote))
    )
    if not paths:
        raise FileNotFoundError(f"{option} names no shard: {printable(str(listed))}")
    for path, following in itertools.pairwise(paths):
        if path == following:
            raise ValueError(f"{option} names {printable(path)} twice: list each shard once")
    return paths


def _expand(pattern: str, option: str, remote: Remote) -> list[str]:
    """The files of one brace list or glob; each of its alternatives must match a file."""
    literal = os.path.expanduser(pattern)
    if os.path.isfile(literal):
        return [literal]
    if files := _glob(literal, option):
        return files
    if (number := _most_paths(pattern)) > MAX_PATHS:
        raise ValueError(
            f"{option}: {printable(pattern)!r} stands for up to {number:.0e} paths, wanted at most "
            f"{MAX_PATHS:,}: use a glob, or @FILE"
        )
    whole = _IN_URL.sub("\0", pattern) if "://" in pattern else pattern
    try:
        candidates = [os.path.expanduser(path.replace("\0", "::")) for path in expand_urls(whole)]
    except (ValueError, AssertionError) as error:  # unbalanced braces; no such variable
        raise ValueError(f"{option}: {printable(pattern)!r} does not expand: {error}") from None
    found: list[str] = []
    missing: list[str] = []
    for path in candidates:
        if path.startswith("pipe:") or protocol_of(path) is not None:
            check_protocol(path, option)
            urls = remote.glob(path) if "*" in path else [path]
            found += urls
            missing += [] if urls else [path]
            continue
        # An existing file is taken literally, even if its name looks like a glob.
        is_glob = glob.has_magic(path) and not os.path.exists(path)
        files = _glob(path, option) if is_glob else [path] * os.path.isfile(path)
        found += files
        missing += [] if files else [path]
    if missing and os.path.isdir(missing[0]):
        raise FileNotFoundError(f"{option}: {missing[0]} is a folder: use {missing[0]}/*.tar")
    if missing:
        raise FileNotFoundError(
            f"{option}: {len(missing)} of the {len(candidates)} paths of {printable(pattern)!r} "
            f"match no file, such as {printable(missing[0])}"
        )
    return found


def _glob(pattern: str, option: str) -> list[str]:
    """The files that a glob matches.

    ``**`` follows links, as the standard library's does, and links that lead back upwards make
    folders without an end: too many of them are a ValueError.
    """
    if stars := re.search(r"(^|/)\*\*(/|$)", pattern):
        num_folders, before = 0, pattern[: stars.end(1)]
        for base in glob.glob(before) if before else [os.curdir]:
            for _, names, _ in os.walk(base, followlinks=True):
                names[:] = [name for name in names if not name.startswith(".")]
                num_folders += 1
                if num_folders > MAX_FOLDERS:
                    raise ValueError(
                        f"{option}: ** in {pattern!r} leads into more than {MAX_FOLDERS:,} folders "
                        "(links may lead back upwards): name the folders that hold shards"
                    )
    return [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]


def _most_paths(pattern: str) -> float:
    """At least as many as the braces of a pattern expand to, without expanding them."""
    number = 1.0
    while groups := re.findall(r"\{[^{}]*\}", pattern):
        for group in groups:
            ends = re.match(r"\{(-?[0-9]+)\.\.(-?[0-9]+)", group)
            steps = abs(float(ends[2]) - float(ends[1])) if ends else group.count(",")
            number *= steps + 1
        pattern = re.sub(r"\{[^{}]*\}", "", pattern)
    return number


def _new_shards(known: Sequence[Shard], wanted: Sequence[Shard], directory: Path) -> list[Shard]:
    """The wanted shards that the index lacks, named as those of their source are.

    Raises ValueError for a known shard that has changed, and a new one that cannot be named so;
    FileNotFoundError for a missing one.
    """
    by_name = {(shard.source, shard.path): shard for shard in wanted}
    for old in known:
        now = by_name.pop((old.source, old.path), None)
        where = old.describe(directory)
        if now is None and protocol_of(old.path) is None and not os.path.exists(old.path):
            raise FileNotFoundError(f"{where} is not on disk any more: put it back")
        if now is None:
            raise ValueError(f"{where} is not in data.sources any more: name it again")
        if now.size_bytes != old.size_bytes:
            raise ValueError(
                f"{where} had {old.size_bytes} bytes when it was indexed, now {now.size_bytes}: "
                f"restore it"
            )
        subsets = [
            f"a subset of digest {shard.subset[:12]}" if shard.subset else "no subset"
            for shard in (old, now)
        ]
        for name, was, is_now in (
            ("captions=", old.captions, now.captions),
            ("attributes=", list(old.attributes), list(now.attributes)),
            ("", *subsets),
        ):
            if was != is_now:
                again = "with " if not name else ""
                raise ValueError(f"{where} was indexed with {name}{was}, now {again}{is_now}")
    folders = {shard.source: shard.folder for shard in known if shard.name}
    return [_keep_name(shard, folders.get(shard.source)) for shard in by_name.values()]


def _keep_name(shard: Shard, folder: str | None) -> Shard:
    """The shard with its path from a folder on as its name; itself where there is no folder."""
    stem = stem_of(shard.path)
    if folder is not None and not stem.startswith(folder):
        raise ValueError(
            f"keys of the source {shard.source} have the names of shards in {printable(folder)}, "
            f"and {printable(shard.path)} lies elsewhere: put it there"
        )
    return shard if folder is None else dataclasses.replace(shard, name=stem[len(folder) :])
