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

from mclclip.pack import pack
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
        write("t.csv", "image,caption\n0.jpg,a\n\ufeff1.jpg,b\n"), ["a", "b"], {},
    ),
    "a file of Arrow": (feather_table, ["a", "b"], {}),
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
