"""Verb: checks whether this machine and the folder for runs are fit for training.

Every check gives one line: ``ok``, ``warn`` or ``FAIL``, what was checked, the figures found, and,
where something is wrong, what to do about it.
"""

from __future__ import annotations

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
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal

from mclclip import __version__, search
from mclclip.files import clean, existing, fsync_directory
from mclclip.ranks.failures import MORE_SHARED_MEMORY

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
    return show(findings(Path(path)))


def show(found: Iterator[Finding]) -> int:
    """Prints findings as they come, and how many are bad; returns 0, or 2 where a check failed."""
    number: Counter[str] = Counter()
    for each in found:
        print(clean(str(each)), flush=True)
        number[each.state] += 1
    bad = number["FAIL"] or number["warn"]
    print(f"{number['FAIL']} failed, {number['warn']} to look at" if bad else "all is well")
    return 2 if number["FAIL"] else 0


def findings(path: Path) -> Iterator[Finding]:
    """All checks, in the order of the report."""
    machine = (_cpu, _gpus, _hub, _open_files, _shared_memory)
    system = f"{platform.system()} {platform.release()}"
    yield finding("python", f"{platform.python_version()} on {system}, {sys.executable}")
    for check in (_packages, _torchvision, _faiss, *machine):
        yield from check()
    folder = existing(path)
    yield from _disk(path, folder)
    yield from _file_system(folder)


def finding(what: str, text: str, advice: str = "") -> Finding:
    """A warning that ends with the advice, or "ok" where there is none."""
    return Finding("warn", what, f"{text}: {advice}") if advice else Finding("ok", what, text)


# --- software ----------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    """Versions of the required packages and of those of the extras; fails for missing ones."""
    try:
        asked = metadata.requires("mclclip") or []
    except metadata.PackageNotFoundError:
        text = "mclclip runs from its source tree and is not installed"
        yield finding("packages", text, "pip install -e .")
        return
    required: dict[str, str | None] = {"mclclip": __version__}
    extras: dict[str, str | None] = {}
    for line in asked:
        if '"dev"' not in line:
            name = re.split(r"[^\w.-]", line)[0]
            (extras if "extra ==" in line else required)[name] = _version(name)
    yield finding("versions", ", ".join(f"{n} {v}" for n, v in required.items() if v))
    if missing := [name for name, version in required.items() if version is None]:
        yield Finding("FAIL", "packages", f"missing: pip install {' '.join(missing)}")
    yield finding("extras", ", ".join(f"{n} {v or 'not installed'}" for n, v in extras.items()))


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
        text = f"it and open_clip were imported, fix {status}"
        if "applied" in status:
            text += "; open_clip without mclclip needs a torchvision that fits, or 'import "
            text += "mclclip.torchvision_fix' before it"
        yield finding("torchvision", text)


def _faiss() -> Iterator[Finding]:
    """The build of faiss that runs, and whether there are several, which overwrite each other."""
    builds = sorted({*metadata.packages_distributions().get("faiss", ())})
    found = ", ".join(f"{name} {_version(name)}" for name in builds)
    again = f"pip uninstall {' '.join(builds)}, then {search.EXTRA}"
    try:
        faiss = search.library("doctor")
    except ValueError as error:
        if builds:
            text = f"{found} cannot be imported ({error.__context__}): {again}"
            yield Finding("FAIL", "faiss", text)
        else:
            text = f"not installed; kNN, filter and blindspots need it: {search.EXTRA}"
            yield finding("faiss", text)
        return
    text = f"{faiss.__version__} for CPUs"
    if hasattr(faiss, "StandardGpuResources"):
        # torch is asked first: without a driver, faiss's builds for GPUs abort the process.
        torch = _torch()
        seen = faiss.get_num_gpus() if torch is not None and torch.cuda.is_available() else 0
        text = f"{faiss.__version__} for GPUs, of which it sees {seen}"
    advice = f"these overwrite each other, {again}" if len(builds) > 1 else ""
    yield finding("faiss", f"{text} ({found or 'not from pip'})", advice)


# --- devices -----------------------------------------------------------------------------------


def _cpu() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    text = f"{usable} of {os.cpu_count()} cores usable, {memory_gib:.0f} GiB of memory"
    flags = _read("/proc/cpuinfo")
    hardware = any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))
    text += f", bf16 {'in hardware' if hardware else 'emulated'}"
    if (torch := _torch()) is not None:
        threads = os.environ.get("OMP_NUM_THREADS", "not set")
        import_module("mclclip.ranks.process_group")  # leaves a core to reading, as every verb does
        text += f", torch uses {torch.get_num_threads()} threads (OMP_NUM_THREADS {threads})"
    yield finding("cpu", text)


def _read(path: str) -> str:
    """A file of the kernel's; empty where there is none, as on other systems than Linux."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _torch() -> Any:
    """torch, or None where it cannot be imported (reported with torchvision)."""
    try:
        return import_module("torch")
    except Exception:
        return None


def _gpus() -> Iterator[Finding]:
    if (torch := _torch()) is None:
        return
    if not torch.cuda.is_available():
        if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
            text = f"this machine has one, but torch {torch.__version__} does not see it"
            advice = "install a CUDA build of torch, and check the driver with nvidia-smi"
            yield finding("gpu", text, advice)
        else:
            yield finding("gpu", "none: everything runs on the CPU")
        return
    for number in range(torch.cuda.device_count()):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(number))
        properties = torch.cuda.get_device_properties(number)
        # torch.cuda.is_bf16_supported is also true for older GPUs, which only emulate bf16.
        bf16 = "bf16" if properties.major >= 8 else "no bf16: use precision=fp32"
        text = f"{properties.name}, {free:.1f} of {total:.1f} GiB free, {bf16}"
        busy = "another process uses it, see nvidia-smi" if free < 0.5 * total else ""
        yield finding(f"gpu {number}", text, busy)


# --- limits ------------------------------------------------------------------------------------


def _hub() -> Iterator[Finding]:
    """Whether pretrained weights can be loaded, from the hub or from its cache."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    cached = len(list(cache.glob("models--*")))
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    advice = "give model.pretrained as a file, use local-dir:PATH, or unset HF_HUB_OFFLINE"
    hub = (
        "HF_HUB_OFFLINE is set" if offline else "others from the hub (not tried whether it answers)"
    )
    text = f"{cached} cached models in {cache}, {hub}"
    yield finding("weights", text, advice if offline and not cached else "")


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES
    advice = f"loader workers need {OPEN_FILES}, run 'ulimit -n {hard}'"
    yield finding("open files", f"up to {soft}", "" if enough else advice)


def _shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Loader workers hand batches over through /dev/shm."""
    if not folder.is_dir():
        yield finding("shared memory", f"no {folder}", "set data.num_workers=0")
        return
    advice = f"loader workers may die; {MORE_SHARED_MEMORY}"
    yield _room("shared memory", folder, str(folder), SHM_GB, advice)


def _room(what: str, folder: Path, where: str, wanted_gb: int, advice: str) -> Finding:
    """Free space of the disk, or of the memory, that ``folder`` lies on."""
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free at {where}"
    return finding(what, text, advice if usage.free < wanted_gb * 1e9 else "")


# --- where runs will lie -----------------------------------------------------------------------


def _mount(folder: Path) -> str:
    """File system and mount point of a folder, as far as /proc/mounts knows."""
    mounts = [line.split()[1:3] for line in _read("/proc/mounts").splitlines()]
    resolved = folder.resolve()
    around = [(where, kind) for where, kind in mounts if resolved.is_relative_to(where)]
    where, kind = max(around, key=lambda mount: len(mount[0]), default=("/", "unknown"))
    return f"{kind} at {where}"


def _disk(path: Path, folder: Path) -> Iterator[Finding]:
    if folder.is_dir():
        advice = f"a run may need more than {FREE_GB} GB"
        yield _room("disk", folder, f"{path} ({_mount(folder)})", FREE_GB, advice)
    else:
        yield Finding("FAIL", "disk", f"{folder} is a file: choose a folder for runs")


def _file_system(folder: Path) -> Iterator[Finding]:
    """Runs the checks of ``_CHECKS`` in a temporary folder, and removes it."""
    if not folder.is_dir():
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".mclclip-doctor-", dir=folder) as name:
            for what, check, advice in _CHECKS:
                try:
                    result = check(Path(name))
                except OSError as error:
                    result = Finding("FAIL", what, f"{error.strerror or error}: {advice}")
                yield result if isinstance(result, Finding) else finding(what, result)
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror}): choose another folder"
        yield Finding("FAIL", "write", text)


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


def _fsync(folder: Path) -> Finding:
    before = time.perf_counter()
    with open(folder / "synced", "wb") as file:
        file.write(bytes(1 << 16))
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(folder)
    taken_s = time.perf_counter() - before
    advice = "slow, write checkpoints less often" if taken_s > SLOW_FSYNC_S else ""
    return finding("fsync", f"{taken_s * 1e3:.1f} ms for 64 KiB and its folder", advice)


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
        except (BlockingIOError, PermissionError):
            return "the second of two holders is refused"
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
    """Difference between the file server's time of a new file and this machine's clock."""
    (folder / "now").write_text("now")
    skew_s = (folder / "now").stat().st_mtime - time.time()
    text = f"times of files are {skew_s:+.2f} s from this machine's clock"
    if abs(skew_s) < SKEW_WARN_S:
        return finding("clock", text)
    advice = "synchronise the clocks (NTP) of this host and the disk"
    state: Literal["warn", "FAIL"] = "FAIL" if abs(skew_s) >= SKEW_FAIL_S else "warn"
    return Finding(state, "clock", f"{text}: {advice}")


_CHECKS: tuple[tuple[str, Callable[[Path], str | Finding], str], ...] = (
    ("rename", _rename, "results could be half-written; choose another folder"),
    ("fsync", _fsync, "a power cut could lose finished work; choose another folder"),
    ("exclusive create", _exclusive, "choose another folder"),
    ("flock", _flock, "the run lock needs it; mount with flock (Lustre: -o flock)"),
    ("mmap", _mmap, "the sample index is mapped; choose another folder"),
    ("clock", _clock, "choose another folder"),
)
