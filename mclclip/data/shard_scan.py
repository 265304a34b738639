"""Scans one tar shard for its samples, the places of their bytes, and faults.

Only headers, captions and attributes are read. Members are grouped by webdataset's key rule, so
that samples have the keys that a webdataset reader would give them. Since a shard may come from
anybody, everything that is read has a bound, and faults are counted by their reasons.
"""

from __future__ import annotations

import codecs
import itertools
import json
import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

# pyarrow would import pandas at its first table. It is imported here, before any connection is
# open: if one is garbage collected during an import, Python 3.11 fails (KeyError in importlib).
import pandas as pd  # noqa: F401
import pyarrow as pa

from mclclip.data.decode import IMAGE_EXTENSIONS
from mclclip.data.findings import LFS_POINTER, NO_TEXTS, REASONS, Findings, nearly_all
from mclclip.data.remote import Remote, RemoteOptions, StoredFile, open_whole
from mclclip.data.shard_filter import ShardFilter
from mclclip.data.tar_members import Member, TarFault, read_members
from mclclip.util.files import digest_array, digest_json, parse_json, printable, read_bounded

log = logging.getLogger("mclclip")
ARRAY_EXTENSION = "npy"
_READ_EXTENSIONS = frozenset((*IMAGE_EXTENSIONS, ARRAY_EXTENSION, "txt", "json"))
MAX_NAME = 4096  # characters of a member's name
MAX_TEXT_BYTES = 1 << 24
"""Most bytes of a sample's captions or ``.json``."""

MAX_IMAGE_BYTES = 1 << 30
_POINTER_BYTES = 1024  # most bytes of a pointer of git-lfs, by its specification
RANGES = ("image_offset", "image_size", "text_offset", "text_size")
ROW = pa.schema(
    [("key", pa.large_string()), *((name, pa.int64()) for name in RANGES)]
    + [("num_captions", pa.int32())]
)
# CRC-32 of the member with the captions (0: none), and of the image if images are read.
TEXT_CRC, IMAGE_CRC = "text_crc32", "image_crc32"
ATTRIBUTE = "attribute:"  # begins the names of the columns of attributes, which hold TEXT
PER_FIELD = "captions per field"
"""An attribute of samples whose captions come from several fields: ``2x0.3 1x0.7`` means two
captions of a field that is drawn with the probability 0.3, and one of a field of 0.7."""
TEXT = pa.dictionary(pa.int32(), pa.large_string())
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_METADATA = re.compile(r"__[^/]*__($|/)")  # webdataset's names of members that are no samples


# --- captions --------------------------------------------------------------------------------


def captions_text(captions: str | Mapping[str, float]) -> str:
    """Returns ``data.sources.NAME.captions`` as a text for `Shard.captions`; a mapping as JSON."""
    if isinstance(captions, str):
        return captions
    return next(iter(captions)) if len(captions) == 1 else json.dumps(dict(captions))


def caption_fields(captions: str) -> dict[str, float]:
    """Parses the result of `captions_text` to {JSON field: its probability}.

    It is empty for ``txt`` and ``lines``, and has one field for ``json:FIELD``. Raises ValueError
    for anything else.
    """
    shares = {captions: 1.0}
    if captions.startswith("{"):
        shares = parse_json(captions.encode(), "captions")
    elif captions in ("txt", "lines"):
        return {}
    for key in shares or [captions]:
        if not key.startswith("json:") or key == "json:":
            single = "'txt', 'lines' or 'json:FIELD'"
            expected = single if len(shares) == 1 else "'json:FIELD' for every field"
            raise ValueError(f"captions is {key!r}, expected {expected}")
    return {key.removeprefix("json:"): share for key, share in shares.items()}


def captions_by_field(data: bytes, captions: str) -> list[list[str]]:
    """Parses a ``.txt`` or ``.json`` member: a list of captions for each field of ``captions``.

    For ``txt`` (one caption) and ``lines`` (one on each line) there is one list. A JSON field holds
    a string or a list of strings; a missing field or another type has no caption. Captions are
    stripped; blank ones and `NO_TEXTS` do not count. Raises ValueError for JSON that does not
    parse, and the errors of ``read_text``.
    """
    fields: list[Any] = []
    if names := caption_fields(captions):
        tree = parse_json(data, "a sample's .json")
        fields = [tree.get(name) if isinstance(tree, dict) else None for name in names]
    else:
        text = read_text(data)
        fields = [text.splitlines() if captions == "lines" else text]
    by_field = []
    for values in fields:
        listed = [values] if isinstance(values, str) else values
        listed = listed if isinstance(listed, list) else []
        # JSON may have half a surrogate pair (\ud800), which a tokenizer could not encode.
        texts = (v.encode("utf-8", "replace").decode() for v in listed if isinstance(v, str))
        by_field.append([text for text in map(str.strip, texts) if is_caption(text)])
    return by_field


def is_caption(text: str) -> bool:
    """Returns False if a stripped text is blank or a word for a missing value."""
    seen = any(map(str.isprintable, text.replace(" ", "")))  # unlike a zero-width space
    return seen and (len(text) > 4 or text.lower() not in NO_TEXTS)


def read_text(data: bytes) -> str:
    """Decodes a text: UTF-8, or UTF-16 or UTF-32 if its byte order mark says so.

    Raises TextFault for other text and for a pointer of git-lfs.
    """
    if data.startswith(LFS_POINTER):
        raise TextFault("lfs_pointer")
    try:
        return data.decode(encoding_of(data))
    except UnicodeDecodeError:
        raise TextFault("bad_text") from None


def read_text_file(path: Path) -> str:
    """Reads the text of a file; ValueError, which names the file, if that fails."""
    try:
        return read_text(read_bounded(path, MAX_TEXT_BYTES))
    except TextFault as fault:
        raise ValueError(f"{path} cannot be read: {REASONS[fault.reason]}") from None


def num_lines(text: str) -> int:
    """Counts the lines that are not blank."""
    return sum(1 for line in text.splitlines() if line.strip())


def form_of_texts(files: Iterable[bytes], what: str) -> str:
    """Guesses from the first thousand texts if a text is one caption ('txt') or several ('lines').

    It is 'lines' if nearly all have the same number of lines, more than one. Then it logs so;
    ``what`` names the texts.
    """
    counts: Counter[int] = Counter()
    numbers = 0
    for data in itertools.islice(files, 1000):
        with suppress(TextFault):
            counts[num_lines(text := read_text(data))] += 1
            numbers += not any(map(str.isalpha, text)) and any(map(str.isdigit, text))
    if numbers and numbers >= nearly_all(counts.total()):
        log.warning(
            "nearly all texts of %s hold numbers alone: are they labels, or captions?", what
        )
    (number, texts), *_ = [*counts.most_common(1), (0, 0)]
    if number < 2 or texts < nearly_all(counts.total()):
        return "txt"
    log.info("nearly all texts of %s have %d lines: each line is read as a caption", what, number)
    return "lines"


def encoding_of(data: bytes) -> str:
    """Returns the encoding by the byte order mark at the start of a file; UTF-8 without one."""
    if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    return "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


class TextFault(ValueError):
    """A text that cannot be read; ``reason`` is one of `findings.REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def parse_captions(data: bytes, captions: str) -> list[str]:
    """Parses all captions of a member (`captions_by_field`), those of the first field first."""
    return [text for texts in captions_by_field(data, captions) for text in texts]


# --- attributes ------------------------------------------------------------------------------


def check_names(names: Sequence[str]) -> list[str]:
    """Returns names of attributes as a list; ValueError for a blank or a repeated one."""
    if "" in map(str.strip, names) or len(set(names)) < len(names):
        raise ValueError(f"got {list(names)}: wanted names of JSON fields, each once")
    return [*names]


def parse_attributes(data: bytes, names: Sequence[str]) -> list[str | None]:
    """Parses the values of attributes from a ``.json`` member; None for a missing value.

    A value is a string or a whole number; 3, 3.0 (as pandas writes numbers of a column with gaps)
    and the string "3" are the same value. Everything else (true, a fraction, a list, an object,
    null, a blank string, a missing field, JSON that does not parse) is a missing value.
    """
    try:
        tree = parse_json(data, "attributes")
    except ValueError:
        tree = None
    values: list[str | None] = []
    for name in names:
        value = tree.get(name) if isinstance(tree, dict) else None
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            values.append(str(value))
        elif isinstance(value, str) and value.strip():
            # JSON may have half a surrogate pair (\ud800), which the table could not hold.
            values.append(value.encode("utf-8", "replace").decode())
        else:
            values.append(None)
    return values


# --- scanning one shard ----------------------------------------------------------------------


@dataclass(frozen=True)
class ShardScan:
    """The samples of one shard in tar order.

    rows      the columns of ROW and TEXT_CRC, IMAGE_CRC if images were read, and one per attribute
    findings  counts of everything that is not used
    digest    digest of the members, captions and attributes of all samples, including those that a
              filter leaves out, so that it does not depend on the filter; images do not count
    """

    rows: pa.RecordBatch
    findings: Findings
    digest: str


@dataclass(slots=True)
class Group:
    """The members of one key, each as (offset, size)."""

    image: tuple[int, int] | None = None
    array: tuple[int, int] | None = None
    text: tuple[int, int] | None = None
    json: tuple[int, int] | None = None
    num_images: int = 0
    extensions: Counter[str] = field(default_factory=Counter)

    @property
    def num_dotted(self) -> int:
        """The number of pictures with more dots in their name, which are parts of another key.
        Beside a text of the key itself they are masks and the like, and do not count."""
        suffixes = [extension.rpartition(".")[2] for extension in self.extensions]
        return 0 if self.text or self.json else sum(s in IMAGE_EXTENSIONS for s in suffixes)

    def full_key(self, key: str) -> str:
        """Names a group for messages: 'cats/1 (1.txt, 1.jpg.txt: names are cut at ...)'."""
        names = [f"{key.rpartition('/')[2]}.{extension}" for extension in self.extensions]
        cut = ": names are cut at their first dot" if any("." in e for e in self.extensions) else ""
        return f"{key} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}{cut})"


def split_member_name(name: str) -> tuple[str, str] | None:
    """Splits the name of a tar member at the first dot of its base name.

    Returns (key, extension in lower case), or None if one of them is empty or the name is not
    UTF-8. For example 'a/b.seg.PNG' gives ('a/b', 'seg.png').
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
    subset: ShardFilter | None = None,
) -> ShardScan:
    """Reads headers, captions and ``attributes`` of a tar shard, and with ``pixels`` the images.

    source    begins the keys, ``source/key``
    captions  where captions are, in the form of `captions_text`; text_offset and text_size are the
              place of that member (0 and 0: there is none)
    remote    how a url is read; its shard is fetched once, as a whole
    subset    chooses samples; the others have no row and are counted in the findings

    Members of a key may lie anywhere in the shard. A sample needs an image; an array (``.npy``)
    counts if there is no picture. Findings also count samples without a caption, and missing fields
    and attributes. Raises ValueError for a compressed tar, OSError, and the errors of the filter.
    """
    path, findings, unseen = stored.path, Findings(), Findings()
    text_extension = "json" if (fields := caption_fields(captions)) else "txt"
    members = (TEXT_CRC, IMAGE_CRC) if pixels else (TEXT_CRC,)
    extra = [pa.field(name, pa.uint32()) for name in members]
    names = [*attributes, PER_FIELD] if len(fields) > 1 else attributes
    extra += [pa.field(ATTRIBUTE + name, TEXT) for name in names]
    rows: list[dict[str, Any]] = []
    taken: list[bool] = []
    with open_whole(stored, Remote(remote)) as file:
        head = file.read(len(LFS_POINTER))
        if packed := next((n for magic, n in _COMPRESSED.items() if head.startswith(magic)), None):
            raise ValueError(
                f"{printable(path)} is compressed with {packed}: samples are read at random "
                "positions, which needs plain tar files. Decompress it first"
            )
        file.seek(0)
        groups = group_members(file, path, text_extension, findings)
        reasons: list[str | None] = [None] * len(groups)
        if subset is not None:
            jsons = [group.json for group in groups.values()]
            reasons = subset.why_not(path, [*groups], lambda n: read_member(file, jsons[n]), remote)
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
    """Adds columns to the ``row`` of a sample, which has its key; False without a usable image."""
    full = row["key"]
    if group.num_images > 1:
        findings.add("several_images", full)
    if (most := max(group.extensions.values())) > 1:
        findings.add("duplicate_key", full, count=most - 1)
    image = group.image or group.array
    if image is None or image[1] == 0 or image[1] > MAX_IMAGE_BYTES:
        dotted = 0 if image else group.num_dotted
        unusable = "large_image" if image else "dotted_name" if dotted else "no_image"
        reason = "zero_byte_image" if image and not image[1] else unusable
        findings.add(reason, full if image else group.full_key(full), count=max(1, dotted))
        return False
    if image[1] < _POINTER_BYTES and _read(file, image).startswith(LFS_POINTER):
        findings.add("lfs_pointer", full)
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
        except TextFault as fault:
            reason = fault.reason
        except ValueError:
            reason = "bad_json"
        if captions == "txt" and b"\n" in data and by_field:
            if by_field[0] and (lines := num_lines(by_field[0][0])) > 1:
                findings.add(f"several_lines:{lines}", full)
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
    """Groups the members of a tar by key, up to the first fault, which is counted.

    Of members of the same name the first one counts.
    """
    groups: dict[str, Group] = {}
    try:
        for member in read_members(file):
            split = None if len(member.name) > MAX_NAME else split_member_name(member.name)
            if member.link or (split is None and not _METADATA.match(member.name)):
                reason = "link_member" if member.link else "bad_name"
                cut = f"{member.name[:100]}... ({len(member.name)} characters)"
                name = ascii(member.name if len(member.name) <= MAX_NAME else cut)
                findings.add(reason, f"{name} in {printable(path)}")
            elif split is not None and not _METADATA.match(member.name):
                group = groups.setdefault(split[0], Group())
                _add_member(group, split[1], member, text_extension)
                if split[1] not in _READ_EXTENSIONS and split[1] != text_extension:
                    findings.add("other_member", f"{printable(member.name)} in {printable(path)}")
    except TarFault as fault:
        log.debug("%s: %s", printable(path), fault)
        file.seek(0)
        is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        findings.add("lfs_shard" if is_pointer else fault.reason, printable(path))
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
    """Reads a member with text; empty if there is none or it is too large."""
    return b"" if place is None or place[1] > MAX_TEXT_BYTES else _read(file, place)
