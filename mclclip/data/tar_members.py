"""The members of a tar file, from headers that are checked before they are believed.

Python's tarfile is not used for shards: up to 3.11 and 3.12 it goes back where a size is negative,
and then reads the same members for ever (CVE-2025-8194); a chain of headers that lengthen one name
exhausts its stack, and a size of 40 GB is read into memory. For a tar that it reads to its end it
gives the same names, places and sizes as this module does.

Understood are the formats of ustar (POSIX.1-1988), GNU tar and pax (POSIX.1-2001). A header counts
only if its checksum and all its numbers are right; what it asks for is bounded before it is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

BLOCK_BYTES = 512
MAX_EXTENSION_BYTES = 1 << 20
"""Of one header that lengthens a name or holds pax records."""

MAX_EXTENSIONS = 16
"""Such headers before one member; writers use at most four."""

_MAX_SPARSE_BLOCKS = 1 << 16  # headers of a sparse member, for 21 pieces each
_MAX_SIZE = 2**63 - 1
_LOOKED_AT_AFTER_END = 2 * 10_240
_ZEROS = bytes(BLOCK_BYTES)
_NUMBERS = ((100, 108), (108, 116), (116, 124), (136, 148), (329, 337), (337, 345))
_PAX_LENGTH = re.compile(rb"([1-9][0-9]{0,6}) ")
_FILES, _SPARSE, _WITHOUT_DATA = (b"0", b"\0", b"7"), b"S", (b"1", b"2", b"3", b"4", b"5", b"6")
_LINKS = (b"1", b"2")  # hard and symbolic
_LONG_NAME, _LONG_LINK, _PAX, _PAX_FOR_ALL = b"L", b"K", (b"x", b"X"), b"g"
_OF_GNU = (_SPARSE, _LONG_NAME, _LONG_LINK)


class TarFault(Exception):
    """Where and why a tar cannot be read any further. ``reason``: a key of shard_scan.REASONS."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in a tar: its content is ``size`` bytes at ``offset``.

    ``sparse``: it is stored without its holes, so these bytes are not its content. ``link``: it is
    no file but a link, which has no content. A name that is not UTF-8 has surrogates in the place
    of its other bytes.
    """

    name: str
    offset: int
    size: int
    sparse: bool
    link: bool = False


def read_members(file: BinaryIO) -> Iterator[Member]:
    """Yields the regular files and the links of a tar in its order.

    Raises TarFault where the tar cannot be read any further, after the members before that place;
    also where data follow its end, and where it has no members. Memory: what the headers of one
    member may hold.
    """
    reader = _Reader(file)
    while not reader.at_end():
        member = reader.next_member()
        if member is not None:
            yield member


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._start = self._at = 0  # of the member, of what is read next

    def at_end(self) -> bool:
        """Returns whether the end mark is next, which is a block of zeros.

        Raises TarFault for data after it, and where it is the first block.
        """
        self._start = self._at
        if self._read(BLOCK_BYTES) != _ZEROS:
            self._at = self._start
            return False
        rest = self._file.read(_LOOKED_AT_AFTER_END)
        if rest.strip(b"\0"):
            raise TarFault("data_after_end", f"data follow the end mark at byte {self._start}")
        if self._start == 0:
            raise TarFault("empty_shard", "it has no members")
        return True

    def next_member(self) -> Member | None:
        """The next member, or None where it is neither file nor link; goes to the one after it."""
        # Of several headers that give the next member's name or size the first one counts.
        name: str | None = None
        size: int | None = None
        sparse = False
        for _ in range(MAX_EXTENSIONS + 1):
            kind, own_name, own_size, has_more = self._header()
            if kind not in (_LONG_NAME, _LONG_LINK, _PAX_FOR_ALL, *_PAX):
                break
            if own_size > MAX_EXTENSION_BYTES:
                raise self._damage(f"a header with {own_size} bytes of names or records")
            data = self._read(_padded(own_size))
            if kind == _LONG_NAME and name is None:  # ends at its first zero, as for tarfile
                name = _text(data)
            if kind in (_LONG_NAME, _LONG_LINK):
                continue
            records = self._records(data[:own_size])
            sparse |= any(key.startswith(b"GNU.sparse.") for key in records)
            of_one = sparse or not records.keys().isdisjoint((b"path", b"size"))
            if kind == _PAX_FOR_ALL and of_one:
                raise self._damage("one path, size or sparse form for all members")
            if b"path" in records and name is None:
                name = records[b"path"].decode("utf-8", "surrogateescape").rstrip("/")
            if b"size" in records and size is None:
                if not re.fullmatch(rb"[0-9]{1,19}", records[b"size"]):
                    raise self._damage(f"the size {records[b'size'][:40]!r}")
                size = int(records[b"size"])
        else:
            raise self._damage(f"more than {MAX_EXTENSIONS} headers before one member")
        size = own_size if size is None else size
        if has_more:
            self._skip_sparse_headers()
        offset = self._at
        is_folder = kind == b"\0" and own_name.endswith("/")  # as before POSIX
        if kind in _LINKS:
            return Member(own_name if name is None else name, offset, 0, sparse=False, link=True)
        if kind in _WITHOUT_DATA or is_folder:
            return None
        if offset + size > self._size:
            raise TarFault("truncated_shard", f"{size} bytes at byte {offset} of {self._size}")
        self._at = offset + _padded(size)
        sparse |= kind == _SPARSE
        if not sparse and kind not in _FILES:
            return None
        return Member(own_name if name is None else name, offset, size, sparse)

    def _records(self, data: bytes) -> dict[bytes, bytes]:
        """The ``LENGTH KEY=VALUE`` lines of a pax header; of those with one key the last counts."""
        records: dict[bytes, bytes] = {}
        at = 0
        while at < len(data) and data[at]:
            length = _PAX_LENGTH.match(data, at)
            end = at + int(length[1]) if length else 0
            record = data[length.end() : end] if length else b""
            key, equals, value = record[:-1].partition(b"=")
            if end > len(data) or record[-1:] != b"\n" or not key or not equals:
                raise self._damage("a pax record that is none")
            records[key] = value
            at = end
        return records

    def _skip_sparse_headers(self) -> None:
        for _ in range(_MAX_SPARSE_BLOCKS):
            if not self._read(BLOCK_BYTES)[504]:
                return
        raise self._damage("a sparse member in too many pieces")

    def _header(self) -> tuple[bytes, str, int, bool]:
        """Kind, name and size of the next member, and whether more headers of a sparse one follow;
        TarFault for a header that is none."""
        block = self._read(BLOCK_BYTES)
        if not _checksum_fits(block):
            raise self._damage("a wrong checksum")
        for start, stop in _NUMBERS:
            if _number(block[start:stop]) is None:
                raise self._damage(f"no number at byte {start} of a header")
        kind, size = block[156:157], _number(block[124:136])
        if size is None or not 0 <= size <= _MAX_SIZE:
            raise self._damage(f"the size {block[124:136]!r}")
        name, prefix = _text(block[:100]), _text(block[345:500])
        if prefix and kind not in _OF_GNU:
            name = f"{prefix}/{name}"
        return kind, name, size, kind == _SPARSE and bool(block[482])

    def _read(self, size: int) -> bytes:
        """The next ``size`` bytes; TarFault where the file ends before."""
        self._file.seek(self._at)
        data = self._file.read(size) if self._at + size <= self._size else b""
        if len(data) < size:
            reason = "truncated_shard" if self._start else "unreadable_shard"
            raise TarFault(reason, f"it ends at byte {self._size} within headers")
        self._at += size
        return data

    def _damage(self, what: str) -> TarFault:
        """Returns the fault of a broken header: ``damaged_shard`` behind good members, which are
        used, and ``unreadable_shard`` where there are none."""
        reason = "damaged_shard" if self._start else "unreadable_shard"
        return TarFault(reason, f"{what}, at byte {self._at}")


def _padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(data: bytes) -> int | None:
    """A number in octal digits, or in base 256 after a byte of 128 (255: it is negative); None for
    anything else. Blank is 0."""
    if data[0] in (128, 255):
        return int.from_bytes(data if data[0] == 255 else data[1:], "big", signed=data[0] == 255)
    digits = data.partition(b"\0")[0].strip()
    if not digits:
        return 0
    return int(digits, 8) if re.fullmatch(rb"[0-7]+", digits) else None


def _checksum_fits(block: bytes) -> bool:
    """Returns whether a header's sum is right; some old writers add its bytes as signed ones."""
    wanted = _number(block[148:156])
    others = block[:148] + block[156:]
    found = sum(others) + 8 * ord(" ")
    return wanted == found or wanted == found - 256 * sum(byte > 127 for byte in others)
