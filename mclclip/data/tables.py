"""Opens images with captions in the usual formats, and yields them as one kind of rows.

`open_table` finds the files of a data set (`table_files`), opens them by their format
(`table_formats`), and finds the columns of images and of captions by their names. If something is
missing or ambiguous, the error says what to type.
"""

from __future__ import annotations

import ast
import codecs
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mclclip.data.decode import PICTURE_SUFFIXES, suffix_of
from mclclip.data.findings import Findings
from mclclip.data.hub_tables import open_split
from mclclip.data.json_captions import json_format
from mclclip.data.picture_folders import TextsOf, find_pictures, folder_format, walk
from mclclip.data.shard_scan import MAX_TEXT_BYTES, is_caption
from mclclip.data.shard_writer import image_extension
from mclclip.data.table_files import find_files, refuse_other_than_texts
from mclclip.data.table_formats import (
    CAPTION_COLUMNS,
    FORMATS,
    IMAGE_COLUMNS,
    KINDS,
    SEVERAL,
    Ask,
    Fields,
    Format,
    Rows,
    holds_bytes,
    is_missing,
    is_stored,
    present_columns,
)
from mclclip.data.text_tables import csv_format, delimiter_of, without_number
from mclclip.util import advice
from mclclip.util.files import Roots, digest_file, digest_json, parse_json
from mclclip.util.options import nearest, protocol_of, refuse_url

log = logging.getLogger("mclclip")

_FEW, _SMALL_BYTES = 10_000, 1 << 14
_NUMBERED = re.compile(rf"({'|'.join(CAPTION_COLUMNS)})[_ -]?\d+")
_OTHER_CAPTION_COLUMNS = ("conversations", "description")  # where there is no usual one
_TEXTS_OF_LISTS = ("raw", *CAPTION_COLUMNS)  # fields of structs in lists that hold captions
_ITEM = re.compile(r"""\s*('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")\s*,?""")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    where     the row for messages, such as 'a.csv line 7'
    path      the image's file name; "" if there is none
    image     the image's bytes, if the table holds them
    captions  all captions, including blank ones
    metadata  the other columns
    """

    where: str
    path: str
    image: bytes | None
    captions: list[str]
    metadata: Fields


@dataclass(frozen=True)
class Table:
    """Images with captions, which can be read several times.

    path          the file or folder, or the url of a data set of the hub
    root          the folder from which file names of images start
    holds_images  True if the table holds the bytes of images
    count         number of rows; None: not known
    inputs        reads all files, and returns digests of their content (`_inputs`)
    fields        reads the rows as {column: value}
    """

    path: Path | str
    root: Path
    delimiter: str | None
    image_column: str
    caption_columns: tuple[str, ...]
    columns: list[str]
    holds_images: bool
    count: int | None
    inputs: Callable[[], dict[str, str]]
    fields: Callable[[Findings], Rows]

    def rows(self, findings: Findings) -> Iterator[Row]:
        """Yields the rows in order, and counts faults of the files in ``findings``.

        Raises ValueError for a file that does not parse.
        """
        for where, fields in self.fields(findings):
            image = fields.pop(self.image_column, None)
            path, data = image, None
            if isinstance(image, bytes):
                path, data = "", image
            elif is_stored(image):
                path, data = image.get("path"), image["bytes"]
            texts = [t for name in self.caption_columns for t in _texts(fields.pop(name, None))]
            yield Row(
                where,
                _name(self.root, path),
                data,
                [text if isinstance(text, str) else "" for text in map(_plain, texts)],
                _plain({name: value for name, value in fields.items() if not is_stored(value)}),
            )


def usable_rows(table: Table, findings: Findings) -> Iterator[Row]:
    """Yields the rows that have an image, without their empty captions."""
    for row in table.rows(findings):
        if row.image is None and not row.path:
            findings.add("no_path", row.where)
            continue
        captions = [text for text in map(str.strip, row.captions) if is_caption(text)]
        if empty := len(row.captions) - len(captions):
            place = f"{row.where}: {row.path}" if row.path else row.where
            findings.add("empty_caption", place, count=empty)
        yield replace(row, captions=captions)


def find_pictures_of(
    rows: Iterable[Row], table: Table, roots: Roots, ask: Callable[[str, Path], ValueError]
) -> list[Row]:
    """Returns rows of a table with the paths of their pictures below its ``root``.

    All are held in memory. Raises the errors of `find_pictures`.
    """
    rows = [*rows]
    names = dict.fromkeys(row.path for row in rows if row.image is None)
    paths = find_pictures(names, table.root, Path(table.path), roots, ask)
    return [replace(row, path=paths.get(row.path, row.path)) for row in rows]


def open_table(
    source: Path,
    captions: Path | None = None,
    *,
    path_column: str | None = None,
    caption_column: str | Sequence[str] | None = None,
    delimiter: str | None = None,
    allow_roots: Sequence[Path] = (),
    command: Sequence[str] = (),
) -> Table:
    """Opens the data set ``source``, or the pictures in that folder with their ``captions``, which
    are a table or a folder of texts with the pictures' names.

    A data set is a folder of pictures, each with a text of its name beside it; or a CSV, TSV,
    JSONL, Parquet or Arrow file, COCO's (Karpathy's, ShareGPT4V's) JSON, tar shards in WebDataset's
    layout, or a folder or pattern (``{0..9}``, ``*``) of several Parquet, Arrow or tar files; or a
    data set of the Hugging Face hub (`hub_tables`).

    File names start from the folder, or from that of the table (`find_pictures`). Texts beside
    pictures, and linked folders, must lie below the folder or ``allow_roots``. Raises
    FileNotFoundError, and ValueError if columns or files are missing or ambiguous. The message
    completes the user's ``command``; an empty one takes the first of several columns.
    """
    path: Path | str = source if captions is None else captions
    ask = partial(_complete, command, Path(path))
    if protocol_of(source) == "hf":
        if captions is not None:
            raise ValueError(
                f"captions: {captions} is for a folder of pictures; a data set of the hub has them "
                "in its own columns (--caption-column)"
            )
        path, commit, table = open_split(source, ask)
        root, files, inputs = source, list[Path](), partial(dict[str, str], {path: commit})
    else:
        root, files, table, delimiter = _open_files(source, captions, delimiter, allow_roots, ask)
        folders = [captions] if captions is not None and captions.is_dir() else []
        roots = Roots(root, *folders, *allow_roots)
        inputs = partial(_inputs, source if folders else Path(path), files, folders, roots)
    if not table.columns:
        raise ValueError(f"{path} is empty: it names no columns")
    images = _image_column(path, root, table, path_column, bool(caption_column), not command, ask)
    texts = _caption_columns(path, table, caption_column, images, not command, ask)
    for column in (images, *texts):
        if (top := column.partition(".")[0]) in table.lacking:
            raise ValueError(
                f"{table.lacking[top]} has no column {column!r}, which {files[0]} has: name "
                "their columns alike, or give those that have it"
            )
    return Table(
        path=path,
        root=root,
        delimiter=delimiter,
        image_column=images,
        caption_columns=texts,
        columns=[*table.columns],
        holds_images=holds_bytes(table.columns[images]),
        count=table.count,
        inputs=inputs,
        fields=table.rows,
    )


def _open_files(
    source: Path,
    captions: Path | None,
    delimiter: str | None,
    allow_roots: Sequence[Path],
    ask: Ask,
) -> tuple[Path, list[Path], Format, str | None]:
    """Opens what lies on a disk; returns the folder of pictures, the files (none for a folder of
    pictures), their rows, and the delimiter of a table of text."""
    path = source if captions is None else captions
    refuse_url(source, "pictures:")
    refuse_url(path, "captions:")
    if captions is not None and not source.is_dir():
        raise FileNotFoundError(f"no folder of images at {source}")
    if captions is not None and not captions.exists():
        raise FileNotFoundError(f"no table or folder of captions at {captions}")
    roots = Roots(source if source.is_dir() else source.parent, *allow_roots)
    if captions is not None and captions.is_dir():
        roots = Roots(source, captions, *allow_roots)
        texts = TextsOf(source, captions, roots)
        refuse_other_than_texts(texts, ask)
        return source, [], folder_format(source, roots, texts), None
    files = find_files(path, roots, ask)
    root = source if source.is_dir() or not files else files[0].parent
    kind = _kind(files[0], delimiter) if files else "folder"
    if kind not in SEVERAL and len(files) > 1:
        raise ask(f"{path} names {len(files)} tables, choose one", files[0])
    if kind == "csv":
        delimiter = delimiter_of(files[0]) if delimiter is None else delimiter
        return root, files, csv_format(files[0], delimiter), delimiter
    if kind == "json":
        return root, files, json_format(files[0]), None
    return root, files, FORMATS[kind](files) if files else folder_format(source, roots), None


def _complete(command: Sequence[str], path: Path, what: str, *words: object) -> ValueError:
    """Makes the error for something ambiguous, with the command to type instead.

    A single word of ``words`` replaces ``path`` in the command; a flag and its value are appended.
    """
    if not command:
        return ValueError(what)
    instead = path if len(words) == 1 else None
    return ValueError(f"{what}: {advice.again(command, *words, instead=instead)}")


def _kind(path: Path, delimiter: str | None) -> str:
    if delimiter is not None:
        return "csv"
    suffix = path.suffix.lower()
    if suffix in (".xlsx", ".xls", ".ods"):
        raise ValueError(f"{path} is a spreadsheet: save it as CSV, and give that")
    if suffix not in KINDS:
        raise ValueError(
            f"{path} ends in {path.suffix!r}, expected one of {', '.join(KINDS)}: give the "
            "delimiter with --delimiter where it is a table of text"
        )
    if KINDS[suffix] in ("json", "lines"):  # the content tells which, whatever the file is called
        with open(path, "rb") as file:
            start = file.readline(MAX_TEXT_BYTES).removeprefix(codecs.BOM_UTF8).strip()
            if start[-1:] == b"}" and file.readline(MAX_TEXT_BYTES).lstrip()[:1] == b"{":
                return "lines"
        return "json" if start[:1] == b"[" else KINDS[suffix]
    return KINDS[suffix]


def _inputs(
    path: Path, files: Sequence[Path], texts: Sequence[Path], roots: Roots
) -> dict[str, str]:
    """Returns a digest of each file by its name, as the ``inputs`` of an artifact: of the ``files``
    at ``path``, or of all pictures and texts in that folder and in the folders of ``texts``.

    More than ``_FEW`` files have one digest together. Large files in a folder of pictures count by
    their size, all others by their bytes. Times do not count, since a copy has others.
    """
    root = path if path.is_dir() else path.parent
    inputs: dict[str, str] = {}
    paths = [(os.path.relpath(file, root), file) for file in files or walk(path, roots, Findings())]
    for folder in texts:
        of_folder = walk(folder, roots, Findings())
        paths += [(f"captions/{os.path.relpath(file, folder)}", file) for file in of_folder]
    for name, file in paths:
        if file.is_file() and (files or suffix_of(file) in (*PICTURE_SUFFIXES, "txt")):
            size = file.stat().st_size
            whole = files or suffix_of(file) == "txt" or size <= _SMALL_BYTES
            content = f"{size:,} bytes"
            if whole:
                with suppress(OSError):  # it may be unreadable, which is counted where it is packed
                    content = digest_file(file)
            inputs[name] = content
    if len(inputs) > _FEW:
        return {f"{len(inputs):,} files": digest_json(sorted(inputs.items()))}
    return dict(sorted(inputs.items()))


# --- columns -------------------------------------------------------------------------------------


def _image_column(
    path: Path | str,
    root: Path,
    table: Format,
    option: str | None,
    names_captions: bool,
    first: bool,
    ask: Ask,
) -> str:
    """Returns the column of images: the user's ``option``, or one that looks so.

    If several do, ``first`` takes the first one, and otherwise it is an error. ``names_captions``:
    the user named the columns of captions.
    """
    if option is not None or table.fixed:
        return _check_column(path, table, option or (table.fixed or ("", ""))[0])
    stored = [name for name, value in table.columns.items() if is_stored(value)]
    usual = present_columns(table.columns, IMAGE_COLUMNS)
    names = {name: value for name, value in table.columns.items() if isinstance(value, str)}
    paths = [name for name in usual if name in names and not _is_address(names[name])]
    if not paths and not stored:  # 7 for 7.jpg
        paths = [name for name in usual if type(table.columns[name]) is int]
    # Bytes may be something else, such as a hash or a thumbnail of the picture that a name is of.
    sure = [name for name in stored if name in usual or isinstance(table.columns[name], dict)]
    others = [name for name in stored if name not in sure]
    others = [n for n in others if not table.columns[n] or image_extension(table.columns[n])]
    candidates = sure or [*paths, *others] or stored
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        several = " and ".join(map(repr, candidates))
        if first:
            log.warning("%s has images in %s: the first is read", path, several)
            return candidates[0]
        raise ask(f"{path} has images in {several}, choose one", "--path-column", candidates[0])
    captions = present_columns(table.columns, CAPTION_COLUMNS)
    texts = [(n, v) for n, v in names.items() if n not in captions and not _is_address(v)]
    fits = [name for name, value in texts if value and os.path.isfile(root / value)]
    fits += [name for name, value in texts if suffix_of(value.strip()) in PICTURE_SUFFIXES]
    if not fits and (addresses := [n for n in usual if n in names and _is_address(names[n])]):
        raise ValueError(
            f"{path} has addresses in {addresses[0]!r}: fetch the images first, such as with "
            "img2dataset, and pack its shards"
        )
    missing = f"{path} has no column of images ({', '.join(IMAGE_COLUMNS)})"
    missing += f", it has {_describe(table)}"
    missing += ": name " + ("it" if fits else "the column of names or of bytes")
    words = ("--path-column", fits[0] if fits else "COLUMN")
    if captions or names_captions or len(table.columns) == 1:
        raise ask(missing, *words)
    raise ask(f"{missing}, and the column of captions", *words, "--caption-column", "COLUMN")


def _is_address(value: str) -> bool:
    return protocol_of(value) not in (None, "file")


def _describe(table: Format) -> str:
    """Lists the columns of a table for messages, and the types of those that cannot be read."""
    others = [f"{name} of type {kind}" for name, kind in table.unreadable.items()]
    return f"{[*table.columns]}" + (f", and cannot read {', '.join(others)}" if others else "")


def _caption_columns(
    path: Path | str,
    table: Format,
    option: str | Sequence[str] | None,
    images: str,
    first: bool,
    ask: Ask,
) -> tuple[str, ...]:
    """Returns the columns of captions: those of the user's ``option``, or ones that look so.

    If several do, ``first`` takes the first one, and otherwise it is an error. Numbered columns,
    such as caption_1 and caption_2, belong together.
    """
    option = [option] if isinstance(option, str) else option
    if option or table.fixed:
        columns = option or [(table.fixed or ("", ""))[1]]
        return tuple(_check_column(path, table, name) for name in columns)
    texts = [n for n, v in table.columns.items() if isinstance(v, str | list) and n != images]
    candidates = [*present_columns(dict.fromkeys(texts), CAPTION_COLUMNS)]
    numbered = [n for n in texts if _NUMBERED.fullmatch(n.strip().lower())]
    stem = candidates[0].strip().lower() if candidates else ""
    together = [n for n in numbered if n.strip().lower().startswith(stem)]
    candidates += numbered[:1] if not together else []
    if len(candidates) > 1:
        names = " and ".join(map(repr, candidates))
        if first:
            log.warning("%s has captions in %s: the first is read", path, names)
            return (candidates[0],)
        raise ask(f"{path} has captions in {names}, choose one", "--caption-column", candidates[0])
    if candidates or together:
        return (*candidates, *together)
    if likely := [name for name in texts if "caption" in name.lower()]:
        names = " and ".join(map(repr, likely))
        what = f"{path} has no column called 'caption' or the like, and {names} may hold captions"
        raise ask(what, "--caption-column", likely[0])
    if rarer := present_columns(dict.fromkeys(texts), _OTHER_CAPTION_COLUMNS):
        return (rarer[0],)
    nested = [name for name in texts if name.rpartition(".")[2] in _TEXTS_OF_LISTS]
    if nested and not first:
        raise ask(f"{path} has lists of texts in {nested[0]!r}", "--caption-column", nested[0])
    examples = {**table.columns, **table.unreadable}
    others = {name: value for name, value in examples.items() if name != images}
    odd = present_columns(others, CAPTION_COLUMNS)
    if nested or not odd:
        return tuple(nested[:1])
    value = others[odd[0]]
    if is_missing(value) or value == "null":  # so far: later rows may have texts
        return (odd[0],)
    what = f"{path} has no texts in {odd[0]!r}, such as {value!r}"
    if isinstance(value, int | float):
        raise ask(f"{what}: if these are captions", "--caption-column", odd[0])
    raise ValueError(f"{what}: write them as texts")


def _texts(value: Any) -> list[Any]:
    """Returns the captions of a cell: a list, a text, a number, the text of a list, as JSON and
    pandas write it, or the first answer of a conversation, as ShareGPT4V and LLaVA have it."""
    if isinstance(value, str) and value.strip()[:1] == "[" and value.strip()[-1:] == "]":
        try:
            listed = parse_json(value, "")
            if listed and all(isinstance(item, str | None) for item in listed):
                return list(listed)
            if any(isinstance(item, dict) and {"from", "role"} & {*item} for item in listed):
                return _answers(listed) or [None]
        except ValueError:  # pandas has other quotes, and numpy no commas
            items = [*_ITEM.finditer(inner := value.strip()[1:-1])]
            if items and not _ITEM.sub("", inner).strip():
                return [_unquote(item[1]) for item in items]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        return [str(value)]
    if not isinstance(value, list):
        return [value]
    return _answers(value) or value


def _answers(turns: Sequence[Any]) -> list[Any]:
    """Returns the first answer of a conversation, in a list; an empty list if there is none."""
    turns = [turn for turn in turns if isinstance(turn, dict)]
    answers = [turn.get("value") for turn in turns if turn.get("from") == "gpt"]
    for content in (t.get("content") for t in turns if t.get("role") == "assistant"):
        parts = content if isinstance(content, list) else [{"text": content}]
        answers += [part["text"] for part in parts if isinstance(part, dict) and "text" in part]
    return answers[:1]


def _unquote(literal: str) -> str:
    """Reads a text of Python; one with a broken escape, such as of a Windows path, as it stands."""
    try:
        return str(ast.literal_eval(literal))
    except (SyntaxError, ValueError):
        return literal[1:-1]


def _check_column(path: Path | str, table: Format, name: str) -> str:
    if name not in table.columns:
        near = nearest(name, table.columns, 1)[0]
        raise ValueError(
            f"{path} has no column {name!r}, it has {_describe(table)}: did you mean {near!r}?"
        )
    return name


def _name(root: Path, value: Any) -> str:
    """Returns a file name without blanks and byte order marks around it, without the number of a
    caption, and with slashes for the backslashes of Windows; "" if it is no text.

    If a file below ``root`` has exactly this name, all stays.
    """
    name = _plain(str(value)) if isinstance(value, str) or type(value) is int else ""
    bare = without_number(name.replace("\ufeff", "").strip()).replace("\\", "/")
    return name if name != bare and os.path.isfile(root / name) else bare


def _plain(value: Any) -> Any:
    """Makes a value that fits into strict JSON and UTF-8.

    NaN becomes null, and half a surrogate pair (``\\ud83d`` alone in JSON) a question mark.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
