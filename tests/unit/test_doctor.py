"""doctor: every check says what it saw, and what is broken is seen."""

from __future__ import annotations

import importlib
import sys
from collections import namedtuple
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mclclip.cli import entry
from mclclip.verbs import doctor
from mclclip.verbs.doctor import Finding

SMALL = namedtuple("Usage", "total used free")(10**9, 0, 64 * 10**6)


@pytest.fixture(autouse=True)
def few_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of all that is installed take a second to read."""
    monkeypatch.setattr(metadata, "packages_distributions", dict)


def findings(path: Path, what: str) -> list[Finding]:
    return [finding for finding in doctor.findings(path) if finding.what == what]


def state(path: Path, what: str) -> str:
    (finding,) = findings(path, what)
    return finding.state


# --- the report --------------------------------------------------------------------------------


def test_the_report_of_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["doctor", "--path", str(tmp_path / "new" / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:4].strip() in ("ok", "warn") for line in lines[:-1])
    assert list(tmp_path.iterdir()) == []  # the folders are not made
    (tmp_path / "file").touch()
    assert state(tmp_path / "file" / "runs", "disk") == "FAIL"


@pytest.mark.parametrize(("bad", "code"), [("warn", 0), ("FAIL", 2)])
def test_only_failures_fail(bad: Any, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.show(iter([Finding("ok", "a", "b"), Finding(bad, "c", "d\n")])) == code
    assert len(capsys.readouterr().out.splitlines()) == 3


# --- software ----------------------------------------------------------------------------------


def test_missing_packages_fail_and_missing_extras_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    required = ["torch>=2.8", "no-such-package", "no-such-extra; extra == 'x'", 'pytest; "dev"']
    monkeypatch.setattr(metadata, "requires", lambda _: required)
    (finding,) = findings(tmp_path, "packages")
    assert finding.state == "FAIL" and "no-such-package" in finding.text
    (finding,) = findings(tmp_path, "extras")
    assert finding.state == "ok" and "no-such-extra" in finding.text


@pytest.mark.parametrize(
    ("builds", "imported", "wanted"),
    [(["faiss-cpu", "faiss-gpu"], True, "warn"), ([], False, "ok"), (["faiss-gpu"], False, "FAIL")],
)
def test_builds_of_faiss(
    builds: list[str], imported: bool, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"faiss": builds})
    faiss = SimpleNamespace(__version__="1.15", IndexFlatIP=None) if imported else None
    monkeypatch.setitem(sys.modules, "faiss", faiss)
    assert state(tmp_path, "faiss") == wanted


def test_broken_libraries_hide_no_other_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        raise ImportError(f"{name}: cannot open\nshared object file")

    monkeypatch.setattr(doctor, "import_module", broken)
    assert state(tmp_path, "cpu") == "ok" and not findings(tmp_path, "gpu")
    (finding,) = findings(tmp_path, "torchvision")
    assert finding.state == "FAIL" and "\n" not in str(finding)


# --- devices and limits ------------------------------------------------------------------------


def test_gpus_with_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        mem_get_info=lambda number: ((70 if number == 0 else 10) * gib, 80 * gib),
        get_device_properties=lambda number: SimpleNamespace(
            name=("A100", "V100")[number], major=8 - number
        ),
    )
    torch = SimpleNamespace(__version__="2.13.0", cuda=cuda, get_num_threads=lambda: 1)
    real = importlib.import_module
    monkeypatch.setattr(doctor, "import_module", lambda n: torch if n == "torch" else real(n))
    assert state(tmp_path, "gpu 0") == "ok" and state(tmp_path, "gpu 1") == "warn"


def test_a_gpu_that_torch_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = importlib.import_module("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("mclclip.verbs.doctor.shutil.which", lambda name: f"/usr/bin/{name}")
    assert state(tmp_path, "gpu") == "warn"


@pytest.mark.parametrize(
    ("offline", "cached", "wanted"), [(1, 0, "warn"), (1, 1, "ok"), (0, 0, "ok")]
)
def test_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: int, cached: int, wanted: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", bool(offline))
    for number in range(cached):
        (tmp_path / f"models--a--{number}").mkdir()
    assert state(tmp_path, "weights") == wanted


# --- file system: each check sees what it looks for ---------------------------------------------


def refuse(code: int, words: str) -> Callable[..., None]:
    """A function of the system that this file system does not have."""

    def call(*_: object, **__: object) -> None:
        raise OSError(code, words)

    return call


@pytest.mark.parametrize(
    ("what", "function", "instead", "wanted"),
    [
        ("rename", "os.rename", lambda *_: None, "FAIL"),
        ("fsync", "os.fsync", refuse(22, "Invalid argument"), "FAIL"),
        ("flock", "fcntl.flock", refuse(38, "Not implemented"), "FAIL"),
        ("flock", "fcntl.flock", lambda *_: None, "FAIL"),
        ("mmap", "mmap.mmap", refuse(19, "No such device"), "FAIL"),
        ("write", "tempfile.TemporaryDirectory", refuse(13, "Permission denied"), "FAIL"),
        ("open files", "resource.getrlimit", lambda _: (256, 4096), "warn"),
        ("open files", "resource.getrlimit", lambda _: (-1, 4096), "ok"),
        ("disk", "shutil.disk_usage", lambda _: SMALL, "warn"),
        ("shared memory", "shutil.disk_usage", lambda _: SMALL, "warn"),
    ],
)
def test_what_a_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, function: str, instead: Any,
    wanted: str,
) -> None:  # fmt: skip
    if wanted == "FAIL" and what != "write":
        assert state(tmp_path, what) == "ok"
    monkeypatch.setattr(f"mclclip.verbs.doctor.{function}", instead)
    assert state(tmp_path, what) == wanted
