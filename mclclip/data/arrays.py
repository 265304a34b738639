"""Writes arrays to disk, whole or part by part, maps them for reading, and cuts them into blocks.

They are not written through a mapping, because a full disk would then raise a signal (SIGBUS)
instead of an error.
"""

from __future__ import annotations

import io
import tokenize
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mclclip.util.files import message_of, whole_file

Floats = npt.NDArray[np.floating[Any]]
BlockLayout = tuple[tuple[int, ...], np.dtype[Any]]
ROWS_PER_BLOCK = 4096
# The errors that numpy raises for a header that it cannot parse.
_UNREADABLE = (
    ValueError, EOFError, SyntaxError, TypeError, OverflowError, tokenize.TokenError,
    zipfile.BadZipFile,
)  # fmt: skip


def open_npy(path: Path, verb: str) -> np.memmap[Any, np.dtype[Any]]:
    """Opens an array of our own, memory-mapped; ``verb`` wrote it, such as 'cluster'.

    Raises FileNotFoundError if there is none, RuntimeError if it is damaged, and the system's
    OSError if it may not be opened.
    """
    again = f"run 'mclclip {verb} --force' to make it again"
    try:
        array: np.memmap[Any, np.dtype[Any]] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no {path}: {again}") from error
    except (OSError, *_UNREADABLE) as error:
        if isinstance(error, OSError) and error.errno:  # such as a missing permission
            raise
        raise RuntimeError(f"{path} is damaged ({message_of(error)}): {again}") from error
    return array


def open_given_npy(path: Path, what: str) -> np.ndarray:
    """Opens an array of the user, memory-mapped. ``what`` says what it should hold, as 'numbers'.

    Raises FileNotFoundError if there is none, and ValueError for a file of another kind.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file at {path}") from None
    except (OSError, *_UNREADABLE) as error:
        reason = message_of(error)
        raise ValueError(f"{path} is no .npy file of {what} that can be read ({reason})") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is no .npy file of {what}: it holds several arrays")
    return array


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
    """Yields a function that appends rows to the file of an array of ``shape``.

    The file appears, complete and fsynced, when the block ends without an error.
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
        assert not missing, f"{path}: {missing} numbers are missing of the shape {shape}"


def cut_blocks(arrays: Sequence[Floats], rows_per_block: int = ROWS_PER_BLOCK) -> list[Floats]:
    """Cuts arrays into views of at most ``rows_per_block`` rows; none spans two arrays."""
    return [
        array[first : first + rows_per_block]
        for array in arrays
        for first in range(0, len(array), rows_per_block)
    ]
