"""Readers of tables of images and captions, and of what is as good as one: a folder of pictures,
tar shards, COCO's JSON.

A reader yields (where, {column: value}), one row after another, and says beforehand which columns
there are. The value of an image is the name of a file, or the bytes themselves, as Hugging Face's
``{bytes, path}`` too. Faults of tar shards are counted; another file that does not parse is one
line.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd  # noqa: F401 (see shard_scan)
import pyarrow as pa
import pyarrow.parquet as pq

from mclclip.data.shard_scan import (
    IMAGE_EXTENSIONS,
    MAX_IMAGE_BYTES,
    MAX_TEXT_BYTES,
    Findings,
    Group,
    group_members,
    parse_captions,
    read_member,
)
from mclclip.files import Roots, message_of, parse_json, read_bounded, read_json

CAPTION_COLUMNS = ("title", "caption", "captions", "text")
DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
LINES = (".jsonl", ".jsonlines", ".ndjson")
PICTURES = (*IMAGE_EXTENSIONS, "gif", "bmp", "tif", "tiff")
_EXAMPLES = 100  # rows of JSON lines by which their columns are known
_BATCH_BYTES = 1 << 25  # of Parquet's rows that are held at a time

Fields = dict[str, Any]
Rows = Iterator[tuple[str, Fields]]
NamedTexts = tuple[Iterable[str], Sequence[tuple[str, str]]]
"""Files that are candidates with or without a caption, and (file, caption) pairs."""


@dataclass(frozen=True)
class Format:
    """``columns``: an example of the values of each. ``chosen``: the columns of images and captions
    of a format that has no names to choose from. ``count``: number of rows, None if not known."""

    columns: Fields
    rows: Callable[[Findings], Rows]
    count: int | None = None
    chosen: tuple[str, str] | None = None


def is_stored(value: Any) -> bool:
    """Whether a value is an image itself: bytes, or Hugging Face's struct of bytes and path."""
    return isinstance(value, bytes) or (isinstance(value, dict) and "bytes" in value)


def named(columns: Fields, names: Sequence[str]) -> list[str]:
    """The columns of these names, whatever their case, in the order of the names."""
    found = [column for column in columns if column.strip().lower() in names]
    return sorted(found, key=lambda column: names.index(column.strip().lower()))


def walk(folder: Path) -> Iterator[Path]:
    """The files at or below a folder in order, hidden ones and linked folders excepted."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def delimiter_of(path: Path) -> str:
    """The delimiter that the suffix names; where the header has none of these but semicolons or
    tabs, as spreadsheets write them, that one."""
    own = DELIMITERS[path.suffix.lower()]
    with open(path, "rb") as file:
        header = file.readline(MAX_TEXT_BYTES).decode("utf-8", "replace")
    others = [each for each in (";", "\t") if own not in header and each in header]
    return others[0] if others else own


def csv_format(path: Path, delimiter: str) -> Format:
    """The rows of a table of text with a header; blanks after a delimiter are ignored."""

    @contextmanager
    def opened() -> Iterator[tuple[csv.DictReader[str], Sequence[str]]]:
        with open(path, encoding="utf-8-sig", newline="") as file:
            # Cells that a short row lacks are empty.
            reader = csv.DictReader(
                file, delimiter=delimiter, restkey="", restval="", skipinitialspace=True
            )
            try:
                names = [name.strip() for name in reader.fieldnames or []]
                reader.fieldnames = names
                yield reader, names
            except (csv.Error, UnicodeDecodeError) as error:
                at = reader.line_num + 1
                advice = ": save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
                raise ValueError(f"{path} line {at} does not parse: {error}{advice}") from None

    def rows(_: Findings) -> Rows:
        with opened() as (reader, _names):
            for row in reader:
                row.pop("", None)  # cells beyond the header, and columns without a name
                yield f"{path.name} line {reader.line_num}", row

    with opened() as (_, names):
        columns = dict.fromkeys(names, "")
    _, first = next(rows(Findings()), ("", {}))
    return Format({name: first.get(name, "") for name in columns}, rows)


def _lines(files: Sequence[Path]) -> Format:
    (path,) = files

    def rows(_: Findings) -> Rows:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_TEXT_BYTES):
                number += 1
                where = f"{path.name} line {number}"
                if line.strip():
                    fields = parse_json(line, f"{path} line {number}")
                    if not isinstance(fields, dict):
                        raise ValueError(f"{path} line {number} is not an object of columns")
                    yield where, fields

    columns: Fields = {}
    for _, fields in itertools.islice(rows(Findings()), _EXAMPLES):
        known = {name for name, value in columns.items() if value is not None}
        columns |= {name: value for name, value in fields.items() if name not in known}
    return Format(columns, rows)


def _json(files: Sequence[Path]) -> Format:
    (path,) = files
    names, pairs = captions_of_json(path)

    def rows(_: Findings) -> Rows:
        yield from ((path.name, {"file_name": name, "caption": []}) for name in names)
        yield from ((path.name, {"file_name": name, "caption": text}) for name, text in pairs)

    return Format({"file_name": "", "caption": ""}, rows, chosen=("file_name", "caption"))


def _folder(files: Sequence[Path]) -> Format:
    (folder,) = files
    roots = Roots(folder)

    def rows(_: Findings) -> Rows:
        for path in walk(folder):
            if path.suffix.lower().removeprefix(".") in PICTURES:
                name = str(path.relative_to(folder))
                text = roots.real_path(path.with_suffix(".txt"))
                data = read_bounded(text, MAX_TEXT_BYTES) if text and text.is_file() else b""
                yield name, {"file_name": name, "text": parse_captions(data, "txt")}

    return Format({"file_name": "", "text": ""}, rows, chosen=("file_name", "text"))


def _arrow(files: Sequence[Path]) -> Format:
    """Parquet, or the streams of Arrow that ``datasets`` saves."""

    def rows(_: Findings) -> Rows:
        for path in files:
            number = 0
            for batch in _batches(path):
                for fields in batch.to_pylist():
                    number += 1
                    yield f"{path.name} row {number}", fields

    count = 0
    for path in reversed(files):
        with _one_line(path):
            if path.suffix == ".parquet":
                with pq.ParquetFile(path) as file:
                    schema, rows_of_file = file.schema_arrow, file.metadata.num_rows
                count += rows_of_file
            else:
                with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
                    schema = reader.schema
    _, first = next(rows(Findings()), ("", {}))
    columns = {
        name: example if (value := first.get(name)) is None else value
        for name, example in _examples(schema).items()
    }
    return Format(columns, rows, count or None)


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The rows of a file, some at a time; neither a row group nor a column of it is held whole."""
    with _one_line(path):
        if path.suffix != ".parquet":
            with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
                yield from (batch.select([*_examples(batch.schema)]) for batch in reader)
            return
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            facts, columns = file.metadata, [*_examples(file.schema_arrow)]
            groups = (facts.row_group(number) for number in range(facts.num_row_groups))
            row_bytes = sum(group.total_byte_size for group in groups) // max(1, facts.num_rows)
            num_rows = max(1, min(1000, _BATCH_BYTES // max(1, row_bytes)))
            yield from file.iter_batches(num_rows, columns=columns, use_threads=False)


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        cause = message_of(error)
        raise ValueError(f"{path} cannot be read ({cause}): fetch or write it again") from error


def _examples(schema: pa.Schema) -> Fields:
    """An example of each column whose values are images, or have a place in JSON."""
    examples = {field.name: _example(field.type) for field in schema}
    return {name: example for name, example in examples.items() if example is not None}


def _example(kind: pa.DataType) -> Any:
    types = pa.types
    if types.is_dictionary(kind):
        return _example(kind.value_type)
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return {"bytes": b""}
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return b""
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return ""
    if types.is_list(kind) or types.is_large_list(kind):
        return [] if isinstance(_example(kind.value_type), str | int) else None
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return 0 if number else None


def _tars(files: Sequence[Path]) -> Format:
    """Samples of WebDataset's shards: captions are the list ``captions`` of the ``.json``, else the
    ``.txt``, else another of the ``.json``'s fields by its name."""

    def rows(findings: Findings) -> Rows:
        for path in files:
            with open(path, "rb") as file:
                for key, group in group_members(file, str(path), "txt", findings).items():
                    where, image = f"{key} in {path.name}", group.image or group.array
                    if image is None or image[1] > MAX_IMAGE_BYTES:
                        findings.add("large_image" if image else "no_image", where)
                    else:
                        yield where, _sample(file, key, group, image)

    _, first = next(rows(Findings()), ("", {}))
    return Format({"image": b"", "captions": "", **first}, rows, chosen=("image", "captions"))


def _sample(file: BinaryIO, key: str, group: Group, image: tuple[int, int]) -> Fields:
    try:
        facts = parse_json(read_member(file, group.json) or b"{}", key)
    except ValueError:
        facts = {}
    facts = facts if isinstance(facts, dict) else {}
    texts: Any = parse_captions(read_member(file, group.text), "txt")
    if isinstance(facts.get("captions"), list) or not texts:
        names = ("captions", *named(facts, CAPTION_COLUMNS))
        texts = next((facts[name] for name in names if facts.get(name)), [])
    data = os.pread(file.fileno(), image[1], image[0])
    return {**facts, "image": {"bytes": data, "path": key}, "captions": texts}


# --- captions in one JSON document ---------------------------------------------------------------


def captions_of_json(path: Path, split: str | None = None) -> NamedTexts:
    """Files and captions of COCO's, Karpathy's (of one ``split``) or ShareGPT4V's layout. Raises
    ValueError for other content."""
    content = read_json(path)
    keys = content.keys() if isinstance(content, dict) else set()
    try:
        if isinstance(content, list):
            names, pairs = _conversations(content)
        elif {"images", "annotations"} <= keys:
            names, pairs = _coco(content, path)
        elif "images" in keys and all("sentences" in image for image in content["images"]):
            names, pairs = _karpathy(content, split)
        else:
            raise ValueError(
                f"{path} holds neither COCO captions (images, annotations) nor Karpathy's split "
                f"(images with sentences)"
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} lacks a field of COCO's, Karpathy's or ShareGPT4V's layout, or has another "
            f"type there: {error!r}"
        ) from None
    texts = [*names, *(item for pair in pairs for item in pair)]
    if strange := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"{path} has {strange[0]!r} where a file name or a caption is wanted")
    return names, pairs


def _conversations(entries: list[Any]) -> NamedTexts:
    """ShareGPT4V: the first ``value`` that is ``from`` "gpt" is the caption of ``image``."""
    pairs = []
    for entry in entries:
        answers = [turn["value"] for turn in entry["conversations"] if turn["from"] == "gpt"]
        if not answers:
            raise KeyError("a conversation with a turn from 'gpt'")
        pairs.append((entry["image"], answers[0]))
    return (), pairs


def _coco(content: Mapping[str, Any], path: Path) -> NamedTexts:
    names = {image["id"]: image["file_name"] for image in content["images"]}
    if strangers := {a["image_id"] for a in content["annotations"]} - names.keys():
        raise ValueError(
            f"{path} has captions of images it does not list, such as {min(strangers, key=str)}"
        )
    pairs = [(names[a["image_id"]], a["caption"]) for a in content["annotations"]]
    return dict.fromkeys(names.values()), pairs


def _karpathy(content: Mapping[str, Any], split: str | None) -> NamedTexts:
    return (), [
        (str(Path(image.get("filepath", "")) / image["filename"]), sentence["raw"])
        for image in content["images"]
        if split is None or image["split"] == split
        for sentence in image["sentences"]
    ]


KINDS: Mapping[str, str] = (
    dict.fromkeys(DELIMITERS, "csv")
    | dict.fromkeys(LINES, "lines")
    | {".json": "json", ".parquet": "arrow", ".arrow": "arrow", ".tar": "tars"}
)
FORMATS = {"lines": _lines, "json": _json, "folder": _folder, "arrow": _arrow, "tars": _tars}
SEVERAL = ("folder", "arrow", "tars")
"""Kinds of formats of which several files are one data set."""
