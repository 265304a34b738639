"""SimCLR's augmentations for any number of channels."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as ops

from mclclip.models.transforms import (
    PixelFormat,
    PlainTransform,
    SimCLROptions,
    SimCLRTransform,
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    training,
)
from tests.matrix import kept


def picture(channels: int, side: int = 24) -> np.ndarray:
    return np.random.default_rng(channels).integers(0, 256, (side, side, channels), np.uint8)


def transform(channels: int, **options: Any) -> SimCLRTransform:
    look = PixelFormat((16, 16), [0.0], [1.0], channels)
    return SimCLRTransform(look, SimCLROptions(**options))


def view(channels: int, seed: int = 0, **options: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    return transform(channels, **options)(picture(channels))


@pytest.mark.parametrize("channels", [1, 6])
def test_views_follow_the_generator_alone(channels: int) -> None:
    views = [view(channels, seed, blur=0.5) for seed in range(6)]
    again = [view(channels, seed, blur=0.5) for seed in range(6)]
    assert all(torch.equal(a, b) for a, b in zip(views, again, strict=True))
    assert all(v.shape == (channels, 16, 16) and 0 <= v.min() and v.max() <= 1 for v in views)
    assert not any(torch.equal(views[0], v) for v in views[1:])


def test_colours_of_the_first_three_channels_change_alone() -> None:
    for seed in range(3):
        changed = view(5, seed, jitter=1.0, strength=1.0, grayscale=1.0)
        same = view(5, seed, jitter=0.0, grayscale=0.0)
        assert torch.equal(changed[3:], same[3:])  # the crop and the flip are drawn before
        assert torch.equal(changed[0], changed[1]) and not torch.equal(changed[:3], same[:3])


def test_geometry_acts_on_all_channels_alike() -> None:
    one = picture(1)
    four = np.concatenate([one] * 4, axis=2)
    for seed in range(6):
        torch.manual_seed(seed)
        found = transform(4, jitter=0.0, grayscale=0.0)(four)
        assert all(torch.equal(found[0], channel) for channel in found[1:])


SHAPES = [(7, 1), (33, 4), (96, 3), (7, 4), (33, 3), (96, 1), (224, 3), (224, 4)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("side", "channels"), kept(SHAPES, *range(3)))
def test_a_view_has_the_same_bits_in_any_batch(side: int, channels: int, threads: int) -> None:
    made = SimCLRTransform(
        PixelFormat((side, side), [0.0], [1.0], channels),
        SimCLROptions(strength=1.0, blur=0.3, plain_channels=[3] if channels > 3 else []),
    )
    torch.manual_seed(0)
    crops = [made.draw(picture(channels, side + 3)) for _ in range(7)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([made.finish([crop]) for crop in crops])
        for size in (2, 3, 7):
            parts = [made.finish(crops[start : start + size]) for start in range(0, 7, size)]
            assert torch.equal(torch.cat(parts), alone), size
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("channels", [1, 3])
def test_colours_change_as_torchvision_changes_them(channels: int) -> None:
    made = transform(channels, strength=1.0, jitter=1.0)
    adjust = {
        adjust_brightness: ops.adjust_brightness,
        adjust_contrast: ops.adjust_contrast,
        adjust_saturation: ops.adjust_saturation,
        adjust_hue: ops.adjust_hue,
    }
    image = picture(channels)
    image[:8] = image[:8, :, :1]  # grey, without a hue
    for seed in range(8):
        torch.manual_seed(seed)
        crop = made.draw(image)
        wanted = crop.pixels
        for change, factor in crop.changes:
            wanted = adjust[change](wanted, factor)
        if crop.is_grey:
            wanted = ops.rgb_to_grayscale(wanted, num_output_channels=3)
        assert len(crop.changes) == (4 if channels == 3 else 2)
        torch.testing.assert_close(made.finish([crop])[0], wanted, rtol=0, atol=1e-5)


def test_a_narrow_blur_is_the_wide_one() -> None:
    side = 2 * (100 // 20) + 1
    made = SimCLRTransform(PixelFormat((100, 100), [0.0], [1.0]), SimCLROptions(blur=1.0))
    for sigma in (0.1, 0.3, 0.5, 0.9, 2.0):
        crop = dataclasses.replace(
            made.draw(picture(3, 100)), changes=(), sigma=sigma, is_grey=False
        )
        wanted = ops.gaussian_blur(crop.pixels, [side, side], [sigma, sigma])
        torch.testing.assert_close(made.finish([crop])[0], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("plain", [[3], [0, 2]])
def test_plain_channels_stay_as_they_are_and_the_others_get_the_same_bits(plain: list[int]) -> None:
    kept = PlainTransform(PixelFormat((16, 16), [0.0], [1.0], 4))(picture(4))
    others = [channel for channel in range(4) if channel not in plain]
    for seed in range(4):
        found, usual = view(4, seed, blur=0.5, plain_channels=plain), view(4, seed, blur=0.5)
        assert torch.equal(found[plain], kept[plain]) and not torch.equal(found, usual)
        assert torch.equal(found[others], usual[others])


def test_without_any_change_a_view_is_the_picture() -> None:
    options = {"scale": (1.0, 1.0), "flip": 0.0, "jitter": 0.0, "grayscale": 0.0}
    look = PixelFormat((16, 16), [0.2], [0.5], 3)
    image = picture(3, 16)
    views = [SimCLRTransform(look, SimCLROptions(**options))(image), PlainTransform(look)(image)]  # type: ignore[arg-type]
    for found in [*views, training(look, {"kind": "none"})(Image.fromarray(image))]:
        expected = (torch.from_numpy(image).permute(2, 0, 1) / 255 - 0.2) / 0.5
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)
    assert torch.equal(views[1], training(look, {"kind": "none"})(image))


@pytest.mark.parametrize(("height", "width"), [(24, 40), (40, 24), (8, 9), (16, 16)])
def test_the_middle_is_kept(height: int, width: int) -> None:
    image = np.zeros((height, width, 3), np.uint8)
    image[:, width // 2 - 1 : width // 2 + 1] = 255
    found = PlainTransform(PixelFormat((16, 16), [0.0], [1.0], 3))(image)
    assert found.shape == (3, 16, 16)
    columns = found[0].mean(dim=0)
    assert columns[7:9].mean() > columns[[0, 15]].mean() + 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "simclr2"}, "augmentation kind: .*simclr.*got 'simclr2'"),
        ({"kind": "simclr", "scale": [0.5, 0.2]}, "scale is"),
        ({"kind": "simclr", "flip": 1.5}, "augmentation flip"),
        ({"kind": "simclr", "colour": 1}, "augmentation colour"),
        ({"kind": "simclr", "plain_channels": [3]}, "got 3, and the pictures have 3 channels"),
        ({"kind": "simclr", "plain_channels": [-1]}, "augmentation plain_channels"),
        ({"kind": "none", "flip": 0.1}, "augmentation kind: .*'none' takes no options"),
    ],
)
def test_mistakes_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        training(PixelFormat((8, 8), [0.5], [0.5]), options)
    assert "\n" not in str(raised.value)
