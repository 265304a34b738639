"""doctor: every check says what it found, and what is broken is found."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mclclip import cli, doctor
from mclclip.doctor import Finding

Usage = namedtuple("Usage", "total used free")


def one(found: Iterable[Finding], what: str) -> Finding:
    matching = [finding for finding in found if finding.what == what]
    assert len(matching) == 1, matching
    return matching[0]


def file_system(folder: Path) -> list[Finding]:
    return list(doctor._file_system(folder))


def fake_torch(monkeypatch: pytest.MonkeyPatch, **cuda: Any) -> None:
    torch = SimpleNamespace(__version__="2.13.0", cuda=SimpleNamespace(**cuda))
    monkeypatch.setattr(doctor, "_torch", lambda: torch)


# --- the report --------------------------------------------------------------------------------


def test_a_healthy_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(tmp_path / "runs" / "new") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(re.match(r"(ok  |warn)  [a-z0-9 ]+: .+", line) for line in lines)
    looked_at = [line[6:].split(":")[0] for line in lines]
    assert looked_at == [
        "python", "versions", "extras", "torchvision", "faiss", "cpu", *looked_at[6:-10], "weights",
        "open files", "shared memory", "disk", "rename", "fsync", "exclusive create", "flock",
        "mmap", "clock",
    ]  # fmt: skip
    assert looked_at[6].startswith("gpu")
    assert last == "all is well" or "to look at" in last
    assert list(tmp_path.iterdir()) == []  # nothing is left behind, nothing is made


def test_a_failure_is_exit_2_a_warning_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for state, code in (("warn", 0), ("FAIL", 2)):
        found = [Finding(state, "disk", "small")]  # type: ignore[arg-type]
        monkeypatch.setattr(doctor, "findings", lambda _, found=found: found)
        assert doctor.run(tmp_path) == code
        line, summary = capsys.readouterr().out.splitlines()
        assert line == f"{state}  disk: small"
        assert summary == f"{int(state == 'FAIL')} failed, {int(state == 'warn')} to look at"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli._doctor(cli.parse_words(["doctor", "--path", str(tmp_path / "file")])) == 2
    assert f"FAIL  disk: {tmp_path / 'file'} is a file" in capsys.readouterr().out


# --- software ----------------------------------------------------------------------------------


def fake_packages(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """An mclclip that asks for three packages, and two more with extras."""
    asked = ["torch>=2.6", "open_clip_torch<4,>=3.3", "Pillow"]
    extras = [
        'deepspeed>=0.19; extra == "deepspeed"',
        'wandb; extra == "track"',
        'ruff; extra == "dev"',
    ]

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "requires", lambda _: [*asked, *extras])
    monkeypatch.setattr(metadata, "version", version)


def test_what_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_packages(monkeypatch, torch="2.13.0")
    finding = one(doctor._packages(), "packages")
    assert finding.state == "FAIL"
    assert finding.text == "missing: pip install open_clip_torch Pillow"


def test_extras_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_packages(monkeypatch, torch="2.13.0", open_clip_torch="3.3", Pillow="13", wandb="0.31")
    versions, extras = doctor._packages()
    assert versions.text.endswith("torch 2.13.0, open_clip_torch 3.3, Pillow 13")
    assert extras.text == "deepspeed not installed, wandb 0.31"
    assert versions.state == extras.state == "ok"


def test_a_source_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_installed)
    (finding,) = doctor._packages()
    assert finding.state == "warn" and "pip install -e ." in finding.text


@pytest.mark.parametrize(
    ("builds", "gpus", "state", "text"),
    [
        (["faiss-cpu"], None, "ok", r"^1\.15 for CPUs \(faiss-cpu 1\.15\)$"),
        (["faiss-gpu"], 2, "ok", r"^1\.15 for GPUs, of which it sees 2 \(faiss-gpu 1\.15\)$"),
        # Without a driver it is not asked, for it would abort the process.
        (["faiss-gpu"], 0, "ok", r"^1\.15 for GPUs, of which it sees 0 \(faiss-gpu 1\.15\)$"),
        ([], None, "ok", r"^1\.15 for CPUs \(not from pip\)$"),
        (
            ["faiss-gpu", "faiss-cpu", "faiss-cpu"], None, "warn",
            r"faiss-cpu 1\.15, faiss-gpu 1\.15\): these overwrite each other, pip uninstall "
            r"faiss-cpu faiss-gpu, then pip install 'mclclip\[search\]', or .*search-gpu",
        ),
    ],
)  # fmt: skip
def test_the_build_of_faiss_that_runs(
    builds: list[str], gpus: int | None, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"faiss": builds})
    monkeypatch.setattr(metadata, "version", lambda _: "1.15")
    fake_torch(monkeypatch, is_available=lambda: bool(gpus))
    faiss = SimpleNamespace(__version__="1.15", IndexFlatIP=None)
    if gpus is not None:
        faiss.StandardGpuResources = None
    if gpus:
        faiss.get_num_gpus = lambda: gpus
    monkeypatch.setitem(sys.modules, "faiss", faiss)
    (finding,) = doctor._faiss()
    assert finding.state == state and re.search(text, finding.text), finding


def test_no_faiss_is_no_fault_and_a_broken_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for builds, state, text in (([], "ok", "not installed"), (["faiss-gpu"], "FAIL", "halted")):
        monkeypatch.setattr(metadata, "packages_distributions", lambda b=builds: {"faiss": b})
        monkeypatch.setitem(sys.modules, "faiss", None)
        (finding,) = doctor._faiss()
        assert finding.state == state and text in finding.text and "[search]" in finding.text


def test_a_broken_torchvision_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def broken(name: str) -> Any:
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name)

    monkeypatch.setattr(doctor, "import_module", broken)
    finding = one(doctor._torchvision(), "torchvision")
    assert finding.state == "FAIL" and "operator torchvision::nms" in finding.text


def test_a_broken_torch_hides_no_other_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("libcudart.so.12: cannot open\nshared object file")

    monkeypatch.setattr(doctor, "import_module", broken)
    assert one(doctor._cpu(), "cpu").state == "ok" and not list(doctor._gpus())
    finding = one(doctor._torchvision(), "torchvision")
    assert finding.state == "FAIL" and "libcudart.so.12: cannot open shared" in finding.text


# --- devices -----------------------------------------------------------------------------------


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, is_available=lambda: False)
    monkeypatch.setattr("mclclip.doctor.shutil.which", lambda name: f"/usr/bin/{name}")
    finding = one(doctor._gpus(), "gpu")
    assert finding.state == "warn" and "CUDA build of torch" in finding.text


def test_gpus_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    fake_torch(
        monkeypatch,
        is_available=lambda: True,
        device_count=lambda: 2,
        mem_get_info=lambda number: ((70 if number == 0 else 10) * gib, 80 * gib),
        get_device_properties=lambda number: SimpleNamespace(
            name=("A100", "V100")[number], major=8 - number
        ),
    )
    free, busy = doctor._gpus()
    assert free == Finding("ok", "gpu 0", "A100, 70.0 of 80.0 GiB free, bf16")
    assert "no bf16: use precision=fp32" in busy.text
    assert busy.state == "warn" and "10.0 of 80.0 GiB free" in busy.text


# --- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offline", "cached", "state"),
    [("1", 0, "warn"), ("1", 2, "ok"), ("0", 0, "ok")],
    ids=["offline, nothing cached", "offline, cached", "not offline"],
)
def test_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: str, cached: int, state: str
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    for number in range(cached):
        (tmp_path / "hub" / f"models--a--{number}").mkdir(parents=True)
    finding = one(doctor._hub(), "weights")
    assert finding.state == state and f"{cached} cached models in {tmp_path}" in finding.text
    assert ("not tried" in finding.text) == (offline == "0") and "online" not in finding.text


@pytest.mark.parametrize(("soft", "state"), [(256, "warn"), (1024, "ok"), (-1, "ok")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, state: str) -> None:
    monkeypatch.setattr("mclclip.doctor.resource.getrlimit", lambda _: (soft, 4096))
    finding = one(doctor._open_files(), "open files")
    assert finding.state == state and ("ulimit -n 4096" in finding.text) == (state == "warn")


def test_small_shared_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mclclip.doctor.shutil.disk_usage", lambda _: Usage(10**9, 0, 64 * 10**6))
    memory = one(doctor._shared_memory(tmp_path), "shared memory")
    assert memory.state == "warn" and "0.1 of 1.0 GB free" in memory.text
    disk = one(doctor._disk(tmp_path, tmp_path), "disk")
    assert disk.state == "warn" and "more than 10 GB" in disk.text
    none = one(doctor._shared_memory(tmp_path / "none"), "shared memory")
    assert none.state == "warn" and "num_workers=0" in none.text


# --- file system: each check finds what it looks for -----------------------------------------


def test_every_check_passes_here(tmp_path: Path) -> None:
    found = file_system(tmp_path)
    assert [finding.state for finding in found] == ["ok"] * 6
    assert list(tmp_path.iterdir()) == []


def refuse(code: int, words: str) -> Callable[..., None]:
    """A function of the system that this file system does not have."""

    def call(*_: object, **__: object) -> None:
        raise OSError(code, words)

    return call


def copied(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


def lenient(path: Path, flags: int, *, really: Any = os.open, **options: Any) -> Any:
    return really(path, flags & ~os.O_EXCL, **options)


@pytest.mark.parametrize(
    ("what", "function", "instead", "text"),
    [
        ("rename", "os.replace", copied, "a renamed file did not replace .* half-written"),
        ("fsync", "os.fsync", refuse(22, "Invalid argument"), "^Invalid argument: a power cut"),
        ("exclusive create", "os.open", lenient, "two creators .* both succeeded: choose another"),
        ("flock", "fcntl.flock", refuse(38, "Not implemented"), "^Not implemented: the run lock"),
        ("flock", "fcntl.flock", lambda *_: None, "two holders .* both succeeded.*-o flock"),
        ("mmap", "mmap.mmap", refuse(19, "No such device"), "^No such device: the sample index"),
    ],
)
def test_what_a_file_system_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, function: str, instead: Any,
    text: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(f"mclclip.doctor.{function}", instead)
    finding = one(file_system(tmp_path), what)
    assert finding.state == "FAIL" and re.search(text, finding.text), finding


def test_a_slow_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SLOW_FSYNC_S", 0.0)
    assert one(file_system(tmp_path), "fsync").state == "warn"


@pytest.mark.parametrize(("skew_s", "state"), [(0.0, "ok"), (20.0, "warn"), (-120.0, "FAIL")])
def test_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_s: float, state: str
) -> None:
    real = time.time
    monkeypatch.setattr("mclclip.doctor.time.time", lambda: real() - skew_s)
    finding = one(file_system(tmp_path), "clock")
    assert finding.state == state
    assert float(finding.text.split()[4]) == pytest.approx(skew_s, abs=1.0)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = refuse(13, "Permission denied")
    monkeypatch.setattr("mclclip.doctor.tempfile.TemporaryDirectory", forbidden)
    (finding,) = file_system(tmp_path)
    assert finding.state == "FAIL" and f"{tmp_path} cannot be written" in finding.text


def test_the_mount_is_the_longest_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"
    monkeypatch.setattr("mclclip.doctor.Path.read_text", lambda _: mounts)
    assert doctor._mount(tmp_path / "runs") == f"nfs4 at {tmp_path}"
    assert doctor._mount(Path("/")) == "ext4 at /"
