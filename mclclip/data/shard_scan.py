"""Scans one tar shard for its samples, the places of their bytes, and faults.

Only headers, captions and attributes are read. Members are grouped by webdataset's key rule, so
that a sample has the key a webdataset reader would give it. A shard may come from anybody: what it
asks for is bounded, and a fault in it is counted by its reason.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

# pyarrow imports pandas at its first table. Here it is imported before any connection is open:
# Python 3.11 fails (KeyError in importlib) where a collected connection imports during an import.
import pandas as pd  # noqa: F401
import pyarrow as pa

from mclclip.data.remote import Remote, RemoteOptions, StoredFile, open_whole
from mclclip.data.shard_filter import ShardFilter
from mclclip.data.tar_members import Member, TarFault, read_members
from mclclip.files import clean, digest_array, digest_json, parse_json

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
ATTRIBUTE = "attribute:"  # begins the name of an attribute's column, which holds TEXT
PER_FIELD = "captions per field"
"""Attribute of samples whose captions come from several fields: ``2x0.3 1x0.7`` are two captions of
a field that is drawn with the probability 0.3, and one of another."""
TEXT = pa.dictionary(pa.int32(), pa.large_string())
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_METADATA = re.compile(r"__[^/]*__($|/)")  # webdataset's names of members that are no samples
REASONS = {
    "no_image": "samples without an image, left out",
    "no_caption": "samples without a caption, kept: what needs captions leaves them out",
    "no_field": "samples without one of the fields of captions: the others are drawn from",
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


def captions_text(captions: str | Mapping[str, float]) -> str:
    """``data.sources.NAME.captions`` as a shard's record keeps it; a mapping is JSON there."""
    if isinstance(captions, str):
        return captions
    return next(iter(captions)) if len(captions) == 1 else json.dumps(dict(captions))


def caption_fields(captions: str) -> dict[str, float]:
    """Probabilities of JSON fields by their names: none for ``txt``, one field for ``json:FIELD``,
    several for the JSON of a mapping (``captions_text``); ValueError for anything else."""
    given = {captions: 1.0}
    if captions.startswith("{"):
        given = parse_json(captions.encode(), "captions")
    elif captions == "txt":
        return {}
    for key in given or [captions]:
        if not key.startswith("json:") or key == "json:":
            wanted = "'txt' or 'json:FIELD'" if len(given) == 1 else "'json:FIELD' for every field"
            raise ValueError(f"captions is {key!r}, expected {wanted}")
    return {key.removeprefix("json:"): share for key, share in given.items()}


def captions_by_field(data: bytes, captions: str) -> list[list[str]]:
    """The captions in a ``.txt`` or ``.json`` member, a list for each field of ``captions`` (one
    for ``txt``), stripped; blank ones do not count.

    A field holds a string or a list of strings; a missing field or another type gives no caption.
    Raises ValueError for JSON that does not parse.
    """
    fields: list[Any] = []
    if names := caption_fields(captions):
        tree = parse_json(data, "a sample's .json")
        fields = [tree.get(name) if isinstance(tree, dict) else None for name in names]
    else:
        fields = [data.decode("utf-8-sig", "replace")]
    found = []
    for values in fields:
        listed = [values] if isinstance(values, str) else values
        listed = listed if isinstance(listed, list) else []
        # Lone surrogates (from \ud800 in JSON) are no text that a tokenizer could encode.
        texts = (v.encode("utf-8", "replace").decode() for v in listed if isinstance(v, str))
        found.append([text for text in map(str.strip, texts) if text])
    return found


def parse_captions(data: bytes, captions: str) -> list[str]:
    """All captions of a member (``captions_by_field``), those of the first field first."""
    return [text for texts in captions_by_field(data, captions) for text in texts]


# --- attributes ------------------------------------------------------------------------------


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple. Raises ValueError for a blank name, one that occurs twice, and the
    index's own (`PER_FIELD`)."""
    if PER_FIELD in names:
        raise ValueError(f"{PER_FIELD!r} is an attribute that the index makes: rename the field")
    if any(not name.strip() for name in names) or len(set(names)) < len(names):
        raise ValueError(f"got {list(names)}: wanted names of JSON fields, each once")
    return tuple(names)


def parse_attributes(data: bytes, names: Sequence[str]) -> list[str | None]:
    """The values of these fields in a ``.json`` member, in their order; None for no value.

    A value is a string or an integer; the integer 3 and the string "3" are the same value.
    Everything else (true and false, fractions, lists, objects, null, a blank string, a field that
    is missing) is no value, and so is JSON that does not parse.
    """
    try:
        tree = parse_json(data, "attributes")
    except ValueError:
        tree = None
    values: list[str | None] = []
    for name in names:
        found = tree.get(name) if isinstance(tree, dict) else None
        if isinstance(found, int) and not isinstance(found, bool):
            values.append(str(found))
        elif isinstance(found, str) and found.strip():
            # Lone surrogates (from \ud800 in JSON) fit into no table.
            values.append(found.encode("utf-8", "replace").decode())
        else:
            values.append(None)
    return values


# --- scanning one shard ----------------------------------------------------------------------


@dataclass(frozen=True)
class ShardScan:
    """Samples of one shard in tar order, and what was found on the way.

    rows: the columns of ROW and TEXT_CRC, IMAGE_CRC if pixels were read, and one per attribute that
    was asked for, as text that arrow has coded.
    digest: of the members, captions and attributes of all samples, also of those that a filter left
    out; not of the pixels. So it says of a shard whether it has changed, without its filter.
    """

    rows: pa.RecordBatch
    findings: Findings
    digest: str


@dataclass(slots=True)
class Group:
    """Members of one key, as (offset, size)."""

    image: tuple[int, int] | None = None
    array: tuple[int, int] | None = None
    text: tuple[int, int] | None = None
    json: tuple[int, int] | None = None
    num_images: int = 0
    extensions: Counter[str] = field(default_factory=Counter)


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
    stored: StoredFile,
    source: str,
    captions: str,
    attributes: Sequence[str] = (),
    pixels: bool = False,
    remote: RemoteOptions | None = None,
    chosen: ShardFilter | None = None,
) -> ShardScan:
    """Reads the headers (and captions, ``attributes``, and with ``pixels`` images) of a tar shard.

    Members are grouped by webdataset's key rule, in any order within the shard. ``captions``:
    ``txt``, ``json:FIELD`` or several (``caption_fields``); text_offset and text_size point at that
    member (0 and 0 where there is none). A sample needs an image; an array (``.npy``) is the image
    where there is no picture. A sample without a caption has num_captions 0; this, fields without a
    caption and missing values of attributes are counted in the findings. Keys get the prefix
    ``source/``. Samples that are not ``chosen`` have no row and are counted by the filter's
    reasons. Raises ValueError for compressed tars (no random access), OSError where the file cannot
    be read, and the errors of the filter. A shard behind a url is fetched whole, once, as
    ``remote`` says.
    """
    path, findings, unseen = stored.path, Findings(), Findings()
    text_extension = "json" if (fields := caption_fields(captions)) else "txt"
    members = (TEXT_CRC, IMAGE_CRC) if pixels else (TEXT_CRC,)
    extra = [pa.field(name, pa.uint32()) for name in members]
    named = [*attributes, PER_FIELD] if len(fields) > 1 else attributes
    extra += [pa.field(ATTRIBUTE + name, TEXT) for name in named]
    rows: list[dict[str, Any]] = []
    taken: list[bool] = []
    with open_whole(stored, Remote(remote)) as file:
        head = file.read(6)
        if packed := next((n for magic, n in _COMPRESSED.items() if head.startswith(magic)), None):
            raise ValueError(
                f"{clean(path)} is compressed with {packed}: samples are read at random "
                "positions, which needs plain tar files. Decompress it first"
            )
        file.seek(0)
        groups = group_members(file, path, text_extension, findings)
        reasons: list[str | None] = [None] * len(groups)
        if chosen is not None:
            jsons = [group.json for group in groups.values()]
            reasons = chosen.why_not(path, [*groups], lambda n: read_member(file, jsons[n]), remote)
        for (key, group), reason in zip(groups.items(), reasons, strict=True):
            row: dict[str, Any] = {"key": f"{source}/{key}"}
            if reason is not None:
                findings.add(reason, row["key"])
            if _fill_row(row, file, group, captions, attributes, unseen if reason else findings):
                if pixels and reason is None:
                    row[IMAGE_CRC] = zlib.crc32(_read(file, group.image or group.array))
                rows.append({TEXT_CRC: 0, IMAGE_CRC: 0} | row)
                taken.append(reason is None)
    table = pa.RecordBatch.from_pylist(rows, schema=pa.schema([*ROW, *extra]))
    columns = {
        name: column.to_pylist()
        if pa.types.is_large_string(column.type) or pa.types.is_dictionary(column.type)
        else digest_array(column.to_numpy())
        for name, column in zip(table.schema.names, table.columns, strict=True)
        if name != IMAGE_CRC
    }
    return ShardScan(table.filter(pa.array(taken, pa.bool_())), findings, digest_json(columns))


def _fill_row(
    row: dict[str, Any],
    file: BinaryIO,
    group: Group,
    captions: str,
    attributes: Sequence[str],
    findings: Findings,
) -> bool:
    """Adds a sample's columns to its key, without the checksum of its image; False where it has no
    image that can be used."""
    full = row["key"]
    if group.num_images > 1:
        findings.add("several_images", full)
    if (most := max(group.extensions.values())) > 1:
        findings.add("duplicate_key", full, count=most - 1)
    image = group.image or group.array
    if image is None or image[1] == 0 or image[1] > MAX_IMAGE_BYTES:
        unusable = "no_image" if image is None else "large_image"
        findings.add("zero_byte_image" if image and not image[1] else unusable, full)
        return False
    text, reason, by_field = group.text, "no_caption", list[list[str]]()
    if text is not None and text[1] == 0:
        reason = "zero_byte_caption"
    elif text is not None and text[1] > MAX_TEXT_BYTES:
        text, reason = None, "large_caption"
    elif text is not None:
        data = _read(file, text)
        row[TEXT_CRC] = zlib.crc32(data)
        try:
            by_field = captions_by_field(data, captions)
        except ValueError:
            reason = "bad_json"
    num_captions = sum(map(len, by_field))
    if not num_captions:
        findings.add(reason, full)
    elif len(by_field) > 1:
        shares = caption_fields(captions)
        lacking = [name for name, texts in zip(shares, by_field, strict=True) if not texts]
        for name in lacking:
            findings.add(f"no_field:{name}", full)
        pairs = zip(by_field, shares.values(), strict=True)
        row[ATTRIBUTE + PER_FIELD] = " ".join(f"{len(t)}x{share!r}" for t, share in pairs if t)
    row |= zip(RANGES, (*image, *(text or (0, 0))), strict=True)
    row["num_captions"] = num_captions
    values = parse_attributes(read_member(file, group.json), attributes) if attributes else []
    for name, value in zip(attributes, values, strict=True):
        row[ATTRIBUTE + name] = value
        if value is None:
            findings.add(f"no_attribute:{name}", full)
    return True


def group_members(
    file: BinaryIO, path: str, text_extension: str, findings: Findings
) -> dict[str, Group]:
    """The members of a tar by key, in its order, up to the first fault, which is counted; of
    members of the same name the first is kept."""
    groups: dict[str, Group] = {}
    try:
        for member in read_members(file):
            split = None if len(member.name) > MAX_NAME else split_member_name(member.name)
            if member.sparse or (split is None and not _METADATA.match(member.name)):
                reason = "sparse_member" if member.sparse else "bad_name"
                cut = f"{member.name[:100]}... ({len(member.name)} characters)"
                name = ascii(member.name if len(member.name) <= MAX_NAME else cut)
                findings.add(reason, f"{name} in {clean(path)}")
            elif split is not None and not _METADATA.match(member.name):
                _add_member(groups.setdefault(split[0], Group()), split[1], member, text_extension)
    except TarFault as fault:
        log.debug("%s: %s", clean(path), fault)
        findings.add(fault.reason, clean(path))
    return groups


def _add_member(group: Group, extension: str, member: Member, text_extension: str) -> None:
    group.extensions[extension] += 1
    if group.extensions[extension] > 1:
        return
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


def _read(file: BinaryIO, place: tuple[int, int] | None) -> bytes:
    return b"" if place is None else os.pread(file.fileno(), place[1], place[0])


def read_member(file: BinaryIO, place: tuple[int, int] | None) -> bytes:
    """A member with text; empty where there is none or it is too large to be read."""
    return b"" if place is None or place[1] > MAX_TEXT_BYTES else _read(file, place)
