"""A .npy file written part by part is numpy's own, and there only when it is whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.data.arrays import write_npy_parts


@pytest.mark.parametrize("dtype", (np.int32, np.float16, np.float32))
@pytest.mark.parametrize("shape", ((7, 3), (7, 1), (7,), (0, 3)))
def test_the_bytes_are_those_of_numpy(tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    np.save(tmp_path / "wanted.npy", array)
    with write_npy_parts(tmp_path / "found.npy", shape, dtype) as append:
        append(array[:2])
        append(np.asfortranarray(array[2:], dtype=np.float64))  # becomes what the file holds
        assert not (tmp_path / "found.npy").exists()
    assert (tmp_path / "found.npy").read_bytes() == (tmp_path / "wanted.npy").read_bytes()


@pytest.mark.parametrize("rows", (4, 6))
def test_too_few_or_too_many_rows_are_no_file(tmp_path: Path, rows: int) -> None:
    with (
        pytest.raises(AssertionError, match=rf"{10 - 2 * rows} numbers are missing"),
        write_npy_parts(tmp_path / "x.npy", (5, 2), np.int32) as append,
    ):
        append(np.zeros((rows, 2), dtype=np.int32))
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    with (
        pytest.raises(KeyboardInterrupt),
        write_npy_parts(tmp_path / "x.npy", (5,), np.int32) as append,
    ):
        append(np.zeros(2, dtype=np.int32))
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
    assert np.load(tmp_path / "x.npy").tolist() == [0, 1, 2]
