"""Arrays of artifacts that need not fit into memory: mapped where they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np


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
