"""Runs every benchmark, one after another, and prints their tables: about ten minutes on two cores.

Each runs in a process of its own, from a fresh interpreter. Exits with 1 if one failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.benchmarks import timing

NAMES = ("concat", "cached_text", "reading", "kmeans", "plan")


def main(arguments: Sequence[str] | None = None) -> int:
    """All, or those named; returns the exit code."""
    parser = timing.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    options = parser.parse_args(arguments)
    wanted = options.names or list(NAMES)
    if unknown := sorted(set(wanted) - set(NAMES)):
        parser.error(f"no benchmark {', '.join(unknown)}: there are {', '.join(NAMES)}")
    path = os.pathsep.join(filter(None, [str(timing.ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    failed = []
    for name in wanted:
        start_s = time.perf_counter()
        command = [sys.executable, "-m", f"tests.benchmarks.bench_{name}"]
        command += ["--rounds", str(options.rounds)]
        code = subprocess.run(command, env=environment, cwd=timing.ROOT).returncode
        failed += [name] if code else []
        ending = f"failed with exit code {code}" if code else "done"
        print(f"\nbench_{name}: {ending} after {time.perf_counter() - start_s:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
