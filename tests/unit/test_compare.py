"""The verb compare: which encoders, the table in every form, and mistakes."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.eval import results, units
from mclclip.eval.comparisons import LEVEL
from mclclip.eval.outcomes import Outcomes
from mclclip.report.verdict import Verdict
from mclclip.verbs import compare, report
from tests.forks import python

NUM_PAIRS = 135
ITEMS = [f"{2 * n + 1}-{2 * n + 2}" for n in range(NUM_PAIRS)]


def evaluated(run_dir: Path, rights: dict[str, int], benchmark: str = "mmvp") -> Path:
    """A run with encoders that are right on so many of the first pairs."""
    run_dir.mkdir(exist_ok=True)
    for model, right in rights.items():
        found = Outcomes(ITEMS, np.arange(NUM_PAIRS) < right)
        protocol = {"name": "mmvp_vlm", "trials": "pairs"}
        figures = [
            results.figure("average", found, protocol, level="headline"),
            results.figure("Color", found, protocol),
        ]
        results.record(run_dir / "results.jsonl", figures, model, benchmark)
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return evaluated(
        tmp_path / "mine", {"stage_0": 54, "stage_1": 55, "concat_raw": 60, "soup_uniform": 80}
    )


def test_each_model_is_compared_in_the_headline(run_dir: Path, capsys: Any) -> None:
    found = compare.run([run_dir])
    assert [c.row.model for c in found] == ["stage_1", "concat_raw", "soup_uniform"]
    assert [c.verdict for c in found] == ["inside the noise", "inside the noise", "better"]
    assert {c.against.model for c in found} == {"stage_0"}
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "mmvp, average, against stage_0 (40.0)" in text
    words = " ".join(text.split())
    assert "concat_raw has 44.4, stage_0 40.0, which is +4.4 points" in words
    # 2 * 0.5^6, twice; the interval alone would say that there is a difference.
    assert "+6 of 135 pairs: inside the noise (p = 0.062; the interval is of this" in words
    assert found[1].difference.low > 0 and "over 3 comparisons" in found[1].reason()
    assert "over 3 comparisons" in words and not found[2].reason()


def test_what_a_killed_process_was_writing_is_removed(run_dir: Path) -> None:
    left = run_dir / "outcomes" / ".85.arrow.host.7.tmp"
    left.write_text("half")
    evaluated(run_dir, {"stage_2": 3})
    assert not left.exists() and len([*left.parent.glob("*.arrow")]) == 5


def test_a_folder_is_no_file_for_a_table_or_a_page(run_dir: Path, tmp_path: Path) -> None:
    for write in (lambda: compare.run([run_dir], out=tmp_path), lambda: report.run(out=tmp_path)):
        with pytest.raises(ValueError, match="is a folder: give a file"):
            write()


def test_a_table_is_shown_without_heavy_imports(run_dir: Path) -> None:
    code = (
        "import sys; from mclclip.cli import entry; code = entry.main(['compare', sys.argv[1]]); "
        "print(code, {'torch', 'pandas', 'scipy.stats', 'obstore', 'yaml'} & set(sys.modules))"
    )
    assert python(code, str(run_dir), check=True).stdout.endswith("0 set()\n")


def test_a_p_value_is_shown_on_its_side_of_the_level(run_dir: Path) -> None:
    (found,) = compare.run([run_dir], models=["concat_raw"])
    for corrected in (0.0, 9e-4, 0.001, 0.02, 0.0496, 0.04999, 0.05, 0.0504, 1.0):
        changed = replace(found, corrected=corrected)
        sign, _, number = changed.p_text().removeprefix("p ").partition(" ")
        is_below = float(number) <= LEVEL if sign == "<" else float(number) < LEVEL
        assert is_below == (changed.verdict != "inside the noise")
        assert float(number) == pytest.approx(corrected, abs=0.001)


def test_a_comparison_has_one_p_value_whatever_is_shown_beside_it(run_dir: Path) -> None:
    every = {c.row.model: c.corrected for c in compare.run([run_dir])}
    (alone,) = compare.run([run_dir], models=["concat_raw"])
    assert alone.corrected == every["concat_raw"] > alone.difference.p_value and alone.family == 3
    more = compare.run([run_dir], models=["concat_raw"], metrics=["average", "Color"])
    assert [(c.row.metric, c.family) for c in more] == [("average", 3), ("Color", 1)]


def tuned(run_dir: Path, rights: dict[str, tuple[int, int]]) -> list[compare.Row]:
    """The rows of a fine-tuning: right answers of encoders on the shares choose and report."""
    for number, share in enumerate((results.CHOOSE, results.REPORT)):
        evaluated(run_dir, {name: both[number] for name, both in rights.items()}, share)
    return compare.read_runs([run_dir])


TWIN = "control_ungrouped_stage_1"
NATS = {"unit": units.NATS.name}


def test_a_fine_tuning_is_judged_by_the_encoder_that_was_chosen(tmp_path: Path) -> None:
    rows = tuned(
        tmp_path,
        {"stage_0": (20, 30), "stage_1": (60, 70), "soup_uniform": (50, 90), TWIN: (40, 69)},
    )
    found = compare.run([tmp_path])
    assert [(c.row.benchmark, c.row.model, c.against.model) for c in found] == [
        ("report", "stage_1", "stage_0"),
        ("report", "stage_1", TWIN),
    ]
    verdict = Verdict.of(rows)
    assert verdict.recommended == verdict.tuned == "stage_1" and "stage_1" in verdict.headline
    assert [c.corrected for c in verdict.family] == [c.corrected for c in found]
    assert [c.verdict for c in verdict.with_control] == ["inside the noise"]


@pytest.mark.parametrize(
    ("share", "stranger"), [("mmvp", "ViT-L-14@openai"), (results.CHOOSE, "stage_1:64")]
)
def test_only_encoders_of_the_run_are_recommended(
    tmp_path: Path, share: str, stranger: str
) -> None:
    """Others that were measured in its folder are compared where they are named."""
    evaluated(tmp_path, {"stage_0": 50, "stage_1": 80, stranger: 130}, share)
    verdict = Verdict.of(compare.read_runs([tmp_path]))
    assert verdict.recommended == verdict.tuned == "stage_1"
    assert {c.row.model for c in verdict.family} == {"stage_1"}
    (named,) = compare.run([tmp_path], models=[stranger])
    assert named.verdict == "better"


def test_what_is_recommended(tmp_path: Path) -> None:
    """Shares to choose by and to report, benchmarks, and no mean of different ones."""
    base, one, soup, concat = "stage_0", "stage_1", "soup_uniform", "concat_raw"
    models = {base: (40, 40), one: (50, 50), soup: (60, 60)}
    cases: list[tuple[dict[str, tuple[int, int]], str, str | None, str]] = [
        ({base: (50, 60), one: (60, 62)}, base, one, "nothing is proven"),
        ({base: (50, 60), one: (60, 20)}, base, one, "worse beyond chance"),
        ({base: (50, 60), one: (50, 100)}, base, one, "no tuned encoder"),  # a tie goes to the base
        ({base: (50, 50), TWIN: (120, 120)}, base, None, ""),  # a control is never recommended
        # A single model goes before a concat that is not better.
        (models | {concat: (64, 80)}, soup, soup, soup),
        (models | {concat: (130, 80)}, concat, concat, concat),
    ]
    for number, (rights, recommended, chosen, says) in enumerate(cases):
        verdict = Verdict.of(tuned(tmp_path / str(number), rights))
        assert (verdict.recommended, verdict.tuned) == (recommended, chosen), rights
        assert says in verdict.headline and TWIN not in verdict.headline
        if recommended == base and chosen:
            assert verdict.headline.startswith("Keep the base")
            assert "best" not in " ".join(verdict.sentences())
    of: list[tuple[list[dict[str, int]], str, str]] = [
        ([{base: 50, one: 53, TWIN: 120}], base, one),
        # Measuring one in a harder or an easier benchmark changes nothing.
        *(([{base: 50, one: 100, "stage_2": 60}, more], one, one)
          for more in ({one: 5}, {base: 130}, {"stage_2": 135})),
        ([{one: 60, "b": 1}], one, one),
        ([{one: 60}, {base: 30}], base, one),  # without a comparison
    ]  # fmt: skip
    for number, (benchmarks, recommended, chosen) in enumerate(of):
        for name, own in enumerate(benchmarks):
            evaluated(tmp_path / f"of{number}", own, f"b{name}")
        verdict = Verdict.of(compare.read_runs([tmp_path / f"of{number}"]))
        assert (verdict.recommended, verdict.tuned) == (recommended, chosen), benchmarks


def test_a_mean_has_one_unit(run_dir: Path) -> None:
    """Nats beside percent do not count; where all figures are nats, they do, and less is more."""
    rows = compare.read_runs([run_dir])
    percent = {"stage_0": 40.0, "stage_1": 40.7, "concat_raw": 44.4, "soup_uniform": 59.3}
    losses = {"stage_0": 1.0, "stage_1": 80.0, "concat_raw": 2.0, "soup_uniform": 3.0}
    in_nats = [
        (replace(row, metric="loss", value=losses[row.model], protocol=row.protocol | NATS), path)
        for row, path in rows
    ]
    assert compare.means([*in_nats, *rows]) == pytest.approx(percent, abs=0.1)
    assert compare.means(in_nats) == {name: -loss for name, loss in losses.items()}


def test_one_pair_against_another_and_another_metric(run_dir: Path) -> None:
    (found,) = compare.run([run_dir], models=["stage_1"], against="soup_uniform", metrics=["Color"])
    assert found.verdict == "worse" and found.difference.items == -25
    assert found.corrected == found.difference.p_value < 1e-6


def losses(run_dir: Path) -> Path:
    """A run with stage_0, and an encoder whose loss is a little smaller on every item."""
    rng = np.random.default_rng(0)
    base = 4.6 + 0.1 * rng.random(NUM_PAIRS)
    for model, values in {
        "stage_0": base,
        "concat_raw": base - 0.001 * rng.random(NUM_PAIRS),
    }.items():
        found = Outcomes(ITEMS, values, statistic="mean_loss")
        figures = [results.figure("loss", found, {"name": "contrastive_loss"}, level="headline")]
        results.record(run_dir / "results.jsonl", figures, model, "held_out")
    return run_dir


def test_of_a_loss_the_smaller_one_is_better_in_nats(tmp_path: Path, capsys: Any) -> None:
    (found,) = compare.run([losses(tmp_path)])
    assert found.verdict == "better" and found.gain > 0 > found.difference.high
    assert (found.difference.wins, found.difference.losses) == (NUM_PAIRS, 0)
    text = capsys.readouterr().out
    own, base = (f"{row.value:.5f}" for row in (found.row, found.against))
    assert f"held_out, loss, against stage_0 ({base})" in text
    words = " ".join(text.split())
    change = f"{found.difference.value:+.5f} nats (95 % interval {found.difference.low:+.5f} to"
    assert f"concat_raw has {own}, stage_0 {base}, which is {change}" in words
    (worse,) = compare.run([tmp_path], models=["stage_0"], against="concat_raw")
    assert worse.verdict == "worse"


def test_rows_of_different_units_are_not_compared(tmp_path: Path) -> None:
    path = losses(tmp_path) / "results.jsonl"
    first, second = path.read_text().splitlines()
    older = json.loads(second)
    del older["protocol"]["unit"]
    path.write_text(f"{first}\n{json.dumps(older)}\n")
    with pytest.raises(
        ValueError, match="concat_raw is measured in % and stage_0 in nats: .*--force"
    ):
        compare.run([tmp_path])


def test_formats(run_dir: Path, tmp_path: Path, capsys: Any) -> None:
    compare.run([run_dir], models=["soup_uniform"], format="csv", out=tmp_path / "table.csv")
    with open(tmp_path / "table.csv", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    told = [row[name] for name in ("model", "verdict", "items", "count")]
    assert told == ["soup_uniform", "better", "26.0", "135"]
    assert float(row["difference"]) == pytest.approx(100 * 26 / 135)
    compare.run([run_dir], format="markdown")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[0].startswith("| benchmark") and lines[4].startswith("| mmvp")
    compare.run([losses(run_dir)], models=["concat_raw"], format="markdown")
    lines = capsys.readouterr().out.splitlines()
    assert "value" in lines[0] and "44.4 %" in lines[2] and " nats" in lines[3]
    compare.run([run_dir], format="latex")
    text = capsys.readouterr().out
    assert text.startswith(r"\begin{tabular}") and "+19.3" in text and r"95 \% interval" in text


def test_of_several_runs_neither_controls_nor_the_share_to_choose_by_are_judged(
    tmp_path: Path,
) -> None:
    names = ("stage_0", "stage_1", TWIN, f"{TWIN}:64", "control_random_groups_stage_1")
    for folder in ("control_a", "b"):
        tuned(tmp_path / folder, {name: (20, 30) for name in names})
    found = compare.run([tmp_path / "control_a", tmp_path / "b"])
    assert [(c.row.benchmark, c.row.model, c.against.model) for c in found] == [
        ("report", name, "control_a:stage_0")
        for name in ("control_a:stage_1", "b:stage_0", "b:stage_1")
    ]


def test_unknown_names_are_one_line(run_dir: Path) -> None:
    for settings, message in (
        ({"models": ["nobody"]}, "no model 'nobody' in the results: there are stage_0, stage_1"),
        ({"models": ["stage_0"]}, "stage_0 cannot be compared with itself"),
        ({"benchmarks": ["coco"]}, "no benchmark 'coco' in the results: there are mmvp"),
    ):
        with pytest.raises(ValueError, match=message):
            compare.run([run_dir], **settings)  # type: ignore[arg-type]


def test_what_cannot_be_compared_says_why(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run 'mclclip eval' first"):
        compare.run([tmp_path])
    with pytest.raises(ValueError, match="there are results of one model, stage_0: evaluate"):
        compare.run([evaluated(tmp_path / "one", {"stage_0": 3})])
    evaluated(run_dir, {"alone": 3}, benchmark="coco")
    with pytest.raises(ValueError, match="no metric of alone was measured for stage_0 too"):
        compare.run([run_dir], models=["alone"])
    found = Outcomes(ITEMS[1:], np.zeros(NUM_PAIRS - 1))
    figures = [results.figure("average", found, {}, level="headline")]
    results.record(run_dir / "results.jsonl", figures, "fewer", "mmvp")
    with pytest.raises(ValueError, match="fewer and stage_0 were not measured on the same items"):
        compare.run([run_dir], models=["fewer"])


def test_outcomes_that_are_not_there_or_not_named(run_dir: Path) -> None:
    path = run_dir / "results.jsonl"
    for file in (run_dir / "outcomes").iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError, match="no outcomes of items at .* --force"):
        compare.run([run_dir])
    for name in (None, "../../secret.arrow"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["protocol"]["outcomes"] = name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(FileNotFoundError, match="no outcomes of items at"):
            compare.run([run_dir])


def test_figures_that_are_too_good_are_told_of(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_dir / "results.jsonl"
    seen = {"training_images": 7, "judged_images": 100}
    rows = [replace(row, protocol=row.protocol | seen) for row in results.read(path)]
    results.write(path, rows)
    compare.run([run_dir])
    assert "7 of its 100 images" in caplog.text


def test_what_was_not_asked_for_is_no_error_and_gaps_are_named(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = compare.run([run_dir], benchmarks=["mmvp"])
    evaluated(run_dir, {"stage_0": 3, "stage_1": 80}, benchmark="coco")
    path = run_dir / "results.jsonl"
    rows = results.read(path)
    results.write(path, [
        replace(row, protocol=row.protocol | {"settings": {"prompt": row.model}})
        for row in rows if row.benchmark == "coco"
    ])  # fmt: skip
    with pytest.raises(ValueError, match="prompt"):
        compare.run([run_dir])
    caplog.clear()
    again = compare.run([run_dir], benchmarks=["mmvp"])
    assert [c.difference for c in again] == [c.difference for c in alone]
    # What could not be compared is of the family all the same: 3 comparisons have become 4.
    assert {c.family for c in again} == {4} and again[1].corrected > alone[1].corrected
    assert "prompt" in caplog.text and "not compared on" not in caplog.text
    compare.run([run_dir], models=["concat_raw"])
    assert "not compared on coco, not measured there: concat_raw" in caplog.text
    notes = results.notes([row for row in results.read(path) if row.benchmark == "coco"])
    assert len(notes) == 1 and "stage_1" in notes[0]
    for tied, told in ((1, []), (27, ["20 %"])):  # of 135
        some = [replace(row, protocol={"tied_queries": tied}) for row in results.read(path)]
        assert [re.search(r"\d+ %", note)[0] for note in results.notes(some)] == told  # type: ignore[index]


def test_the_correction_is_the_reason_only_where_it_made_the_verdict(run_dir: Path) -> None:
    """The interval excludes 0 and p does not in strata: a bootstrap within them, and McNemar's."""
    found = compare.run([run_dir])[1]
    raised = replace(found, difference=replace(found.difference, p_value=0.2), corrected=0.6)
    assert "corrected" in found.reason()
    assert raised.reason() and "corrected" not in raised.reason()
