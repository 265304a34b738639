"""`Run` reads every part of a made-up run, bounded and checked, and never writes to it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip import config
from mclclip.config import Config
from mclclip.run.opened import PIECES, Run, Stage, spread
from mclclip.run.runlog import POINTS, read_records
from tests import made_run
from tests.forks import python
from tests.tiny import digests


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a made-up run, which tests only read."""
    return made_run.make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Iterator[Path]:
    """Returns a copy of the run that a test may damage; it reads the original's data."""
    yield Path(shutil.copytree(made, tmp_path / "run"))


def epochs_of(stage: Stage) -> list[dict[str, Any]]:
    return read_records(stage.directory("train") / "epochs.jsonl")


def test_a_run_is_opened_without_torch(made: Path) -> None:
    """A table of results should not take seconds."""
    code = (
        "import sys; from mclclip.run.opened import Run; from pathlib import Path\n"
        f"run = Run(Path({str(made)!r})); print(len(run.index), len(run.results))\n"
        "assert 'torch' not in sys.modules"
    )
    done = python(code, check=True)
    assert done.stdout.split() == ["48", "15"]


def test_parts_are_those_on_disk_and_nothing_is_written(made: Path) -> None:
    before = digests(made, "**/*")
    run = Run.open(made)
    assert str(made) in repr(run)
    assert run.config == config.load(str(made / "config.yaml"), []) and run.seed == run.config.seed
    assert len(run.index) == made_run.NUM_SAMPLES
    assert [stage.name for stage in run.stages] == ["stage_0", "stage_1", "stage_2"]
    assert run.finished("filters") == {"few": made / "filters/few"}
    assert [*run.finished("blindspots")] == ["stage_0-stage_1"]

    stage = run.stage(1)
    rows = np.concatenate([np.load(made / f"stage_1/embeddings/0000{n}.npy") for n in (0, 1)])
    np.testing.assert_array_equal(stage.embeddings[:], rows)
    assert stage.embeddings.left_out().tolist() == [*made_run.BROKEN]
    for name in ("labels", "similarities", "centroids"):
        path = made / f"stage_1/clusters/{'cluster_' * (name == 'labels')}{name}.npy"
        np.testing.assert_array_equal(getattr(stage.clusters, name), np.load(path))
    labels = np.load(made / "stage_1/pseudo_labels/pseudo_labels.npy")
    np.testing.assert_array_equal(stage.labels, labels[:, 0])
    assert stage.manifest("train").counts["steps"] == made_run.STEPS[-1]
    assert stage.metrics["step"].tolist() == [*made_run.STEPS]  # the half row that follows is none
    assert [row["seconds"] for row in epochs_of(stage)] == [60.0]

    table = run.results
    assert table.columns.tolist()[:4] == ["encoder", "benchmark", "metric", "value"]
    assert set(table["unit"]) == {"%"} and len(table) == len(run.result_rows) == 15
    chosen = table[(table.encoder == "stage_1") & (table.metric == "average")]
    assert chosen["value"].tolist() == [12.5]  # one of eight
    assert digests(made, "**/*") == before


def test_a_control_is_opened_like_the_run(made: Path) -> None:
    run = Run.open(made)
    control = run.controls["ungrouped"]
    assert control.index is run.index and control.config is run.config
    assert control.stage(1).name == "control_ungrouped_stage_1"
    assert epochs_of(control.stage(1))[0]["seconds"] == 120.0
    assert control.stage(0).directory("clusters") == run.stage(0).directory("clusters")


def test_a_run_of_a_configuration_and_one_without(made: Path, copied: Path) -> None:
    run = Run.of(config.load(str(made / "config.yaml"), ["seed=7"]))
    assert run.seed == 7 and (run.layout.run_dir, run.layout.variant) == (made, "mcl")
    (copied / "config.yaml").unlink()
    bare = Run.open(copied)
    assert bare.config is None and bare.seed == 0
    assert bare.captions([0])[0][0].startswith("a scarlet thing")
    empty = Run(copied / "none")
    with pytest.raises(FileNotFoundError, match="run 'mclclip index' first"):
        _ = empty.index
    with pytest.raises(FileNotFoundError, match="there is no run at .*none: name the folder"):
        Run.open(copied / "none")
    assert empty.stages == [] and empty.controls == {} and len(empty.results) == 0


def test_what_is_missing_is_one_line_with_the_verb_that_makes_it(made: Path) -> None:
    parts: list[tuple[Callable[[Run], Any], str]] = [
        (lambda run: run.stage(2).embeddings, "run 'mclclip embed' first"),
        (lambda run: run.stage(0).text_embeddings, "run 'mclclip embed --text' first"),
        (lambda run: run.stage(2).clusters, "run 'mclclip cluster' first"),
        (lambda run: run.stage(3).labels, "run 'mclclip cluster' first"),
        (lambda run: run.stage(3).manifest("train"), "run 'mclclip train' first"),
        (lambda run: run.stage(1).encoder(), "run 'mclclip export' first"),
    ]
    for part, line in parts:
        with pytest.raises(FileNotFoundError, match=line) as error:
            part(Run.open(made))
        assert "\n" not in str(error.value)


# --- rows, of which some are read --------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 200_001, 12_000_000])
def test_rows_are_spread_evenly_and_bounded(count: int) -> None:
    rows = spread(count, 200_000)
    assert len(rows) == min(count, 200_000) and len(np.unique(rows)) == len(rows)
    if count > 200_000:
        assert rows[0] == 0 and rows[-1] == count - 1
        cuts = np.flatnonzero(np.diff(rows) > 1)
        assert len(cuts) < PIECES and np.diff(rows).max() <= count / (PIECES - 2)


def test_rows_by_id_are_those_of_the_files_in_the_order_asked(made: Path) -> None:
    run = Run.open(made)
    stage = run.stage(0)
    for ids in ([*range(4), *range(14, 18), *range(44, 48)], [47, 0, 23, 24, 0], np.array([7]), []):
        wanted = np.asarray(ids, np.int64)
        np.testing.assert_array_equal(
            stage.clusters_of(ids), np.asarray(stage.clusters.labels)[wanted]
        )
        found = stage.embeddings_of(ids)
        assert found.dtype == np.float32 and len(found) == len(ids)
        if len(ids):
            np.testing.assert_array_equal(found, stage.embeddings[:][wanted])
    with pytest.raises(IndexError, match=r"sample_id 48, the index has 0\.\.47"):
        stage.embeddings_of([3, 48])
    both = np.array([3, 1], dtype=object)
    np.testing.assert_array_equal(stage.embeddings_of(both), stage.embeddings_of([3, 1]))
    assert run.stage(np.int64(1)).number == 1  # type: ignore[arg-type]
    mask = np.arange(48) < 7
    reads = (stage.embeddings_of, stage.clusters_of, run.captions, run.stored_images, run.images)
    for read in reads:
        for wrong, line in ((mask, "flatnonzero"), ([1.5], "not whole numbers")):
            with pytest.raises(ValueError, match=line):
                read(wrong)  # type: ignore[arg-type]
    for number in (-1, "stage_1"):
        with pytest.raises(ValueError, match="wanted a whole number"):
            run.stage(number)  # type: ignore[arg-type]


def test_a_run_is_read_from_any_folder_and_at_exit_nothing_is_said(made: Path) -> None:
    code = (
        "import os, sys; from mclclip import Run; run = Run.open('.'); run.captions([0]); "
        "os.chdir('/'); print(len(run.stage(0).embeddings))"
    )
    shown = python(code, check=True, cwd=made)
    assert (shown.stdout, shown.stderr) == ("48\n", "")


def test_rows_of_another_index_are_refused(copied: Path) -> None:
    run = Run.open(copied)
    run.index.digest = "0" * 64
    for read in (
        lambda stage: stage.embeddings,
        lambda stage: stage.embeddings_of([0]),
        lambda stage: stage.clusters,
        lambda stage: stage.labels,
    ):
        with pytest.raises(RuntimeError, match="--force' after 'mclclip index'"):
            read(run.stage(1))


def test_samples_are_drawn_by_the_seed_among_those_that_can_be_used(made: Path) -> None:
    run = Run.open(made)
    ids = run.draw_ids(10, purpose=4)
    assert len(ids) == 10 and (np.diff(ids) > 0).all()
    np.testing.assert_array_equal(Run.open(made).draw_ids(10, purpose=4), ids)
    assert not np.array_equal(run.draw_ids(10, purpose=5), ids)
    every = run.draw_ids(1_000, purpose=4)
    assert set(range(made_run.NUM_SAMPLES)) - {*every.tolist()} == {*made_run.BROKEN}


def test_of_a_long_file_of_records_some_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "pad": "x" * 90}) + "\n" for n in range(9000)))
    assert [row["step"] for row in read_records(path)] == [*range(9000)]
    steps = [row["step"] for row in read_records(path, POINTS)]
    assert len(set(steps)) == POINTS and (steps[0], steps[-1]) == (0, 8999)


# --- images and captions -----------------------------------------------------------------------


def test_images_and_captions_are_those_of_the_samples(made: Path) -> None:
    run = Run.open(made)
    red, blue = run.pictures([0, 1])
    assert red.shape == (70, 90, 3) and red[..., 0].mean() > 150 > red[..., 2].mean()
    assert blue[..., 2].mean() > 150
    texts = run.captions([1, 0])
    assert [text[0].split()[1] for text in texts] == ["azure", "scarlet"]


def test_images_are_read_as_the_options_of_the_data_say(made: Path) -> None:
    few: Config = config.load(str(made / "config.yaml"), ["data.max_image_pixels=100"])
    run = Run.of(few)
    with pytest.raises(RuntimeError, match=r"sample made/00000 .*cannot be decoded \(bomb.*embed"):
        run.images([0])
    full = config.load(str(made / "config.yaml"), ["data.verify=full"])
    assert len(Run.of(full).images([0])) == 1  # the index has no checksums to compare it with
