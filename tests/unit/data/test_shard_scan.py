"""Scanning tar shards: what is found, and every reason for which something is not."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.data.findings import MAX_EXAMPLES, REASONS, Findings
from mclclip.data.remote import StoredFile
from mclclip.data.shard_scan import ShardScan, parse_captions, scan_shard, split_member_name
from tests.tars import write_tar

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
    path = make_tar(tmp_path / "x.tar", GOOD)
    found = scan(path)
    assert samples(path, found) == {
        "s/a": (b"image a", b"caption a"),
        "s/b": (b"image b" * 300, b"caption b"),
    }
    assert counts(found) == {}
    assert found.rows["num_captions"].to_pylist() == [1, 1]


def test_members_of_a_sample_need_not_be_adjacent(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", [GOOD[0], GOOD[2], GOOD[3], GOOD[1]])
    assert list(samples(path, scan(path))) == ["s/a", "s/b"]


@pytest.mark.parametrize("extension", ["jpg", "JPG", "jpeg", "png", "webp", "Webp"])
def test_image_extensions(tmp_path: Path, extension: str) -> None:
    path = make_tar(tmp_path / "x.tar", [(f"a.{extension}", b"i"), ("a.TXT", b"t")])
    assert samples(path, scan(path)) == {"s/a": (b"i", b"t")}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jpg", ("a", "jpg")),
        ("dir.x/a.JPG", ("dir.x/a", "jpg")),
        ("a.seg.png", ("a", "seg.png")),
        ("./a.jpg", ("./a", "jpg")),
        ("é.jpg", ("é", "jpg")),
        ("a", None),
        (".jpg", None),
        ("d/._a.jpg", None),
        ("a.", None),
        ("\udcff.jpg", None),
    ],
)
def test_split_member_name(name: str, expected: tuple[str, str] | None) -> None:
    assert split_member_name(name) == expected


@pytest.mark.parametrize(
    ("captions", "members", "reason"),
    [
        ("txt", [("c.txt", b"t")], "no_image"),
        ("txt", [("c.seg.png", b"i"), ("c.txt", b"t")], "no_image"),
        ("txt", [("c.jpg", b""), ("c.txt", b"t")], "zero_byte_image"),
        ("txt", [("c.jpg", b"")], "zero_byte_image"),
    ],
)
def test_reasons_for_leaving_a_sample_out(
    tmp_path: Path, captions: str, members: Members, reason: str
) -> None:
    good = [("a.jpg", b"i"), ("a.txt", b"t"), ("a.json", b'{"x": "t"}')]
    found = scan(make_tar(tmp_path / "x.tar", [*good, *members]), captions)
    assert found.rows["key"].to_pylist() == ["s/a"]
    assert counts(found) == {reason: 1, **({"other_member": 1} if len(members[0][0]) > 5 else {})}
    named = found.findings.to_json()[reason]["examples"][0]
    assert named.startswith("s/c") and (reason != "no_image" or members[0][0] in named)
    assert reason in REASONS


@pytest.mark.parametrize(
    ("captions", "members", "reason"),
    [
        ("txt", [("c.jpg", b"i")], "no_caption"),
        ("txt", [("c.jpg", b"i"), ("c.json", b'{"caption": "t"}')], "no_caption"),
        ("txt", [("c.jpg", b"i"), ("c.txt", b" \n\t")], "no_caption"),
        ("txt", [("c.jpg", b"i"), ("c.txt", "\u200b \ufeff\u200b\n".encode())], "no_caption"),
        ("txt", [("c.jpg", b"i"), ("c.txt", b"")], "zero_byte_caption"),
        ("json:x", [("c.jpg", b"i"), ("c.txt", b"t")], "no_caption"),
        ("json:x", [("c.jpg", b"i"), ("c.json", b"{}")], "no_caption"),
        ("json:x", [("c.jpg", b"i"), ("c.json", b'{"x": null}')], "no_caption"),
        ("json:x", [("c.jpg", b"i"), ("c.json", b'{"x": ["", " ", 3]}')], "no_caption"),
        ("json:x", [("c.jpg", b"i"), ("c.json", b"[1]")], "no_caption"),
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
    found = scan(make_tar(tmp_path / "x.tar", [*GOOD, *odd]))
    assert counts(found) == {"bad_name": 2}
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


def test_missing_shard(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.tar"):
        scan(tmp_path / "none.tar")


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
@settings(max_examples=30, deadline=None)
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
    assert left.lines()[0].startswith("7 samples without a caption, kept: ")
