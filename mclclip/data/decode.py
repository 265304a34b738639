"""Decodes the bytes of an image member to pixels; no other code decodes foreign image data.

A picture becomes RGB; an array (``.npy``) of any number of channels is not changed.

Of a picture the first frame is decoded, 16-bit grey is scaled to 8 bits, a picture with transparent
pixels is laid on white, the mode is converted with PIL's own ``convert("RGB")``, and the
EXIF orientation is applied. For RGB, grey and CMYK pictures without an EXIF rotation, open_clip's
transforms then give the same pixels as on the file opened by PIL. For others there are two
differences: open_clip does not rotate pictures, and it resizes before it converts, which picks
nearest neighbours in palette pictures and shows transparent pixels in the colour that is stored
below them. PIL's global state is not changed.

`decode_pixels` gives the same pixels as an array, faster for JPEGs.
"""

from __future__ import annotations

import io
import logging
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError, features

from mclclip.data.findings import LFS_POINTER

logger = logging.getLogger("mclclip")

MAX_IMAGE_PIXELS = 100_000_000
"""Pixels (width x height) of an image at most, unless an option says otherwise."""

# Every scan of a JPEG costs a pass over all pixels, for ten bytes of the file. Encoders write up to
# 14 scans (18 for CMYK), so that this bound lets all of them pass at any size. A smaller picture
# may have more: one of 20 megapixels 100 scans.
_MAX_SCANS_OF_LARGEST = 20

# A closed list: PIL also knows formats whose reader starts another program (EPS: ghostscript).
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
_CODECS = {"AVIF": "avif", "JPEG2000": "jpg_2000"}  # that a build of Pillow may lack
_KNOWN_FEATURES = (*features.modules, *features.codecs)
FORMATS = tuple(
    name
    for name, feature in ((name, _CODECS.get(name)) for name in _SUFFIXES)
    if feature is None or (feature in _KNOWN_FEATURES and features.check(feature))
)
IMAGE_EXTENSIONS = tuple(suffix for name in FORMATS for suffix in _SUFFIXES[name])
"""Suffixes, without their dot and in lower case, of the pictures that every reader reads."""

PICTURE_SUFFIXES = (*(s for some in _SUFFIXES.values() for s in some), "heic", "heif")
"""Suffixes of pictures, also of those that Pillow does not read here."""

Pixels = Literal["exact", "fast"]
"""How training makes pixels of a picture: ``exact`` is open_clip's own transform of a PIL image,
``fast`` is `decode_pixels` and `FastTransform` of `models.transforms`."""

_ARRAY_MAGIC = b"\x93NUMPY"
_JPEG_MAGIC = b"\xff\xd8"
# Markers that libjpeg acts on. It passes over the others without reading a length after them:
# stuffed bytes, restarts, and reserved codes that it meets while it looks for a restart.
_JPEG_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")
_END_OF_IMAGE, _START_OF_SCAN = 0xD9, 0xDA
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
    """The bytes are no usable image.

    ``reason`` is one short word for counting: ``empty``, ``bomb`` (more pixels, or more passes over
    them, than allowed), ``lfs_pointer``, ``unidentified`` (none of `FORMATS`), ``unsupported`` (a
    pixel type without a defined range), ``truncated`` or ``broken``; ``detail`` says more where
    there is more.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[DecodeError], tuple[str, str]]:
        return type(self), (self.reason, self.detail)


def decode_image(data: bytes, max_image_pixels: int) -> Image.Image:
    """Decode one image to 8-bit RGB, upright, detached from ``data``.

    ``max_image_pixels`` bounds width x height and is checked from the header, before any pixel is
    decoded. PIL's own limit stays in force beside it: twice ``PIL.Image.MAX_IMAGE_PIXELS``
    (179 million pixels unless the program changed it) is a ``bomb`` too. Deterministic: the same
    bytes give the same pixels or the same reason.

    Raises `DecodeError` for everything that is wrong with the data, whatever PIL raised for it.
    """
    with _opened(data, max_image_pixels) as image:
        return upright_rgb(image)


def decode_pixels(data: bytes, max_image_pixels: int) -> npt.NDArray[np.uint8]:
    """The pixels of `decode_image` as an array uint8 [H, W, 3] that can be written to.

    PIL reads the header, which decides about size, kind and orientation, as in `decode_image`. Grey
    and RGB JPEGs that simplejpeg reads without a complaint are decoded by it, with the same
    algorithm (never its faster and coarser ones); all others are decoded by PIL, which then also
    says what is wrong with them. Raises as `decode_image` does.
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
    """RGB pixels [H, W, 3] of a JPEG as they are stored; None where PIL has to decode it."""
    import simplejpeg  # type: ignore[import-untyped]  # late: options import this module

    if image.format != "JPEG" or image.mode not in ("RGB", "L"):
        return None
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        if (width, height) != image.size:  # nothing larger than what was checked is decoded
            return None
        found: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, "RGB", fastdct=False, fastupsample=False, strict=True
        )
    except MemoryError:
        raise
    except Exception as error:  # also what the library only warns of, and KeyError for odd headers
        logger.debug("decoded by PIL: %s", error)
        return None
    return found


def decode(
    data: bytes,
    max_image_pixels: int,
    reads_arrays: bool,
    reads_pixels: bool = False,
) -> Image.Image | npt.NDArray[np.uint8]:
    """An upright RGB picture, or an array uint8 [H, W, C], whichever the bytes hold.

    ``reads_arrays``: whether the transform that comes next takes arrays of ``.npy`` files.
    ``reads_pixels``: whether it takes pictures as the arrays [H, W, 3] of `decode_pixels`.
    Raises as `decode_image` and `decode_array` do, and a plain ValueError for an array if the
    transform does not take it.
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
    """[H, W, C] -> [H, W, 3]: of other channels the first three, or the first one in grey."""
    return pixels[..., :3] if pixels.shape[2] >= 3 else pixels[..., [0, 0, 0]]


def is_array(data: bytes) -> bool:
    """Returns whether these bytes are a ``.npy`` file, by how they begin."""
    return data.startswith(_ARRAY_MAGIC)


def decode_array(data: bytes, max_image_pixels: int) -> npt.NDArray[np.uint8]:
    """Decode a ``.npy`` file of type uint8 and shape [H, W, C], C >= 1, to an array that owns its
    memory.

    Type and size are checked from the header (of numpy's versions 1 and 2) before any pixel is
    read; nothing is ever unpickled. Raises as `decode_image` does; another type or number of
    dimensions is ``unsupported``.
    """
    with _quiet_warnings(), _as_decode_error():
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
        _check_pixels(shape[1], shape[0], max_image_pixels)
        wanted, found = shape[0] * shape[1] * shape[2], len(data) - file.tell()
        if found != wanted:
            reason = "truncated" if found < wanted else "broken"
            raise DecodeError(reason, f"{found} bytes of pixels, the header says {wanted}")
        flat = np.frombuffer(data, np.uint8, offset=file.tell())
        return flat.reshape(shape, order="F" if fortran else "C").copy()


@contextmanager
def _opened(data: bytes, max_image_pixels: int) -> Iterator[Image.Image]:
    """The picture with its header read and its size checked; what is wrong is a `DecodeError`."""
    if not data:
        raise DecodeError("empty", "zero bytes")
    if data.startswith(LFS_POINTER):
        raise DecodeError("lfs_pointer", "run 'git lfs pull' in its repository")
    with _quiet_warnings(), _as_decode_error():
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width < 1 or height < 1:
                raise DecodeError("broken", f"{width} x {height} pixels")
            _check_pixels(width, height, max_image_pixels)
            if data.startswith(_JPEG_MAGIC):
                # Decoders work on whole blocks of 8 x 8 pixels.
                _check_scans(data, -(-width // 8) * -(-height // 8) * 64, max_image_pixels)
            yield image


def upright_rgb(image: Image.Image) -> Image.Image:
    """A picture that PIL has opened as 8-bit RGB and upright, as the head of this file describes.

    Raises `DecodeError` for floating-point pixels, and what PIL raises for broken ones.
    """
    image.load()
    return _upright(_to_rgb(image), _orientation(image))


def peculiarity(data: bytes, max_image_pixels: int) -> str | None:
    """``transparent`` for a picture with transparent pixels, ``narrow_range`` for one of 16 bits
    whose values use less than a tenth of the range; None for others and for what is no picture.

    Only pictures whose header allows either are decoded.
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
    """The picture as RGBA where some of its pixels are transparent, else None."""
    if not image.has_transparency_data:
        return None
    layered = image.convert("RGBA")
    lowest, _ = layered.getchannel("A").getextrema()
    return layered if int(lowest) < 255 else None  # type: ignore[arg-type]


def _check_pixels(width: int, height: int, max_image_pixels: int) -> None:
    if width * height > max_image_pixels:
        raise DecodeError("bomb", f"{width} x {height} pixels, allowed are {max_image_pixels}")


def _check_scans(jpeg: bytes, num_pixels: int, max_image_pixels: int) -> None:
    """Refuses a JPEG whose scans together cover too many pixels, before any of them is decoded."""
    most = _MAX_SCANS_OF_LARGEST * max(max_image_pixels, MAX_IMAGE_PIXELS) // num_pixels
    for number, _ in enumerate(_scans(jpeg), start=1):
        if number > most:
            raise DecodeError("bomb", f"more than {most} scans of {num_pixels} pixels")


def _scans(jpeg: bytes) -> Iterator[int]:
    """Where the scans of a JPEG begin, by the rules of libjpeg; those of embedded thumbnails and
    of further pictures in the same file are not its own."""
    at = len(_JPEG_MAGIC)
    while (found := _JPEG_MARKER.search(jpeg, at)) is not None:
        (marker,) = found[1]
        if marker == _END_OF_IMAGE:
            return
        if marker == _START_OF_SCAN:
            yield found.start()
        # The length counts its own two bytes, and libjpeg reads them even where it says less.
        at = found.end() + max(int.from_bytes(jpeg[found.end() : found.end() + 2], "big"), 2)


def _to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB. 16-bit grey keeps its high byte, as PIL does for 16-bit colour; transparent pixels
    are laid on white, and opaque pictures are what ``convert("RGB")`` makes of them."""
    if image.mode == "F":
        raise DecodeError("unsupported", "floating-point pixels have no defined range")
    if _has_16_bits(image):
        # convert("RGB") would clip these at 255 or not, depending on the version of PIL
        values = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if (layered := _transparent(image)) is not None:
        below = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(below, layered).convert("RGB")
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1..8; 1 where it is absent or the EXIF block cannot be parsed."""
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
    """Turns every error of the decoder into a `DecodeError`, but for MemoryError."""
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


_lock = threading.Lock()
_num_decoding = 0
_saved_warnings: warnings.catch_warnings[None] | None = None


@contextmanager
def _quiet_warnings() -> Iterator[None]:
    """Ignores PIL's warnings about large, palette and damaged images, which are handled here.

    They are ignored while at least one decode is running: `warnings.catch_warnings` alone is not
    thread-safe, and two overlapping uses may turn warnings off for the rest of the program.
    """
    global _num_decoding, _saved_warnings
    with _lock:
        if _num_decoding == 0:
            _saved_warnings = warnings.catch_warnings()
            _saved_warnings.__enter__()
            warnings.simplefilter("ignore")
        _num_decoding += 1
    try:
        yield
    finally:
        with _lock:
            _num_decoding -= 1
            if _num_decoding == 0 and _saved_warnings is not None:
                _saved_warnings.__exit__(None, None, None)
                _saved_warnings = None
