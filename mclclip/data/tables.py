"""Images with captions, in the formats in which people have them, as one kind of rows.

A reader of a format yields (where, {column: value}), one row after another; its columns are known
beforehand, each with an example of its values. ``open_table`` finds the columns of images and of
captions by their names, and makes ``Row`` of them. The value of an image is the name of a file, or
the bytes themselves, as Hugging Face's ``{bytes, path}`` too. Rows of other people are read: what a
row lacks is counted in pack's findings, and a file that does not parse is one line.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from mclclip import advice
from mclclip.data.shard_scan import Findings
from mclclip.data.table_formats import (
    CAPTION_COLUMNS,
    DELIMITERS,
    FORMATS,
    KINDS,
    LINES,
    PICTURES,
    SEVERAL,
    Fields,
    Format,
    Rows,
    csv_format,
    delimiter_of,
    is_stored,
    named,
    walk,
)
from mclclip.files import digest_file, digest_json
from mclclip.options import refuse_url

IMAGE_COLUMNS = ("filepath", "image", "image_path", "path", "file_name", "url")
_TABLES = (*DELIMITERS, *LINES, ".json")
_SHARDED = (".arrow", ".tar", ".parquet")  # the first that a folder has; img2dataset writes two
_FEW, _SMALL_BYTES = 10_000, 1 << 14
_NUMBER = re.compile(r"[-_.]?\d+(-of-\d+)?$")  # of a file among those of its split

_Ask = Callable[..., ValueError]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table. ``path`` is the image's name there ("": none), ``image`` its bytes where
    the table holds them; ``captions`` are as they stand there, blank ones too."""

    where: str
    path: str
    image: bytes | None
    captions: list[str]
    metadata: Fields


@dataclass(frozen=True)
class Table:
    """Images with captions, open to be read as often as wanted.

    ``root`` is the folder from which paths start, ``holds_images`` whether images lie in the table
    itself, ``inputs`` identify its content (see ``_inputs``).
    """

    path: Path
    root: Path
    delimiter: str | None
    image_column: str
    caption_column: str | None
    columns: list[str]
    holds_images: bool
    count: int | None
    inputs: dict[str, str]
    fields: Callable[[Findings], Rows]

    def rows(self, findings: Findings) -> Iterator[Row]:
        """The rows in order; faults of the files are counted in ``findings``. Raises ValueError for
        a file that does not parse."""
        for where, fields in self.fields(findings):
            image = fields.pop(self.image_column, None)
            path, data = image, None
            if isinstance(image, bytes):
                path, data = "", image
            elif is_stored(image):
                path, data = image.get("path"), image["bytes"]
            captions = fields.pop(self.caption_column, None) if self.caption_column else []
            texts = captions if isinstance(captions, list) else [captions]
            yield Row(
                where,
                path.strip() if isinstance(path, str) else "",
                data,
                [text if isinstance(text, str) else "" for text in texts],
                {name: _plain(value) for name, value in fields.items() if not is_stored(value)},
            )


def open_table(
    source: Path,
    captions: Path | None = None,
    *,
    image_column: str | None = None,
    caption_column: str | None = None,
    delimiter: str | None = None,
    command: Sequence[str] = (),
) -> Table:
    """Opens a data set: ``captions`` with the pictures in the folder ``source``, or ``source``.

    That is a folder of pictures, each with a text of its name beside it; or a CSV, TSV, JSONL,
    Parquet or Arrow file, COCO's (Karpathy's, ShareGPT4V's) JSON, tar shards in WebDataset's
    layout, or a folder or pattern (``{0..9}``, ``*``) of several Parquet, Arrow or tar files.

    Raises FileNotFoundError where nothing is there, and ValueError where columns or files are
    missing or ambiguous: ``command`` is what the user typed, which the line then completes. Without
    a command the first that fits is taken of several columns, in the order of their common names.
    """
    refuse_url(source, "pictures:")
    if captions is not None:
        refuse_url(captions, "captions:")
        if not source.is_dir():
            raise FileNotFoundError(f"no folder of images at {source}")
        if not captions.is_file():
            raise FileNotFoundError(f"no table of captions at {captions}")
    path = source if captions is None else captions
    ask = partial(_complete, command, path)
    files = _files(path, ask)
    kind = _kind(files[0], delimiter) if files else "folder"
    if kind not in SEVERAL and len(files) > 1:
        raise ask(f"{path} names {len(files)} tables, choose one", files[0])
    if kind == "csv":
        delimiter = delimiter_of(files[0]) if delimiter is None else delimiter
        if len(delimiter) != 1:
            raise ValueError(f"delimiter is {delimiter!r}, expected one character")
        table = csv_format(files[0], delimiter)
    else:
        table, delimiter = FORMATS[kind](files or [source]), None
    if not table.columns:
        raise ValueError(f"{path} is empty: wanted a line with the names of columns")
    root = source if source.is_dir() else files[0].parent
    first = not command
    images = _image_column(path, root, table, image_column, first, ask)
    texts = _caption_column(path, table, caption_column, first, ask)
    return Table(
        path=path,
        root=root,
        delimiter=delimiter,
        image_column=images,
        caption_column=texts,
        columns=[*table.columns],
        holds_images=is_stored(table.columns[images]),
        count=table.count,
        inputs=_inputs(path, files),
        fields=table.rows,
    )


# --- files of a data set -------------------------------------------------------------------------


def _complete(command: Sequence[str], path: Path, what: str, *words: object) -> ValueError:
    """The error for something ambiguous, with the complete command: a single word stands where the
    data set ``path`` stood, a flag and its value at the end."""
    if not command:
        return ValueError(what)
    instead = path if len(words) == 1 else None
    return ValueError(f"{what}: {advice.again(command, *words, instead=instead)}")


def _files(path: Path, ask: _Ask) -> list[Path]:
    """The files of a data set in order; none for a folder of pictures."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_of_folder(path, ask)
    patterns = [str(path)]
    if "{" in str(path):
        from webdataset.shardlists import expand_urls  # imports torch

        patterns = expand_urls(str(path))
    files = [Path(name) for pattern in patterns for name in sorted(glob(pattern, recursive=True))]
    if not files:
        raise FileNotFoundError(
            f"no {path}: wanted a folder of pictures or of shards, or a table ({', '.join(KINDS)})"
        )
    return files


def _files_of_folder(folder: Path, ask: _Ask) -> list[Path]:
    splits = sorted(path.parent for path in folder.glob("*/state.json"))
    if splits:
        names = ", ".join(path.name for path in splits)
        raise ask(f"{folder} holds the splits {names}, choose one", min(splits, key=_not_train))
    found: dict[str, list[Path]] = {}
    for path in walk(folder):
        found.setdefault(path.suffix.lower(), []).append(path)
    pictures = [path for suffix in PICTURES for path in found.get(f".{suffix}", [])]
    texts = {*found.get(".txt", [])}
    if any(picture.with_suffix(".txt") in texts for picture in pictures):
        return []
    sharded = next((found[suffix] for suffix in _SHARDED if suffix in found), [])
    tables = [path for suffix in (*_TABLES, ".parquet") for path in found.get(suffix, [])]
    if pictures:
        if tables:
            raise ask(
                f"{folder} holds pictures without texts beside them, and {tables[0].name}, which "
                "may be the table of their captions", "--captions", tables[0],
            )  # fmt: skip
        if sharded:
            pattern = folder / "**" / f"*{sharded[0].suffix}"
            raise ask(f"{folder} holds pictures, and {sharded[0].name} too", pattern)
        return []
    if sharded:
        return _one_split(folder, sharded, ask)
    if tables:
        raise ask(f"{folder} holds no pictures, but tables such as {tables[0].name}", tables[0])
    raise ValueError(f"{folder} holds no pictures ({', '.join(PICTURES)}), no table and no shards")


def _one_split(folder: Path, files: list[Path], ask: _Ask) -> list[Path]:
    """The files; ValueError where their names or folders say that they are several splits."""
    splits = sorted({path.parent / _NUMBER.sub("", path.stem) for path in files})
    if len(splits) > 1:
        names = ", ".join(str(split.relative_to(folder)) for split in splits)
        one = min(splits, key=_not_train)
        pattern = one / f"*{files[0].suffix}" if one.is_dir() else f"{one}*{files[0].suffix}"
        raise ask(f"{folder} holds several data sets or splits ({names}), choose one", pattern)
    return files


def _not_train(split: Path) -> tuple[bool, Path]:
    return "train" not in split.name, split


def _kind(path: Path, delimiter: str | None) -> str:
    if delimiter is not None:
        return "csv"
    suffix = path.suffix.lower()
    if suffix not in KINDS:
        raise ValueError(
            f"{path} ends in {path.suffix!r}, expected one of {', '.join(KINDS)}: give the "
            "delimiter where it is a table of text"
        )
    return KINDS[suffix]


def _inputs(path: Path, files: Sequence[Path]) -> dict[str, str]:
    """What is read, as the ``inputs`` of an artifact: each file by its name; of more than ``_FEW``
    files their number and bytes.

    A table of text counts by its bytes, and so does a small file, such as a text beside a picture,
    where the files are few; another one by its size. Times do not count: a copy has others.
    """
    if len(files) == 1 and files[0].suffix.lower() not in _SHARDED:
        return {files[0].name: digest_file(files[0])}
    root = path if path.is_dir() else path.parent
    sizes = {
        os.path.relpath(file, root): file.stat().st_size
        for file in files or walk(path)
        if file.is_file()
    }
    if len(sizes) > _FEW:
        return {
            f"{len(sizes):,} files": f"{sum(sizes.values()):,} bytes",
            "their names and sizes": digest_json(sorted(sizes.items())),
        }
    return {
        name: digest_file(root / name) if size <= _SMALL_BYTES else f"{size:,} bytes"
        for name, size in sorted(sizes.items())
    }


# --- columns -------------------------------------------------------------------------------------


def _image_column(
    path: Path, root: Path, table: Format, given: str | None, first: bool, ask: _Ask
) -> str:
    if given is not None or table.chosen:
        return _checked(path, table, given or (table.chosen or ("", ""))[0])
    stored = [name for name, value in table.columns.items() if is_stored(value)]
    paths = [
        name for name in named(table.columns, IMAGE_COLUMNS) if isinstance(table.columns[name], str)
    ]
    addresses = [name for name in paths if "://" in table.columns[name]]
    found = stored or [name for name in paths if name not in addresses]
    if len(found) == 1 or (found and first):
        return found[0]
    if found:
        names = " and ".join(map(repr, found))
        raise ask(f"{path} has images in {names}, choose one", "--path-column", found[0])
    if addresses:
        raise ValueError(
            f"{path} has addresses in {addresses[0]!r}: fetch the images first, such as with "
            "img2dataset, and pack its shards"
        )
    texts = ((name, value) for name, value in table.columns.items() if isinstance(value, str))
    fits = [name for name, value in texts if value and (root / value).is_file()]
    raise ask(
        f"{path} has no column of images ({', '.join(IMAGE_COLUMNS)}), it has {[*table.columns]}: "
        "name it", "--path-column", [*fits, *table.columns, "COLUMN"][0],
    )  # fmt: skip


def _caption_column(
    path: Path, table: Format, given: str | None, first: bool, ask: _Ask
) -> str | None:
    if given is not None or table.chosen:
        return _checked(path, table, given or (table.chosen or ("", ""))[1])
    found = [
        name
        for name in named(table.columns, CAPTION_COLUMNS)
        if isinstance(table.columns[name], str | list)
    ]
    if len(found) > 1 and not first:
        names = " and ".join(map(repr, found))
        raise ask(f"{path} has captions in {names}, choose one", "--caption-column", found[0])
    return found[0] if found else None


def _checked(path: Path, table: Format, name: str) -> str:
    if name not in table.columns:
        raise ValueError(
            f"{path} has no column {name!r}, it has {[*table.columns]}: name the columns of image "
            "path and caption"
        )
    return name


def _plain(value: Any) -> Any:
    """A value that strict JSON has: NaN, which Arrow's columns may hold, is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
