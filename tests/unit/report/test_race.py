"""The page of a race: planted outcomes of several seeds, verdicts, parts, and what it says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from mclclip.eval import outcomes, results
from mclclip.eval.outcomes import Outcomes
from mclclip.report import race as page
from mclclip.report.race import Entrant, Standings
from tests import tiny

TYPES = ["colour", "<count>"] * 100


def plant(run: Path, model: str, rights: np.ndarray, bench: str = "pairs") -> None:
    """The figure of a model on 200 pairs of two Types, with its outcomes."""
    items = [str(number) for number in range(200)]
    own = Outcomes(items, rights, strata=TYPES)
    figure = results.figure("average", own, {"trials": "pairs"}, level="headline")
    results.record(run / "results.jsonl", [figure], model, bench)


def entrants(root: Path, shares: dict[str, float], num_seeds: int) -> dict[str, Entrant]:
    """Entrants that find a share of the pairs, the same ones in every seed but for a few."""
    rng = np.random.default_rng(0)
    hard = rng.random(200)
    made = {}
    for name, share in shares.items():
        runs = [root / name / f"seed_{seed}" for seed in range(num_seeds)]
        for run in runs:
            plant(run, "encoder", (hard + rng.normal(0, 0.03, 200) < share).astype(float))
        cost = {"steps": 5, "samples": 40, "operations": 2e12, "share": 1.0, "seconds": 60.0}
        cost |= {"rank_hours": None, "of": None}
        made[name] = Entrant(name, "encoder", runs, f"is <{name}>", "train.lr=1", cost)
    return made


def race_of(root: Path, shares: dict[str, float], num_seeds: int) -> tuple[Standings, str]:
    made = entrants(root, {"base": 0.5, "ungrouped": 0.55, **shares}, num_seeds)
    base, control, *others = made.values()
    found = page.standings(base, control, [control, *others], ["pairs"])
    return found, page.render("my <race>", found, base, [control, *others])


def test_a_remedy_that_wins_and_one_that_loses_are_named(tmp_path: Path) -> None:
    found, html = race_of(tmp_path, {"good": 0.8, "bad": 0.3}, 5)
    better, worse, base, trust = page.sentences(found)
    end = "than the ungrouped control beyond chance"
    assert better.startswith(f"Better {end}: good on pairs, average (+2")
    assert worse.startswith(f"Worse {end}: bad on pairs, average (-2")
    assert re.search(r"good on pairs, average \(\+\S+ points\) better", base)
    assert re.search(r"bad on pairs, average \(-\S+ points\) worse", base)
    assert trust.startswith("Differences are paired within each of 5 seeds")
    verdicts = {c.row.model: c.verdict for c in found.whole["control"]}
    assert verdicts == {"good": "better", "bad": "worse"}
    assert [c.row.model for c in found.whole["base"]] == ["ungrouped", "good", "bad"]
    assert html.count('<span class="verdict better">') >= 2 and "<race>" not in html


def test_where_nothing_beats_the_control_it_says_so(tmp_path: Path) -> None:
    found, html = race_of(tmp_path, {"same": 0.55, "other": 0.55}, 2)
    assert page.sentences(found)[0].startswith("Nothing beats the ungrouped control: no remedy is")
    assert "Nothing beats the ungrouped control" in html
    assert "0 of 2</b><span>remedies better" in html


def test_the_control_alone_is_compared_with_the_base_alone(tmp_path: Path) -> None:
    found, html = race_of(tmp_path, {}, 2)
    base, trust = page.sentences(found)
    assert base.startswith("Against the base") and trust.startswith("Differences are paired")
    assert "Nothing beats" not in html


def test_one_seed_is_said_to_be_one(tmp_path: Path) -> None:
    found, html = race_of(tmp_path, {"good": 0.8}, 1)
    assert "another seed may differ" in html
    assert found.whole["control"][0].difference.test.startswith(("McNemar", "permutation"))


def test_p_values_are_corrected_over_all_comparisons(tmp_path: Path) -> None:
    found, _ = race_of(tmp_path, {"good": 0.62, "bad": 0.5}, 5)
    every = [*found.whole["base"], *found.whole["control"]]
    corrected = outcomes.holm([c.difference.p_value for c in every])
    assert [c.corrected for c in every] == corrected and len(every) == 5
    for against in ("base", "control"):
        own = [c for _, c in found.parts[against]]  # type: ignore[index]
        assert [c.corrected for c in own] == outcomes.holm([c.difference.p_value for c in own])


def test_parts_are_types_and_their_values_means_over_seeds(tmp_path: Path) -> None:
    found, html = race_of(tmp_path, {"good": 0.8}, 3)
    parts = dict(found.parts["control"])
    assert [*parts] == ["colour", "<count>"]
    for number, c in enumerate(parts.values()):
        values = [
            outcomes.read(next(run.glob("outcomes/*.arrow")))["average"].values[number::2].mean()
            for run in (tmp_path / "good" / f"seed_{seed}" for seed in range(3))
        ]
        assert c.row.value == pytest.approx(100 * np.mean(values), abs=1e-4)
        assert c.row.count == 100
    assert "&lt;count&gt;" in html
    frame = page.frame(found)
    assert frame["part"].tolist() == ["", "", ""] + ["colour", "<count>"] * 3
    assert set(frame.columns) >= {"model", "against", "difference", "p_corrected", "verdict"}


def test_a_table_for_the_terminal(tmp_path: Path) -> None:
    made = entrants(tmp_path, {"base": 0.5, "ungrouped": 0.55, "good": 0.8}, 5)
    base, control, good = made.values()
    found = page.standings(base, control, [control, good], ["pairs"])
    text = page.table(found, [control, good])
    assert re.search(r"^pairs, average +% +against the control +against the base$", text, re.M)
    assert re.search(r"^ungrouped +\d\d\.\d +is the control +[+-]\d", text, re.M)
    assert re.search(r"^good +\d\d\.\d +\+2\d\.\d \(\+\d[^)]*\) +\+[23]\d\.\d \(\+", text, re.M)
    assert "better" in text and max(map(len, text.splitlines())) <= 80


def test_a_remedy_that_has_not_run_is_one_line(tmp_path: Path) -> None:
    made = entrants(tmp_path, {"base": 0.5, "ungrouped": 0.55, "late": 0.6}, 2)
    base, control, late = made.values()
    (late.runs[1] / "results.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="late/seed_1 has no figure of encoder on pairs"):
        page.standings(base, control, [control, late], ["pairs"])


def test_other_items_are_refused_by_the_names_of_both(tmp_path: Path) -> None:
    made = entrants(tmp_path, {"base": 0.5, "ungrouped": 0.55}, 2)
    base, control = made.values()
    own = Outcomes([f"x{n}" for n in range(200)], np.ones(200), strata=TYPES)
    figure = results.figure("average", own, {}, level="headline")
    results.record(control.runs[0] / "results.jsonl", [figure], "encoder", "pairs")
    with pytest.raises(ValueError, match="ungrouped and base were not measured on the same items"):
        page.standings(base, control, [control], ["pairs"])


def test_arms_that_raced_apart_are_compared_in_the_metrics_that_are_named(tmp_path: Path) -> None:
    script = runpy.run_path(str(tiny.ROOT / "docs" / "what_helps.py"))
    made = entrants(tmp_path, {"base": 0.5, "ungrouped": 0.55, "good": 0.8}, 2)
    for entrant in made.values():
        for seed, run in enumerate(entrant.runs):
            (run / "config.yaml").write_text(f"run_dir: {run}\nseed: {seed}\n")
    words = [f"{name}={run}:encoder" for name, each in made.items() for run in each.runs]
    table = script["of_race"]([*words, "pairs/average"])
    whole = table[(table["part"].fillna("") == "") & (table["model"] == "good")]
    assert [*whole["against"]] == ["base", "ungrouped"] and (whole["difference"] > 15).all()
    with pytest.raises(ValueError, match="has no figure of pairs/other"):
        script["of_race"]([*words, "pairs/other"])
    with pytest.raises(ValueError, match="each in the same seeds"):
        script["of_race"](words[1:])
