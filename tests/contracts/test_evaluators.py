"""What every evaluator keeps, each by its data and options in ``evaluator_cases.CASES``.

A perfect encoder gets its unit's best, equal features their floor, and random ones the chance that
is stated; a tie counts against the model; outcomes of items are those that the figure is of; data
that are missing or damaged are one line; and several ranks give the rows of one process.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.eval import outcomes, results
from mclclip.eval.features import Extractor
from mclclip.eval.protocols import KINDS, BenchmarkConfig, evaluator
from mclclip.eval.results import Measurement
from mclclip.eval.units import PERCENT, Unit
from mclclip.ranks.process_group import SINGLE, Context
from mclclip.verbs import eval as evaluation
from tests.contracts.evaluator_cases import CASES, NUM_CLASSES, Case
from tests.distributed.conftest import here
from tests.planted import PlantedEncoder, planted

NUM_SEEDS = 24
FEW_DRAWS = 200  # of an interval of a ranking, whose width is tests/unit/eval/test_outcomes.py's
ONE_LINE = (ValueError, FileNotFoundError)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "NUM_RANKING_DRAWS", FEW_DRAWS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, int]]:
    """A case's data, which tests read, and how many numbers they use."""
    folder = tmp_path_factory.mktemp("data")

    @cache
    def write(name: str) -> tuple[Path, int]:
        return folder / name, CASES[name].write(folder / name)

    return write


def perfect(case: Case, size: int) -> PlantedEncoder:
    encoder = planted("perfect", size)
    if case.by_class:
        encoder.image_table = torch.eye(NUM_CLASSES)[torch.arange(size) % NUM_CLASSES]
    return encoder


def measured(case: Case, root: Path, encoder: Any, context: Context = SINGLE) -> list[Measurement]:
    """The figures of the encoder."""
    extractor = Extractor(encoder, context, batch_size=8)
    return evaluator(case.kind).evaluate(extractor, root, **case.options)


def unit_of(figure: Measurement) -> Unit:
    assert figure.outcomes is not None
    return figure.outcomes.rule.unit


def test_every_kind_has_a_case() -> None:
    assert {case.kind for case in CASES.values()} == {*KINDS}


@pytest.mark.parametrize("name", CASES)
def test_a_perfect_encoder_gets_the_best_and_equal_features_their_floor(
    written: Any, name: str
) -> None:
    """Of equal features every comparison is a tie, which counts against the model."""
    case, (root, size) = CASES[name], written(name)
    best, constant = (
        {figure.metric: figure for figure in measured(case, root, encoder)}
        for encoder in (perfect(case, size), planted("constant", size, dim=64))
    )
    losses = {unit_of(figure).smaller_is_better for figure in best.values()}
    assert losses == {evaluator(case.kind).is_loss}
    headlines = {n for n, figure in best.items() if figure.protocol.get("level") == "headline"}
    assert headlines and not any(
        name.endswith(("_official", "_optimistic", "_half_ties")) for name in headlines
    )
    if case.kind == "compositional":
        assert len(headlines) == 1
        for figures, tied in ((best, 0), (constant, 1)):
            for figure in figures.values() if tied or case.is_solved else ():
                assert figure.protocol["tied_items"] == tied * figure.count
    for metric, figure in best.items():
        assert not case.is_solved or figure.value == pytest.approx(unit_of(figure).best), metric
    for metric, figure in constant.items():
        if metric.endswith(("_official", "_optimistic")):  # ties count for the model
            wanted = 100.0
        elif metric.endswith("_half_ties"):
            wanted = 50.0
        else:
            is_share = unit_of(figure) == PERCENT
            wanted = case.floor(figure.protocol) if is_share else figure.protocol["chance"]
        assert figure.value == pytest.approx(wanted, abs=0.01), metric


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.by_chance])
def test_random_features_get_the_chance_that_is_stated(written: Any, name: str) -> None:
    """Their mean over encoders is within four standard errors of it."""
    case, (root, size) = CASES[name], written(name)
    found = [
        {f.metric: f for f in measured(case, root, planted("random", size, seed=seed))}
        for seed in range(NUM_SEEDS)
    ]
    for metric, first in found[0].items():
        values = np.array([figures[metric].value for figures in found])
        chance = first.protocol["chance"]
        least = (chance * (100 - chance) / first.count) ** 0.5  # of items that are independent
        error = max(values.std(ddof=1), least) / NUM_SEEDS**0.5
        assert abs(values.mean() - chance) < 4 * error + 0.01, metric
        assert error < 8.0


@pytest.mark.parametrize("name", CASES)
def test_outcomes_are_those_of_the_figure_and_its_interval(
    written: Any, tmp_path: Path, name: str
) -> None:
    """Also after they were written and read again, and they do not say where the data lie."""
    case, (root, size) = CASES[name], written(name)
    figures = measured(case, root, planted("coarse", size))
    found = {figure.metric: figure.outcomes for figure in figures if figure.outcomes is not None}
    assert len(found) == len(figures)
    file, data = outcomes.encode(found)
    (tmp_path / file).write_bytes(data)
    again = outcomes.read(tmp_path / file)
    for figure in figures:
        own = again[figure.metric]
        assert len({*own.items}) == len(own.items) == figure.count
        assert not any(str(root) in text for text in [*own.items, *(own.units or [])])
        made = results.figure(figure.metric, own, {})
        assert (made.value, made.ci_low, made.ci_high) == (
            figure.value, figure.ci_low, figure.ci_high,
        )  # fmt: skip
        assert figure.ci_low <= figure.value <= figure.ci_high
        same = outcomes.difference(own, found[figure.metric])
        assert same.value == 0 and same.p_value == 1


@pytest.mark.parametrize("name", CASES)
def test_missing_and_damaged_data_are_one_line(tmp_path: Path, name: str) -> None:
    case = CASES[name]

    def ends(trial: Callable[[], Any], match: str | None = None) -> None:
        with pytest.raises(ONE_LINE, match=match) as caught:
            trial()
        assert "\n" not in str(caught.value)

    benchmark = BenchmarkConfig(case.kind, str(tmp_path / "data"), dict(case.options))
    ends(lambda: evaluation.check({"it": benchmark}), "no folder .*: it wants .* is downloaded")
    size = case.write(tmp_path / "data")
    evaluation.check({"it": benchmark})
    root, encoder = tmp_path / "data", planted("random", size)
    ends(lambda: measured(case, tmp_path / "empty", encoder))
    measured(case, root, encoder)
    read = case.options.get("labels")
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        if path.suffix in (".csv", ".json", ".jsonl", ".tar") and read in (None, path.name):
            content = path.read_bytes()
            path.write_bytes(b"\xff\0")
            if path.name not in ("labels.csv", "parts.csv") or read:
                ends(lambda: measured(case, root, encoder))
            path.write_bytes(content)
    if pictures := [path for path in root.rglob("*") if path.suffix in (".png", ".jpg", ".jpeg")]:
        for path in pictures:
            path.write_bytes(b"broken")
        ends(lambda: measured(case, root, encoder), "image .* cannot be decoded")


def rows_of(folders: dict[str, tuple[Path, int]], path: Path) -> list[dict[str, Any]]:
    """Rows of all cases, by an encoder with many ties, on the ranks of the process this runs in."""
    suite = {
        name: BenchmarkConfig(CASES[name].kind, str(root), dict(CASES[name].options))
        for name, (root, _) in folders.items()
    }
    outcomes.NUM_RANKING_DRAWS = FEW_DRAWS  # also in a process of another rank
    encoder: Any = planted("coarse", max(size for _, size in folders.values()))
    judge = evaluation.SuiteJudge(suite, here(), settings={"batch_size": 3})
    return [vars(row) for row in judge.measure(encoder, path, "it")]


def test_rows_of_three_ranks_are_those_of_one_process(
    ranks: Any, written: Any, tmp_path: Path
) -> None:
    folders = {name: written(name) for name in CASES}
    root = shutil.copytree(folders["knn"][0], tmp_path / "knn")
    (tested, *_) = sorted((root / "test/class 0").iterdir())
    shutil.copy(tested, root / "train/class 0/copy.png")
    folders["knn"] = root, folders["knn"][1]
    alone = rows_of(folders, tmp_path / "one.jsonl")
    for rows in ranks(3, rows_of, folders, tmp_path / "many.jsonl"):
        assert rows == alone
    many = (tmp_path / "many.jsonl").read_bytes()  # written once, by one rank
    assert many == (tmp_path / "one.jsonl").read_bytes()
    assert {row["benchmark"] for row in alone} == {*CASES}
    assert any("optimistic" in row["metric"] for row in alone)
    copies = {n: {row["protocol"].get("copies_in_train") for row in alone if row["benchmark"] == n}
              for n in ("knn", "probe")}  # fmt: skip
    assert copies == {"knn": {1}, "probe": {0}}


def line_of(root: Path, size: int) -> str:
    with pytest.raises(ValueError) as caught:
        measured(CASES["mmvp"], root, planted("coarse", size), here())
    return str(caught.value)


def test_a_bad_image_stops_every_rank_with_one_line(ranks: Any, tmp_path: Path) -> None:
    size = CASES["mmvp"].write(tmp_path)
    bad = tmp_path / "MLLM_VLM Images/Color/1.png"  # which one rank reads
    bad.write_bytes(b"broken")
    for line in ranks(2, line_of, tmp_path, size):
        assert f"image {bad} cannot be decoded" in line and "\n" not in line
