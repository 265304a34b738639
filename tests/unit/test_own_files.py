"""Odd files in a run directory: one line that names the file and says what to do."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mclclip import files
from mclclip import index as verb
from mclclip.data.options import DataConfig
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import TarDataset
from mclclip.eval import results
from mclclip.ranks import failures
from mclclip.ranks.process_group import Context
from mclclip.ranks.step_boundary import StepBoundary
from mclclip.run.lock import write_state
from mclclip.run.runlog import JsonLines
from tests import tiny

DEEP = "[" * 100_000 + "]" * 100_000
ODD = ["", "null", "3", "[]", "{", DEEP, '{"a": 1}', "[[]]", "\x00\xff", '[{"path": 3}]']


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


def record_again(directory: Path) -> None:
    """Has the manifest fit the damaged files, so that not their sizes alone tell."""
    path = directory / "manifest.json"
    fields = files.read_json(path)
    records = files.records_of(directory, *fields["records"])
    fields["records"] = {name: dataclasses.asdict(record) for name, record in records.items()}
    files.write_json(path, fields)


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


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_index_is_one_line(indexed: Path, tmp_path: Path, how: str) -> None:
    directory = tmp_path / "index"
    shutil.copytree(indexed, directory)
    DAMAGES[how](directory)
    record_again(directory)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        index = SampleIndex.open(directory)
        data = TarDataset(index, DataConfig())
        data.read_many(range(len(index)))
    line = failures.line_of(caught.value)
    assert failures.is_for_the_user(caught.value)
    assert str(directory) in line and "run 'mclclip index' again" in line, line


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("name", ["shards.json", "bad_samples.json", "manifest.json"])
def test_odd_json_in_the_index_is_one_line(
    indexed: Path, tmp_path: Path, name: str, text: str
) -> None:
    directory = tmp_path / "index"
    shutil.copytree(indexed, directory)
    (directory / name).write_text(text, encoding="latin-1")
    if name == "bad_samples.json" and text == "[]":
        return  # as good as none
    with pytest.raises((RuntimeError, ValueError)) as caught:
        SampleIndex.open(directory).bad_ids()
    assert failures.is_for_the_user(caught.value)
    assert str(directory) in failures.line_of(caught.value)


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_odd_rows_of_results(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text + "\n", encoding="latin-1")
    if not text:
        assert results.read(path) == []
        return
    with pytest.raises(ValueError) as caught:
        results.read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_odd_rows_of_metrics_are_dropped(tmp_path: Path, text: str) -> None:
    """A training goes on: it writes the rows after its last checkpoint anew anyway."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + text + '\n{"step": 2}\n', encoding="latin-1")
    log = JsonLines(path, resume_step=5)
    log.write({"step": 2, "loss": 1.0})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_an_odd_state_is_written_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run_state.json"
    path.write_text(text, encoding="latin-1")
    write_state(tmp_path, "finished", verb="run", exit_code=0, requeue=False, reason="")
    assert json.loads(path.read_text())["state"] == "finished"


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
