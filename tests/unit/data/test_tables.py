"""Every format in which people have pictures with captions: packed alike, and refused in a line."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mclclip.data import tables
from mclclip.verbs.pack import pack
from tests.tars import read_tar, write_tar

TEXTS = {
    "sub/a.jpg": ["a red square", "one more"],
    "b.png": ["blue, with a comma"],
    "c.webp": ["grün\nund gelb"],
}
PAIRS = [(name, text) for name, texts in TEXTS.items() for text in texts]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "sub").mkdir(parents=True)
    for number, name in enumerate(TEXTS):
        Image.new("RGB", (4, 3), (80 * number, 9, 200)).save(folder / name)
    return folder


def write_csv(path: Path, columns: list[str], rows: Any) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(
            [columns, *rows]
        )
    return path


def write_lines(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_arrow(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def hub_table(photos: Path, image: str = "image") -> pa.Table:
    """As the Hub's data sets are: a struct of bytes and path, and a list of captions."""
    images = [{"bytes": (photos / name).read_bytes(), "path": name} for name in TEXTS]
    ids = pa.array([1.0, float("nan"), 3.0])
    return pa.table({image: images, "caption": [*TEXTS.values()], "score": ids})


def flat_table(photos: Path) -> pa.Table:
    """A row for each caption, with the bytes of its image alone."""
    data = [(photos / name).read_bytes() for name, _ in PAIRS]
    return pa.table({"jpg": data, "text": [text for _, text in PAIRS]})


def coco(path: Path) -> Path:
    images = [{"id": n, "file_name": name} for n, name in enumerate(TEXTS)]
    ids = {image["file_name"]: image["id"] for image in images}
    notes = [{"image_id": ids[name], "caption": text} for name, text in PAIRS]
    path.write_text(json.dumps({"images": images, "annotations": notes}))
    return path


def parquet(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)
    return path


def shards(folder: Path, photos: Path, kind: str) -> Path:
    members = []
    for number, (name, texts) in enumerate(TEXTS.items()):
        members.append((f"{number}.{Path(name).suffix[1:]}", (photos / name).read_bytes()))
        facts = {"json:captions": {"captions": texts, "url": "u"}, "txt": {"caption": "x"}}
        members.append((f"{number}.json", json.dumps(facts[kind]).encode()))
        members.append((f"{number}.txt", texts[0].encode()))
    write_tar(folder / "00000.tar", members[:6])
    write_tar(folder / "00001.tar", members[6:])
    return folder


def saved(folder: Path, photos: Path) -> Path:
    write_arrow(folder / "data-00000-of-00001.arrow", hub_table(photos))
    (folder / "state.json").write_text("{}")
    (folder / "dataset_info.json").write_text("{}")
    return folder


def pathed(column: str, text: str) -> Any:
    return [{column: name, text: texts} for name, texts in TEXTS.items()]


Made = Callable[[Path, Path], tuple[Path, Path | None]]
FORMATS: dict[str, Made] = {
    "csv": lambda at, photos: (photos, write_csv(at / "t.csv", ["image", "caption"], PAIRS)),
    "csv alone": lambda at, photos: (
        write_csv(at / "t.csv", ["Path", "Title"], [(f"photos/{n}", t) for n, t in PAIRS]), None
    ),
    "jsonl": lambda at, photos: (
        photos, write_lines(at / "t.jsonl", pathed("image_path", "captions"))
    ),
    "parquet of paths": lambda at, photos: (
        photos, parquet(at / "t.parquet", pa.Table.from_pylist(pathed("url", "caption")))
    ),
    "parquet of the hub": lambda at, photos: (parquet(at / "t.parquet", hub_table(photos)), None),
    "parquet of bytes": lambda at, photos: (parquet(at / "t.parquet", flat_table(photos)), None),
    "saved data set": lambda at, photos: (saved(at / "saved", photos), None),
    "shards": lambda at, photos: (shards(at / "tars", photos, "json:captions"), None),
    "pattern of shards": lambda at, photos: (
        shards(at / "tars", photos, "json:captions") / "{00000..00001}.tar", None
    ),
    "coco": lambda at, photos: (photos, coco(at / "captions.json")),
}  # fmt: skip


def packed(out: Path) -> dict[bytes, list[str]]:
    """Bytes of every image with its captions, in order."""
    found = {}
    for path in sorted(out.glob("*.tar")):
        members = read_tar(path)
        for name, data in members.items():
            if not name.endswith((".json", ".txt")):
                key = name.partition(".")[0]
                found[data] = json.loads(members[f"{key}.json"])["captions"]
                assert members[f"{key}.txt"].decode() == found[data][0]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_pixels_and_captions_whatever_the_format(
    name: str, tmp_path: Path, photos: Path
) -> None:
    source, captions = FORMATS[name](tmp_path, photos)
    manifest = pack(source, tmp_path / "out", captions=captions, samples_per_shard=2)
    assert packed(tmp_path / "out") == {
        (photos / file).read_bytes(): texts for file, texts in TEXTS.items()
    }
    assert manifest.counts == {"samples": 3, "captions": 4, "shards": 2, "findings": {}}
    assert pack(source, tmp_path / "out", captions=captions, samples_per_shard=2) == manifest


def test_texts_beside_pictures(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which count by their content, among many files too, and are not read through a link."""
    for name, texts in TEXTS.items():
        (photos / name).with_suffix(".txt").write_text(f" {texts[0]}\n", encoding="utf-8-sig")
    (photos / "none.jpg").write_bytes((photos / "b.png").read_bytes())
    (tmp_path / "secret").write_text("a private text")
    (photos / "none.txt").symlink_to(tmp_path / "secret")
    counts = pack(photos, tmp_path / "out").counts
    assert counts["samples"] == 4 and counts["captions"] == 3
    assert all(b"private" not in path.read_bytes() for path in (tmp_path / "out").glob("*.tar"))
    (photos / "sub" / "a.txt").write_text("another caption")
    for few in (3, 1000):
        monkeypatch.setattr(tables, "_FEW", few)
        with pytest.raises(ValueError, match=r"sub/a\.txt.*--force" if few > 3 else "--force"):
            pack(photos, tmp_path / "out")


def texts_of(folder: Path) -> list[list[str]]:
    """The captions of each packed sample."""
    members = [m for path in sorted(folder.glob("*.tar")) for m in read_tar(path).items()]
    return [json.loads(data)["captions"] for name, data in members if name.endswith(".json")]


def test_lines_of_texts_are_captions_where_nearly_all_have_as_many(
    tmp_path: Path, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = (photos / "b.png").read_bytes()
    lined, mixed = tmp_path / "lined", tmp_path / "mixed"
    for folder in (lined, mixed):
        folder.mkdir()
        for number in range(12):
            (folder / f"{number}.png").write_bytes(data)
            lines = "one\ntwo\n" if folder == lined or number % 2 else "one\n"
            (folder / f"{number}.txt").write_text(lines)
    members = [(path.name, path.read_bytes()) for path in sorted(lined.iterdir())]
    for source in (lined, write_tar(tmp_path / "tars" / "0.tar", members)):
        pack(source, tmp_path / f"out_{source.stem}")
        assert texts_of(tmp_path / f"out_{source.stem}") == [["one", "two"]] * 12
    pack(mixed, tmp_path / "out")
    assert sorted(texts_of(tmp_path / "out")) == [["one"]] * 6 + [["one\ntwo"]] * 6


def test_a_tar_with_other_captions_of_the_same_size_is_another_input(
    tmp_path: Path, photos: Path
) -> None:
    data = (photos / "b.png").read_bytes() + bytes(20_000)
    tar = tmp_path / "tars" / "0.tar"
    write_tar(tar, [("a.png", data), ("a.txt", b"a cat"), ("b.png", data), ("b.txt", b"a dog")])
    first = pack(tar, tmp_path / "out")
    assert pack(tar, tmp_path / "out") == first
    write_tar(tar, [("a.png", data), ("a.txt", b"a hat"), ("b.png", data), ("b.txt", b"a log")])
    with pytest.raises(ValueError, match="--force"):
        pack(tar, tmp_path / "out")


def test_long_texts_are_no_names_of_files(tmp_path: Path, photos: Path) -> None:
    long = "a long description " * 30
    table = write_csv(tmp_path / "a.csv", ["about", "picture"], [[long, "b.png"]])
    with pytest.raises(ValueError, match="--path-column picture"):
        pack(photos, tmp_path / "out", captions=table)
    table = write_csv(tmp_path / "b.csv", ["image", "text"], [[f"{long}.png", "a"], ["b.png", "b"]])
    findings = pack(photos, tmp_path / "out", captions=table).counts["findings"]
    assert findings["missing_image"]["count"] == 1


def test_a_struct_of_the_hub_opens_no_file_outside(tmp_path: Path, photos: Path) -> None:
    """Data sets of the Hub may hold paths alone."""
    (tmp_path / "key.png").write_bytes((photos / "b.png").read_bytes())
    images = [{"bytes": None, "path": path} for path in ("b.png", "../key.png", None)]
    table = parquet(photos / "t.parquet", pa.table({"image": images, "caption": ["a", "b", "c"]}))
    counts = pack(table, tmp_path / "out").counts
    assert {r: e["count"] for r, e in counts["findings"].items()} == {
        "outside_folder": 1, "no_path": 1,
    }  # fmt: skip
    assert packed(tmp_path / "out") == {(photos / "b.png").read_bytes(): ["a"]}


def test_rows_of_bytes_keep_further_columns(tmp_path: Path, photos: Path) -> None:
    source = parquet(tmp_path / "t.parquet", hub_table(photos))
    pack(source, tmp_path / "out")
    members = read_tar(tmp_path / "out" / "00000.tar")
    facts = [json.loads(data) for name, data in members.items() if name.endswith("json")]
    assert [fact["score"] for fact in facts] == [1.0, None, 3.0]
    assert [fact["image"] for fact in facts] == [*TEXTS]


def test_other_bytes_beside_names_of_pictures(tmp_path: Path, photos: Path) -> None:
    """A hash is no picture; of a thumbnail and a name the user chooses."""
    names, data = [*TEXTS], [(photos / name).read_bytes() for name in TEXTS]
    columns = {"image": names, "caption": names, "md5": [bytes(16)] * len(names)}
    hashes = parquet(photos / "hashes.parquet", pa.table(columns))
    pack(photos, tmp_path / "out", captions=hashes)
    assert packed(tmp_path / "out") == dict(zip(data, ([name] for name in names), strict=True))
    thumbnails = parquet(photos / "thumbs.parquet", pa.table(columns | {"thumbnail": data[::-1]}))
    with pytest.raises(ValueError, match="'image' and 'thumbnail', choose one") as caught:
        pack(photos, tmp_path / "other", captions=thumbnails)
    assert "--path-column image" in str(caught.value)
    columns = {"image": [7, 8, 9], "jpg": data, "text": names}  # a number beside bytes is no name
    numbered = parquet(photos / "ids.parquet", pa.table(columns))
    pack(photos, tmp_path / "numbered", captions=numbered)
    assert packed(tmp_path / "numbered") == packed(tmp_path / "out")


def hub_splits(at: Path, photos: Path) -> Path:
    for split in ("test", "train"):
        parquet(at / f"hub/data/{split}-00000-of-00001.parquet", hub_table(photos))
    return at / "hub"


def saved_splits(at: Path, photos: Path) -> Path:
    for split in ("train", "valid"):
        saved(at / "saved" / split, photos)
    return at / "saved"


def tables_of_splits(photos: Path) -> Path:
    for split in ("test", "train"):
        (photos / split).mkdir()
        write_csv(photos / split / "metadata.csv", ["file_name", "text"], PAIRS)
    write_csv(photos / "classes.csv", ["id", "name"], [["0", "square"]])
    return photos


AMBIGUOUS: dict[str, tuple[Made, str, str]] = {
    "two columns of paths": (
        lambda at, p: (p, write_csv(at / "t.csv", ["image", "path", "text"], [["b.png"] * 3])),
        "images in 'image' and 'path', choose one",
        "mclclip pack photos --captions t.csv --out out --path-column image",
    ),
    "an odd name": (
        lambda at, p: (p, write_csv(at / "t.csv", ["id", "my file"], [["7", "b.png"]])),
        "no column of images",
        "mclclip pack photos --captions t.csv --out out --path-column 'my file' "
        "--caption-column COLUMN",
    ),
    "an odd name alone": (
        lambda at, p: (p, write_csv(at / "t.csv", ["my file"], [["b.png"]])),
        "no column of images",
        "mclclip pack photos --captions t.csv --out out --path-column 'my file'",
    ),
    "an odd name beside captions": (
        lambda at, p: (p, write_csv(at / "t.csv", ["text", "my file"], [["7", "b.png"]])),
        "no column of images",
        "mclclip pack photos --captions t.csv --out out --path-column 'my file'",
    ),
    "two columns of captions": (
        lambda at, p: (
            p, write_lines(at / "t.jsonl", [{"image": "b.png", "text": "x", "title": "y"}])
        ),
        "captions in 'title' and 'text', choose one",
        "mclclip pack photos --captions t.jsonl --out out --caption-column title",
    ),
    "a title beside numbered captions": (
        lambda at, p: (
            p, write_csv(at / "t.csv", ["image", "title", "caption_0"], [["b.png", "x", "y"]])
        ),
        "captions in 'title' and 'caption_0', choose one",
        "mclclip pack photos --captions t.csv --out out --caption-column title",
    ),
    "a file beside an address": (
        lambda at, p: (
            p, write_csv(at / "t.csv", ["text", "url", "file"], [["x", "http://h/1.png", "b.png"]])
        ),
        "no column of images",
        "mclclip pack photos --captions t.csv --out out --path-column file",
    ),
    "tables of several splits among pictures": (
        lambda at, p: (tables_of_splits(p), None),
        "pictures without texts beside them, and train/metadata.csv",
        "mclclip pack photos --out out --captions photos/train/metadata.csv",
    ),
    "a table among pictures": (
        lambda at, p: (write_csv(p / "captions.csv", ["image", "text"], PAIRS).parent, None),
        "pictures without texts beside them, and captions.csv",
        "mclclip pack photos --out out --captions photos/captions.csv",
    ),
    "shards among pictures": (
        lambda at, p: (write_tar(p / "x.tar", []).parent, None),
        "holds pictures, and x.tar too",
        "mclclip pack 'photos/**/*.tar' --out out",
    ),
    "splits of the hub": (
        lambda at, p: (hub_splits(at, p), None),
        "several data sets or splits (data/test, data/train), choose one",
        "mclclip pack 'hub/data/train*.parquet' --out out",
    ),
    "names from another folder": (
        lambda at, p: (coco(at / "notes" / "c.json"), None),
        "Its files are named from notes; if they lie in another FOLDER",
        "mclclip pack FOLDER --captions notes/c.json --out out",
    ),
    "saved splits": (
        lambda at, p: (saved_splits(at, p), None),
        "holds the splits train, valid, choose one",
        "mclclip pack saved/train --out out",
    ),
    "a folder of a table": (
        lambda at, p: (coco(at / "notes" / "c.json").parent, None),
        "holds no pictures, but tables such as c.json",
        "mclclip pack notes/c.json --out out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_is_ambiguous_is_one_line_with_the_command(
    name: str, tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    made, message, command = AMBIGUOUS[name]
    source, captions = made(tmp_path, photos)
    paths = [path and path.relative_to(tmp_path) for path in (source, captions)]
    with pytest.raises(ValueError) as error:
        pack(paths[0] or source, Path("out"), captions=paths[1])
    assert message in str(error.value) and str(error.value).endswith(f": {command}")
    assert "\n" not in str(error.value) and not Path("out").exists()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t.parquet", b"PAR1 is not all of it", r"t\.parquet cannot be read .*fetch or write it"),
        ("t.jsonl", b"1\n", "line 1 is not an object of columns"),
        ("t.jsonl", b'{"a":' * 900 + b"1" + b"}" * 900, "line 1 is nested deeper than 64 levels"),
        ("t.json", b"{}", "holds neither COCO captions"),
        ("t.json", b'{"b.png": "a", "c.png": 3}', "has 3 at 'c.png'"),
        ("t.json", b"[]", "t.json is empty"),
        ("t.json", b'{"image": {"0": "b.png"}, "text": {"0": "a"}}', "holds neither COCO captions"),
        ("t.json", b'{"b.png": "x", "b.png": "y"}', "b.png"),
        (
            "t.json",
            b'{"images": [{"id": 1, "file_name": "b.png"}, {"id": 1, "file_name": "c.webp"}], '
            b'"annotations": []}',
            "the id 1 to two images",
        ),
        ("t.tsv", b"b.png\tc.webp\n", "its first line names several pictures"),
        ("t.xlsx", b"PK", "save it as CSV"),
        ("t.tar", b"no tar" * 100, "no usable image in .*unreadable_shard"),
        ("0.tar.gz", b"\x1f\x8b", "compressed"),
        ("t.docx", b"PK", "ends in '.docx', expected one of"),
        ("t.csv", b"", r"t\.csv is empty"),
        ("t.csv", b"image,caption,caption\nb.png,a,b\n", "'caption' twice"),
        ("t.csv", b"b.png,0,a\nc.webp,1,b\n", "has no header.*filepath,column_2,title"),
        ("t.csv", b"image,text\nb.png,caf\xe9\n", "does not parse: .*: save it as UTF-8"),
        ("t.csv", b"url,text\nhttp://x/a.jpg,a\n", "has addresses in 'url': fetch the images"),
    ],
)
def test_damaged_files_are_one_line(
    name: str, data: bytes, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        pack(tmp_path / name, tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


# --- columns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"caption_0": "a", "caption_1": "b"}, {}),
        ({"short": "a", "long": "b"}, {"caption_column": ["short", "long"]}),
        ({"caption": ["a", "b"]}, {}),
        ({"caption": "['a', \"b\"]"}, {}),
        ({"sentences": [{"raw": "a", "id": 1}, {"raw": "b", "id": 2}]},
         {"caption_column": "sentences.raw"}),
    ],
)  # fmt: skip
def test_several_captions_of_a_row(
    columns: dict[str, Any], options: dict[str, Any], tmp_path: Path, photos: Path
) -> None:
    data = (photos / "b.png").read_bytes()
    table = parquet(tmp_path / "t.parquet", pa.Table.from_pylist([{"image": data, **columns}]))
    pack(table, tmp_path / "out", **options)
    assert packed(tmp_path / "out") == {data: ["a", "b"]}


def test_columns_of_lists_are_read_or_named_with_their_type(tmp_path: Path, photos: Path) -> None:
    data = (photos / "b.png").read_bytes()
    one = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pictures = pa.array([[{"bytes": data, "path": None}]], pa.list_(one))
    table = pa.table({"images": pictures, "caption": ["b.png"]})
    with pytest.raises(ValueError, match="images of type list") as error:
        pack(parquet(photos / "t.parquet", table), tmp_path / "out")
    assert "--path-column caption" not in str(error.value)
    fixed = pa.array([["a", "b"]], pa.list_(pa.string(), 2))
    pack(
        parquet(tmp_path / "f.parquet", pa.table({"image": [data], "text": fixed})), tmp_path / "o"
    )
    assert packed(tmp_path / "o") == {data: ["a", "b"]}


FLICKR8K = "b.png#0\tA dog ; a cat , both .\nb.png#1\tTwo\nsub/a.jpg#0\tThree | four\n"


@pytest.mark.parametrize(
    ("name", "text", "captions"),
    [
        ("Flickr8k.token.txt", FLICKR8K, [["A dog ; a cat , both .", "Two"], ["Three | four"]]),
        ("results.csv", "image_name| comment_number| comment\nb.png| 0| a\nb.png| 1| b\n",
         [["a", "b"]]),
        ("captions.txt", 'image,caption\nb.png,"A, b"\nb.png,Two\n', [["A, b", "Two"]]),
        ("list.csv", '\n"b.png",a; b\nsub/a.jpg,c\n', [["a; b"], ["c"]]),
        ("list.csv", "\ufeffb.png | a, b\nsub/a.jpg | c\n", [["a, b"], ["c"]]),
        ("t.csv", "image,caption\nb.png,A dog, a cat,two\n", [["A dog, a cat, two"]]),
        ("turned.tsv", "one\tb.png\ntwo\tsub/a.jpg\n", [["one"], ["two"]]),
        ("f.token", 'b.png#0\t"A child plays\nsub/a.jpg#0\tTwo\n', [['"A child plays'], ["Two"]]),
        ("f.csv", 'b.png#0,"A child\nsub/a.jpg#0,Two\n', [["A child"], ["Two"]]),
        ("pandas.tsv", '"b.png"\t"A ""big"" dog"\nsub/a.jpg\tTwo\n', [['A "big" dog'], ["Two"]]),
    ],
)  # fmt: skip
def test_tables_without_a_header_or_a_suffix_of_their_own(
    name: str, text: str, captions: list[list[str]], tmp_path: Path, photos: Path
) -> None:
    (photos / name).write_text(text)
    pack(photos, tmp_path / "out", captions=photos / name)
    assert [*packed(tmp_path / "out").values()] == captions


def test_a_text_is_not_of_a_picture_in_another_folder(tmp_path: Path, photos: Path) -> None:
    """Beside its path a text may have the end of it, as images/train/a.jpg and train/a.txt have."""
    texts = tmp_path / "texts"
    (texts / "other").mkdir(parents=True)
    (texts / "other" / "a.txt").write_text("of other/a")
    (texts / "c.txt").write_text("of c")
    counts = pack(photos, tmp_path / "o", captions=texts).counts
    assert counts["captions"] == 1 and counts["findings"]["lone_text"]["count"] == 1
    (tmp_path / "all").mkdir()
    photos = photos.rename(tmp_path / "all" / "in")
    (texts / "sub").mkdir()
    (texts / "sub" / "a.txt").write_text("of sub/a")
    (photos / "b.txt").write_text("beside a picture, and not read")
    counts = pack(tmp_path / "all", tmp_path / "p", captions=texts).counts
    assert counts["captions"] == 2 and counts["findings"]["lone_text"]["count"] == 1
    assert counts["findings"]["other_file"]["examples"] == ["in/b.txt"]


def test_two_folders_of_another_machine_are_told_apart(tmp_path: Path, photos: Path) -> None:
    def captions(*rows: list[str], root: Path) -> list[list[str]]:
        write_csv(tmp_path / "t.csv", ["image", "caption"], rows)
        out = tmp_path / str(len(os.listdir(tmp_path)))
        pack(root, out, captions=tmp_path / "t.csv")
        return [*packed(out).values()]

    other, right = ["/d/other/b.png", "wrong"], ["/d/photos/b.png", "right"]
    assert captions(other, right, root=photos) == [["right"]]
    deeper = ["/d/photos/more/b.png", "wrong"]
    assert captions(deeper, right, ["/d/photos/sub/a.jpg", "a"], root=photos) == [["right"], ["a"]]
    with pytest.raises(ValueError, match="/d/one/ and /d/two/"):
        captions(["/d/one/b.png", "?"], ["/d/two/b.png", "?"], root=photos)


def test_a_text_is_of_no_two_pictures(tmp_path: Path, photos: Path) -> None:
    """Nor is a name without a suffix."""
    shutil.copy(photos / "b.png", photos / "sub" / "b.png")
    (tmp_path / "texts" / "sub").mkdir(parents=True)
    (tmp_path / "texts" / "sub" / "b.txt").write_text("one")
    assert pack(photos, tmp_path / "o", captions=tmp_path / "texts").counts["captions"] == 1
    (tmp_path / "texts").rename(tmp_path / "renamed")
    pack(photos, tmp_path / "o", captions=tmp_path / "renamed")  # the same data
    shutil.copy(photos / "c.webp", photos / "b.webp")
    write_csv(tmp_path / "t.csv", ["image", "caption"], [["b", "x"], ["c", "y"]])
    counts = pack(photos, tmp_path / "out", captions=tmp_path / "t.csv").counts
    assert packed(tmp_path / "out") == {(photos / "c.webp").read_bytes(): ["y"]}
    assert counts["findings"]["missing_image"]["examples"] == ["b"]


JSON = {
    "by name": {"b.png": "x", "sub/a.jpg": "y"},
    "by name without suffix": {"b": {"caption": "x"}, "sub/a": {"caption": "y"}},  # kohya's
    "by number": {"1": {"image": "b.png", "text": "x"}, "2": {"image": "sub/a.jpg", "text": "y"}},
    "below one name": {"data": [{"image": "b.png", "text": "x"}, {"image": "sub/a", "text": "y"}]},
    "pairs": [["b.png", "x"], ["sub/a.jpg", "y"]],
    "beside a version": {
        "version": "1.0",
        "rows": [{"path": "b.png", "text": "x"}, {"path": "sub/a.jpg", "text": "y"}],
    },
    "without a caption": {"b.png": "x", "sub/a.jpg": "y", "c.png": None},
}


@pytest.mark.parametrize("form", JSON)
def test_forms_of_json(form: str, tmp_path: Path, photos: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(JSON[form]))
    pack(photos, tmp_path / "out", captions=tmp_path / "t.json")
    images = ((photos / name).read_bytes() for name in ("b.png", "sub/a.jpg"))
    assert packed(tmp_path / "out") == dict(zip(images, [["x"], ["y"]], strict=True))


@pytest.mark.parametrize(
    "start", ["/home/me//photos/", "C:\\Users\\me\\photos\\", "\\\\nas\\photos\\"]
)
def test_absolute_names_of_another_machine(start: str, tmp_path: Path, photos: Path) -> None:
    """The folder that they begin with there stands for the folder here, and for nothing else."""
    names = ["sub/a.jpg", "b.png", "gone/a.jpg"]
    names = [start + (name.replace("/", "\\") if "\\" in start else name) for name in names]
    write_csv(tmp_path / "t.csv", ["image", "caption"], [[name, name[-5]] for name in names])
    counts = pack(photos, tmp_path / "out", captions=tmp_path / "t.csv").counts
    images = ((photos / name).read_bytes() for name in ("sub/a.jpg", "b.png"))
    assert packed(tmp_path / "out") == dict(zip(images, [["a"], ["b"]], strict=True))
    assert counts["findings"]["missing_image"]["count"] == 1


@pytest.mark.parametrize("root", ["here", "/home/me/photos"])
def test_file_urls_are_the_paths_in_them(root: str, tmp_path: Path, photos: Path) -> None:
    start = photos.as_uri() if root == "here" else f"file://{root}"
    rows = [[f"{start}/sub/a.jpg", "a"], [f"{start}/%62.png", "b"]]
    write_csv(tmp_path / "t.csv", ["image", "caption"], rows)
    pack(photos, tmp_path / "out", captions=tmp_path / "t.csv")
    images = ((photos / name).read_bytes() for name in ("sub/a.jpg", "b.png"))
    assert packed(tmp_path / "out") == dict(zip(images, [["a"], ["b"]], strict=True))


def test_texts_in_a_folder_of_their_own(tmp_path: Path, photos: Path) -> None:
    texts = photos / "texts"
    (texts / "sub").mkdir(parents=True)
    (texts / "other.txt").write_text("of no picture")
    with pytest.raises(ValueError, match="none of the 1 texts"):
        pack(photos, tmp_path / "out", captions=texts)
    (texts / "t.csv").write_text("image,caption\n")
    with pytest.raises(ValueError, match=r"holds the table t\.csv: .*--captions .*t\.csv"):
        pack(photos, tmp_path / "out", captions=texts)
    (texts / "t.csv").unlink()
    (texts / "other.txt").unlink()
    (texts / "b.txt").write_text("one")
    with pytest.raises(ValueError, match="whose files are packed"):
        pack(photos, photos / "out", captions=texts)
    (texts / "none.txt").write_text("of no picture")
    with pytest.raises(ValueError, match="--captions .*texts"):
        pack(photos, tmp_path / "out")
    (texts / "sub" / "a.txt").write_text("by its path")
    (texts / "a.txt").write_text("of another picture")
    (texts / "c.webp.txt").write_text("by its whole name")
    counts = pack(photos, tmp_path / "out", captions=texts).counts
    captions = sorted(packed(tmp_path / "out").values())
    assert captions == [["by its path"], ["by its whole name"], ["one"]]
    assert counts["findings"]["lone_text"]["count"] == 2
