"""Learned weights of a concat's stages: the loss, its minimum, and the concat that they make."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mclclip.torchvision_fix  # noqa: F401

# isort: split
import numpy as np
import pytest
import torch

from mclclip.export import held_out
from mclclip.export.held_out import fit_weights
from mclclip.models.encoder import (
    Encoder,
    StageWeights,
    load_model,
    save_concat,
)
from mclclip.models.loading import load_towers, model_config
from mclclip.models.memory import load_shapes
from mclclip.models.model import Model
from tests.unit.models.stages import save_stages

Side = list[np.ndarray]


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def draw(noise: tuple[float, ...], pairs: int = 60, dim: int = 12) -> tuple[Side, Side, list[str]]:
    """Stages whose images are their texts with so much noise; infinite noise is noise alone."""
    rng = np.random.default_rng(0)
    images, texts = [], []
    for level in noise:
        text = unit(rng.normal(size=(pairs, dim)))
        own = rng.normal(size=(pairs, dim))
        images.append(unit(own if math.isinf(level) else text + level * own / dim**0.5))
        texts.append(text)
    return images, texts, [f"caption {row}" for row in range(pairs)]


def slow_loss(images: Side, texts: Side, captions: list[str], scales: np.ndarray) -> float:
    """CLIP's loss by loops; equal captions of other images are left out."""
    count, total = len(captions), 0.0
    logits = sum(s * (z @ t.T) for s, z, t in zip(scales, images, texts, strict=True))
    for p in range(count):
        others = [q for q in range(count) if q == p or captions[q] != captions[p]]
        total += math.log(sum(math.exp(logits[p, q]) for q in others)) - logits[p, p]
        total += math.log(sum(math.exp(logits[q, p]) for q in others)) - logits[p, p]
    return total / (2 * count)


def test_loss_and_gradient_are_the_definition() -> None:
    images, texts, captions = draw((0.5, 2.0, math.inf), pairs=12)
    captions[3] = captions[7]
    captions[5] = captions[4] + "\0"  # another one, though numpy takes it for the same
    batches = held_out._batches(images, texts, captions)
    at = np.array([7.0, 3.0, 1.0])
    loss, gradient = held_out._loss(at, batches)
    assert loss == pytest.approx(slow_loss(images, texts, captions, at), abs=1e-12)
    for stage in range(3):
        step = np.eye(3)[stage] * 1e-5
        ends = [slow_loss(images, texts, captions, at + sign * step) for sign in (1, -1)]
        assert gradient[stage] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-8)


def test_several_batches_are_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    images, texts, captions = draw((0.5, 2.0), pairs=20)
    monkeypatch.setattr(held_out, "_BATCH", 10)
    batches = held_out._batches(images, texts, captions)
    order = np.random.default_rng(0).permutation(20)
    assert [len(keep) for _, keep in batches] == [10, 10]
    at = np.array([5.0, 2.0])
    halves = [
        slow_loss([z[r] for z in images], [t[r] for t in texts], [captions[i] for i in r], at)
        for r in (order[:10], order[10:])
    ]
    assert held_out._loss(at, batches)[0] == pytest.approx(sum(halves) / 2, abs=1e-12)


def test_a_fit_is_the_minimum_and_the_same_again() -> None:
    images, texts, captions = draw((0.8, 2.5, math.inf))
    found = fit_weights(images, texts, captions)
    assert found == fit_weights(images, texts, captions)
    assert sum(found.weights) == pytest.approx(1) and min(found.weights) >= 0
    assert found.weights[0] > found.weights[1] > found.weights[2]
    scales = found.logit_scale * np.array(found.weights)
    assert found.loss == pytest.approx(slow_loss(images, texts, captions, scales), abs=1e-9)
    rng = np.random.default_rng(1)
    for _ in range(20):
        other = np.clip(scales + rng.normal(size=3), 0, None)
        assert slow_loss(images, texts, captions, other) >= found.loss - 1e-12
    equal = [slow_loss(images, texts, captions, np.full(3, v)) for v in np.linspace(0.5, 20, 60)]
    assert found.loss < found.equal_loss <= min(equal)


def test_equal_stages_get_equal_weights() -> None:
    images, texts, captions = draw((1.5,))
    found = fit_weights(images * 2, texts * 2, captions)
    assert found.weights == pytest.approx((0.5, 0.5), abs=1e-4)
    assert found.loss == pytest.approx(found.equal_loss, abs=1e-9)


def test_pairs_without_an_error_do_not_push_without_end() -> None:
    images, texts, captions = draw((0.0, 0.0))
    assert fit_weights(images, texts, captions).logit_scale <= 2 * held_out.LARGEST


def test_what_weights_cannot_be_fitted_on() -> None:
    images, texts, captions = draw((1.0, 1.0))
    with pytest.raises(ValueError, match="60 held-out pairs with 1 different captions"):
        fit_weights(images, texts, ["the same"] * 60)
    with pytest.raises(ValueError, match="no stage tells held-out captions apart"):
        fit_weights([-text for text in texts], texts, captions)


# --- the concat ------------------------------------------------------------------------------


def learned(*weights: float) -> StageWeights:
    return StageWeights(weights, 33.0, 1.0, 2.0, 10)


@pytest.mark.parametrize("text", [False, True])
def test_a_weighted_concat_is_written_and_loaded(
    vit: Model, tmp_path: Path, images: torch.Tensor, tokens: torch.Tensor, text: bool
) -> None:
    stages = save_stages(vit, tmp_path, 3, text=text)
    save_concat(stages, "weighted", tmp_path / "c", learned=learned(0.6, 0.4, 0.0))
    encoder = load_model(tmp_path / "c")
    assert isinstance(encoder, Encoder) and encoder.shared_text is not text
    assert (encoder.variant, encoder.logit_scale) == ("weighted", 33.0)
    found = encoder.encode_image(images) @ encoder.encode_text(tokens).T
    expected = sum(
        weight * (model.encode_image(images) @ model.encode_text(tokens).T)
        for weight, model in zip((0.6, 0.4), map(load_model, stages), strict=False)
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    ones = encoder.encode_image(images).norm(dim=1)
    torch.testing.assert_close(ones, torch.ones_like(ones))


def test_other_variants_keep_the_first_schema(vit: Model, tmp_path: Path) -> None:
    """So that what earlier versions wrote and read stays the same."""
    stages = save_stages(vit, tmp_path, 2)
    assert save_concat(stages, "stage_norm", tmp_path / "a")["schema_version"] == 1
    record = save_concat(stages, "weighted", tmp_path / "b", learned=learned(0.5, 0.5))
    assert record["schema_version"] == 2
    assert record["learned"]["pairs"] == 10
    with pytest.raises(ValueError, match="weighted has no weights of its stages"):
        save_concat(stages, "weighted", tmp_path / "c")
    with pytest.raises(ValueError, match="raw has weights of its stages"):
        save_concat(stages, "raw", tmp_path / "c", learned=learned(0.5, 0.5))
    assert not (tmp_path / "c").exists()


def test_weights_of_strangers_are_checked(vit: Model, tmp_path: Path) -> None:
    stages = save_stages(vit, tmp_path, 2)
    written = save_concat(stages, "weighted", tmp_path / "c", learned=learned(0.5, 0.5))
    path = tmp_path / "c" / "concat.json"
    changes: list[dict[str, object]] = [
        {"weights": [0.5, 0.5, 0.0]}, {"weights": [1.5, -0.5]}, {"weights": [0.5, 0.4]},
        {"weights": "many"}, {"weights": [float("nan"), 1.0]}, {"weights": [float("inf"), 0.0]},
        {"logit_scale": -1.0}, {"logit_scale": None}, {"weights": None},
    ]  # fmt: skip
    for damaged in [*(written["learned"] | change for change in changes), None, [], 3]:
        path.write_text(json.dumps(written | {"learned": damaged}))
        with pytest.raises(ValueError, match=r"'learned' in .*concat\.json is damaged") as error:
            load_model(tmp_path / "c")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", [False, True])
def test_one_index_serves_all_weights(
    vit: Model, tmp_path: Path, images: torch.Tensor, tokens: torch.Tensor, text: bool
) -> None:
    """Rows [z_s] / sqrt(S), which are those of `stage_norm`, and queries [w_s t_s] sqrt(S)."""
    stages = save_stages(vit, tmp_path, 3, text=text)
    save_concat(stages, "stage_norm", tmp_path / "index")
    encoder = load_model(tmp_path / "index")
    assert isinstance(encoder, Encoder)
    index = encoder.encode_image(images)
    for weights in ((0.6, 0.4, 0.0), (0.2, 0.3, 0.5), (1.0, 0.0, 0.0)):
        save_concat(stages, "weighted", tmp_path / str(weights), learned=learned(*weights))
        other = load_model(tmp_path / str(weights))
        assert isinstance(other, Encoder)
        wanted = other.encode_image(images) @ other.encode_text(tokens).T
        query = encoder.query_text(tokens, weights)
        torch.testing.assert_close(index @ query.T, wanted, atol=1e-6, rtol=0)
        assert torch.equal(other.query_text(tokens), query)  # the learned ones are its own
        length = math.sqrt(3 * sum(weight**2 for weight in weights))
        torch.testing.assert_close(query.norm(dim=1), torch.full((len(query),), length))
        own = other.encode_image(images)
        pictures = index @ encoder.query_image(images, weights).T
        torch.testing.assert_close(pictures, own @ own.T, atol=1e-6, rtol=0)
    equal = index @ encoder.query_text(tokens).T
    wanted = index @ encoder.encode_text(tokens).T
    torch.testing.assert_close(equal, wanted, atol=1e-6, rtol=0)
    apart = (equal - index @ encoder.query_text(tokens, (1.0, 0.0, 0.0)).T).abs().max()
    assert apart > 1e-3  # the weights do something


def test_weights_of_a_query_are_checked(vit: Model, tmp_path: Path, tokens: torch.Tensor) -> None:
    save_concat(save_stages(vit, tmp_path, 2), "raw", tmp_path / "c")
    encoder = load_model(tmp_path / "c")
    assert isinstance(encoder, Encoder)
    with pytest.raises(ValueError, match="raw weighs stages by the lengths .* give stage_weights"):
        encoder.query_text(tokens)
    for wrong in ((0.5, 0.4), (1.5, -0.5), (1.0,), (), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="weights of stages are .*wanted"):
            encoder.query_text(tokens, wrong)
    assert encoder.query_text(tokens, (0.5, 0.5)).shape == (len(tokens), encoder.embed_dim)


def test_what_wants_one_model_refuses_a_joined_encoder(vit: Model, tmp_path: Path) -> None:
    """Its configuration is that of one stage: nothing may go on with that, and without weights."""
    save_concat(save_stages(vit, tmp_path, 2), "weighted", tmp_path / "c", None, learned(0.3, 0.7))
    readers: list[Callable[[str], object]] = [load_towers, model_config, load_shapes]
    readers += [partial(load_towers, text=False), partial(load_shapes, text=False)]
    for read in readers:
        for name in (str(tmp_path / "c"), f"local-dir:{tmp_path / 'c'}"):
            with pytest.raises(ValueError, match="is a joined encoder, which can be eval.*soup"):
                read(name)
