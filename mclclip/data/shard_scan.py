"""Scans one tar shard for its samples, the places of their bytes, and faults.

Only headers, captions and attributes are read. Members are grouped by webdataset's key rule, so
that a sample has the key a webdataset reader would give it. A shard may come from anybody: what it
asks for is bounded, and a fault in it is counted by its reason.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import pyarrow as pa

from mclclip.data.attributes import columns_of, fields_of, parse_attributes
from mclclip.data.remote import ObjectStat, Remote, RemoteOptions, StoredFile, open_whole
from mclclip.data.shard_filter import ShardFilter
from mclclip.data.tar_members import Member, TarFault, read_members
from mclclip.files import digest_array, digest_json, parse_json, shown

log = logging.getLogger("mclclip")
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
ARRAY_EXTENSION = "npy"
MAX_EXAMPLES = 20
MAX_NAME = 4096  # characters of a member's name
MAX_TEXT_BYTES = 1 << 24
"""Of a sample's captions or ``.json``."""

MAX_IMAGE_BYTES = 1 << 30
RANGES = ("image_offset", "image_size", "text_offset", "text_size")
ROW = pa.schema(
    [("key", pa.large_string()), *((name, pa.int64()) for name in RANGES)]
    + [("num_captions", pa.int32())]
)
# CRC-32 of the member with the captions (0: none), and of the image where pixels are recorded.
TEXT_CRC, IMAGE_CRC = "text_crc32", "image_crc32"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_METADATA = re.compile(r"__[^/]*__($|/)")  # webdataset's names of members that are no samples
REASONS = {
    "no_image": "samples without an image, left out",
    "no_caption": "samples without a caption, kept: what needs captions leaves them out",
    "zero_byte_image": "samples with an image of zero bytes, left out",
    "zero_byte_caption": "samples with a caption file of zero bytes, kept as without a caption",
    "no_attribute": "samples without a value of an attribute, kept: classes of it leave them out",
    "subset": "samples that the subset lacks, left out",
    "where": "samples that do not meet a condition, left out",
    "no_value": "samples without a value of a condition's column, left out",
    "no_metadata": "samples without a row in their shard's parquet or without a uid, left out",
    "large_image": "samples with an image of more than 1 GiB, left out",
    "large_caption": "samples with a caption file of more than 16 MiB, kept as without a caption",
    "bad_json": "samples whose .json does not parse, kept as without a caption",
    "duplicate_key": "samples whose key came before in their source, left out",
    "several_images": "samples with several images, of which the first is used",
    "bad_name": "tar members whose name gives no key, left out",
    "sparse_member": "tar members stored without their holes (tar --sparse), left out",
    "truncated_shard": "shards cut short: what comes before the cut is used",
    "damaged_shard": "shards with a broken header: what comes before it is used",
    "data_after_end": "shards with data after their end mark (joined tars?), which is not read",
    "unreadable_shard": "shards that are no tar files, left out",
    "empty_shard": "shards without members",
}
# Of these, those of a source's filter.
LEFT_OUT = ("subset", "where", "no_value", "no_metadata")
UNREADABLE = ("truncated_shard", "damaged_shard", "unreadable_shard")


class Findings:
    """Samples left out and other unusual finds: a count and up to 20 examples by reason."""

    def __init__(self, counts: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._found = {
            reason: (int(entry["count"]), list(entry["examples"]))
            for reason, entry in (counts or {}).items()
        }

    def add(self, reason: str, *examples: str, count: int | None = None) -> None:
        """Counts ``count`` cases (default: one per example given)."""
        total, kept = self._found.setdefault(reason, (0, []))
        kept.extend(examples[: MAX_EXAMPLES - len(kept)])
        self._found[reason] = (total + (len(examples) if count is None else count), kept)

    def merge(self, other: Findings) -> None:
        """Adds the counts of ``other``; the earlier examples are kept."""
        for reason, (total, examples) in other._found.items():
            self.add(reason, *examples, count=total)

    def only(self, reasons: Sequence[str]) -> Findings:
        """The finds of these reasons, ``REASON:NAME`` too."""
        found = self.to_json().items()
        return Findings({r: entry for r, entry in found if r.partition(":")[0] in reasons})

    def total(self) -> int:
        """The number of finds of all reasons."""
        return sum(count for count, _ in self._found.values())

    def to_json(self) -> dict[str, dict[str, Any]]:
        """``{reason: {count, examples}}``, as manifests keep it."""
        return {r: {"count": n, "examples": e} for r, (n, e) in sorted(self._found.items())}

    def lines(self, reasons: Mapping[str, str]) -> list[str]:
        """One line per reason, with its text from ``reasons`` (``REASON:NAME`` has REASON's)."""
        return [
            f"{n} {reasons.get(r.partition(':')[0], r)} ({r}), e.g. {', '.join(e[:3])}"
            for r, (n, e) in sorted(self._found.items())
        ]


# --- captions --------------------------------------------------------------------------------


def caption_field(captions: str) -> str | None:
    """The JSON field of ``json:FIELD``, None for ``txt``; ValueError for anything else."""
    kind, _, name = captions.partition(":")
    if captions != "txt" and (kind != "json" or not name):
        raise ValueError(f"captions is {captions!r}, expected 'txt' or 'json:FIELD'")
    return name or None


def parse_captions(data: bytes, captions: str) -> list[str]:
    """The captions in a ``.txt`` or ``.json`` member, stripped; blank ones do not count.

    ``captions`` is ``txt`` or ``json:FIELD`` (a string or a list of strings; a missing field or
    another type gives no caption). Raises ValueError for JSON that does not parse.
    """
    name = caption_field(captions)
    if name is None:
        values: Any = [data.decode("utf-8-sig", "replace")]
    else:
        tree = parse_json(data, "a sample's .json")
        values = tree.get(name) if isinstance(tree, dict) else None
        values = [values] if isinstance(values, str) else values
    if not isinstance(values, list):
        return []
    # Lone surrogates (from \ud800 in JSON) are no text that a tokenizer could encode.
    texts = (v.encode("utf-8", "replace").decode() for v in values if isinstance(v, str))
    return [text for text in map(str.strip, texts) if text]


# --- scanning one shard ----------------------------------------------------------------------


@dataclass(frozen=True)
class ShardScan:
    """Samples of one shard in tar order, and what was found on the way.

    rows: the columns of ROW and TEXT_CRC, IMAGE_CRC if pixels were read, and one per attribute that
    was asked for (`attributes.columns_of`).
    digest: of the members, captions and attributes of all samples, also of those that a filter left
    out; not of the pixels. So it says of a shard whether it has changed, without its filter.
    """

    rows: pa.RecordBatch
    findings: Findings
    digest: str


def _digest(rows: pa.RecordBatch) -> str:
    columns = {
        name: column.to_pylist()
        if pa.types.is_large_string(column.type) or pa.types.is_dictionary(column.type)
        else digest_array(column.to_numpy())
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
        if name != IMAGE_CRC
    }
    return digest_json(columns)


@dataclass(slots=True)
class _Group:
    """Members of one key, as (offset, size)."""

    image: tuple[int, int] | None = None
    array: tuple[int, int] | None = None
    text: tuple[int, int] | None = None
    json: tuple[int, int] | None = None
    num_images: int = 0
    repeated: dict[str, int] = field(default_factory=dict)
    extensions: set[str] = field(default_factory=set)


def split_member_name(name: str) -> tuple[str, str] | None:
    """(key, lower-case extension) of a tar member, cut at the first dot of its base name.

    None where that leaves no key or no extension, and for names that are not UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return None
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and extension else None


def scan_shard(
    path: str,
    source: str,
    captions: str,
    attributes: Sequence[str] = (),
    pixels: bool = False,
    stat: ObjectStat | None = None,
    remote: RemoteOptions | None = None,
    chosen: ShardFilter | None = None,
) -> ShardScan:
    """Reads the headers (and captions, ``attributes``, and with ``pixels`` images) of a tar shard.

    Members are grouped by webdataset's key rule, in any order within the shard. ``captions``:
    ``txt`` or ``json:FIELD``; text_offset and text_size point at that member (0 and 0 where there
    is none). A sample needs an image; an array (``.npy``) is the image of a sample that has no
    picture. A sample without a caption is kept with num_captions 0; this and missing values of
    attributes are counted in the findings. Keys get the prefix ``source/``. Samples that are not
    ``chosen`` are counted by the filter's reasons and have no row. Raises ValueError for compressed
    tars (no random access), OSError where the file cannot be read, and the errors of the filter. A
    shard behind a url, of which its store says ``stat``, is fetched whole, once, as ``remote``
    says.
    """
    findings, unseen = Findings(), Findings()
    text_extension = "txt" if caption_field(captions) is None else "json"
    rows = _Rows(attributes, pixels)
    with open_whole(StoredFile(path, stat or ObjectStat(0, "")), Remote(remote)) as file:
        _refuse_compressed(path, file.read(6))
        file.seek(0)
        groups = _group_members(_members(file, path, findings), text_extension, findings, path)
        reasons = _left_out(chosen, path, groups, file, remote)
        for (key, group), reason in zip(groups.items(), reasons, strict=True):
            full = f"{source}/{key}"
            if reason is not None:
                findings.add(reason, full)
            rows.add(file, full, group, captions, reason is None, unseen if reason else findings)
    table = rows.table()
    digest = _digest(table)
    return ShardScan(
        table if all(rows.taken) else table.filter(pa.array(rows.taken)), findings, digest
    )


def _left_out(
    chosen: ShardFilter | None,
    path: str,
    groups: Mapping[str, _Group],
    file: BinaryIO,
    remote: RemoteOptions | None,
) -> list[str | None]:
    """Why each sample is left out by the filter; None for those that are taken."""
    if chosen is None:
        return [None] * len(groups)
    members = [group.json for group in groups.values()]
    return chosen.why_not(path, list(groups), lambda n: _read_bounded(file, members[n]), remote)


class _Rows:
    """The rows of a shard's samples, while it is scanned."""

    def __init__(self, attributes: Sequence[str], pixels: bool) -> None:
        self.attributes, self.pixels = attributes, pixels
        self.taken: list[bool] = []
        self._rows: list[tuple[Any, ...]] = []
        self._values: list[list[str | None]] = []
        self._checksums: list[list[int]] = []

    def add(
        self,
        file: BinaryIO,
        full: str,
        group: _Group,
        captions: str,
        taken: bool,
        findings: Findings,
    ) -> None:
        """Adds the row of a sample with the key ``full``, if it has an image."""
        if group.num_images > 1:
            findings.add("several_images", full)
        if group.repeated:
            findings.add("duplicate_key", full, count=max(group.repeated.values()))
        image = group.image or group.array
        if image is None or image[1] == 0 or image[1] > MAX_IMAGE_BYTES:
            findings.add(_why_unusable(image), full)
            return
        num_captions, reason = _count_captions(file, group.text, captions)
        if reason is not None:
            findings.add(reason, full)
        text = None if reason == "large_caption" else group.text
        self.taken.append(taken)
        self._rows.append((full, *image, *(text or (0, 0)), num_captions))
        members = (text, image if taken else None) if self.pixels else (text,)
        self._checksums.append([zlib.crc32(_read(file, m)) if m else 0 for m in members])
        if self.attributes:
            values = parse_attributes(_read_bounded(file, group.json), self.attributes)
            self._values.append(values)
            for name, value in zip(self.attributes, values, strict=True):
                if value is None:
                    findings.add(f"no_attribute:{name}", full)

    def table(self) -> pa.RecordBatch:
        """All rows, with their checksums and attributes."""
        columns: Any = list(zip(*self._rows, strict=True)) or [[] for _ in ROW]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, ROW, strict=True)]
        names = (TEXT_CRC, IMAGE_CRC) if self.pixels else (TEXT_CRC,)
        sums = ([row[k] for row in self._checksums] for k in range(len(names)))
        arrays += [pa.array(values, pa.uint32()) for values in sums]
        arrays += columns_of(self.attributes, self._values)
        extra = [pa.field(name, pa.uint32()) for name in names]
        schema = pa.schema([*ROW, *extra, *fields_of(self.attributes)])
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _refuse_compressed(path: str, head: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise ValueError(
                f"{shown(path)} is compressed with {name}: samples are read at random positions, "
                "which needs plain tar files. Decompress it first"
            )


def _members(file: BinaryIO, path: str, findings: Findings) -> Iterator[Member]:
    """Yields the members of a tar up to the first fault, which is counted."""
    try:
        for member in read_members(file):
            if member.sparse:
                findings.add("sparse_member", f"{_printable_name(member.name)} in {shown(path)}")
            else:
                yield member
    except TarFault as fault:
        log.debug("%s: %s", shown(path), fault)
        findings.add(fault.reason, shown(path))


def _group_members(
    members: Iterator[Member], text_extension: str, findings: Findings, path: str
) -> dict[str, _Group]:
    """Members by key in tar order; of members of the same name the first is kept."""
    groups: dict[str, _Group] = {}
    for member in members:
        if _METADATA.match(member.name):
            continue
        split = split_member_name(member.name)
        if split is None or len(member.name) > MAX_NAME:
            findings.add("bad_name", f"{_printable_name(member.name)} in {shown(path)}")
            continue
        key, extension = split
        group = groups.setdefault(key, _Group())
        if extension in group.extensions:
            group.repeated[extension] = group.repeated.get(extension, 0) + 1
            continue
        group.extensions.add(extension)
        place = (member.offset, member.size)
        if extension in IMAGE_EXTENSIONS:
            group.num_images += 1
            group.image = group.image or place
        elif extension == ARRAY_EXTENSION:
            group.array = place
        if extension == text_extension:
            group.text = place
        if extension == "json":
            group.json = place
    return groups


def _why_unusable(image: tuple[int, int] | None) -> str:
    if image is None:
        return "no_image"
    return "large_image" if image[1] else "zero_byte_image"


def _printable_name(name: str) -> str:
    return ascii(name if len(name) <= MAX_NAME else f"{name[:100]}... ({len(name)} characters)")


def _count_captions(
    file: BinaryIO, text: tuple[int, int] | None, captions: str
) -> tuple[int, str | None]:
    """Number of captions in a sample's text member, and why there are none where there are none."""
    if text is None:
        return 0, "no_caption"
    if text[1] == 0:
        return 0, "zero_byte_caption"
    if text[1] > MAX_TEXT_BYTES:
        return 0, "large_caption"
    try:
        number = len(parse_captions(_read(file, text), captions))
    except ValueError:
        return 0, "bad_json"
    return number, None if number else "no_caption"


def _read(file: BinaryIO, place: tuple[int, int]) -> bytes:
    offset, size = place
    return os.pread(file.fileno(), size, offset)


def _read_bounded(file: BinaryIO, place: tuple[int, int] | None) -> bytes:
    """A ``.json`` member; empty where there is none or it is too large to be read."""
    return b"" if place is None or place[1] > MAX_TEXT_BYTES else _read(file, place)
