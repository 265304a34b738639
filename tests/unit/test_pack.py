"""The pack verb: a table and a folder of images become shards that the index reads."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mclclip import config
from mclclip.data import tables
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Manifest, read_manifest
from mclclip.util.remake import Remake
from mclclip.verbs import index
from mclclip.verbs.pack import pack
from tests.tars import read_tar

Rows = list[list[str]]


def write_table(path: Path, rows: Rows, delimiter: str = ",") -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.jpg", "b.PNG", "sub/c.webp", "d.jpeg"):
        (folder / name).write_bytes(f"bytes of {name}".encode())
    (folder / "text.heic").write_bytes(b"gif")
    (folder / "empty.jpg").write_bytes(b"")
    return folder


def run(tmp_path: Path, images: Path, rows: Rows, **options: Any) -> Manifest:
    table = write_table(tmp_path / "t.csv", [["filepath", "title"], *rows])
    return pack(images, tmp_path / "out", captions=table, **options)


def test_images_byte_for_byte_with_running_keys(tmp_path: Path, images: Path) -> None:
    rows = [["sub/c.webp", "one"], ["b.PNG", " two, with a comma "], ["a.jpg", "drei\nö"]]
    manifest = run(tmp_path, images, rows, samples_per_shard=2)
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["00000.tar", "00001.tar", "manifest.json"]
    first, second = (read_tar(tmp_path / "out" / f"0000{n}.tar") for n in (0, 1))
    assert first["000000000.webp"] == b"bytes of sub/c.webp"
    assert first["000000001.png"] == b"bytes of b.PNG"
    assert first["000000001.txt"] == b"two, with a comma"
    assert second["000000002.txt"].decode() == "drei\nö"
    assert json.loads(second["000000002.json"]) == {
        "key": "000000002",
        "caption": "drei\nö",
        "captions": ["drei\nö"],
        "filepath": "a.jpg",
        "packed_from": "a.jpg",
        "sha256": hashlib.sha256(b"bytes of a.jpg").hexdigest(),
    }
    unnamed = {"count": 3, "examples": ["d.jpeg", "empty.jpg", "text.heic"]}
    findings = {"unnamed_picture": unnamed}
    assert manifest.counts == {"samples": 3, "captions": 3, "shards": 2, "findings": findings}
    assert read_manifest(tmp_path / "out", "shards") == manifest
    assert (manifest.config["images"], manifest.config["samples_per_shard"]) == (str(images), 2)


def test_rows_of_one_image_are_its_captions_in_order(tmp_path: Path, images: Path) -> None:
    rows = [["a.jpg", "1"], ["d.jpeg", "x"], ["./sub/../a.jpg", "2"], [str(images / "a.jpg"), "2"]]
    manifest = run(tmp_path, images, rows)
    found = read_tar(tmp_path / "out" / "00000.tar")
    assert json.loads(found["000000000.json"])["captions"] == ["1", "2", "2"]
    assert found["000000000.txt"] == b"1"
    assert (manifest.counts["samples"], manifest.counts["captions"]) == (2, 4)


def test_tsv_columns_by_name_prefix_and_further_columns(tmp_path: Path, images: Path) -> None:
    rows = [["", "text", "file", "licence"], ["0", "1", "a.jpg", "by"], ["1", "2", "a.jpg", "nc"]]
    table = write_table(tmp_path / "t.tsv", rows, "\t")
    columns: dict[str, Any] = {"path_column": "file", "caption_column": "text"}
    pack(images, tmp_path / "out", captions=table, key_prefix="set/x", **columns)
    found = read_tar(tmp_path / "out" / "00000.tar")
    facts = json.loads(found["set/x000000000.json"])
    assert (facts["captions"], facts["licence"], facts["file"]) == (["1", "2"], "by", "a.jpg")


def test_a_table_without_captions_makes_shards_without_captions(
    tmp_path: Path, images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = write_table(tmp_path / "t.csv", [["filepath", "class"], ["a.jpg", "x"], ["b.PNG", "y"]])
    manifest = pack(images, tmp_path / "out", captions=table)
    found = read_tar(tmp_path / "out" / "00000.tar")
    assert sorted(found) == [f"00000000{name}" for name in ("0.jpg", "0.json", "1.json", "1.png")]
    assert json.loads(found["000000001.json"])["captions"] == []
    assert json.loads(found["000000001.json"])["class"] == "y"
    assert (manifest.counts["samples"], manifest.counts["captions"]) == (2, 0)
    assert manifest.config["caption_column"] == []
    no_caption = {"count": 2, "examples": ["a.jpg", "b.PNG"]}
    assert manifest.counts["findings"]["no_caption"] == no_caption
    assert "it has ['filepath', 'class']: its images are packed" in caplog.text
    assert "(no_caption)" in caplog.text
    source = {"shards": str(tmp_path / "out" / "*.tar")}
    options = {"run_dir": str(tmp_path / "run"), "data": {"sources": {"s": source}}}
    assert index.run(config.from_tree(options), SINGLE).num_captions.tolist() == [0, 0]


def test_delimiter_and_byte_order_mark(tmp_path: Path, images: Path) -> None:
    table = tmp_path / "t.dat"
    table.write_text("filepath|title\na.jpg|one\n", encoding="utf-8-sig")
    with pytest.raises(ValueError, match=r"t\.dat ends in '\.dat'.*--delimiter"):
        pack(images, tmp_path / "out", captions=table)
    assert pack(images, tmp_path / "out", captions=table, delimiter="|").counts["samples"] == 1


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file outside of the folder of images, with the name of an image."""
    path = tmp_path / "private" / "key.jpg"
    path.parent.mkdir()
    path.write_bytes(b"a private key")
    return path


def test_nothing_outside_of_the_folder_is_packed(
    tmp_path: Path, images: Path, secret: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (images / "link.jpg").symlink_to(secret)
    (images / "folder").symlink_to(secret.parent)
    (images / "loop.jpg").symlink_to("loop.jpg")
    (images / "same.jpg").symlink_to("a.jpg")
    (tmp_path / "images-2").mkdir()
    (tmp_path / "images-2" / "x.jpg").write_bytes(b"x")
    outside = [
        "../private/key.jpg", "sub/../../private/key.jpg", str(secret), "link.jpg",
        "folder/key.jpg", "../images-2/x.jpg", "a\0.jpg",
    ]  # fmt: skip
    names = [*outside, "same.jpg", "loop.jpg", f"{images}/a.jpg"]
    counts = run(tmp_path, images, [[name, "t"] for name in names]).counts
    findings = {reason: entry["count"] for reason, entry in counts["findings"].items()}
    findings.pop("unnamed_picture")
    assert findings == {"outside_folder": 5, "missing_image": 2}
    assert counts["samples"] == 2
    packed = read_tar(tmp_path / "out" / "00000.tar")
    assert {data for name, data in packed.items() if name.endswith("jpg")} == {b"bytes of a.jpg"}
    assert b"private key" not in b"".join(packed.values())
    assert "--allow-root" in caplog.text and "../private/key.jpg" in caplog.text
    with pytest.raises(ValueError, match="no usable image in .*outside_folder"):
        pack(images / "sub", tmp_path / "other", captions=tmp_path / "t.csv")


def test_a_further_folder_may_be_allowed(tmp_path: Path, images: Path, secret: Path) -> None:
    """As the recipe ucm does it, which links a folder of the data."""
    (images / "folder").symlink_to(secret.parent)
    rows = [["folder/key.jpg", "t"], [str(secret), "t"], ["a.jpg", "t"]]
    manifest = run(tmp_path, images, rows, allow_roots=[secret.parent])
    assert manifest.counts["samples"] == 3
    assert {*manifest.counts["findings"]} == {"unnamed_picture"}
    packed = read_tar(tmp_path / "out" / "00000.tar")
    assert packed["000000000.jpg"] == packed["000000001.jpg"] == b"a private key"
    with pytest.raises(ValueError, match="allow_roots"):
        run(tmp_path, images, rows)
    with pytest.raises(FileNotFoundError, match="no folder of images at .*nowhere"):
        run(tmp_path, images, rows, allow_roots=[tmp_path / "nowhere"])


def test_what_is_finished_is_known_by_its_table(tmp_path: Path, images: Path) -> None:
    run(tmp_path, images, [["a.jpg", "1"]])
    (images / "a.jpg").unlink()  # pictures may be moved away after they were packed
    assert run(tmp_path, images, [["a.jpg", "1"]]).counts["samples"] == 1
    with pytest.raises(ValueError, match=r"other data: t\.csv"):
        run(tmp_path, images, [["b.PNG", "1"]])


def test_files_that_are_no_pictures_are_no_other_data(tmp_path: Path, images: Path) -> None:
    for name in ("a", "b"):
        (images / f"{name}.txt").write_text(name)
    first = pack(images, tmp_path / "out")
    (images / "Thumbs.db").write_bytes(b"a file of the system")
    assert pack(images, tmp_path / "out") == first
    images = images.rename(tmp_path / "another folder")
    assert pack(images, tmp_path / "out") == first
    (images / "a.txt").write_text("another text")
    with pytest.raises(ValueError, match=r"other data: a\.txt"):
        pack(images, tmp_path / "out")


def test_a_missing_shard_and_a_file_for_a_folder_are_refused(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"
    run(tmp_path, images, [["a.jpg", "1"], ["b.PNG", "2"]], samples_per_shard=1)
    with pytest.raises(FileNotFoundError, match="1 of the 3 paths .*00002.tar"):
        pack(Path(f"{out}/{{00000..00002}}.tar"), tmp_path / "again")
    with pytest.raises(ValueError, match="00000.tar is a file"):
        pack(images, out / "00000.tar", captions=tmp_path / "table.csv")


def test_pictures_that_come_later_are_told_and_packed_by_force(
    tmp_path: Path, images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (images / "folder").mkdir()
    rows = [["a.jpg", "1"], ["later.jpg", "2"], ["folder", "3"]]
    run(tmp_path, images, rows)
    run(tmp_path, images, rows)
    assert "are there now" not in caplog.text  # a folder is no picture
    (images / "later.jpg").write_bytes(b"a picture that was fetched after a first try")
    assert run(tmp_path, images, rows).counts["samples"] == 1
    assert "such as later.jpg" in caplog.text and "--force" in caplog.text
    assert run(tmp_path, images, rows, force=Remake.UNFIT).counts["samples"] == 2  # as finetune


def sub_folders(at: Path, **names: list[str]) -> Path:
    for folder, files in names.items():
        (at / folder).mkdir(parents=True)
        for file in files:
            (at / folder / file).write_bytes(f"{folder}/{file}".encode())
    return at


def packed_pictures(out: Path) -> dict[str, str]:
    """The bytes of each picture by its caption."""
    members = read_tar(out / "00000.tar")
    keys = [name.removesuffix(".txt") for name in members if name.endswith(".txt")]
    return {members[f"{key}.txt"].decode(): members[f"{key}.jpg"].decode() for key in keys}


def test_each_name_is_looked_for_in_all_folders_if_none_is_in_the_first(tmp_path: Path) -> None:
    """As COCO's train2014 beside val2014, with many dead rows first."""
    folder = sub_folders(tmp_path / "coco", train2014=["t.jpg"], val2014=["v.jpg", "w.jpg"])
    names = [*(f"gone_{n}.jpg" for n in range(30)), "t.jpg", "val2014/v.jpg", "w.jpg"]
    names.remove("val2014/v.jpg")
    counts = run(tmp_path, folder, [[name, name] for name in [*names, "v.jpg"]]).counts
    assert packed_pictures(tmp_path / "out") == {
        "t.jpg": "train2014/t.jpg", "v.jpg": "val2014/v.jpg", "w.jpg": "val2014/w.jpg",
    }  # fmt: skip
    assert counts["findings"]["missing_image"]["count"] == 30


def test_a_name_with_two_files_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sub_folders(Path("ds"), test=["0.jpg", "1.jpg"], train=["0.jpg", "1.jpg"])
    rows = [["file_name", "text"], ["0.jpg", "zero"], ["1.jpg", "one"]]
    write_table(Path("t.csv"), rows)
    with pytest.raises(ValueError) as error:
        pack(Path("ds"), Path("out"), captions=Path("t.csv"))
    assert str(error.value).endswith("mclclip pack ds/test --captions t.csv --out out")
    assert not Path("out").exists()
    write_table(Path("ds/train/metadata.csv"), rows)  # its folder decides, as on the hub
    pack(Path("ds"), Path("out"), captions=Path("ds/train/metadata.csv"))
    assert packed_pictures(Path("out")) == {"zero": "train/0.jpg", "one": "train/1.jpg"}


def test_a_misspelled_column_is_named_over_a_finished_output_too(
    tmp_path: Path, images: Path
) -> None:
    table = write_table(tmp_path / "t.csv", [["filepath", "title"], ["a.jpg", "x"]])
    pack(images, tmp_path / "out", captions=table)
    for column in ({"path_column": "titel"}, {"caption_column": "titel"}):
        with pytest.raises(ValueError, match="no column 'titel', it has") as error:
            pack(images, tmp_path / "out", captions=table, **column)  # type: ignore[arg-type]
        assert "--force" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"picture,title\na.jpg,x\n", r"no column of images .*it has \['picture', 'title'\]"),
        (b"filepath,title\nnone.jpg,x\n", "no usable image in .*1 images that are not in the fold"),
        (b"filepath,title\na.jpg," + b"x" * (1 << 25) + b"\n", "does not parse: field larger"),
        (b"filepath,title\na.jpg,\xff\xfe\n", "save it as UTF-8"),
    ],
)
def test_wrong_tables_leave_nothing_behind(
    tmp_path: Path, images: Path, content: bytes, message: str
) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        pack(images, tmp_path / "out", captions=tmp_path / "t.csv")
    assert not (tmp_path / "out").exists()


def test_wrong_options(tmp_path: Path, images: Path) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "samples_per_shard is 0": {"samples_per_shard": 0}, "cut at a dot": {"key_prefix": "v1.0-"},
        "expected one character": {"delimiter": ", "}, "size is -1": {"size": -1},
    }  # fmt: skip
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=message):
            run(tmp_path, images, [["a.jpg", "1"]], **options)
    assert not (tmp_path / "out").exists()


def test_missing_table_folder_and_foreign_shards(tmp_path: Path, images: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no table"):
        pack(images, tmp_path / "out", captions=tmp_path / "none.csv")
    table = write_table(tmp_path / "t.csv", [["filepath", "title"], ["a.jpg", "1"]])
    with pytest.raises(FileNotFoundError, match="no folder of images"):
        pack(tmp_path / "none", tmp_path / "out", captions=table)
    with pytest.raises(ValueError, match="write to a folder outside of it"):
        pack(images, images / "run" / "data")
    assert not (images / "run").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "00000.tar").write_bytes(b"someone's shard")
    with pytest.raises(ValueError, match="did not write"):
        pack(images, tmp_path / "out", captions=table)
    assert (tmp_path / "out" / "00000.tar").read_bytes() == b"someone's shard"


def small_picture(number: int) -> bytes:
    """A picture that decodes, with bytes of its own."""
    stream = io.BytesIO()
    Image.new("RGB", (2, 2), (number % 256, number // 256, 7)).save(stream, "PNG")
    return stream.getvalue()


def test_shares_are_held_out_by_the_bytes_of_pictures(tmp_path: Path, images: Path) -> None:
    rows = []
    for number in range(80):
        for copy in "ab":  # two files of the same bytes
            (images / f"{number}{copy}.jpg").write_bytes(small_picture(number))
            rows.append([f"{number}{copy}.jpg", f"caption {number}"])
    shares = {"choose": 0.1, "report": 0.2}
    manifest = run(tmp_path, images, rows, held_out=shares, samples_per_shard=30)
    found: dict[str, set[bytes]] = {}
    for path in sorted((tmp_path / "out").glob("*/*.tar")):
        pictures = {data for name, data in read_tar(path).items() if name.endswith("png")}
        found.setdefault(path.parent.name, set()).update(pictures)
    assert sorted(found) == ["choose", "report", "train"]
    for data in map(small_picture, range(80)):
        place = int(hashlib.sha256(data).hexdigest()[:16], 16) / 2**64
        want = "choose" if place < 0.1 else "report" if place < 0.1 + 0.2 else "train"
        assert [name for name in found if data in found[name]] == [want]
    counts = manifest.counts["shares"]
    assert {name: share["samples"] for name, share in counts.items()} == {
        name: 2 * len(pictures) for name, pictures in found.items()
    }
    assert sum(share["shards"] for share in counts.values()) == manifest.counts["shards"]
    assert manifest.counts["samples"] == manifest.counts["captions"] == 160
    assert run(tmp_path, images, rows, held_out=shares, samples_per_shard=30) == manifest
    with pytest.raises(ValueError, match=r"held_out\.choose was 0\.1, now not given"):
        run(tmp_path, images, rows, samples_per_shard=30)


def test_a_held_out_share_has_only_pictures_with_captions_that_decode(
    tmp_path: Path, images: Path
) -> None:
    """An evaluation would end at one that does not; training counts and replaces it."""
    rows = []
    for number in range(60):
        data = small_picture(number)
        (images / f"{number}.png").write_bytes(data if number % 3 else data[:40] + b"%d" % number)
        rows.append([f"{number}.png", "a caption" if number % 2 else ""])
    manifest = run(tmp_path, images, rows, held_out={"choose": 0.5})
    counts, found = manifest.counts["shares"], manifest.counts["findings"]
    assert 0 < counts["choose"]["samples"] == counts["choose"]["captions"]
    assert 0 < counts["train"]["captions"] < counts["train"]["samples"]
    assert 0 < found["undecodable"]["count"] < 20
    assert all(int(name.partition(".")[0]) % 3 == 0 for name in found["undecodable"]["examples"])
    left_out = found["undecodable"]["count"] + found["uncaptioned"]["count"]
    assert manifest.counts["samples"] == 60 - left_out


def test_what_cannot_be_read_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files of another user, or a faulty disk: here the functions that read refuse."""
    photos = tmp_path / "photos"
    for name in ("a", "b", "sub/c", "sub/d"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / f"{name}.jpg").write_bytes(b"\xff\xd8\xff a picture")
        (photos / f"{name}.txt").write_text(name)
    read, scan, digest = Path.read_bytes, os.scandir, tables.digest_file

    def read_bytes(path: Path) -> bytes:
        if path.name == "a.jpg":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    def scandir(folder: str) -> Any:
        if str(folder).endswith("sub"):
            raise OSError(5, "Input/output error", str(folder))
        return scan(folder)

    def digest_file(path: Path) -> str:
        return digest(path) if path.name != "a.jpg" else read_bytes(path).hex()

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(tables, "digest_file", digest_file)
    monkeypatch.setattr(os, "scandir", scandir)
    counts = pack(photos, tmp_path / "out").counts
    assert counts["samples"] == 1
    findings = {reason: entry["examples"] for reason, entry in counts["findings"].items()}
    assert findings == {"unreadable": ["sub", "a.jpg"]}


def test_large_pictures_are_stored_smaller_in_the_same_shares(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = {f"{number:02}.png": (50 + number, 90) for number in range(20)}
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, (height, width) in sizes.items():
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
        (folder / name).with_suffix(".txt").write_text(f"picture {name}")
    damaged = ["15.png", "16.png", "17.png", "18.png", "19.png"]
    for name in damaged:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])
    packed: dict[str, dict[str, tuple[str, tuple[int, int]]]] = {"plain": {}, "small": {}}
    for out, size in (("plain", 0), ("small", 60)):
        manifest = pack(folder, tmp_path / out, held_out={"report": 0.3}, size=size)
        assert manifest.config["size"] == size
        for shard in (tmp_path / out).glob("*/*.tar"):
            members = read_tar(shard)
            for name in (name for name in members if name.endswith(".json")):
                picture = members.get(name.replace("json", "jpg"), members.get(name[:-4] + "png"))
                with Image.open(io.BytesIO(picture or b"")) as image:
                    about = (shard.parent.name, image.size)
                packed[out][json.loads(members[name])["packed_from"]] = about
    plain, small = packed["plain"], packed["small"]
    assert small.keys() == plain.keys()
    # A damaged picture is left out of what is held out, and else stored as it is.
    left_out = manifest.counts["findings"]["undecodable"]["examples"]
    assert 0 < len(left_out) < len(damaged)
    assert sizes.keys() - small.keys() == {*left_out}
    for name, (share, (width, height)) in small.items():
        own_height = sizes[name][0]
        assert share == plain[name][0]
        if name in damaged:
            assert (width, height) == plain[name][1] == (90, own_height)
            continue
        assert (width, height) == (round(90 * min(1, 60 / own_height)), min(own_height, 60))


def test_absolute_names_in_a_relative_folder_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for name in ("a.png", "b.png", "c.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / "photos" / name)
    table = write_table(
        tmp_path / "t.csv",
        [["image", "caption"], [f"{tmp_path}/photos/a.png", "a"], ["./b.png", "b"]],
    )
    counts = pack(Path("photos"), Path("out"), captions=table).counts
    assert counts["findings"]["unnamed_picture"]["examples"] == ["c.png"]
