"""SimCLR's augmentations over any number of channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mclclip.data.augmentations import PlainTransform, SimCLRTransform, to_tensor
from mclclip.data.batches import keyed_rng

OFF: dict[str, Any] = {"flip": 0, "jitter_probability": 0, "grayscale": 0, "scale": (1, 1)}


def pixels(channels: int, side: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (side, side, channels), np.uint8)


def view(transform: Any, image: Any, key: int = 3) -> torch.Tensor:
    with keyed_rng(key):
        found = transform(image)
    assert found.dtype == torch.float32
    return found


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 6])
def test_the_same_seed_gives_the_same_bits(channels: int) -> None:
    transform = SimCLRTransform(8, blur_probability=0.5)
    image = pixels(channels)
    views = [view(transform, image, key) for key in range(6)]
    assert all(v.shape == (channels, 8, 8) for v in views)
    assert all(torch.equal(v, view(transform, image, key)) for key, v in enumerate(views))
    assert not any(torch.equal(views[0], v) for v in views[1:])


def test_a_picture_is_what_its_array_is() -> None:
    image = pixels(3)
    for transform in (SimCLRTransform(8, blur_probability=1), PlainTransform(12)):
        assert torch.equal(view(transform, image), view(transform, Image.fromarray(image)))


def test_geometry_treats_all_channels_alike() -> None:
    """Six equal channels stay equal where nothing touches colours."""
    image = np.repeat(pixels(1), 6, axis=2)
    for key in range(8):
        found = view(SimCLRTransform(8, jitter_probability=0, grayscale=0, flip=0.5), image, key)
        assert torch.equal(found, found[:1].expand_as(found))
    grey = view(SimCLRTransform(8, jitter_probability=0, grayscale=0, blur_probability=1), image)
    assert torch.equal(grey, grey[:1].expand_as(grey))


def test_colours_are_the_first_three_channels() -> None:
    four = pixels(4)
    options: dict[str, Any] = {"scale": (1, 1), "flip": 0, "grayscale": 1, "jitter_probability": 1}
    for key in range(6):
        found = view(SimCLRTransform(16, **options), four, key)
        crop = view(SimCLRTransform(16, **OFF), four, key)  # the crop is drawn first
        torch.testing.assert_close(found[3], crop[3], rtol=0, atol=0)
        assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
        assert torch.equal(found[:3], view(SimCLRTransform(16, **options), four[..., :3], key))


def test_one_channel_has_brightness_and_contrast_alone() -> None:
    one = pixels(1)
    whole = to_tensor(one)
    only = {"scale": (1, 1), "flip": 0, "jitter_probability": 1}
    colour = SimCLRTransform(16, **(only | {"grayscale": 1, "jitter": (0, 0, 0.4, 0.1)}))
    crop = view(SimCLRTransform(16, **OFF), one)
    assert torch.equal(view(colour, one), crop)
    bright = SimCLRTransform(16, **(only | {"grayscale": 0, "jitter": (0.4, 0, 0, 0)}))
    found = view(bright, one)
    inside = (found > 0) & (found < 1)
    factors = (found / crop)[inside]
    assert 0.6 <= float(factors.min()) and float(factors.max() - factors.min()) < 1e-4
    assert whole.shape == (1, 16, 16) and not torch.equal(found, crop)
    # Two channels: the contrast of each is its own.
    two = np.concatenate([one, one // 4], axis=2)
    contrast = SimCLRTransform(16, **(only | {"grayscale": 0, "jitter": (0, 0.4, 0, 0)}))
    both, alone = view(contrast, two), view(contrast, one)
    torch.testing.assert_close(both[:1], alone)


def test_flip() -> None:
    image = pixels(4)
    kept, turned = (SimCLRTransform(16, **(OFF | {"flip": chance})) for chance in (0, 1))
    assert torch.equal(view(turned, image), view(kept, image).flip(-1))


def test_plain() -> None:
    image = pixels(4)
    torch.testing.assert_close(view(PlainTransform(16), image), to_tensor(image), rtol=0, atol=0)
    wide = np.concatenate([image, image], axis=1)
    assert view(PlainTransform(8), wide).shape == (4, 8, 8)
    torch.testing.assert_close(
        view(PlainTransform(16, mean=(0.5,), std=(0.1, 0.2, 0.3, 0.4)), image),
        (to_tensor(image) - 0.5) / torch.tensor([0.1, 0.2, 0.3, 0.4])[:, None, None],
    )


@pytest.mark.parametrize("transform", [PlainTransform, SimCLRTransform])
def test_bad_input_is_one_line(transform: Any) -> None:
    with pytest.raises(ValueError, match="mean has 3 numbers and the image 4 channels"):
        transform(8, mean=(0.5, 0.5, 0.5))(pixels(4))
    with pytest.raises(ValueError, match="std above 0"):
        transform(8, std=(0.0,))
    with pytest.raises(ValueError, match="size is 0"):
        transform(0)
    with pytest.raises(ValueError, match=r"an image is float64 \[2, 2\]"):
        transform(8)(np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flip": 2}, "flip is 2"),
        ({"blur_probability": -1}, "blur_probability is -1"),
        ({"scale": (0, 1)}, "scale is"),
        ({"jitter": (0.4, 0.4, 0.4, 0.6)}, "jitter is"),
    ],
)
def test_options_out_of_range(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimCLRTransform(8, **options)
