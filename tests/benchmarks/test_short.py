"""Every benchmark runs in its shortest form and prints its tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.benchmarks import peers
from tests.matrix import SOAK

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
WITH_PEERS = {"bench_reading", "bench_training"}


@pytest.mark.slow
# Beside the soak, one that stands alone and one with a peer.
@pytest.mark.parametrize("name", NAMES if SOAK else ["bench_kmeans", "bench_reading"])
def test_it_prints_tables_with_figures(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.benchmarks.{name}", "--short"],
        cwd=tiny.ROOT,
        env=tiny.environment(),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"^\| .*\d.* \|$", done.stdout, re.MULTILINE)
    assert rows, done.stdout
    if name in WITH_PEERS:
        beside = any(line.split("|")[1].strip() == "open_clip" for line in rows) or any(
            line.split("|")[2].strip() == "open_clip" for line in rows
        )
        assert beside or peers.MISSING in done.stdout
