"""launch/sweep.sh gives the options of each run of a sweep file, shares parts, refuses mistakes."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mclclip import config
from tests import tiny

SCRIPT = tiny.ROOT / "launch" / "sweep.sh"
RECIPE = tiny.ROOT / "launch" / "recipes" / "mlcd_ablation_vitb32.yaml"
TABLE = RECIPE.with_name("mlcd_table6.sweep")
SWEEPS = sorted(RECIPE.parent.glob("*.sweep"))
FILES_OF_SIMLAP = [file for file in SWEEPS if file.stem.startswith("simlap_")]
NEEDED = ("index", "stage_0/export", "stage_0/embeddings", "stage_0/clusters")
OPTIONAL = (
    "stage_0/train", "stage_0/text_embeddings", "stage_0/image_rows", "text_rows",
)  # fmt: skip


def sweep(*arguments: object, **environment: object) -> subprocess.CompletedProcess[str]:
    own = {key: value for key, value in os.environ.items() if key not in ("RUNS", "SHARED")}
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=own | {key: str(value) for key, value in environment.items()},
        check=False,
    )


def refused(*arguments: object, **environment: object) -> str:
    """Returns the one line on stderr; nothing is printed that could be taken for options."""
    ended = sweep(*arguments, **environment)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("sweep.sh: ") and ended.stderr.count("\n") == 1
    return ended.stderr


# --- the shipped files --------------------------------------------------------------------------


def commands(file: Path) -> list[tuple[Path, list[str], list[str]]]:
    """The runs that a file's head describes: the recipe, the options before $options, and those
    behind it. Other variables of the shell stand for a number."""
    text = "\n".join(line[1:] for line in file.read_text().splitlines() if line.startswith("#"))
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if "$options" not in line or "--config" not in line:
            continue
        words = [word for word in shlex.split(line) if "=" in word or word == "$options"]
        words = [re.sub(r"\$(?!options)\w+", "1", word) for word in words]
        (recipe,) = re.findall(r"--config launch/recipes/(\w+\.yaml)", line)
        place = words.index("$options")
        found.append((file.with_name(recipe), words[:place], words[place + 1 :]))
    return found


@pytest.mark.parametrize("file", SWEEPS, ids=lambda path: path.stem)
def test_every_line_is_a_run_of_every_recipe_that_its_head_names(file: Path) -> None:
    runs = [line.split()[2:] for line in sweep(file).stdout.splitlines()]
    described = commands(file)
    assert described, "the head shows how its runs are started"
    settings = []
    for recipe, before, after in described:
        tree = yaml.safe_load(recipe.read_text())
        found = [config.from_tree(tree, [*before, *options, *after]) for options in runs]
        settings = settings or [dataclasses.replace(each, run_dir="") for each in found]
    twice = [n + 1 for n, each in enumerate(settings) if each in settings[:n]]
    assert not twice, f"runs {twice} of {described[0][0].name} are done twice"


def test_simlap_s_runs_warm_up_for_40_epochs_on_imagenet() -> None:
    """Table 5a of SimLAP has 40 in each column; lines of fewer than 100 epochs say their own."""
    seen: set[int | None] = set()
    for file in FILES_OF_SIMLAP:
        runs = [line.split()[1:] for line in sweep(file).stdout.splitlines()]
        for recipe, before, after in commands(file):
            for name, *options in runs if recipe.stem == "simlap_imagenet" else []:
                found = config.load(recipe, [*before, *options, *after])
                trainings = [found.base, *([found.train] if found.num_stages else [])]
                for training in trainings:
                    assert training is not None and training.epochs is not None
                    if training.epochs < 100:
                        assert training.epochs in (4, 8, 16) and "a tenth" in file.read_text()
                        continue
                    assert training.warmup * training.epochs == pytest.approx(40, abs=1e-3), name
                    seen.add(training.epochs)
    assert seen == {100, 200, 300, 500, 600, 1000}


# --- the runs of a file -------------------------------------------------------------------------


def test_the_runs_of_table_6_are_the_papers() -> None:
    listed = sweep(TABLE).stdout.splitlines()
    found = [config.load(RECIPE, line.split()[2:]) for line in listed]
    assert f"seq {len(found)})" in TABLE.read_text()
    assert {c.cluster.num_clusters for c in found} == {
        10_000, 20_000, 50_000, 1_000_000, 2_000_000, 5_000_000,
    }  # fmt: skip
    centers = [c.train.objective for c in found if c.train.objective.reads.clusters]
    assert {c.sample_rate for c in centers} == {0.01, 0.05, 0.1, 0.2, 0.5, 1.0}
    assert {c.labels_per_sample for c in centers} == {1, 2, 4, 8, 16, 32}
    assert {c.threshold for c in centers} == {0.95, 0.93, 0.91, 0.89, 0.87, 0.85, None}
    assert {c.kind for c in centers} == {"mlcd", "mlc", "single_label"}
    assert {c.train.lr for c in found} == {1e-3, 5e-4}  # section 4.1, and Table 8


@pytest.mark.parametrize("file", [TABLE, RECIPE])
def test_a_command_as_written_starts_nothing_where_the_sweep_fails(
    file: Path, tmp_path: Path
) -> None:
    """The commands of the header, with a SHARED that is none, and stand-ins for what they start."""
    words = r"(?:for n in .*?\n#   done|options=.*?\$options)$"
    (text,) = re.findall(words, file.read_text(), re.MULTILINE | re.DOTALL)
    text = re.sub("^#", "", text, flags=re.MULTILINE).replace("runs/mlcd_ablation ", "none ")
    stand_ins = "".join(
        f"{name}() {{ echo $* >>{tmp_path}/started; }}\n" for name in ("sbatch", "mclclip")
    )
    for shared, count in (("none", 0), ("", 1)):
        script = f"{stand_ins}file={TABLE}\nexport SHARED={shared}\n{text}"
        script = script if shared else script.replace("SHARED=none ", "").replace("seq 28", "seq 1")
        done = subprocess.run(
            ["bash", "-c", script], cwd=tiny.ROOT, capture_output=True, text=True, check=False
        )
        started = tmp_path / "started"
        lines = started.read_text().splitlines() if started.exists() else []
        assert len(lines) == count, done.stderr
        assert all("run_dir=runs/mlcd_table6/k_" in line for line in lines)
        assert done.stderr.count("\n") == 1 - count


def test_comments_and_empty_lines(tmp_path: Path) -> None:
    table = tmp_path / "some.sweep"
    table.write_text(
        "  # two runs\n\n base\t# the recipe itself\nmore  train.lr=0.1 \t seed=a#b # later"
    )
    assert [line.split() for line in sweep(table).stdout.splitlines()] == [
        ["1", "base"],
        ["2", "more", "train.lr=0.1", "seed=a#b"],
    ]
    assert sweep(table, 1).stdout == "run_dir=runs/some/base\n"
    assert sweep(table, "02").stdout == "run_dir=runs/some/more train.lr=0.1 seed=a#b\n"


def test_a_line_that_is_none(tmp_path: Path) -> None:
    """Whichever run is asked for: the first jobs of a loop shall not start."""
    table = tmp_path / "some.sweep"
    for text, words in {
        "a seed=1\nb seed=2\na seed=3\n": "two runs are named 'a'",
        "../a seed=1\n": "is named '../a'",
        ".. seed=1\n": "is named '..'",
        "seed=1\n": "is named 'seed=1'",
        "a seed=1 * \n": "run 'a' has '*'",
        "# none\n\n": "has no runs",
    }.items():
        table.write_text(text)
        assert f"{table}" in (said := refused(table, 1)) and words in said
    assert "has no runs" in refused(table)


def test_a_number_of_no_run_no_file_and_spaces() -> None:
    for number in (0, 29, "1+1", 10**12):
        assert f"no run {number} in {TABLE}: wanted 1 to 28" in refused(TABLE, number)
    assert "give a sweep file" in refused("none.sweep") and "give a sweep file" in refused()
    assert "has spaces: set RUNS" in refused(TABLE, 1, RUNS="my runs")


# --- what is shared -----------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Makes a run directory in which all parts that can be shared are finished, except those that
    not every run has."""
    folder = tmp_path / "base"
    for part in NEEDED:
        (folder / part).mkdir(parents=True)
        (folder / part / "manifest.json").touch()
    for part in OPTIONAL:
        (folder / part).mkdir()
    return folder


@pytest.fixture
def given(tmp_path: Path, shared: Path) -> tuple[Path, dict[str, Any]]:
    """Makes a sweep file of two runs, the second with options of cluster; returns it and the
    variables RUNS and SHARED."""
    table = tmp_path / "two.sweep"
    table.write_text("same run.cluster.seed=1\nother cluster.num_clusters=7\n")
    return table, {"RUNS": tmp_path / "runs", "SHARED": shared}


def links(run_dir: Path) -> set[str]:
    return {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_symlink()}


def test_what_is_finished_is_linked(given: Any, shared: Path, tmp_path: Path) -> None:
    table, variables = given
    for _ in range(2):  # a run that goes on finds its links
        for number, name in enumerate(("same", "other"), start=1):
            ended = sweep(table, number, **variables)
            assert (ended.returncode, ended.stderr) == (0, "")
            assert ended.stdout.startswith(f"run_dir={tmp_path}/runs/{name} ")
    same, other = (tmp_path / "runs" / name for name in ("same", "other"))
    assert (same / "index").readlink() == shared / "index"
    assert links(same) == set(NEEDED)
    assert links(other) == set(NEEDED) - {"stage_0/clusters"}
    for part in OPTIONAL:
        (shared / part / "manifest.json").touch()
    sweep(table, 1, **variables)
    assert links(same) == {*NEEDED, *OPTIONAL}
    for words in ("cluster={seed:1}", "seed=1 cluster.seed=1"):
        table.write_text(f"a {words}\n")
        assert sweep(table, 1, **variables).returncode == 0
        assert "stage_0/clusters" not in links(tmp_path / "runs" / "a")


@pytest.mark.parametrize(
    ("part", "verb"),
    [("stage_0/export", "export --stage 0"), ("stage_0/clusters", "cluster --stage 0")],
)
def test_what_is_not_finished_is_named(
    given: Any, shared: Path, tmp_path: Path, part: str, verb: str
) -> None:
    table, variables = given
    (shared / part / "manifest.json").unlink()  # begun: a run would write through the link
    said = refused(table, 1, **variables)
    assert f"no finished {part}: 'mclclip {verb}' makes it" in said
    assert not (tmp_path / "runs").exists(), "half a run directory"
    if part == "stage_0/clusters":
        assert sweep(table, 2, **variables).returncode == 0
        own = tmp_path / "runs" / "same" / "stage_0" / "clusters"  # what a run made itself stays
        own.mkdir(parents=True)
        assert sweep(table, 1, **variables).returncode == 0 and not own.is_symlink()
        assert "is no run directory" in refused(table, 1, **{**variables, "SHARED": tmp_path / "x"})
    else:
        refused(table, 2, **variables)


def test_a_link_that_leads_nowhere(given: Any, shared: Path, tmp_path: Path) -> None:
    table, variables = given
    sweep(table, 1, **variables)
    moved = shared.rename(tmp_path / "moved")
    said = refused(table, 1, **{**variables, "SHARED": moved})
    assert f"{tmp_path}/runs/same/index is a link to {shared}/index" in said
    assert "remove the link" in said
    for part in NEEDED:
        (tmp_path / "runs" / "same" / part).unlink()
    assert sweep(table, 1, **{**variables, "SHARED": moved}).returncode == 0
    # One of an older day leads to what is not finished: the run would write there.
    (moved / "stage_0/clusters/manifest.json").unlink()
    assert "clusters is a link to" in refused(table, 1, **{**variables, "SHARED": moved})
