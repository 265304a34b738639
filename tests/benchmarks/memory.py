"""How every benchmark here measures memory: the peak of one call, in a process of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def resident_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (the highest since the process or the last reset) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def peak_mib(work: Callable[[], object]) -> float:
    """The largest resident set during ``work``, above what was resident before it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
    before = resident_mib("VmRSS")
    work()
    return resident_mib("VmHWM") - before


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """What a module-level function returns in a new process: no memory of others is reused."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
