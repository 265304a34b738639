"""Decoding: what comes out for every kind of image file, and the word for every kind of damage."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mclclip.data import decode as decoding
from mclclip.data.decode import (
    MAX_IMAGE_PIXELS,
    DecodeError,
    decode,
    decode_image,
    decode_pixels,
    peculiarity,
    shrink,
)

LIMIT = 10_000_000


def pattern(height: int = 24, width: int = 40) -> Image.Image:
    """Smooth colours, different in all four corners, so that JPEG keeps them nearly."""
    rows = np.linspace(0, 255, height)[:, None] * np.ones((1, width))
    columns = np.ones((height, 1)) * np.linspace(0, 255, width)[None]
    pixels = np.stack([rows, columns, (rows + columns) / 2], axis=-1)
    return Image.fromarray(pixels.astype(np.uint8))


def encode(image: Image.Image, format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=format, **options)
    return stream.getvalue()


def pixels(data: bytes) -> np.ndarray:
    image = decode_image(data, LIMIT)
    assert image.mode == "RGB"
    return np.asarray(image)


def reason(data: bytes, limit: int = LIMIT) -> str:
    with pytest.raises(DecodeError) as caught:
        decode_image(data, limit)
    return caught.value.reason


def test_lossless_formats_return_the_pixels() -> None:
    for format in ("PNG", "BMP", "TIFF", "WEBP"):
        options = {"lossless": True} if format == "WEBP" else {}
        assert np.array_equal(pixels(encode(pattern(), format, **options)), np.asarray(pattern()))


def test_cmyk_of_adobe_is_stored_inverted_and_comes_out_right() -> None:
    # PIL writes CMYK JPEGs as Adobe does: inverted, with the Adobe marker.
    data = encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    assert b"Adobe" in data
    red = pixels(data).reshape(-1, 3).mean(axis=0)
    assert red[0] > 245 and red[1] < 10 and red[2] < 10


def laid_on_white(image: Image.Image) -> np.ndarray:
    """By the definition: alpha times the colour, and the rest white."""
    layers = np.asarray(image.convert("RGBA")).astype(np.float64)
    alpha = layers[..., 3:] / 255
    return layers[..., :3] * alpha + 255 * (1 - alpha)


def test_palettes_are_laid_on_white_where_they_are_transparent() -> None:
    image = pattern().quantize(16)
    assert np.array_equal(pixels(encode(image, "PNG")), np.asarray(image.convert("RGB")))
    for transparency in (3, bytes(range(0, 160, 10))):
        data = encode(image, "PNG", transparency=transparency)
        reference = laid_on_white(Image.open(io.BytesIO(data)))
        assert np.abs(pixels(data) - reference).max() <= 1
        assert peculiarity(data, MAX_IMAGE_PIXELS) == "transparent"


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("alpha", [0, 7, 200, 255])
def test_transparent_pictures_are_laid_on_white_and_opaque_ones_converted(
    mode: str, alpha: int
) -> None:
    image = pattern().convert(mode)
    image.putalpha(alpha)
    data, opaque = encode(image, "PNG"), alpha == 255
    assert np.abs(pixels(data) - laid_on_white(image)).max() <= 1
    assert (peculiarity(data, MAX_IMAGE_PIXELS) is None) == opaque
    if opaque:
        assert np.array_equal(pixels(data), np.asarray(image.convert("RGB")))
    assert np.array_equal(decode_pixels(data, MAX_IMAGE_PIXELS), pixels(data))


def test_grey_of_16_bits_is_scaled_and_pictures_that_use_ten_are_told() -> None:
    grey = np.linspace(0, 255, 24 * 40).astype(np.uint16).reshape(24, 40)
    for format in ("PNG", "TIFF"):
        data = encode(Image.fromarray(grey * 257), format)
        assert np.array_equal(pixels(data), np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2))
    # Integers of 32 bits are read as such of 16, and floats are refused.
    values = np.array([[0, 257, 65535, 1_000_000, -5]], dtype=np.int32)
    assert pixels(encode(Image.fromarray(values), "TIFF"))[0, :, 0].tolist() == [0, 1, 255, 255, 0]
    assert reason(encode(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")) == "unsupported"
    narrow = np.arange(24 * 40, dtype=np.uint16).reshape(24, 40)
    assert peculiarity(encode(Image.fromarray(narrow), "PNG"), MAX_IMAGE_PIXELS) == "narrow_range"
    assert peculiarity(encode(Image.fromarray(narrow * 64), "PNG"), MAX_IMAGE_PIXELS) is None
    assert peculiarity(b"no picture", MAX_IMAGE_PIXELS) is None


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_the_image_upright(format: str, orientation: int) -> None:
    upright = np.asarray(pattern())
    # How a camera stores an upright scene under each orientation, spelt out with numpy.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(Image.fromarray(stored.copy()), format, exif=exif.tobytes())
    assert np.array_equal(pixels(data), upright)


def test_a_picture_with_damaged_exif_is_read() -> None:
    for damaged in (b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0nonsense", b"Exif\0\0"):
        data = encode(pattern(), "JPEG", exif=damaged, quality=95)
        assert pixels(data).shape == (24, 40, 3)


def smooth(height: int, width: int) -> Image.Image:
    """A picture of low frequencies, which any good way of resizing keeps."""
    y, x = np.mgrid[0:height, 0:width] / height
    bands = [np.sin(9 * x + 3 * y), np.cos(7 * y), np.sin(5 * x * y)]
    return Image.fromarray((127 + 120 * np.stack(bands, axis=-1)).astype(np.uint8))


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize(("height", "width", "side"), [(900, 601, 75), (90, 120, 89), (64, 65, 1)])
def test_shrunk_pictures_are_upright_and_look_alike(
    format: str, height: int, width: int, side: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    data = encode(smooth(height, width), format, exif=exif)
    with Image.open(io.BytesIO(shrink(data, LIMIT, side) or b"")) as small:
        assert small.format == "JPEG" and min(small.size) == side
        assert not small.getexif()
        plain = decode_image(data, LIMIT).resize(small.size, Image.Resampling.BICUBIC)
        difference = np.abs(np.asarray(small, np.float64) - np.asarray(plain, np.float64))
    assert difference.mean() < 3


def test_pictures_are_never_enlarged_and_damaged_ones_have_a_reason() -> None:
    data = encode(smooth(40, 60), "JPEG")
    assert shrink(data, LIMIT, 40) is None and shrink(data, LIMIT, 4000) is None
    long = encode(Image.new("RGB", (66_000, 170)), "PNG")
    assert shrink(long, 170 * 66_000, 169) is None  # a JPEG has sides of at most 65,500 pixels
    assert shrink(long, 170 * 66_000, 168) is not None
    with pytest.raises(DecodeError, match="truncated"):
        shrink(data[: len(data) // 2], LIMIT, 20)
    with pytest.raises(DecodeError, match="bomb"):
        shrink(data, 40 * 60 - 1, 20)


def test_only_the_first_frame_of_an_animation() -> None:
    first, second = pattern(), Image.new("RGB", (40, 24), "black")
    webp = encode(first, "WEBP", save_all=True, append_images=[second], lossless=True)
    assert np.array_equal(pixels(webp), np.asarray(first))
    grey = first.convert("L")
    gif = encode(grey, "GIF", save_all=True, append_images=[second.convert("L")])
    assert np.array_equal(pixels(gif), np.asarray(grey.convert("RGB")))


def test_bomb_is_refused_from_the_header() -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")
        )

    def png(width: int, height: int) -> bytes:  # a header without any pixel data behind it
        header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"")

    assert reason(png(3_000, 4_000)) == "bomb"
    assert reason(png(60_000, 60_000), limit=10**12) == "bomb"  # PIL's own limit
    assert reason(png(100, 100)) != "bomb"
    data = encode(pattern(10, 10), "PNG")
    assert decode_image(data, 100).size == (10, 10)
    assert reason(data, limit=99) == "bomb"


def test_what_is_too_thin_to_be_enlarged_is_refused() -> None:
    """It would have hundreds of millions of pixels before its middle is cut out."""
    for size in ((1, 401), (401, 1), (2, 900)):
        assert reason(encode(pattern(*size), "PNG")) == "thin"
    for size in ((1, 400), (400, 1), (2, 800)):
        assert decode_image(encode(pattern(*size), "PNG"), LIMIT).size == size[::-1]


def many_scans(width: int, height: int, num_scans: int) -> bytes:
    """A grey progressive JPEG with further scans, of ten bytes each, that refine nothing."""
    data = encode(Image.new("L", (8, 8), 128), "JPEG", progressive=True)
    size = data.index(b"\xff\xc2") + 5
    size_bytes = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    data = data[:size] + size_bytes + data[size + 4 :]
    more = num_scans - data.count(b"\xff\xda")
    return data[:-2] + b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x10" * more + b"\xff\xd9"


@pytest.mark.parametrize("how", [decode_image, decode_pixels])
def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded(how: Callable[..., object]) -> None:
    bomb, limit = many_scans(10_000, 10_000, 21), MAX_IMAGE_PIXELS
    eoi, padding = b"\xff\xe0\x00\x04\xff\xd9", b"\xff\xe0\x00\x01" + b"\xff" * 99
    first = bomb.index(b"\xff\xda")
    last = bomb.rindex(b"\xff\xda")
    for data in (
        bomb,
        many_scans(2_000, 2_000, 100_000),
        many_scans(7, 2_800, 95_000),  # of which blocks of 8 x 8 are decoded
        bomb[:first] + eoi + bomb[first:last] + eoi + padding + bomb[last:],
        bomb[:last] + b"\x07\xff\x00\xff\x02\xff\xd3\xff\x00\xff" + bomb[last:],
    ):
        with pytest.raises(DecodeError, match="^bomb: more than [0-9]+ scans of") as caught:
            how(data, limit)
        assert caught.value.reason == "bomb"


@pytest.mark.parametrize("how", [decode_image, decode_pixels])
def test_progressive_jpegs_of_encoders_are_decoded(how: Callable[..., object]) -> None:
    def size_and_scans(data: bytes) -> tuple[tuple[int, ...], int]:
        scans = data.count(b"\xff\xda")
        return np.asarray(how(data, MAX_IMAGE_PIXELS)).shape, scans

    cmyk = encode(pattern().convert("CMYK"), "JPEG", progressive=True)
    assert size_and_scans(cmyk) == ((24, 40, 3), 18)
    assert size_and_scans(many_scans(500, 300, 100)) == ((300, 500, 3), 100)
    assert np.array_equal(how(many_scans(30, 30, 100), 900), how(many_scans(30, 30, 7), 900))
    # Neither what stands in metadata nor what follows the picture are scans of it.
    data = encode(pattern(), "JPEG", progressive=True)
    thumbnail = b"\xff\xe1\xff\xfe" + b"\xff\xda" * 32_766
    wordy = data[:2] + thumbnail * 5 + data[2:] + b"\xff\xda" * 3_000_000
    assert np.array_equal(how(wordy, LIMIT), how(data, LIMIT))


def test_damage_has_a_word() -> None:
    assert reason(b"") == "empty"
    assert reason(b"\0" * 100) == "unidentified"
    assert reason(b"<svg></svg>") == "unidentified"
    assert reason(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n") == "unidentified"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for format in ("JPEG", "PNG", "GIF"):
        data = encode(Image.fromarray(noise), format)
        assert reason(data[: len(data) // 2]) == "truncated", format
    webp = encode(Image.fromarray(noise), "WEBP", lossless=True)
    assert reason(webp[: len(webp) // 2]) in ("truncated", "broken", "unidentified")
    png = bytearray(encode(Image.fromarray(noise), "PNG"))
    middle = len(png) // 2
    png[middle : middle + 64] = bytes(64)
    assert reason(bytes(png)) == "broken"


def test_any_cut_and_any_flipped_byte_gives_an_image_or_a_reason() -> None:
    rng = np.random.default_rng(1)
    for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        data = encode(pattern(), format)
        for _ in range(20):
            damaged = bytearray(data[: rng.integers(1, len(data) + 1)])
            damaged[rng.integers(len(damaged))] ^= int(rng.integers(1, 256))
            outcomes = []
            for _ in range(2):
                try:
                    outcomes.append(decode_image(bytes(damaged), 100_000).tobytes())
                except DecodeError as error:
                    outcomes.append(error.reason.encode())
            assert outcomes[0] == outcomes[1]


# --- to arrays, by simplejpeg ------------------------------------------------------------------


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


def test_other_formats_are_left_to_pil(by_simplejpeg: list[bool]) -> None:
    for format in ("PNG", "BMP", "TIFF", "WEBP", "GIF"):
        assert_as_by_pil(encode(pattern(), format))
    assert by_simplejpeg == [False] * 5
    data = encode(pattern(), "JPEG")  # and so is what no transform of pixels reads
    assert isinstance(decode(data, LIMIT, False), Image.Image)
    assert isinstance(decode(data, LIMIT, False, reads_pixels=True), np.ndarray)


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
    for data in damaged(300):
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


def test_warnings_of_pil_are_not_shown_and_those_of_others_are(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encode(pattern().quantize(16), "PNG", transparency=bytes(16)))
    code = f"""
import warnings
from mclclip.data.decode import decode_image
decode_image(open({str(path)!r}, "rb").read(), 10**6)
warnings.warn("mine")"""
    shown = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True
    ).stderr
    assert "Palette" not in shown and "mine" in shown
