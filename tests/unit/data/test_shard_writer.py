"""Writing shards: layout, equal bytes, and nothing that only looks finished."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset

from mclclip.data.remote import StoredFile
from mclclip.data.shard_scan import scan_shard
from mclclip.data.shard_writer import PackedSample, write_shards
from tests.tars import read_tar


def sample(number: int, **changes: Any) -> PackedSample:
    fields: dict[str, Any] = {
        "key": f"{number:04d}",
        "image": b"image %d" % number,
        "extension": "jpg",
        "captions": [f"caption {number}", "another"],
        "metadata": {"url": f"u{number}"},
    }
    return PackedSample(**{**fields, **changes})


def test_layout_of_a_shard(tmp_path: Path) -> None:
    (path,) = write_shards([sample(7, extension="png")], tmp_path, 10)
    found = read_tar(path)
    assert path == tmp_path / "00000.tar"
    assert set(found) == {"0007.png", "0007.json", "0007.txt"}
    assert found["0007.png"] == b"image 7"
    assert found["0007.txt"] == b"caption 7"
    assert json.loads(found["0007.json"]) == {
        "key": "0007",
        "caption": "caption 7",
        "captions": ["caption 7", "another"],
        "url": "u7",
    }


def test_shards_hold_samples_in_order(tmp_path: Path) -> None:
    paths = write_shards(map(sample, range(7)), tmp_path, 3)
    assert [p.name for p in paths] == ["00000.tar", "00001.tar", "00002.tar"]
    keys = [scan_shard(StoredFile(str(p)), "s", "txt").rows["key"].to_pylist() for p in paths]
    assert keys == [["s/0000", "s/0001", "s/0002"], ["s/0003", "s/0004", "s/0005"], ["s/0006"]]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset's
def test_webdataset_and_the_index_read_the_same(tmp_path: Path) -> None:
    (path,) = write_shards([sample(1, captions=["Ein Käfer 虫"])], tmp_path, 5)
    (read,) = webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
    assert (read["__key__"], read["jpg"]) == ("0001", b"image 1")
    assert read["txt"].decode() == "Ein Käfer 虫"
    rows = scan_shard(StoredFile(str(path)), "s", "json:captions").rows
    assert rows["num_captions"].to_pylist() == [1]


def test_no_captions_no_txt(tmp_path: Path) -> None:
    (path,) = write_shards([sample(1, captions=[])], tmp_path, 5)
    assert set(read_tar(path)) == {"0001.jpg", "0001.json"}
    assert json.loads(read_tar(path)["0001.json"])["caption"] is None


def test_duplicate_key_names_both_samples(tmp_path: Path) -> None:
    stream = [sample(1), sample(2), sample(3), sample(1)]
    with pytest.raises(ValueError, match=r"samples 0 and 3 .*same key '0001'"):
        write_shards(stream, tmp_path, 2)
    # The first shard was whole before the error; the second has no name.
    assert [p.name for p in tmp_path.iterdir()] == ["00000.tar"]


def test_shards_of_a_killed_writer_of_more_samples_go(tmp_path: Path) -> None:
    write_shards(map(sample, range(6)), tmp_path, 2)
    others = [tmp_path / name for name in ("00009-mine.tar", "2024110_old.tar", "mine.tar")]
    for path in others:
        path.write_bytes(b"someone's")
    paths = write_shards(map(sample, range(3)), tmp_path, 2)
    assert sorted(tmp_path.iterdir()) == sorted([*paths, *others])


def test_interrupted_shard_is_not_there_and_leftovers_go(tmp_path: Path) -> None:
    def stream() -> Iterator[PackedSample]:
        yield from map(sample, range(3))
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_shards(stream(), tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["00000.tar"]
    (tmp_path / ".00001.tar.tmp").write_bytes(b"what a killed writer leaves")
    write_shards(map(sample, range(3)), tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000.tar", "00001.tar"]


@pytest.mark.parametrize("key", ["", "a.b", "dir/", "d/.a", "a.jpg"])
def test_keys_that_no_reader_would_find(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        write_shards([sample(1, key=key)], tmp_path, 2)
