"""Rows of text embeddings that the user brings, found by a text or by the key of a sample.

The files that a user brings are of two kinds, and several may be named together:

    FILE.parquet   the column ``embedding``, a list of numbers, and the column ``text`` or ``key``
    FILE.npy       rows [N, W] of floating-point numbers; beside it FILE.jsonl, whose line n names
                   row n, as {"text": "a photo of a dog"} or {"key": "web/0001", "number": 0}

A row with a ``text`` stands for that text wherever it is read: as a caption, as a prompt, in a
minimal pair. White space at its ends and repeated white space do not count, and the first 4,096
characters decide. A row with a ``key``
stands for all captions of that sample, or, with a ``number``, for that caption, counted from 0. A
key is 'source/key' as the index has it, or the name in the tar alone. A row by key comes before a
row by text.

``write_text_rows`` copies them into one folder, which ``TextRows`` opens:

    rows.npy      float16 or float32 [N, W], in the order of the files
    digests.npy   int64 [M], sorted: a digest of every different text or key
    places.npy    int64 [M]: the row of each in rows.npy
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from glob import glob
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from mclclip.data.arrays import open_given_npy, open_npy, save_npy, write_npy_parts
from mclclip.data.bytes import Bytes
from mclclip.data.options import DataConfig
from mclclip.data.sample_index import SampleIndex
from mclclip.run.artifacts import is_finished, read_manifest, verb_of
from mclclip.util.files import digest_of_64_bits, message_of, parse_json, printable
from mclclip.util.options import brief

log = logging.getLogger("mclclip")
Integers = npt.NDArray[np.int64]
KIND = "text_rows"
"""The kind of the artifact, and the name of the folder with the rows that are trained on."""
EVAL_ROWS = "eval_text_rows"
"""The name of the folder with the rows of ``eval.text_rows``."""
ROWS, _DIGESTS, _PLACES = "rows.npy", "digests.npy", "places.npy"
SURVEYED = 50_000
"""Number of samples in which missing rows are counted before a training."""
FILES = (ROWS, _DIGESTS, _PLACES)
_ROWS_PER_BLOCK = 4096
_MOST, _COMPARED = 100_000, 4096  # characters of a text: those that are read, and that count
_SAMPLED, _SAMPLED_BYTES = 16, 2**20  # pieces of a file whose bytes its digest covers
_WANTED = (
    "wanted FILE.parquet with the columns 'embedding' and 'text' or 'key', or FILE.npy with rows "
    'and beside it FILE.jsonl with a line for each row, such as {"text": "a dog"}'
)


_Name = tuple[int, bool, str]
"""What a row stands for: its digest, True for the key of a sample, and the text or key itself."""


def _text_digest(text: str) -> int:
    """A digest of a text; texts and keys never share one by design."""
    return _digest(f"text\0{' '.join(text[:_MOST].split())[:_COMPARED]}")


def _key_digest(key: str, number: int | None) -> int:
    """A digest of a sample's key with the number of a caption (None: all of them)."""
    return _digest(f"key\0{key}\0{'' if number is None else number}")


def _digest(name: str) -> int:
    return digest_of_64_bits(name.encode(errors="surrogatepass"))


# --- the user's files ----------------------------------------------------------------------------


def files_of(patterns: Sequence[str]) -> list[Path]:
    """Returns the files that paths and patterns, such as ``rows/*.parquet``, name, in order.

    Raises FileNotFoundError if one names no file, and ValueError for a file of another kind.
    """
    files: list[Path] = []
    for pattern in patterns:
        paths = [Path(pattern)] if Path(pattern).is_file() else sorted(map(Path, glob(pattern)))
        if not paths:
            raise FileNotFoundError(f"text_rows: there is no file {pattern}: {_WANTED}")
        files += [path for path in paths if path not in files]
    for path in files:
        if path.suffix not in (".parquet", ".npy"):
            raise ValueError(f"text_rows: {path} is of another kind: {_WANTED}")
    return files


def width_of(patterns: Sequence[str]) -> int:
    """Returns the width W of the rows in the files that ``patterns`` name. Reads only their first
    rows. Raises ValueError for files of several widths, and the errors of ``files_of``."""
    widths = {path: _open(path)[1] for path in files_of(patterns)}
    path, width = next(iter(widths.items()))
    for other, differing in widths.items():
        if differing != width:
            raise ValueError(
                f"text_rows: {other} has rows of width {differing}, and {path} of {width}: "
                "give rows of one encoder"
            )
    return width


def _open(path: Path) -> tuple[int, int, np.dtype[Any]]:
    """Returns the number of a file's rows, their width, and the type in which they are stored."""
    if path.suffix == ".npy":
        array = open_given_npy(path, "rows of text embeddings")
        if array.ndim != 2 or array.dtype.kind != "f" or not array.size:
            raise ValueError(
                f"text_rows: {path} holds {array.dtype} {list(array.shape)}, wanted "
                "floating-point numbers [N, W]"
            )
        half = array.dtype.itemsize == 2
        return len(array), array.shape[1], np.dtype(np.float16 if half else np.float32)
    with _one_line(path), pq.ParquetFile(path) as file:
        schema, num_rows = file.schema_arrow, file.metadata.num_rows
        names = {"text", "key"} & {*schema.names}
        if "embedding" not in schema.names or not names or not num_rows:
            raise ValueError(
                f"text_rows: {path} has {num_rows:,} rows and the columns "
                f"{printable(', '.join(schema.names))[:200]}: {_WANTED}"
            )
        first = next(file.iter_batches(1, columns=["embedding"]))["embedding"]
        half = schema.field("embedding").type.value_type == pa.float16()
        return num_rows, len(first[0]), np.dtype(np.float16 if half else np.float32)


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turns errors of Arrow about the file ``path`` into a ValueError of one line."""
    try:
        yield
    except (pa.ArrowException, AttributeError, OSError, TypeError) as error:
        raise ValueError(
            f"text_rows: {path} cannot be read ({message_of(error)}): {_WANTED}"
        ) from error


def _blocks(path: Path, width: int) -> Iterator[tuple[list[_Name], npt.NDArray[Any]]]:
    """Yields what the rows of a file stand for, and the rows [n, W], some at a time."""
    if path.suffix == ".npy":
        array, names = open_given_npy(path, "rows of text embeddings"), [*_names_of_lines(path)]
        if len(names) != len(array):
            raise ValueError(
                f"text_rows: {path} has {len(array):,} rows, and {path.with_suffix('.jsonl')}"
                f" {len(names):,} lines: wanted a line for each row, in their order"
            )
        for start in range(0, len(array), _ROWS_PER_BLOCK):
            cut = slice(start, start + _ROWS_PER_BLOCK)
            yield names[cut], array[cut]
        return
    where = f"text_rows: {path}"
    with _one_line(path), pq.ParquetFile(path) as file:
        columns = [name for name in ("text", "key", "number") if name in file.schema_arrow.names]
        for batch in file.iter_batches(_ROWS_PER_BLOCK, columns=[*columns, "embedding"]):
            lists = batch["embedding"]
            rows = lists.flatten().to_numpy(zero_copy_only=False)
            widths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
            if lists.null_count or (widths != width).any():
                raise ValueError(
                    f"text_rows: {path} has rows of several widths, or empty ones: wanted "
                    f"{width} numbers in each 'embedding'"
                )
            names = [_name(fields, where) for fields in batch.select(columns).to_pylist()]
            yield names, rows.reshape(len(lists), width)


def _names_of_lines(path: Path) -> Iterator[_Name]:
    lines = path.with_suffix(".jsonl")
    if not lines.is_file():
        raise FileNotFoundError(f"text_rows: there is no {lines} beside {path}: {_WANTED}")
    with lines.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            where = f"text_rows: {lines} line {number}"
            yield _name(parse_json(line, where), where)


def _name(fields: Any, where: str) -> _Name:
    text, key, number = (
        fields.get(n) if isinstance(fields, dict) else None for n in ("text", "key", "number")
    )
    whole = number is None or (type(number) is int and number >= 0)
    if isinstance(key, str) and whole:
        return _key_digest(key, number), True, key
    if isinstance(text, str) and number is None:
        return _text_digest(text), False, text
    raise ValueError(
        f"{where} has a row for {brief(fields)}: wanted a 'text', or a 'key' with "
        "or without the 'number' of a caption"
    )


def digest_of(patterns: Sequence[str]) -> str:
    """Returns a digest of the user's files: of their sizes, and of 16 pieces of 1 MiB of each,
    since reading hundreds of gigabytes whenever a run goes on would take minutes."""
    digest = sha256()
    for path in files_of(patterns):
        beside = [path.with_suffix(".jsonl")] if path.suffix == ".npy" else []
        for part in [path, *filter(Path.is_file, beside)]:
            size = part.stat().st_size
            digest.update(f"{size}".encode())
            with part.open("rb") as file:
                for number in range(_SAMPLED):
                    file.seek(max(0, (size - _SAMPLED_BYTES) * number // (_SAMPLED - 1)))
                    digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()


def write_text_rows(patterns: Sequence[str], folder: Path) -> dict[str, int]:
    """Copies the user's rows into ``folder``; returns the counts of the manifest.

    Raises ValueError for rows that hold NaN, infinity or nothing but zeros, for rows of several
    widths, for two rows of one key, and for names that are missing.
    """
    files, width = files_of(patterns), width_of(patterns)
    opened = [_open(path) for path in files]
    num_rows = sum(num for num, _, _ in opened)
    dtype = np.result_type(*(dtype for _, _, dtype in opened))
    digests, by_key = np.empty(num_rows, np.int64), np.zeros(num_rows, np.bool_)
    with write_npy_parts(folder / ROWS, (num_rows, width), dtype) as append:
        at = 0
        for path in files:
            for names, rows in _blocks(path, width):
                useless = ~(np.isfinite(rows).all(axis=1) & rows.any(axis=1))
                if useless.any():
                    raise ValueError(
                        f"text_rows: {path} has rows that hold NaN, infinity or nothing but zeros, "
                        f"as that of {brief(names[int(useless.argmax())][2])}: embed these texts "
                        "again, or leave the rows out"
                    )
                digests[at : at + len(names)] = [digest for digest, _, _ in names]
                by_key[at : at + len(names)] = [is_key for _, is_key, _ in names]
                append(rows)
                at += len(names)
        unique, places = np.unique(digests, return_index=True)
        doubled = by_key.copy()
        doubled[places] = False
        if doubled.any():
            raise ValueError(
                f"text_rows: {int(doubled.sum()):,} rows have the key of an earlier row, as "
                f"row {int(doubled.argmax()) + 1:,} of all: give the 'number' of the caption too"
            )
    save_npy(folder / _DIGESTS, unique)
    save_npy(folder / _PLACES, places.astype(np.int64))
    counts = {"rows": num_rows, "width": width, "by_key": int(by_key.sum())}
    return counts | {"repeated_texts": num_rows - len(unique)}


# --- the rows of a run ---------------------------------------------------------------------------


def report_missing(rows: TextRows, index: SampleIndex, data: DataConfig) -> None:
    """Logs how many captions of the index have no row; a training replaces their samples.

    It looks at up to ``SURVEYED`` samples, evenly spaced in the index. Raises ValueError if
    their share is above ``data.max_bad_fraction``.
    """
    with_captions = np.flatnonzero(index.num_captions)
    ids = with_captions[:: max(1, -(-len(with_captions) // SURVEYED))]
    numbers, keys, read = index.num_captions[ids].tolist(), index.keys(ids), Bytes(index, data)
    missing, example = 0, ""
    for start in range(0, len(ids), _ROWS_PER_BLOCK):
        cut = slice(start, start + _ROWS_PER_BLOCK)
        texts = [[""] * n for n in numbers[cut]]
        if not rows.only_by_key:
            texts = read.captions_of(ids[cut].tolist())
        for key, captions in zip(keys[cut], texts, strict=True):
            for number, caption in enumerate(captions):
                if rows.find_caption(key, number, caption) is None:
                    missing, example = missing + 1, example or f"{key}: {caption}"
    share = missing / max(1, sum(numbers))
    what = (
        f"{missing:,} of {sum(numbers):,} captions, of {len(ids):,} samples that were looked at, "
        f"have no row in {' and '.join(map(str, rows.folders))}"
    )
    if share > data.max_bad_fraction:
        raise ValueError(
            f"text_rows: {what}, such as {brief(example)}, and data.max_bad_fraction="
            f"{data.max_bad_fraction} allows fewer: 'mclclip texts --missing FILE' lists them"
        )
    log.info("text rows: %s", what)


def folders_beside(directory: Path) -> list[Path]:
    """Returns the finished folders ``text_rows`` and ``eval_text_rows`` in a model's ``directory``,
    or in the first folder above it that has one, such as the run directory."""
    for folder in (Path(directory), *Path(directory).resolve().parents[:6]):
        near = [path for name in (KIND, EVAL_ROWS) if is_finished(path := folder / name)]
        if near:
            return near
    return []


class TextRows:
    """Looks rows [W] up by texts, or by the keys of samples; stands in the place of a tokenizer.

    ``folders`` are what ``mclclip texts`` wrote, of which an earlier one comes first; without one
    every look-up raises ValueError. ``width`` is the W that a model's projection takes; ValueError
    for other rows. It pickles without open files.
    """

    def __init__(self, folders: Sequence[Path], width: int) -> None:
        self.folders, self.width = [*folders], width
        counts = []
        for folder in folders:
            manifest = read_manifest(folder, KIND)
            manifest.check(folder)
            counts.append(manifest.counts)
            if counts[-1]["width"] != width:
                raise ValueError(
                    f"{folder} has rows of width {counts[-1]['width']}, and the projection of the "
                    f"model takes {width}: bring rows of the encoder that it was trained with"
                )
        self.by_key = any(each["by_key"] for each in counts)
        self.only_by_key = all(each["by_key"] == each["rows"] for each in counts)

    @classmethod
    def beside(cls, directory: Path | None, width: int) -> TextRows:
        """Opens the rows of the model in ``directory`` (``folders_beside``)."""
        return cls([] if directory is None else folders_beside(directory), width)

    def __call__(self, texts: str | Sequence[str]) -> Tensor:
        """Returns the rows of N texts, float32 [N, W]. Raises ValueError if one has no row."""
        return self.read(self.find([texts] if isinstance(texts, str) else texts))

    def find(self, texts: Sequence[str]) -> Integers:
        """Returns the places of the rows of N texts, [N]. Raises ValueError if one has no row."""
        places = self._find([*map(_text_digest, texts)])
        if missing := [text for text, place in zip(texts, places, strict=True) if place < 0]:
            raise ValueError(
                f"{len(missing):,} of {len(texts):,} texts have no row in "
                f"{' and '.join(map(str, self.folders))}, such as {brief(missing[0])}: 'mclclip "
                "texts --missing FILE' lists all that a run reads; embed these, and name the file "
                "in model.text_rows or eval.text_rows"
            )
        return places

    def has(self, text: str) -> bool:
        """Returns True if a text has a row of its own."""
        return bool(self._find([_text_digest(text)])[0] >= 0)

    def find_caption(self, key: str, number: int, caption: str) -> int | None:
        """Returns the place of the row of a sample's caption; None if there is none.

        ``key`` is that of the index, 'source/key'; ``number`` counts the captions of the sample.
        """
        digests = [_text_digest(caption)]
        if self.by_key:
            keys = (key, key.partition("/")[2])
            digests = [_key_digest(k, n) for k in keys for n in (number, None)] + digests
        places = self._find(digests)
        return next((place for place in places.tolist() if place >= 0), None)

    def read(self, places: Sequence[int] | Integers) -> Tensor:
        """Reads the rows at ``places``, float32 [n, W]."""
        numbers, rows = np.asarray(places), np.empty((len(places), self.width), np.float32)
        for start, _, _, stored in self._tables:
            here = (numbers >= start) & (numbers < start + len(stored))
            rows[here] = stored[numbers[here] - start]
        return torch.from_numpy(rows)

    def _find(self, name_digests: Sequence[int]) -> Integers:
        """Returns the place of the row of each digest; -1: there is none."""
        if not self.folders:
            raise ValueError(
                "the model reads rows of text embeddings in the place of texts, and there is no "
                f"folder {KIND!r} beside it: put there what 'mclclip {verb_of(KIND)}' wrote, or "
                f"give encode_text rows as a tensor [N, {self.width}]"
            )
        own_digests = np.array(name_digests, np.int64)
        row_places = np.full(len(own_digests), -1)
        for start, digests, places, _ in reversed(self._tables):
            at = np.minimum(np.searchsorted(digests, own_digests), len(digests) - 1)
            row_places = np.where(digests[at] == own_digests, start + places[at], row_places)
        return row_places

    @cached_property
    def _tables(self) -> list[tuple[int, Integers, Integers, npt.NDArray[Any]]]:
        """Of each folder the place of its first row, its digests, their places, and its rows."""
        tables: list[tuple[int, Integers, Integers, npt.NDArray[Any]]] = []
        start, verb = 0, verb_of(KIND)
        for folder in self.folders:
            digests, places, rows = (open_npy(folder / n, verb) for n in (_DIGESTS, _PLACES, ROWS))
            tables.append((start, digests, places, rows))
            start += len(rows)
        return tables

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tables"}
