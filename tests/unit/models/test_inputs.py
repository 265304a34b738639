"""What encode_image and encode_text take, and how they refuse what they do not."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

from mclclip.models.encoder import Encoder
from mclclip.models.loading import load_towers

CONFIG = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "layers": 1, "width": 16, "head_width": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder([load_towers(CONFIG)])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    file = tmp_path_factory.mktemp("pictures") / "a.png"
    Image.fromarray(pixels).save(file)
    return file


def test_a_picture_has_the_same_features_in_every_form(encoder: Encoder, path: Path) -> None:
    data, image = path.read_bytes(), Image.open(path)
    array = np.array(image)
    wanted = encoder.encode_image([path])
    forms: list[Any] = [path, str(path), image, array, data, io.BytesIO(data), open(path, "rb")]
    for form in forms:
        assert encoder.encode_image(form).tolist() == wanted.tolist(), type(form)
    pixels = encoder.preprocess_val(image)
    several = encoder.encode_image([array, data, io.BytesIO(data), pixels])
    np.testing.assert_allclose(several, np.repeat(wanted, 4, 0), atol=1e-6)
    np.testing.assert_allclose(encoder.encode_image(np.stack([array] * 2)), several[:2])
    for tensor in (pixels, pixels[None]):
        features = encoder.encode_image(tensor)
        assert isinstance(features, torch.Tensor)
        np.testing.assert_allclose(features.numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize("mode", ["LA", "P", "I;16", "turned"])
def test_preprocess_val_reads_odd_pictures_as_encode_image_does(
    encoder: Encoder, tmp_path: Path, mode: str
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), dtype=np.uint8)
    exif, image = Image.Exif(), Image.fromarray(pixels)
    if mode == "turned":
        exif[0x0112], image = 6, image.convert("RGB")
    elif mode == "I;16":
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    else:
        image = image.convert(mode)
    image.save(tmp_path / "a.png", exif=exif)
    found = encoder.encode_image(encoder.preprocess_val(Image.open(tmp_path / "a.png")))
    assert found.numpy().tolist() == encoder.encode_image([tmp_path / "a.png"]).tolist()


def test_pictures_that_make_no_batch_are_one_line(encoder: Encoder) -> None:
    for pictures in ([torch.zeros(3, 16, 16), torch.zeros(3, 8, 8)], [Image.new("RGB", (0, 5))]):
        with pytest.raises(ValueError, match="shapes|no pixels"):
            encoder.encode_image(pictures)


def test_no_pictures_and_no_texts_have_no_features(encoder: Encoder) -> None:
    assert encoder.encode_image([]).shape == encoder.encode_text([]).shape == (0, 8)
    assert encoder.encode_image(torch.zeros(0, 3, 16, 16)).shape == (0, 8)
    assert encoder.encode_text(torch.zeros(0, 8, dtype=torch.int64)).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_converted_encoder_takes_pictures_and_texts(
    encoder: Encoder, path: Path, dtype: torch.dtype
) -> None:
    converted, pixels = copy.deepcopy(encoder).to(dtype), encoder.preprocess_val(Image.open(path))
    for images in (path, [pixels], pixels[None], pixels[None].to(dtype)):
        features = np.asarray(converted.encode_image(images))
        np.testing.assert_allclose(features, encoder.encode_image([path]), atol=0.05)
    np.testing.assert_allclose(
        converted.encode_text("a dog"), encoder.encode_text("a dog"), atol=0.05
    )
    assert converted.encode_pooled(pixels[None]).shape == (1, 16)


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(16, 16),
        torch.zeros(2, 4, 16, 16),
        torch.zeros(2, 3, 16, 16, dtype=torch.uint8),
        [torch.zeros(16, 16)],
        [torch.zeros(3, 16, 16, dtype=torch.uint8)],
        [np.zeros((16, 16, 3))],
        np.zeros((0, 5, 3), np.uint8),
        [None],
        7,
        ["https://example.org/a.jpg"],
        [io.StringIO("text")],
        [b"no picture"],
        {"image": []},
    ],
    ids=lambda images: "file of text" if str(images).startswith("[<_io") else str(images),
)
def test_what_is_no_picture_is_one_line(encoder: Encoder, images: Any) -> None:
    with pytest.raises(ValueError) as raised:
        encoder.encode_image(images)
    assert "\n" not in str(raised.value)


def test_what_is_no_text_is_one_line_and_a_batch_has_a_row(encoder: Encoder, path: Path) -> None:
    for tokens in (torch.zeros(8, dtype=torch.int64), torch.zeros(2, 8)):
        with pytest.raises(ValueError) as raised:
            encoder.encode_text(tokens)
        assert "\n" not in str(raised.value)
    for texts in ([None], None, 3, ["a dog", float("nan")]):
        with pytest.raises(ValueError, match="text [01] is") as raised:
            encoder.encode_text(texts)
        assert "\n" not in str(raised.value)
    for rows in ({"caption": ["a dog"]}, pandas.DataFrame({"caption": ["a dog"]})):
        with pytest.raises(ValueError, match="which has columns: give one"):
            encoder.encode_text(rows)
    assert encoder.encode_text(pandas.Series(["a dog", "b"])).shape[0] == 2  # type: ignore[call-overload]
    for encode, given in ((encoder.encode_image, [path]), (encoder.encode_text, ["a dog"])):
        with pytest.raises(ValueError, match="batch_size"):
            encode(given, batch_size=0)


def test_transparent_pixels_are_white_in_every_form(encoder: Encoder, tmp_path: Path) -> None:
    pixels = np.zeros((20, 30, 4), np.uint8)
    pixels[:, :15, 3] = 255  # the left half is black, the right half transparent
    Image.fromarray(pixels).save(tmp_path / "a.png")
    white = np.full((20, 30, 3), 255, np.uint8)
    white[:, :15] = 0
    wanted = encoder.encode_image(white)
    for form in (tmp_path / "a.png", Image.fromarray(pixels), (tmp_path / "a.png").read_bytes()):
        assert encoder.encode_image(form).tolist() == wanted.tolist(), type(form)
