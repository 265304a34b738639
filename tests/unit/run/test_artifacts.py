"""Artifacts: a directory with a manifest is complete, and another identity is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.run.artifacts import INTENT, MANIFEST, Artifact, read_manifest
from mclclip.util import files
from mclclip.util.remake import Remake
from tests import forks

CONFIG: dict[str, Any] = {"dtype": "float16", "model": {"name": "tiny", "train_scale": [0.9, 1.0]}}


def begin(directory: Path, **changes: Any) -> Artifact:
    options: dict[str, Any] = {"kind": "embeddings", "config": CONFIG, "inputs": {"index": "abc"}}
    write = changes.pop("write", True)
    return Artifact(directory, **(options | changes)).compare(write=write)


def begin_with_work(directory: Path, **changes: Any) -> Artifact:
    artifact = begin(directory, **changes)
    np.save(directory / "00000.npy", np.arange(3))
    return artifact


# --- atomic writes ---------------------------------------------------------------------------


def test_a_kill_before_the_rename_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    files.write_json(path, {"step": 1})

    def killed() -> None:
        patch = pytest.MonkeyPatch()
        patch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        files.write_json(path, {"step": 2})

    assert forks.exit_code(killed) == -signal.SIGKILL
    assert files.read_json(path) == {"step": 1}
    leftovers = [other for other in tmp_path.iterdir() if other != path]
    assert [other.suffix for other in leftovers] == [".tmp"]
    files.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any) -> None:
            calls.append(name)
            real(*args)

        monkeypatch.setattr(os, name, call)

    noted("fsync")
    noted("replace")
    files.write_bytes(tmp_path / "below" / "file", b"data")
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the directory of the name
    assert (tmp_path / "below" / "file").read_bytes() == b"data"


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="does not fit into JSON"):
        files.write_json(tmp_path / "a.json", {"thing": object()})
    assert not list(tmp_path.iterdir())
    (tmp_path / "a.json").write_text('{"step": ')
    with pytest.raises(ValueError, match=r"a\.json is not valid JSON"):
        files.read_json(tmp_path / "a.json")


# --- digests ---------------------------------------------------------------------------------


def test_digests_see_values_and_not_the_order_of_names(tmp_path: Path) -> None:
    assert files.digest_json({"a": 1, "b": 2}) == files.digest_json({"b": 2, "a": 1})
    assert files.digest_json({"a": 1}) != files.digest_json({"a": 2})
    assert files.digest_keys(["a", "bc"]) != files.digest_keys(["ab", "c"])
    assert files.digest_keys(["a", "b"]) != files.digest_keys(["b", "a"])
    for name, text in {"a": "one", "b": "one", "c": "two"}.items():
        (tmp_path / name).write_text(text)
    a, b, c = (files.digest_file(tmp_path / name) for name in "abc")
    assert a == b != c


def test_the_digest_of_an_array_sees_dtype_shape_and_values_and_not_its_layout() -> None:
    array = np.arange(6, dtype=np.int64)
    others = [array, array.astype(np.int32), array.reshape(2, 3), array[::-1]]
    assert len({*map(files.digest_array, others)}) == 4
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert files.digest_array(grid[:, ::2]) == files.digest_array(grid[:, ::2].copy())
    assert files.digest_array(np.empty((0, 3))) != files.digest_array(np.empty((3, 0)))


# --- an artifact's life ----------------------------------------------------------------------


def test_the_digest_names_the_content(tmp_path: Path) -> None:
    """The digest is that of its options and inputs, or of the content itself."""
    first = begin(tmp_path / "a").finish({})
    same = begin(tmp_path / "b").finish({})
    other = begin(tmp_path / "c", inputs={"index": "abd"}).finish({})
    given = begin(tmp_path / "d").finish({}, content_digest="123")
    assert first.digest == same.digest != other.digest
    assert given.digest == "123"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": CONFIG | {"dtype": "float32"}}, "dtype was 'float16', now 'float32'"),
        (
            {"config": CONFIG | {"model": {"name": "tiny", "train_scale": [0.5, 1.0]}}},
            r"model.train_scale\[0\] was 0.9, now 0.5",
        ),
        ({"config": {"model": CONFIG["model"]}}, "dtype was 'float16', now not given"),
        ({"inputs": {"index": "abd"}}, "from other data: index"),
        ({"kind": "train"}, "kind: 'embeddings', now 'train'"),
    ],
    ids=["value", "nested", "gone", "input", "kind"],
)
def test_a_mismatch_names_the_field_and_both_values(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Of one that is begun and of one that is finished."""
    artifact = begin_with_work(tmp_path / "a")
    for finish in (lambda: None, lambda: artifact.finish({})):
        finish()
        before = sorted((tmp_path / "a").iterdir())
        with pytest.raises(ValueError, match=message) as caught:
            begin(tmp_path / "a", **changes)
        assert str(tmp_path / "a") in str(caught.value) and "--force" in str(caught.value)
        assert sorted((tmp_path / "a").iterdir()) == before


def test_force_resumes_what_was_begun_with_these_settings(tmp_path: Path) -> None:
    begin_with_work(tmp_path / "a")
    assert not begin(tmp_path / "a", force=Remake.ALL).manifest
    assert (tmp_path / "a" / "00000.npy").exists() and not (tmp_path / "a.old-1").exists()


def test_unfit_keeps_what_fits_and_makes_damaged_ones_again(tmp_path: Path) -> None:
    artifact = begin_with_work(tmp_path / "a")
    artifact.finish({}, records=files.records_of(tmp_path / "a", "00000.npy"))
    assert begin(tmp_path / "a", force=Remake.UNFIT).manifest
    assert not (tmp_path / "a.old-1").exists()
    np.save(tmp_path / "a" / "00000.npy", np.arange(4))
    assert begin(tmp_path / "a").manifest  # nobody has read it yet
    assert not begin(tmp_path / "a", force=Remake.UNFIT).manifest
    assert (tmp_path / "a.old-1" / "00000.npy").exists()
    begin_with_work(tmp_path / "a").finish({})
    manifest = tmp_path / "a" / MANIFEST
    manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(ValueError, match="manifest.json"):
        begin(tmp_path / "a")
    assert not begin(tmp_path / "a", force=Remake.UNFIT).manifest


def test_a_directory_without_work_is_begun_anew(tmp_path: Path) -> None:
    """A run that failed before its first file does not bind the next one to its settings."""
    begin(tmp_path / "a")
    (tmp_path / "a" / "checkpoints").mkdir()
    changed = {"config": CONFIG | {"dtype": "float32"}}
    assert not begin(tmp_path / "a", **changed).manifest
    assert json.loads((tmp_path / "a" / INTENT).read_text())["config"]["dtype"] == "float32"
    assert not (tmp_path / "a.old-1").exists()


def test_half_a_file_is_no_work_and_is_cleaned(tmp_path: Path) -> None:
    begin(tmp_path / "a")
    (tmp_path / "a" / ".00000.npy.7.tmp").write_text("half")
    (tmp_path / "a" / "checkpoints" / ".step_00000001.tmp").mkdir(parents=True)
    (tmp_path / "a" / "checkpoints" / ".step_00000001.tmp" / "__0_0.distcp").write_text("half")
    begin(tmp_path / "a", config=CONFIG | {"dtype": "float32"})
    files = sorted(str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("*"))
    assert files == ["checkpoints", INTENT]


def test_only_begun_directories_are_cleaned(tmp_path: Path) -> None:
    """A folder that is not ours keeps its files, whatever they are called."""
    (tmp_path / ".notes.tmp").write_text("mine")
    killed = tmp_path / ".in_progress.json.host.7.tmp"  # before there was anything else
    killed.write_text("half")
    begin(tmp_path)
    assert (tmp_path / ".notes.tmp").exists() and not killed.exists()


def test_looking_does_not_write(tmp_path: Path) -> None:
    assert not begin(tmp_path / "a", write=False).manifest
    assert not (tmp_path / "a").exists()
    begin_with_work(tmp_path / "a").finish({})
    changed = {"config": CONFIG | {"dtype": "float32"}}
    assert not begin(tmp_path / "a", **changed, force=Remake.ALL, write=False).manifest
    assert read_manifest(tmp_path / "a", "embeddings").config == CONFIG


def test_values_that_json_rewrites_still_match(tmp_path: Path) -> None:
    """nan is not equal to itself, paths become text, tuples become lists, keys become text."""
    odd: dict[str, Any] = {
        "limit": float("nan"),
        "most": float("inf"),
        "path": tmp_path / "x",
        "range": (0.9, 1.0),
        "by_stage": {1: "a"},
        "none": None,
        "empty": {},
        "numbers": [np.int64(3), np.float64(0.5), np.bool_(True)],
    }
    begin_with_work(tmp_path / "a", config=odd)
    assert (tmp_path / "a" / "00000.npy").exists()
    begin(tmp_path / "a", config=odd).finish({})
    assert begin(tmp_path / "a", config=odd).manifest
    with pytest.raises(ValueError, match=r"limit was nan, now 1.0"):
        begin(tmp_path / "a", config=odd | {"limit": 1.0})


def test_a_kill_between_manifest_and_cleaning_leaves_a_finished_artifact(tmp_path: Path) -> None:
    begin_with_work(tmp_path / "a").finish({})
    (tmp_path / "a" / INTENT).write_text("{}")
    assert begin(tmp_path / "a").manifest


# --- reading manifests -----------------------------------------------------------------------


def test_an_unfinished_artifact_and_another_kind_are_not_read(tmp_path: Path) -> None:
    begin_with_work(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match=r"no finished embeddings at .*a"):
        read_manifest(tmp_path / "a", "embeddings")
    begin(tmp_path / "a").finish({})
    with pytest.raises(ValueError, match="holds 'embeddings', expected 'clusters'"):
        read_manifest(tmp_path / "a", "clusters")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "surprise.*make it again"),
        ({"digest": None}, "digest.*make it again"),
        ({"kind": None}, "is not a manifest"),
    ],
    ids=["unknown field", "missing field", "no kind"],
)
def test_a_manifest_that_cannot_be_read_is_one_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    begin(tmp_path / "a").finish({})
    path = tmp_path / "a" / MANIFEST
    fields = json.loads(path.read_text()) | change
    fields = {k: v for k, v in fields.items() if v is not None or k == "dtype"}
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message) as caught:
        read_manifest(tmp_path / "a", "embeddings")
    assert str(tmp_path / "a") in str(caught.value)


def test_aside_takes_the_first_free_number(tmp_path: Path) -> None:
    for name in ("a", "a.old-1", "a.old-3"):
        (tmp_path / name).mkdir()
    assert files.move_aside(tmp_path / "a") == tmp_path / "a.old-2"
