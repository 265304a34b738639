"""Tables that are odd in one place: what is good in them is packed, or the place is named."""

from __future__ import annotations

import json
import shlex
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mclclip.data.findings import Findings
from mclclip.data.picture_folders import explain_missing, folder_format
from mclclip.util.files import Roots
from mclclip.verbs.pack import pack
from tests.tars import read_tar, write_tar

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


def document(content: Any) -> Callable[[Path], str]:
    return write("t.json", json.dumps(content))


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
    "empty rows, as spreadsheets write them": (
        write("t.csv", "image,caption\n,\n0.jpg,a\n ,\t\n1.jpg,b\n,\n,\n"), ["a", "b"], {},
    ),
    "a null and a NaN at names of pictures": (
        write("t.json", '{"0.jpg": NaN, "1.jpg": "b", "2.jpg": null}'),
        ["b"], {"empty_caption": 2, "missing_image": 1, "no_caption": 1},
    ),
    "conversations, and a description of no use": (
        lines(*({"image": name, "description": "", "conversations": [
            {"from": "human", "value": "<image>?"}, {"from": "gpt", "value": text}]}
            for name, text in zip(NAMES, "ab", strict=True))),
        ["a", "b"], {},
    ),
    "conversations as texts": (
        lines({"image": "0.jpg",
               "conversations": '[{"from": "human"}, {"from": "gpt", "value": "a"}]'},
              {"image": "1.jpg", "conversations": '[{"role": "assistant", "content": "b"}]'}),
        ["a", "b"], {},
    ),
    "an answer in parts, and a conversation without one": (
        lines({"image": "0.jpg", "conversations": json.dumps(
                [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}])},
              {"image": "1.jpg", "conversations": '[{"from": "human", "value": "?"}]'}),
        ["a"], {"empty_caption": 1, "no_caption": 1},
    ),
    "numbers for names": (
        lines({"image": 0, "caption": "a"}, {"image": 1, "caption": "b"}), ["a", "b"], {},
    ),
    "lines of a Windows shell": (
        write("t.jsonl", '{"image": "0.jpg", "caption": "é"}\r\n'.encode("utf-16")), ["é"], {},
    ),
    "lines in a .json": (
        write("t.json", '{"image": "0.jpg", "caption": "a"}\n{"image": "1.jpg", "caption": "b"}'),
        ["a", "b"], {},
    ),
    "a document in a .jsonl": (
        write("t.jsonl", '\ufeff[\n{"image": "0.jpg", "caption": "a"}]'), ["a"], {},
    ),
    "backslashes of Windows": (
        write("t.csv", "image,caption\nphotos\\0.jpg,a\nphotos\\1.jpg,b\n"), ["a", "b"], {},
    ),
    "empty lines before the header": (
        write("t.csv", "\n  \nimage;caption\n0.jpg;a\n1.jpg;b\n"), ["a", "b"], {},
    ),
    "a list of JSON in a cell": (
        lines({"image": "0.jpg", "caption": json.dumps(["smile \U0001f600", None])},
              {"image": "1.jpg", "caption": "['C:\\users']"}),
        ["smile \U0001f600", "C:\\users"], {"empty_caption": 1},
    ),
    "numbered captions beside a caption": (
        lines({"image": "0.jpg", "caption": "a", "caption_2": "b", "text_1": "no caption"}),
        ["a"], {},
    ),
    "numbers of COCO's pictures as texts": (
        document({"images": [{"id": 1, "file_name": "0.jpg"}, {"id": 2, "file_name": "1.jpg"}],
                  "annotations": [{"image_id": "1", "caption": "a"},
                                  {"image_id": 2.0, "caption": "b"}]}),
        ["a", "b"], {},
    ),
    "a caption of two lines with as many tabs as the header": (
        write("t.tsv", 'image\tcaption\n0.jpg\t"first\nsecond\tafter a tab"\n1.jpg\t"b\nc" \n'),
        ["first\nsecond\tafter a tab", "b\nc"], {},
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
    counts.pop("unnamed_picture", None)  # tables here name some pictures of the folder
    return texts, {reason: entry["count"] for reason, entry in counts.items()}


@pytest.mark.parametrize("name", READ)
def test_what_is_good_in_an_odd_table_is_packed(name: str, folder: Path) -> None:
    make, texts, counts = READ[name]
    assert packed(folder, captions=folder / make(folder)) == (texts, counts)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "t.json", '{"images": [{"id": 1, "file_name": "0.jpg"}], "annotations": '
            '[{"image_id": 1}, {"image_id": [1]}]}',
            r"t\.json annotation 2",
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


def test_columns_that_may_hold_captions_are_offered_and_read_if_asked_for(folder: Path) -> None:
    pq.write_table(pa.table({"image": [*NAMES], "caption": [1984, 7]}), folder / "t.parquet")
    two = folder / lines({"image": "0.jpg", "short_caption": "a", "long_caption": "b"})(folder)
    for table, column, message, read in (
        (folder / "t.parquet", "caption", "'caption', such as 1984.*--caption-column caption",
         ["1984", "7"]),
        (two, "long_caption", "'long_caption'.*--caption-column short_caption", ["b"]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            packed(folder, captions=table)
        assert packed(folder, captions=table, caption_column=column)[0] == read
        shutil.rmtree(folder.parent / "out")


def test_a_column_of_structs_is_refused_and_one_of_nulls_has_no_captions(folder: Path) -> None:
    for value, name in (({"en": "a"}, "t.parquet"), (None, "null.parquet")):
        pq.write_table(pa.table({"image": ["0.jpg"], "caption": [value]}), folder / name)
    with pytest.raises(ValueError, match="'caption', such as 'struct<en: string>'"):
        packed(folder, captions=folder / "t.parquet")
    counts = {"empty_caption": 1, "no_caption": 1}
    assert packed(folder, captions=folder / "null.parquet") == ([], counts)


def test_columns_of_a_list_of_json_are_chosen_as_those_of_any_table(folder: Path) -> None:
    rows = [{"img": "0.jpg", "title": "IMG_0", "caption": "real", "id": 7}]
    table = folder / document(rows)(folder)
    with pytest.raises(ValueError, match="--path-column img"):
        packed(folder, captions=table)
    with pytest.raises(ValueError, match="'title' and 'caption'.*--caption-column title"):
        packed(folder, captions=table, path_column="img")
    with pytest.raises(ValueError, match="no column 'igm', .* did you mean 'img'"):
        packed(folder, captions=table, path_column="igm")
    assert packed(folder, captions=table, path_column="img", caption_column="caption")[0] == [
        "real"
    ]
    facts = json.loads(read_tar(folder.parent / "out" / "00000.tar")["000000000.json"])
    assert (facts["title"], facts["id"]) == ("IMG_0", 7)


def tar(folder: Path, **members: str) -> Path:
    data = (folder / "0.jpg").read_bytes()
    texts = [(f"0.{suffix}", text.encode()) for suffix, text in members.items()]
    return write_tar(folder.parent / "tars" / "00000.tar", [("0.jpg", data), *texts]).parent


def test_captions_of_a_tar(folder: Path) -> None:
    """An empty list hides no text, and of several fields the user chooses one."""
    assert packed(tar(folder, json='{"captions": []}', txt="the text"))[0] == ["the text"]
    source = tar(folder, json='{"caption": "real", "title": "IMG_0"}')
    with pytest.raises(ValueError, match="'title' and 'caption'.*--caption-column title"):
        pack(source, folder.parent / "two")
    pack(source, folder.parent / "two", caption_column="caption")
    assert read_tar(folder.parent / "two" / "00000.tar")["000000000.txt"] == b"real"


def test_karpathys_splits_stay_with_the_samples(folder: Path) -> None:
    images = [
        {"filename": name, "split": split, "sentences": [{"raw": split}, {"raw": None}]}
        for name, split in zip(NAMES, ("train", "test"), strict=True)
    ]
    found = packed(folder, captions=folder / document({"images": images})(folder))
    assert found == (["train", "test"], {"empty_caption": 2})
    members = read_tar(folder.parent / "out" / "00000.tar")
    facts = [json.loads(data) for name, data in sorted(members.items()) if name.endswith("json")]
    assert [each["split"] for each in facts] == ["train", "test"]


def parquet_of(folder: Path, name: str, column: str = "caption") -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    data = (folder.parent / "photos" / "0.jpg").read_bytes() + name.encode()
    pq.write_table(pa.table({"image": [data], column: [name]}), file)


@pytest.mark.parametrize(
    "names",
    [
        ["part-00000-8c1f7e2a-aa11-4c3d-9f00-c000.snappy.parquet",
         "part-00001-8c1f7e2a-aa11-4c3d-9f00-c000.snappy.parquet"],
        ["0/00000.parquet", "1/00000.parquet"],
        ["A.PARQUET", "A2.PARQUET"],
    ],
)  # fmt: skip
def test_the_files_of_one_data_set_are_read_together(names: list[str], folder: Path) -> None:
    data = folder.parent / "data"
    for name in names:
        parquet_of(data, name)
    assert packed(data)[0] == names


def test_the_offered_pattern_is_typed_as_it_is_and_leaves_the_other_split_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    data = Path("a [1]")
    for name in ("0/0.parquet", "1/1.parquet", "val/2.parquet"):
        parquet_of(folder.parent / data, name)
    with pytest.raises(ValueError, match="choose one") as error:
        pack(data, Path("out"))
    words = shlex.split(str(error.value).rpartition(": ")[2])
    assert packed(Path(words[2]))[0] == ["0/0.parquet", "1/1.parquet"]


def test_a_column_that_one_file_lacks_is_named(folder: Path) -> None:
    data = folder.parent / "data"
    parquet_of(data, "0.parquet")
    parquet_of(data, "1.parquet", column="text")
    with pytest.raises(ValueError, match=r"1\.parquet has no column 'caption'"):
        packed(data)


def test_shards_of_an_unfinished_pack_are_refused(folder: Path) -> None:
    packed(folder, captions=folder / lines({"image": "0.jpg", "caption": "a"})(folder))
    out = folder.parent / "out"
    (out / "manifest.json").rename(out / "in_progress.json")
    for source in (out, out / "*.tar"):
        with pytest.raises(ValueError, match="out is not finished"):
            pack(source, folder.parent / "two")
    (out / "00000.tar").unlink()
    with pytest.raises(ValueError, match="out is not finished"):  # and no table in_progress.json
        pack(out, folder.parent / "two")


# --- names that are spelt otherwise than on disk -----------------------------------------------


NFC, NFD = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))


def test_the_spelling_on_disk_is_said(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / f"caf{NFD}.jpg").touch()
    (tmp_path / "a.jpg").touch()
    for name in (f"sub/caf{NFC}.jpg", f"sub/caf{NFD}", f"SUB/caf{NFC}.JPG"):
        explained = explain_missing(tmp_path, name)
        assert explained is not None and f"sub/caf{NFD}.jpg" in explained
    for name in ("a.jpg", "b.jpg", "sub/a.jpg", "", "..", "a.jpg/b"):
        assert explain_missing(tmp_path, name) is None


def test_accents_that_are_stored_apart_are_found(folder: Path) -> None:
    (folder / "0.jpg").rename(folder / f"caf{NFD}.jpg")
    (folder / "t.csv").write_text(f"image,caption\ncaf{NFC}.jpg,a\ncaf{NFC},b\n1.jpg,c\n")
    assert packed(folder, captions=folder / "t.csv") == (["a", "c"], {})


@pytest.mark.parametrize(("text", "warns"), [("0 0.5 0.5 0.1 0.1", True), ("2 dogs", False)])
def test_texts_of_numbers_alone_may_be_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, warns: bool
) -> None:
    for number in range(20):
        (tmp_path / f"{number}.jpg").touch()
        (tmp_path / f"{number}.txt").write_text(text)
    folder_format(tmp_path, Roots(tmp_path))
    assert any(record.levelname == "WARNING" for record in caplog.records) == warns


def test_pictures_that_share_a_text_are_counted(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.png", "b.jpg", "b.png"):
        (tmp_path / name).touch()
    for name in ("a.txt", "b.jpg.txt", "b.png.txt"):
        (tmp_path / name).write_text(name)
    rows = folder_format(tmp_path, Roots(tmp_path)).rows(findings := Findings())
    texts = {fields["file_name"]: fields["text"] for _, fields in rows}
    assert texts["a.jpg"] == texts["a.png"] == ["a.txt"]
    assert findings.to_json() == {"shared_text": {"count": 1, "examples": ["a.png"]}}
