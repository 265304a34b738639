"""Attributes of samples: fields of their ``.json`` members, stored as codes in the index.

A value is a string or an integer. Everything else (true and false, fractions, lists, objects, null,
a blank string, a field that is missing) is no value, and so is JSON that does not parse. The
integer 3 and the string "3" are the same value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mclclip.files import parse_json, read_json, write_json

ATTRIBUTES = "attributes.json"
COLUMN = "attribute:"
_TEXT = pa.dictionary(pa.int32(), pa.large_string())
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")  # what int() reads quickly and text shows


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple. Raises ValueError for a blank name and for one that occurs twice."""
    if any(not name.strip() for name in names) or len(set(names)) < len(names):
        raise ValueError(f"got {list(names)}: wanted names of JSON fields, each once")
    return tuple(names)


def parse_attributes(data: bytes, names: Sequence[str]) -> list[str | None]:
    """The values of these fields in a ``.json`` member, in their order; None for no value."""
    try:
        tree = parse_json(data, "attributes")
    except ValueError:
        tree = None
    fields = tree if isinstance(tree, dict) else {}
    return [_value(fields.get(name)) for name in names]


def _value(found: object) -> str | None:
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    if not isinstance(found, str) or not found.strip():
        return None
    # Lone surrogates (from \ud800 in JSON) fit into no table.
    return found.encode("utf-8", "replace").decode()


def columns_of(names: Sequence[str], rows: Sequence[Sequence[str | None]]) -> list[pa.Array]:
    """One column of text per name, coded by arrow: the values of all rows."""
    columns = zip(*rows, strict=True) if rows else ([] for _ in names)
    return [pa.array(column, pa.large_string()).dictionary_encode() for column in columns]


def fields_of(names: Sequence[str]) -> list[pa.Field]:
    """The fields of ``columns_of``."""
    return [pa.field(COLUMN + name, _TEXT) for name in names]


def to_codes(table: pa.Table) -> tuple[pa.Table, dict[str, list[str]]]:
    """The table with int32 codes (-1: no value) for its columns of text, and the values by name.

    The code is a value's place among the sorted values; whole numbers go first, by their size.
    """
    values: dict[str, list[str]] = {}
    for number, name in _columns(table):
        column = table.column(number)
        text = column.unify_dictionaries().combine_chunks() if len(column) else pa.array([], _TEXT)
        text = text.chunk(0) if isinstance(text, pa.ChunkedArray) else text
        indices: npt.NDArray[np.int32] = text.indices.fill_null(-1).to_numpy()
        known = text.dictionary.to_pylist()
        used = np.unique(indices[indices >= 0])  # rows with the other values may have been removed
        order = sorted(used.tolist(), key=lambda place: _sort_key(known[place]))
        codes = np.full(len(known) + 1, -1, np.int32)  # the last one is that of index -1
        codes[order] = np.arange(len(order), dtype=np.int32)
        values[name] = [known[place] for place in order]
        field = pa.field(COLUMN + name, pa.int32())
        table = table.set_column(number, field, pa.array(codes[indices]))
    return table, values


def to_text(table: pa.Table, values: Mapping[str, Sequence[str]]) -> pa.Table:
    """The inverse of ``to_codes``."""
    for number, name in _columns(table):
        codes: npt.NDArray[np.int32] = table.column(number).to_numpy()
        text = pa.DictionaryArray.from_arrays(
            pa.array(codes, mask=codes < 0), pa.array(values[name], pa.large_string())
        )
        table = table.set_column(number, pa.field(COLUMN + name, _TEXT), text)
    return table


def _columns(table: pa.Table) -> Iterator[tuple[int, str]]:
    for number, column in enumerate(table.column_names):
        if column.startswith(COLUMN):
            yield number, column.removeprefix(COLUMN)


def _sort_key(value: str) -> tuple[int, int, str]:
    return (0, int(value), value) if _WHOLE_NUMBER.fullmatch(value) else (1, 0, value)


def write_values(directory: Path, values: Mapping[str, Sequence[str]]) -> None:
    """Writes ``attributes.json``: the sorted values by name; no file where there are none."""
    if values:
        write_json(directory / ATTRIBUTES, values)
    else:
        (directory / ATTRIBUTES).unlink(missing_ok=True)


def read_values(directory: Path) -> dict[str, list[str]]:
    """``attributes.json``; empty where there is none."""
    path = directory / ATTRIBUTES
    values: dict[str, list[str]] = read_json(path) if path.exists() else {}
    return values
