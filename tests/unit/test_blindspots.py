"""The blindspots verb: planted pairs from embeddings on disk to data, pictures and a benchmark."""

from __future__ import annotations

import csv
import json
import logging
import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mclclip import blindspots, cli, index, process
from mclclip.config import Config, from_tree
from mclclip.data.embeddings import rows_path
from mclclip.data.sample_index import SampleIndex
from mclclip.eval.datasets import read_pairs
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import read_manifest
from mclclip.run.layout import Layout
from tests.made_run import write_embeddings

SIZES = (17, 5, 18)  # samples per shard
DIM = 48
SPOTS = {(3, 20), (8, 39), (17, 21)}  # confused by stage 0, told apart by the other encoder
SAME = {(1, 2), (5, 30)}  # confused by both
BROKEN = 12
HIDDEN = (9, BROKEN)  # looks like a blind spot; the other encoder could not read one of them


def picture(number: int) -> bytes:
    """A JPEG, or a PNG of every third sample, or a WebP of every fifth."""
    kind = "PNG" if number % 3 == 0 else "WEBP" if number % 5 == 0 else "JPEG"
    sink = BytesIO()
    Image.new("RGB", (40, 30), (6 * number, 255 - 6 * number, 120)).save(sink, kind)
    return sink.getvalue()


def write_shards(folder: Path, sizes: tuple[int, ...] = SIZES, prefix: str = "") -> None:
    folder.mkdir()
    number = 0
    for shard, size in enumerate(sizes):
        with tarfile.open(folder / f"{shard:02d}.tar", "w") as archive:
            for _ in range(size):
                text = f"thing {number}\n=cmd \x1b[2J, again".encode()
                for suffix, data in ((".jpg", picture(number)), (".txt", text)):
                    member = tarfile.TarInfo(f"{prefix}{number:03d}{suffix}")
                    member.size = len(data)
                    archive.addfile(member, BytesIO(data))
                number += 1


def options(run_dir: Path, shards: Path) -> Config:
    return from_tree(
        {
            "run_dir": str(run_dir),
            "num_stages": 1,
            "data": {"sources": {"s": {"shards": f"{shards}/*.tar"}}, "index_workers": 1},
        }
    )


def rows_of(which: str) -> np.ndarray:
    """Directions without anything in common, but for the planted pairs."""
    rng = np.random.default_rng(["first", "second"].index(which))
    rows = np.eye(DIM)[rng.permutation(sum(SIZES))] * rng.uniform(0.5, 2, size=(sum(SIZES), 1))
    near = {*SPOTS, *SAME, HIDDEN} if which == "first" else SAME
    for left, right in near:
        rows[right] = rows[left] + 0.1 * rows[right]
    if which == "second":
        rows[BROKEN] = 0.0
    return rows.astype(np.float16)


def embed(directory: Path, samples: SampleIndex, which: str) -> None:
    bad = [BROKEN] if which == "second" else []
    write_embeddings(directory, samples, rows_of(which), encoder=which, bad=bad)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose stages 0 and 1 are embedded; read only, but for what a test asks for by name."""
    root = tmp_path_factory.mktemp("blind")
    write_shards(root / "shards")
    config = options(root / "run", root / "shards")
    index.run(config, SINGLE)
    for stage, which in enumerate(("first", "second")):
        embed(Layout.of(config).embeddings(stage), SampleIndex.open(root / "run/index"), which)
    return root


@pytest.fixture(scope="module")
def found(made: Path) -> Path:
    return blindspots.run(options(made / "run", made / "shards"), SINGLE)


@pytest.fixture
def config(made: Path, tmp_path: Path) -> Config:
    """A copy of the run without what was found."""
    run = tmp_path / "run"
    shutil.copytree(made / "run", run, ignore=shutil.ignore_patterns("blindspots"))
    return options(run, made / "shards")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def pairs_in(path: Path) -> set[tuple[int, ...]]:
    return {tuple(line["sample_ids"]) for line in lines(path)}


def failing(work: Callable[[], object], config: Config) -> str:
    """The one line of a mistake of the user, which leaves nothing behind that looks finished."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        work()
    assert process.exit_code(caught.value) == process.EXIT_USER == 2
    assert not [*Path(config.run_dir).glob("blindspots/*/manifest.json")]
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_the_planted_pairs_are_found_and_nothing_else(found: Path) -> None:
    """Recall and precision are 1; the pair with a sample that has no embedding is none of them."""
    assert found.name == "stage_0-stage_1"
    assert pairs_in(found / "pairs.jsonl") == SPOTS
    assert pairs_in(found / "near_duplicates.jsonl") == SAME
    first, second = (rows_of(which).astype(np.float64) for which in ("first", "second"))
    for line in lines(found / "pairs.jsonl"):
        i, j = line["sample_ids"]
        assert line["keys"] == [f"s/{i:03d}", f"s/{j:03d}"]
        for name, rows in (("cosine", first), ("other_cosine", second)):
            cosine = rows[i] @ rows[j] / np.linalg.norm(rows[i]) / np.linalg.norm(rows[j])
            assert line[name] == pytest.approx(cosine, abs=1e-6)


def test_the_manifest_counts_and_records(found: Path) -> None:
    manifest = read_manifest(found, "blindspots")
    manifest.check(found)
    nothing = {"per_image": 0, "total": 0, "pool": 0}
    assert manifest.counts["blind_spots"] == {"found": 3, "kept": 3, "left_out": nothing}
    assert manifest.counts["near_duplicates"] == {"found": 2, "kept": 2, "left_out": nothing}
    assert manifest.counts["confused"] == 5 and manifest.counts["left_out_samples"] == 1
    assert manifest.counts["samples_in_blind_spots"] == 6
    assert {"index", "embeddings", "other_embeddings"} == manifest.inputs.keys()
    assert manifest.records.keys() == {
        "pairs.jsonl", "near_duplicates.jsonl", "weights.npy", "gallery.png",
    }  # fmt: skip


def test_weights_are_in_index_order(found: Path) -> None:
    weights = np.load(found / "weights.npy")
    assert weights.dtype == np.float32 and weights.shape == (sum(SIZES),)
    assert np.flatnonzero(weights == 2).tolist() == sorted(i for pair in SPOTS for i in pair)
    assert np.flatnonzero(weights == 0).tolist() == [BROKEN]
    assert (weights == 1).sum() == sum(SIZES) - 7


def test_the_gallery_shows_the_pictures_of_the_pairs(found: Path) -> None:
    with Image.open(found / "gallery.png") as sheet:
        assert sheet.format == "PNG"
        colours = {colour for _, colour in sheet.convert("RGB").getcolors(1 << 20) or []}
    for number in {i for pair in SPOTS for i in pair}:
        wanted = np.array([6 * number, 255 - 6 * number, 120])
        nearest = min(np.abs(np.array(colour) - wanted).max() for colour in colours)
        assert nearest <= 4, number  # a JPEG changes a colour a little


def test_the_benchmark_is_mmvp_s_layout_with_statements_left_to_fill_in(
    found: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(found / "benchmark", tmp_path / "benchmark")
    with pytest.raises(
        ValueError,
        match=r"Questions.csv has no Statement in 6 of 6 rows, .* line 2: write for each",
    ):
        read_pairs(folder)
    with open(folder / "Questions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["Statement"] = f"statement {row['Question ID']}"
    with open(folder / "Questions.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys())
        table.writeheader()
        table.writerows(rows)
    pairs = read_pairs(folder)
    shown = [tuple(line["sample_ids"]) for line in lines(found / "pairs.jsonl")]
    assert len(pairs) == 3
    for number, (pair, ids) in enumerate(zip(pairs, shown, strict=True)):
        assert pair.type == "blind spot"
        assert pair.question_ids == (2 * number + 1, 2 * number + 2)
        for place, (sample_id, path) in enumerate(zip(ids, pair.images, strict=True)):
            with Image.open(BytesIO(picture(sample_id))) as stored, Image.open(path) as written:
                assert np.array_equal(stored.convert("RGB"), written.convert("RGB"))
                assert written.format == ("JPEG" if path.suffix == ".jpg" else "PNG")
            row = rows[2 * number + place]
            assert row["Key"] == f"s/{sample_id:03d}"
            assert row["Caption"].startswith(f"thing {sample_id}") and row["Caption"].isprintable()


def test_an_image_is_in_one_pair_of_the_benchmark_and_these_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert blindspots._disjoint([[1, 2], [2, 3], [3, 4], [4, 5], [6, 7]]) == [
        [1, 2],
        [3, 4],
        [6, 7],
    ]
    monkeypatch.setattr(blindspots, "ASKED", 2)
    assert blindspots._disjoint([[1, 2], [3, 4], [6, 7]]) == [[1, 2], [3, 4]]


def test_a_second_call_is_skipped_and_force_makes_it_again(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    first = blindspots.run(config, SINGLE)
    before = (first / "pairs.jsonl").read_bytes()
    with caplog.at_level(logging.INFO, "mclclip"):
        assert blindspots.run(config, SINGLE) == first
    assert "is finished: skipped" in caplog.text
    with pytest.raises(
        ValueError, match=r"made with other settings: config.max_pairs was 1000, now"
    ):
        blindspots.run(config, SINGLE, max_pairs=2)
    blindspots.run(config, SINGLE, max_pairs=2, force=True)
    assert (first.with_name("stage_0-stage_1.old-1") / "pairs.jsonl").read_bytes() == before
    assert (first / "pairs.jsonl").read_bytes() == b"".join(before.splitlines(True)[:2])
    left_out = read_manifest(first, "blindspots").counts["blind_spots"]["left_out"]
    assert left_out == {"per_image": 0, "total": 1, "pool": 0}


def test_another_encoder_is_a_folder_whose_shards_may_be_cut_otherwise(
    config: Config, made: Path, found: Path, tmp_path: Path
) -> None:
    write_shards(tmp_path / "shards", (3, 30, 7))
    other = options(tmp_path / "other", tmp_path / "shards")
    index.run(other, SINGLE)
    folder = Layout.of(other).embeddings(0)
    embed(folder, SampleIndex.open(tmp_path / "other/index"), "second")
    for given, name in ((f"dino={folder}", "dino"), (str(folder), "other")):
        directory = blindspots.run(config, SINGLE, other=given)
        assert directory.name == f"stage_0-{name}"
        for file in ("pairs.jsonl", "near_duplicates.jsonl", "weights.npy"):
            assert (directory / file).read_bytes() == (found / file).read_bytes()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"above": 0.6, "below": 0.7}, "--below is 0.7 and --above is 0.6: wanted"),
        ({"above": 0.6}, "--below is 0.6 and --above is 0.6: wanted --below less than --above"),
        ({"below": -1.5}, "--below is -1.5"),
        ({"above": 1.0}, "--above is 1.0, wanted a cosine between 0 and 1"),
        ({"above": 0.0, "below": -0.5}, "--above is 0.0, wanted a cosine between 0 and 1"),
        ({"above": float("nan")}, "--above is nan"),
        ({"below": float("nan")}, "--below is nan"),
        ({"per_image": 0}, "--per-image is 0, wanted 1 or more"),
        ({"max_pairs": 0}, "--max-pairs is 0, wanted 1 or more"),
        ({"other": "0"}, "--other is stage 0, and so is --stage"),
        ({"other": "2"}, "stage_2/embeddings: run 'mclclip embed --stage 2' first"),
        ({"stage": 3}, "stage_3/embeddings: run 'mclclip embed --stage 3' first"),
        ({"other": "nowhere"}, "no finished embeddings at nowhere: run 'mclclip embed' first"),
        ({"other": "../a=nowhere"}, "--other names its encoder '../a': wanted letters"),
        ({"above": 0.999}, "no blind spot: stage_0 has no pair of images .* above 0.999; lower"),
        ({"below": -0.5}, r"of 5 pairs above 0.95 for stage_0 none is below -0.5 .* is 0.0000; "),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(
    config: Config, wanted: dict[str, Any], message: str
) -> None:
    line = failing(lambda: blindspots.run(config, SINGLE, **wanted), config)
    assert re.search(message, line), line
    assert not (Path(config.run_dir) / "blindspots").exists()


def test_embeddings_of_another_index_are_refused(config: Config, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", prefix="x")
    other = options(tmp_path / "other", tmp_path / "shards")
    index.run(other, SINGLE)
    folder = Layout.of(other).embeddings(0)
    embed(folder, SampleIndex.open(tmp_path / "other/index"), "second")
    line = failing(lambda: blindspots.run(config, SINGLE, other=str(folder)), config)
    assert "made from another index" in line and "index the same data.sources" in line
    same = str(Layout.of(config).embeddings(0))
    line = failing(lambda: blindspots.run(config, SINGLE, other=same), config)
    assert "holds the same embeddings as stage_0" in line


def test_damaged_embeddings_and_a_missing_faiss_are_one_line(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows_path(Layout.of(config).embeddings(1), 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\1")
    line = failing(lambda: blindspots.run(config, SINGLE), config)
    assert "00002.npy is damaged" in line and "mclclip embed --force" in line
    path.write_bytes(whole)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "faiss", None)  # as if it were not installed
        line = failing(lambda: blindspots.run(config, SINGLE), config)
    assert line.startswith("blindspots needs the package faiss")
    assert not (Path(config.run_dir) / "blindspots").exists()


def test_pictures_that_changed_since_leave_nothing_finished(config: Config, tmp_path: Path) -> None:
    shards = shutil.copytree(Path(config.data.sources["s"].shards).parent, tmp_path / "shards")
    moved = options(tmp_path / "moved", shards)
    index.run(moved, SINGLE)
    for stage, which in enumerate(("first", "second")):
        directory = Layout.of(moved).embeddings(stage)
        embed(directory, SampleIndex.open(tmp_path / "moved/index"), which)
    offset = int(SampleIndex.open(tmp_path / "moved/index").image_offset[3])
    path = shards / "00.tar"
    data = bytearray(path.read_bytes())
    data[offset : offset + 60] = bytes(60)
    path.write_bytes(bytes(data))
    line = failing(lambda: blindspots.run(moved, SINGLE), moved)
    assert line.startswith("sample s/003 cannot be decoded")
    shutil.copy(Path(config.data.sources["s"].shards).parent / "00.tar", path)
    directory = blindspots.run(moved, SINGLE)  # the same command goes on
    assert pairs_in(directory / "pairs.jsonl") == SPOTS


def test_the_command_line_has_its_options() -> None:
    words = "blindspots --other a=b --above 0.9 --below 0.5 --per-image 2 --max-pairs 7 run_dir=x"
    args = cli._parse(words.split())
    assert cli._flags(args) == {
        "stage": 0, "other": "a=b", "above": 0.9, "below": 0.5, "per_image": 2, "max_pairs": 7,
        "force": False,
    }  # fmt: skip
