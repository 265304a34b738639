"""Chooses samples of a shard: by a file of their uids, and by what the parquet beside it says.

img2dataset writes ``00000.parquet`` beside ``00000.tar``, one row per url, with the sample's
``key`` and columns such as ``status``, ``width``, ``similarity``; DataComp adds ``uid``, 128 bits
as 32 hex digits. A subset is DataComp's: a ``.npy`` of dtype ``u8,u8``, sorted, each row the upper
and the lower 64 bits of a uid. A uid that occurs there several times (DataComp's resharder repeats
such a sample) chooses its sample once.

A filter goes to the process that scans the shard. It reads the columns that it needs, and searches
the uids on the disk, of which there may be more than fit into memory.
"""

from __future__ import annotations

import logging
import os
import re
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
from mclclip.files import clean, digest_parts, message_of, parse_json
from mclclip.options import protocol_of

log = logging.getLogger("mclclip")

UID = np.dtype("u8,u8")
MAX_METADATA_BYTES = 1 << 32
"""Of one parquet, before compression."""

MAX_METADATA_ROWS = 1 << 26
_UIDS_AT_ONCE = 1 << 20
_HEX = "^[0-9a-fA-F]{1,32}$"
_CONDITION = re.compile(r"\s*([^<>=!]*[^<>=!\s])\s*(<=|>=|==|!=|<|>)\s*([^<>=!\s].*?)\s*")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z_]([\w .:/-]*[\w.:/-])?")  # text that needs no quotes
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "==": pc.equal,
    "!=": pc.not_equal,
}

# --- conditions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A column of the metadata, compared with a number or with text."""

    column: str
    operator: str
    value: int | float | str

    def __str__(self) -> str:
        is_text = isinstance(self.value, str) and not _WORD.fullmatch(self.value)
        return f"{self.column}{self.operator}" + (f"'{self.value}'" if is_text else str(self.value))

    def holds(self, column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
        """bool [n]: True where the condition holds; missing values are anything.

        Raises ValueError for a column of a type that the value cannot be compared with.
        """
        kind = column.type
        if pa.types.is_null(kind):
            return np.zeros(len(column), bool)
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if pa.types.is_boolean(kind) and str(self.value).lower() in ("true", "false"):
            column, value = column.cast(pa.string()), str(self.value).lower()
        elif is_number and not isinstance(self.value, str):
            # Single precision is compared as such: 0.28 in a file of float32 is 0.28.
            single = pa.types.is_float16(kind) or pa.types.is_float32(kind)
            column = column.cast(pa.float32()) if pa.types.is_float16(kind) else column
            value = pa.scalar(self.value, pa.float32() if single else None)
        elif _is_text(kind) and isinstance(self.value, str):
            column, value = column.cast(pa.large_string()), self.value
        else:
            raise ValueError(
                f"{self} compares {'text' if isinstance(self.value, str) else 'a number'}, and "
                f"column {self.column} holds {kind}: wanted numbers beside numbers, text beside "
                "text (in quotes where it looks like a number), true or false"
            )
        try:
            return _flags(_COMPARE[self.operator](column, value))
        except pa.ArrowInvalid as error:  # integers beyond those that the other type holds
            raise ValueError(
                f"{self}: column {self.column} holds {kind}, with numbers that cannot be compared "
                f"exactly ({message_of(error, 100)}): leave it out"
            ) from None


def parse_condition(text: str) -> Condition:
    """``COLUMN OPERATOR VALUE``; a value in quotes is text, also where it looks like a number.

    Raises ValueError for anything else.
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(
            f"got {text!r}, wanted a column, one of {' '.join(_COMPARE)}, and a number or text, as "
            "in similarity>=0.28"
        )
    column, operator, value = found.groups()
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return Condition(column, operator, value[1:-1])
    if _NUMBER.fullmatch(value) is None:
        return Condition(column, operator, value)
    try:
        return Condition(column, operator, pa.scalar(int(value), pa.int64()).as_py())
    except (ValueError, OverflowError):
        return Condition(column, operator, float(value))


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _flags(array: Any) -> npt.NDArray[np.bool_]:
    return np.asarray(pc.fill_null(array, False).to_numpy(zero_copy_only=False), bool)


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
        for start in range(0, number, _UIDS_AT_ONCE):
            block = np.fromfile(file, UID, min(_UIDS_AT_ONCE, number - start))
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
    return halves.view(UID), _flags(good)


# --- the metadata beside a shard -------------------------------------------------------------


def metadata_path(shard: str) -> str:
    """Where img2dataset puts the metadata of a shard, a path or a url."""
    path, mark, query = shard.partition("?") if protocol_of(shard) else (shard, "", "")
    return f"{path.removesuffix('.tar')}.parquet{mark}{query}"


def read_metadata(
    stored: StoredFile, keys: Sequence[str], columns: Sequence[str], remote: Remote
) -> tuple[pa.Table, npt.NDArray[np.int64]]:
    """These columns of a parquet, ``uid`` where it has one, and the row of each key (-1: none).

    Raises ValueError for a column that it lacks and for a file that is no parquet; the errors of
    ``open_whole``.
    """
    where = clean(stored.path)
    with open_whole(stored, remote) as file:
        try:
            parquet = pq.ParquetFile(file)
            names = parquet.schema_arrow.names
            wanted = list(dict.fromkeys(["key", *columns, *(n for n in names if n == "uid")]))
            _check_columns(parquet.metadata, names, wanted, where)
            table = parquet.read(columns=wanted, use_threads=False)
            table.validate(full=True)  # text that is no UTF-8, too
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{where} cannot be read as parquet ({message_of(error)}): fetch it again"
            ) from error
    if not _is_text(table["key"].type):
        raise ValueError(f"{where} has keys of type {table['key'].type}, wanted text")
    known = table["key"].cast(pa.large_string()).combine_chunks()
    place_of = pc.index_in(pa.array(keys, pa.large_string()), value_set=known)
    return table, pc.fill_null(place_of, -1).to_numpy().astype(np.int64)


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
    """Conditions on which samples of a shard are taken.

    subset    a file of uids; None: all
    digest    of its uids
    where     conditions on the metadata, of which all must hold
    metadata  the parquet beside the shard; None: there is none, so uids come from ``.json`` members
    """

    subset: str | None
    digest: str
    where: tuple[Condition, ...]
    metadata: StoredFile | None = None

    @classmethod
    def of(cls, subset: str | None, where: Sequence[str]) -> ShardFilter | None:
        """The filter of a source, None where everything is taken; reads the subset's file once.

        Raises the errors of ``digest_uids`` and ``parse_condition``.
        """
        conditions = tuple(parse_condition(text) for text in where)
        if subset is None:
            return cls(None, "", conditions) if conditions else None
        if protocol_of(subset) is not None:
            raise ValueError(
                f"subset is {clean(subset)!r}, wanted a file on a disk: uids are searched at "
                "random, so fetch it"
            )
        path = os.path.abspath(os.path.expanduser(subset))
        return cls(path, digest_uids(path), conditions)

    def why_not(
        self,
        shard: str,
        keys: Sequence[str],
        read_json: Callable[[int], bytes],
        remote: RemoteOptions | None = None,
    ) -> list[str | None]:
        """For each sample the first reason for which it is left out, None for those taken.

        ``read_json`` gives the ``.json`` member of the sample of a number, empty where it has none.
        Reasons: ``no_metadata``, ``subset``, and by condition ``no_value:TEXT``, ``where:TEXT``.
        Raises the errors of ``read_metadata``, and ValueError where no sample has a uid.
        """
        reasons: list[str | None] = [None] * len(keys)

        def leave_out(which: npt.NDArray[np.bool_], reason: str) -> None:
            for number in np.flatnonzero(which).tolist():
                reasons[number] = reasons[number] or reason

        rows = np.full(len(keys), -1, np.int64)
        table = None
        if self.metadata is not None:
            columns = [condition.column for condition in self.where]
            table, rows = read_metadata(self.metadata, keys, columns, Remote(remote))
        if self.where:
            leave_out(rows < 0, "no_metadata")
        if self.subset is not None:
            uids, known = self._uids(reasons, table, rows, read_json)
            undecided = np.array([reason is None for reason in reasons], bool)
            if undecided.any() and not known[undecided].any():
                raise ValueError(
                    f"no sample of {clean(shard)} has a uid, neither in a column 'uid' of "
                    f"{clean(metadata_path(shard))} nor in a field 'uid' of its .json: fetch the "
                    "parquet that was written with the shard, or leave subset out"
                )
            leave_out(~known, "no_metadata")
            leave_out(~is_in(uids, open_uids(self.subset)), "subset")
        if self.metadata is None:
            return reasons
        for condition in self.where:
            assert table is not None  # it was read with the metadata
            column = table[condition.column]
            try:
                holds = condition.holds(column)
            except (pa.ArrowException, ValueError) as error:
                words = " ".join(str(error).split())
                raise ValueError(f"{clean(self.metadata.path)}: {words}") from error
            null = pc.is_null(column, nan_is_null=True).to_numpy(zero_copy_only=False)
            leave_out(np.append(null, False)[rows].astype(bool), f"no_value:{condition}")
            leave_out(~np.append(holds, True)[rows], f"where:{condition}")
        return reasons

    def _uids(
        self,
        reasons: Sequence[str | None],
        table: pa.Table | None,
        rows: npt.NDArray[np.int64],
        read_json: Callable[[int], bytes],
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.bool_]]:
        """Uid of each sample, of its row in the metadata, else of its ``.json``; and which have
        one."""
        texts: list[str | None] = [None] * len(rows)
        if table is not None and "uid" in table.column_names and _is_text(table["uid"].type):
            places = pa.array(rows, mask=rows < 0)
            texts = table["uid"].cast(pa.large_string()).take(places).to_pylist()
        for number, text in enumerate(texts):
            if text is None and reasons[number] is None:
                texts[number] = _uid_of(read_json(number))
        return to_uids(pa.array(texts, pa.large_string()))


def _uid_of(data: bytes) -> str | None:
    try:
        tree = parse_json(data, "a sample's .json") if data else None
    except ValueError:
        return None
    uid = tree.get("uid") if isinstance(tree, dict) else None
    return uid.encode("utf-8", "replace").decode() if isinstance(uid, str) else None
