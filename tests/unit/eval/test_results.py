"""results.jsonl: rows, replacement, atomicity, the text table."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from mclclip.eval import results
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.results import Reference, Result


def row(
    model: str, benchmark: str = "mmvp", metric: str = "average", value: float = 20.0
) -> Result:
    return Result(model, benchmark, metric, value, 135, 14.1, 27.5, {"prompt": "a photo of "})


def test_rows_survive_a_round_trip_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run" / "results.jsonl"
    assert results.read(path) == []
    rows = [row("stage_0"), row("stage_0", metric="Color"), row("stage_1")]
    results.write(path, rows[:2])
    results.write(path, rows[2:])
    assert results.read(path) == rows
    first = json.loads(path.read_text().splitlines()[0])
    assert list(first) == [
        "model", "benchmark", "metric", "value", "count", "ci_low", "ci_high", "protocol",
    ]  # fmt: skip
    assert list(tmp_path.glob("run/*")) == [path]  # no temporary file is left


def test_running_a_benchmark_again_replaces_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results.write(path, [row("stage_0"), row("stage_0", metric="gone"), row("stage_1")])
    results.write(path, [row("stage_0", "coco", "R@1")])
    results.write(path, [row("stage_0", value=30.0)])
    assert [(r.model, r.benchmark, r.metric, r.value) for r in results.read(path)] == [
        ("stage_1", "mmvp", "average", 20.0),
        ("stage_0", "coco", "R@1", 20.0),
        ("stage_0", "mmvp", "average", 30.0),
    ]


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results.write(path, [row("stage_0")])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.write(path, [row("stage_0", value=float("nan"))])
    assert path.read_bytes() == before


def test_a_figure_carries_count_interval_and_outcomes(tmp_path: Path) -> None:
    right = np.arange(135) < 27
    found = Outcomes([*map(str, range(135))], right)
    figure = results.figure("R@1", found, {"name": "x"}, level="headline")
    assert figure.value == 20.0 and figure.count == 135 and figure.outcomes is found
    assert (figure.ci_low, figure.ci_high) == pytest.approx((14.125, 27.535), abs=1e-3)
    assert figure.protocol == {"name": "x", "level": "headline"}
    (row,) = results.record(tmp_path / "results.jsonl", [figure], "stage_0", "coco")
    assert row.value == 20.0 and not hasattr(row, "outcomes")
    by_class = Outcomes(found.items, right, strata=["a"] * 27 + ["b"] * 108)
    assert results.figure("mean", by_class, {}).value == 50.0
    units, halves = [str(number // 5) for number in range(135)], ["a", "b"] * 67 + ["a"]
    wider = results.figure("R@1", Outcomes(found.items, right, units=units), {})
    assert wider.ci_high - wider.ci_low > 1.5 * (figure.ci_high - figure.ci_low)
    in_both = results.figure("R@1", Outcomes(found.items, right, strata=halves, units=units), {})
    assert (in_both.ci_low, in_both.ci_high) == pytest.approx(
        (wider.ci_low, wider.ci_high), abs=0.5
    )


def lines_of(table: str) -> list[str]:
    """The lines of a table without those that explain it."""
    return table.removesuffix(f"\n\n{results.KEY}").splitlines()


def test_table_has_a_block_per_benchmark_and_a_row_per_model() -> None:
    rows = [
        row("stage_0"),
        row("concat", value=32.6),
        row("stage_0", "coco", "image_to_text/R@1", 56.1),
    ]
    references = [Reference("ViT-L-14 openai", "mmvp", "average", 19.3, "MMVP paper")]
    text = results.table(rows, references)
    assert text.endswith(f"\n\n{results.KEY}") and text.count(results.KEY) == 1
    assert lines_of(text) == [
        "mmvp                            average",
        "----------------------------  ---------",
        "trials                              135",
        "stage_0                            20.0",
        "                              14.1-27.5",
        "concat                             32.6",
        "                              14.1-27.5",
        "ViT-L-14 openai [MMVP paper]       19.3",
        "",
        "coco       i2t R@1",
        "-------  ---------",
        "trials         135",
        "stage_0       56.1",
        "         14.1-27.5",
    ]


def test_table_has_what_chance_gives_and_what_was_left_out() -> None:
    protocol = {"chance": 50.0, "num_items": 204, "left_out_items": 7307}
    rows = [
        replace(row("stage_0", "sugarcrepe", "average"), protocol=protocol),
        replace(row("stage_0", "sugarcrepe", "other"), protocol={}),
        replace(row("stage_0", "loss", "nats"), protocol={"chance": 3.0, "left_out_items": 0}),
        replace(row("stage_1", "loss", "nats"), protocol={"chance": 4.0}),
    ]
    assert lines_of(results.table(rows)) == [
        "sugarcrepe      average      other",
        "------------  ---------  ---------",
        "trials              135        135",
        "chance             50.0          -",
        "stage_0            20.0       20.0",
        "              14.1-27.5  14.1-27.5",
        "(7307 of 7511 items are left out: not comparable with published figures)",
        "",
        "loss          nats",
        "-------  ---------",
        "trials         135",
        "chance     3.0/4.0",
        "stage_0       20.0",
        "         14.1-27.5",
        "stage_1       20.0",
        "         14.1-27.5",
    ]


def loss(model: str, value: float) -> Result:
    protocol = {"unit": "nats", "chance": 4.60517, "level": "headline"}
    return Result(model, "held_out", "loss", value, 5000, value - 0.01, value + 0.01, protocol)


def test_a_loss_has_its_unit_and_the_digits_that_tell_encoders_apart() -> None:
    near = [4.60514, 4.60509, 4.60471, 4.60513, 4.60522, 4.6]
    rows = [loss(f"stage_{n}", value) for n, value in enumerate(near)]
    lines = results.table(rows).splitlines()
    assert [line.split() for line in (*lines[:2], *lines[3:7])] == [
        ["held_out", "loss"],
        ["(nats)"],
        ["trials", "5000"],
        ["chance", "4.60517"],
        ["stage_0", "4.60514"],
        ["4.59514-4.61514"],
    ]
    # Beside a metric of this name in percent, each has a column.
    rows = [loss("stage_0", 2.34561), replace(loss("stage_1", 50.0), protocol={})]
    lines = lines_of(results.table(rows))
    assert lines[0].split() == ["held_out", "loss", "loss"]
    assert [line.split()[1:] for line in lines[-4::2]] == [["2.35", "-"], ["-", "50.0"]]
    assert results.table([]) == ""


def test_table_fits_a_terminal_and_counts_what_it_leaves_out() -> None:
    """As many columns, and as long names, as a data set of captions with ties has."""
    directions, cut = ("image_to_text", "text_to_image"), ("R@1", "R@5", "R@10")
    names = [f"{d}/{k}{s}" for d, k, s in product(directions, cut, ("", "_optimistic"))]
    model = "control_random_groups_concat_stage_norm_of_a_run_with_a_long_name"
    rows = [
        replace(row(model, "uc_merced_retrieval", name), protocol={"level": "detail"})
        if name.endswith("optimistic")
        else row(model, "uc_merced_retrieval", name)
        for name in names
    ]
    short, whole = results.table(rows), results.table(rows, details=True)
    for text in (short, whole):
        assert max(map(len, text.splitlines())) <= results.WIDTH
    assert short.count("20.0") == 6 and whole.count("20.0") == 12
    assert lines_of(short)[-1] == "(6 further metrics: 'mclclip eval' shows them with --details)"
    assert "optimistic" not in short and "further" not in whole


def test_names_that_others_gave_are_shown_escaped_and_read_again(tmp_path: Path) -> None:
    """A Type of a benchmark is the name of a figure."""
    name = "a\x1b[2J\nb\u2028c\x85d"
    figure = results.Measurement(name, 50.0, 4, 20.0, 80.0)
    rows = results.record(tmp_path / "results.jsonl", [figure], name, name)
    assert results.read(tmp_path / "results.jsonl") == rows
    text = results.table(rows)
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.count(r"a\x1b[2J\nb\u2028c\x85d") == 3
