"""Trackers: found by name or entry point, opened without secrets, continued after a kill."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mclclip import config
from mclclip.run import trackers
from mclclip.run.trackers import Tracker, Trackers
from mclclip.util import shipped

ROWS = ((10, {"loss": 1.0}), (20, {"loss": 0.5, "set/i2t R@1": 40.0, "note": "no number"}))


def put_package(patch: pytest.MonkeyPatch, name: str, package: object) -> None:
    """Makes ``package`` (None: missing) the one that the tracker of this name imports."""
    module = f"{trackers.__name__}.{name}"
    patch.setitem(sys.modules, name, package)  # type: ignore[arg-type]
    patch.setitem(sys.modules, module, None)  # type: ignore[arg-type]  # put back at the end
    del sys.modules[module]


def track(name: str, directory: Path, *rows: tuple[int, Mapping[str, Any]], **options: Any) -> None:
    """Logs rows and two files, as a process of a training does."""
    opened = Trackers.open([name], directory, config={"seed": 1, **options})
    for step, row in rows:
        opened.write(step, row)
    for file, text in (("report.html", "<p>page</p>"), ("verdict.md", "Keep the base.")):
        (directory / file).write_text(text)
        opened.attach(directory / file)
    opened.close()
    assert not opened.lost and opened.by_name


# --- which there are -----------------------------------------------------------------------------


def test_the_names_of_four_trackers_and_of_entry_points_are_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("mlflow", "tensorboard", "trackio", "wandb")
    assert shipped.plugins("run/trackers") == names
    package = tmp_path / "mine-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[mclclip.trackers]\nmine = mine_tracker\n")
    (tmp_path / "mine_tracker.py").write_text(
        "from mclclip.run.trackers import Tracker\n"
        "class Mine(Tracker):\n"
        "    def __init__(self, path): self.path = path\n"
        "    def write(self, step, row):\n"
        "        with open(self.path / 'rows', 'a') as file: print(step, row['loss'], file=file)\n"
        "def open_tracker(directory, *, name, config):\n"
        "    (directory / 'name').write_text(name)\n"
        "    return Mine(directory)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"run_dir": "run", "track": [*names, "mine"]}
    assert config.from_tree(given, []).track == given["track"]
    track("mine", tmp_path / "train", *ROWS)
    assert (tmp_path / "train" / "mine" / "rows").read_text() == "10 1.0\n20 0.5\n"
    assert (tmp_path / "train" / "mine" / "name").read_text() == str(tmp_path / "train")


@pytest.mark.parametrize("wrong", [["wandbb"], ["wandb", "wandb"]])
def test_a_name_that_is_none_or_comes_twice_is_refused(wrong: list[str]) -> None:
    with pytest.raises(ValueError, match=r"track.*wandb"):
        config.from_tree({"run_dir": "run", "track": wrong}, [])


def test_a_package_that_is_missing_is_said_before_the_run_and_at_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_package(monkeypatch, "wandb", None)
    for call in (
        lambda: trackers.check_installed(["wandb"]),
        lambda: Trackers.open(["wandb"], tmp_path, config={}),
    ):
        with pytest.raises(ValueError, match=r"wandb .*pip install 'mclclip\[track\]'"):
            call()


def test_a_tracker_that_does_not_start_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**options: Any) -> None:
        raise RuntimeError("no API key")

    put_package(monkeypatch, "wandb", SimpleNamespace(init=init))
    with caplog.at_level(logging.WARNING, "mclclip"):
        assert not Trackers.open(["wandb"], tmp_path, config={}).by_name
    assert "wandb" in caplog.text and "no API key" in caplog.text


def test_a_tracker_that_is_slow_holds_nothing_up_and_gets_all_rows() -> None:
    class Slow(Tracker):
        def __init__(self) -> None:
            self.answer, self.steps = threading.Event(), list[int]()

        def write(self, step: int, row: Mapping[str, Any]) -> None:
            self.answer.wait()
            self.steps.append(step)

    slow = Slow()
    opened = Trackers({"slow": slow})
    for step in range(100):
        opened.write(step, {})
    assert slow.steps == []
    slow.answer.set()
    opened.close()
    assert slow.steps == [*range(100)]


def test_a_file_that_is_not_taken_ends_nothing(tmp_path: Path) -> None:
    class Full(Tracker):
        def attach(self, path: Path) -> None:
            raise OSError("quota")

    opened = Trackers({"full": Full(), "silent": Tracker()})
    opened.attach(tmp_path / "report.html")
    opened.close()
    assert opened.lost == {"full": 1}


# --- each of them --------------------------------------------------------------------------------


def test_tensorboard_shows_rows_and_the_verdict(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    track("tensorboard", tmp_path, ROWS[0])
    track("tensorboard", tmp_path, ROWS[1])
    events = loading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss", "set/i2t R@1"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(10, 1.0), (20, 0.5)]
    text = events.Tensors("verdict/text_summary")[0].tensor_proto.string_val[0]
    assert text == b"Keep the base."


def test_mlflow_has_one_run_with_options_rows_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # all that the small package has
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "photos")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    many = {f"option_{number}": {"value": "x" * 600} for number in range(150)}
    track("mlflow", tmp_path, ROWS[0], **many)
    track("mlflow", tmp_path, ROWS[1], **many)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("photos")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == str(tmp_path) and run.info.status == "FINISHED"
    assert run.data.params["seed"] == "1" and len(run.data.params) == 151
    assert run.data.metrics == {"loss": 0.5, "set/i2t R_1": 40.0}
    points = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in points] == [(10, 1.0), (20, 0.5)]
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"report.html", "verdict.md"}


class Calls(list[tuple[str, Any]]):
    """A package, and its run, that note every call."""

    id = "abc"

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Calls:
            self.append((name, options or args))
            return self

        return call


def test_wandb_and_trackio_go_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = {"wandb": Calls(), "trackio": Calls()}
    for name, calls in of.items():
        put_package(monkeypatch, name, calls)
        for _ in range(2):
            track(name, tmp_path, ROWS[0])
        first, second = [options for call, options in calls if call == "init"]
        assert first == second and first["resume"] == "allow"
        assert first["name"].startswith(str(tmp_path)) and first["config"] == {"seed": 1}
    assert len([options for call, options in of["wandb"] if call == "init"][0]["id"]) == 8
    assert ("add_file", (str(tmp_path / "verdict.md"),)) in of["wandb"]
    assert [call for call, _ in of["wandb"]].count("finish") == 2
    logged = [options["name"] for call, options in of["trackio"] if call == "log_artifact"]
    assert logged == ["report", "verdict"] * 2


def test_trackio_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    track("trackio", tmp_path, ROWS[0])
    track("trackio", tmp_path, ROWS[1])
    (name,) = SQLiteStorage.get_runs("mclclip")
    points = [(row["step"], row["loss"]) for row in SQLiteStorage.get_logs("mclclip", name)]
    assert points == [(10, 1.0), (20, 0.5)]


def test_a_tracker_is_not_told_the_secret_of_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    put_package(monkeypatch, "wandb", calls)
    urls = ["https://h/a.tar?signature=s3cret", "https://h/b.tar"]
    data = {"shards": urls, "url": urls[0]}
    Trackers.open(["wandb"], tmp_path, config={"data": data, "lr": 0.1})
    shown = "https://h/a.tar?..."
    expected = {"data": {"shards": [shown, urls[1]], "url": shown}, "lr": 0.1}
    assert calls[0][1]["config"] == expected
