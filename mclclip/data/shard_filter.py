"""Chooses samples of a shard by a file of their uids.

img2dataset writes ``00000.parquet`` beside ``00000.tar``, one row per url, with the sample's
``key``; DataComp adds ``uid``, 128 bits as 32 hex digits. A subset is DataComp's: a ``.npy`` of
dtype ``u8,u8``, sorted, each row the upper and the lower 64 bits of a uid. A uid that occurs there
several times (DataComp's resharder repeats such a sample) chooses its sample once.

A filter goes to the process that scans the shard. It searches the uids on the disk, of which there
may be more than fit into memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mclclip.data.arrays import open_given_npy
from mclclip.data.remote import Remote, RemoteOptions, StoredFile, open_whole
from mclclip.util.files import digest_parts, message_of, parse_json, printable
from mclclip.util.options import protocol_of

log = logging.getLogger("mclclip")

UID = np.dtype("u8,u8")
MAX_METADATA_BYTES = 1 << 32
"""Of one parquet, before compression."""

MAX_METADATA_ROWS = 1 << 26
UIDS_AT_ONCE = 1 << 20
_HEX = "^[0-9a-fA-F]{1,32}$"

# --- uids ------------------------------------------------------------------------------------


def open_uids(path: str) -> npt.NDArray[np.void]:
    """The uids of a subset's file, [n] of dtype `UID`, memory-mapped.

    Raises FileNotFoundError, and ValueError for a file of anything else.
    """
    uids = open_given_npy(Path(path), "uids")
    if uids.dtype != UID or uids.ndim != 1:
        raise ValueError(
            f"{path} holds {uids.dtype} {list(uids.shape)}, wanted one row of uids, "
            "numpy.dtype('u8,u8'): the upper and the lower 64 bits of each, sorted, saved by "
            "numpy.save"
        )
    return uids


def digest_uids(path: str) -> str:
    """Digest of the uids of a subset's file, read once, a block at a time.

    Raises the errors of ``open_uids``, and ValueError where they are not sorted.
    """
    uids = open_uids(path)
    log.info("index: reading %s, %s uids", path, f"{len(uids):,}")
    repeated: list[int] = []
    blocks = _in_order(path, len(uids), getattr(uids, "offset", 0), repeated)
    digest = digest_parts(UID, uids.shape, blocks)
    if any(repeated):
        log.warning(
            "index: %s names %s samples again that it has named: each is taken once",
            path,
            f"{sum(repeated):,}",
        )
    return digest


def _in_order(
    path: str, number: int, offset: int, repeated: list[int]
) -> Iterator[npt.NDArray[np.void]]:
    """The uids block by block, not through the map, whose pages would count as memory in use.

    The number of those that are equal to the one before is added to ``repeated``, by block.
    """
    last = np.zeros(0, UID)
    with open(path, "rb") as file:
        file.seek(offset)
        for start in range(0, number, UIDS_AT_ONCE):
            block = np.fromfile(file, UID, min(UIDS_AT_ONCE, number - start))
            both = np.concatenate([last, block])
            # Upper halves decide nearly all, so that few lower ones are compared.
            doubtful = np.flatnonzero(both["f0"][1:] <= both["f0"][:-1])
            before, after = both[doubtful], both[doubtful + 1]
            if (wrong := doubtful[_is_less(after, before)]).size:
                raise ValueError(
                    f"{path} is not sorted: uid number {start + int(wrong[0]) + 1 - len(last)} is "
                    "less than the one before. Sort it (uids.sort() in numpy) and save it again"
                )
            repeated.append(int((after == before).sum()))
            last = block[-1:]
            yield block


def _is_less(left: npt.NDArray[np.void], right: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    upper, lower = left["f0"] < right["f0"], left["f1"] < right["f1"]
    return np.asarray(upper | ((left["f0"] == right["f0"]) & lower))


def is_in(wanted: npt.NDArray[np.void], uids: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """bool [n]: whether each of the wanted [n] is among the sorted uids.

    A bisection of all wanted ones at once: memory by their number. numpy's searchsorted compares
    rows one by one, and copies the upper halves of all uids if it is given these.
    """
    if not len(uids):
        return np.zeros(len(wanted), bool)
    uids, last = np.asarray(uids), len(uids) - 1
    low, high = np.zeros(len(wanted), np.int64), np.full(len(wanted), len(uids))
    for _ in range(len(uids).bit_length()):
        middle = (low + high) // 2
        less = _is_less(uids[np.minimum(middle, last)], wanted) & (low < high)
        low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
    return np.asarray(uids[np.minimum(low, last)] == wanted)


def to_uids(texts: pa.Array) -> tuple[npt.NDArray[np.void], npt.NDArray[np.bool_]]:
    """Uids [n] of hex digits, and bool [n], False for what is none (then the uid is 0).

    Leading zeros may be missing.
    """
    good = pc.fill_null(pc.match_substring_regex(texts, _HEX), False)
    digits = pc.ascii_lpad(pc.if_else(good, texts, "0"), 32, "0").to_pylist()
    halves = np.frombuffer(bytes.fromhex("".join(digits)), ">u8").astype("<u8")
    return halves.view(UID), np.asarray(good.to_numpy(zero_copy_only=False), bool)


# --- the metadata beside a shard -------------------------------------------------------------


def metadata_path(shard: str) -> str:
    """Where img2dataset puts the metadata of a shard, a path or a url."""
    path, mark, query = shard.partition("?") if protocol_of(shard) else (shard, "", "")
    return f"{path.removesuffix('.tar')}.parquet{mark}{query}"


def read_uids(stored: StoredFile, keys: Sequence[str], remote: Remote) -> list[str | None]:
    """The ``uid`` of each key as a parquet's text; None where it has none.

    Raises ValueError for a file that is no parquet or has no keys; the errors of ``open_whole``.
    """
    where = printable(stored.path)
    with open_whole(stored, remote) as file:
        try:
            parquet = pq.ParquetFile(file)
            names = parquet.schema_arrow.names
            columns = ["key", *dict.fromkeys(n for n in names if n == "uid")]
            _check_columns(parquet.metadata, names, columns, where)
            table = parquet.read(columns=columns, use_threads=False)
            table.validate(full=True)  # text that is no UTF-8, too
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{where} cannot be read as parquet ({message_of(error)}): fetch it again"
            ) from error
    if not _is_text(table["key"].type):
        raise ValueError(f"{where} has keys of type {table['key'].type}, wanted text")
    if "uid" not in columns or not _is_text(table["uid"].type):
        return [None] * len(keys)
    known = table["key"].cast(pa.large_string()).combine_chunks()
    rows = pc.index_in(pa.array(keys, pa.large_string()), value_set=known)
    texts: list[str | None] = table["uid"].cast(pa.large_string()).take(rows).to_pylist()
    return texts


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _check_columns(metadata: Any, names: Sequence[str], wanted: Sequence[str], where: str) -> None:
    """Raises ValueError for a column that is not there once, and for more rows or bytes than a
    shard's metadata can have."""
    for name in wanted:
        if (number := names.count(name)) != 1:
            there = ", ".join(names[:50])
            raise ValueError(f"{where} has {number or 'no'} column {name}, it has {there}")
    # Not of single columns: pyarrow ends the process over damage in their statistics.
    groups = range(metadata.num_row_groups)
    size = sum(metadata.row_group(number).total_byte_size for number in groups)
    if metadata.num_rows > MAX_METADATA_ROWS or size > MAX_METADATA_BYTES:
        raise ValueError(
            f"{where} has {metadata.num_rows:,} rows and {size:,} bytes, which is too much for one "
            "shard"
        )


# --- a filter --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardFilter:
    """Which samples of a shard are taken.

    subset    a file of uids
    digest    of its uids
    metadata  the parquet beside the shard; None: there is none, so uids come from ``.json`` members
    """

    subset: str
    digest: str
    metadata: StoredFile | None = None

    @classmethod
    def of(cls, subset: str) -> ShardFilter:
        """The filter of a source; reads the subset's file once.

        Raises the errors of ``digest_uids``.
        """
        if protocol_of(subset) is not None:
            raise ValueError(
                f"got {printable(subset)!r}, wanted a file on a disk: uids are searched at random, "
                "so fetch it"
            )
        path = os.path.abspath(os.path.expanduser(subset))
        return cls(path, digest_uids(path))

    def why_not(
        self,
        shard: str,
        keys: Sequence[str],
        read_json: Callable[[int], bytes],
        remote: RemoteOptions | None = None,
    ) -> list[str | None]:
        """For each sample the reason for which it is left out, None for those taken.

        ``read_json`` gives the ``.json`` member of the sample of a number, empty where it has none.
        Reasons: ``no_uid`` and ``subset``. Raises the errors of ``read_uids``, and ValueError where
        no sample has a uid.
        """
        texts: list[str | None] = [None] * len(keys)
        if self.metadata is not None:
            texts = read_uids(self.metadata, keys, Remote(remote))
        for number, text in enumerate(texts):
            if text is None:
                texts[number] = _uid_of(read_json(number))
        uids, known = to_uids(pa.array(texts, pa.large_string()))
        if keys and not known.any():
            raise ValueError(
                f"no sample of {printable(shard)} has a uid, neither in a column 'uid' of "
                f"{printable(metadata_path(shard))} nor in a field 'uid' of its .json: fetch the "
                "parquet that was written with the shard, or leave subset out"
            )
        reasons = np.where(
            known, np.where(is_in(uids, open_uids(self.subset)), "", "subset"), "no_uid"
        )
        return [reason or None for reason in reasons.tolist()]


def _uid_of(data: bytes) -> str | None:
    try:
        tree = parse_json(data, "a sample's .json") if data else None
    except ValueError:
        return None
    uid = tree.get("uid") if isinstance(tree, dict) else None
    return uid.encode("utf-8", "replace").decode() if isinstance(uid, str) else None
