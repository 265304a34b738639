"""Scanning tar shards: what is found, and every reason for which something is not."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.data.findings import MAX_EXAMPLES, REASONS, Findings
from mclclip.data.remote import StoredFile
from mclclip.data.shard_scan import ShardScan, parse_captions, scan_shard
from mclclip.data.shard_writer import PackedSample, write_shards
from tests.tars import read_tar, write_tar

Members = list[tuple[str, bytes]]
GOOD: Members = [
    ("a.jpg", b"image a"),
    ("a.txt", b"caption a"),
    ("b.jpg", b"image b" * 300),
    ("b.txt", b"caption b"),
]


def make_tar(path: Path, members: Members) -> Path:
    return write_tar(path, members, format=tarfile.USTAR_FORMAT)


def scan(path: Path, captions: str = "txt") -> ShardScan:
    return scan_shard(StoredFile(str(path)), "s", captions)


def counts(found: ShardScan) -> dict[str, int]:
    return {reason: entry["count"] for reason, entry in found.findings.to_json().items()}


def samples(path: Path, found: ShardScan) -> dict[str, tuple[bytes, bytes]]:
    """Key -> (image, text) as the byte ranges of the rows give them."""
    data = path.read_bytes()
    return {
        row["key"]: (
            data[row["image_offset"] :][: row["image_size"]],
            data[row["text_offset"] :][: row["text_size"]],
        )
        for row in found.rows.to_pylist()
    }


def test_byte_ranges_are_the_members(tmp_path: Path) -> None:
    """In any case of extensions, and beside each other or not."""
    a, text, *b = GOOD
    path = make_tar(tmp_path / "x.tar", [("a.JPG", a[1]), *b, ("a.TXT", text[1])])
    found = scan(path)
    assert samples(path, found) == {
        "s/a": (b"image a", b"caption a"),
        "s/b": (b"image b" * 300, b"caption b"),
    }
    assert counts(found) == {}
    assert found.rows["num_captions"].to_pylist() == [1, 1]


@pytest.mark.parametrize(
    ("captions", "members", "reason"),
    [
        ("txt", [("c.jpg", b"i")], "no_caption"),
        ("txt", [("c.jpg", b"i"), ("c.txt", "\u200b \ufeff\u200b\n".encode())], "no_caption"),
        ("txt", [("c.jpg", b"i"), ("c.txt", b"")], "zero_byte_caption"),
        ("json:x", [("c.jpg", b"i"), ("c.json", b'{"x": null}')], "no_caption"),
        ("json:x", [("c.jpg", b"i"), ("c.json", b'{"x": ["", " ", 3]}')], "no_caption"),
        ("json:x", [("c.jpg", b"i"), ("c.json", b'{"x": ')], "bad_json"),
        ("json:x", [("c.jpg", b"i"), ("c.json", b"[" * 100_000)], "bad_json"),
        ("json:x", [("c.jpg", b"i"), ("c.json", b"\xff\xfe\xff")], "bad_json"),
        ("json:x", [("c.jpg", b"i"), ("c.json", b"")], "zero_byte_caption"),
    ],
)
def test_a_sample_without_captions_is_kept_and_counted(
    tmp_path: Path, captions: str, members: Members, reason: str
) -> None:
    good = [("a.jpg", b"i"), ("a.txt", b"t"), ("a.json", b'{"x": "t"}')]
    path = make_tar(tmp_path / "x.tar", [*good, *members])
    found = scan(path, captions)
    text = dict(members).get("c.txt" if captions == "txt" else "c.json", b"")
    assert samples(path, found)["s/c"] == (b"i", text)
    assert found.rows["num_captions"].to_pylist() == [1, 0]
    assert found.findings.to_json() == {reason: {"count": 1, "examples": ["s/c"]}}
    assert "kept" in REASONS[reason]


def test_first_image_is_used_where_there_are_several(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", [("a.png", b"1"), ("a.jpg", b"2"), ("a.txt", b"t")])
    found = scan(path)
    assert samples(path, found) == {"s/a": (b"1", b"t")}
    assert counts(found) == {"several_images": 1}


def test_duplicate_key_in_one_shard_first_wins(tmp_path: Path) -> None:
    again = [("a.jpg", b"other"), ("a.txt", b"other")]
    path = make_tar(tmp_path / "x.tar", [*GOOD, *again, *again])
    found = scan(path)
    assert samples(path, found)["s/a"] == (b"image a", b"caption a")
    assert counts(found) == {"duplicate_key": 2}


def test_names_without_a_key_are_counted_and_metadata_is_not(tmp_path: Path) -> None:
    odd = [("README", b"x"), (".hidden.jpg", b"x"), ("__meta__/a.jpg", b"{}"), ("__x__", b"")]
    odd += [("d/._a.jpg", b"x"), ("b.", b"x"), ("\udcff.jpg", b"x")]
    found = scan(make_tar(tmp_path / "x.tar", [*GOOD, *odd]))
    assert counts(found) == {"bad_name": 5}
    assert len(found.rows) == 2


# --- damaged shards ---------------------------------------------------------------------------


def test_every_cut_keeps_exactly_what_comes_before_it(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", GOOD)
    whole, rows = path.read_bytes(), scan(path).rows.to_pylist()
    content_end = max(row["text_offset"] + row["text_size"] for row in rows)
    for cut in [*range(600, content_end, 97), *(row["text_offset"] for row in rows), content_end]:
        path.write_bytes(whole[:cut])
        found = scan(path)
        kept = [row for row in rows if row["image_offset"] + row["image_size"] <= cut]
        for number, row in enumerate(kept):
            if row["text_offset"] + row["text_size"] > cut:
                kept[number] = row | dict.fromkeys(
                    ("text_offset", "text_size", "num_captions", "text_crc32"), 0
                )
        assert found.rows.to_pylist() == kept, cut
        assert counts(found)["truncated_shard"] == 1, cut


def test_joined_tars_are_read_up_to_the_first_end_mark(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", GOOD[:2])
    path.write_bytes(path.read_bytes() + make_tar(tmp_path / "y.tar", GOOD[2:]).read_bytes())
    found = scan(path)
    assert found.rows["key"].to_pylist() == ["s/a"]
    assert counts(found) == {"data_after_end": 1}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "unreadable_shard"),
        (b"<html>503</html>", "unreadable_shard"),
        (b"no tar at all " * 1000, "unreadable_shard"),
        (b"\0" * 10240, "empty_shard"),
    ],
)
def test_shards_without_samples(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(data)
    found = scan(path)
    assert (len(found.rows), counts(found)) == (0, {reason: 1})


# --- captions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "captions", "expected"),
    [
        (b" a dog\n", "txt", ["a dog"]),
        ("\ufeffé".encode(), "txt", ["é"]),
        ("\u00e9".encode("utf-16"), "txt", ["\u00e9"]),
        (b"a\r\n\nb \n", "lines", ["a", "b"]),
        (b"NaN", "txt", []),
        (b'{"x": ["None", "[]", "no"]}', "json:x", ["no"]),
        (b'{"x": " a "}', "json:x", ["a"]),
        (b'{"x": ["a", "", 7, "b"]}', "json:x", ["a", "b"]),
        (b'{"x:y": "a"}', "json:x:y", ["a"]),
        (b'{"x": "\\ud800"}', "json:x", ["?"]),
        (b'{"x": {"y": "a"}}', "json:x", []),
    ],
)
def test_parse_captions(data: bytes, captions: str, expected: list[str]) -> None:
    assert parse_captions(data, captions) == expected


@pytest.mark.parametrize("captions", ["", "json", "json:", "csv:x", "TXT"])
def test_unknown_caption_spec(captions: str) -> None:
    with pytest.raises(ValueError, match="expected 'txt', 'lines' or 'json:FIELD'"):
        parse_captions(b"", captions)


# --- against webdataset, and real shards ------------------------------------------------------

_WEBDATASET_LEAVES_FILES_OPEN = "ignore::pytest.PytestUnraisableExceptionWarning"
_NAME = st.text(st.sampled_from("ab/éÅ_-01"), min_size=1, max_size=6).filter(
    lambda name: name.strip("/") == name and "//" not in name
)


@pytest.mark.filterwarnings(_WEBDATASET_LEAVES_FILES_OPEN)
@settings(max_examples=20)
@given(keys=st.lists(_NAME, min_size=1, max_size=6, unique=True), data=st.data())
def test_keys_are_those_that_webdataset_gives(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], data: st.DataObject
) -> None:
    members: Members = []
    for key in [*keys, "__meta__/x"]:
        extension = data.draw(st.sampled_from(["jpg", "PNG", "webp"]))
        members += [(f"{key}.{extension}", key.encode()), (f"{key}.txt", b"t")]
    path = make_tar(tmp_path_factory.mktemp("wds") / "x.tar", members)
    expected = {
        f"s/{sample['__key__']}": next(sample[e] for e in ("jpg", "png", "webp") if e in sample)
        for sample in webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
    }
    assert {key: image for key, (image, _) in samples(path, scan(path)).items()} == expected


@pytest.mark.real_data
def test_real_shards_without_captions(shared_data: Path) -> None:
    found = scan(shared_data / "webdataset_fixtures" / "test_tars" / "image1.tar")
    assert (len(found.rows), counts(found)) == (4, {"no_caption": 4})


# --- findings, processes ----------------------------------------------------------------------


def test_findings_count_all_and_keep_a_few_examples() -> None:
    left, right = Findings(), Findings()
    left.add("no_image", *map(str, range(15)))
    right.add("no_image", *map(str, range(100, 115)))
    right.add("no_caption", "x", count=7)
    left.merge(right)
    entry = left.to_json()["no_image"]
    assert (entry["count"], len(entry["examples"])) == (30, MAX_EXAMPLES)
    assert entry["examples"][:15] == [str(n) for n in range(15)]
    assert Findings(json.loads(json.dumps(left.to_json()))).to_json() == left.to_json()
    left.add("no_field:title", "b")
    assert [*left.without(["no_image"]).to_json()] == ["no_caption", "no_field:title"]
    assert [*left.without(["no_field"]).to_json()] == ["no_caption", "no_image"]
    assert left.lines()[0].startswith("7 samples without a caption, kept: ")


# --- written shards ----------------------------------------------------------------------------


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
    bare = sample(8, captions=[])
    (path,) = write_shards([sample(7, extension="png"), bare], tmp_path, 10)
    found = read_tar(path)
    assert json.loads(found.pop("0008.json"))["caption"] is None and found.pop("0008.jpg")
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
