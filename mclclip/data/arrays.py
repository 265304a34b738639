"""Arrays on disk: saved whole or part by part, memory-mapped for reading, and cut into row blocks.

They are not written through a mapping, because a full disk would then be a signal (SIGBUS) and no
error.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from mclclip.files import Checked, Record, whole_file

Floats = npt.NDArray[np.floating[Any]]
BlockLayout = tuple[tuple[int, ...], np.dtype[Any]]
ROWS_PER_BLOCK = 4096
# What numpy raises for a header that it cannot parse.
_UNREADABLE = (ValueError, EOFError, SyntaxError, TypeError, tokenize.TokenError)


def open_npy(path: Path, verb: str, record: Record | None = None) -> np.ndarray:
    """An array that ``verb`` wrote, memory-mapped; the whole file is compared with ``record``.

    Raises FileNotFoundError where there is none, RuntimeError where it is damaged.
    """
    again = _again(verb)
    try:
        Checked(path, record, again).check()
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no {path}: {again}") from error
    except (OSError, *_UNREADABLE) as error:
        raise _damaged(path, error, verb) from error
    return array


def open_given_npy(path: Path, what: str) -> np.ndarray:
    """An array of a file that the user names, memory-mapped; ``what`` it should hold, in messages.

    Raises FileNotFoundError where there is none, ValueError, one line, for a file of another kind.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file at {path}") from None
    except (OSError, *_UNREADABLE) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is no .npy file of {what} that can be read ({reason})") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is no .npy file of {what}: it holds several arrays")
    return array


def _damaged(path: Path, error: Exception, verb: str) -> RuntimeError:
    what = " ".join(str(error).split())[:200]
    return RuntimeError(f"{path} is damaged ({what}): {_again(verb)}")


def _again(verb: str) -> str:
    return f"run 'mclclip {verb} --force' to make it again"


def save_npy(path: Path, array: np.ndarray) -> None:
    """Writes one array, atomically."""
    with write_npy_parts(path, array.shape, array.dtype) as append:
        append(array)


def npy_header(shape: tuple[int, ...], dtype: npt.DTypeLike) -> bytes:
    """Returns the header of a .npy file (format 1.0) whose array has this shape and type."""
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    file = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


@contextmanager
def write_npy_parts(
    path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> Iterator[Callable[[npt.ArrayLike], None]]:
    """Yields a function that appends rows, in order, to the file of an array of ``shape``.

    The file appears, complete and fsynced, when the block ends without an error. Raises ValueError
    for more or fewer numbers than ``shape`` says.
    """
    kind, missing = np.dtype(dtype), int(np.prod(shape))
    with whole_file(path) as file:
        file.write(npy_header(shape, dtype))

        def append(rows: npt.ArrayLike) -> None:
            nonlocal missing
            part = np.ascontiguousarray(rows, dtype=kind)
            missing -= part.size
            file.write(part.data)

        yield append
        if missing:
            raise ValueError(
                f"{path} got {int(np.prod(shape)) - missing:,} numbers, wanted shape {shape}"
            )


def cut_blocks(arrays: Sequence[Floats], rows_per_block: int = ROWS_PER_BLOCK) -> list[Floats]:
    """Views of at most ``rows_per_block`` rows, in order, never across two arrays."""
    return [
        array[first : first + rows_per_block]
        for array in arrays
        for first in range(0, len(array), rows_per_block)
    ]


class NpyBlocks(Sequence[Floats]):
    """The blocks of .npy files of rows [n, D].

    A file is memory-mapped only while a block of it is read: every mapping holds a file handle, and
    there may be more files than handles. What is read is compared with ``records`` of the files
    first, once by this object: the first block of every file, which holds its header, at once.
    ``verb`` wrote the files. Raises RuntimeError where a file is not what was recorded.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        rows_per_block: int = ROWS_PER_BLOCK,
        records: Sequence[Record | None] | None = None,
        verb: str = "embed",
    ) -> None:
        known = [None] * len(paths) if records is None else records
        self._checked = [
            Checked(path, record, _again(verb)) for path, record in zip(paths, known, strict=True)
        ]
        for file in self._checked:
            file.check(0, 1)  # the header
        files = [(path, _map(path, verb)) for path in paths]
        self.num_rows = [len(rows) for _, rows in files]
        self._cuts = [
            (number, slice(first, min(first + rows_per_block, num_rows)))
            for number, num_rows in enumerate(self.num_rows)
            for first in range(0, num_rows, rows_per_block)
        ]
        self._paths, self._verb = list(paths), verb
        self._file_layouts: list[BlockLayout] = [(rows.shape[1:], rows.dtype) for _, rows in files]

    def layouts(self) -> list[BlockLayout]:
        """Shape and type of each block, without reading it."""
        return [
            ((cut.stop - cut.start, *self._file_layouts[file][0]), self._file_layouts[file][1])
            for file, cut in self._cuts
        ]

    def row_shapes(self) -> list[tuple[int, ...]]:
        """The shape of a row in each file that has rows."""
        return [
            layout[0]
            for layout, rows in zip(self._file_layouts, self.num_rows, strict=True)
            if rows
        ]

    def __len__(self) -> int:
        return len(self._cuts)

    @overload
    def __getitem__(self, number: int) -> Floats: ...
    @overload
    def __getitem__(self, number: slice) -> list[Floats]: ...
    def __getitem__(self, number: int | slice) -> Floats | list[Floats]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        return self.read(*self._cuts[number])

    def read(self, file: int, cut: slice) -> Floats:
        """A block: rows of the file with this number."""
        rows = _map(self._paths[file], self._verb)
        data, bytes_per_row = int(rows.offset), rows.dtype.itemsize * int(np.prod(rows.shape[1:]))
        self._checked[file].check(data + cut.start * bytes_per_row, data + cut.stop * bytes_per_row)
        return rows[cut]


def _map(path: Path, verb: str) -> np.memmap[Any, np.dtype[Any]]:
    try:
        rows: np.memmap[Any, np.dtype[Any]] = np.load(path, mmap_mode="r", allow_pickle=False)
    except _UNREADABLE as error:  # an OSError names its file
        raise _damaged(path, error, verb) from error
    return rows


class MeanBlocks(NpyBlocks):
    """Blocks of float32 rows [n, D]: unit means of a sample's image and text embedding.

    ``images``: .npy files of rows [n, D], one row per sample; ``texts``: as many files, one row per
    caption, all captions of a sample after each other. The first caption is used; a sample without
    one keeps its image embedding. ``num_captions`` [N]: of all samples, in the order of the files.
    Rows are computed when they are read. Raises ValueError where images and texts differ in width,
    and RuntimeError where there are not as many texts as captions.
    """

    def __init__(
        self,
        images: Sequence[Path],
        texts: Sequence[Path],
        num_captions: npt.NDArray[np.integer],
        rows_per_block: int = ROWS_PER_BLOCK,
        records: Sequence[Record | None] | None = None,
        text_records: Sequence[Record | None] | None = None,
    ) -> None:
        super().__init__(images, rows_per_block, records)
        self._texts = NpyBlocks(texts, ROWS_PER_BLOCK, text_records, "embed --text")
        starts = np.cumsum([0, *self.num_rows])
        self._num_captions = [
            num_captions[first:stop] for first, stop in zip(starts[:-1], starts[1:], strict=True)
        ]
        wanted = [int(captions.sum()) for captions in self._num_captions]
        if self._texts.num_rows != wanted:
            raise RuntimeError(
                f"text embeddings have {sum(self._texts.num_rows):,} rows, the index has "
                f"{sum(wanted):,} captions (compared per shard): run 'mclclip embed --text "
                "--force' after 'mclclip index'"
            )
        widths = {shape for blocks in (self, self._texts) for shape in blocks.row_shapes()}
        if len(widths) > 1:
            raise ValueError(
                f"cluster.feature=mean: image and text embeddings have the widths {sorted(widths)}:"
                " wanted one; embed with embed.feature=projected"
            )

    def layouts(self) -> list[BlockLayout]:
        """Shape and type of each block, without reading it."""
        return [(shape, np.dtype(np.float32)) for shape, _ in super().layouts()]

    def read(self, file: int, cut: slice) -> Floats:
        """A block: the mean rows of the samples ``cut`` of a file."""
        rows = _unit(super().read(file, cut))
        captions = self._num_captions[file]
        first = int(captions[: cut.start].sum())
        here = captions[cut]
        with_caption = here > 0
        places = first + np.cumsum(here) - here
        if with_caption.any():
            texts = self._texts.read(file, slice(first, first + int(here.sum())))
            rows[with_caption] += _unit(texts[places[with_caption] - first])
        return _unit(rows)


def _unit(rows: Floats) -> npt.NDArray[np.float32]:
    """float32 rows of length 1; zeros stay zeros."""
    wide: npt.NDArray[np.float32] = np.asarray(rows, dtype=np.float32)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    scaled: npt.NDArray[np.float32] = wide / np.maximum(norms, 1e-12)
    return scaled
