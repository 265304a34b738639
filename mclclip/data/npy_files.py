"""Arrays of artifacts: saved whole or part by part, mapped where they are read.

They are not written through a mapping, whose full disk would be a signal instead of an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mclclip.files import whole_file


def open_npy(path: Path, verb: str) -> np.ndarray:
    """An array that ``verb`` wrote, memory-mapped.

    Raises FileNotFoundError where there is none, RuntimeError where it is damaged.
    """
    again = f"run 'mclclip {verb} --force' to make it again"
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no {path}: {again}") from error
    except (OSError, ValueError, EOFError) as error:
        raise RuntimeError(f"{path} is damaged ({error}): {again}") from error
    return array


def save_npy(path: Path, array: np.ndarray) -> None:
    """Writes one array, atomically."""
    with write_npy_parts(path, array.shape, array.dtype) as append:
        append(array)


@contextmanager
def write_npy_parts(
    path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> Iterator[Callable[[npt.ArrayLike], None]]:
    """Gives a function that appends rows, in order, to an array of ``shape``.

    The file is there, whole and durable, after the block, and only if that ended without an error.
    Raises ValueError for more or fewer numbers than ``shape`` says.
    """
    kind, missing = np.dtype(dtype), int(np.prod(shape))
    with whole_file(path) as file:
        header = {
            "descr": np.lib.format.dtype_to_descr(kind),
            "fortran_order": False,
            "shape": shape,
        }
        np.lib.format.write_array_header_1_0(file, header)

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
