"""A run of hand-written embeddings over shards of one-coloured pictures; one line per mistake."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mclclip.cli import process
from mclclip.config import Config, from_tree
from mclclip.data.sample_index import SampleIndex
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import index
from tests.tars import write_tar


def picture(number: int) -> bytes:
    """A JPEG, or a PNG of every third sample, or a WebP of every fifth."""
    kind = "PNG" if number % 3 == 0 else "WEBP" if number % 5 == 0 else "JPEG"
    sink = BytesIO()
    Image.new("RGB", (40, 30), (4 * number, 255 - 4 * number, 120)).save(sink, kind)
    return sink.getvalue()


def indexed(
    root: Path,
    sizes: Iterable[int],
    captions: Callable[[int], Sequence[str]],
    prefix: str = "",
    shards: Path | None = None,
) -> tuple[Config, SampleIndex]:
    """Writes shards of so many samples below ``root`` (None: they are there) and indexes them."""
    folder, number = shards or root / "shards", 0
    folder.mkdir(parents=True, exist_ok=True)
    for shard, size in enumerate(sizes):
        members = []
        for _ in range(size):
            key, text = f"{prefix}{number:03d}", json.dumps({"all": [*captions(number)]})
            members += [(f"{key}.jpg", picture(number)), (f"{key}.json", text.encode())]
            number += 1
        write_tar(folder / f"{shard:02d}.tar", members)
    config = options(root / "run", folder)
    index.run(config, SINGLE)
    return config, SampleIndex.open(root / "run/index")


def options(run_dir: Path, shards: Path) -> Config:
    """The configuration of a run of one stage."""
    source = {"shards": f"{shards}/*.tar", "captions": "json:all"}
    return from_tree(
        {
            "run_dir": str(run_dir),
            "num_stages": 1,
            "data": {"sources": {"s": source}, "index_workers": 1},
            "cluster": {"num_clusters": 4, "restarts": 1},
        }
    )


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows of length 1."""
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    """The cosine of two rows in float64."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def failing(work: Callable[[], object], config: Config, folder: str) -> str:
    """The one line of a mistake of the user; nothing finished is left below ``folder`` of the
    run."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        work()
    assert process.exit_code(caught.value) == process.EXIT_USER == 2
    assert not [*Path(config.run_dir).glob(f"{folder}/*/manifest.json")]
    line = str(caught.value)
    assert "\n" not in line
    return line
