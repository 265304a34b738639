"""Every reader of other people's data reads an entry or counts it under a reason of the table.

A case is a data set in small: its entries, the number of those that are read, and the counts. The
sum of both is the number of entries, and every reason of the table has a case.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mclclip import config
from mclclip.data.findings import LFS_POINTER, REASONS
from mclclip.data.sample_index import KIND
from mclclip.eval.images import read_labelled
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import read_manifest
from mclclip.verbs import index
from mclclip.verbs.pack import pack
from tests.tars import write_tar

PART_READ = {
    # What is counted, and read nevertheless: it stays without a caption, or in part.
    "no_caption", "no_field", "zero_byte_caption", "bad_json", "bad_text", "several_images",
    "several_lines", "empty_caption", "open_quote", "joined_lines", "extra_cells", "transparent",
    "narrow_range", "joined_cells", "shared_text",
    "no_attribute", "large_caption",
}  # fmt: skip
ELSEWHERE = {
    "unreadable": "unit/test_pack.py",
    # Reasons of filters, of damaged tars and of sizes that no small case reaches.
    "subset": "unit/data/test_shard_filter.py", "no_uid": "unit/data/test_shard_filter.py",
    "no_attribute": "unit/data/test_attributes.py", "no_field": "unit/data/test_caption_fields.py",
    "large_image": "unit/data/test_tar_members.py",
    "dotted_name": "unit/data/test_tar_members.py",
    "large_caption": "unit/data/test_tar_members.py",
    "link_member": "unit/data/test_tar_members.py",
    "truncated_shard": "unit/test_index.py", "damaged_shard": "unit/test_index.py",
    "data_after_end": "unit/data/test_shard_scan.py", "unreadable_shard": "unit/test_index.py",
    "empty_shard": "unit/data/test_shard_scan.py", "uncaptioned": "unit/test_pack.py",
    "undecodable": "unit/test_pack.py",
    "no_label": "unit/eval/test_zeroshot.py",
}  # fmt: skip


def picture(number: int, format: str = "JPEG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 3), (9 * number, 5, 200)).save(stream, format)
    return stream.getvalue()


def clear() -> bytes:
    stream = io.BytesIO()
    Image.new("RGBA", (4, 3), (9, 5, 200, 90)).save(stream, "PNG")
    return stream.getvalue()


def dark() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 3), 900, np.uint16)).save(stream, "PNG")
    return stream.getvalue()


POINTER = LFS_POINTER + b"v1\noid sha256:00\nsize 5\n"
Files = dict[str, bytes]


@dataclass(frozen=True)
class Case:
    """``make`` writes the data below a folder; of ``entries`` ``read`` ones are read."""

    reader: str
    entries: int
    read: int
    counts: dict[str, int]
    files: Files = field(default_factory=dict)
    make: Callable[[Path], Any] = lambda folder: None


def linked(folder: Path) -> None:
    (folder.parent / "store").mkdir()
    (folder.parent / "store" / "x.jpg").write_bytes(picture(7))
    (folder / "elsewhere").symlink_to(folder.parent / "store")
    (folder / "x.jpg").symlink_to(folder.parent / "store" / "x.jpg")


def piped(folder: Path) -> None:
    os.mkfifo(folder / "0.txt")
    os.mkfifo(folder / "z.jpg")


def misnamed(folder: Path) -> None:
    for name in (b"\xff.jpg", b"\xff.txt"):
        Path(os.fsdecode(os.fsencode(folder / "sub") + name)).write_bytes(picture(1))
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).mkdir()


def parquet(folder: Path) -> None:
    data = [picture(1), None, b"", POINTER, b"<svg>", picture(2)]
    texts = [["a"], ["b"], ["c"], ["d"], ["e"], [None, "f"]]
    pq.write_table(pa.table({"image": data, "captions": texts}), folder / "t.parquet")


def same_names(folder: Path) -> None:
    write_tar(folder / "0.tar", [("a.jpg", picture(1)), ("a.txt", b"a"), ("a.jpg", picture(2))])


SIX = {f"{n}.jpg": picture(n) for n in range(6)}
TWO = {n: SIX[n] for n in ("0.jpg", "1.jpg")}
TEXTS = {f"{n}.txt": f"text {n}".encode() for n in range(6)}
CASES = {
    "suffixes": Case(
        "folder", 8, 5, {"unsupported_extension": 1, "other_file": 2, "no_caption": 5},
        {"a.jfif": picture(1), "b.JPE": picture(2), "c.tif": picture(3, "TIFF"), "d.mp4": b"",
         "e.heic": b"\0\0\0\x18ftypheic", "f.heic": picture(4), "g.md": b"", "h.gif":
         picture(5, "GIF")},
    ),
    "links": Case("folder", 8, 6, {"linked_folder": 1, "outside_folder": 1, "no_caption": 6}, SIX,
                  linked),
    "pipes": Case("folder", 8, 6, {"other_file": 2, "no_caption": 6}, SIX, piped),
    "hidden": Case("folder", 8, 6, {"hidden": 2, "no_caption": 6}, SIX | {".git/a.jpg": b"",
                                                                         "._0.jpg": b""}),
    "names": Case("folder", 9, 6, {"bad_name": 3, "no_caption": 6}, SIX, misnamed),
    "texts": Case(
        "folder", 14, 13,
        {"bad_text": 1, "lfs_pointer": 1, "no_caption": 2, "lone_text": 1, "shared_text": 1},
        SIX | TEXTS | {"1.txt": "é".encode("utf-16"), "2.txt": b"caf\xe9", "3.txt": POINTER,
                       "z.txt": b"z", "0.png": picture(6, "PNG")},
    ),
    "bytes": Case(
        "folder", 8, 6,
        {"zero_byte_image": 1, "lfs_pointer": 1, "transparent": 1, "narrow_range": 1,
         "no_caption": 6},
        SIX | {"0.jpg": b"", "1.jpg": POINTER, "2.png": clear(), "3.png": dark()},
    ),
    "rows": Case(
        "t.csv", 9, 6,
        {"no_path": 1, "missing_image": 1, "empty_caption": 5, "joined_cells": 1, "no_caption": 5,
         "unnamed_picture": 1},
        SIX | {"z.png": b"",
               "t.csv": b"image,caption\n0.jpg,nan\n1.jpg,None\n2.jpg,[]\n3.jpg,\n4.jpg,<NA>\n"
                        b"5.jpg,a, b\n,x\n9.jpg,y\n"},
    ),
    "more cells": Case(
        "t.csv", 2, 2, {"extra_cells": 1},
        TWO | {
            "t.csv": b"image,number,caption\n0.jpg,0,a cat, sitting\n1.jpg,1,b\n"},
    ),
    "quotes": Case(
        "t.tsv", 6, 6, {"open_quote": 3},
        SIX | {"t.tsv": b"image\tcaption\n" + b"".join(
            b'%d.jpg\t%stext\n' % (n, b'"' * (n in (1, 3))) for n in range(6))},
    ),
    "a quotation mark among lines": Case(
        "t.csv", 2, 2, {"joined_lines": 3},
        TWO | {
            "t.csv": b'image,caption\n0.jpg,a\n1.jpg,"wide open\nof two\nlines\n'},
    ),
    "lines of JSON": Case(
        "t.jsonl", 3, 2, {"no_path": 1, "empty_caption": 1, "no_caption": 1},
        TWO | {"t.jsonl": b'{"image": "0.jpg", "caption": NaN}\n{"caption": "x"}\n'
                          b'{"image": "1.jpg", "caption": "y"}\n'},
    ),
    "COCO": Case(
        "t.json", 3, 2, {"no_path": 1, "empty_caption": 1, "no_caption": 1},
        TWO | {"t.json": json.dumps({
            "images": [{"id": n, "file_name": f"{n}.jpg"} for n in range(2)],
            "annotations": [{"image_id": 0, "caption": "a"}, {"image_id": 9, "caption": "b"},
                            {"image_id": 1, "caption": None}]}).encode()},
    ),
    "Parquet": Case(
        "t.parquet", 6, 2,
        {"no_path": 1, "zero_byte_image": 1, "lfs_pointer": 1, "unsupported_extension": 1,
         "empty_caption": 1},
        {}, parquet,
    ),
    "members of one name": Case("0.tar", 2, 1, {"duplicate_key": 1}, {}, same_names),
    "members": Case(
        "0.tar", 4, 2,
        {"no_image": 1, "lfs_pointer": 1, "other_member": 1, "several_images": 1, "bad_json": 1,
         "bad_text": 1, "no_caption": 2},
        {}, lambda folder: write_tar(folder / "0.tar", [
            ("a.jpg", picture(1)), ("a.png", picture(1)), ("a.json", b"{"), ("b.cls", b"1"),
            ("c.jpg", POINTER), ("d.jpg", picture(2)), ("d.txt", b"caf\xe9")]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_and_what_is_counted_add_up(name: str, tmp_path: Path) -> None:
    case, folder = CASES[name], tmp_path / "data"
    folder.mkdir()
    for file, data in case.files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(data)
    case.make(folder)
    is_table = case.reader.startswith("t.") and case.reader != "t.parquet"
    source = folder if is_table or case.reader == "folder" else folder / case.reader
    counts = pack(source, tmp_path / "out", captions=folder / case.reader if is_table else None)
    check(case, counts.counts["samples"], counts.counts["findings"], extra=0)


def check(case: Case, samples: int, findings: dict[str, Any], extra: int) -> None:
    counted = {reason: entry["count"] for reason, entry in findings.items()}
    assert counted == case.counts
    texts = len([f for f in case.files if f.endswith(".txt")]) if case.reader == "folder" else 0
    texts -= counted.get("lone_text", 0)
    # A member of another kind belongs to a sample, which is an entry.
    left_out = {r: n for r, n in counted.items() if r not in PART_READ | {"other_member"}}
    if texts:  # a pointer in the place of a text leaves its picture
        left_out.pop("lfs_pointer", None)
    assert samples == case.read - texts
    assert samples + texts + sum(left_out.values()) == case.entries


INDEXED: dict[str, tuple[list[list[tuple[str, bytes]]], int, dict[str, int]]] = {
    "faults": (
        [[("a.jpg", picture(1)), ("a.txt", b"a"), ("b.txt", b"b"), ("c.jpg", b""), ("c.txt", b"c"),
          ("d.jpg", POINTER), ("e.jpg", picture(2)), ("e.txt", b""), ("f.jpg", picture(3)),
          ("f.txt", b"caf\xe9"), ("g.jpg", picture(4)), ("g.cls", b"1")]],
        4,
        {"no_image": 1, "zero_byte_image": 1, "lfs_pointer": 1, "zero_byte_caption": 1,
         "bad_text": 1, "no_caption": 1, "other_member": 1},
    ),
    "copies": (
        [[("a.jpg", picture(1)), ("a.txt", b"a")], [("a.jpg", picture(1)), ("a.txt", b"a")]],
        1,
        {"copied_sample": 1},
    ),
    "a pointer": ([[("a.jpg", picture(1)), ("a.txt", b"a")], []], 1, {"lfs_shard": 1}),
    "lines": (
        [[m for n in range(12) for m in ((f"{n}.jpg", picture(n)), (f"{n}.txt", b"a\nb\n"))]],
        12,
        {"several_lines:2": 12},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXED)
def test_samples_of_shards_are_indexed_or_counted(name: str, tmp_path: Path) -> None:
    shards, read, counts = INDEXED[name]
    for number, members in enumerate(shards):
        path = write_tar(tmp_path / f"{number}.tar", members)
        if not members:
            path.write_bytes(POINTER)
    tree = {"sources": {"s": {"shards": str(tmp_path / "*.tar")}}}
    tree |= {"max_bad_fraction": 0.5, "index_workers": 1}
    found = index.run(config.from_tree({"run_dir": str(tmp_path / "r"), "data": tree}), SINGLE)
    findings = read_manifest(found.directory, KIND).counts["findings"]
    assert {reason: entry["count"] for reason, entry in findings.items()} == counts
    keys = sum(len({member.partition(".")[0] for member, _ in members}) for members in shards)
    left_out = (n for r, n in counts.items() if r.partition(":")[0] not in PART_READ)
    entries = keys + ("lfs_shard" in counts) + ("other_member" in counts)
    assert len(found) == read and read + sum(left_out) == entries


def test_entries_of_class_folders_are_read_or_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = {
        "cat/a.jfif": b"", "cat/b.jpg": b"", "dog/c.bmp": b"", "dog/d.heic": b"", "dog/e.txt": b"",
        "dog/.f.jpg": b"", "dog/more/g.jpg": b"", "h.jpg": b"",
    }  # fmt: skip
    for name, data in entries.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with caplog.at_level(logging.WARNING, logger="mclclip"):
        found = read_labelled(tmp_path, {"cat": "cat", "dog": "dog"})
    reasons = ("unsupported_extension", "other_file", "hidden", "sub_folder", "no_class")
    assert all(f"({reason})" in caplog.text for reason in reasons)
    assert len(found.images) + len(caplog.records) == len(entries)


def test_every_reason_has_a_case() -> None:
    cases = {r.partition(":")[0] for case in CASES.values() for r in case.counts}
    cases |= {r.partition(":")[0] for *_, counts in INDEXED.values() for r in counts}
    cases |= {"sub_folder", "no_class"}
    assert cases | ELSEWHERE.keys() >= REASONS.keys()
    assert not cases & ELSEWHERE.keys() and ELSEWHERE.keys() <= REASONS.keys()
    root = Path(__file__).parents[1]
    assert all(reason in (root / file).read_text() for reason, file in ELSEWHERE.items())
