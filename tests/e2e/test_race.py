"""``mclclip race`` as a user types it: killed and resumed, as jobs of one remedy each, and refused
where its base has changed."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import pytest

from mclclip.eval import results
from mclclip.run import artifacts
from tests import tiny
from tests.e2e.conftest import KillAfter, Shell

REMEDIES = ("mcl", "ungrouped")
OPTIONS = ("num_stages=1", "base.steps=1", "train.steps=2", "export.concat=[stage_norm]",
           "export.soup=false", "cluster.num_clusters=2", "train.checkpoint.every=1")  # fmt: skip


def words(folder: Path, *more: object) -> tuple[object, ...]:
    config = ("race", "--config", folder / "config.yaml")
    return (*config, "--remedies", *REMEDIES, "--seeds", 3, 4, *more)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("data"), num_samples=48)


@pytest.fixture(scope="module")
def finished(shell: Shell, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a race that was killed in its third training, behind a checkpoint, and then
    finished by the same command. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("race")
    tiny.write_config(folder / "config.yaml", folder / "race", data, *OPTIONS)
    killed = shell(*words(folder), inside=KillAfter("update", 5))
    assert killed.codes == [-9]
    assert not artifacts.is_finished(
        folder / "race/ungrouped/seed_3/controls/ungrouped/stage_1/train"
    )
    again = shell.ok(*words(folder))
    assert "ungrouped/stage_1/train/checkpoints/step_00000001" in again.stderr
    (folder / "stdout").write_text(again.stdout)
    return folder


def test_all_remedies_share_one_base_and_see_as_many_samples(finished: Path) -> None:
    race = finished / "race"
    for seed in (3, 4):
        base = race / "base" / f"seed_{seed}"
        for name in REMEDIES:
            run = race / name / f"seed_{seed}"
            for part in ("index", "stage_0", "stage_1/pseudo_labels"):
                assert (run / part).is_symlink() and not Path((run / part).readlink()).is_absolute()
                assert (run / part).resolve() == (base / part).resolve()
            prefix = "" if name == "mcl" else "controls/ungrouped/"
            manifest = artifacts.read_manifest(run / f"{prefix}stage_1/train", "train")
            assert manifest.counts["samples_seen"] == 2 * 24
            assert manifest.config["seed"] == seed
            measured = {row.model for row in results.read(run / "results.jsonl")}
            prefix = "" if name == "mcl" else "control_ungrouped_"
            assert measured == {"stage_0", f"{prefix}concat_stage_norm"}
    exports = [race / "base" / f"seed_{seed}" / "stage_0/export" for seed in (3, 4)]
    assert tiny.digests(exports[0]) != tiny.digests(exports[1])


def test_the_table_has_every_remedy_against_base_and_control(finished: Path) -> None:
    with (finished / "race" / "race.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if not row["part"]]
    assert [(row["model"], row["against"]) for row in rows] == [
        ("mcl", "base"), ("ungrouped", "base"), ("mcl", "ungrouped"),
    ]  # fmt: skip
    assert all("2 seeds" in row["test"] and "items" in row["test"] for row in rows)
    html = (finished / "race" / "race.html").read_text()
    verdict = "Nothing beats the ungrouped control"
    assert verdict in html and verdict in (finished / "stdout").read_text()
    assert not re.findall(r"(?:src|href)=\"http", html)


def test_a_changed_base_is_refused_in_one_line(
    finished: Path, shell: Shell, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    folder = tmp_path / "copy"
    run_dir = f"run_dir={folder / 'race'}"
    before = (folder / "race" / "race.json").read_bytes()
    line = shell.refused(*words(folder, run_dir, "train.lr=0.5", "--only", "mcl"))
    assert "is a race of another base configuration: train.lr was 0.001, now 0.5" in line
    assert (folder / "race" / "race.json").read_bytes() == before


def test_a_race_that_is_refused_leaves_nothing(shell: Shell, data: Path, tmp_path: Path) -> None:
    """What is refused (``unit/test_race.py``) leaves neither a folder nor a state behind; samples
    that a remedy cannot use are said before stage 0 is trained."""
    tiny.write_config(tmp_path / "config.yaml", tmp_path / "race", data, *OPTIONS)
    race = ("race", "--config", tmp_path / "config.yaml", "--remedies")
    shell.refused(*race, "mcl", "eval.suite.pairs.path=/nowhere")
    assert not (tmp_path / "race").exists()
    sweep = tmp_path / "own.sweep"
    sweep.write_text(
        "hard controls=[ungrouped] train.objective.kind=info_nce "
        "train.objective.hard_captions.field=nowhere\n"
    )
    words = f"remedy 'hard' of {sweep}: train.objective.hard_"
    assert words in shell.refused(*race, sweep)
    assert not (tmp_path / "race/base/seed_0/stage_0").exists()
