"""The blindspots verb: planted pairs from embeddings on disk to data, pictures and a benchmark."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mclclip.config import Config
from mclclip.data.row_store import rows_path
from mclclip.data.sample_index import SampleIndex
from mclclip.eval.protocols.mmvp import read_pairs
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import RunPaths, read_manifest
from mclclip.verbs import blindspots, index
from tests import tiny
from tests.made_run import write_embeddings
from tests.unit.curate.made import cosine, failing, indexed, options, picture

SIZES = (17, 5, 18)  # samples per shard
DIM = 48
SPOTS = {(3, 20), (8, 39), (17, 21)}  # confused by stage 0, told apart by the other encoder
SAME = {(1, 2), (5, 30)}  # confused by both
BROKEN = 12
HIDDEN = (9, BROKEN)  # looks like a blind spot; the other encoder could not read one of them
NAMES = ("pairs.jsonl", "near_duplicates.jsonl", "weights.npy", "gallery.png")


def captions(number: int) -> list[str]:
    return [f"thing {number}\n=cmd \x1b[2J, again"]


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


def embed(config: Config, samples: SampleIndex, which: str, stage: int = 0) -> Path:
    directory, bad = RunPaths.of(config).embeddings(stage), [BROKEN] if which == "second" else []
    write_embeddings(directory, samples, rows_of(which), encoder=which, bad=bad)
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose stages 0 and 1 are embedded; read only, but for what a test asks for by name."""
    root = tmp_path_factory.mktemp("blind")
    config, samples = indexed(root, SIZES, captions)
    for stage, which in enumerate(("first", "second")):
        embed(config, samples, which, stage)
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


def refused(config: Config, **wanted: Any) -> str:
    return failing(lambda: blindspots.run(config, SINGLE, **wanted), config, "blindspots")


def test_the_planted_pairs_are_found_and_nothing_else(found: Path) -> None:
    """Recall and precision are 1; the pair with a sample that has no embedding is none of them."""
    assert found.name == "stage_0-stage_1"
    pairs = tiny.rows(found / "pairs.jsonl")
    assert {tuple(line["sample_ids"]) for line in pairs} == SPOTS
    assert {tuple(x["sample_ids"]) for x in tiny.rows(found / "near_duplicates.jsonl")} == SAME
    for line in pairs:
        i, j = line["sample_ids"]
        assert line["keys"] == [f"s/{i:03d}", f"s/{j:03d}"]
        for name, which in (("cosine", "first"), ("other_cosine", "second")):
            rows = rows_of(which)
            assert line[name] == pytest.approx(cosine(rows[i], rows[j]), abs=1e-6)


def test_the_manifest_counts_and_records(found: Path) -> None:
    manifest = read_manifest(found, "blindspots")
    manifest.check(found)
    nothing = {"per_image": 0, "total": 0, "pool": 0}
    assert manifest.counts == {
        "samples": sum(SIZES), "left_out_samples": 1, "confused": 5, "samples_in_blind_spots": 6,
        "blind_spots": {"found": 3, "kept": 3, "left_out": nothing},
        "near_duplicates": {"found": 2, "kept": 2, "left_out": nothing},
        "lowest_cosine": 0.0, "benchmark_pairs": 3,
    }  # fmt: skip
    assert {"index", "embeddings", "other_embeddings"} == manifest.inputs.keys()
    assert manifest.records.keys() == {*NAMES}


def test_weights_count_the_blind_spots_of_an_image_up_to_a_limit(
    found: Path, monkeypatch: pytest.MonkeyPatch, config: Config
) -> None:
    weights = np.load(found / "weights.npy")
    assert weights.dtype == np.float32 and weights.shape == (sum(SIZES),)
    assert np.flatnonzero(weights == 2).tolist() == sorted(i for pair in SPOTS for i in pair)
    assert np.flatnonzero(weights == 0).tolist() == [BROKEN]
    assert (weights == 1).sum() == sum(SIZES) - 7
    # Near pairs of stage 1 are of two images; here each of four is near the three others.
    crowd = rows_of("first")
    crowd[[3, 20, 8, 39]] = crowd[3]
    monkeypatch.setattr(sys.modules[__name__], "rows_of", lambda _: crowd)
    shutil.rmtree(directory := RunPaths.of(config).embeddings(0))
    assert embed(config, SampleIndex.open(RunPaths.of(config).index), "first") == directory
    weights = np.load(blindspots.run(config, SINGLE, per_image=2) / "weights.npy")
    assert weights[[3, 20, 8, 39]].tolist() == [3, 3, 3, 3]  # of the three at most two count


def test_the_gallery_shows_the_pictures_of_the_pairs(found: Path) -> None:
    with Image.open(found / "gallery.png") as sheet:
        assert sheet.format == "PNG"
        colours = {colour for _, colour in sheet.convert("RGB").getcolors(1 << 20) or []}
    for number in {i for pair in SPOTS for i in pair}:
        wanted = np.array([4 * number, 255 - 4 * number, 120])
        nearest = min(np.abs(np.array(colour) - wanted).max() for colour in colours)
        assert nearest <= 4, number  # a JPEG changes a colour a little


def test_the_benchmark_is_mmvp_s_layout_with_statements_left_to_fill_in(
    found: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(found / "benchmark", tmp_path / "benchmark")
    with pytest.raises(
        ValueError,
        match=r"6 of 6 rows have no Statement, .*Questions.csv line 2: write for each",
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
    shown = [line["sample_ids"] for line in tiny.rows(found / "pairs.jsonl")]
    assert len(pairs) == 3
    for number, (pair, ids) in enumerate(zip(pairs, shown, strict=True)):
        assert pair.kind == "blind spot" and pair.name == f"{2 * number + 1}-{2 * number + 2}"
        for place, (sample_id, path) in enumerate(zip(ids, pair.images, strict=True)):
            with Image.open(BytesIO(picture(sample_id))) as stored, Image.open(path) as written:
                assert np.array_equal(stored.convert("RGB"), written.convert("RGB"))
                assert written.format == ("JPEG" if path.suffix == ".jpg" else "PNG")
            row = rows[2 * number + place]
            assert row["Key"] == f"s/{sample_id:03d}"
            assert row["Caption"].startswith(f"thing {sample_id}") and row["Caption"].isprintable()


def test_an_image_is_in_one_pair_of_the_benchmark_and_these_are_bounded() -> None:
    pairs = np.array([[1, 2], [2, 3], [3, 4], [4, 5], [6, 7]])
    assert blindspots.within_caps(pairs, 1, 5) == ([0, 2, 4], 2)
    assert blindspots.within_caps(pairs, 1, 2) == ([0, 2], 1)


def test_another_encoder_is_a_folder_whose_shards_may_be_cut_otherwise(
    config: Config, found: Path, tmp_path: Path
) -> None:
    folder = embed(*indexed(tmp_path / "other", (3, 30, 7), captions), "second")
    for given, name in ((f"dino={folder}", "dino"), (str(folder), "other")):
        directory = blindspots.run(config, SINGLE, other=given)
        assert directory.name == f"stage_0-{name}"
        for file in NAMES[:3]:
            assert (directory / file).read_bytes() == (found / file).read_bytes()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"above": 0.6, "below": 0.7}, "--below is 0.7 and --above is 0.6: wanted"),
        ({"below": -1.5}, "--below is -1.5"),
        ({"above": 0.0, "below": -0.5}, "--above is 0.0: wanted a cosine"),
        ({"below": float("nan")}, "--below is nan"),
        ({"other": "0"}, "--other: .* holds the same embeddings as stage_0"),
        ({"stage": 3}, "stage_3/embeddings: run 'mclclip embed' first"),
        ({"other": "nowhere"}, "no finished embeddings at nowhere: run 'mclclip embed' first"),
        ({"other": "../a=nowhere"}, "--other names its encoder '../a': wanted letters"),
        ({"above": 0.999}, "no blind spot: stage_0 has no pair of images .* above 0.999; lower"),
        ({"below": -0.5}, r"of 5 pairs above 0.95 for stage_0 none is below -0.5 .* is 0.0000; "),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(
    config: Config, wanted: dict[str, Any], message: str
) -> None:
    line = refused(config, **wanted)
    assert re.search(message, line), line
    assert not (Path(config.run_dir) / "blindspots").exists()


def test_embeddings_of_another_index_are_refused(config: Config, tmp_path: Path) -> None:
    other = embed(*indexed(tmp_path / "other", SIZES, captions, prefix="x"), "second")
    line = refused(config, other=str(other))
    assert "made from another index" in line and "index the same data.sources" in line
    line = refused(config, other=str(RunPaths.of(config).embeddings(0)))
    assert "holds the same embeddings as stage_0" in line


def test_damaged_embeddings_and_a_missing_faiss_are_one_line(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows_path(RunPaths.of(config).embeddings(1), 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    line = refused(config)
    assert "00002.npy is damaged" in line and "mclclip embed --force" in line
    path.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed
    assert refused(config).startswith("blindspots needs the package faiss")
    assert not (Path(config.run_dir) / "blindspots").exists()


def test_pictures_that_changed_since_leave_nothing_finished(config: Config, tmp_path: Path) -> None:
    shards = Path(config.data.sources["s"].shards).parent
    moved = options(tmp_path / "moved", shutil.copytree(shards, tmp_path / "shards"))
    index.run(moved, SINGLE)
    samples = SampleIndex.open(tmp_path / "moved/index")
    for stage, which in enumerate(("first", "second")):
        embed(moved, samples, which, stage)
    path, offset = tmp_path / "shards/00.tar", int(samples.image_offset[3])
    data = bytearray(path.read_bytes())
    data[offset : offset + 60] = bytes(60)
    path.write_bytes(bytes(data))
    assert refused(moved).startswith("sample s/003 cannot be decoded")
    shutil.copy(shards / "00.tar", path)
    directory = blindspots.run(moved, SINGLE)  # the same command goes on
    assert {tuple(line["sample_ids"]) for line in tiny.rows(directory / "pairs.jsonl")} == SPOTS
