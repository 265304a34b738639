"""The adversary's network: layers by loops, the budget of its changes, the keys of its noise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from mclclip.objectives.feature_dropout import MirroredConv2d, Viewmaker, bound, keyed_noise
from tests import objective_loops as loops


def network_of(channels: int, blocks: int, width: int = 2, seed: int = 0) -> Viewmaker:
    """In float64, with scales and shifts of the norms that are not 1 and 0."""
    torch.manual_seed(seed)
    network = Viewmaker(channels, width, blocks, dtype=torch.float64)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


@pytest.mark.parametrize(
    ("channels", "height", "width", "blocks"), [(3, 8, 8, 2), (4, 7, 10, 1), (1, 5, 5, 0)]
)
def test_values_and_gradients_are_those_of_loops(
    channels: int, height: int, width: int, blocks: int
) -> None:
    network = network_of(channels, blocks)
    pixels = torch.rand(2, channels, height, width, dtype=torch.float64)
    noise = torch.rand(2, network.num_noise(height, width), dtype=torch.float64)
    found = network(pixels, noise)
    assert found.shape == pixels.shape
    weights = dict(network.named_parameters())
    wanted = torch.stack(
        [loops.viewmaker(weights, *each) for each in zip(pixels, noise, strict=True)]
    )
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    direction = torch.randn_like(found)
    gradients = [
        torch.autograd.grad((result * direction).sum(), list(weights.values()))
        for result in (found, wanted)
    ]
    for name, got, expected in zip(weights, *gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9, msg=name)
        if name.endswith("last.weight"):
            assert got.abs().max() > 0


def test_borders_are_mirrored_as_torch_mirrors_them() -> None:
    images = torch.rand(2, 3, 6, 9, dtype=torch.float64)
    for border in (1, 4, 5):
        layer = MirroredConv2d(3, 2, 2 * border + 1, dtype=torch.float64)
        padded = functional.pad(images, [border] * 4, mode="reflect")
        torch.testing.assert_close(
            layer(images), functional.conv2d(padded, layer.weight, layer.bias)
        )


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 50.0]),
    epsilon=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_the_mean_change_of_an_image_is_within_its_budget(
    seed: int, size: float, epsilon: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    raw = size * torch.randn(3, 4, 5, 6, generator=rng, dtype=torch.float64)
    change = bound(raw, epsilon)
    assert ((change > 0) == ((raw > 0) & (epsilon > 0))).all()
    for image, own in zip(raw.tanh(), change, strict=True):
        mean = float(image.abs().sum()) / image.numel()
        spent = float(own.abs().mean())
        assert spent <= epsilon
        assert spent == pytest.approx(epsilon * mean / (mean + 1e-4), rel=1e-12)


def test_noise_is_that_of_its_key_and_nothing_else() -> None:
    ids = torch.tensor([3, 900, 2**40, 3])
    noise = keyed_noise(11, 5, 1, ids, 9)
    for own, sample_id in zip(noise, ids.tolist(), strict=True):
        assert own.tolist() == loops.noise_of(11, 5, 1, sample_id, 9)
    assert torch.equal(noise[0], noise[3])
    assert torch.equal(keyed_noise(11, 5, 1, ids[1:2], 9), noise[1:2])
    assert torch.equal(keyed_noise(11, 5, 1, ids, 4), noise[:, :4])
    for other in ((12, 5, 1), (11, 6, 1), (11, 5, 0)):
        assert not (keyed_noise(*other, ids, 9) == noise).any()


def test_noise_is_uniform() -> None:
    noise = keyed_noise(0, 0, 0, torch.arange(200), 500)
    counts = torch.histc(noise, 20, 0.0, 1.0)
    assert 0.0 <= float(noise.min()) and float(noise.max()) < 1.0
    assert (counts - 5000).abs().max() < 5 * 5000**0.5
    # Neither neighbouring places nor neighbouring samples go together.
    for pair in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([x.flatten() for x in pair]))[0, 1])) < 0.02
