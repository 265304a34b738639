"""The sample index: joined rows, memory-mapped reading, key look-up, bad samples."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mclclip.data.bytes import excluded_keys, read_excluded
from mclclip.data.findings import Findings
from mclclip.data.index_tables import (
    Shard,
    join_rows,
    write_tables,
)
from mclclip.data.options import DataConfig
from mclclip.data.sample_index import BAD_SAMPLES, KIND, SampleIndex
from mclclip.data.shard_scan import ROW, TEXT_CRC
from mclclip.run.artifacts import Artifact
from mclclip.util.files import digest_keys


def rows(*keys: str, captions: int = 1) -> pa.RecordBatch:
    """Rows whose numbers can be told apart: image_offset is the length of the key times 512."""
    fields = [(key, 512 * len(key), 5, 7, 9, captions) for key in keys]
    columns: Any = list(zip(*fields, strict=True)) or [[] for _ in ROW]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, ROW, strict=True)]
    arrays.append(pa.array([7] * len(keys), pa.uint32()))
    schema = ROW.append(pa.field(TEXT_CRC, pa.uint32()))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def build(directory: Path, *shards: pa.RecordBatch) -> SampleIndex:
    stops = np.cumsum([len(shard) for shard in shards]).tolist()
    placed = [
        Shard(f"/data/{number}.tar", "s", "txt", start, stop, 10)
        for number, (start, stop) in enumerate(zip([0, *stops], stops, strict=False))
    ]
    table, placed = join_rows(None, list(shards), placed, 0, Findings(), DataConfig())
    artifact = Artifact(directory, kind=KIND, config={}, inputs={}).compare(write=True)
    artifact.finish({}, content_digest=write_tables(directory, table, placed))
    return SampleIndex.open(directory)


@pytest.fixture
def index(tmp_path: Path) -> SampleIndex:
    return build(tmp_path / "index", rows("s/a", "s/bb"), rows(), rows("s/ccc", captions=3))


def test_columns_are_mapped_and_not_copied(index: SampleIndex) -> None:
    assert index.keys([2, 0]) == ["s/ccc", "s/a"] and index.keys([]) == []
    assert [(s.start, s.stop) for s in index.shards] == [(0, 2), (2, 2), (2, 3)]
    assert index.digest == digest_keys(["s/a", "s/bb", "s/ccc"])
    for name in ("image_offset", "shard_of", "num_captions"):
        array = getattr(index, name)
        assert not array.flags.owndata and not array.flags.writeable


def test_pickles_as_its_directory(index: SampleIndex) -> None:
    data = pickle.dumps(index)
    again = pickle.loads(data)
    assert len(data) < 1000
    assert again.keys(range(3)) == index.keys(range(3))
    assert again.digest == index.digest


def test_ids_of(index: SampleIndex) -> None:
    ids = index.ids_of(["s/ccc", "s/a", "s/ccc"])
    assert ids.tolist() == [2, 0, 2]
    assert ids.dtype == np.int64
    assert index.ids_of([]).tolist() == []
    assert index.ids_of(index.keys(np.arange(3))).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"2 of 3 keys are not in the index.*s/x.*ccc"):
        index.ids_of(["s/x", "s/a", "ccc"])
    for outside in ([3], [-1], [0, 7]):
        with pytest.raises(IndexError, match=r"the index has 0\.\.2"):
            index.keys(outside)


# --- joining ----------------------------------------------------------------------------------


@pytest.mark.parametrize("collide", [False, True])
def test_repeated_keys_against_a_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collide: bool
) -> None:
    """Also where different keys have equal hashes."""
    if collide:
        monkeypatch.setattr(
            "pandas.util.hash_array",
            lambda keys, **_: np.array([len(key) for key in keys], np.uint64),
        )
    rng = np.random.default_rng(0)
    shards = [rows(*(f"s/{n}" for n in rng.integers(0, 60, 25))) for _ in range(8)]
    findings = Findings()
    placed = [Shard(str(tmp_path / f"{n}.tar"), "s", "txt", 0, 0, 10) for n in range(8)]
    for shard in placed:
        Path(shard.path).write_bytes(bytes(4096))  # all images are equal
    table, _ = join_rows(None, list(shards), placed, 0, findings, DataConfig())
    ordered = [key for shard in shards for key in shard["key"].to_pylist()]
    unique = list(dict.fromkeys(ordered))
    assert table["key"].to_pylist() == unique
    assert findings.to_json()["copied_sample"]["count"] == len(ordered) - len(unique)


# --- bad samples ------------------------------------------------------------------------------


def test_bad_samples_accumulate_by_key(index: SampleIndex) -> None:
    assert index.bad_ids().tolist() == []
    index.add_bad({2: "broken", 0: "truncated"})
    index.add_bad({1: "bomb", 2: "another reason"})
    index.add_bad({})
    assert json.loads((index.directory / BAD_SAMPLES).read_text()) == {
        "s/a": {"reason": "truncated", "bytes": "missing"},
        "s/bb": {"reason": "bomb", "bytes": "missing"},
        "s/ccc": {"reason": "broken", "bytes": "missing"},
    }
    bad = SampleIndex.open(index.directory).bad_ids()
    assert bad.tolist() == [0, 1, 2]
    assert bad.dtype == np.int64


def test_bad_fraction(index: SampleIndex) -> None:
    """The line names the samples, and a bound that would let them pass."""
    index.check_bad_fraction({}, 0.0)
    index.check_bad_fraction({1: "broken", 0: "excluded", 2: "excluded"}, 0.34)
    broken = {2: "broken", 0: "bomb"}
    with pytest.raises(ValueError, match="2 of 3 .*s/a, s/ccc.*max_bad_fraction") as caught:
        index.check_bad_fraction(broken, 0.34)
    least = float(re.findall(r"max_bad_fraction=([\d.]+)", str(caught.value))[-1])
    assert 2 / 3 <= least < 0.7
    index.check_bad_fraction(broken, least)


def test_the_file_of_excluded_samples(index: SampleIndex, tmp_path: Path) -> None:
    """It may begin with a mark and have blanks at the ends of lines; a long wrong key is cut."""
    listed = tmp_path / "keys.txt"
    listed.write_bytes(b"\xef\xbb\xbfs/a  \r\n\n s/ccc\t\n")
    assert read_excluded(index, str(listed)) == {0, 2}
    listed.write_text("s/" + "x" * 1_000_000)
    with pytest.raises(ValueError, match="data.exclude") as caught:
        read_excluded(index, str(listed))
    assert len(str(caught.value)) < 1000
    with pytest.raises(ValueError, match="data.exclude"):
        excluded_keys(str(tmp_path / "nothing.txt"))
