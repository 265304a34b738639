"""Verb ``pack``: pictures with captions -> tar shards in img2dataset's layout.

Images are stored byte for byte, or smaller with a ``size``. Keys are running numbers, in the order
in which the data first name each image. Several rows of one image become one sample with several
captions. Rows are of one image if they have the same path, or, where the data contain the images
themselves, if they follow each other and have equal bytes. An image without captions is packed
without a ``.txt`` member.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from os.path import isfile
from pathlib import Path
from types import MappingProxyType

from mclclip.data.decode import (
    IMAGE_EXTENSIONS,
    MAX_IMAGE_PIXELS,
    PICTURE_SUFFIXES,
    DecodeError,
    decode,
    is_array,
    peculiarity,
    shrink,
    suffix_of,
)
from mclclip.data.findings import LFS_POINTER, Findings
from mclclip.data.picture_folders import UNREADABLE, explain_missing, walk
from mclclip.data.shard_scan import ARRAY_EXTENSION, split_member_name
from mclclip.data.shard_writer import (
    PACKED_FROM,
    PackedSample,
    check_foreign,
    image_extension,
    write_shards,
)
from mclclip.data.table_formats import CAPTION_COLUMNS
from mclclip.data.tables import Row, Table, find_pictures_of, open_table, usable_rows
from mclclip.run.artifacts import Artifact, Manifest, find_damage, is_finished, read_manifest
from mclclip.run.runlog import count_of, progress
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util import advice
from mclclip.util.files import Record, Roots
from mclclip.util.options import refuse_url
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")
_KEY_DIGITS = 9
_LARGE_BYTES = 1_000_000
_FromFolder = Callable[[Path], str]
"""Returns the command that reads the pictures from another folder."""
_REST = "train"  # the folder of pictures that are not held out


def pack(
    source: Path,
    out: Path,
    *,
    captions: Path | None = None,
    path_column: str | None = None,
    caption_column: str | Sequence[str] | None = None,
    samples_per_shard: int = 10_000,
    delimiter: str | None = None,
    key_prefix: str = "",
    allow_roots: Sequence[Path] = (),
    held_out: Mapping[str, float] = MappingProxyType({}),
    size: int = 0,
    force: Remake = Remake.NOTHING,
    command: Sequence[str] = (),
) -> Manifest:
    """Packs the pictures of ``source`` with their captions, from ``source`` itself or from
    ``captions``, a table or a folder of texts; ``open_table`` lists the formats of both. A data set
    of the Hugging Face hub is ``Path("hf://datasets/ORG/NAME")``.

    Shards may be given to others, so only images below ``source`` (or the folder of the table) and
    ``allow_roots`` are packed, after links are followed. Further columns of an image's first row go
    into its ``.json``. Images that cannot be used are counted by reason, in log and manifest.
    ``held_out``: shares of the pictures by folder, such as {'choose': 0.1}; these go to
    ``out/choose`` and the others to ``out/train``. The bytes of a picture decide, so copies stay
    together. ``size``: pictures whose shorter side has more pixels become JPEGs of this size, which
    are quicker to read; 0 stores all as they are. ``force`` moves a finished ``out`` of other data
    or options aside. ``command``: the words that the user typed, for errors that complete them.
    Raises the errors of ``open_table``, and ValueError if no sample can be packed or ``out`` holds
    foreign shards.
    """
    texts = [captions] if captions is not None and captions.is_dir() else []
    folders = [source, *texts] if texts or captions is None else []
    _check(folders, out, samples_per_shard, key_prefix, allow_roots, held_out, size)
    columns = {"path_column": path_column, "caption_column": caption_column, "delimiter": delimiter}
    command = command or advice.words_of("pack", source, captions=captions, out=out, **columns)
    table = open_table(
        source, captions, path_column=path_column, caption_column=caption_column,
        delimiter=delimiter, allow_roots=allow_roots, command=command,
    )  # fmt: skip
    if not table.caption_columns:
        log.warning(
            "pack: %s has no column of captions (%s), it has %s: its images are packed without "
            "captions; name the column with --caption-column if one of these holds them",
            table.path, ", ".join(CAPTION_COLUMNS), table.columns,
        )  # fmt: skip
    step = Shards(
        images=_place(table),
        path_column=table.image_column,
        caption_column=tuple(table.caption_columns),
        samples_per_shard=samples_per_shard,
        delimiter=table.delimiter,
        key_prefix=key_prefix,
        allow_roots=tuple(map(os.path.abspath, allow_roots)),
        held_out=dict(held_out),
        size=size,
    )
    from_folder = partial(_from_folder, table, source, command)
    force = _force_for_arrived(table, out, force)
    return make_artifact(step, out, (table, source, from_folder), force)


@dataclass(frozen=True)
class Shards(Step[tuple[Table, Path, _FromFolder]]):
    """Captioned pictures as shards; ``images`` is their `_place`."""

    kind = "shards"
    images: str
    path_column: str
    caption_column: tuple[str, ...]
    samples_per_shard: int
    delimiter: str | None
    key_prefix: str
    allow_roots: tuple[str, ...]
    held_out: Mapping[str, float]
    size: int

    def reads(self, how: tuple[Table, Path, _FromFolder]) -> Mapping[str, str]:
        """Returns the digests of the table, or of the folder's files."""
        return how[0].inputs()

    def make(self, out: Artifact, how: tuple[Table, Path, _FromFolder]) -> Made:
        """Packs all samples. Raises ValueError, before it writes, if no image can be used."""
        (table, source, from_folder), findings = how, Findings()
        roots = Roots(table.root, *map(Path, self.allow_roots))
        rows, total = _join_rows(table, roots, from_folder, findings)
        names_files = source.is_dir() and isfile(table.path) and not table.holds_images
        rows = [*rows] if names_files else rows
        samples = self._samples(rows, table, roots, findings)
        first = next(samples, None)
        if first is None:
            raise ValueError(_describe_nothing_usable(table, findings, from_folder))
        if names_files:
            _count_unnamed(rows, source, table, roots, findings)
        out.begin()
        samples = itertools.chain([first], samples)
        return self._write(out.directory, samples, total, findings, table)

    def _samples(
        self, rows: Iterable[Row], table: Table, roots: Roots, findings: Findings
    ) -> Iterator[PackedSample]:
        """Yields a sample per usable row, with its key and its folder; counts the other rows."""
        images = filter(None, (_read_image(row, table.root, roots, findings) for row in rows))
        number = 0
        for row, data, stored, extension in _store_all(self.size, images):
            digest = hashlib.sha256(data)
            folder = _folder(digest.digest(), self.held_out)
            measured = folder in self.held_out  # which needs captions, and pictures that decode
            if not row.captions:
                findings.add("uncaptioned" if measured else "no_caption", row.path or row.where)
                if measured:
                    continue
            if measured and not _decodes(stored):
                findings.add("undecodable", row.path or row.where)
                continue
            facts = {table.image_column: row.path} if row.path else {}
            facts[PACKED_FROM] = row.path or row.where
            yield PackedSample(
                key=f"{self.key_prefix}{number:0{_KEY_DIGITS}d}",
                image=stored,
                extension=extension,
                captions=row.captions,
                metadata={**row.metadata, **facts, "sha256": digest.hexdigest()},
                folder=folder,
            )
            number += 1

    def _write(
        self,
        out: Path,
        samples: Iterator[PackedSample],
        total: int | None,
        findings: Findings,
        table: Table,
    ) -> Made:
        """Writes the shards; counts samples, captions and shards, and logs the findings."""
        names = ("samples", "captions", "shards")
        folders = [*self.held_out, _REST] if self.held_out else [""]
        shares = {folder: dict.fromkeys(names, 0) for folder in folders}
        num_with_several = num_bytes = 0
        records: dict[str, Record] = {}

        def count_samples() -> Iterator[PackedSample]:
            nonlocal num_with_several, num_bytes
            for sample in progress(samples, total=total, description="pack"):
                share = shares[sample.folder]
                share["samples"] += 1
                share["captions"] += len(sample.captions)
                num_with_several += len(sample.captions) > 1
                num_bytes += len(sample.image) * (sample.extension != ARRAY_EXTENSION)
                yield sample

        for path in write_shards(count_samples(), out, self.samples_per_shard, records):
            shares["" if path.parent == out else path.parent.name]["shards"] += 1
        counts = {name: sum(share[name] for share in shares.values()) for name in names}
        numbers = [count_of(number, name.removesuffix("s")) for name, number in counts.items()]
        parts = ", ".join(f"{share['samples']:,} to {name}" for name, share in shares.items())
        log.info("pack: %s with %s in %s%s", *numbers, f" ({parts})" * bool(self.held_out))
        if num_with_several:
            log.info("pack: some have several captions; with captions: json:captions all are read")
        if not self.size and (mean_bytes := num_bytes / counts["samples"]) > _LARGE_BYTES:
            log.warning(
                "pack: pictures have %.1f MB on average, and training decodes them in every epoch: "
                "--size 512 stores large ones smaller", mean_bytes / 1e6,
            )  # fmt: skip
        for line in findings.lines():
            log.warning("pack: %s", line)
        if spelling := _explain_missing(table, findings):
            log.warning("pack: %s", spelling)
        of_folders = {"shares": shares} if self.held_out else {}
        return Made({**counts, **of_folders, "findings": findings.to_json()}, records)


def _explain_missing(table: Table, findings: Findings) -> str | None:
    """Says how the first missing image is spelt on disk; None if no file has a similar name."""
    counts = {} if table.holds_images else findings.to_json()
    reasons = [name for name in ("missing_image", "unsupported_extension") if name in counts]
    causes = (explain_missing(table.root, counts[name]["examples"][0]) for name in reasons)
    return next(filter(None, causes), None)


def _describe_nothing_usable(table: Table, findings: Findings, from_folder: _FromFolder) -> str:
    """Returns the message for a table without a usable image, with the command that may help."""
    reasons = "; ".join(findings.lines()) or "it has no rows"
    if spelling := _explain_missing(table, findings):
        reasons += f". {spelling}"
    elif "missing_image" in findings.to_json() and not table.holds_images:
        reasons += f". Its files are named from {table.root}; if they lie in another FOLDER: "
        reasons += from_folder(Path("FOLDER"))
    return f"no usable image in {table.path}: {reasons}"


def _place(table: Table) -> str:
    """Returns the folder or the url below which the table names its images, and "" for a folder of
    pictures and for a table that holds them, which are inputs wherever they lie."""
    if isinstance(table.path, str):
        return table.path
    return "" if table.path.is_dir() or table.holds_images else os.path.abspath(table.root)


def _from_folder(table: Table, source: Path, command: Sequence[str], folder: Path) -> str:
    """Returns the command that reads the pictures of ``table`` from this folder."""
    captions = [] if source != table.path else ["--captions", str(source)]
    return advice.again(command, str(folder), *captions, instead=source)


def _check(
    folders: Sequence[Path],
    out: Path,
    samples_per_shard: int,
    key_prefix: str,
    allow_roots: Sequence[Path],
    held_out: Mapping[str, float],
    size: int,
) -> None:
    """Raises the errors of ``pack`` that need no look into the data; all files of the ``folders``
    are packed."""
    refuse_url(out, "out:")
    for folder in allow_roots:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"no folder of images at {folder}")
    if samples_per_shard < 1:
        raise ValueError(f"samples_per_shard is {samples_per_shard}, expected at least 1")
    if size < 0:
        raise ValueError(f"size is {size}, expected 0 (all pictures as they are) or more")
    if split_member_name(f"{key_prefix}0.jpg") != (f"{key_prefix}0", "jpg"):
        raise ValueError(f"key_prefix is {key_prefix!r}: keys are cut at a dot, use none")
    assert _REST not in held_out and sum(held_out.values()) < 1, held_out
    check_foreign(out, "pack", *held_out, *([_REST] if held_out else []))
    # A later call would pack the shards too.
    for folder in folders:
        if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"{out} lies in {folder}, whose files are packed: write to a folder outside of it"
            )


def _force_for_arrived(table: Table, out: Path, force: Remake) -> Remake:
    """Returns ``force``, or ALL if pictures that were missing as ``out`` was packed are there now,
    of those that its manifest names.

    Without ``force`` it only logs them: they are no inputs, since pictures may be moved away after
    they were packed.
    """
    if not is_finished(out) or find_damage(out):
        return force
    findings = read_manifest(out, Shards.kind).counts["findings"]
    reasons = findings.keys() & {"missing_image", "unreadable"}
    names = sorted(name for reason in reasons for name in findings[reason]["examples"])
    paths = {name: table.root / name for name in names}
    arrived = [name for name, path in paths.items() if isfile(path) and os.access(path, os.R_OK)]
    if not arrived or force is not Remake.NOTHING:
        return Remake.ALL if arrived else force
    log.warning(
        "pack: pictures that were missing are there now, and not in %s, such as %s: --force packs "
        "all again", out, arrived[0],
    )  # fmt: skip
    return force


def _join_rows(
    table: Table, roots: Roots, from_folder: _FromFolder, findings: Findings
) -> tuple[Iterable[Row], int | None]:
    """Yields a row per image with all its captions; returns their number too, None if unknown.

    If rows name files, all are held in memory, since rows of one file may be far apart.
    """
    usable = usable_rows(table, findings)
    if table.holds_images:
        groups = itertools.groupby(usable, lambda row: (row.path, row.image))
        return (_merge_captions(group) for _, group in groups), table.count
    rows = find_pictures_of(
        usable, table, roots, lambda what, folder: ValueError(f"{what}: {from_folder(folder)}")
    )
    by_path = defaultdict[tuple[str, bytes | None], list[Row]](list)
    for row in rows:
        by_path[row.path, row.image].append(row)
    return map(_merge_captions, by_path.values()), len(by_path)


def present_rows(
    table: Table, source: Path, allow_roots: Sequence[Path], command: Sequence[str]
) -> list[Row]:
    """Returns the rows of a table that names files, of those that are there, each with all its
    captions; no picture is read. Raises the ValueError of `pack` if there is none."""
    findings, from_folder = Findings(), partial(_from_folder, table, source, command)
    rows, _ = _join_rows(table, Roots(table.root, *allow_roots), from_folder, findings)
    present: list[Row] = []
    for row in rows:
        if isfile(table.root / row.path):
            present.append(row)
        else:
            findings.add("missing_image", row.path)
    if not present:
        raise ValueError(_describe_nothing_usable(table, findings, from_folder))
    return present


def _count_unnamed(
    rows: Iterable[Row], folder: Path, table: Table, roots: Roots, findings: Findings
) -> None:
    """Counts the pictures of a ``folder`` that no row of its table names."""
    of_rows = {os.path.abspath(table.root / row.path) for row in rows}
    pictures = (p for p in walk(folder, roots, Findings()) if suffix_of(p) in PICTURE_SUFFIXES)
    others = (p for p in pictures if os.path.abspath(p) not in of_rows)
    findings.add("unnamed_picture", *(os.path.relpath(path, folder) for path in others))


def _merge_captions(rows: Iterable[Row]) -> Row:
    first, *others = rows
    for row in others:
        first.captions.extend(row.captions)
    return first


def _store(size: int, image: tuple[Row, bytes, str]) -> tuple[Row, bytes, bytes, str]:
    """Returns a row, its picture, and the bytes and extension that are stored: those of a smaller
    picture if its shorter side has more than ``size`` pixels. A damaged one stays as it is: the
    training counts it as a bad sample."""
    row, data, extension = image
    small = None
    if size and not is_array(data):
        with suppress(DecodeError):
            small = shrink(data, MAX_IMAGE_PIXELS, size)
    return (row, data, data, extension) if small is None else (row, data, small, "jpg")


def _store_all(
    size: int, images: Iterable[tuple[Row, bytes, str]]
) -> Iterator[tuple[Row, bytes, bytes, str]]:
    """Yields what `_store` returns for each image, in order; threads compute some ahead."""
    threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[tuple[Row, bytes, bytes, str]]] = deque()
        for image in images:
            waiting.append(pool.submit(_store, size, image))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)


def _decodes(image: bytes) -> bool:
    try:
        decode(image, MAX_IMAGE_PIXELS, reads_arrays=True)
    except DecodeError:
        return False
    return True


def _read_image(
    row: Row, root: Path, roots: Roots, findings: Findings
) -> tuple[Row, bytes, str] | None:
    """Returns a row with bytes and extension of its image; None, with a finding, if that is
    unusable."""
    reason, data = None, row.image or b""
    if row.image is None:
        if "\0" in row.path or not isfile(root / row.path):
            reason = "missing_image"
        elif (file := roots.real_path(root / row.path)) is None:
            reason = "outside_folder"
        elif suffix_of(row.path) not in PICTURE_SUFFIXES:
            reason = "unsupported_extension"
        else:
            try:
                data = file.read_bytes()
            except OSError as error:
                if error.errno not in UNREADABLE:
                    raise
                reason = "unreadable"
    # The first bytes say which format it is. If they do not, take the suffix: decoding will tell,
    # unless they are those of a phone's HEIC or of a page of the web.
    is_foreign = data[4:8] == b"ftyp" or data.lstrip()[:1] == b"<"
    by_name = suffix_of(row.path) if row.image is None and not is_foreign else None
    extension = image_extension(data) or by_name
    if reason is None and not data:
        reason = "zero_byte_image"
    elif reason is None and data.startswith(LFS_POINTER):
        reason = "lfs_pointer"
    elif reason is None and extension not in (*IMAGE_EXTENSIONS, ARRAY_EXTENSION):
        reason = "unsupported_extension"
    if reason is not None or extension is None:
        findings.add(reason or "", row.path or row.where)
        return None
    if odd := peculiarity(data, MAX_IMAGE_PIXELS):
        findings.add(odd, row.path or row.where)
    return row, data, extension


def _folder(digest: bytes, held_out: Mapping[str, float]) -> str:
    """Returns the folder of a picture, such as 'choose'.

    Its digest is read as a number in [0, 1). With shares of 0.1 and 0.2, numbers below 0.1 belong
    to the first folder, those below 0.3 to the second, and the others to ``train``.
    """
    place, end = int.from_bytes(digest[:8], "big") / 2**64, 0.0
    for name, share in held_out.items():
        end += share
        if place < end:
            return name
    return _REST if held_out else ""
