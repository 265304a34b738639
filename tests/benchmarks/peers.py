"""Where open_clip's own training code runs: an environment beside .venv, made by ``make peers``.

open_clip_train imports pandas, and reads shards with a webdataset that is older than ours. Its
environment sees the packages of .venv, so both sides use the same torch, and has these two of its
own (peers.txt).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata, util

from tests.benchmarks import timing

PYTHON = timing.ROOT / ".venv-peers" / "bin" / "python"
MISSING = "open_clip_train is left out, as it cannot run here: run 'make peers'"


def python(*, reads_shards: bool) -> str | None:
    """The interpreter under which open_clip_train runs, or None.

    Where there is no environment for it, this process's own will do if it has what is needed: a GPU
    machine may come with pandas, which is enough where no shards are read.
    """
    if PYTHON.exists():
        return str(PYTHON)
    has_pandas = util.find_spec("pandas") is not None
    version = metadata.version("webdataset").split(".")[:2]
    reads = not reads_shards or tuple(map(int, version)) <= (0, 2)
    return sys.executable if has_pandas and reads else None


def run(
    interpreter: str, words: Sequence[str], threads: int = 1
) -> subprocess.CompletedProcess[str]:
    """Ends like ``subprocess.run``, from the checkout, with its modules first on the path."""
    path = os.pathsep.join(filter(None, [str(timing.ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [interpreter, *words],
        capture_output=True,
        text=True,
        cwd=timing.ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
    )
