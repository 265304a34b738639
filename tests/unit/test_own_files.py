"""Odd files in a run directory: one line that names the file and says what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mclclip.ranks.process_group import Context
from mclclip.ranks.step_boundary import StepBoundary
from mclclip.verbs import index as verb
from tests import tiny

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    data = tiny.make_data(folder / "data", num_samples=96)
    config = tiny.make_config(folder / "run", data)
    return verb.run(config, Context()).directory


def shards(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "shards.json"
        entries = json.loads(path.read_text())
        change(entries)
        path.write_text(json.dumps(entries))

    return damage


def column(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    """Replaces a column of samples.arrow."""

    def damage(directory: Path) -> None:
        path = directory / "samples.arrow"
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
        values = pa.array(change(table[name].to_numpy().copy()))
        table = table.set_column(table.column_names.index(name), name, values)
        with (
            pa.OSFile(str(path) + ".new", "wb") as file,
            pa.ipc.new_file(file, table.schema) as writer,
        ):
            writer.write_table(table)
        os.replace(str(path) + ".new", path)

    return damage


def cut(share: float) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "samples.arrow"
        os.truncate(path, int(path.stat().st_size * share))

    return damage


def put(row: int, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values[row] = value
        return values

    return change


DAMAGES = {
    **{f"cut_{share}": cut(share) for share in (0.0, 0.3, 0.9, 0.999)},
    "no_shards": shards(lambda entries: entries.clear()),
    "a_shard_less": shards(lambda entries: entries.pop()),
    "other_type": shards(lambda entries: entries[0].update(start="x")),
    "no_path": shards(lambda entries: entries[1].update(path=7)),
    "unknown_field": shards(lambda entries: entries[0].update(colour="red")),
    "gap": shards(lambda entries: entries[1].update(start=1)),
    "narrow": column("image_size", lambda values: values.astype(np.int32)),
    "first_shard": column("shard", put(0, 5)),
    "inner_shard": column("shard", put(3, 5)),
    "negative_shard": column("shard", put(3, -1)),
    "negative_offset": column("image_offset", put(3, -512)),
    "negative_size": column("image_size", put(3, -1)),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ["stop", "save_now"])
def test_a_folder_of_that_name_is_a_request(tmp_path: Path, name: str, inside: bool) -> None:
    """It is answered once, also where it cannot be removed."""
    (tmp_path / name).mkdir()
    if inside:
        (tmp_path / name / "file").touch()
    boundary = StepBoundary(Context(), tmp_path, poll_s=1e-6)
    assert boundary.decide() != boundary.decide()
    assert (tmp_path / name).exists() is inside
    decisions = [boundary.decide() for _ in range(3)]
    assert not any(decision.save for decision in decisions)
    again = StepBoundary(Context(), tmp_path, poll_s=1e-6)
    again.decide()
    assert (again.decide().leave is not None) is (inside and name == "stop")
