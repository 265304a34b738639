"""Chooses the samples of a shard whose uids are in a file (``data.sources.NAME.subset``).

img2dataset writes ``00000.parquet`` beside ``00000.tar``, one row per url, with the sample's
``key``; DataComp adds ``uid``, 128 bits as 32 hex digits. DataComp's file of a subset is a ``.npy``
of dtype ``u8,u8``, sorted; each row has the upper and the lower 64 bits of a uid. A uid that occurs
several times (DataComp's resharder repeats such a sample) chooses its sample once.

The process that scans a shard searches the uids on disk, since they may not fit into memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
UIDS_AT_ONCE = 1 << 20
_HEX = "^[0-9a-fA-F]{1,32}$"

# --- uids ------------------------------------------------------------------------------------


def open_uids(path: str) -> npt.NDArray[np.void]:
    """Opens the uids of a subset, [n] of dtype `UID`, memory-mapped.

    Raises FileNotFoundError, and ValueError for another kind of file.
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
    """Reads the uids of a subset block by block, and returns their digest.

    Raises the errors of ``open_uids``, and ValueError if the uids are not sorted.
    """
    uids = open_uids(path)
    log.info("index: reading %s, %s uids", path, f"{len(uids):,}")
    num_repeated = 0

    def blocks_in_order() -> Iterator[npt.NDArray[np.void]]:
        nonlocal num_repeated
        for start in range(0, len(uids), UIDS_AT_ONCE):
            both = np.asarray(uids[max(start - 1, 0) : start + UIDS_AT_ONCE])  # and the one before
            # The upper halves decide about nearly all, so that few lower halves are compared.
            doubtful = np.flatnonzero(both["f0"][1:] <= both["f0"][:-1])
            before, after = both[doubtful], both[doubtful + 1]
            if (wrong := doubtful[_is_less(after, before)]).size:
                raise ValueError(
                    f"{path} is not sorted: uid number {max(start - 1, 0) + int(wrong[0]) + 1} is "
                    "less than the one before. Sort it (uids.sort() in numpy) and save it again"
                )
            num_repeated += int((after == before).sum())
            yield both[min(start, 1) :]

    digest = digest_parts(UID, uids.shape, blocks_in_order())
    if num_repeated:
        log.warning(
            "index: %s names %s samples again that it has named: each is taken once",
            path, f"{num_repeated:,}",
        )  # fmt: skip
    return digest


def _is_less(left: npt.NDArray[np.void], right: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    upper, lower = left["f0"] < right["f0"], left["f1"] < right["f1"]
    return np.asarray(upper | ((left["f0"] == right["f0"]) & lower))


def is_in(values: npt.NDArray[np.void], uids: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Returns for each of the ``values`` [n] if it is among the sorted uids, bool [n].

    It bisects for all values at once, and takes memory only for these. numpy's searchsorted would
    be slow for pairs of numbers, and copy the upper halves of all uids.
    """
    if not len(uids):
        return np.zeros(len(values), bool)
    uids, last = np.asarray(uids), len(uids) - 1
    low, high = np.zeros(len(values), np.int64), np.full(len(values), len(uids))
    for _ in range(len(uids).bit_length()):
        middle = (low + high) // 2
        less = _is_less(uids[np.minimum(middle, last)], values) & (low < high)
        low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
    return np.asarray(uids[np.minimum(low, last)] == values)


def to_uids(texts: pa.Array) -> tuple[npt.NDArray[np.void], npt.NDArray[np.bool_]]:
    """Parses n texts of hex digits to uids [n], and bool [n]: False for a text that is no uid.

    The uid is then 0. Leading zeros may be missing.
    """
    good = pc.fill_null(pc.match_substring_regex(texts, _HEX), False)
    digits = pc.ascii_lpad(pc.if_else(good, texts, "0"), 32, "0").to_pylist()
    halves = np.frombuffer(bytes.fromhex("".join(digits)), ">u8").astype("<u8")
    return halves.view(UID), np.asarray(good.to_numpy(zero_copy_only=False), bool)


# --- the metadata beside a shard -------------------------------------------------------------


def metadata_path(shard: str) -> str:
    """Returns the path or url of the metadata that img2dataset writes beside a shard."""
    path, mark, query = shard.partition("?") if protocol_of(shard) else (shard, "", "")
    return f"{path.removesuffix('.tar')}.parquet{mark}{query}"


def read_uids(stored: StoredFile, keys: Sequence[str], remote: Remote) -> list[str | None]:
    """Reads the ``uid`` of each key from a parquet file; None for a key without one.

    Raises ValueError for a file that is no parquet or has no keys, and the errors of
    ``open_whole``.
    """
    with open_whole(stored, remote) as file:
        try:
            parquet = pq.ParquetFile(file)
            # Decimal digits of a column of numbers would be read as those of a hexadecimal uid.
            fields = [f.name for f in parquet.schema_arrow if not pa.types.is_primitive(f.type)]
            names = [name for name in ("key", "uid") if name in fields]
            table = parquet.read(columns=names, use_threads=False)
            table.validate(full=True)  # raises for text that is not UTF-8
            texts = pa.schema([(name, pa.large_string()) for name in names])
            columns = table.cast(texts).combine_chunks().to_pydict()
            uid_of = dict(zip(columns["key"], columns.get("uid", ()), strict=False))
        except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
            raise ValueError(
                f"{printable(stored.path)} cannot be read as parquet of keys and uids "
                f"({message_of(error)}): fetch it again"
            ) from error
    return [uid_of.get(key) for key in keys]


# --- a filter --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardFilter:
    """Chooses the samples of a shard by their uids.

    subset    the file of the uids that are chosen
    digest    the digest of these uids
    metadata  the parquet file beside the shard; None: uids are in ``.json`` members
    """

    subset: str
    digest: str
    metadata: StoredFile | None = None

    @classmethod
    def of(cls, subset: str) -> ShardFilter:
        """Makes a filter for the uids in the file ``subset``, which is read once to digest it.

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
        """Returns for each sample why it is left out ('no_uid' or 'subset'), or None.

        ``keys`` are those of the samples; ``read_json(n)`` reads the ``.json`` member of sample n,
        empty if it has none. Raises the errors of ``read_uids``, and ValueError if no sample has a
        uid.
        """
        texts: list[str | None] = [None] * len(keys)
        if self.metadata is not None:
            texts = read_uids(self.metadata, keys, Remote(remote))
        for number, text in enumerate(texts):
            if text is None:
                texts[number] = _uid_of(read_json(number))
        uids, has_uid = to_uids(pa.array(texts, pa.large_string()))
        if keys and not has_uid.any():
            raise ValueError(
                f"no sample of {printable(shard)} has a uid, neither in a column 'uid' of "
                f"{printable(metadata_path(shard))} nor in a field 'uid' of its .json: fetch the "
                "parquet that was written with the shard, or leave subset out"
            )
        reasons = np.where(
            has_uid, np.where(is_in(uids, open_uids(self.subset)), "", "subset"), "no_uid"
        )
        return [reason or None for reason in reasons.tolist()]


def _uid_of(data: bytes) -> str | None:
    try:
        tree = parse_json(data, "a sample's .json") if data else None
    except ValueError:
        return None
    uid = tree.get("uid") if isinstance(tree, dict) else None
    return uid.encode("utf-8", "replace").decode() if isinstance(uid, str) else None
