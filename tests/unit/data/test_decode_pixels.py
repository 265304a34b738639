"""Decoding to arrays: the same pixels as by PIL, and the same word for every kind of damage."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mclclip.data import decode as decoding
from mclclip.data.decode import DecodeError, decode, decode_image, decode_pixels
from tests.unit.data.test_decode import LIMIT, encode, pattern

JPEGS: list[dict[str, Any]] = [
    {"quality": 30},
    {"quality": 95, "subsampling": 0},
    {"quality": 80, "subsampling": 1},
    {"quality": 80, "subsampling": 2, "restart_marker_blocks": 2},
    {"progressive": True, "optimize": True},
    {"keep_rgb": True},
]


@pytest.fixture
def by_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every picture that is decoded to an array, whether simplejpeg did it."""
    decoded: list[bool] = []
    inner = decoding.decode_by_simplejpeg

    def noting(*arguments: Any) -> Any:
        found = inner(*arguments)
        decoded.append(found is not None)
        return found

    monkeypatch.setattr(decoding, "decode_by_simplejpeg", noting)
    return decoded


def noise(height: int, width: int) -> Image.Image:
    values = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def outcome(how: Any, data: bytes, limit: int = LIMIT) -> Any:
    """The pixels, or the reason why there are none."""
    try:
        return np.asarray(how(data, limit))
    except DecodeError as error:
        return error.reason


def assert_as_by_pil(data: bytes, limit: int = LIMIT) -> None:
    found, wanted = outcome(decode_pixels, data, limit), outcome(decode_image, data, limit)
    assert type(found) is type(wanted) and np.array_equal(found, wanted)


@pytest.mark.parametrize("options", JPEGS, ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpegs_of_every_kind_have_pils_pixels(
    by_simplejpeg: list[bool], mode: str, options: dict[str, Any]
) -> None:
    if mode == "CMYK":
        options = {name: value for name, value in options.items() if name != "keep_rgb"}
    for size in ((1, 1), (7, 3), (24, 40), (131, 67)):
        data = encode(noise(*size).convert(mode), "JPEG", **options)
        assert_as_by_pil(data)
        assert decode_pixels(data, LIMIT).flags.writeable
    assert all(done == (mode != "CMYK") for done in by_simplejpeg)


@pytest.mark.parametrize("orientation", range(10))
def test_pictures_are_turned_upright(by_simplejpeg: list[bool], orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    for mode in ("RGB", "CMYK"):
        assert_as_by_pil(encode(noise(21, 33).convert(mode), "JPEG", exif=exif.tobytes()))
    assert by_simplejpeg == [True, False]


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "WEBP", "GIF"])
def test_other_formats_are_left_to_pil(by_simplejpeg: list[bool], format: str) -> None:
    assert_as_by_pil(encode(pattern(), format))
    assert by_simplejpeg == [False]


def damaged(seeds: int) -> Iterator[bytes]:
    """JPEGs that are cut off, or where bytes were changed, taken out or put in."""
    sources = [
        encode(noise(33, 47).convert(mode), "JPEG", **options)
        for mode in ("RGB", "L")
        for options in JPEGS[:5]
    ]
    for seed in range(seeds):
        rng = random.Random(seed)
        data = bytearray(rng.choice(sources))
        where = rng.randrange(len(data) if seed % 2 else 700)
        if seed % 4 == 0:
            del data[where:]
        elif seed % 4 == 1:
            del data[where : where + rng.randint(1, 40)]
        elif seed % 4 == 2:
            data[where] = rng.randrange(256)
        else:
            data[where:where] = rng.randbytes(rng.randint(1, 20))
        yield bytes(data)


def test_damage_has_pils_outcome(by_simplejpeg: list[bool]) -> None:
    reasons = set()
    for data in damaged(1200):
        assert_as_by_pil(data)
        found = outcome(decode_pixels, data)
        reasons.add(found if isinstance(found, str) else "read")
    assert {"read", "truncated", "broken", "unidentified"} <= reasons
    assert any(by_simplejpeg) and not all(by_simplejpeg)


def test_size_is_checked_before_anything_is_decoded(
    by_simplejpeg: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(noise(20, 30), "JPEG")
    assert outcome(decode_pixels, data, 599) == "bomb" and outcome(decode_pixels, b"") == "empty"
    assert not by_simplejpeg
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert outcome(decode_pixels, data) == "bomb" and not by_simplejpeg


def test_a_header_that_the_libraries_read_differently_is_left_to_pil(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """simplejpeg never decodes more than the size that was checked."""
    data = encode(noise(20, 30), "JPEG")

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("decoded")

    liar = SimpleNamespace(decode_jpeg_header=lambda _: (2000, 3000, "", ""), decode_jpeg=never)
    monkeypatch.setitem(sys.modules, "simplejpeg", liar)  # type: ignore[arg-type]
    assert_as_by_pil(data)
    liar.decode_jpeg_header = lambda _: {}[6]  # as it fails for an unknown subsampling
    assert_as_by_pil(data)


def test_which_transform_comes_next_decides() -> None:
    data = encode(pattern(), "JPEG")
    assert isinstance(decode(data, LIMIT, False), Image.Image)
    assert isinstance(decode(data, LIMIT, True), Image.Image)
    assert isinstance(decode(data, LIMIT, False, reads_pixels=True), np.ndarray)
