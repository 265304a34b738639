"""The verdict on a pilot: when it is a gain, what was forgotten, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip import compare, config, index, pilot
from mclclip.eval import results
from mclclip.eval.outcomes import Outcomes
from mclclip.ranks.process_group import SINGLE
from tests import tiny

NUM = 200
TYPES = ["colour", "shape"] * (NUM // 2)
JOINED, CONTROL = "concat_stage_norm", "control_ungrouped_concat_stage_norm"


def rows_of(run_dir: Path, right: dict[str, np.ndarray]) -> list[pilot.Row]:
    """Rows of encoders that are right on these of ``NUM`` pairs of two types."""
    names = [str(number) for number in range(NUM)]
    for model, values in right.items():
        found = Outcomes(names, values, strata=TYPES)
        figures = [results.figure("average", found, {"trials": "pairs"}, level="headline")]
        results.record(run_dir / "results.jsonl", figures, model, "pairs")
    return compare.read_runs([run_dir])


def first(number: int) -> np.ndarray:
    return np.arange(NUM) < number


@pytest.mark.parametrize(
    ("joined", "control", "base", "gain"),
    [
        (150, 100, 90, True),
        (103, 100, 90, False),  # inside the noise
        (100, 150, 90, False),  # the control is better
        (150, 100, 160, False),  # better than the control, and worse than what was there before
    ],
)
def test_a_gain_is_beyond_chance_and_above_stage_0(
    tmp_path: Path, joined: int, control: int, base: int, gain: bool
) -> None:
    right = {"stage_0": first(base), JOINED: first(joined), CONTROL: first(control)}
    found, of_control, of_base = pilot.gain(rows_of(tmp_path, right), JOINED)
    assert found is gain
    assert [c.against.model for c in (*of_control, *of_base)] == [CONTROL, "stage_0"]


def test_what_was_forgotten_is_counted_by_type(tmp_path: Path) -> None:
    before, after = first(100), first(100)
    after[:40:2] = False  # 20 of the 50 of colour that stage 0 finds
    after[101:111:2] = True  # 5 new ones of shape
    (found,) = pilot._forgotten(rows_of(tmp_path, {"stage_0": before, "stage_1": after}))
    assert (found["found"], found["lost"], found["won"], found["count"]) == (100, 20, 5, NUM)
    colour, shape = found["strata"]["colour"], found["strata"]["shape"]
    assert (colour["found"], colour["lost"], colour["won"]) == (50, 20, 0)
    assert (shape["found"], shape["lost"], shape["won"]) == (50, 0, 5)
    assert colour["p_value"] == pytest.approx(2 * 2 * 0.5**20)  # twice, for two types
    assert pilot._of_forgotten(found) == [
        "pairs: stage_0 finds 100 of 200 pairs; stage_1 alone misses 20 of them, and finds 5 "
        "others.",
        "pairs: stage_1 alone forgets beyond chance: colour (50.0 -> 30.0).",
    ]


def options(tmp_path: Path, **changes: Any) -> config.Config:
    tree = tiny.tree(tmp_path / "run", tmp_path) | {"pilot": {"share": 0.1}} | changes
    return config.from_tree(tree)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_stages": 0}, "pilot.share=0.1 tries out stage 1, and num_stages is 0"),
        (
            {
                "train": {"objective": {"kind": "mlcd"}},
                "cluster": {"labels_per_sample": 8},
            },
            "its ungrouped control, which train.objective.kind=mlcd does not have",
        ),
        ({"eval": {"suite": {}}}, "is judged by benchmarks, and eval.suite is empty"),
    ],
)
def test_a_pilot_that_cannot_be_judged_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pilot.check(options(tmp_path, **changes))
    pilot.check(options(tmp_path, **changes, pilot={}))  # without a pilot nothing is refused


def test_a_pilot_takes_its_share_of_the_steps_or_another_one(tmp_path: Path) -> None:
    from mclclip.run.artifacts import Layout
    from mclclip.train import verb

    def taken(train: dict[str, Any], **shares: float) -> tuple[int | None, float]:
        whole = options(tmp_path, train=train, pilot=shares)
        found = verb._options(whole, Layout.of(whole, "pilot"), 1)
        return found.steps, found.epochs

    fixed, epochs = {"steps": 50, "epochs": 4}, {"steps": None, "epochs": 4}
    assert taken(fixed, share=0.1)[0] == 5
    assert taken(fixed, share=0.1, steps_share=0.5)[0] == 25
    # An epoch over a tenth of the samples has a tenth of the steps.
    assert taken(epochs, share=0.1) == (None, 4)
    for number in (3, 6, 29):  # epochs are a part of what a begun pilot is known by
        assert taken({"steps": None, "epochs": number}, share=0.05) == (None, number)
    assert taken(epochs, share=0.1, steps_share=1.0) == (None, pytest.approx(40))


def test_the_pilot_joins_what_it_is_judged_by_alone(tmp_path: Path) -> None:
    for export, name in (
        ({}, "concat_stage_norm"),
        ({"concat": ["raw"]}, "concat_raw"),
        ({"concat": []}, "soup_uniform"),
        ({"concat": [], "soup": False}, "stage_1"),
    ):
        whole = options(tmp_path, export=export)
        small = pilot.settings(whole)
        assert pilot.encoder_of(whole) == pilot.encoder_of(small) == name
        assert len(small.export.concat) + small.export.soup == (name != "stage_1")


def test_a_run_does_not_end_by_figures_on_training_images(tmp_path: Path) -> None:
    index_of = tmp_path / "data"
    tiny.make_data(index_of, num_samples=48)
    tree = {
        "run_dir": str(tmp_path / "run"),
        "eval": {"suite": {"pairs": {"kind": "mmvp", "path": str(index_of / "pairs")}}},
        "data": {
            "sources": {"own": {"shards": f"{index_of}/shards/*.tar"}},
            "index_workers": 1,
        },
        "train": {"global_batch": 8},
        "pilot": {"share": 0.5, "stop_without_gain": True},
    }
    begun = config.from_tree(tree)
    index.run(begun, SINGLE)
    protocol = {"level": "headline", "training_images": 3, "judged_images": 8}
    row = results.Result("stage_0", "pairs", "average", 25.0, 4, 5.0, 70.0, protocol)
    results.write(tmp_path / "run" / "results.jsonl", [row])
    with pytest.raises(ValueError, match=r"'pairs': .* 3 of its 8 images, .*stop_without_gain"):
        pilot.check_begun(begun)
    pilot.check_begun(config.from_tree(tree | {"pilot": {"share": 0.5}}))
