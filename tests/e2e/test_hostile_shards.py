"""What a stranger gives, through the command line: a result or one line, within seconds.

``make test`` indexes a few mutated shards, ``make soak`` a hundred.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mclclip.data.sample_index import KIND
from mclclip.run.artifacts import read_manifest
from tests import hostile_tars
from tests.e2e.conftest import Finished, Shell
from tests.matrix import IN_SOAK
from tests.unit.test_config_yaml import LAUGHS

SECONDS = 300  # of a machine that does other things too


def ended_well(finished: Finished) -> bool:
    """Whether the command did its work; asserts that it ended in one line where it did not."""
    assert "Traceback" not in finished.stderr, finished.stderr
    assert all(line.isprintable() for line in finished.stderr.removesuffix("\n").split("\n"))
    assert finished.code in (0, 2), finished.stderr
    if finished.code:
        (line,) = finished.complaints()
        assert line == finished.stderr.splitlines()[-1]
    return finished.code == 0


@pytest.mark.parametrize("number", [3, pytest.param(100, marks=IN_SOAK)])
def test_mutated_shards_beside_a_good_one(shell: Shell, tmp_path: Path, number: int) -> None:
    shards, done = tmp_path / "shards", 0
    shards.mkdir()
    good = hostile_tars.whole(hostile_tars.FORMATS[0], 3, "good", long=False)
    (shards / "good.tar").write_bytes(good)
    # The first command waits for the imports of the server behind ``shell``.
    shell.ok(
        "index", f"run_dir={tmp_path}/good", f"data.sources.s.shards={shards}/*.tar", "device=cpu"
    )
    for seed in range(number):
        (shards / "mutated.tar").write_bytes(hostile_tars.mutated(10**6 + seed)[1])
        run_dir, start = tmp_path / str(seed), time.monotonic()
        finished = shell(
            "index", f"run_dir={run_dir}", f"data.sources.s.shards={shards}/*.tar", "device=cpu",
            f"data.index_workers={1 + seed % 2}", f"data.max_bad_fraction={0.5 * (seed % 3 > 0)}",
        )  # fmt: skip
        assert time.monotonic() - start < SECONDS, seed
        if ended_well(finished):
            done += 1
            counts = read_manifest(run_dir / "index", KIND).counts
            assert counts["samples"] >= 3, seed
        else:
            assert "data.max_bad_fraction" in finished.stderr, (seed, finished.stderr)
            assert str(shards / "mutated.tar") in finished.stderr
    assert 0 < done < number


def test_names_in_a_shard_do_not_reach_the_terminal(shell: Shell, tmp_path: Path) -> None:
    names = ["\x1b[2Ja\n12:00:00 I forged", "b\x9b1m\u202e"]
    data = b"".join(hostile_tars.member(f"{name}.jpg", b"i") for name in names)
    (tmp_path / "x.tar").write_bytes(data + bytes(1024))
    shards = f"data.sources.s.shards={tmp_path}/x.tar"
    finished = shell("index", f"run_dir={tmp_path / 'run'}", shards, "device=cpu")
    assert ended_well(finished)
    assert r"s/\x1b[2Ja\n12:00:00 I forged" in finished.stderr


def test_a_hostile_configuration_is_refused(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    indented = "".join(f"    {line}\n" for line in LAUGHS.splitlines())
    path.write_text(f"run_dir: {tmp_path / 'run'}\nmodel:\n  name:\n{indented}")
    shell("config")
    start = time.monotonic()
    finished = shell("index", "--config", path)
    assert time.monotonic() - start < SECONDS
    assert not ended_well(finished) and f"mclclip: {path} " in finished.stderr
    assert not (tmp_path / "run").exists()
