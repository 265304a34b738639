"""open_clip's own training code in a process of its own, with two packages that only it wants.

open_clip_train imports pandas, and reads shards with a webdataset that is older than ours. Both
(peers.txt) lie in the folder ``.peers``, which ``make peers`` fills. It comes first on the path of
that process; everything else, torch too, is what this process has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import util

from tests.benchmarks import timing

FOLDER = timing.ROOT / ".peers"
MISSING = "open_clip_train is left out, as it cannot run here: run 'make peers'"


def can_run(*, reads_shards: bool) -> bool:
    """True if open_clip_train can run here: with pandas, and to read shards an older webdataset."""
    has_pandas = (FOLDER / "pandas").is_dir() or util.find_spec("pandas") is not None
    return has_pandas and (not reads_shards or (FOLDER / "webdataset").is_dir())


def run(
    words: Sequence[str], threads: int = 1, *, peers: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these words from the checkout, with its modules first on the path;
    ``peers``: after those of the folder."""
    folders = [str(FOLDER)] if peers else []
    path = os.pathsep.join([*folders, str(timing.ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=timing.ROOT,
        env=os.environ | {"PYTHONPATH": path.strip(os.pathsep), "OMP_NUM_THREADS": str(threads)},
    )
