"""Hours by operations or by measured rates, and with image rows."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mclclip import config
from mclclip.cli import entry
from mclclip.config import Config
from mclclip.plan import costs, memory, steps, table
from mclclip.plan.machine import PEAK_TFLOPS, SHARE
from mclclip.verbs import plan
from mclclip.verbs.plan import Machine, Speed
from tests import tiny
from tests.matrix import in_soak

# Of the tiny model, by hand: 32 pixels in patches of 8, width 32, 3 blocks, 17 tokens, 8 features.
BLOCK = 2 * 12 * 32**2 * 17 + 4 * 17**2 * 32
PATCHES, PROJECTION = 2 * 16 * (3 * 8**2) * 32, 2 * 32 * 8
IMAGE = PATCHES + 3 * BLOCK + PROJECTION
TEXT = 2 * 12 * 16**2 * 20 + 4 * 20**2 * 16 + 2 * 16 * 8


def tiny_config(*overrides: str, locked_text: bool = True) -> Config:
    given = ("base=null", "device=auto", *overrides)  # planned for GPUs
    return tiny.make_config(Path("run"), Path("data"), *given, locked_text=locked_text)


@cache
def measured_of(*overrides: str, locked_text: bool = True) -> dict[str, Any]:
    return measured(tiny_config(*overrides, locked_text=locked_text))


def measured(options: Config, machine: Machine = Machine()) -> dict[str, Any]:  # noqa: B008
    """What is measured of the trainings of a configuration."""
    return {n: memory.measure(options, n, t, machine) for n, t in options.trainings.items()}


def of_sample(*overrides: str, locked_text: bool = True) -> Any:
    """Operations of a training of the tiny model."""
    return measured_of(*overrides, locked_text=locked_text)["train"]["operations"]


def planned(
    options: Config, machine: Machine | None = None, samples: int | None = 192, **speed: float
) -> dict[str, Any]:
    """Hours of a configuration."""
    machine = machine or Machine()
    kind = measured(options, machine)
    return costs.hours(options, steps.count(options, samples), kind, machine, Speed(**speed))


@pytest.mark.slow
def test_smaller_pictures_take_fewer_hours_and_less_memory() -> None:
    """The mean over the steps; memory is that of the largest pictures."""
    whole, small = of_sample()["sample"], of_sample("train.image_size=[{size: 16}]")["sizes"][16]
    assert small < 0.4 * whole  # 5 tokens in the place of 17
    of = {name: tiny_config("train.steps=null", f"train.image_size={value}") for name, value in (
        ("own", "[]"), ("most", "[{size: 16, epochs: 15}]"), ("all", "[{size: 16}]"),
    )}  # fmt: skip
    passes = {n: planned(o, peak_tflops=1.0)["passes"] for n, o in of.items()}
    found = {n: next(p["sample"] for p in of if "embed" not in p["name"])
             for n, of in passes.items()}  # fmt: skip
    assert found == {"own": whole, "most": (15 * small + 5 * whole) // 20, "all": small}
    parts = {name: measured(options)["train"]["parts"] for name, options in of.items()}
    assert parts["most"] == parts["own"]
    assert parts["all"]["activations"] < 0.5 * parts["own"]["activations"]
    assert parts["all"]["batch"] < 0.5 * parts["own"]["batch"]


# --- operations --------------------------------------------------------------------------------


def test_frozen_blocks_count_once_and_trained_blocks_three_times() -> None:
    found = of_sample()
    assert (found["image"], found["text"]) == (IMAGE, TEXT)
    assert found["sample"] == PATCHES + BLOCK + 3 * (2 * BLOCK + PROJECTION)
    # The patches need no gradient of the pixels, only of their weights.
    whole = of_sample("train.lock.image_blocks=all")
    assert whole["sample"] == 2 * PATCHES + 3 * (3 * BLOCK + PROJECTION)
    assert "trunk" not in whole


def test_what_runs_again_counts_again() -> None:
    """Gradient caching: one forward pass more. Recomputation: that of the trained blocks, but for
    the last product of each, whose result nobody needs again. Texts by their lock; views; and a
    cached trunk is run by neither pass."""
    plain, tail = of_sample()["sample"], 2 * (BLOCK - 2 * 4 * 32**2 * 17)
    both = "train.engine={micro_batch: 8, grad_checkpointing: true}"
    assert of_sample(both)["sample"] == plain + IMAGE + tail
    assert of_sample("train.cached_text=false")["sample"] == plain + TEXT
    assert of_sample(locked_text=False)["sample"] == plain + 3 * TEXT
    assert of_sample("train.objective={kind: nt_xent}")["sample"] == 2 * plain
    rows = of_sample("train.engine.micro_batch=8", "image_rows.enabled=true")
    assert rows["sample"] == 4 * (2 * BLOCK + PROJECTION)


# --- hours -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counted() -> tuple[Config, dict[str, Any], dict[str, Any]]:
    """A configuration with a control, its steps, and what is measured of it."""
    options = tiny_config("controls=[ungrouped]")
    return options, steps.count(options, 192), measured_of()


Counted = tuple[Config, dict[str, Any], dict[str, Any]]


def hours_of(counted: Counted, machine: Machine, **speed: float) -> dict[str, Any]:
    return costs.hours(*counted, machine, Speed(**speed))


def test_every_training_and_every_embedding_pass_is_there(counted: Counted) -> None:
    found = hours_of(counted, Machine(1, 4))["passes"]
    assert [of["name"] for of in found] == [
        "stage 0, embed images", "stage 0, embed captions", "stage 1",
        "stage 1, embed images", "stage 2", "stage 1, ungrouped", "stage 2, ungrouped",
    ]  # fmt: skip
    assert [of["samples"] for of in found] == [(n, n) for n in (192, 192, 144, 192, 144, 144, 144)]


def test_hours_are_operations_by_what_a_gpu_does(counted: Counted) -> None:
    machine = Machine(1, 4)
    found = hours_of(counted, machine)
    images, captions, training, *_ = found["passes"]
    per_s = PEAK_TFLOPS * 1e12 * SHARE / 16  # of fp32
    assert images["hours"][0] == pytest.approx(192 * IMAGE / per_s / 4 / 3600)
    assert captions["hours"][0] == pytest.approx(192 * TEXT / per_s / 4 / 3600)
    sample = training["sample"]
    assert training["hours"][0] == pytest.approx(6 * 24 * sample / per_s / 4 / 3600)
    assert not any(of["given"] for of in found["passes"])
    for of in (*found["passes"], found):
        assert [4 * h for h in of["hours"]] == pytest.approx(of["rank_hours"])
    assert found["hours"][0] == pytest.approx(sum(of["hours"][0] for of in found["passes"]))
    for speed in ({"peak_tflops": 2 * PEAK_TFLOPS}, {"share": 2 * SHARE}):
        faster = hours_of(counted, machine, **speed)
        assert faster["hours"][0] == pytest.approx(found["hours"][0] / 2)


def test_bf16_is_sixteen_times_as_fast() -> None:
    options = tiny_config()
    full = costs.hours(options, steps.count(options, 192), measured_of(), Machine(), Speed())
    half = planned(tiny_config("embed.precision=bf16", "train.precision=bf16"))
    assert full["hours"][0] == pytest.approx(16 * half["hours"][0])


def test_measured_rates_replace_the_estimate(counted: Counted) -> None:
    found = hours_of(counted, Machine(1, 4), samples_per_s=100.0, images_per_s=50.0)["passes"]
    by_name = {of["name"]: of for of in found}
    training, images = by_name["stage 2"], by_name["stage 1, embed images"]
    assert training["rank_hours"][0] == pytest.approx(144 / 100 / 3600)
    assert images["hours"][0] == pytest.approx(192 / 50 / 3600 / 4)
    assert training["given"] and images["given"]
    assert not by_name["stage 0, embed captions"]["given"]
    assert training["sample"] > IMAGE


def test_a_rate_of_stages_is_not_that_of_stage_zero(counted: Counted) -> None:
    kind = dict.fromkeys(("base", "train"), counted[2]["train"])

    def passes(*overrides: str) -> list[dict[str, Any]]:
        options = tiny.make_config(Path("run"), Path("data"), *overrides, locked_text=True)
        number, speed = steps.count(options, 192), Speed(samples_per_s=7.0)
        found: list[dict[str, Any]] = costs.hours(options, number, kind, Machine(), speed)["passes"]
        return found

    found = passes()
    given = {of["name"]: of["given"] for of in found}
    assert not given["stage 0"] and given["stage 1"] and given["stage 2"]
    (only,) = passes("num_stages=0")
    assert only["given"] and only["rank_hours"][0] == pytest.approx(144 / 7 / 3600)


def test_the_clustered_encoder_may_be_another_one() -> None:
    small = {**tiny.MODEL, "vision_cfg": {**tiny.MODEL["vision_cfg"], "layers": 1}}
    tree = tiny.tree(Path("run"), Path("data")) | {"base": None, "num_stages": 1, "device": "auto"}
    tree["model"] = {"name": small}
    tree["trained_model"] = {"name": tiny.MODEL}
    tree["train"]["objective"] = {"kind": "mlcd", "labels_per_sample": 1, "sample_rate": 0.5}
    options = config.from_tree(tree)
    kind = measured(options)
    images, training = costs.hours(options, steps.count(options, 192), kind, Machine(),
                                   Speed())["passes"]  # fmt: skip
    assert images["sample"] == IMAGE - 2 * BLOCK
    # The products of the class centers come on top of the model's.
    head = kind["train"]["operations"]["loss"]
    seconds = (24 * training["sample"] + head) / (PEAK_TFLOPS * 1e12 * SHARE / 16)
    assert head > 0 and 24 / training["samples_per_s"] == pytest.approx(seconds)


# --- image rows ----------------------------------------------------------------------------------


def test_with_the_cache_the_trunk_runs_once(counted: Counted) -> None:
    """One pass of its own at stage 0; what comes after it starts from there."""
    on = tiny_config("image_rows={enabled: true, dtype: float32}", "controls=[ungrouped]")
    kind = measured(on, Machine(1, 4))
    found = costs.hours(
        on, steps.count(on, 192), kind, Machine(1, 4), Speed(images_per_s=50.0)
    )  # fmt: skip
    whole, trunk = kind["train"]["operations"], kind["train"]["operations"]["trunk"]
    assert whole["row_values"] == 17 * 32
    assert whole["sample"] == 3 * (2 * BLOCK + PROJECTION)
    each = {of["name"]: of for of in found["passes"]}
    assert each["stage 0, embed trunk"]["sample"] == trunk == BLOCK + PATCHES
    for images in ("stage 0, embed images", "stage 1, embed images"):
        assert each[images]["sample"] == whole["image"] - trunk
        rate = each[images]["samples_per_s"]
        assert rate == pytest.approx(50 * whole["image"] / (whole["image"] - trunk))
    for training in ("stage 1", "stage 1, ungrouped"):
        assert each[training]["sample"] == whole["sample"]
    assert "stage 1, embed trunk" not in each


# --- what is shown -----------------------------------------------------------------------------


def test_the_plan_says_what_it_assumes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = tiny_config("embed.precision=bf16")
    found = plan.compute(options, Machine(1, 4), 192)
    assert json.loads(json.dumps(found))["hours"]["speed"] == {"peak_tflops": 312.0, "share": 0.3}
    fields = {"name", "stage", "variant", "sample", "precision", "given",
              "samples_per_s", "samples", "hours", "rank_hours"}  # fmt: skip
    assert all(of.keys() == fields for of in found["hours"]["passes"])
    shown = table.text(found)
    assert "note: estimates are at 30 % of a GPU's TFLOP/s, 312 in bf16, 19.5 in fp32" in shown
    lines = [line for line in shown.splitlines() if line.startswith("stage 0, embed")]
    assert len(lines) == 2 and not any(line.endswith("  yes") for line in lines)
    assert max(map(len, shown.splitlines())) <= 100
    given = plan.compute(
        tiny_config(locked_text=False), Machine(), 192, Speed(None, None, 9.0, 8.0)
    )
    shown = table.text(given)
    assert "estimates are at" not in shown and shown.count("  yes\n") == 4


def test_the_first_line_has_hours_memory_disk_and_whether_they_fit() -> None:
    options = tiny_config(locked_text=False)
    found = plan.compute(options, Machine(1, 4, 80.0, elsewhere=True), 10**8)
    (fewest, most), hours = found["hours"]["range"], found["hours"]["hours"]
    assert fewest == pytest.approx(hours[0] * SHARE / 0.42)
    assert most == pytest.approx(hours[1] * SHARE / 0.06)
    line = table.text(found).splitlines()[0]
    assert " of 80 GiB" in line and line.endswith(": fits") and " to " in line
    too_small = plan.compute(options, Machine(1, 4, 0.5, elsewhere=True), 10**8)
    assert "does not fit (memory)" in table.text(too_small).splitlines()[0]
    given = plan.compute(options, Machine(1, 4), 10**8, Speed(None, 0.5))
    assert given["hours"]["range"] == given["hours"]["hours"]


def test_hours_are_unknown_without_a_number_of_samples() -> None:
    options = tiny_config("train.steps=null")
    found = planned(options, samples=None)
    assert found["hours"] is None and found["passes"][0]["rank_hours"] is None
    assert found["passes"][0]["samples_per_s"] > 0
    lines = table.text(plan.compute(options, Machine())).splitlines()
    assert lines[0].startswith("hours unknown")
    (line,) = [line for line in lines if line.startswith("in all")]
    assert line.split()[2:] == ["unknown", "unknown"]


SCALE = (tiny.ROOT / "docs/pages/evidence/cost.md").read_text()
SHOWN = re.findall(r"```bash\nmclclip (config [^\n]*)\n```\n\n```text\n(.*?)```", SCALE, re.DOTALL)


assert len(SHOWN) == 2


@in_soak
@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_the_page_shows_what_its_commands_print(
    command: str, shown: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert entry.main(shlex.split(command)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == []
