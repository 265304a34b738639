"""Tars as a stranger may make them: whole ones in every dialect, and mutations from a seed."""

from __future__ import annotations

import functools
import io
import json
import random
import tarfile
from collections.abc import Callable

BLOCK = 512
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)

Operation = Callable[[random.Random, bytearray], bytearray]


# --- headers by hand ----------------------------------------------------------------------------


def with_checksum(block: bytes | bytearray) -> bytes:
    """A header with the checksum that fits its other bytes."""
    summed = sum(block[:148]) + sum(block[156:]) + 8 * 32
    return bytes(block[:148]) + b"%06o\0 " % summed + bytes(block[156:])


def header(name: str = "x.jpg", kind: bytes = b"0", size: bytes = b"%011o\0" % 0) -> bytes:
    """One block; ``size`` is its field of 12 bytes as it stands there."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape"))
    block[124:136], block[156:157] = size, kind
    return with_checksum(block)


def base_256(size: int) -> bytes:
    """The field of a size in base 256, as GNU tar writes large ones."""
    return (b"\x80" if size >= 0 else b"\xff") + (size % 256**11).to_bytes(11, "big")


def octal(size: int) -> bytes:
    """The field of a size in octal digits."""
    return b"%011o\0" % size


def padded(data: bytes) -> bytes:
    """The data of a member, filled up to whole blocks."""
    return data + bytes(-len(data) % BLOCK)


def record(key: str, value: str) -> bytes:
    """One pax record."""
    rest = f" {key}={value}\n".encode()
    length = len(rest) + len(str(len(rest)))
    length += len(str(length)) - len(str(len(rest)))
    return str(length).encode() + rest


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    """A pax header with these records."""
    data = b"".join(records)
    return header("PaxHeader", kind, octal(len(data))) + padded(data)


def long_name(name: str) -> bytes:
    """GNU tar's header for a long name."""
    data = name.encode() + b"\0"
    return header("././@LongLink", b"L", octal(len(data))) + padded(data)


def member(name: str, data: bytes = b"") -> bytes:
    """A regular file."""
    return header(name, size=octal(len(data))) + padded(data)


# --- whole tars ---------------------------------------------------------------------------------


@functools.cache
def whole(dialect: int, num_samples: int = 3, name: str = "", long: bool = True) -> bytes:
    """A good shard: images, captions and attributes, a folder, a link, and perhaps long names."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=dialect) as tar:
        folder = tarfile.TarInfo("d")
        folder.type = tarfile.DIRTYPE
        link = tarfile.TarInfo("d/link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "x.jpg"
        for info in (folder, link):
            tar.addfile(info)
        for number in range(num_samples):
            key = (
                f"{name}{'d' * 60}/{'é' * 45}{number}" if long and number % 2 else f"{name}{number}"
            )
            facts = json.dumps({"caption": [f"a {number}", "b"], "shape": number})
            members = (("jpg", b"image" * 150), ("txt", b"a caption"), ("json", facts.encode()))
            for extension, data in members:
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size, info.mtime = len(data), number + 0.5 * (dialect == tarfile.PAX_FORMAT)
                tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


# --- mutations ----------------------------------------------------------------------------------

_SIZES = [
    *map(base_256, (-512, -1024, -1, -(2**80), 0, 600, 40 << 30, 2**63, 2**80, 2**87)),
    *map(octal, (0, 1, 511, 512, 513, 1 << 20, (1 << 33) - 1)),
    b"-0000001000\0", b"+0000001000\0", b"0o000001000\0", b"00000_01000\0", b" " * 12, b"\0" * 12,
    b"99999999999\0", b"\x81" + bytes(11), b"\xfe" * 12, b"777777777777", b"12\0garbage12",
]  # fmt: skip
_KINDS = [bytes([code]) for code in b"\x000123456789ABDKLMNSVXgxz\xff "]
_RECORDS = [
    *(record("size", text) for text in ("-1024", "-1", "0", "600", "40000000000", "1e9", "", " 12",
                                        "9" * 19, "9" * 400, "1_000", "\uff11")),
    *(record("path", text) for text in ("p.jpg", "../p.jpg", "a\nb.jpg", "a\x1b[31m.jpg", "/", "")),
    *(record(f"GNU.sparse.{key}", "1") for key in ("major", "map", "size", "name", "realsize")),
    record("GNU.sparse.numblocks", "9" * 30), record("hdrcharset", "BINARY"),
    b"0 path=x\n", b"9999999 path=x\n", b"12 path=x", b"-5 path=x\n", b"6 =xx\n", b"junk\n",
    b"9" * 5000 + b" path=x\n", b"", b"\0" * 40, b"1 x\n", b"3 \n", record("comment", "x" * 3000),
]  # fmt: skip


def _headers(data: bytearray) -> list[int]:
    """Places of the blocks whose checksum fits."""
    places = range(0, len(data) - BLOCK + 1, BLOCK)
    return [
        at for at in places if bytes(data[at : at + BLOCK]) == with_checksum(data[at : at + BLOCK])
    ]


def _a_block(rng: random.Random, data: bytearray) -> int:
    return rng.randrange(len(data) // BLOCK + 1) * BLOCK


def _change_header(rng: random.Random, data: bytearray) -> bytearray:
    places = _headers(data)
    if not places:
        return data
    at = rng.choice(places)
    block = data[at : at + BLOCK]
    field = rng.choice(["size", "size", "size", "kind", "kind", "bytes", "sparse"])
    if field == "size":
        block[124:136] = rng.choice(_SIZES)
    elif field == "kind":
        block[156:157] = rng.choice(_KINDS)
    elif field == "sparse":
        block[156:157] = b"S"
        block[386:495] = rng.randbytes(109)
    else:
        where, length = rng.randrange(BLOCK), rng.randint(1, 12)
        block[where : where + length] = rng.randbytes(min(length, BLOCK - where))
    data[at : at + BLOCK] = with_checksum(block) if rng.random() < 0.9 else block
    return data


def _insert(rng: random.Random, data: bytearray) -> bytearray:
    copied = _a_block(rng, data)
    at = rng.choice([0, *_headers(data)]) if rng.random() < 0.8 else _a_block(rng, data)
    blocks = rng.choice(
        [
            lambda: bytes(BLOCK),
            lambda: rng.randbytes(BLOCK),
            lambda: bytes(data[copied : copied + BLOCK]),
            lambda: long_name("n" * rng.choice([0, 50, 511, 512, 5000])) * rng.choice([1, 2, 200]),
            lambda: pax(*rng.choices(_RECORDS, k=rng.randint(1, 3)), kind=rng.choice([b"x", b"g"])),
            lambda: header("s.jpg", b"S", rng.choice(_SIZES)) + rng.randbytes(BLOCK) * 3,
            lambda: header("k", rng.choice(_KINDS), rng.choice(_SIZES)),
        ]
    )()  # fmt: skip
    return data[:at] + blocks + data[at:]


def _flip(rng: random.Random, data: bytearray) -> bytearray:
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return data


def _cut(rng: random.Random, data: bytearray) -> bytearray:
    return data[: rng.randrange(1, len(data) + 1)]


def _remove(rng: random.Random, data: bytearray) -> bytearray:
    at = _a_block(rng, data)
    return data[:at] + data[at + BLOCK * rng.randint(1, 3) :]


def _append(rng: random.Random, data: bytearray) -> bytearray:
    return data + rng.choice([bytes(BLOCK), rng.randbytes(700), bytes(data[: 3 * BLOCK])])


_OPERATIONS: list[Operation] = [
    _change_header, _change_header, _insert, _flip, _cut, _remove, _append,
]  # fmt: skip


def mutated(seed: int) -> tuple[bytes, bytes]:
    """A good tar, and the same after one to three mutations that this seed draws."""
    rng = random.Random(seed)
    good = whole(rng.choice(FORMATS), rng.randint(1, 3))
    data = bytearray(good)
    for _ in range(rng.choice([1, 1, 2, 3])):
        data = rng.choice(_OPERATIONS)(rng, data) if data else data
    return good, bytes(data)
