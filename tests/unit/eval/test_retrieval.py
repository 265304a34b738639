"""Retrieval against a brute-force reference, with ties and unequal numbers of captions."""

from __future__ import annotations

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import csv
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from mclclip.data.findings import LFS_POINTER
from mclclip.eval import captions, metrics
from mclclip.eval.captions import CaptionRule, read_captions
from mclclip.eval.features import Extractor, rank_queries
from mclclip.eval.images import read_labelled
from mclclip.eval.protocols import retrieval
from mclclip.models.encoder import Encoder
from mclclip.models.loading import load_towers
from tests.tars import write_tar

TINY = Path(__file__).parents[2] / "configs" / "tiny_vit.json"


def brute_force(
    images: np.ndarray, texts: np.ndarray, owners: Sequence[set[int]], k: int
) -> tuple[float, float]:
    """R@k of both directions by sorting, every query and candidate by itself; ties against.

    ``owners``: the images of each text.
    """

    def rank(scores: list[float], right: list[bool]) -> int:
        # A stable sort with wrong candidates first among equals: the worst order there is.
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], right[i]))
        return 1 + next(place for place, i in enumerate(order) if right[i])

    def score(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.float32(sum(float(x) * float(y) for x, y in zip(a, b, strict=True))))

    by_image = [
        rank([score(images[i], t) for t in texts], [i in own for own in owners]) <= k
        for i in sorted(set().union(*owners))
    ]
    by_text = [
        rank([score(t, image) for image in images], [j in own for j in range(len(images))]) <= k
        for t, own in zip(texts, owners, strict=True)
    ]
    return float(np.mean(by_image)), float(np.mean(by_text))


def unit(rng: np.random.Generator, rows: int, levels: int, dim: int = 6) -> np.ndarray:
    """Unit rows; few levels make many equal rows and so many ties."""
    raw = rng.integers(-levels, levels + 1, (rows, dim)).astype(np.float64)
    raw[~raw.any(axis=1), 0] = 1
    return (raw / np.linalg.norm(raw, axis=1, keepdims=True)).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 9), st.sampled_from([1, 30]), st.integers(1, 4000))
def test_equal_to_brute_force_for_any_chunk(
    seed: int, num_images: int, levels: int, chunk_bytes: int
) -> None:
    rng = np.random.default_rng(seed)
    owners = [{*rng.integers(0, num_images, rng.integers(1, 4)).tolist()} for _ in range(12)]
    is_own = csr_array([[image in own for image in range(num_images)] for own in owners])
    images, texts = unit(rng, num_images, levels), unit(rng, len(owners), levels)
    asked = sorted(set().union(*owners))
    of_images = is_own.T.tocsr()[asked]
    by_image, _ = rank_queries(images[asked], texts, of_images, chunk_bytes=chunk_bytes)
    by_text, _ = rank_queries(texts, images, is_own, chunk_bytes=chunk_bytes)
    for k in (1, 2, 5, 100):
        got = (float((by_image <= k).mean()), float((by_text <= k).mean()))
        assert got == brute_force(images, texts, owners, k)


@pytest.mark.parametrize("chunk_bytes", [1, 1000])
@pytest.mark.parametrize("dim", [3, 769])
def test_collapsed_features_rank_last_however_they_are_cut(dim: int, chunk_bytes: int) -> None:
    """Equal features must tie exactly: rounding must not depend on the place in a block."""
    row = np.random.default_rng(dim).normal(size=dim)
    features = np.tile((row / np.linalg.norm(row)).astype(np.float32), (37, 1))
    is_right = csr_array(np.eye(37, dtype=bool))
    strict, optimistic = rank_queries(features, features, is_right, chunk_bytes=chunk_bytes)
    assert (strict == 37).all() and (optimistic == 1).all()


def test_near_ties_are_ordered_by_sums_in_float64() -> None:
    """A product in float32 orders some of them otherwise."""
    rng = np.random.default_rng(11)
    owners = rng.permutation(np.repeat(np.arange(100), 5))
    texts = np.ones((500, 96)) + 1e-6 * rng.normal(size=(500, 96))
    texts[rng.random(500) < 0.3] = texts[0]  # some are equal
    texts = (texts / np.linalg.norm(texts, axis=1, keepdims=True)).astype(np.float32)
    images = rng.normal(size=(100, 96))
    images = (images / np.linalg.norm(images, axis=1, keepdims=True)).astype(np.float32)
    is_right = np.arange(100)[:, None] == owners
    exact = images.astype(np.float64) @ texts.astype(np.float64).T
    ranks = rank_queries(images, texts, csr_array(is_right), chunk_bytes=30_000)
    assert np.array_equal(ranks, metrics.ranks_with_ties(exact.astype(np.float32), is_right))
    plain = metrics.ranks_with_ties(images @ texts.T, is_right)
    assert not np.array_equal(plain[0], ranks[0])


# --- whole evaluations ------------------------------------------------------------------


@pytest.fixture
def make_table(tmp_path: Path, draw: Callable[[Path, int], None]) -> Callable[..., Path]:
    """``make_table([2, 1, 3])``: images with that many captions; all spell the image's number."""

    def make(captions: Sequence[int], texts: Callable[[int, int], str] | None = None) -> Path:
        with open(tmp_path / "captions.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["filepath", "title", "split"])
            for image, count in enumerate(captions):
                draw(tmp_path / "images" / f"{image}.png", image)
                for number in range(count):
                    text = texts(image, number) if texts else f"caption {number}, of {image}"
                    rows.writerow([f"{image}.png", text, "test" if image % 2 else "train"])
        return tmp_path

    return make


def run(encoder: Any, root: Path, **options: Any) -> dict[str, Any]:
    options = {"captions": "captions.csv", "images": "images"} | options
    figures = retrieval.evaluate(Extractor(encoder, batch_size=4), root, **options)
    return {figure.metric: figure for figure in figures}


def test_equal_captions_are_one_caption_of_all_their_images(make_table: Any, planted: Any) -> None:
    """Images 0 to 3 share a caption, as do 4 to 7; the encoder tells these two groups apart."""
    encoder = planted("random", 2, seed=3)
    encoder.text_table[:] = encoder.image_table[:2]
    encoder.image_table = encoder.image_table[:2].repeat_interleave(4, dim=0)
    root = make_table([2] * 8, texts=lambda image, number: f"{image // 4}")
    figures = run(encoder, root, ks=[1, 4])
    assert {figure.value for figure in figures.values()} == {100.0}
    assert {figure.count for figure in figures.values()} == {8, 2}
    assert figures["text_to_image/R@4"].protocol["chance"] == pytest.approx(100 * 69 / 70, abs=0.01)
    assert figures["image_to_text/R@1"].protocol["num_candidates"] == 2


def test_published_protocols_know_captions_by_their_numbers(
    make_table: Any, planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All captions read 'of 1': an image cannot tell its own from the others."""
    rules = {**captions.CAPTION_RULES, "karpathy_coco5k": CaptionRule(None, None, 8, 8)}
    monkeypatch.setattr(captions, "CAPTION_RULES", rules)
    encoder = planted("random", 9, seed=3)
    root = make_table([1] * 8, texts=lambda image, number: "a dog, of 1")
    figures = run(encoder, root, protocol="karpathy_coco5k")
    assert figures["image_to_text/R@1"].value == 0.0
    assert figures["image_to_text/R@1_optimistic"].value == 100.0
    assert figures["image_to_text/R@1"].protocol["tied_queries"] == 8
    assert encoder.seen_texts == ["a dog, of 1"]  # encoded once


def test_equals_brute_force_with_unequal_numbers_of_captions(make_table: Any, planted: Any) -> None:
    counts = [1, 4, 2, 7, 1, 3]
    encoder = planted("random", 200, dim=8, seed=1)
    root = make_table(counts, texts=lambda image, number: f"{10 * image + number}")
    owners = [{i} for i, count in enumerate(counts) for _ in range(count)]
    numbers = [10 * i + n for i, count in enumerate(counts) for n in range(count)]
    images = torch.nn.functional.normalize(encoder.image_table[:6], dim=1).numpy()
    texts = torch.nn.functional.normalize(encoder.text_table[numbers], dim=1).numpy()
    figures = run(encoder, root, ks=[1, 2, 3], chunk_bytes=100)
    for k in (1, 2, 3):
        by_image, by_text = brute_force(images, texts, owners, k)
        assert figures[f"image_to_text/R@{k}"].value == pytest.approx(100 * by_image)
        assert figures[f"text_to_image/R@{k}"].value == pytest.approx(100 * by_text)


def test_images_without_a_caption_are_candidates_and_spellings_are_one_image(
    tmp_path: Path,
) -> None:
    rows = "image,caption\n0.jpg,a\n1.jpg,\n2.jpg,nan\n./0.jpg,again\n"
    (tmp_path / "a.csv").write_text(rows)
    data = read_captions(tmp_path / "a.csv", tmp_path)
    assert data.captions == ["a", "again"]
    assert [image.name for image in data.images] == ["0.jpg", "1.jpg", "2.jpg"]
    assert [*data.caption_image] == [0, 0]


def test_missing_images_are_counted_and_the_option_is_named(make_table: Any, planted: Any) -> None:
    root = make_table([1, 1, 1])
    for path in sorted(root.rglob("*.png"))[1:]:
        path.unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"2 of the 3 images of .*captions\.csv are not in .*images, such as 1\.png, 2\.png: ",
    ):
        run(planted("perfect", 3), root)


def test_split_and_prompt(make_table: Any, planted: Any) -> None:
    encoder = planted("perfect", 6)
    figures = run(encoder, make_table([1] * 6), split="test", prompt="a photo of ")
    assert figures["image_to_text/R@1"].count == 3
    assert encoder.seen_texts[0] == "a photo of caption 0, of 1"
    with pytest.raises(ValueError, match="no captions in the split 'val'"):
        run(encoder, make_table([1] * 6), split="val")


# --- readers ----------------------------------------------------------------------------


def coco(path: Path, captions: Sequence[int]) -> Path:
    """COCO captions JSON, annotations of the images interleaved."""
    images = [{"id": 100 + i, "file_name": f"{i}.png"} for i in range(len(captions))]
    annotations = [
        {"image_id": 100 + i, "caption": f"caption {n}, of {i}"}
        for n in range(max(captions))
        for i, count in enumerate(captions)
        if n < count
    ]
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    return path


def test_coco_json_and_the_first_five_captions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = coco(tmp_path / "coco.json", [5, 7, 6])
    data = read_captions(path, tmp_path)
    assert (len(data.images), len(data.captions)) == (3, 18)
    monkeypatch.setitem(captions.CAPTION_RULES, "first5", CaptionRule(None, 5))
    first = read_captions(path, tmp_path, "first5")
    assert (len(first.images), len(first.captions)) == (3, 15)
    assert [c for c, i in zip(first.captions, first.caption_image, strict=True) if i == 1] == [
        f"caption {n}, of 1" for n in range(5)
    ]


def test_image_without_caption_is_a_candidate_but_no_query(
    tmp_path: Path, draw: Callable[[Path, int], None], planted: Any
) -> None:
    for number in range(3):
        draw(tmp_path / "images" / f"{number}.png", number)
    coco(tmp_path / "coco.json", [2, 0, 1])
    figures = run(planted("perfect", 3), tmp_path, captions="coco.json")
    assert figures["image_to_text/R@1"].count == 2
    assert figures["text_to_image/R@1"].protocol["num_candidates"] == 3


@pytest.mark.parametrize("protocol", [name for name in captions.CAPTION_RULES if name != "table"])
def test_a_named_protocol_has_its_size(tmp_path: Path, protocol: str) -> None:
    rule = captions.CAPTION_RULES[protocol]
    path, number = tmp_path / "a.csv", 2 * min(5, rule.captions_per_image or 5)
    rows = [f"{image}.jpg,text {text},test" for image in range(2) for text in range(5)]
    path.write_text("\n".join(["image,caption,split", *rows]))
    found = f"2 images and {number} captions.*, {protocol} has"
    with pytest.raises(ValueError, match=found):
        read_captions(path, tmp_path, protocol)
    assert rule.num_images and rule.num_captions


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.csv", "path,words\na.jpg,x\n", r"missing \['title'\]"),
        ("a.csv", "filepath,title\n", "has no captions"),
        ("a.csv", b"filepath,title\na.jpg,\xff\n", "a.csv line 2 does not parse"),
        ("a.json", '{"images": [{"id": 1}]}', "no column of images"),
        ("a.csv", "image,caption\n0.jpg,a\n1.jpg,a red, round thing\n", "joined_cells"),
    ],
)
def test_wrong_files_get_one_clear_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message) as raised:
        read_captions(path, tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["/etc/passwd", "a/../../b.jpg"])
def test_a_table_names_no_image_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    table, root = tmp_path / "t.csv", tmp_path / "images"
    root.mkdir()
    table.write_text(f"filepath,title,label\na.jpg,x,y\n{name},x,y\n")
    with pytest.raises(ValueError, match="t.csv names .*, which is no file below .*images"):
        read_captions(table, root)
    (root / "t.csv").write_text(table.read_text())
    with pytest.raises(ValueError, match="t.csv line 3 names .*, which is no file below"):
        read_labelled(root, {"y": "y"}, "t.csv")


# --- other layouts ------------------------------------------------------------------------


def write_urban(root: Path) -> dict[str, Any]:
    (root / "caption").mkdir()
    for number in range(6):
        (root / "caption" / f"{number}.txt").write_text(f"A long one.\nIt is of {number}\n")
    return {"captions": "caption"}


def write_shards(root: Path, captions: str = "txt") -> dict[str, Any]:
    for shard in range(2):
        members = []
        for number in range(3 * shard, 3 * shard + 3):
            texts = [f"of {number}", f"another of {number}"]
            members += [
                (f"{number}.png", (root / "images" / f"{number}.png").read_bytes()),
                (f"{number}.txt", texts[0].encode()),
                (f"{number}.json", json.dumps({"long": texts}).encode()),
            ]
        write_tar(root / "shards" / f"{shard}.tar", members)
    return {"captions": "shards", "shard_captions": captions}


@pytest.mark.parametrize(
    "write",
    [
        write_urban,
        write_shards,
        partial(write_shards, captions="json:long"),
    ],
)
def test_layouts_of_long_captions_and_shards(
    tmp_path: Path, draw: Callable[[Path, int], None], planted: Any, write: Any
) -> None:
    for number in range(6):
        draw(tmp_path / "images" / f"{number}.png", number)
    options = write(tmp_path)
    figures = run(planted("perfect", 6), tmp_path, **options)
    assert {f.value for f in figures.values()} == {100.0}
    two = options.get("shard_captions") == "json:long"
    assert figures["text_to_image/R@1"].count == (12 if two else 6)
    found = figures["text_to_image/R@1"].outcomes
    assert found.items[:2] == (
        ["0#0", "0#1"] if two else ["0#0", "1#1"] if "shards" in options.values()
        else ["0.png#0", "1.png#1"]
    )  # fmt: skip


def test_a_folder_of_captions_fits_its_images(
    tmp_path: Path, draw: Callable[[Path, int], None]
) -> None:
    draw(tmp_path / "images" / "0.png", 0)
    write_urban(tmp_path)
    with pytest.raises(ValueError, match=r"5 texts .*lone_text.*1\.txt"):
        read_captions(tmp_path / "caption", tmp_path / "images")
    with pytest.raises(ValueError, match="none of the 0 texts in .*images"):
        read_captions(tmp_path / "images", tmp_path / "images")


def test_captions_that_the_tokenizer_cuts_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    extractor = Extractor(Encoder([load_towers(TINY)]))
    length = int(extractor.encoder.tokenizer.context_length)  # type: ignore[attr-defined]
    texts = [" ".join(["dog"] * count) for count in (1, length - 3, length - 2, length - 1, 500)]
    with caplog.at_level("WARNING", logger="mclclip"):
        found = retrieval.count_cut_captions(extractor, texts)
    # With the two marks around it, a caption of length - 2 words just fits.
    assert found == {"context_length": length, "captions_cut": 2}
    assert f"2 of 5 captions are longer than the {length} tokens" in caplog.text
    caplog.clear()
    assert (
        retrieval.count_cut_captions(extractor, texts[:3])["captions_cut"] == 0
        and not caplog.records
    )


def test_tokenizers_that_pad_with_the_end_of_text_are_counted_too() -> None:
    """As SigLIP's: 1 ends a text and fills the rest."""

    class Padded:
        context_length = 8

        def __call__(self, texts: list[str]) -> torch.Tensor:
            rows = [[5] * min(len(text.split()), 7) + [1] * 8 for text in texts]
            return torch.tensor([row[:8] for row in rows])

    padded: Any = SimpleNamespace(tokenizer=Padded())
    texts = ["a " * 3, "a b c d e f g", "a b c d e f g h", "a " * 30]
    assert retrieval.count_cut_captions(Extractor(padded), texts)["captions_cut"] == 2


def test_a_benchmark_is_read_as_pack_reads_it(tmp_path: Path) -> None:
    """Paths of another machine, texts of conversations, and of those the answer."""
    rows = [
        {"image": f"/c/in/{name}", "conversations": [
            {"from": "human", "value": "?"}, {"from": "gpt", "value": text}]}
        for name, text in (("a/0.jpg", "x"), ("b/1.jpg", "y"))
    ]  # fmt: skip
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for picture in ("a/0.jpg", "b/1.jpg"):
        (tmp_path / "images" / picture).parent.mkdir(parents=True)
        (tmp_path / "images" / picture).touch()
    data = read_captions(tmp_path / "t.jsonl", tmp_path / "images")
    assert [str(path.relative_to(tmp_path)) for path in data.images] == [
        "images/a/0.jpg", "images/b/1.jpg"
    ]  # fmt: skip
    assert data.captions == ["x", "y"] and data.caption_image.tolist() == [0, 1]


# --- texts of other people -----------------------------------------------------------------------


def test_pictures_and_texts_may_be_links(tmp_path: Path) -> None:
    for name in ("images", "texts", "blobs"):
        (tmp_path / name).mkdir()
    (tmp_path / "blobs" / "a").write_text("x")
    (tmp_path / "images" / "0.jpg").symlink_to("../blobs/a")
    (tmp_path / "texts" / "0.txt").symlink_to("../blobs/a")
    assert read_captions(tmp_path / "texts", tmp_path / "images").captions == ["x"]


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    """One leads to pictures, which have bare names, and one upwards."""
    for name in ("images", "away"):
        (tmp_path / name).mkdir()
    for path in ("images/0.jpg", "away/1.jpg"):
        (tmp_path / path).touch()
        (tmp_path / path).with_suffix(".txt").write_text(path)
    (tmp_path / "images" / "linked").symlink_to("../away")
    (tmp_path / "images" / "up").symlink_to("..")
    (tmp_path / "t.csv").write_text("filepath,title\n1.jpg,x\n")
    found = read_captions(tmp_path / "t.csv", tmp_path / "images").images
    assert found == [tmp_path / "images" / "linked" / "1.jpg"]
    data = read_captions(tmp_path / "images", tmp_path / "images")
    assert data.captions == ["images/0.jpg", "away/1.jpg"]


def test_texts_are_read_as_a_training_reads_them(tmp_path: Path) -> None:
    images, texts = tmp_path / "images", tmp_path / "texts"
    images.mkdir()
    texts.mkdir()
    for number, data in enumerate(("grün".encode("utf-16"), b"a dog\n", b"nan\n")):
        (images / f"{number}.jpg").touch()
        (texts / f"{number}.txt").write_bytes(data)
    assert read_captions(texts, images).captions == ["grün", "a dog"]
    tokens = tmp_path / "a.token"
    tokens.write_bytes("0.jpg#0\tgrün\n0.jpg#1\tnan\n".encode("utf-16"))
    assert read_captions(tokens, images).captions == ["grün"]
    for data in (b"caf\xe9", LFS_POINTER + b"v1\n"):
        (texts / "1.txt").write_bytes(data)
        with pytest.raises(ValueError, match=r"bad_text|lfs_pointer.*1\.jpg"):
            read_captions(texts, images)
