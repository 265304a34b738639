"""Decodes the bytes of images to pixels; no other code decodes image data of strangers.

A picture becomes RGB; an array (``.npy``) of any number of channels is not changed.

The first frame of a picture is decoded. Grey of 16 bits is scaled to 8, transparent pixels are laid
on white, the mode is converted with PIL's ``convert("RGB")``, and the EXIF orientation is applied.
For RGB, grey and CMYK pictures without an EXIF rotation, open_clip's transforms then give the same
pixels as for the file opened by PIL. For others they differ in two ways. open_clip does not rotate
pictures. It resizes before it converts, which picks nearest neighbours in palette pictures and
shows transparent pixels in their stored colour. PIL's global state is not changed.

`decode_pixels` returns the same pixels as an array, and is faster for JPEGs.
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError, features

from mclclip.data.findings import LFS_POINTER

logger = logging.getLogger("mclclip")
# PIL warns of large, palette and damaged pictures, which are handled here.
warnings.filterwarnings("ignore", module=r"PIL\.")

MAX_IMAGE_PIXELS = 100_000_000
"""Most pixels (width x height) of an image, unless an option says otherwise."""
MAX_ASPECT = 400
"""Longer side by shorter one. Transforms enlarge the shorter side to the model's size and then cut
out the middle: of a line of 1 x 20,000 pixels that makes 4.5 million columns."""

# Every scan of a JPEG costs a pass over all pixels, and takes only ten bytes in the file. Encoders
# write up to 14 scans (18 for CMYK), which this bound allows at any size. A smaller picture may
# have more: one of 20 megapixels may have 100.
_MAX_SCANS_OF_LARGEST = 20

# No other format is read: for some PIL starts another program (for EPS: ghostscript).
_SUFFIXES = {
    "JPEG": ("jpg", "jpeg", "jpe", "jfif"),
    "PNG": ("png",),
    "WEBP": ("webp",),
    "GIF": ("gif",),
    "BMP": ("bmp",),
    "TIFF": ("tif", "tiff"),
    "AVIF": ("avif",),
    "JPEG2000": ("jp2", "j2k"),
}
_CODECS = {"AVIF": "avif", "JPEG2000": "jpg_2000"}  # a build of Pillow may lack these
_AVAILABLE = {*features.get_supported()}
FORMATS = tuple(name for name in _SUFFIXES if _CODECS.get(name, "pil") in _AVAILABLE)
IMAGE_EXTENSIONS = tuple(suffix for name in FORMATS for suffix in _SUFFIXES[name])
"""Suffixes of the pictures that are read, without their dot and in lower case."""

PICTURE_SUFFIXES = (*(s for some in _SUFFIXES.values() for s in some), "heic", "heif")
"""Suffixes of all pictures, including those that this build of Pillow cannot read."""


def suffix_of(path: str | Path) -> str:
    """Returns the suffix of a file name in lower case, without its dot."""
    return os.path.splitext(path)[1].lower().removeprefix(".")


Pixels = Literal["exact", "fast"]
"""How training turns pictures into pixels: ``exact`` uses PIL and open_clip's transform, ``fast``
uses `decode_pixels` and `models.transforms.FastTransform`."""

_ARRAY_MAGIC = b"\x93NUMPY"
_JPEG_MAGIC = b"\xff\xd8"
# Markers that libjpeg reads. It skips the others, which have no length after them: stuffed bytes,
# restarts, and reserved codes.
_JPEG_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")
_END_OF_IMAGE, _START_OF_SCAN = 0xD9, 0xDA
_LONGEST_JPEG = 65_500  # pixels of a side that libjpeg writes
_ORIENTATION_TAG = 0x0112
_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class DecodeError(ValueError):
    """The bytes are no usable image. ``reason`` is one of these:

    empty         there are no bytes
    bomb          it has more pixels, or more passes over them, than allowed
    thin          one side is more than `MAX_ASPECT` times as long as the other
    lfs_pointer   it is a pointer of git-lfs
    unidentified  it is none of `FORMATS`
    unsupported   its type of pixels has no defined range
    truncated, broken
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def decode_image(data: bytes, max_image_pixels: int) -> Image.Image:
    """Decodes a picture to upright 8-bit RGB; the same bytes always give the same result.

    ``max_image_pixels`` bounds width x height, and is compared with the header before any pixel is
    decoded. PIL's own limit also holds: a picture of more than twice ``PIL.Image.MAX_IMAGE_PIXELS``
    (179 million pixels, unless the program changes it) is a ``bomb`` too.

    Raises `DecodeError` for everything that is wrong with the data, and nothing else.
    """
    with _opened(data, max_image_pixels) as image:
        upright: Image.Image = upright_rgb(image)
        return upright


def shrink(data: bytes, max_image_pixels: int, side: int) -> bytes | None:
    """Makes a picture smaller: upright RGB whose shorter side has ``side`` pixels, as JPEG.

    Returns None if the shorter side is no longer than that, or the longer one too long for a JPEG.
    A large JPEG is decoded at a fraction of its size, at least twice the wanted one. Raises
    `DecodeError` as `decode_image` does.
    """
    with _opened(data, max_image_pixels) as image:
        scale = side / min(image.size)
        if scale >= 1 or scale * max(image.size) > _LONGEST_JPEG:
            return None
        width, height = (math.ceil(2 * scale * length) for length in image.size)
        image.draft(None, (width, height))
        picture = upright_rgb(image)
    scale, buffer = side / min(picture.size), io.BytesIO()
    width, height = (max(1, round(scale * length)) for length in picture.size)
    small = picture.resize((width, height), Image.Resampling.BICUBIC)
    small.save(buffer, "JPEG", quality=95, subsampling=0)  # all colours at every pixel
    return buffer.getvalue()


def decode_pixels(data: bytes, max_image_pixels: int) -> npt.NDArray[np.uint8]:
    """Decodes a picture to the pixels of `decode_image`, a writable array uint8 [H, W, 3].

    simplejpeg decodes grey and RGB JPEGs that it reads without a complaint, with PIL's algorithm
    (not its faster and coarser ones). PIL decodes all others, and reads the header, which decides
    about size, kind and orientation. Raises as `decode_image` does.
    """
    with _opened(data, max_image_pixels) as image:
        pixels = decode_by_simplejpeg(data, image)
        if pixels is None:
            return np.array(upright_rgb(image))
        orientation = _orientation(image)
        if orientation in _ORIENTATIONS:
            return np.array(_upright(Image.fromarray(pixels), orientation))
        return pixels


def decode_by_simplejpeg(data: bytes, image: Image.Image) -> npt.NDArray[np.uint8] | None:
    """Decodes a JPEG to RGB [H, W, 3], not rotated; returns None if PIL has to decode it."""
    import simplejpeg  # type: ignore[import-untyped]  # late: options import this module

    if image.format != "JPEG" or image.mode not in ("RGB", "L"):
        return None
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        if (width, height) != image.size:  # only the size that PIL read was checked
            return None
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, "RGB", fastdct=False, fastupsample=False, strict=True
        )
    except MemoryError:
        raise
    except Exception as error:  # also for its warnings, and KeyError for odd headers
        logger.debug("decoded by PIL: %s", error)
        return None
    return pixels


def decode(
    data: bytes,
    max_image_pixels: int,
    reads_arrays: bool,
    reads_pixels: bool = False,
) -> Image.Image | npt.NDArray[np.uint8]:
    """Decodes a picture to upright RGB, or a ``.npy`` file to an array uint8 [H, W, C].

    reads_arrays  the transform that comes next takes arrays of ``.npy`` files
    reads_pixels  it takes pictures as arrays [H, W, 3] of `decode_pixels`, not as PIL's

    Raises `DecodeError`, and another ValueError for an array that the transform does not take.
    """
    if not is_array(data):
        how = decode_pixels if reads_pixels else decode_image
        return how(data, max_image_pixels)
    array = decode_array(data, max_image_pixels)
    if not reads_arrays:
        raise ValueError(
            f"it is an array of {array.shape[2]} channels, and this model reads RGB pictures: take "
            "a model whose number of channels can be set, or store the samples as pictures"
        )
    return array


def as_picture(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Makes [H, W, 3] of [H, W, C]: the first three channels, or the first one as grey."""
    return pixels[..., :3] if pixels.shape[2] >= 3 else pixels[..., [0, 0, 0]]


def is_array(data: bytes) -> bool:
    """Returns True if the bytes begin as a ``.npy`` file."""
    return data.startswith(_ARRAY_MAGIC)


def decode_array(data: bytes, max_image_pixels: int) -> npt.NDArray[np.uint8]:
    """Decodes a ``.npy`` file to a new array uint8 [H, W, C], C >= 1.

    Type and size are checked in the header (of numpy's versions 1 and 2) before any pixel is read;
    nothing is ever unpickled. Raises `DecodeError`, for another type or shape ``unsupported``.
    """
    with _as_decode_error():
        file = io.BytesIO(data)
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, kind = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, kind = np.lib.format.read_array_header_2_0(file)
        else:
            raise DecodeError("unsupported", f"version {version} of the .npy format")
        if kind != np.uint8 or len(shape) != 3:
            raise DecodeError("unsupported", f"{kind} {list(shape)}, wanted uint8 [H, W, channels]")
        if min(shape) < 1:
            raise DecodeError("broken", f"an array {list(shape)}")
        _check_size(shape[1], shape[0], max_image_pixels)
        num_pixels, num_bytes = shape[0] * shape[1] * shape[2], len(data) - file.tell()
        if num_bytes != num_pixels:
            reason = "truncated" if num_bytes < num_pixels else "broken"
            raise DecodeError(reason, f"{num_bytes} bytes of pixels, the header says {num_pixels}")
        flat = np.frombuffer(data, np.uint8, offset=file.tell())
        return flat.reshape(shape, order="F" if fortran else "C").copy()


@contextmanager
def _opened(data: bytes, max_image_pixels: int) -> Iterator[Image.Image]:
    """Yields the picture after PIL has read its header and its size is checked."""
    if not data:
        raise DecodeError("empty", "zero bytes")
    if data.startswith(LFS_POINTER):
        raise DecodeError("lfs_pointer", "run 'git lfs pull' in its repository")
    with _as_decode_error(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        _check_size(width, height, max_image_pixels)
        if data.startswith(_JPEG_MAGIC):
            # Decoders work on whole blocks of 8 x 8 pixels.
            _check_scans(data, -(-width // 8) * -(-height // 8) * 64, max_image_pixels)
        yield image


def upright_rgb(image: Any) -> Any:
    """Makes a picture that PIL has opened upright 8-bit RGB, as the head of this file describes.

    What is no picture of PIL's, such as a tensor, stays as it is. Raises `DecodeError` for
    floating-point and for broken pixels.
    """
    if not isinstance(image, Image.Image):
        return image
    with _as_decode_error():
        image.load()
    return _upright(_to_rgb(image), _orientation(image))


def peculiarity(data: bytes, max_image_pixels: int) -> str | None:
    """Returns a reason of `findings.REASONS` to look at a picture, or None.

    ``transparent``: it has transparent pixels. ``narrow_range``: it has 16 bits, and uses less than
    a tenth of their range. Only pictures whose header allows either are decoded.
    """
    try:
        with _opened(data, max_image_pixels) as image:
            if _has_16_bits(image):
                image.load()
                return "narrow_range" if np.asarray(image).max(initial=0) < 6_554 else None
            return None if _transparent(image) is None else "transparent"
    except DecodeError:
        return None


def _has_16_bits(image: Image.Image) -> bool:
    return image.mode == "I" or image.mode.startswith("I;16")


def _transparent(image: Image.Image) -> Image.Image | None:
    """Returns the picture as RGBA if some of its pixels are transparent, else None."""
    if not image.has_transparency_data:
        return None
    layered = image.convert("RGBA")
    lowest, _ = layered.getchannel("A").getextrema()
    return layered if int(lowest) < 255 else None  # type: ignore[arg-type]


def _check_size(width: int, height: int, max_image_pixels: int) -> None:
    if min(width, height) < 1:
        raise DecodeError("broken", f"{width} x {height} pixels")
    if width * height > max_image_pixels:
        raise DecodeError("bomb", f"{width} x {height} pixels, allowed are {max_image_pixels}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise DecodeError("thin", f"{width} x {height} pixels")


def _check_scans(jpeg: bytes, num_pixels: int, max_image_pixels: int) -> None:
    """Raises `DecodeError` for a JPEG whose scans together cover too many pixels."""
    most = _MAX_SCANS_OF_LARGEST * max(max_image_pixels, MAX_IMAGE_PIXELS) // num_pixels
    for number, _ in enumerate(_scans(jpeg), start=1):
        if number > most:
            raise DecodeError("bomb", f"more than {most} scans of {num_pixels} pixels")


def _scans(jpeg: bytes) -> Iterator[int]:
    """Yields where the scans of a JPEG begin, by the rules of libjpeg.

    Scans of embedded thumbnails and of more pictures in the same file do not count.
    """
    at = len(_JPEG_MAGIC)
    while (match := _JPEG_MARKER.search(jpeg, at)) is not None:
        (marker,) = match[1]
        if marker == _END_OF_IMAGE:
            return
        if marker == _START_OF_SCAN:
            yield match.start()
        # The length includes its own two bytes, and libjpeg reads them even if it says less.
        at = match.end() + max(int.from_bytes(jpeg[match.end() : match.end() + 2], "big"), 2)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Converts a picture to 8-bit RGB.

    Grey of 16 bits keeps its high byte, as PIL does for 16-bit colour; transparent pixels are laid
    on white; PIL's ``convert("RGB")`` does the rest.
    """
    if image.mode == "F":
        raise DecodeError("unsupported", "floating-point pixels have no defined range")
    if _has_16_bits(image):
        # Some versions of PIL would cut these values at 255 in convert("RGB").
        values = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if (layered := _transparent(image)) is not None:
        below = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(below, layered).convert("RGB")
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation 1..8; 1 if it is absent or the EXIF block cannot be parsed."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception as error:  # PIL lets parser errors of many kinds through
        # A damaged EXIF block says nothing about the pixels, which are already decoded.
        logger.debug("EXIF ignored: %s", error)
        return 1
    return value if isinstance(value, int) else 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    method = _ORIENTATIONS.get(orientation)
    upright = image if method is None else image.transpose(method)
    upright.info = {}
    return upright


@contextmanager
def _as_decode_error() -> Iterator[None]:
    """Turns every error of the decoder into a `DecodeError`, except MemoryError."""
    try:
        yield
    except (DecodeError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise DecodeError("bomb", str(error)) from error
    except UnidentifiedImageError as error:
        raise DecodeError("unidentified", f"none of {', '.join(FORMATS)}") from error
    except Exception as error:  # OSError, SyntaxError, struct.error, zlib.error, IndexError, ...
        text = str(error)
        lowered = text.lower()
        cut = isinstance(error, EOFError) or any(
            word in lowered for word in ("truncated", "not enough", "end of file")
        )
        raise DecodeError("truncated" if cut else "broken", text) from error
