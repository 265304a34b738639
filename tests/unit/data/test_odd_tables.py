"""Tables that are odd in one place: what is good in them is packed, or the place is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mclclip.verbs.pack import pack
from tests.tars import read_tar

Counts = dict[str, int]
NAMES = ("0.jpg", "1.jpg")


def write(name: str, text: str | bytes) -> Callable[[Path], str]:
    def made(folder: Path) -> str:
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        (folder / name).write_bytes(data)
        return name

    return made


def lines(*rows: Any) -> Callable[[Path], str]:
    return write("t.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def feather_table(folder: Path) -> str:
    table = pa.table({"image": [*NAMES], "caption": ["a", "b"]})
    feather.write_feather(table, folder / "t.arrow", chunksize=1)
    return "t.arrow"


def bytes_table(folder: Path) -> str:
    names = [name.encode() for name in NAMES]
    pq.write_table(pa.table({"image": names, "caption": [b"a", b"\xe9"]}), folder / "t.parquet")
    return "t.parquet"


# A maker of the table beside the pictures 0.jpg and 1.jpg, the captions packed, and what is counted
# beside pictures without captions.
READ: dict[str, tuple[Callable[[Path], str], list[str], Counts]] = {
    "a first caption that is a null of floats": (
        lines({"image": "0.jpg", "caption": float("inf")}, {"image": "1.jpg", "caption": "b"}),
        ["b"], {"empty_caption": 1, "no_caption": 1},
    ),
    "a first picture that is a number": (
        lines({"image": 7, "caption": "a"}, {"image": "1.jpg", "caption": "b"}),
        ["b"], {"no_path": 1},
    ),
    "half a surrogate": (
        lines({"image": "0.jpg", "caption": "a \ud83d", "\ud83d": ["\ud83d"]},
              {"image": "\udcff.jpg", "caption": "b"}),
        ["a ?"], {"missing_image": 1},
    ),
    "a mark of byte order in a name": (
        write("t.csv", "\ufeff\ufeffimage,caption\n0.jpg,a\n\ufeff1.jpg,b\n"), ["a", "b"], {},
    ),
    "a file of Arrow": (feather_table, ["a", "b"], {}),
    "text as bytes": (bytes_table, ["a"], {"bad_text": 1, "empty_caption": 1, "no_caption": 1}),
    "Excel's line of the delimiter": (
        write("t.csv", "sep=;\r\nimage;caption\r\n0.jpg;a, x\r\n1.jpg;b\r\n"), ["a, x", "b"], {},
    ),
    "commas in a .tsv": (write("t.tsv", "image,caption\n0.jpg,a\n1.jpg,b\n"), ["a", "b"], {}),
    "a number as caption": (
        lines({"image": "0.jpg", "caption": "a"}, {"image": "1.jpg", "caption": 7}),
        ["a", "7"], {},
    ),
    "empty lines before the header": (
        write("t.csv", "\n  \nimage;caption\n0.jpg;a\n1.jpg;b\n"), ["a", "b"], {},
    ),
    "a caption of many letters": (
        write("t.csv", f"image,caption\n0.jpg,a\n1.jpg,{'b' * 200_000}\n"),
        ["a", "b" * 200_000], {},
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        Image.new("RGB", (4, 3), (80 * number, 9, 200)).save(folder / name)
    return folder


def packed(folder: Path, **options: Any) -> tuple[list[str], Counts]:
    out = folder.parent / "out"
    counts = pack(folder, out, **options).counts["findings"]
    members = read_tar(out / "00000.tar")
    texts = [data.decode() for name, data in sorted(members.items()) if name.endswith(".txt")]
    return texts, {reason: entry["count"] for reason, entry in counts.items()}


@pytest.mark.parametrize("name", READ)
def test_what_is_good_in_an_odd_table_is_packed(name: str, folder: Path) -> None:
    make, texts, counts = READ[name]
    assert packed(folder, captions=folder / make(folder)) == (texts, counts)


def test_odd_names_of_pictures_in_a_folder(folder: Path) -> None:
    (folder / "0.jpg").rename(folder / " lead.jpg")
    (folder / " lead.txt").write_text("a")
    with open(os.fsencode(folder) + b"/\xff\xfe.jpg", "wb") as file:
        file.write((folder / "1.jpg").read_bytes())
    assert packed(folder) == (["a"], {"bad_name": 1, "no_caption": 1})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "t.json", '{"images": [{"id": 1, "file_name": "0.jpg"}], "annotations": '
            '[{"image_id": 1}, {"image_id": [1]}]}',
            "'image_id': .1.}\" as number 2 of 'annotations'",
        ),
        (
            "t.json", '{"images": [{"id": 1}], "annotations": []}',
            "as number 1 of 'images', wanted an object with file_name and id",
        ),
        (
            "t.jsonl", '{"image": "0.jpg"}\n{"image": \n',
            r"t.jsonl line 2 .* JSON: \D* at column \d+$",
        ),
        (
            "t.csv", b"image,caption\n" + b"0.jpg,a\n" * 3000 + b"0.jpg,\xe9\n" + b"0.jpg,a\n" * 9,
            r"t.csv line 3002 does not parse: 'utf-8' codec can't decode it .[a-z ]*.: save it as",
        ),
    ],
)  # fmt: skip
def test_an_odd_place_is_named(name: str, text: str | bytes, message: str, folder: Path) -> None:
    write(name, text)(folder)
    with pytest.raises(ValueError, match=message) as error:
        packed(folder, captions=folder / name)
    assert "\n" not in str(error.value)
