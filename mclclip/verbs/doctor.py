"""Verb ``doctor``: checks whether this machine and the folder for runs are fit for training.

Every check prints one line: ``ok``, ``warn`` or ``FAIL``, the thing that was checked, its figures,
and, if something is wrong, what to do.
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

from mclclip import __version__
from mclclip.ranks.failures import MORE_SHARED_MEMORY
from mclclip.util import advice, search
from mclclip.util.files import fsync_directory, message_of, nearest_existing, printable

FREE_GB, SHM_GB, OPEN_FILES = 10, 1, 1024
SLOW_FSYNC_S = 1.0


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``what`` names the thing that was checked, such as 'disk'."""

    state: Literal["ok", "warn", "FAIL"]
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.state:<4}  {self.what}: {self.text}"


def run(path: Path) -> int:
    """Prints the report for this machine and for ``path``, where runs will be written.

    Returns 0, or 2 if a check failed; warnings do not count.
    """
    return show(findings(Path(path)))


def show(lines: Iterator[Finding]) -> int:
    """Prints findings one by one, and how many are bad; returns 0, or 2 if a check failed."""
    number: Counter[str] = Counter()
    for each in lines:
        print(advice.complete(printable(str(each))), flush=True)
        number[each.state] += 1
    bad = number["FAIL"] or number["warn"]
    print(f"{number['FAIL']} failed, {number['warn']} to look at" if bad else "all is well")
    return 2 if number["FAIL"] else 0


def findings(path: Path) -> Iterator[Finding]:
    """Runs all checks; yields a line for each."""
    system = f"{platform.system()} {platform.release()}"
    yield finding("python", f"{platform.python_version()} on {system}, {sys.executable}")
    for check in (_packages, _libraries, _cpu, _gpus, _hub, _open_files, _shared_memory):
        yield from check()
    if not (folder := nearest_existing(path)).is_dir():
        yield Finding("FAIL", "disk", f"{folder} is a file: choose a folder for runs")
        return
    yield _room("disk", folder, str(path), FREE_GB, f"a run may need more than {FREE_GB} GB")
    yield from _file_system(folder)


def finding(what: str, text: str, advice: str = "") -> Finding:
    """Returns a warning that ends with ``advice``, or an "ok" if ``advice`` is empty."""
    return Finding("warn", what, f"{text}: {advice}") if advice else Finding("ok", what, text)


# --- software ----------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    """Lists the versions of required and optional packages; fails if a required one is missing."""
    required: dict[str, str | None] = {"mclclip": __version__}
    extras: dict[str, str | None] = {}
    try:
        lines = metadata.requires("mclclip") or []
    except metadata.PackageNotFoundError:  # of a checkout on PYTHONPATH
        where = f"mclclip {__version__} is not installed, so that its packages are not compared"
        yield finding("versions", where)
        return
    for line in lines:
        if '"dev"' not in line:
            name = re.split(r"[^\w.-]", line)[0]
            (extras if "extra ==" in line else required)[name] = _version(name)
    yield finding("versions", ", ".join(f"{n} {v}" for n, v in required.items() if v))
    if missing := [name for name, version in required.items() if version is None]:
        yield Finding("FAIL", "packages", f"missing: pip install {' '.join(missing)}")
    yield finding("extras", ", ".join(f"{n} {v or 'not installed'}" for n, v in extras.items()))


def _libraries() -> Iterator[Finding]:
    """Checks that torchvision, open_clip (which needs torchvision) and faiss can be imported."""
    try:
        status = import_module("mclclip.util.torchvision_fix").status()
        import_module("open_clip")
        yield finding("torchvision", f"it and open_clip were imported, fix {status}")
    except Exception as error:  # a broken installation may raise anything
        text = f"import failed ({type(error).__name__}: {message_of(error)}): install torchvision "
        yield Finding("FAIL", "torchvision", f"{text}for this torch, see constraints.txt")
    builds = sorted({*metadata.packages_distributions().get("faiss", ())})
    text = ", ".join(f"{name} {_version(name)}" for name in builds) or "not installed"
    if len(builds) > 1:
        again = f"they overwrite each other, pip uninstall {' '.join(builds)}, then {search.EXTRA}"
        yield finding("faiss", text, again)
        return
    try:
        search.library("kNN, 'mclclip filter' and 'mclclip blindspots'")
        yield finding("faiss", text)
    except ValueError as error:
        yield Finding("FAIL" if builds else "ok", "faiss", message_of(error))


# --- devices -----------------------------------------------------------------------------------


def _cpu() -> Iterator[Finding]:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    usable = len(os.sched_getaffinity(0))
    text = f"{usable} of {os.cpu_count()} cores usable, {memory_gib:.0f} GiB of memory"
    if (torch := _torch()) is not None:
        threads = os.environ.get("OMP_NUM_THREADS", "not set")
        import_module("mclclip.ranks.process_group")  # its import leaves a core to readers
        text += f", torch uses {torch.get_num_threads()} threads (OMP_NUM_THREADS {threads})"
    yield finding("cpu", text)


def _torch() -> Any:
    """Returns torch, or None if its import fails, which `_libraries` reports."""
    try:
        return import_module("torch")
    except Exception:
        return None


def _gpus() -> Iterator[Finding]:
    if (torch := _torch()) is None:
        return
    if not torch.cuda.is_available():
        text = f"torch {torch.__version__} sees none: everything runs on the CPU"
        advice = "install a CUDA build of torch, and check the driver with nvidia-smi"
        yield finding("gpu", text, advice if shutil.which("nvidia-smi") else "")
        return
    for number in range(torch.cuda.device_count()):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(number))
        properties = torch.cuda.get_device_properties(number)
        # torch.cuda.is_bf16_supported is also true for older GPUs, which only emulate bf16.
        bf16 = "bf16" if properties.major >= 8 else "no bf16: use precision=fp32"
        text = f"{properties.name}, {free:.1f} of {total:.1f} GiB free, {bf16}"
        busy = "another process uses it, see nvidia-smi" * (free < 0.5 * total)
        yield finding(f"gpu {number}", text, busy)


# --- limits ------------------------------------------------------------------------------------


def _hub() -> Iterator[Finding]:
    """Warns if there is no way to pretrained weights: HF_HUB_OFFLINE is set, and nothing cached."""
    from huggingface_hub import constants

    cached = len(list(Path(constants.HF_HUB_CACHE).glob("models--*")))
    text = f"{cached} cached models in {constants.HF_HUB_CACHE}, HF_HUB_OFFLINE is "
    text += "set" if constants.HF_HUB_OFFLINE else "not set (not tried whether the hub answers)"
    advice = "give model.pretrained as a file, use local-dir:PATH, or unset HF_HUB_OFFLINE"
    yield finding("weights", text, advice if constants.HF_HUB_OFFLINE and not cached else "")


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < OPEN_FILES  # -1: no limit
    advice = f"loader workers need {OPEN_FILES}, run 'ulimit -n {hard}'" * few
    yield finding("open files", f"up to {soft}", advice)


def _shared_memory() -> Iterator[Finding]:
    """Checks the room in /dev/shm, through which loader workers pass batches."""
    if (folder := Path("/dev/shm")).is_dir():
        advice = f"loader workers may die; {MORE_SHARED_MEMORY}"
        yield _room("shared memory", folder, str(folder), SHM_GB, advice)
    else:
        yield finding("shared memory", f"no {folder}", "set data.num_workers=0")


def _room(what: str, folder: Path, where: str, wanted_gb: int, advice: str) -> Finding:
    """Warns if the disk or memory that ``folder`` lies on has less than ``wanted_gb`` free."""
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free at {where}"
    return finding(what, text, advice if usage.free < wanted_gb * 1e9 else "")


# --- where runs will lie -----------------------------------------------------------------------


def _file_system(folder: Path) -> Iterator[Finding]:
    """Runs ``_CHECKS`` in a temporary folder below ``folder``."""
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
    (folder / "old").mkdir()
    os.rename(folder / "old", folder / "new")
    if [path.name for path in folder.iterdir()] != ["new"]:
        raise OSError("a renamed folder is not there")
    return "a renamed folder is there"


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


def _flock(folder: Path) -> str:
    with open(folder / "lock", "w") as first, open(folder / "lock", "w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return "the second of two holders is refused"
    raise OSError("two holders of one lock both succeeded")


def _mmap(folder: Path) -> str:
    (folder / "mapped").write_bytes(b"mapped")
    with open(folder / "mapped", "rb") as file:
        read = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)[:]
    return f"{len(read)} bytes read back"


_CHECKS: tuple[tuple[str, Callable[[Path], str | Finding], str], ...] = (
    ("rename", _rename, "results could be half-written; choose another folder"),
    ("fsync", _fsync, "a power cut could lose finished work; choose another folder"),
    ("flock", _flock, "the run lock needs it; mount with flock (Lustre: -o flock)"),
    ("mmap", _mmap, "the sample index is mapped; choose another folder"),
)
