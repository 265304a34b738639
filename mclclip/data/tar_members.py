"""Lists the members of a tar file, after checks of every header.

Python's tarfile is not safe for shards of strangers. Versions up to 3.12 go back if a size is
negative, and read the same members for ever (CVE-2025-8194); a chain of headers with long names
exhausts the stack, and a header of 40 GB is read into memory. For a tar that tarfile can read, this
module gives the same names, places and sizes.

It reads the formats ustar (POSIX.1-1988), GNU tar and pax (POSIX.1-2001). A header counts only if
its checksum and all its numbers are right, and it is not longer than a bound.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

BLOCK_BYTES = 512
MAX_EXTENSION_BYTES = 1 << 20
"""Most bytes of a header that holds a long name or pax records."""

MAX_EXTENSIONS = 16
"""Most such headers before one member; writers use at most four."""

_MAX_SIZE = 2**63 - 1
_LOOKED_AT_AFTER_END = 2 * 10_240
_ZEROS = bytes(BLOCK_BYTES)
_NUMBERS = ((100, 108), (108, 116), (116, 124), (136, 148), (329, 337), (337, 345))
_PAX_LENGTH = re.compile(rb"([1-9][0-9]{0,6}) ")
_FILES, _WITHOUT_DATA = (b"0", b"\0", b"7"), (b"1", b"2", b"3", b"4", b"5", b"6")
_LINKS = (b"1", b"2")  # hard and symbolic
_LONG_NAME, _LONG_LINK, _PAX, _PAX_FOR_ALL = b"L", b"K", (b"x", b"X"), b"g"


class TarFault(Exception):
    """A tar cannot be read any further; ``reason`` is one of `findings.REASONS`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file or a link in a tar: its content is ``size`` bytes at ``offset``.

    link  it is a link, which has no content

    In a name that is not UTF-8, surrogates stand for the other bytes.
    """

    name: str
    offset: int
    size: int
    link: bool = False


def read_members(file: BinaryIO) -> Iterator[Member]:
    """Yields the regular files and the links of a tar, in their order.

    Raises TarFault where the tar cannot be read any further, if data follow its end, and if it has
    no members. Memory: the headers of one member.
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
        self._start = self._at = 0  # offsets of the present member, and of the next read

    def at_end(self) -> bool:
        """Returns True if the next block is the end mark, a block of zeros.

        Raises TarFault if data follow it, and if it is the first block.
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
        """Reads the next member; returns None if it is neither a file nor a link."""
        # If several headers have the member's name or size, the first one counts.
        name: str | None = None
        size: int | None = None
        for _ in range(MAX_EXTENSIONS + 1):
            kind, header_name, header_size = self._header()
            if kind not in (_LONG_NAME, _LONG_LINK, _PAX_FOR_ALL, *_PAX):
                break
            if header_size > MAX_EXTENSION_BYTES:
                raise self._damage(f"a header with {header_size} bytes of names or records")
            data = self._read(_pad(header_size))
            if kind == _LONG_NAME and name is None:  # it ends at its first zero, as in tarfile
                name = _text(data)
            if kind in (_LONG_NAME, _LONG_LINK):
                continue
            records = self._records(data[:header_size])
            if any(key.startswith(b"GNU.sparse.") for key in records):
                raise self._damage("a member stored without its holes")
            if kind == _PAX_FOR_ALL and not records.keys().isdisjoint((b"path", b"size")):
                raise self._damage("one path or size for all members")
            if b"path" in records and name is None:
                name = records[b"path"].decode("utf-8", "surrogateescape").rstrip("/")
            if b"size" in records and size is None:
                if not re.fullmatch(rb"[0-9]{1,19}", records[b"size"]):
                    raise self._damage(f"the size {records[b'size'][:40]!r}")
                size = int(records[b"size"])
        else:
            raise self._damage(f"more than {MAX_EXTENSIONS} headers before one member")
        size = header_size if size is None else size
        offset = self._at
        is_folder = kind == b"\0" and header_name.endswith("/")  # in tars older than POSIX
        if kind in _LINKS:
            return Member(header_name if name is None else name, offset, 0, link=True)
        if kind in _WITHOUT_DATA or is_folder:
            return None
        if offset + size > self._size:
            raise TarFault("truncated_shard", f"{size} bytes at byte {offset} of {self._size}")
        self._at = offset + _pad(size)
        if kind not in _FILES:
            return None
        return Member(header_name if name is None else name, offset, size)

    def _records(self, data: bytes) -> dict[bytes, bytes]:
        """Parses the ``LENGTH KEY=VALUE`` lines of a pax header; the last line of a key counts."""
        records: dict[bytes, bytes] = {}
        at = 0
        while at < len(data) and data[at]:
            length = _PAX_LENGTH.match(data, at)
            end = at + int(length[1]) if length else 0
            record = data[length.end() : end] if length else b""
            key, equals, value = record[:-1].partition(b"=")
            if end > len(data) or record[-1:] != b"\n" or not key or not equals:
                raise self._damage("a broken pax record")
            records[key] = value
            at = end
        return records

    def _header(self) -> tuple[bytes, str, int]:
        """Reads the kind, name and size of the next header; raises TarFault if it is damaged, or is
        that of a member that is stored without its holes (tar --sparse)."""
        block = self._read(BLOCK_BYTES)
        if not _checksum_fits(block):
            raise self._damage("a wrong checksum")
        for start, stop in _NUMBERS:
            if _number(block[start:stop]) is None:
                raise self._damage(f"no number at byte {start} of a header")
        kind, size = block[156:157], _number(block[124:136])
        if kind == b"S":
            raise self._damage("a member stored without its holes")
        if size is None or not 0 <= size <= _MAX_SIZE:
            raise self._damage(f"the size {block[124:136]!r}")
        name, prefix = _text(block[:100]), _text(block[345:500])
        if prefix and kind not in (_LONG_NAME, _LONG_LINK):
            name = f"{prefix}/{name}"
        return kind, name, size

    def _read(self, size: int) -> bytes:
        """Reads the next ``size`` bytes; raises TarFault if the file ends before."""
        self._file.seek(self._at)
        data = self._file.read(size) if self._at + size <= self._size else b""
        if len(data) < size:
            reason = "truncated_shard" if self._start else "unreadable_shard"
            raise TarFault(reason, f"it ends at byte {self._size} within headers")
        self._at += size
        return data

    def _damage(self, what: str) -> TarFault:
        """Returns the fault of a damaged header.

        Its reason is 'damaged_shard' after good members, which are used, and 'unreadable_shard' if
        there are none.
        """
        reason = "damaged_shard" if self._start else "unreadable_shard"
        return TarFault(reason, f"{what}, at byte {self._at}")


def _pad(size: int) -> int:
    """Rounds a size up to whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(data: bytes) -> int | None:
    """Parses a number of a header: octal digits, or blank for 0; None for anything else.

    After a first byte of 128, or 255 for a negative number, it is in base 256.
    """
    if data[0] in (128, 255):
        return int.from_bytes(data if data[0] == 255 else data[1:], "big", signed=data[0] == 255)
    digits = data.partition(b"\0")[0].strip()
    if not digits:
        return 0
    return int(digits, 8) if re.fullmatch(rb"[0-7]+", digits) else None


def _checksum_fits(block: bytes) -> bool:
    """Returns True if a header's checksum is right; some old writers add its bytes as signed."""
    checksum = _number(block[148:156])
    others = block[:148] + block[156:]
    total = sum(others) + 8 * ord(" ")
    return checksum in (total, total - 256 * sum(byte > 127 for byte in others))
