"""What tests with random damage share: how many, the damage itself, and how a trial may end."""

from __future__ import annotations

import copy
import json
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.matrix import SOAK

T = TypeVar("T")
LIMIT_CPU_S, LIMIT_S = 60.0, 600.0  # for one trial on a busy machine; most take milliseconds
MORE_BYTES = 4 * 2**30  # of memory for one trial
ONE_LINE = (ValueError, RuntimeError, OSError)
ODD_VALUES: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 33, 1000, 20_000, 2**31, 10**9, 10**18, 0.5, -2.5, 1e30, float("nan"),
    float("inf"), True, False, None, "", "x", "12", "../..", "/etc/passwd", "hf-hub:a/b",
    "local-dir:/tmp", "pipe:ls", "\x1b[2J", [], [1, 2], [[1]], ["a"] * 200, {}, {"a": {"b": {}}},
    {"trust_remote_code": True},
)  # fmt: skip


def count(few: int, many: int) -> int:
    """Number of trials: few in ``make test``, many in ``make soak``."""
    return many if SOAK else few


def ends_well(trial: Callable[[], T], what: str) -> T | None:
    """The result of a trial; None where it ended with one line for the user. Fails for every other
    exception, for several lines, and for a trial that takes too long."""
    started, cpu_started = time.monotonic(), time.process_time()
    found: T | None = None
    try:
        with _limited_memory():
            found = trial()
    except ONE_LINE as error:
        line = str(error)
        assert line and "\n" not in line.strip() and len(line) < 2_000, f"{what}: {line!r}"
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    cpu_s = time.process_time() - cpu_started
    assert cpu_s < LIMIT_CPU_S and time.monotonic() - started < LIMIT_S, f"{what}: {cpu_s:.0f} s"
    return found


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Lets this process take ``MORE_BYTES`` for the time of a block: what a stranger's numbers ask
    for is refused, and does not fill the machine."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MORE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# --- bytes -------------------------------------------------------------------------------------


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Another content: flipped bits, zeros, cuts, additions, moved and repeated parts."""
    data, size = bytearray(content), len(content)
    start = rng.randrange(size) if size else 0
    stop = min(size, start + rng.choice((1, 4, 64, 512, 4096)))
    way = rng.randrange(8)
    if way == 0 and size:
        data[start] ^= 1 << rng.randrange(8)
    elif way == 1:
        data[start:stop] = bytes(stop - start)
    elif way == 2:
        del data[start:]
    elif way == 3:
        data += rng.randbytes(rng.randrange(1, 600))
    elif way == 4:
        data[start:stop] = rng.randbytes(stop - start)
    elif way == 5:
        del data[start:stop]
    elif way == 6:
        part = data[start:stop]
        del data[start:stop]
        data += part
    else:
        data[start:stop] = data[start:stop][::-1]
    return bytes(data)


# --- JSON --------------------------------------------------------------------------------------


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in nested mappings and lists."""
    keys: list[Any] = list(tree) if isinstance(tree, dict) else []
    if isinstance(tree, list):
        keys = list(range(len(tree)))
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def damaged_json(tree: Any, rng: random.Random) -> Any:
    """Another tree: one to three values that are odd, missing, renamed, repeated or too deep."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            return rng.choice(ODD_VALUES)
        container, key = rng.choice(places)
        way = rng.randrange(10)
        if way == 0:
            del container[key]
        elif way == 1 and isinstance(container, dict):
            container[f"{key}_{rng.randrange(10)}"] = container.pop(key)
        elif way == 2:
            deep: Any = 1
            for _ in range(rng.choice((3, 200))):
                deep = [deep]
            container[key] = deep
        elif way == 3:
            container[key] = [copy.deepcopy(container[key]) for _ in range(rng.choice((2, 300)))]
        elif way == 4 and isinstance(container[key], int | float):
            container[key] = container[key] * rng.choice((-1, 2, 10, 1_000_000))
        else:
            container[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        if key == "layers" and key in container and isinstance(container[key], int):
            # More are built one by one until the memory is full, which is not promised to be seen.
            container[key] = min(container[key], 1_000)
    return tree


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    """Replaces a file for the time of a block."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)
