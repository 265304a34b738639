"""Choosing samples: conditions, uids on the disk, and metadata beside a shard."""

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
    parse_condition,
    to_uids,
)
from tests.matrix import SOAK

NAN = float("nan")


def uids_of(*numbers: int) -> np.ndarray:
    """Uids of 128 bits, sorted as DataComp sorts them."""
    found = np.array([divmod(number, 1 << 64) for number in numbers], UID)
    found.sort()
    return found


def save(path: Path, uids: Any) -> str:
    np.save(path, uids)
    return str(path)


# --- conditions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "column", "operator", "value"),
    [
        ("similarity>=0.28", "similarity", ">=", 0.28),
        (" width  <  200 ", "width", "<", 200),
        ("status==success", "status", "==", "success"),
        ("status != 'failed to download'", "status", "!=", "failed to download"),
        ('id=="007"', "id", "==", "007"),
        ("a b>-1e-3", "a b", ">", -1e-3),
        ("n<=9223372036854775808", "n", "<=", 2.0**63),
        ("n==9007199254740993", "n", "==", 2**53 + 1),
        ("caption!=''", "caption", "!=", ""),
        ("d>2020-01-01", "d", ">", "2020-01-01"),
    ],
)
def test_conditions_are_parsed(text: str, column: str, operator: str, value: Any) -> None:
    found = parse_condition(text)
    assert (found.column, found.operator, found.value) == (column, operator, value)
    assert type(found.value) is type(value)
    assert parse_condition(str(found)) == found


@pytest.mark.parametrize("text", ["", "similarity", "a=1", ">=1", "a>=", "a>=>1", "a<", "a = = 1"])
def test_what_is_no_condition_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="wanted a column, one of < <= > >= == !=") as caught:
        parse_condition(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("operator", ["<", "<=", ">", ">=", "==", "!="])
@pytest.mark.parametrize(
    "kind", [pa.int32(), pa.int64(), pa.uint8(), pa.float32(), pa.float64(), pa.float16()]
)
def test_numbers_compare_as_in_python(operator: str, kind: pa.DataType) -> None:
    values = list(range(6))
    for number in ("3", "2.5"):
        column = pa.chunked_array([pa.array(values).cast(kind)])
        holds = parse_condition(f"x{operator}{number}").holds(column).tolist()
        assert holds == [eval(f"{value}{operator}{number}") for value in values]


def test_a_number_means_the_same_in_single_and_double_precision() -> None:
    for kind in (pa.float32(), pa.float64()):
        column = pa.chunked_array([pa.array([0.28], kind)])
        for operator, wanted in (("==", True), (">=", True), ("<=", True), ("<", False)):
            assert parse_condition(f"x{operator}0.28").holds(column).tolist() == [wanted]


def test_text_and_flags() -> None:
    texts = pa.chunked_array([pa.array(["a", "b", None, "7"])])
    assert parse_condition("x==a").holds(texts).tolist() == [True, False, False, False]
    assert parse_condition("x=='7'").holds(texts).tolist() == [False, False, False, True]
    assert parse_condition("x>=b").holds(texts.dictionary_encode()).tolist()[:2] == [False, True]
    flags = pa.chunked_array([pa.array([True, False])])
    assert parse_condition("x==true").holds(flags).tolist() == [True, False]


def test_integers_beyond_those_of_the_other_type_are_one_line() -> None:
    large = pa.chunked_array([pa.array([2**63 + 1], pa.uint64())])
    for column, text in ((large, "x>=5"), (pa.chunked_array([pa.array([2**53 + 1])]), "x<0.5")):
        with pytest.raises(ValueError, match="numbers that cannot be compared exactly"):
            parse_condition(text).holds(column)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (["9"], "x<200"),
        (["007"], "x==007"),
        ([9], "x==nine"),
        ([[1]], "x==1"),
        ([9], "x=='9'"),
        ([True], "x>0"),
    ],
)
def test_values_of_other_kinds_are_one_line(values: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"compares .*, and column x holds .*: wanted numbers"):
        parse_condition(text).holds(pa.chunked_array([pa.array(values)]))


# --- uids --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, 8, 9, 255, 256, 1000])
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


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_order_is_checked_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at_once: int
) -> None:
    monkeypatch.setattr(shard_filter, "_UIDS_AT_ONCE", at_once)
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
    with pytest.raises(ValueError, match="subset is 's3://b/u.npy', wanted a file on a disk"):
        ShardFilter.of("s3://b/u.npy", [])


# --- a shard's samples -------------------------------------------------------------------------


def why(chosen: ShardFilter | None, path: Path, keys: list[str], **jsons: Any) -> list[str | None]:
    """``jsons``: the ``.json`` members by key."""
    assert chosen is not None
    place = StoredFile(str(path)) if path.exists() else None
    chosen = ShardFilter(chosen.subset, chosen.digest, chosen.where, place)
    members = [jsons.get(key, b"") for key in keys]
    data = [m if isinstance(m, bytes) else json.dumps(m).encode() for m in members]
    return chosen.why_not("/x/0.tar", keys, lambda number: data[number])


def test_every_sample_has_the_first_of_its_reasons(tmp_path: Path) -> None:
    path = tmp_path / "0.parquet"
    rows = {
        "url": ["unread"] * 7,
        "key": ["f", "a", "b", "c", "d", "e", "gone"],
        "uid": [f"{number:032x}" for number in (1, 2, 3, 4, 5, 99, 7)],
        "score": [0.5, NAN, None, 0.1, 0.5, 0.5, 0.5],
        "status": ["success", None, "success", "bad", None, "success", "success"],
    }
    pq.write_table(pa.table(rows), path, row_group_size=2)
    chosen = ShardFilter.of(
        save(tmp_path / "u.npy", uids_of(*range(8))), ["score>0.3", "status==success"]
    )
    assert why(chosen, path, ["a", "b", "c", "d", "e", "f", "new"]) == [
        "no_value:score>0.3", "no_value:score>0.3", "where:score>0.3", "no_value:status==success",
        "subset", None, "no_metadata",
    ]  # fmt: skip
    assert why(chosen, path, []) == []


def test_a_column_of_nulls_alone_has_no_value(tmp_path: Path) -> None:
    path = tmp_path / "0.parquet"
    pq.write_table(pa.table({"key": ["a"], "x": pa.nulls(1)}), path)
    assert why(ShardFilter.of(None, ["x!=1"]), path, ["a"]) == ["no_value:x!=1"]


@pytest.mark.parametrize("with_parquet", [False, True])
def test_a_uid_that_the_parquet_lacks_is_that_of_the_json(
    tmp_path: Path, with_parquet: bool
) -> None:
    path = tmp_path / "0.parquet"
    if with_parquet:
        pq.write_table(pa.table({"key": ["a", "b"], "uid": ["5", None]}), path)
    chosen = ShardFilter.of(save(tmp_path / "u.npy", uids_of(1, 5)), [])
    jsons = {"a": {"uid": "1"}, "b": {"uid": "05"}, "c": {"uid": 5}, "d": b"{", "e": {"uid": "2"}}
    found = why(chosen, path, ["a", "b", "c", "d", "e"], **jsons)
    assert found == [None, None, "no_metadata", "no_metadata", "subset"]


def test_uids_that_are_nowhere_are_one_line(tmp_path: Path) -> None:
    chosen = ShardFilter.of(save(tmp_path / "u.npy", uids_of(1)), [])
    with pytest.raises(ValueError, match=r"no sample of /x/0\.tar has a uid, .* fetch the parq"):
        why(chosen, tmp_path / "none.parquet", ["a", "b"], a={"id": 1})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"key": ["a"], "width": [1]}, r"has no column x, it has key, width"),
        ({"x": [1]}, r"has no column key, it has x"),
        ({"key": ["a"], "x": [1], "y": [2]}, r"has 2 column x, it has key, x, x"),
        ({"key": [1], "x": [1]}, r"has keys of type int64, wanted text"),
    ],
)
def test_metadata_that_lacks_columns_is_one_line(
    tmp_path: Path, rows: dict[str, Any], message: str
) -> None:
    path, table = tmp_path / "0.parquet", pa.table(rows)
    names = ["x" if name == "y" else name for name in table.column_names]
    pq.write_table(table.rename_columns(names), path)
    with pytest.raises(ValueError, match=rf"0\.parquet {message}"):
        why(ShardFilter.of(None, ["x==1"]), path, ["a"])


def test_damaged_metadata_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "0.parquet"
    keys = [f"{number:09d}" for number in range(60)]
    rows = {"key": keys, "x": np.arange(60), "uid": [f"{k:032x}" for k in range(60)]}
    rows["status"] = ["ok"] * 60
    pq.write_table(pa.table(rows), path, compression="none", use_dictionary=["status"])
    data, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    chosen = ShardFilter.of(save(tmp_path / "u.npy", uids_of(*range(60))), ["x>=0", "status==ok"])
    assert why(chosen, path, keys) == [None] * 60
    cuts = [0, 3, 50, len(data) // 2, len(data) - 1]
    for cut in cuts + [None] * (3000 if SOAK else 150):
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


def test_more_than_a_shard_can_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "0.parquet"
    pq.write_table(pa.table({"key": ["a"] * 9, "x": range(9), "caption": ["c" * 999] * 9}), path)
    chosen = ShardFilter.of(None, ["x==0"])
    assert why(chosen, path, ["a"]) == [None]
    for limit, bound in (("MAX_METADATA_BYTES", 50), ("MAX_METADATA_ROWS", 8)):
        with monkeypatch.context() as patched, pytest.raises(ValueError, match="9 rows and .* too"):
            patched.setattr(shard_filter, limit, bound)
            why(chosen, path, ["a"])


def test_where_the_metadata_of_a_shard_lies() -> None:
    assert metadata_path("/d/00.tar") == "/d/00.parquet"
    assert metadata_path("/d?/00.tar") == "/d?/00.parquet"
    assert metadata_path("https://h/0.tar?sig=a.tar") == "https://h/0.parquet?sig=a.tar"
