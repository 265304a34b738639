"""Parameter groups and the learning rate."""

import pytest
import torch
from torch import nn

from mclclip.models.clip import ClipModel
from mclclip.models.optimizer import build_optimizer, learning_rate, parameter_groups


def test_norms_biases_and_the_scale_do_not_decay(vit: ClipModel) -> None:
    vit.clip.transformer.requires_grad_(False)
    decayed, plain = parameter_groups(vit.named_parameters(), 0.2)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    names = {id(p): n for n, p in vit.named_parameters()}
    without = {names[id(p)] for p in plain["params"]}
    assert {"clip.logit_scale", "clip.visual.ln_post.weight", "clip.ln_final.bias"} <= without
    assert "clip.visual.class_embedding" in without
    assert all(p.ndim >= 2 for p in decayed["params"])
    listed = {names[id(p)] for group in (decayed, plain) for p in group["params"]}
    assert listed == {n for n, p in vit.named_parameters() if p.requires_grad}


def test_nothing_trainable(vit: ClipModel) -> None:
    with pytest.raises(ValueError, match="no parameter is trainable"):
        build_optimizer(vit.requires_grad_(False), weight_decay=0.2)


def test_an_empty_group_is_left_out() -> None:
    groups = parameter_groups([("w", nn.Parameter(torch.ones(2, 2)))], 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1]


def test_optimizer_takes_its_settings(vit: ClipModel) -> None:
    optimizer = build_optimizer(vit, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-4, lr=0.5)
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.9), 1e-4, 0.5)


def test_warm_up_rises_to_the_full_rate() -> None:
    rates = [learning_rate(step, 100, 4, 1.0) for step in range(4)]
    assert rates == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(4, 100, 4, 1.0) == 1.0
    assert learning_rate(0, 100, 0, 1.0) == 1.0


def test_cosine_falls_to_the_final_rate() -> None:
    rates = [learning_rate(step, 104, 4, 1.0, "cosine", final=0.1) for step in range(4, 104)]
    assert rates == sorted(rates, reverse=True)
    assert rates[50] == pytest.approx(0.55)
    assert 0.1 < rates[-1] < 0.101


def test_constant_stays() -> None:
    assert {learning_rate(step, 50, 5, 0.3, "constant") for step in range(5, 50)} == {0.3}


@pytest.mark.parametrize("arguments", [(50, 50, 5), (-1, 50, 5), (0, 50, 51)])
def test_steps_outside_the_run(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="step"):
        learning_rate(*arguments, 1.0)


def test_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="'linear'"):
        learning_rate(0, 5, 0, 1.0, "linear")  # type: ignore[arg-type]
