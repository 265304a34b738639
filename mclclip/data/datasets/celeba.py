"""CelebA (Liu et al., 2015) resampled so that black hair, smiling and male are independent.

MCL (section 5) names these attributes and says that they were made independent, but not how. Here
the images of the published training part fall into 8 cells by the three attributes, and of every
cell as many images are drawn, without replacement, as the smallest one holds. So every combination
is equally frequent. The published test part is treated likewise; the validation part is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mclclip.data.datasets.sources import Sources, Splits, check_size, file_sample
from mclclip.data.shard_writer import PackedSample

ATTRIBUTES = {"black_hair": "Black_Hair", "smiling": "Smiling", "male": "Male"}
_PARTS = {"train": 0, "test": 2}


def build(sources: Sources, seed: int, *, size: int | None = None) -> Splits:
    """Reads images of ``--source celeba=FOLDER``; attributes black_hair, smiling, male (0 or 1).

    The folder (or ``celeba`` in it) holds ``img_align_celeba/*.jpg``, ``list_attr_celeba.txt`` and
    ``list_eval_partition.txt``. Files are stored unchanged, or, with a ``size``, as PNG whose
    shorter side has so many pixels. Raises FileNotFoundError for missing files and ValueError for
    files that are not CelebA's.
    """
    check_size(size)
    folder = sources.folder("celeba")
    folder = folder / "celeba" if (folder / "celeba").is_dir() else folder
    names, values = _read_attributes(folder / "list_attr_celeba.txt")
    partition = folder / "list_eval_partition.txt"
    rows = _lines(partition)
    if any(len(row) != 2 or row[1] not in ("0", "1", "2") for row in rows):
        raise ValueError(f"{partition} is not the list of CelebA: wanted a file name and 0, 1 or 2")
    parts = {row[0]: int(row[1]) for row in rows}

    def samples(split: str) -> Iterator[PackedSample]:
        members = [row for row, name in enumerate(names) if parts.get(name) == _PARTS[split]]
        if not members:
            raise ValueError(f"{partition} puts no image into {split}")
        for number, row in enumerate(balance(np.array(members), values, seed)):
            path = folder / "img_align_celeba" / names[row]
            if not path.is_file():
                raise FileNotFoundError(f"no {path}, which list_attr_celeba.txt names")
            facts = dict(zip(ATTRIBUTES, values[row].tolist(), strict=True))
            yield file_sample(number, path, {**facts, "file": names[row]}, size)

    return {split: samples(split) for split in _PARTS}


def balance(
    rows: npt.NDArray[np.int64], values: npt.NDArray[np.int64], seed: int
) -> npt.NDArray[np.int64]:
    """Draws from ``rows``, so that every combination of ``values`` [N, 3] (0 or 1) is as frequent.

    Returns sorted rows. Raises ValueError if a combination does not occur.
    """
    cells = values[rows] @ np.array([4, 2, 1])
    counts = np.bincount(cells, minlength=8)
    if counts.min() == 0:
        raise ValueError(
            f"{len(rows)} images of CelebA lack a combination of {', '.join(ATTRIBUTES)}: these "
            "cannot be made independent"
        )
    drawn = [
        np.random.default_rng([seed, cell]).permutation(rows[cells == cell])[: counts.min()]
        for cell in range(8)
    ]
    return np.sort(np.concatenate(drawn))


def _lines(path: Path) -> list[list[str]]:
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: it comes with CelebA")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.split() for line in lines if line.strip()]


def _read_attributes(path: Path) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Reads file names, and the three attributes int64 [N, 3]: 0 for the file's -1, 1 for 1."""
    lines = [*_lines(path), [], []]
    header, rows = lines[1], [row for row in lines[2:] if row]
    try:
        columns = [header.index(name) + 1 for name in ATTRIBUTES.values()]
        if any(len(row) != len(header) + 1 or "/" in row[0] for row in rows):
            raise ValueError(f"a row has not a file name and {len(header)} values")
        values = np.array([[int(row[column]) for column in columns] for row in rows])
        if not np.isin(values, (-1, 1)).all() or not len(rows):
            raise ValueError("wanted rows of -1 and 1")
    except ValueError as error:
        raise ValueError(f"{path} is not the list of CelebA: {error}") from error
    return [row[0] for row in rows], (values > 0).astype(np.int64)
