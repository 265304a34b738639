"""Verb: is this machine, and the place where runs will lie, fit for training?

Every check gives one line: ``ok``, ``warn`` or ``FAIL``, what was looked at, the figures found,
and, where something is not right, what to do about it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal

from mclclip import __version__
from mclclip.files import fsync_directory

FREE_GB, SHM_GB, OPEN_FILES = 10, 1, 1024
SLOW_FSYNC_S, SKEW_WARN_S, SKEW_FAIL_S = 1.0, 5.0, 60.0


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    state: Literal["ok", "warn", "FAIL"]
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.state:<4}  {self.what}: {self.text}"


def run(path: Path) -> int:
    """Prints the report for a machine and for ``path``, where runs will be written.

    Returns 0, or 2 where a check failed; warnings do not count.
    """
    failed = warned = 0
    for finding in findings(Path(path)):
        print(finding, flush=True)
        failed += finding.state == "FAIL"
        warned += finding.state == "warn"
    print(f"{failed} failed, {warned} to look at" if failed or warned else "all is well")
    return 2 if failed else 0


def findings(path: Path) -> Iterator[Finding]:
    """All checks, in the order of the report."""
    for check in (_python, _packages, _torchvision, _cpu, _gpus, _hub, _open_files, _shared_memory):
        yield from check()
    folder = _existing(path)
    yield from _disk(path, folder)
    yield from _file_system(folder)


# --- software ----------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    where = f"{platform.system()} {platform.release()}"
    yield Finding("ok", "python", f"{platform.python_version()} on {where}, {sys.executable}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    """What the installed mclclip asks for: always, and with its extras."""
    try:
        asked = metadata.requires("mclclip") or []
    except metadata.PackageNotFoundError:
        text = "mclclip runs from its source tree and is not installed: pip install -e ."
        yield Finding("warn", "packages", text)
        return
    names = {line: re.split(r"[^\w.-]", line)[0] for line in asked}
    required = {name: _version(name) for line, name in names.items() if "extra ==" not in line}
    listed = [f"{name} {version}" for name, version in required.items() if version]
    yield Finding("ok", "versions", ", ".join([f"mclclip {__version__}", *listed]))
    if missing := [name for name, version in required.items() if version is None]:
        yield Finding("FAIL", "packages", f"missing: pip install {' '.join(missing)}")
    optional = [n for line, n in names.items() if "extra ==" in line and '"dev"' not in line]
    extras = {name: _version(name) for name in optional}
    listed = [f"{name} {version or 'not installed'}" for name, version in extras.items()]
    yield Finding("ok", "extras", ", ".join(listed))


def _torchvision() -> Iterator[Finding]:
    """torchvision's extension, and whether the libraries built on it can be imported."""
    try:
        status = import_module("mclclip.torchvision_fix").status()
        import_module("torchvision")
        import_module("open_clip")
    except Exception as error:  # a broken installation may raise anything
        line = " ".join(f"{type(error).__name__}: {error}".split())
        text = f"import failed ({line}): install torchvision for this torch, see constraints.txt"
        yield Finding("FAIL", "torchvision", text)
    else:
        yield Finding("ok", "torchvision", f"fix {status}; open_clip can be imported")


# --- devices -----------------------------------------------------------------------------------


def _cpu() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    text = f"{usable} of {os.cpu_count()} cores usable, {memory_gib:.0f} GiB of memory"
    text += f", bf16 {'in hardware' if _cpu_bf16() else 'emulated'}"
    if (torch := _torch()) is not None:
        threads = os.environ.get("OMP_NUM_THREADS", "not set")
        text += f", torch uses {torch.get_num_threads()} threads (OMP_NUM_THREADS {threads})"
    yield Finding("ok", "cpu", text)


def _torch() -> Any:
    """torch, or None where it cannot be imported (reported with torchvision)."""
    try:
        return import_module("torch")
    except Exception:
        return None


def _cpu_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def _gpus() -> Iterator[Finding]:
    if (torch := _torch()) is None:
        return
    if not torch.cuda.is_available():
        if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
            text = (
                f"this machine has one, but torch {torch.__version__} does not see it: install a "
                f"CUDA build of torch, and check the driver with nvidia-smi"
            )
            yield Finding("warn", "gpu", text)
        else:
            yield Finding("ok", "gpu", "none: everything runs on the CPU")
        return
    for number in range(torch.cuda.device_count()):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(number))
        properties = torch.cuda.get_device_properties(number)
        # torch.cuda.is_bf16_supported is true of older ones as well, which only emulate it.
        bf16 = "bf16" if properties.major >= 8 else "no bf16: use precision=fp32"
        text = f"{properties.name}, {free:.1f} of {total:.1f} GiB free, {bf16}"
        busy = free < 0.5 * total
        hint = ": another process uses it, see nvidia-smi" if busy else ""
        yield Finding("warn" if busy else "ok", f"gpu {number}", text + hint)


# --- limits ------------------------------------------------------------------------------------


def _hub() -> Iterator[Finding]:
    """Whether pretrained weights can be had: from the hub, or from its cache."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    cached = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    text = f"{cached} cached models in {cache}"
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if offline and not cached:
        advice = "give model.pretrained as a file, use local-dir:PATH, or unset HF_HUB_OFFLINE"
        yield Finding("warn", "weights", f"{text}, offline: {advice}")
    else:
        yield Finding("ok", "weights", f"{text}, {'offline' if offline else 'online'}")


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        yield Finding("ok", "open files", f"up to {soft}")
    else:
        text = f"up to {soft}: loader workers need {OPEN_FILES}, run 'ulimit -n {hard}'"
        yield Finding("warn", "open files", text)


def _shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Loader workers hand batches over through /dev/shm."""
    if not folder.is_dir():
        yield Finding("warn", "shared memory", f"no {folder}: set data.num_workers=0")
        return
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free at {folder}"
    if usage.free < SHM_GB * 1e9:
        text += ": loader workers may die; docker run --shm-size=8g, or data.num_workers=0"
        yield Finding("warn", "shared memory", text)
    else:
        yield Finding("ok", "shared memory", text)


# --- where runs will lie -----------------------------------------------------------------------


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _mount(folder: Path) -> str:
    """File system and mount point of a folder, as far as /proc/mounts knows."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown file system"
    resolved = folder.resolve()
    around = [(where, kind) for where, kind in mounts if resolved.is_relative_to(where)]
    where, kind = max(around, key=lambda mount: len(mount[0]), default=("/", "unknown"))
    return f"{kind} at {where}"


def _disk(path: Path, folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield Finding("FAIL", "disk", f"{folder} is a file: choose a folder for runs")
        return
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free at {path} ({_mount(folder)})"
    if usage.free < FREE_GB * 1e9:
        yield Finding("warn", "disk", f"{text}: a run may need more than {FREE_GB} GB")
    else:
        yield Finding("ok", "disk", text)


def _file_system(folder: Path) -> Iterator[Finding]:
    """What the run directory relies on, tried in a temporary folder that is removed again."""
    if not folder.is_dir():
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".mclclip-doctor-", dir=folder) as name:
            for what, check, advice in _CHECKS:
                yield _tried(what, check, advice, Path(name))
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror}): choose another folder"
        yield Finding("FAIL", "write", text)


def _tried(what: str, check: Callable[[Path], str | Finding], advice: str, folder: Path) -> Finding:
    try:
        result = check(folder)
    except OSError as error:
        return Finding("FAIL", what, f"{error.strerror or error}: {advice}")
    return result if isinstance(result, Finding) else Finding("ok", what, result)


def _rename(folder: Path) -> str:
    old, new = folder / "old", folder / "new"
    old.write_text("old")
    new.write_text("new")
    os.replace(new, old)
    if old.read_text() != "new" or new.exists():
        raise OSError("a renamed file did not replace the one of that name")
    (folder / ".step.tmp").mkdir()
    os.rename(folder / ".step.tmp", folder / "step")
    if not (folder / "step").is_dir():
        raise OSError("a renamed folder is not there")
    return "files and folders"


def _fsync(folder: Path) -> str | Finding:
    before = time.perf_counter()
    with open(folder / "synced", "wb") as file:
        file.write(bytes(1 << 16))
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(folder)
    taken_s = time.perf_counter() - before
    text = f"{taken_s * 1e3:.1f} ms for 64 KiB and its folder"
    if taken_s > SLOW_FSYNC_S:
        return Finding("warn", "fsync", f"{text}: slow, write checkpoints less often")
    return text


def _exclusive(folder: Path) -> str:
    for _ in range(2):
        try:
            os.close(os.open(folder / "exclusive", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return "the second of two creators is refused"
    raise OSError("two creators of one file both succeeded")


def _flock(folder: Path) -> str:
    with open(folder / "lock", "w") as first, open(folder / "lock", "w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return "the second of two holders is refused"
            raise
    raise OSError("two holders of one lock both succeeded")


def _mmap(folder: Path) -> str:
    data = os.urandom(1 << 16)
    (folder / "mapped").write_bytes(data)
    with (
        open(folder / "mapped", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        if mapped[:] != data:
            raise OSError("a mapped file reads differently from what was written")
    return "64 KiB read back"


def _clock(folder: Path) -> Finding:
    """How far the server's time of a file is from this machine's clock."""
    (folder / "now").write_text("now")
    skew_s = (folder / "now").stat().st_mtime - time.time()
    text = f"times of files are {skew_s:+.2f} s from this machine's clock"
    if abs(skew_s) < SKEW_WARN_S:
        return Finding("ok", "clock", text)
    state: Literal["warn", "FAIL"] = "FAIL" if abs(skew_s) >= SKEW_FAIL_S else "warn"
    return Finding(
        state, "clock", f"{text}: synchronise the clocks (NTP) of this host and the disk"
    )


_CHECKS: tuple[tuple[str, Callable[[Path], str | Finding], str], ...] = (
    ("rename", _rename, "results could be half-written; choose another folder"),
    ("fsync", _fsync, "a power cut could lose finished work; choose another folder"),
    ("exclusive create", _exclusive, "choose another folder"),
    ("flock", _flock, "the run lock needs it; mount with flock (Lustre: -o flock)"),
    ("mmap", _mmap, "the sample index is mapped; choose another folder"),
    ("clock", _clock, "choose another folder"),
)
