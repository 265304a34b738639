"""A training counts its operations once, as a plan does, and is not changed by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mclclip.models.loading import load_towers
from mclclip.models.preparing import prepare_model
from mclclip.objectives.base import ObjectiveInputs
from mclclip.plan.machine import Machine
from mclclip.plan.memory import count_operations, measure
from mclclip.ranks.process_group import SINGLE, choose_peak_tflops
from mclclip.train.loop import ModelWithObjective
from tests import tiny

CPU = torch.device("cpu")
MODEL = f"model.name={json.dumps(tiny.ONE_BLOCK)}"
GIVEN = ("base=null", MODEL, "train.lock.image_blocks=all")


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.lock.text=false"],
        ["train.engine.grad_checkpointing=true", "train.patch_dropout=0.5"],
        ["train.lora={rank: 2}"],
        ["train.objective={kind: moco}"],
        ["train.objective={kind: feature_dropout}"],
    ],
    ids=lambda overrides: overrides[0].removeprefix("train."),
)
def test_operations_are_those_of_the_plan(overrides: list[str]) -> None:
    config = tiny.make_config(Path("run"), Path("data"), *GIVEN, *overrides)
    options, stored = config.train, config.train.reads_text_embeddings
    model = load_towers(config.model.name, seed=1)
    prepare_model(model, **options.model_arguments(), seed=0)
    objective = options.objective.build(ObjectiveInputs(model, SINGLE, 0, options.precision))
    module = ModelWithObjective(model, objective, options.precision)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    counted = count_operations(module, options, CPU, stored)
    assert all(torch.equal(tensor, before[n]) for n, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert model.training
    # A plan counts what is computed again too.
    again = "train.engine.grad_checkpointing=false"
    plain = tiny.make_config(Path("run"), Path("data"), *GIVEN, *overrides, again)
    planned = measure(plain, "train", plain.train, Machine())["operations"]["sample"]
    # A step makes the product of an adapter's factors once, for all its samples.
    assert counted == planned > 0 or (options.lora and counted == pytest.approx(planned, rel=0.1))


def test_operations_follow_the_image_size() -> None:
    sized = "train.image_size=[{size: 64, epochs: 1}]"
    config = tiny.make_config(Path("run"), Path("data"), *GIVEN, sized)
    options = config.train
    module = load_towers(config.model.name, seed=1)
    prepare_model(module, **options.model_arguments(), seed=0)
    objective = options.objective.build(ObjectiveInputs(module, SINGLE, 0, options.precision))
    trainee = ModelWithObjective(module, objective, options.precision)
    counted = [count_operations(trainee, options, CPU, False, size) for size in (None, 64)]
    planned = measure(config, "train", options, Machine())["operations"]["sizes"]
    # A step resizes the positions once, for all its samples.
    assert counted == pytest.approx([planned[None], planned[64]], rel=0.01)
    assert counted[1] > 1.5 * counted[0]


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0), ("Unknown", None)],
)
def test_the_peak_is_that_of_the_data_sheet(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: name)
    assert choose_peak_tflops(torch.device("cuda", 0)) == peak
    assert choose_peak_tflops(CPU) is None
