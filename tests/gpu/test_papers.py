"""The papers' figures in pieces, at the size for a CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mclclip.checkpoint import step_files
from mclclip.ranks import signals
from tests.gpu import papers
from tests.matrix import in_soak
from tests.unit.data.datasets import fakes

DIGITS, SHAPES = papers.FIGURES["cifar_mnist-tau_0.1"], papers.FIGURES["trifeature-tau_0.5"]


def call(out: Path, figure: papers.Figure, *words: str) -> int:
    """One piece on the CPU."""
    device = ["--device", "cpu", "--workers", "0", "--out", str(out), "--only", figure.name]
    return papers.main([*device, "--set", "data.index_workers=1", "--set", "poll_s=0.1", *words])


def until(path: Path) -> Callable[[papers.Piece], bool]:
    """A piece that is over once a training has saved a step there."""
    return lambda piece: bool(step_files.steps(path))


@pytest.mark.parametrize("figure", [DIGITS, SHAPES], ids=lambda figure: figure.dataset)
@in_soak
def test_pieces_go_on_to_figures_beside_the_papers(
    figure: papers.Figure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two pieces are ended in the middle of a training, the third reaches the end."""
    sources = []
    if figure.sources:
        fakes.cifar_batches(tmp_path / "cifar", per_batch=12)
        fakes.mnist(tmp_path / "mnist", count=20, train=20)
        labels = tmp_path / "mnist/MNIST/raw/train-labels-idx1-ubyte"
        labels.write_bytes(fakes.idx(np.arange(20, dtype=np.uint8) % 10))  # not all alike
        sources = [f"--source=cifar10={tmp_path}/cifar", f"--source=mnist={tmp_path}/mnist"]
    run, steps = tmp_path / "out/runs" / figure.name, ["base.steps=20", "train.steps=20"]
    words = [*sources, *(f"--set={option}" for option in steps)]
    for stage in ("stage_0", "stage_1"):
        saved = run / stage / "train/checkpoints"
        monkeypatch.setattr(papers.Piece, "is_over", until(saved))
        assert call(tmp_path / "out", figure, *words) == 85
        assert f"{stage}: step " in (said := capsys.readouterr().out)
        assert "saved: start the same again" in said
        assert json.loads((run / "run_state.json").read_text())["state"] == "preempted"
        words = words[len(sources) :]  # the data set is there now
        sources = []
    monkeypatch.setattr(papers.Piece, "is_over", lambda piece: False)
    assert call(tmp_path / "out", figure, *words) == 0
    said = capsys.readouterr().out
    for model, published in figure.paper.items():
        (line,) = [line.split() for line in said.splitlines() if line.strip().startswith(model)][
            -1:
        ]
        own, beside = line[1 : 1 + len(published)], line[1 + len(published) :]
        assert all(0.0 <= float(value) <= 100.0 for value in own)
        assert [float(value) for value in beside] == list(published)
    assert step_files.steps(run / "stage_2/train/checkpoints")[-1] == 20


def test_a_piece_is_over_in_time_and_when_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def over(left_s: float) -> bool:
        return papers.Piece(tmp_path, "cpu", deadline=time.monotonic() + left_s).is_over()

    assert over(papers.LEAVE_S - 1.0) and not over(papers.LEAVE_S + 600.0)
    monkeypatch.setattr(signals, "get_request", lambda: "SIGTERM")
    assert over(papers.LEAVE_S + 600.0)


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path, DIGITS, "--source", "mnist=nowhere") == 2
    said = capsys.readouterr().out
    assert "data/cifar_mnist is not there" in said and "give --source cifar10=FOLDER\n" in said
    assert papers.main(["--device", "cpu", "--only", "none"]) == 2


def test_the_papers_figures_are_those_of_the_recipes() -> None:
    """The heads of the recipes have them too, as shares of 1."""
    for figure in papers.FIGURES.values():
        text = (papers.RECIPES / f"{figure.recipe}.yaml").read_text().replace("\n# ", " ")
        for values in figure.paper.values():
            written = " ".join(f"{value / 100:.2f}".replace("0.", ".") for value in values)
            assert written in text, figure.name
