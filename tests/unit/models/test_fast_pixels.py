"""The fast training transform: open_clip's crops, within 2/255 of its pixels."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from mclclip.config import from_tree
from mclclip.data.decode import decode_image, decode_pixels
from mclclip.models.config_check import BACKBONE
from mclclip.models.loading import load_towers
from mclclip.models.transforms import (
    PixelFormat,
    PlainTransform,
    choose_rows_first,
    crop_box,
    defer_normalization,
    fast_transform,
    no_box_fits,
    rows_first,
)
from tests import tiny
from tests.unit.data.test_decode import LIMIT, encode

RATIO = (3 / 4, 4 / 3)
SIZES = [(1, 1), (1, 300), (300, 1), (2, 3), (60, 61), (75, 500), (500, 75), (223, 224), (300, 230)]
SIZES += [(230, 300), (333, 500), (500, 333)]


def picture(height: int, width: int, kind: str) -> Image.Image:
    """Noise, black and white (whose edges overshoot), or smooth colours."""
    rng = np.random.default_rng([height, width])
    if kind == "black and white":
        values = rng.integers(0, 2, (height, width, 1)) * np.full(3, 255)
        return Image.fromarray(values.astype(np.uint8))
    if kind == "noise":
        return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
    coarse = rng.integers(0, 256, (height // 9 + 1, width // 9 + 1, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height))


def open_clips(size: int, scale: tuple[float, float]) -> Any:
    """open_clip's training transform with values between 0 and 1."""
    settings = PreprocessCfg(size=size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return image_transform_v2(settings, is_train=True, aug_cfg={"scale": scale})


@pytest.mark.parametrize(
    ("kind", "size", "scale"),
    [
        ("noise", 32, (0.08, 1.0)),
        ("black and white", 96, (0.9, 1.0)),
        ("smooth", 32, (0.9, 1.0)),
    ],
)
def test_pixels_are_within_two_of_open_clips(
    kind: str, size: int, scale: tuple[float, float]
) -> None:
    exact = open_clips(size, scale)
    fast, differences = fast_transform(exact), []
    for number, (height, width) in enumerate(SIZES):
        mode = ("RGB", "L", "CMYK")[number % 3]
        data = encode(picture(height, width, kind).convert(mode), "JPEG", quality=90)
        torch.manual_seed(number)
        wanted = exact(decode_image(data, LIMIT)).mul(255).round()
        state = torch.get_rng_state()
        torch.manual_seed(number)
        found = fast(decode_pixels(data, LIMIT))
        assert torch.equal(torch.get_rng_state(), state)
        assert found.dtype == torch.uint8 and found.shape == (3, size, size)
        differences.append((found - wanted).abs())
    every = torch.stack(differences)
    assert every.max() <= 2 and every.median() == 0 and every.mean() < 0.1


def same_box(height: int, width: int, scale: tuple[float, float], seed: int) -> Any:
    """The box that our code and torchvision's take, with the same draws."""
    torch.manual_seed(seed)
    image = torch.empty(3, height, width)
    wanted = RandomResizedCrop.get_params(image, list(scale), list(RATIO))
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    assert crop_box(height, width, scale, RATIO) == wanted
    assert torch.equal(torch.get_rng_state(), state)
    return wanted


def test_boxes_are_torchvisions_with_the_same_draws() -> None:
    """Also of pictures that are just too long for a box of the smallest share, or just not."""
    for scale in ((0.9, 1.0), (0.08, 1.0), (0.0, 1.0)):
        boxes = {same_box(*size, scale, seed) for seed in range(3) for size in SIZES}
        assert len(boxes) >= len(SIZES)
    found = set()
    for scale, side, share in product(
        ((0.9, 1.0), (0.5, 0.6)), (7, 333), np.linspace(0.97, 1.03, 5)
    ):
        longer = max(round(share * side * RATIO[1] / scale[0]), 1)
        for height, width in ((side, longer), (longer, side)):
            found.add(no_box_fits(height, width, scale[0], RATIO))
            for seed in range(2):
                same_box(height, width, scale, seed)
    assert found == {True, False}


def test_the_order_of_the_two_passes_is_that_of_the_installed_pillow() -> None:
    """Black and white noise shows which of width and height was resized first."""
    rng, told = np.random.default_rng(0), 0
    rule = choose_rows_first(PIL.__version__)
    for _ in range(150):
        h, w, high, wide = rng.integers(8, 90, 4).tolist()
        image = picture(h, w, "black and white").convert("L")

        def resized(*sizes: tuple[int, int], of: Any = image) -> Any:
            for size in sizes:
                of = of.resize(size, Image.Resampling.BICUBIC)
            return np.asarray(of)

        rows, columns = resized((w, high), (wide, high)), resized((wide, h), (wide, high))
        if not np.array_equal(rows, columns):
            first = rows_first((h, w), (high, wide), rule)
            assert np.array_equal(resized((wide, high)), rows if first else columns)
            told += 1
    assert told > 50


@pytest.mark.parametrize(
    ("size", "mode", "std"),
    [(16, "shortest", (0.27, 0.26, 0.28)), ((16, 24), "longest", 0.5), ((16, 24), "squash", 0.5)],
)
def test_what_the_device_normalises_has_open_clips_bits(size: Any, mode: Any, std: Any) -> None:
    settings = PreprocessCfg(size=size, resize_mode=mode, mean=(0.5, 0.4, 0.3), std=std)
    whole = image_transform_v2(settings, is_train=False)
    split = defer_normalization(whole)
    pictures = [picture(high, wide, "noise") for high, wide in ((16, 16), (40, 21), (9, 70))]
    views = split.finish([split(each) for each in pictures])
    assert views.dtype == torch.uint8 and views.is_contiguous()
    assert torch.equal(split.to_floats(views), torch.stack([whole(each) for each in pictures]))


def test_other_transforms_stay_as_they_are() -> None:
    plain = PlainTransform(PixelFormat((8, 8), [0.0], [1.0]))
    assert defer_normalization(plain) is plain

    def function(image: Image.Image) -> torch.Tensor:
        return torch.full((1, 2, 2), float(image.width), dtype=torch.float16)

    split = defer_normalization(function)
    views = split.to_floats(split.finish([split(Image.new("RGB", (3, 1)))]))
    assert torch.equal(views, torch.full((1, 1, 2, 2), 3.0))


def settle(pixels: str, augmentation: dict[str, Any], name: Any) -> str:
    """How a training of this model makes pixels."""
    model = {"name": name, "augmentation": augmentation}
    tree = {"run_dir": "x", "data": {"pixels": pixels}, "model": model}
    return from_tree(tree).pixels_of("train")


@pytest.mark.parametrize(
    ("augmentation", "named"),
    [
        ({"color_jitter": (0.1, 0.1, 0.1, 0.1), "color_jitter_prob": 0.5}, "color_jitter"),
        ({"kind": "simclr"}, "SimCLRTransform|kind"),
        ({"use_timm": True}, "RandomResizedCropAndInterpolation|use_timm"),
    ],
)
def test_what_does_more_than_crop_is_refused(augmentation: dict[str, Any], named: str) -> None:
    model = load_towers(tiny.MODEL, augmentation=augmentation)
    message = f"only crops and resizes, and .*({named}).*set data.pixels=exact"
    with pytest.raises(ValueError, match=message):
        fast_transform(model.preprocess_train)
    assert settle("auto", augmentation, tiny.MODEL) == "exact"


def test_by_default_crops_alone_are_fast() -> None:
    for name in (tiny.MODEL, "ViT-B-32", "hf-hub:somebody/model"):
        assert settle("auto", {"scale": (0.4, 1.0)}, name) == "fast"
    assert settle("exact", {}, tiny.MODEL) == "exact"
    assert settle("auto", {}, {"vision_cfg": {BACKBONE: "mclclip:small_conv"}}) == "exact"
    made = load_towers(tiny.ONE_BLOCK, augmentation={"scale": (0.4, 0.5)}).preprocess_train
    found = fast_transform(made)
    assert found.scale == (0.4, 0.5) and found.size == (32, 32) and found.ratio == RATIO
