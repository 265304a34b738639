"""Attributes: fields of samples' JSON in the index, and as classes of a training."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip import config
from mclclip.data.labels import AttributeClasses
from mclclip.data.sample_index import KIND, SampleIndex
from mclclip.data.shard_scan import parse_attributes
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import read_manifest
from mclclip.util.remake import Remake
from mclclip.verbs import index
from tests.tars import write_tar

ROWS: list[Any] = [
    {"shape": "star", "size": 10},
    {"shape": "circle", "size": 9},
    {"shape": True, "size": "9"},
    {"size": -1},
    {"shape": "star", "size": 1.5},
]


def make_shard(path: Path, rows: list[Any], prefix: str = "k") -> Path:
    """A tar of samples whose .json members are ``rows``: bytes as they are, None for no member."""
    members = []
    for number, row in enumerate(rows):
        data = row if isinstance(row, bytes) else json.dumps(row).encode()
        members.append((f"{prefix}{number}.jpg", b"image"))
        members += [] if row is None else [(f"{prefix}{number}.json", data)]
    return write_tar(path, members)


def run(
    run_dir: Path, force: Remake = Remake.NOTHING, **sources: tuple[Path, list[str]]
) -> SampleIndex:
    tree = {
        name: {"shards": f"{path}/*.tar", "attributes": names}
        for name, (path, names) in sources.items()
    }
    options = {"run_dir": str(run_dir), "data": {"sources": tree, "index_workers": 1}}
    return index.run(config.from_tree(options), SINGLE, force=force)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    make_shard(tmp_path / "shards" / "0.tar", ROWS)
    return tmp_path / "shards"


def test_codes_are_places_among_the_sorted_values(tmp_path: Path, shards: Path) -> None:
    plain = run(tmp_path / "plain", s=(shards, []))
    with pytest.raises(ValueError, match="it has none: name it in data.sources"):
        plain.attribute("shape")
    found = run(tmp_path / "run", s=(shards, ["shape", "size"]))
    assert plain.digest != found.digest and not (plain.directory / "attributes.json").exists()
    codes, values = found.attribute("shape")
    assert values == ["circle", "star"] and codes.tolist() == [1, 0, -1, -1, 1]
    assert codes.dtype == np.int32 and not codes.flags.writeable
    codes, values = found.attribute("size")
    assert values == ["-1", "9", "10"]  # by size, and "9" is 9
    assert codes.tolist() == [2, 1, 1, 0, -1]
    manifest = read_manifest(found.directory, KIND)
    assert manifest.counts["attributes"] == {"shape": 2, "size": 3}
    assert manifest.counts["findings"]["no_attribute:shape"] == {
        "count": 2,
        "examples": ["s/k2", "s/k3"],
    }
    assert manifest.counts["findings"]["no_attribute:size"]["count"] == 1
    with pytest.raises(ValueError, match=r"no attribute 'colour', it has \['shape', 'size'\]"):
        found.attribute("colour")
    (found.directory / "attributes.json").write_text('{"shape": ["star"]}')
    with pytest.raises(RuntimeError, match="attributes.json is damaged.*index --force"):
        SampleIndex.open(found.directory)


def test_new_shards_may_bring_values_and_attributes(tmp_path: Path, shards: Path) -> None:
    first = run(tmp_path / "run", s=(shards, ["shape"]))
    make_shard(shards / "1.tar", [{"shape": "arrow"}, {"shape": "star"}], "l")
    make_shard(tmp_path / "more" / "0.tar", [{"size": 3}])
    found = run(tmp_path / "run", s=(shards, ["shape"]), t=(tmp_path / "more", ["size"]))
    codes, values = found.attribute("shape")
    assert values == ["arrow", "circle", "star"]
    assert codes.tolist() == [2, 1, -1, -1, 2, 0, 2, -1]
    assert found.attribute("size")[0].tolist() == [-1] * 7 + [0]
    assert found.digest != first.digest
    whole = run(tmp_path / "whole", s=(shards, ["shape"]), t=(tmp_path / "more", ["size"]))
    assert whole.digest == found.digest
    one, two = ((i.directory / "samples.arrow").read_bytes() for i in (found, whole))
    assert one == two


def test_other_attributes_of_a_known_shard_are_refused(tmp_path: Path, shards: Path) -> None:
    run(tmp_path / "run", s=(shards, ["shape"]))
    with pytest.raises(ValueError, match=r"indexed with attributes=\['shape'\], now \['size'\]"):
        run(tmp_path / "run", s=(shards, ["size"]))
    assert run(tmp_path / "run", force=Remake.ALL, s=(shards, ["size"])).attribute("size")


def test_samples_without_a_value_are_named(tmp_path: Path, shards: Path) -> None:
    found = run(tmp_path / "run", s=(shards, ["shape", "absent"]))
    assert found.without_attribute("shape", "x").tolist() == [2, 3]
    with pytest.raises(ValueError, match="supcon reads .*'absent', and all 5 .* no value"):
        found.without_attribute("absent", "supcon")
    make_shard(tmp_path / "same" / "0.tar", [{"shape": "star"}, {"shape": "star"}, {}])
    same = run(tmp_path / "other", s=(tmp_path / "same", ["shape"]))
    with pytest.raises(ValueError, match="supcon reads .*'shape'.* the same value 'star'"):
        same.without_attribute("shape", "supcon")


def test_classes(tmp_path: Path, shards: Path) -> None:
    found = run(tmp_path / "run", s=(shards, ["shape", "size"]))
    classes = AttributeClasses(found, "shape")
    assert (classes.num_classes, classes.labels_per_sample) == (2, 1)
    for given in (classes, pickle.loads(pickle.dumps(classes))):
        got = given[np.array([4, 2, 1])]
        assert got.dtype == np.int64 and got.tolist() == [[1], [-1], [0]]
        assert given.digest == classes.digest != AttributeClasses(found, "size").digest
    with pytest.raises(RuntimeError, match="attribute 'shape', which have no centroids"):
        classes.centroids()
    with pytest.raises(ValueError, match="no attribute 'colour'"):
        AttributeClasses(found, "colour")


# --- what strangers write ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'{"a": "x"}', "x"),
        (b'{"a": 7}', "7"),
        (b'{"a": "\xc3\xa9\xe2\x98\x83"}', "é☃"),
        (b'{"a": "\\ud800"}', "?"),
        (b'{"a": true}', None),
        (b'{"a": 2019.0}', "2019"),
        (b'{"a": 1.5}', None),
        (b'{"a": ["x"]}', None),
        (b'{"a": " "}', None),
        (b"\xff\xfe", None),
        (b'{"a": ' + b"9" * 5000 + b"}", None),
        (b"[" * 100_000, None),
    ],
)
def test_a_value_is_a_string_or_an_integer(data: bytes, value: str | None) -> None:
    assert parse_attributes(data, ["a"]) == [value]


def test_broken_json_and_numbers_of_any_length(tmp_path: Path) -> None:
    rows = [b"{", None, {"a": "9" * 5000}, {"a": "1" * 18}, {"a": "007"}, {"a": "7"}]
    make_shard(tmp_path / "shards" / "0.tar", rows)
    codes, values = run(tmp_path / "run", s=(tmp_path / "shards", ["a"])).attribute("a")
    assert values == ["7", "1" * 18, "007", "9" * 5000]
    assert codes.tolist() == [-1, -1, 3, 1, 2, 0]
