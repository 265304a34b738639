"""The checks for GPUs, some of them on the CPU; and how their runner takes what can go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as checks_main
from tests.gpu import bench, running
from tests.gpu.checks import Where, entries
from tests.gpu.running import Job
from tests.matrix import SOAK

CHEAP = (
    "nearest centroids: TF32 and bf16 products, as torch is set, change nothing",
    "k-means: empty clusters, too few rows, rows that are not finite",
    "products of chosen pairs (cuSPARSE)",
    "weighted sums (embedding_bag)",
    "class centers: AdamW",
    "contrastive loss: value and gradient",
    "engine ddp, bf16",
    "process group: tensors on the device, objects on the CPU",
)


@pytest.mark.parametrize("name", CHEAP)
def test_a_check_holds_on_the_cpu(name: str, tmp_path: Path) -> None:
    entries()[name].work(Where(torch.device("cpu"), tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(not SOAK, reason="many minutes: 'make soak' runs it")
def test_all_checks_hold_on_the_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    """Each in a process of its own, as on a GPU; minutes."""
    assert checks_main.main(["--device", "cpu", "--jobs", "2"]) == 0
    assert " 0 failed" in capfd.readouterr().out


# --- the runner ---


@pytest.mark.parametrize("main", [checks_main.main, bench.main])
def test_without_a_gpu_it_says_so(
    main: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(main)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(running, "hidden_gpu", lambda: False)
    assert main(["--device", "auto"]) == 0
    assert "sees no GPU here: nothing was run" in capsys.readouterr().out
    assert main(["--device", "cuda"]) == 1
    monkeypatch.setattr(running, "hidden_gpu", lambda: True)
    assert main(["--device", "auto"]) == 1
    assert "though there should be one" in capsys.readouterr().out


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "WHEELS", ("pydantic", "no_such_package"))
    assert checks_main.main(["--device", "cpu"]) == 1
    assert "missing: no_such_package: see tests/gpu/README.md" in capsys.readouterr().out


def test_what_fails_crashes_or_hangs_has_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And does not keep the others from running."""
    limits = dict.fromkeys(("fails", "crashes", "leaves", "skips"), 600.0) | {"hangs": 3.0}
    jobs = [
        Job("tests.gpu.faults", name, limit) for name, limit in {**limits, "holds": 600.0}.items()
    ]
    outcomes = list(running.run(jobs, "cpu", tmp_path, at_once=6, limit_s=600.0))
    found = {outcome.job.name: outcome for outcome in outcomes}
    assert {name: outcome.verdict for name, outcome in found.items()} == {
        **dict.fromkeys(("fails", "crashes", "leaves", "hangs"), "FAIL"),
        "skips": "skip",
        "holds": "ok",
    }
    assert "ValueError: two lines in one (log: " in found["fails"].note
    assert "ended by signal 6" in found["crashes"].note
    assert "ended with code 7" in found["leaves"].note
    assert "not done after" in found["hangs"].note
    assert found["skips"].note == "not here" and found["holds"].note == "off by nothing"
    logs = [Path(log) for log in _logs(found["fails"].note, found["hangs"].note)]
    assert logs[0].is_file() and "Fatal Python error: Aborted" in logs[1].read_text()
    assert found["crashes"].found[0]["variant"] == "the first"  # what it had before
    assert checks_main.summary(outcomes, 1.0, tmp_path) == 1
    assert "1 ok, 1 skipped, 4 failed" in capsys.readouterr().out


def _logs(*notes: str) -> list[str]:
    return [note.partition("(log: ")[2].rstrip(")") for note in notes]


def test_what_has_no_time_left_has_failed(tmp_path: Path) -> None:
    jobs = [Job("tests.gpu.faults", name, 60.0) for name in ("hangs", "holds")]
    outcomes = list(running.run(jobs, "cpu", tmp_path, at_once=1, limit_s=0.5))
    assert [outcome.verdict for outcome in outcomes] == ["FAIL", "FAIL"]
    assert {outcome.job.name: outcome.note for outcome in outcomes}["holds"] == (
        "not run: out of time"
    )


def test_figures_have_a_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [Job("tests.gpu.faults", name, 60.0) for name in ("figure", "crashes")]
    monkeypatch.setattr(bench, "jobs_of", lambda catalogue, options: jobs)
    path = tmp_path / "figures.json"
    assert bench.main(["--device", "cpu", "--out", str(tmp_path), "--json", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "  plain" in shown and "1,234  ms" in shown and "0.500" in shown and "FAIL" in shown
    assert "2 figures, 1 failed" in shown
    figures = json.loads(path.read_text())["figures"]
    assert [figure["verdict"] for figure in figures] == ["ok", "FAIL"]
    assert figures[0]["rows"][0]["value"] == 1234.0


# --- the queue ---


def queue(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [running.ROOT / "tests/gpu/queue.sh", folder, *words],
        capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip


def test_the_queue_lists_what_is_open(tmp_path: Path) -> None:
    (tmp_path / "heads.json").write_text("{}")
    listed = queue(tmp_path, "--list")
    states = {line.split()[1]: line.split()[0] for line in listed.stdout.splitlines()}
    assert listed.returncode == 0 and states.pop("heads") == "done"
    assert len(states) >= 6 and set(states.values()) == {"open"}
    assert queue(tmp_path, "--no-such-word").returncode == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_a_step_stays_open(tmp_path: Path) -> None:
    assert queue(tmp_path, "--next").returncode == 1
    assert "open  checks" in queue(tmp_path, "--list").stdout.splitlines()


@pytest.mark.slow
def test_a_step_of_the_queue_leaves_its_figures(tmp_path: Path) -> None:
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    (tiny / "checks.json").write_text("{}")
    done = queue(tmp_path, "--next", "--tiny")
    assert done.returncode == 0, done.stdout + (tiny / "heads.log").read_text()
    figures = json.loads((tiny / "heads.json").read_text())["figures"]
    assert len(figures) == 3 and all(figure["rows"] for figure in figures)
    assert not (tiny / "beside_vit_l.json").exists()
