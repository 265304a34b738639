"""Reads images and captions from JSON lines, Parquet, Arrow and tar shards, as tables.

Each format is a `Format`: its columns, and a function that yields (where, {column: value}) for
each row. The value of an image is the name of a file, the bytes of the image, or Hugging Face's
``{bytes, path}``. Faults in tar shards are counted in the findings; for another file that does not
parse, ValueError says so in one line.
"""

from __future__ import annotations

import io
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd  # noqa: F401 (see shard_scan)
import pyarrow as pa
import pyarrow.parquet as pq

from mclclip.data.decode import PICTURE_SUFFIXES, suffix_of
from mclclip.data.findings import Findings
from mclclip.data.shard_scan import (
    MAX_IMAGE_BYTES,
    MAX_TEXT_BYTES,
    Group,
    TextFault,
    encoding_of,
    form_of_texts,
    group_members,
    parse_captions,
    read_member,
)
from mclclip.util.files import message_of, parse_json

IMAGE_COLUMNS = (
    "filepath", "image", "image_path", "path", "file_name", "filename", "image_name", "image_file",
    "url",
)  # fmt: skip
CAPTION_COLUMNS = ("title", "caption", "captions", "text", "comment", "txt")
DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t", ".txt": "\t", ".token": "\t"}
LINES = (".jsonl", ".jsonlines", ".ndjson")
_EXAMPLES = 100  # rows of JSON lines that are read to find the columns
_BATCH_BYTES = 1 << 25  # bytes of Parquet rows that are in memory at a time

Fields = dict[str, Any]
Rows = Iterator[tuple[str, Fields]]
Ask = Callable[..., ValueError]
"""Makes the error for something ambiguous: what it is, and the word of the command to type."""


@dataclass(frozen=True)
class Format:
    """A table that is open to be read.

    columns     an example value of each column
    rows        reads the rows, and counts faults in the given findings
    count       number of rows; None: not known
    fixed       the columns of images and of captions, if the format has no other columns
    unreadable  the types of columns that cannot be read, by name
    lacking     a file that lacks a column of the first file, by the column
    """

    columns: Fields
    rows: Callable[[Findings], Rows]
    count: int | None = None
    fixed: tuple[str, str] | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, Path] = field(default_factory=dict)


def is_stored(value: Any) -> bool:
    """Returns True if a value is an image: bytes, or Hugging Face's struct of bytes and path."""
    return isinstance(value, bytes) or (isinstance(value, dict) and "bytes" in value)


def holds_bytes(value: Any) -> bool:
    """Returns True for the bytes of an image, and False for a name, which a struct may have too."""
    is_name = isinstance(value, dict) and not value.get("bytes") and value.get("path")
    return is_stored(value) and not is_name


def present_columns(columns: Fields, names: Sequence[str]) -> list[str]:
    """Returns the columns that have one of the ``names`` in any case, in the order of these."""
    present = [column for column in columns if column.strip().lower() in names]
    return sorted(present, key=lambda column: names.index(column.strip().lower()))


def check_once(path: Path, names: Sequence[str]) -> None:
    """Raises ValueError if two columns have the same name."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{path} names the column {twice[0]!r} twice: rename one of them")


def _lines(files: Sequence[Path]) -> Format:
    (path,) = files

    def rows(_: Findings) -> Rows:
        with open(path, "rb") as file:
            encoding = encoding_of(file.read(4))
            file.seek(0)
            lines = file if encoding == "utf-8-sig" else io.TextIOWrapper(file, encoding)
            for number in itertools.count(1):
                try:
                    line = lines.readline(MAX_TEXT_BYTES)
                except UnicodeError as error:
                    raise ValueError(f"{path} line {number} cannot be read: {error}") from None
                if not line:
                    return
                where = f"{path.name} line {number}"
                if line.strip():
                    fields = parse_json(line.rstrip(), f"{path} line {number}", unique_keys=True)
                    if not isinstance(fields, dict):
                        raise ValueError(f"{path} line {number} is not an object of columns")
                    yield where, fields

    return Format(examples_of(rows(Findings())), rows)


def examples_of(rows: Rows) -> Fields:
    """Returns an example value of each column of the first rows.

    The first row may be odd: a text is a better example than a number, and a number than null.
    """
    columns: Fields = {}
    for _, fields in itertools.islice(rows, _EXAMPLES):
        for name, value in fields.items():
            if _rank(value) > _rank(columns.get(name, None)) or name not in columns:
                columns[name] = value
    return columns


def is_missing(value: Any) -> bool:
    """Returns True for null, and for NaN, which pandas writes for a missing value."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _rank(value: Any) -> int:
    return 2 if isinstance(value, str | list) else int(not is_missing(value))


def _arrow(files: Sequence[Path]) -> Format:
    """Opens Parquet, or Arrow: streams, which ``datasets`` saves, and files, such as Feather's."""
    count = 0
    schemas: list[pa.Schema] = []
    lacking: dict[str, Path] = {}
    for path in files:
        with _one_line(path):
            if path.suffix.lower() == ".parquet":
                with pq.ParquetFile(path) as file:
                    schemas.append(file.schema_arrow)
                    count += file.metadata.num_rows
            else:
                with _open_arrow(path) as (schema, _):
                    schemas.append(schema)
        lacking |= dict.fromkeys({*schemas[0].names} - {*schemas[-1].names}, path)
    check_once(files[0], schemas[0].names)
    batches = partial(map, lambda path: (path.name, _batches(path)), files)
    return replace(arrow_format(schemas[0], count or None, batches), lacking=lacking)


def arrow_format(
    schema: pa.Schema,
    count: int | None,
    batches: Callable[[], Iterable[tuple[str, Iterator[pa.RecordBatch]]]],
    read: Callable[[Fields], Fields] = dict,
) -> Format:
    """Makes a format of tables in Arrow's memory.

    ``batches`` yields a name for messages and the rows of each file; ``read`` is applied to each
    row, to read what lies beside the table.
    """
    as_text: set[str] = set()

    def rows(findings: Findings) -> Rows:
        for name_of_file, of_file in batches():
            number = 0
            for batch in of_file:
                nested = _nested(batch.schema)
                for fields in batch.select(_columns(batch.schema)).to_pylist():
                    number += 1
                    for name, (column, part) in nested.items():
                        fields[name] = [item and item[part] for item in fields[column] or []]
                    where = f"{name_of_file} row {number}"
                    for name in as_text & fields.keys():
                        data, fields[name] = fields[name], _decode(fields[name])
                        findings.add("bad_text", *[where] * bool(data and not fields[name]))
                    yield where, read(fields)

    head = rows(Findings())
    _, first = next(head, ("", {}))
    as_text |= _text_columns(schema, first)
    first |= {name: _decode(first.get(name)) for name in as_text}
    examples = _examples(schema) | dict.fromkeys(as_text, "")
    columns = examples | {n: v for n, v in first.items() if n in examples and v is not None}
    for name in [n for n, value in columns.items() if is_stored(value) and not holds_bytes(value)]:
        more = (fields.get(name) for _, fields in itertools.islice(head, _EXAMPLES))
        columns[name] = next(filter(holds_bytes, more), columns[name])
    nested = _nested(schema)
    readable = {*columns, *(column for column, _ in nested.values())}
    unreadable = {field.name: str(field.type) for field in schema if field.name not in readable}
    columns |= {name: [] for name in nested}
    return Format(columns, rows, count, unreadable=unreadable)


def _text_columns(schema: pa.Schema, first: Fields) -> set[str]:
    """Finds columns of bytes that are text, as Spark writes it: captions, and file names."""
    stored = {name: b"" for name, example in _examples(schema).items() if example == b""}
    names = [
        name
        for name in present_columns(stored, IMAGE_COLUMNS)
        if suffix_of((_decode(first.get(name)) or "").strip()) in PICTURE_SUFFIXES
    ]
    return {*present_columns(stored, CAPTION_COLUMNS), *names}


def _decode(data: bytes | None) -> str | None:
    """Decodes bytes to text; "" if they are not UTF-8."""
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return ""


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file in small batches, so that no row group is held in memory."""
    with _one_line(path):
        if path.suffix.lower() != ".parquet":
            with _open_arrow(path) as (_, batches):
                yield from batches
            return
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            facts, columns = file.metadata, _columns(file.schema_arrow)
            groups = (facts.row_group(number) for number in range(facts.num_row_groups))
            row_bytes = sum(group.total_byte_size for group in groups) // max(1, facts.num_rows)
            num_rows = max(1, min(1000, _BATCH_BYTES // max(1, row_bytes)))
            yield from file.iter_batches(num_rows, columns=columns, use_threads=False)


@contextmanager
def _open_arrow(path: Path) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Yields schema and rows of an Arrow stream or file."""
    with pa.OSFile(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file) as reader:
            numbers = range(reader.num_record_batches if is_file else 0)
            yield reader.schema, map(reader.get_batch, numbers) if is_file else iter(reader)


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        cause = message_of(error)
        raise ValueError(f"{path} cannot be read ({cause}): fetch or write it again") from error


def _examples(schema: pa.Schema) -> Fields:
    """Returns an example value of each column that can be read."""
    examples = {field.name: _example(field.type) for field in schema}
    return {name: example for name, example in examples.items() if example is not None}


def _columns(schema: pa.Schema) -> list[str]:
    """Returns the columns that are read."""
    return [*_examples(schema), *dict.fromkeys(column for column, _ in _nested(schema).values())]


def _nested(schema: pa.Schema) -> dict[str, tuple[str, str]]:
    """Returns {'COLUMN.FIELD': (COLUMN, FIELD)} for the texts in columns of lists of structs.

    An example is {'sentences.raw': ('sentences', 'raw')}.
    """
    return {
        f"{field.name}.{part.name}": (field.name, part.name)
        for field in schema
        if _is_list(field.type)
        and pa.types.is_struct(field.type.value_type)
        and _example(field.type) is None
        for part in field.type.value_type.fields
        if _example(part.type) == "" and field.type.value_type.get_field_index("bytes") < 0
    }


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view)
    return any(is_kind(kind) for is_kind in lists)


def _example(kind: pa.DataType) -> Any:
    """Returns an example value of a type; None for a type that is not read."""
    types = pa.types
    if types.is_dictionary(kind):
        return _example(kind.value_type)
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return {"bytes": b""}
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return b""
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return ""
    if _is_list(kind):
        item = kind.value_type
        is_turn = types.is_struct(item) and item.get_field_index("from") >= 0  # of a conversation
        return [] if is_turn or isinstance(_example(item), str | int) else None
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return 0 if number else None


def _tars(files: Sequence[Path]) -> Format:
    """Opens WebDataset's shards.

    Captions are the list ``captions`` of a sample's ``.json``, or else its ``.txt``, or else
    another field of the ``.json`` that has the name of a column of captions. If the first sample
    has several of these and nothing else, the columns are those of its ``.json``.
    """

    def texts() -> Iterator[bytes]:
        for path in files:
            with open(path, "rb") as file:
                for group in group_members(file, str(path), "txt", Findings()).values():
                    yield read_member(file, group.text)

    form = form_of_texts(filter(None, texts()), str(files[0].parent))

    def rows(findings: Findings) -> Rows:
        for path in files:
            with open(path, "rb") as file:
                for key, group in group_members(file, str(path), "txt", findings).items():
                    where, image = f"{key} in {path.name}", group.image or group.array
                    again = max(group.extensions.values()) - 1
                    findings.add("duplicate_key", *[where] * min(again, 1), count=again)
                    findings.add("several_images", *[where] * (group.num_images > 1))
                    if image is None or image[1] > MAX_IMAGE_BYTES:
                        example = where if image else f"{group.full_key(key)} in {path.name}"
                        findings.add("large_image" if image else "no_image", example)
                    else:
                        yield where, _sample(file, where, group, image, form, findings)

    _, first = next(rows(Findings()), ("", {}))
    texts_of_first = first.pop("captions", "")
    several = present_columns(first, CAPTION_COLUMNS)
    if len(several) > 1 and texts_of_first == first[several[0]]:
        return Format(first, rows)
    columns = {"image": b"", "captions": texts_of_first, **first}
    return Format(columns, rows, fixed=("image", "captions"))


def _sample(
    file: BinaryIO,
    where: str,
    group: Group,
    image: tuple[int, int],
    form: str,
    findings: Findings,
) -> Fields:
    """Reads the columns of a sample; ``form`` says if its text is one caption or 'lines'."""
    large = [place for place in (group.json, group.text) if place and place[1] > MAX_TEXT_BYTES]
    findings.add("large_caption", *[where] * len(large))
    facts: Any = {}
    texts: Any = []
    try:
        facts = parse_json(read_member(file, group.json) or b"{}", where)
    except ValueError:
        findings.add("bad_json", where)
    try:
        texts = parse_captions(read_member(file, group.text), form)
    except TextFault as fault:
        findings.add(fault.reason, where)
    facts = facts if isinstance(facts, dict) else {}
    listed = facts.get("captions")
    if (isinstance(listed, list) and listed) or not texts:
        names = ("captions", *present_columns(facts, CAPTION_COLUMNS))
        texts = next((facts[name] for name in names if facts.get(name)), [])
    data = os.pread(file.fileno(), image[1], image[0])
    picture = {"bytes": data, "path": where.rpartition(" in ")[0]}
    return {**facts, "image": picture, "captions": texts}


KINDS: Mapping[str, str] = (
    dict.fromkeys(DELIMITERS, "csv")
    | dict.fromkeys(LINES, "lines")
    | {".json": "json", ".parquet": "arrow", ".arrow": "arrow", ".tar": "tars"}
)
FORMATS = {"lines": _lines, "arrow": _arrow, "tars": _tars}
SEVERAL = ("folder", "arrow", "tars")
"""Kinds of formats in which a data set may have several files."""
