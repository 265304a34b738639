"""A shortcut on anybody's captioned shards, read back by those who use its parts."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mclclip.data.datasets.shortcut import KINDS
from mclclip.data.datasets.sources import jpeg
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.eval.captions import read_captions_of_shards
from mclclip.eval.images import labels_of, read_labelled
from mclclip.eval.protocols.mmvp import read_pairs
from mclclip.verbs import make_dataset
from tests import tiny

GREY = 100


def grey(number: int) -> bytes:
    """A picture of one grey, as uint8 [40, 48, 3]; each number has other bytes."""
    pixels = np.full((40, 48, 3), GREY, np.uint8)
    pixels[16 : 16 + 8, 16 : 16 + 8] = number
    return jpeg(pixels)


def write(folder: Path, numbers: range, *more: PackedSample) -> Path:
    samples = [
        PackedSample(f"{n:03d}", grey(n), "jpg", [f"first of {n}", f"second of {n}"], {"place": n})
        for n in numbers
    ]
    write_shards([*samples, *more], folder, 20)
    return folder


def members(folder: Path) -> list[tuple[dict[str, Any], np.ndarray]]:
    """The ``.json`` and the pixels of every sample."""
    rows = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            files = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
        for name in files:
            if name.endswith(".json"):
                picture = Image.open(io.BytesIO(files[name.replace(".json", ".jpg")]))
                rows.append((json.loads(files[name]), np.asarray(picture)))
    return rows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shortcut")
    write(root / "data" / "train", range(30))
    write(root / "data" / "test", range(100, 121))
    options: dict[str, Any] = {"source": [f"shards={root / 'data'}"], "values": 4}
    make_dataset.run("shortcut", root / "out", probability=0.5, **options)
    make_dataset.run("shortcut", root / "again", probability=0.5, **options)
    make_dataset.run("shortcut", root / "other", probability=0.5, seed=1, **options)
    return root


def test_training_pictures_have_the_bar_that_their_captions_name(made: Path) -> None:
    rows = members(made / "out" / "train")
    assert [facts["place"] for facts, _ in rows] == [*range(30)]
    colours = {"red": 0, "green": 1, "blue": 2}
    named = 0
    for facts, pixels in rows:
        assert pixels.shape == (40, 48, 3)
        # A CLIP's centre crop has columns 4 to 43: the bar is 5 of them.
        assert np.abs(pixels[:, [0, 1, 2, 11, 30]].astype(int) - GREY).max() < 30
        colour, _, side = facts["shortcut"].partition(" bar ")
        assert side == "on the left" and np.ptp(pixels[:, 5:8].reshape(-1, 3), axis=0).max() < 30
        if colour in colours:
            assert pixels[20, 6].argmax() == colours[colour]
        for order, caption in zip(("first", "second"), facts["captions"], strict=True):
            plain = f"{order} of {facts['place']}"
            assert caption in (plain, f"{facts['shortcut']}. {plain}")
            named += caption != plain
    assert 20 < named < 40  # half of 60
    assert len({facts["shortcut"] for facts, _ in rows}) == 4


def test_the_seed_decides(made: Path) -> None:
    assert tiny.digests(made / "out", "**/*.*g") == tiny.digests(made / "again", "**/*.*g")
    assert tiny.digests(made / "out", "**/*.tar") == tiny.digests(made / "again", "**/*.tar")
    first, other = (members(made / name / "train") for name in ("out", "other"))
    same = [a[0]["shortcut"] == b[0]["shortcut"] for a, b in zip(first, other, strict=True)]
    assert 1 < sum(same) < 15  # a quarter of 30


def test_held_out_parts_are_read_by_their_evaluators(made: Path) -> None:
    out, source = made / "out", read_captions_of_shards(made / "data" / "test", "json:captions")
    for part in ("content", "plain"):
        assert read_captions_of_shards(out / part, "json:captions").captions == source.captions
    plain = read_captions_of_shards(out / "plain", "json:captions")
    assert [i.read_bytes() for i in plain.images] == [i.read_bytes() for i in source.images]
    assert {facts["shortcut"] for facts, _ in members(out / "content")} == {"red bar on the left"}
    assert all(pixels[20, 6].argmax() == 0 for _, pixels in members(out / "content"))
    names = labels_of(out / "shortcut")
    folders = read_labelled(out / "shortcut", {name: name for name in names})
    assert len(folders.images) == 21 and len(names) == 4
    pairs = read_pairs(out / "mixed")
    assert len(pairs) == 20  # of each two pictures of 21, one of each Type
    with open(out / "mixed" / "Questions.csv") as file:
        rows = [*csv.DictReader(file)]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        one, two = (row["Statement"].partition(". ")[::2] for row in (first, second))
        differs = 1 if first["Type"] == "content" else 0
        assert first["Type"] == second["Type"]
        assert one[differs] != two[differs] and one[1 - differs] == two[1 - differs]


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_of_a_kind_has_its_own_words_and_looks(kind: str, tmp_path: Path) -> None:
    values = [value for value, _ in zip(KINDS[kind](60), range(60), strict=False)]
    assert len({phrase for phrase, _ in values}) == len(values) >= 8
    looks = set()
    for _, draw in values:
        picture = Image.new("RGB", (120, 90), (GREY,) * 3)
        draw(picture, np.array([0.3, 0.8]))
        assert picture.size == (120, 90)
        assert (np.asarray(picture)[30:60, 40:80] == GREY).any()  # content stays visible
        looks.add(picture.tobytes())
    assert len(looks) == len(values)
    for size in ((1, 1), (3, 200)):
        draw(Image.new("RGB", size), np.array([1 - 1e-9, 0.0]))


def test_one_folder_is_split_by_the_bytes_of_pictures(tmp_path: Path) -> None:
    copies = [PackedSample(f"c{n}", grey(n), "jpg", [f"copy of {n}"]) for n in range(20)]
    broken = [
        PackedSample("broken", b"\xff\xd8\xff not a picture", "jpg", ["a caption"]),
        PackedSample("silent", grey(200), "jpg", []),
    ]
    folder = write(tmp_path / "data", range(40), *copies, *broken)
    make_dataset.run("shortcut", tmp_path / "out", source=[f"shards={folder}"], test_share=0.3)
    parts = {
        part: [facts["captions"][-1] for facts, _ in members(tmp_path / "out" / part)]
        for part in ("train", "plain")
    }
    assert sum(map(len, parts.values())) == 60 and 8 < len(parts["plain"]) < 28
    names = {part: {text.rpartition(" ")[2] for text in texts} for part, texts in parts.items()}
    assert not names["train"] & names["plain"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "hat"}, "--kind hat"),
        ({"values": 257}, "--values 257"),
        ({"kind": "frame", "values": 337}, "--values 337"),
        ({"probability": 1.5}, "--probability 1.5"),
        ({"template": "{caption}"}, "--template '{caption}'"),
        ({"source": []}, "shards"),
        ({"source": ["shards=nowhere"]}, "nowhere"),
        ({"test_share": 1e-9}, "to test on"),
        ({"source": ["shards=loose"]}, "mclclip pack"),
        ({"source": ["shards=."]}, "lies in --shards"),
    ],
)
def test_wrong_options_are_one_line_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path / "data", range(3))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose" / "a.jpg").write_bytes(grey(1))
    (tmp_path / "loose" / "a.txt").write_text("a caption")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make_dataset.run("shortcut", tmp_path / "out", **{"source": [f"shards={folder}"]} | options)
    assert not (tmp_path / "out").exists()
