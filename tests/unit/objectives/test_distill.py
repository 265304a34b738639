"""What is special to learning from a teacher; value and gradient are the contract's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mclclip.config import load
from mclclip.data.batches import Batch
from mclclip.engines import gradient_cache
from mclclip.engines.engine import Engine
from mclclip.models.encoder import save_concat
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives import distill
from mclclip.objectives.base import ObjectiveInputs, Teacher, parse
from mclclip.plan import memory
from mclclip.plan.machine import Machine
from mclclip.ranks.process_group import SINGLE
from mclclip.train.loop import ModelWithObjective
from mclclip.verbs import plan
from tests import tiny


class Seen(nn.Module):
    """A teacher that notes the pictures it sees."""

    normalization = torch.full((3, 1, 1), 0.2), torch.full((3, 1, 1), 0.4)

    def __init__(self, channels: int = 3, size: int = 32) -> None:
        super().__init__()
        self.image_shape = (channels, size, size)
        self.pictures: list[Tensor] = []

    def encode_image(self, images: Tensor) -> Tensor:
        self.pictures.append(images)
        return images.flatten(1)[:, :8]


def built(teacher: Seen, *terms: dict[str, Any], scale: float | None = 10.0) -> Any:
    every = [{"kind": "distill", **term} for term in terms]
    for term in every:
        if term["kind"] != "nt_xent":
            term["between"] = "images"
    model = load_towers(tiny.MODEL, seed=1)
    of = Teacher(8, scale, lambda: teacher)
    return parse(every).build(ObjectiveInputs(model, SINGLE, 0, teacher=lambda _: of)), model


def batch_of(view: Tensor) -> Batch:
    ids = torch.arange(len(view))
    groups = torch.zeros(len(view), 1, dtype=torch.int64)
    return Batch(views=[view], group_ids=groups, sample_id=ids, step=0, group_size=len(view))


@pytest.mark.parametrize("size", [32, 48])
def test_a_teacher_sees_the_crop_in_its_own_pixels_once(size: int) -> None:
    """Two terms of one teacher share its forward pass; pixels are those before normalization."""
    teacher = Seen(size=size)
    objective, model = built(teacher, {"exact": True}, {"exact": True, "what": "features"})
    pixels = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    mean, deviation = model.normalization
    batch = batch_of((pixels - mean) / deviation)
    features = objective.features(model, batch, {})
    (seen,) = teacher.pictures
    own_mean, own_deviation = teacher.normalization
    given = seen * own_deviation + own_mean
    assert seen.shape == (4, 3, size, size) and not seen.requires_grad
    if size == 32:
        torch.testing.assert_close(given, pixels, atol=1e-6, rtol=0)
    torch.testing.assert_close(given.mean(dim=(2, 3)), pixels.mean(dim=(2, 3)), atol=0.01, rtol=0)
    objective(features, batch)["loss"].backward()
    assert not [*objective.parameters()] and not objective.state_dict()


def test_gradient_caching_runs_a_teacher_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is that of a teacher that runs in both passes, under patch dropout too."""
    view = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    term = {"exact": True, "num_views": 2, "temperature": 0.1}
    computed: list[bool] = []
    add_features = distill.Distill.features

    def gradient(forgets: bool) -> list[Tensor | None]:
        def features(self: Any, model: Any, batch: Any, before: Any) -> Any:
            if forgets:
                batch = replace(batch, extras={})
            state, num_extras = torch.get_rng_state(), len(batch.extras)
            every = add_features(self, model, batch, before)
            assert torch.equal(state, torch.get_rng_state())  # the first term has run the model
            computed.append(len(batch.extras) > num_extras)
            return every

        objective, model = built(Seen(), {"kind": "nt_xent"}, term)
        model.drop_patches(0.5)
        trainee = ModelWithObjective(model.train(), objective)
        engine = Engine(trainee, partial(build_optimizer, weight_decay=0.1), SINGLE)
        monkeypatch.setattr(distill.Distill, "features", features)
        torch.manual_seed(3)
        batch = replace(batch_of(view), views=[view, view.flip(3)])
        gradient_cache.backward(engine, batch, 3)
        return [parameter.grad for parameter in model.parameters()]

    once, twice = gradient(False), gradient(True)
    assert computed == [True] * 3 + [False] * 3 + [True] * 6  # of three pieces
    for mine, expected in zip(once, twice, strict=True):
        assert (mine is None) == (expected is None)
        assert mine is None or torch.equal(mine, expected)


def test_another_number_of_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="takes pictures of 4 channels and the model of 3"):
        built(Seen(channels=4), {"exact": True})


def test_a_teacher_without_a_logit_scale_needs_a_temperature() -> None:
    with pytest.raises(ValueError, match="has none: set temperature to a number"):
        built(Seen(), {}, scale=None)
    built(Seen(), {"temperature": 0.1}, {"what": "features"}, scale=None)


@pytest.mark.slow
def test_the_plan_counts_teachers() -> None:
    """Their embeddings, or their weights and a forward pass where they see the crops."""
    of = "[{kind: info_nce}, {kind: distill, teacher: tiny_clip@random, exact: %s}]"
    found = []
    for words in ([], [f"train.objective={of % 'false'}"], [f"train.objective={of % 'true'}"]):
        found.append(plan.compute(load("demo", words), Machine(), 1_000))
        first = found[-1]["hours"]["passes"][0]["name"]
        assert first.startswith("teacher tiny_clip@random, embed") == bool(words)
    without, stored, copied = (each["memory"]["train"] for each in found)
    teacher = memory.measure_teacher("tiny_clip@random")
    assert stored["parts"]["objective"] == without["parts"]["objective"] == 0
    assert stored["parts"]["batch"] > without["parts"]["batch"]
    assert copied["parts"]["objective"] == pytest.approx(teacher["size"], rel=0.01)
    more = copied["operations"]["sample"] - stored["operations"]["sample"]
    assert more == pytest.approx(teacher["image"], rel=0.01)
    disk = [each["disk"] for each in found]
    assert disk[1]["exports"] - disk[0]["exports"] == teacher["size"]
    assert disk[1]["embeddings"] > disk[0]["embeddings"]


@pytest.mark.slow
def test_the_plan_counts_a_joined_teacher(tmp_path: Path) -> None:
    """Two stages that share two of three blocks and the text tower."""
    stage = load_towers(tiny.MODEL, seed=1)
    stage.save(tmp_path / "0")
    names = stage.lock(1, image_norm=True, image_projection=True, text=False, logit_scale=True)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter += 0.01 if name in names else 0.0
    stage.save(tmp_path / "1")
    folder = tmp_path / "concat"
    record = save_concat([tmp_path / "0", tmp_path / "1"], "raw", folder, ["a", "b"])
    single, joined = (memory.measure_teacher(str(where)) for where in (tmp_path / "0", folder))
    assert record["num_trunk_blocks"] == 2 and joined["text"] == single["text"]
    assert joined["width"] == 2 * single["width"] == record["embed_dim"]
    assert joined["size"] == 4 * record["num_parameters"]["concat"]
    assert single["image"] < joined["image"] < 2 * single["image"]
    terms = f"[{{kind: info_nce}}, {{kind: distill, teacher: {folder}, exact: true}}]"
    counted = plan.compute(load("demo", [f"train.objective={terms}"]), Machine(), 1_000)
    assert counted["memory"]["train"]["parts"]["objective"] > 0
