"""Reads the pictures and texts passed to `Encoder.encode_image` and `Encoder.encode_text`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from mclclip.data.decode import MAX_IMAGE_PIXELS, DecodeError, decode_image, upright_rgb
from mclclip.data.picture_transform import as_transform
from mclclip.util.options import brief, protocol_of

Picture = str | Path | Image.Image | NDArray[np.uint8] | bytes | BinaryIO
"""A picture: a path, a Pillow image, an array uint8 [H, W, 3], or an encoded picture as bytes or as
an open file. Lists of pictures may also hold tensors [C, H, W] that `preprocess_val` made."""

_WANTED = (
    "wanted paths, PIL images, arrays uint8 [H, W, 3], bytes of pictures, files opened by 'rb', or "
    "tensors [C, H, W] that preprocess_val made"
)


def pictures_of(images: Any) -> list[Picture | Tensor]:
    """Returns what was passed to `encode_image` as a list: one `Picture`, or several. An array
    [N, H, W, 3] is N pictures. Raises ValueError for what has columns."""
    _refuse_columns(images)
    if isinstance(images, np.ndarray) and images.ndim == 0:
        images = images.item()
    is_alone = isinstance(images, str | Path | Image.Image | bytes | bytearray)
    is_alone |= hasattr(images, "read")
    if isinstance(images, np.ndarray) and images.dtype.kind not in "OUS":  # which hold pictures
        is_alone |= images.ndim < 4
    is_alone |= not isinstance(images, Iterable)
    return [images] if is_alone else [*images]


def transform_picture(picture: Picture | Tensor, transform: Callable[[Any], Tensor]) -> Tensor:
    """Decodes and transforms a picture as evaluation does -> [C, H, W]; tensors stay as they are.

    Raises FileNotFoundError for a path that leads nowhere, and ValueError for what is no picture.
    """
    if isinstance(picture, Tensor) and picture.ndim == 3 and picture.is_floating_point():
        return picture
    if isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.ndim == 3:
        if not picture.size:
            raise ValueError(f"a picture is {_kind(picture)}, which has no pixels: leave it out")
        if as_transform(transform).reads_arrays:
            return transform(picture)
        if picture.shape[2] == 3:
            return transform(Image.fromarray(picture))
    name = "a PIL image"
    try:
        if isinstance(picture, Image.Image):
            if not all(picture.size):
                raise ValueError("a PIL image has no pixels: leave it out")
            return transform(upright_rgb(picture))
        data, name = _bytes_of(picture)
        return transform(decode_image(data, MAX_IMAGE_PIXELS))
    except DecodeError as error:
        raise ValueError(f"{name} cannot be decoded ({error}): leave it out") from None


def batch_of(pixels: Tensor, num_channels: int) -> Tensor:
    """Returns pixels of `preprocess_val` as [B, C, H, W]; one picture [C, H, W] is a batch of one.

    Raises ValueError for another shape, and for integers.
    """
    batch = pixels[None] if pixels.ndim == 3 else pixels
    fits = batch.ndim == 4 and batch.shape[1] == num_channels
    if not (fits and batch.is_floating_point()):
        raise ValueError(
            f"images is {_kind(pixels)}: wanted one tensor [{num_channels}, H, W] or a batch "
            f"[B, {num_channels}, H, W] of floating-point numbers, as preprocess_val makes"
        )
    return batch


def check_tokens(tokens: Tensor, *, are_rows: bool) -> None:
    """Raises ValueError unless ``tokens`` is a batch of tokens; with ``are_rows``, of text rows."""
    if tokens.ndim != 2 or tokens.is_floating_point() != are_rows:
        shape = "rows [B, W] of floating-point numbers" if are_rows else "int64 [B, context]"
        raise ValueError(f"tokens is {_kind(tokens)}: wanted {shape}, as the tokenizer makes")


def _bytes_of(picture: Any) -> tuple[bytes, str]:
    """Returns the bytes of an encoded picture, and what messages call it, for example its path."""
    if isinstance(picture, str | Path):
        if protocol_of(picture) is not None:
            raise ValueError(f"{brief(str(picture))} is a url: read it, and give its bytes")
        return Path(picture).read_bytes(), str(picture)
    if isinstance(picture, bytes | bytearray):
        return bytes(picture), f"a picture of {len(picture):,} bytes"
    if isinstance(picture, BufferedIOBase) or hasattr(picture, "read"):
        if isinstance(data := picture.read(), bytes):
            return data, str(getattr(picture, "name", f"a file of {len(data):,} bytes"))
    raise ValueError(f"a picture is {_kind(picture)}: {_WANTED}")


def _kind(value: Any) -> str:
    """Describes a value for messages: its type, and the dtype and shape of an array or tensor."""
    if isinstance(value, np.ndarray | Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{type(value).__name__} {kind} {[*value.shape]}"
    return type(value).__name__


def _refuse_columns(value: object) -> None:
    """Raises ValueError for a row or a table, whose iteration gives names of columns."""
    if isinstance(value, Mapping) or hasattr(value, "columns"):
        raise ValueError(
            f"got a {_kind(value)}, which has columns: give one, as in rows['caption']"
        )


def texts_of(texts: object) -> list[str]:
    """Returns what was passed to `encode_text` as a list: one text, or several.

    Raises ValueError for what is no text, or has columns.
    """
    _refuse_columns(texts)
    is_alone = isinstance(texts, str) or not isinstance(texts, Iterable)
    several = [texts] if is_alone else [*texts]  # type: ignore[misc]
    for number, text in enumerate(several):
        if not isinstance(text, str):
            shown = "" if text is None else f" ({brief(text)})"
            raise ValueError(
                f"text {number} is {_kind(text)}{shown}: wanted strings, or tokens as one tensor"
            )
    return [str(text) for text in several]
