"""Tars for tests: what they hold is written and read as (name, bytes)."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], **options: Any) -> Path:
    """Writes members in their order; ``options`` are tarfile's, such as ``mode="a"``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, **{"mode": "w", **options}) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def read_tar(path: Path) -> dict[str, bytes]:
    """The content of every member by its name."""
    with tarfile.open(path) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
