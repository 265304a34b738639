"""Choosing samples: uids on the disk, and in the metadata beside a shard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mclclip.data import shard_filter
from mclclip.data.remote import StoredFile
from mclclip.data.shard_filter import (
    UID,
    ShardFilter,
    digest_uids,
    is_in,
    metadata_path,
    open_uids,
    to_uids,
)
from tests.matrix import SOAK


def uids_of(*numbers: int) -> np.ndarray:
    """Uids of 128 bits, sorted as DataComp sorts them."""
    found = np.array([divmod(number, 1 << 64) for number in numbers], UID)
    found.sort()
    return found


def save(path: Path, uids: Any) -> str:
    np.save(path, uids)
    return str(path)


# --- uids --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 3, 8, 1000])
def test_uids_are_found_as_a_set_finds_them(tmp_path: Path, number: int) -> None:
    rng = np.random.default_rng(number)
    # Few upper halves: ties are decided by the lower ones. The largest values overflow no sum.
    some = [(int(h), int(low)) for h, low in rng.integers(0, 40, (number, 2))]
    some += [(2**64 - 1, 2**64 - 1)] if number > 2 else []
    known = np.array(some, UID)
    known.sort()
    wanted = np.array([(h, low) for h in range(41) for low in range(41)] + some, UID)
    found = is_in(wanted, open_uids(save(tmp_path / "u.npy", known)))
    assert found.tolist() == [row in set(some) for row in wanted.tolist()]


def test_hex_digits_become_the_upper_and_the_lower_half() -> None:
    texts = ["139e4a9b22a614771f06c700a8ebe150", "F", None, "", "xyz", "0" * 33, "ff " * 3]
    uids, good = to_uids(pa.array(texts))
    assert good.tolist() == [True, True, *[False] * 5]
    assert uids[:2].tolist() == [(0x139E4A9B22A61477, 0x1F06C700A8EBE150), (0, 15)]
    assert to_uids(pa.array([], pa.string()))[0].shape == (0,)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_order_is_checked_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at_once: int
) -> None:
    monkeypatch.setattr(shard_filter, "UIDS_AT_ONCE", at_once)
    good = [(0, 5), (0, 5), (1, 0), (1, 2), (3, 1)]
    digests = {digest_uids(save(tmp_path / "good.npy", np.array(good, UID)))}
    assert "good.npy names 1 samples again that it has named: each is taken once" in caplog.text
    assert len(digests | {digest_uids(save(tmp_path / "less.npy", np.array(good[:4], UID)))}) == 2
    for number in range(1, 5):
        wrong = [*good]
        wrong[number] = (0, 4)
        path = save(tmp_path / "wrong.npy", np.array(wrong, UID))
        with pytest.raises(ValueError, match=rf"not sorted: uid number {number} is less"):
            digest_uids(path)


@pytest.mark.parametrize(
    "value",
    [np.zeros(3), np.zeros((2, 2), UID), np.zeros(3, "u8,u4"), np.array("a"), b"no npy", b""],
)
def test_other_files_are_one_line(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "u.npy"
    path.write_bytes(value) if isinstance(value, bytes) else np.save(path, value)
    with pytest.raises(ValueError, match=r"u\.npy (holds|is no \.npy file)") as caught:
        digest_uids(str(path))
    assert "\n" not in str(caught.value)


def test_a_pickle_and_a_file_that_is_cut_short_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "p.npy", np.array([{}, {}]), allow_pickle=True)
    data = Path(save(tmp_path / "c.npy", uids_of(1, 2, 3))).read_bytes()
    (tmp_path / "c.npy").write_bytes(data[:-5])
    for name in ("p", "c"):
        with pytest.raises(ValueError, match="is no .npy file of uids"):
            digest_uids(str(tmp_path / f"{name}.npy"))
    with pytest.raises(FileNotFoundError, match="no file at"):
        digest_uids(str(tmp_path / "none.npy"))
    with pytest.raises(ValueError, match="got 's3://b/u.npy', wanted a file on a disk"):
        ShardFilter.of("s3://b/u.npy")


# --- a shard's samples -------------------------------------------------------------------------


def why(chosen: ShardFilter, path: Path, keys: list[str], **jsons: Any) -> list[str | None]:
    """``jsons``: the ``.json`` members by key."""
    place = StoredFile(str(path)) if path.exists() else None
    chosen = ShardFilter(chosen.subset, chosen.digest, place)
    members = [jsons.get(key, b"") for key in keys]
    data = [m if isinstance(m, bytes) else json.dumps(m).encode() for m in members]
    return chosen.why_not("/x/0.tar", keys, lambda number: data[number])


def test_a_uid_that_the_parquet_lacks_is_that_of_the_json(tmp_path: Path) -> None:
    path = tmp_path / "0.parquet"
    table = pa.table({"url": ["unread"] * 3, "key": ["b", "a", "gone"], "uid": [None, "5", "7"]})
    pq.write_table(table, path, row_group_size=2)
    chosen = ShardFilter.of(save(tmp_path / "u.npy", uids_of(1, 5)))
    jsons = {"a": {"uid": "2"}, "b": {"uid": "05"}, "c": {"uid": 5}, "d": b"{", "e": {"uid": "2"}}
    found = why(chosen, path, ["a", "b", "c", "d", "e"], **jsons)
    assert found == [None, None, "no_uid", "no_uid", "subset"]


def test_uids_that_are_nowhere_are_one_line(tmp_path: Path) -> None:
    chosen = ShardFilter.of(save(tmp_path / "u.npy", uids_of(1)))
    with pytest.raises(ValueError, match=r"no sample of /x/0\.tar has a uid, .* fetch the parq"):
        why(chosen, tmp_path / "none.parquet", ["a", "b"], a={"id": 1})


def test_metadata_without_keys_is_one_line(tmp_path: Path) -> None:
    path, chosen = tmp_path / "0.parquet", ShardFilter.of(save(tmp_path / "u.npy", uids_of(1)))
    pq.write_table(pa.table({"uid": ["1"]}), path)
    with pytest.raises(ValueError, match=r"0\.parquet cannot be read as parquet of keys"):
        why(chosen, path, ["a"])


def test_a_column_of_numbers_holds_no_uids(tmp_path: Path) -> None:
    path, chosen = tmp_path / "0.parquet", ShardFilter.of(save(tmp_path / "u.npy", uids_of(0x10)))
    pq.write_table(pa.table({"key": ["a"], "uid": [10]}), path)
    with pytest.raises(ValueError, match="has a uid"):
        why(chosen, path, ["a"])


def test_damaged_metadata_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "0.parquet"
    keys = [f"{number:09d}" for number in range(60)]
    rows = {"key": keys, "x": np.arange(60), "uid": [f"{k:032x}" for k in range(60)]}
    rows["status"] = ["ok"] * 60
    pq.write_table(pa.table(rows), path, compression="none", use_dictionary=["status"])
    data, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    chosen = ShardFilter.of(save(tmp_path / "u.npy", uids_of(*range(60))))
    assert why(chosen, path, keys) == [None] * 60
    cuts = [0, 3, 50, len(data) // 2, len(data) - 1]
    for cut in cuts + [None] * (3000 if SOAK else 80):
        worse = bytearray(data[:cut])
        for place in rng.integers(0, len(data), 3) if cut is None else ():
            worse[place] = rng.integers(256)
        path.write_bytes(worse)
        try:
            why(chosen, path, keys)
        except ValueError as error:
            assert re.search(r"0\.(parquet|tar) ", str(error)), repr(error)
            assert "\n" not in str(error), repr(error)
            refused += 1
    assert refused > 50


def test_where_the_metadata_of_a_shard_lies() -> None:
    assert metadata_path("/d/00.tar") == "/d/00.parquet"
    assert metadata_path("/d?/00.tar") == "/d?/00.parquet"
    assert metadata_path("https://h/0.tar?sig=a.tar") == "https://h/0.parquet?sig=a.tar"
