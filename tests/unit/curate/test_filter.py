"""The filter verb: planted copies, scores and evaluation images, from embeddings to weights."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.config import Config
from mclclip.data.row_store import rows_path
from mclclip.data.sample_index import SampleIndex
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Artifact, RunPaths, read_manifest
from mclclip.util import search
from mclclip.util.files import record_of
from mclclip.verbs import cluster
from mclclip.verbs import filter as filtering
from mclclip.verbs.filter import CODES
from tests import tiny
from tests.made_run import write_embeddings
from tests.unit.curate.made import cosine, failing, indexed, options, unit

SIZES = (17, 25, 18)  # samples per shard
COUNT, DIM, BROKEN = sum(SIZES), 64, 12
EXACT, NEAR = {(0, 20), (1, 2)}, {(5, 41), (6, 59)}
CHAIN = (10, 30, 50)  # the first is near the second, that near the third, the ends are not near
SEEN = {7: 1, 31: 4}  # sample -> the evaluation image that it copies
EVALUATION = 6
BARE = (5, 33)  # without captions


def captions(number: int) -> list[str]:
    return [f"thing {number}, {caption}" for caption in range(number % 3 + 1)] * (
        number not in BARE
    )


def images() -> np.ndarray:
    """Random directions in float16, but for what is planted; near is a cosine of 0.97 or more."""
    rng = np.random.default_rng(3)
    rows = unit(rng.normal(size=(COUNT, DIM)))
    other = unit(rng.normal(size=(COUNT, DIM)))
    for lower, higher in EXACT | NEAR:
        rows[higher] = rows[lower] + 0.15 * other[higher] * ((lower, higher) in NEAR)
    first, second, third = CHAIN
    side = other[0] - (other[0] @ rows[first]) * rows[first]
    for sample, angle in ((second, 0.25), (third, 0.5)):  # cosines 0.97, 0.97 and 0.88
        rows[sample] = np.cos(angle) * rows[first] + np.sin(angle) * unit(side)
    for sample, row in SEEN.items():
        rows[sample] = evaluation()[row] + 0.1 * other[sample]
    rows = unit(rows) * rng.uniform(0.5, 2, size=(COUNT, 1))
    rows[[higher for _, higher in EXACT]] = rows[[lower for lower, _ in EXACT]]
    rows[BROKEN] = 0.0
    return rows.astype(np.float16)


def evaluation() -> np.ndarray:
    return unit(np.random.default_rng(9).normal(size=(EVALUATION, DIM))).astype(np.float32)


def texts() -> np.ndarray:
    """A row per caption; those of higher samples fit less."""
    rng = np.random.default_rng(4)
    rows, noise = images().astype(np.float64), rng.normal(size=(10 * COUNT, DIM))
    found = [
        unit(rows[i] + 1e-6) + (0.2 + i / 50) * unit(noise[10 * i + number])
        for i in range(COUNT)
        for number in range(len(captions(i)))
    ]
    return np.array(found, np.float16)


def scores() -> np.ndarray:
    """Slow: the largest cosine of every sample with one of its captions."""
    rows, own, found, first = images(), texts(), [], 0
    for i in range(COUNT):
        mine = own[first : first + len(captions(i))]
        first += len(mine)
        values = [cosine(rows[i], text) for text in mine] if i != BROKEN else []
        found.append(max(values, default=np.nan))
    return np.array(found)


def embed(
    config: Config, rows: np.ndarray, encoder: str = "enc", feature: str = "projected"
) -> Path:
    """Writes the embeddings of stage 0, in the place of those that are there."""
    layout, bad = RunPaths.of(config), [BROKEN] if len(rows) == COUNT else []
    samples, directory = SampleIndex.open(layout.index), layout.embeddings(0)
    shutil.rmtree(directory, ignore_errors=True)
    write_embeddings(directory, samples, rows, encoder=encoder, bad=bad, feature=feature)
    return directory


def evaluation_run(root: Path, rows: np.ndarray, **how: str) -> Path:
    """A run over evaluation images; returns the folder of their embeddings."""
    other, _ = indexed(root, (4, len(rows) - 4), captions, prefix="e")
    return embed(other, rows, **how)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose images and captions are embedded and clustered, and evaluation images."""
    root = tmp_path_factory.mktemp("filter")
    config, samples = indexed(root, SIZES, captions)
    embed(config, images())
    sizes = [
        sum(len(captions(i)) for i in range(shard.start, shard.stop)) for shard in samples.shards
    ]
    directory, kind = RunPaths.of(config).text_embeddings, "text_embeddings"
    write_embeddings(directory, samples, texts(), encoder="enc", sizes=sizes, kind=kind)
    cluster.run(config, SINGLE, stage=0)
    np.save(root / "evaluation.npy", evaluation())
    evaluation_run(root / "eval", evaluation())
    return root


@pytest.fixture
def config(made: Path, tmp_path: Path) -> Config:
    """A copy of the run, for one test."""
    shutil.copytree(made / "run", tmp_path / "run")
    return options(tmp_path / "run", made / "shards")


def left_out(directory: Path, reason: str) -> set[int]:
    return {*np.flatnonzero(np.load(directory / "reasons.npy") == CODES.index(reason)).tolist()}


def done(config: Config, **wanted: Any) -> Path:
    directory = filtering.run(config, SINGLE, **wanted)
    assert directory is not None
    return directory


def refused(config: Config, **wanted: Any) -> str:
    return failing(lambda: filtering.run(config, SINGLE, **wanted), config, "filters")


# --- near-duplicates ---


def test_of_planted_copies_one_is_kept_and_nothing_else_is_left_out(config: Config) -> None:
    """Within all: precision and recall are 1, and each line says what is kept instead."""
    shutil.rmtree(RunPaths.of(config).text_embeddings)
    directory = done(config, near_duplicates=0.95, within="all")
    wanted = {higher: lower for lower, higher in EXACT | NEAR}
    wanted |= {CHAIN[1]: CHAIN[0]}  # the third of the chain is not near the first
    weights = np.load(directory / "weights.npy")
    assert weights.dtype == np.float32 and {*np.unique(weights)} == {0, 1}
    assert {*np.flatnonzero(weights == 0).tolist()} == {*wanted, BROKEN}
    rows = images()
    for line in tiny.rows(directory / "left_out.jsonl"):
        if line["reason"] == "no_embedding":
            assert line == {"sample_id": 12, "key": "s/012", "reason": "no_embedding"}
            continue
        sample, kept = line["sample_id"], line["of"]
        assert kept == wanted.pop(sample)
        assert (line["key"], line["of_key"]) == (f"s/{sample:03d}", f"s/{kept:03d}")
        assert line["cosine"] == pytest.approx(cosine(rows[sample], rows[kept]), abs=1e-6)
    assert not wanted
    assert not (directory / "scores.npy").exists()
    manifest = read_manifest(directory, "filter")
    manifest.check(directory)
    assert manifest.counts["near_duplicates"] == {
        "pairs": 6, "groups": 5, "largest_group": 3, "by_chain": 0,
    }  # fmt: skip
    assert manifest.counts["reasons"] == dict.fromkeys(CODES, 0) | {
        "kept": COUNT - 6, "no_embedding": 1, "near_duplicate": 5,
    }  # fmt: skip
    assert manifest.counts["without_score"] == COUNT


def test_the_copy_with_the_highest_score_is_kept(config: Config) -> None:
    own = scores()
    directory = done(config, near_duplicates=0.95, within="all")
    for line in tiny.rows(directory / "left_out.jsonl"):
        if line["reason"] == "near_duplicate":
            assert not own[line["sample_id"]] > own[line["of"]]
    assert 5 in left_out(directory, "near_duplicate")  # it has no caption, its copy has one
    assert not left_out(directory, "no_caption")  # no score is asked for
    assert np.load(directory / "weights.npy")[33] == 1


# --- scores ---


def test_scores_are_those_of_a_loop_and_low_ones_are_left_out(config: Config) -> None:
    directory = done(config, min_clip_score=0.9)
    found, wanted = np.load(directory / "scores.npy"), scores()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert {*np.flatnonzero(np.isnan(found)).tolist()} == {*BARE, BROKEN}
    assert left_out(directory, "no_caption") == {*BARE}
    low = {*np.flatnonzero(found < np.float32(0.9)).tolist()}
    assert 5 < len(low) < COUNT - 5
    assert left_out(directory, "low_score") == low
    assert {line["sample_id"] for line in tiny.rows(directory / "left_out.jsonl")} == {BROKEN}
    counts = read_manifest(directory, "filter").counts
    assert counts["without_score"] == 3
    assert counts["lowest_score"] == found[found >= np.float32(0.9)].min()


# --- evaluation images ---


@pytest.mark.parametrize("kind", ["run", "npy", "control"])
def test_copies_of_evaluation_images_are_listed_with_these(
    config: Config, made: Path, kind: str, tmp_path: Path
) -> None:
    folder = made / ("evaluation.npy" if kind == "npy" else "eval/run/stage_0/embeddings")
    if kind == "control":
        shutil.copytree(made / "eval/run", tmp_path / "eval")
        of_run, folder = folder, tmp_path / "eval/controls/ungrouped/stage_1/embeddings"
        shutil.copytree(of_run, folder)
    directory = done(config, against=[f"ev={folder}"])
    assert left_out(directory, "against") == {*SEEN}
    found = [
        line for line in tiny.rows(directory / "left_out.jsonl") if line["reason"] == "against"
    ]
    rows = images()
    for line in found:
        sample, row = line["sample_id"], line["of"]
        assert (row, line["against"]) == (SEEN[sample], "ev")
        assert line["of_key"] == (None if kind == "npy" else f"s/e{row:03d}")
        assert line["cosine"] == pytest.approx(cosine(rows[sample], evaluation()[row]), abs=1e-3)
    counts = read_manifest(directory, "filter").counts["against"]
    assert counts == {"ev": {"images": 6, "images_with_copies": 2, "samples": 2}}


def test_of_several_sets_the_nearest_image_is_named(config: Config, tmp_path: Path) -> None:
    rows = images().astype(np.float32)
    np.save(tmp_path / "a.npy", unit(evaluation() + 0.02))
    np.save(tmp_path / "b.npy", np.stack([rows[7], rows[8]]))
    sets = [str(tmp_path / "a.npy"), f"b={tmp_path}/b.npy"]
    found = {}
    for number, against in enumerate((sets, sets[::-1])):
        directory = done(config, against=against, against_cosine=0.9, name=f"f{number}")
        found[number] = {
            line["sample_id"]: (line["against"], line["of"])
            for line in tiny.rows(directory / "left_out.jsonl")
            if line["reason"] == "against"
        }
    assert found[0] == found[1] == {7: ("b", 0), 8: ("b", 1), 31: (sets[0], 4)}


def test_every_filter_sees_what_those_before_it_left(config: Config, tmp_path: Path) -> None:
    """The copy of an evaluation image is no sample that others are copies of."""
    np.save(tmp_path / "a.npy", images().astype(np.float32)[[1]])
    own = {"against": [str(tmp_path / "a.npy")], "against_cosine": 0.999}
    directory = done(config, near_duplicates=0.95, within="all", min_clip_score=0.9, **own)
    assert left_out(directory, "against") == {1, 2}
    assert not left_out(directory, "near_duplicate") & {1, 2, *left_out(directory, "low_score")}
    kept = {
        line["of"]
        for line in tiny.rows(directory / "left_out.jsonl")
        if line["reason"] == "near_duplicate"
    }
    assert np.load(directory / "weights.npy")[[*kept]].all()


def test_a_share_is_one_of_what_the_filters_before_it_left(config: Config, tmp_path: Path) -> None:
    """So that copies of evaluation images, however high their scores, take nobody's place."""
    known = np.flatnonzero(~np.isnan(scores()))
    highest = known[np.argsort(-scores()[known])][:10]
    np.save(tmp_path / "a.npy", images().astype(np.float32)[highest])
    directory = done(config, keep_share=0.3, against=[f"e={tmp_path}/a.npy"], against_cosine=0.999)
    copies = left_out(directory, "against")
    assert {*highest.tolist()} <= copies
    of = [i for i in known[np.argsort(-scores()[known], kind="stable")] if i not in copies]
    kept = {*np.flatnonzero(np.load(directory / "weights.npy")).tolist()}
    assert kept == {*of[: round(0.3 * len(of))]} and kept


def test_a_folder_of_somebody_else_is_refused(config: Config) -> None:
    folder = Path(config.run_dir) / "filters/mine"
    folder.mkdir(parents=True)
    (folder / "weights.npy").write_text("mine")
    with pytest.raises(ValueError, match=r"--name .*filters/mine holds files that mclclip did not"):
        done(config, keep_share=0.5, name="mine")
    assert (folder / "weights.npy").read_text() == "mine"


# --- what is shown ---


def test_without_a_filter_scores_and_pairs_are_shown_and_nothing_is_written(
    config: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "mclclip"):
        assert filtering.run(config, SINGLE, within="all") is None
    assert not (Path(config.run_dir) / "filters").exists()
    shown = np.quantile(scores()[np.isfinite(scores())], 0.5)
    assert "57 samples (2 without a caption, 1 without an embedding)" in caplog.text
    assert f"50 % {shown:.4f}" in caplog.text
    assert "6 pairs above 0.95 among all samples\n" in caplog.text
    assert "2 pairs above 0.99 among all samples\n" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "mclclip"):
        filtering.run(config, SINGLE)
    assert "2 pairs above 0.99 within clusters\n" in caplog.text
    caplog.clear()
    monkeypatch.setattr(filtering, "SURVEYED_SAMPLES", 40)  # of 59 with an embedding
    with caplog.at_level(logging.INFO, "mclclip"):
        filtering.run(config, SINGLE, within="all")
    usable = np.delete(np.arange(COUNT), BROKEN)
    drawn = set(np.random.default_rng([config.seed, 7]).permutation(usable)[:40].tolist())
    first, second, third = CHAIN
    num_pairs = sum({*pair} <= drawn for pair in EXACT | NEAR | {(first, second), (second, third)})
    assert num_pairs > 0
    estimate = f"{num_pairs / (40 / 59) ** 2:.0f} pairs above 0.95 among all samples, estimated"
    assert f"{estimate} from 68 % of the samples\n" in caplog.text


def test_many_equal_embeddings_cost_no_more_than_their_number(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture that is there 37 times has 36 pairs with the first, and 666 in all."""
    rows = images()
    same = np.setdiff1d(np.arange(20, COUNT), [30, 31, 41])[:36]
    rows[same] = rows[5]
    embed(config, rows)
    searched = []
    original = search.near_pairs

    def near_pairs(rows: Any, *arguments: Any, **more: Any) -> Any:
        searched.append(len(rows))
        return original(rows, *arguments, **more)

    monkeypatch.setattr(search, "near_pairs", near_pairs)
    directory = done(config, near_duplicates=0.95, within="all")
    assert searched == [COUNT - 1 - 36 - 1]  # without a broken one, these copies, and another
    counts = read_manifest(directory, "filter").counts["near_duplicates"]
    assert counts["largest_group"] == 38 and counts["by_chain"] == 0


def test_without_faiss_scores_are_filtered_and_the_rest_is_one_line(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed
    for wanted in ({}, {"near_duplicates": 0.9}):
        assert refused(config, **wanted).startswith("filter needs the package faiss")
    assert done(config, keep_share=0.5)


# --- what is refused ---


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"near_duplicates": 1.0}, "--near-duplicates is 1.0, wanted a number between 0 and 1"),
        ({"keep_share": 0.0}, "--keep-share is 0.0, wanted a number between 0 and 1"),
        ({"min_clip_score": 0.2, "keep_share": 0.3}, "leave one of them out"),
        ({"against_cosine": 0.9}, "--against-cosine is the threshold of --against: give"),
        ({"keep_share": 0.3, "within": "all"}, "--within says .* --near-duplicates"),
        ({"against": ["nowhere"]}, "no finished embeddings at nowhere: run 'mclclip embed' first"),
        ({"against": ["nowhere.npy"]}, "--against: there is no file at nowhere.npy"),
        ({"against": ["../a=x.npy"]}, r"--against names evaluation images '../a': wanted letters"),
        ({"stage": 1, "keep_share": 0.5}, "stage_1/embeddings: run 'mclclip embed'"),
        ({"min_clip_score": 0.999}, r"all 60 samples would be left out \(no_embedding 1, no_cap"),
        ({"near_duplicates": 0.9, "name": "../x"}, "--name names its folder '../x': wanted"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(
    config: Config, wanted: dict[str, Any], message: str
) -> None:
    line = refused(config, **wanted)
    assert not (Path(config.run_dir) / "filters").exists()
    assert re.search(message, line), line


def test_evaluation_images_of_another_kind_are_refused(config: Config, tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.ones((3, DIM + 1), np.float32))
    np.save(tmp_path / "whole.npy", np.ones((3, DIM), int))
    np.save(tmp_path / "nan.npy", np.full((3, DIM), np.nan, np.float32))
    np.save(tmp_path / "good.npy", evaluation())
    (tmp_path / "text.npy").write_text("no array")
    for name, message in (
        ("wide", f"has rows of {DIM + 1} numbers"), ("nan", "holds NaN or infinity"),
        ("whole", "wanted floating-point rows [M, D]"), ("text", "is no .npy file of rows"),
    ):  # fmt: skip
        assert message in refused(config, against=[f"{tmp_path}/{name}.npy"])
    assert "names two sets alike" in refused(config, against=[f"a={tmp_path}/good.npy"] * 2)
    other = evaluation_run(tmp_path / "other", evaluation(), encoder="another")
    line = refused(config, against=[str(other)])
    assert "of another encoder" in line and "model.name=local-dir:" in line
    pooled = evaluation_run(tmp_path / "pooled", evaluation(), feature="pooled")
    assert "are of the feature pooled" in refused(config, against=[str(pooled)])
    # Equal weights are one model, though exported by two runs.
    for directory in (other, RunPaths.of(config).embeddings(0)):
        export, name = directory.parent / "export", "open_clip_model.safetensors"
        artifact = Artifact(export, kind="export", config={"run": str(export)}, inputs={}).compare(
            write=True
        )
        (export / name).write_bytes(b"weights")
        artifact.finish({}, records={name: record_of(export / name)})
    assert left_out(done(config, against=[str(other)]), "against") == {*SEEN}


def test_embeddings_that_do_not_fit_are_one_line(config: Config) -> None:
    layout, near_by = RunPaths.of(config), {"near_duplicates": 0.95}
    labels = layout.clusters(0) / "cluster_labels.npy"
    for path in (rows_path(layout.embeddings(0), 2), labels):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert f"{path.name} is damaged" in refused(config, **near_by)
        path.write_bytes(whole)
    embed(config, images(), feature="pooled")
    line = refused(config, keep_share=0.5)
    assert line.startswith("CLIP scores are asked for, and embeddings at")
    embed(config, images(), encoder="another")
    assert "are of another encoder than the images'" in refused(config, **near_by)
    shutil.rmtree(layout.text_embeddings)
    within = {"within": "clusters", **near_by}
    assert "are of other embeddings than those at" in refused(config, **within)
    assert "no finished text embeddings" in refused(config, keep_share=0.5)
    shutil.rmtree(layout.clusters(0))
    assert "no finished clusters at" in refused(config, **within)


def test_embeddings_of_another_index_are_refused(made: Path, tmp_path: Path) -> None:
    other, _ = indexed(tmp_path, SIZES, captions, prefix="x")
    shutil.copytree(made / "run/stage_0", tmp_path / "run/stage_0")
    line = refused(other, near_duplicates=0.9)
    assert "(and other sample keys): run 'mclclip embed --force'" in line


def test_within_clusters_copies_in_one_cluster_are_found(config: Config) -> None:
    labels = np.load(RunPaths.of(config).clusters(0) / "cluster_labels.npy")[:, 0]
    pairs = EXACT | NEAR | {CHAIN[:2], CHAIN[1:]}
    together = {pair for pair in pairs if labels[pair[0]] == labels[pair[1]]}
    assert EXACT <= together  # the recall of exact copies is 1 in any clustering
    found = done(config, near_duplicates=0.95, name="default")
    assert read_manifest(found, "filter").config["filters"]["within"] == "clusters"
    assert read_manifest(found, "filter").counts["near_duplicates"]["pairs"] == len(together)
    everywhere = done(config, near_duplicates=0.95, within="all", name="everywhere")
    assert left_out(found, "near_duplicate") <= left_out(everywhere, "near_duplicate")
