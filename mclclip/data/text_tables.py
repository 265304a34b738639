"""Reads tables of text (.csv, .tsv, .txt, .token).

Their first line that is not empty names the columns. If it names a picture instead, the columns are
that of pictures and that of captions, as in Flickr8k's ``a.jpg#0<tab>A child.``.
"""

from __future__ import annotations

import csv
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mclclip.data.decode import PICTURE_SUFFIXES
from mclclip.data.findings import Findings
from mclclip.data.shard_scan import MAX_TEXT_BYTES, encoding_of
from mclclip.data.table_formats import (
    CAPTION_COLUMNS,
    DELIMITERS,
    IMAGE_COLUMNS,
    Format,
    Rows,
    check_once,
    present_columns,
)

log = logging.getLogger("mclclip")
_SEPARATOR = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # Excel's line before the header
_SUFFIXES = "|".join(PICTURE_SUFFIXES)
# Flickr8k and Flickr30k number the captions of a picture.
_PICTURE = re.compile(rf"(.+\.(?:{_SUFFIXES}))(#\d+)?", re.IGNORECASE)
_PICTURE_FIRST = re.compile(
    rf'\ufeff?"?[^;\t|,"]+\.(?:{_SUFFIXES})(?:#\d+)?"? *([;\t|,])', re.IGNORECASE
)


def delimiter_of(path: Path) -> str:
    """Guesses the delimiter of a table.

    It is that of Excel's line ``sep=;``, or what follows the name of a picture at the start of the
    first line, or the usual one of the suffix if the header has it, or a semicolon, tab, bar or
    comma in the header, as spreadsheets and Flickr30k write them.
    """
    return _delimiter(path, _first_line(path))


def _delimiter(path: Path, header: str) -> str:
    if match := _SEPARATOR.fullmatch(header) or _PICTURE_FIRST.match(header):
        return match[1]
    usual = DELIMITERS.get(path.suffix.lower(), ",")
    others = [each for each in (";", "\t", "|", ",") if usual not in header and each in header]
    return others[0] if others else usual


def _first_line(path: Path) -> str:
    """Returns the first line that is not empty, of the first hundred; "" if there is none."""
    with open(path, encoding=_encoding(path), errors="replace", newline="") as file:
        lines = (file.readline(MAX_TEXT_BYTES) for _ in range(100))
        return next(filter(str.strip, lines), "")


def is_table(path: Path) -> bool:
    """Returns True if the first line of a text names a picture, or columns of both kinds."""
    line = _first_line(path)
    cells = line.split(_delimiter(path, line))
    names = dict.fromkeys(name.strip(' "\ufeff\r\n') for name in cells)
    columns = (present_columns(names, each) for each in (IMAGE_COLUMNS, CAPTION_COLUMNS))
    return bool(_PICTURE_FIRST.match(line)) or all(columns)


def without_number(name: str) -> str:
    """Returns the name of a picture without the number of its caption, as in ``a.jpg#0``."""
    match = _PICTURE.fullmatch(name)
    return match[1] if match else name


def _encoding(path: Path) -> str:
    with open(path, "rb") as start:
        return encoding_of(start.read(4))


def csv_format(path: Path, delimiter: str) -> Format:
    """Opens a table of text; blanks after a delimiter are ignored.

    Raises ValueError if the first line names a picture, and has other than two cells.
    """
    if len(delimiter) != 1:
        raise ValueError(f"delimiter is {delimiter!r}, expected one character")
    encoding = _encoding(path)

    @contextmanager
    def opened() -> Iterator[tuple[_TextRows, list[str]]]:
        with open(path, encoding=encoding, newline="") as file:
            reader = _TextRows(file, delimiter)
            try:
                names = [name.replace("\ufeff", "").strip() for name in reader.header()]
                if any(map(_PICTURE.fullmatch, names)):
                    names = _columns_without_header(path, delimiter, names)
                    file.seek(0)
                    # With tabs a quotation mark at the start need not be closed.
                    reader = _TextRows(file, delimiter, has_quotes=delimiter != "\t")
                yield reader, names
            except (csv.Error, UnicodeDecodeError) as error:
                at, cause, advice = f" line {reader.rows.line_num}", str(error), ""
                if isinstance(error, UnicodeDecodeError):
                    at, advice = _where_broken(path, encoding), ": save it as UTF-8"
                    cause = f"'{error.encoding}' codec can't decode it ({error.reason})"
                raise ValueError(f"{path}{at} does not parse: {cause}{advice}") from None

    def rows(findings: Findings) -> Rows:
        with opened() as (reader, names):
            for number, cells in reader.cells(len(names), path.name, findings):
                if not reader.has_quotes:
                    cells = [*map(_unquote, cells)]
                where = f"{path.name} line {number}"
                if any(map(str.strip, cells[len(names) :])):
                    # Of a picture and a caption, the rest is the caption behind a comma in it.
                    is_caption = len(names) == 2 and names[1].lower() in CAPTION_COLUMNS
                    findings.add("joined_cells" if is_caption else "extra_cells", where)
                    if is_caption:
                        cells = [cells[0], f"{delimiter} ".join(cells[1:])]
                # The missing cells of a short row are empty; a column without a name is not read.
                row = dict(itertools.zip_longest(names, cells[: len(names)], fillvalue=""))
                row.pop("", None)
                yield where, row

    with opened() as (_, names):
        check_once(path, [name for name in names if name])
        columns = dict.fromkeys(names, "")
    _, first = next(rows(Findings()), ("", {}))
    return Format({name: first.get(name, "") for name in columns}, rows)


def _unquote(cell: str) -> str:
    """Removes the quotation marks that some programs put around a cell, where those inside it are
    doubled."""
    match = re.fullmatch(r'"((?:[^"]|"")*)"', cell)
    return match[1].replace('""', '"') if match else cell


def _columns_without_header(path: Path, delimiter: str, cells: Sequence[str]) -> list[str]:
    """Returns the names of the columns of a table whose first line has no names but a picture; its
    ``cells`` are given. Raises ValueError for other than two cells, and for two pictures."""
    pictures = [at for at, cell in enumerate(cells) if _PICTURE.fullmatch(cell)]
    # A caption may end with the name of a picture.
    pictures = [at for at in pictures if " " not in cells[at]] or pictures
    if len(pictures) > 1:
        raise ValueError(f"{path} has no header, and its first line names several pictures")
    at, number = pictures[0], len(cells)
    columns = [f"column_{place}" for place in range(1, number + 1)]
    columns[at] = "filepath"
    if number > 1:
        columns[-1 if at < number - 1 else -2] = "title"
    if number != 2:
        raise ValueError(
            f"{path} has no header: cell {at + 1} of the {number} in its first line names a "
            f"picture. Put a line such as {delimiter.join(columns)!r} before it"
        )
    return columns


def refuse_misread(path: Path, findings: Findings) -> None:
    """Raises ValueError if anything of a benchmark's table may be read otherwise than meant, or is
    left out. Empty captions, and other files among the pictures, are logged."""
    harmless = ("empty_caption", "other_file", "hidden", "linked_folder", "bad_name")
    if faults := findings.without(harmless).lines():
        raise ValueError(f"{path}: {'; '.join(faults)}")
    for line in findings.lines():
        log.warning("%s: %s", path, line)


def _where_broken(path: Path, encoding: str) -> str:
    """Returns ' line N' for the first line that is not UTF-8.

    The error does not know it, since the file is read ahead in blocks.
    """
    if encoding != "utf-8-sig":
        return ""
    with open(path, encoding=encoding, errors="surrogateescape", newline="") as file:
        broken = (at for at, line in enumerate(file, start=1) if re.search("[\udc80-\udcff]", line))
        return f" line {next(broken)}"


class _TextRows:
    """The rows of a table of text. ``rows`` are those of the csv module; `cells` repairs them."""

    def __init__(self, file: Iterable[str], delimiter: str, has_quotes: bool = True) -> None:
        self._recent: list[str] = []  # the lines of the last row
        self._delimiter, self.has_quotes = delimiter, has_quotes
        options: dict[str, Any] = {"delimiter": delimiter, "skipinitialspace": True}
        options["quoting"] = csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE
        self._read = partial(csv.reader, **options)
        csv.field_size_limit(MAX_TEXT_BYTES)
        self.rows = self._read(self._remember(file))

    def _remember(self, file: Iterable[str]) -> Iterator[str]:
        for line in file:
            self._recent.append(line)
            yield line

    def header(self) -> list[str]:
        """Returns the first row that is neither empty nor Excel's line ``sep=;``."""
        for row in self.rows:
            if any(map(str.strip, row)) and not _SEPARATOR.fullmatch("".join(self._recent)):
                return row
            self._recent.clear()
        return []

    def cells(self, width: int, name: str, findings: Findings) -> Iterator[tuple[int, list[str]]]:
        """Yields (line number, cells) of each row that is not blank.

        If a quotation mark that is never closed has joined lines to one row, they are split where a
        line begins like a row. Both are counted in the findings. ``width``: the number of columns.
        """
        self._recent.clear()
        for row in self.rows:
            lines, last = [*self._recent], self.rows.line_num
            self._recent.clear()
            starts = self._starts(lines, width) if len(lines) > 1 else [0]
            if len(starts) == 1:
                if len(lines) > 1 and not self._matches(lines):
                    findings.add("joined_lines", f"{name} line {last}", count=len(lines))
                # No header may have skipped a separator.
                is_row = any(map(str.strip, row)) and not _SEPARATOR.fullmatch(lines[0])
                yield from [(last, row)] * is_row
                continue
            first = last - len(lines) + 1
            findings.add("open_quote", f"{name} lines {first} to {last}", count=len(lines))
            for start, end in itertools.pairwise([*starts, len(lines)]):
                for cells in self._read(lines[start:end]):
                    yield first + start, cells

    def _starts(self, lines: Sequence[str], width: int) -> list[int]:
        """Returns the numbers of the lines that begin a row; only 0 if all are one row.

        A line begins a row if it has ``width`` cells or more, and a picture's file name in the same
        column as the first line; or, in a table with tabs, ``width`` cells. The lines are several
        rows if each names a picture, or if their quotation marks do not match.
        """
        cells = [*self._read(lines, quoting=csv.QUOTE_NONE)]
        columns = [
            {at for at, cell in enumerate(row) if _PICTURE.fullmatch(cell.strip())} for row in cells
        ]
        starts = [
            number
            for number, row in enumerate(cells)
            if (len(row) >= width and columns[number] & columns[0])
            or (len(row) == width and self._delimiter == "\t")
        ]
        name_pictures = all(row & columns[0] for row in columns)
        is_split = (len(starts) == len(lines) and name_pictures) or not self._matches(lines)
        return starts if is_split and starts[:1] == [0] else [0]

    def _matches(self, lines: Sequence[str]) -> bool:
        """Returns True if the quotation marks of one row match; blanks may follow a closing one."""
        closed = [re.sub(r'"[ ]+(?=[^\w\s"]|\s*$)', '"', line) for line in lines]
        try:
            return len([*self._read(closed, strict=True)]) == 1
        except csv.Error:
            return False
