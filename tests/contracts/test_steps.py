"""What the runner does for every step, on a verb that is as short as one can be."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mclclip.ranks import collectives
from mclclip.run.artifacts import INTENT, MANIFEST, Artifact, is_finished, read_manifest
from mclclip.run.steps import Made, Step, find_artifact, identity_of, make_artifact
from mclclip.util import files
from mclclip.util.remake import Remake
from tests import tiny
from tests.distributed.conftest import RankPool
from tests.toys.lengths import Counting, Lengths, run

STEP = Lengths(Counting(), "words")


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    path = tmp_path / "captions.txt"
    path.write_text("a dog\ntwo red cups\n")
    return path


def test_a_step_is_made_once(
    captions: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = run(captions, tmp_path / "out", STEP)
    assert files.read_json(out / "lengths.json") == {"2": 1, "3": 1}
    manifest = read_manifest(out, "lengths")
    assert manifest.config == identity_of(STEP) and manifest.counts == {"captions": 2}
    assert [*manifest.records] == ["lengths.json"] and not (out / INTENT).exists()
    before = tiny.digests(out, "*")
    with caplog.at_level("INFO", "mclclip"):
        run(captions, out, STEP)
    assert tiny.digests(out, "*") == before and caplog.text.count("skipped") == 1


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (replace(STEP, unit="letters"), "unit was 'words', now 'letters'"),
        (replace(STEP, counting=Counting(longest=9)), "counting.longest was 10, now 9"),
    ],
    ids=["field", "option"],
)
def test_every_field_counts(
    captions: Path, tmp_path: Path, other: Lengths, difference: str
) -> None:
    out = run(captions, tmp_path / "out", STEP)
    with pytest.raises(ValueError, match=f"{out} was made with other settings: {difference}"):
        run(captions, out, other)
    assert read_manifest(run(captions, out, other, force=Remake.UNFIT), "lengths").config != {}
    assert is_finished(tmp_path / "out.old-1")


def test_what_changes_no_result_does_not_count(captions: Path, tmp_path: Path) -> None:
    out = run(captions, tmp_path / "out", STEP)
    made = (out / MANIFEST).stat().st_mtime_ns
    run(captions, out, replace(STEP, counting=Counting(show=True)))
    assert (out / MANIFEST).stat().st_mtime_ns == made


def test_inputs_count_by_their_names(captions: Path, tmp_path: Path) -> None:
    out = run(captions, tmp_path / "out", STEP)
    captions.write_text("a cat\n")
    with pytest.raises(ValueError, match=r"from other data: captions"):
        run(captions, out, STEP)
    with pytest.raises(ValueError, match="captions"):
        find_artifact(STEP, out, captions)
    run(captions, out, STEP, force=Remake.ALL)
    assert read_manifest(out, "lengths").counts == {"captions": 1}


def test_what_was_begun_goes_on(captions: Path, tmp_path: Path) -> None:
    out = find_artifact(STEP, tmp_path / "out", captions).begin()
    (out / "lengths.json").write_text("{}")  # as the call that was killed has left it
    run(captions, out, STEP)
    assert (out / "lengths.json").read_text() == "{}" and is_finished(out)


@pytest.mark.parametrize("force", [Remake.NOTHING, Remake.ALL])
def test_an_error_before_the_beginning_leaves_what_is_there(
    captions: Path, tmp_path: Path, force: Remake
) -> None:
    few = replace(STEP, counting=Counting(longest=1))
    with pytest.raises(ValueError, match="longest is 1"):
        run(captions, tmp_path / "out", few, force=force)
    assert not (tmp_path / "out").exists()
    out = run(captions, tmp_path / "out", STEP)
    before = tiny.digests(out, "*")
    with pytest.raises(ValueError, match="longest"):
        run(captions, out, few, force=force)
    assert tiny.digests(tmp_path, "out*/*") == {f"out/{name}": d for name, d in before.items()}


@dataclass(frozen=True)
class OfAllRanks(Step[Path]):
    """Notes who makes it, and that rank 0 alone does what stands within ``on_main``."""

    kind = "ranks"
    all_ranks = True

    def make(self, out: Artifact, how: Path) -> Made:
        folder = collectives.on_main(out.begin)  # within the work of rank 0 it is a plain call
        files.write_json(folder / f"{collectives.rank()}.json", os.getpid())
        return Made({"ranks": collectives.world_size()})


@dataclass(frozen=True)
class OfRankZero(OfAllRanks):
    all_ranks = False


def make_both(folder: Path) -> tuple[list[str], Any]:
    steps: list[Callable[[], Any]] = [
        lambda: make_artifact(OfAllRanks(), folder / "all", folder),
        lambda: make_artifact(OfRankZero(), folder / "zero", folder),
        lambda: collectives.on_main(lambda: make_artifact(OfRankZero(), folder / "within", folder)),
    ]
    return [step().digest for step in steps], steps[0]().counts


def test_ranks_make_a_step_together_or_wait_for_the_first(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks(2, make_both, tmp_path)
    assert results[0] == results[1]
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/?.json"))
    assert made == ["all/0.json", "all/1.json", "within/0.json", "zero/0.json"]
