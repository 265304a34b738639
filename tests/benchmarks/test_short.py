"""Every benchmark runs in its shortest form and prints its tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.benchmarks import peers, ratios, timing
from tests.matrix import SOAK

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
WITH_PEERS = {"bench_reading", "bench_training", "bench_entry_point"}


@pytest.mark.slow
# Beside the soak, one that stands alone and one with a peer.
@pytest.mark.parametrize("name", NAMES if SOAK else ["bench_plan", "bench_reading"])
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


def test_every_benchmark_takes_the_short_form() -> None:
    for name in NAMES:
        source = (Path(__file__).parent / f"{name}.py").read_text()
        assert "timing.parse(" in source, f"{name} does not take --short: use timing.parse"


def test_ratios_of_a_run_are_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tables.jsonl"
    with pytest.raises(SystemExit):
        ratios.main([str(path)])
    monkeypatch.setenv(timing.TABLES, str(path))
    spent = {"a": [timing.Spent(1.0, 2.0)] * 3, "b": [timing.Spent(1.5, 1.0)] * 3}
    columns = timing.headers("way", "samples")
    timing.print_table("Two ways, side by side", columns, timing.Timings(spent).rows("a", 1))
    timing.print_table("No ratios", ["what", "GiB"], [["a", 3]])
    assert ratios.ratios(path.read_text().splitlines()) == [
        [Path(sys.argv[0]).stem, "Two ways, side by side", "b", "1.500", "0.500"]
    ]
    monkeypatch.delenv(timing.TABLES)
    capsys.readouterr()
    ratios.main([str(path)])
    assert re.search(r"\| +b \| +1.500 \| +0.500 \|", capsys.readouterr().out)
