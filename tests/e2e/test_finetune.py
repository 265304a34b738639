"""``mclclip finetune`` as it is typed: killed and resumed, on two ranks, and before any of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mclclip import Run
from tests import photos, tiny
from tests.e2e.conftest import KillAfter, Shell
from tests.matrix import in_soak


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    photos.write(folder)
    return folder


def words(pictures: Path, out: Path, *more: str) -> list[str | Path]:
    table = pictures / "captions.csv"
    given = ["--base", photos.base(pictures), "--out", out, *photos.FEW_STEPS, *more]
    return ["finetune", pictures, "--captions", table, *given]


@in_soak
def test_killed_and_called_again_it_ends_with_the_same_bits(
    shell: Shell, pictures: Path, tmp_path: Path
) -> None:
    whole = shell.ok(*words(pictures, tmp_path / "whole"))
    verdict = Run.open(tmp_path / "whole").verdict()
    assert len(verdict) >= 3 and "\n".join(verdict) in whole.stdout
    killed = words(pictures, tmp_path / "killed")
    assert shell(*killed, inside=KillAfter("update", 7)).code == -9  # within stage 1
    assert not (tmp_path / "killed/stage_1/export/manifest.json").exists()
    assert "resumed from" in shell.ok(*killed).stderr
    assert tiny.digests(tmp_path / "whole") == tiny.digests(tmp_path / "killed")


@pytest.mark.slow
def test_two_ranks_choose_once_and_train_together(
    shell: Shell, pictures: Path, tmp_path: Path
) -> None:
    done = shell(*words(pictures, tmp_path / "run"), ranks=2)
    assert done.code == 0, done.stderr
    assert done.stdout.count(Run.open(tmp_path / "run").verdict()[0]) == 1
    assert (tmp_path / "run/exports/soup_uniform/manifest.json").exists()


def test_a_dry_run_prints_settings_and_writes_nothing(
    shell: Shell, pictures: Path, tmp_path: Path
) -> None:
    asked = ("--dry-run", "--gpu-gib", "8", "--samples", "20000")
    done = shell.ok(*words(pictures, tmp_path / "run", *asked))
    assert "device: cuda  # a GPU of 8 GiB" in done.stdout
    assert not (tmp_path / "run").exists()
