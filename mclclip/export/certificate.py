"""Holds an export for another library against the encoder that it was made from.

A conversion that is a little wrong works a little worse, and nobody sees it. So every export is run
beside its source on given pictures and texts, and what differs is written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mclclip.data.decode import DecodeError, decode
from mclclip.models.encoder import Encoder

BOUND = 1e-5
"""Largest difference of unit features of equal inputs that an export may have, in fp32."""

_SHADES = 255.0
_NOTED = 2.0  # shades from which on an image is named
_NAMES = 10
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
_BATCH = 32

TEXTS = (
    "a photo of a dog",
    "two red cups on a table, seen from above",
    "A PHOTO OF A CAT!",
    "un café à côté de l'église",
    "it's 12:30 -- 50% off (today)",
    "rock &amp; roll",
    "  spaces   and\ttabs ",
    "写真 🐈",
    "",
    "word " * 100,
)
"""What tokenizers are compared on unless texts are given."""


@dataclass(frozen=True)
class Certificate:
    """Differences between an encoder and its export, as ``compare`` measures them.

    pixels           largest difference of the two image transforms in shades of 255
    pixels_of        images that differ by two shades and more, at most ten of them
    tokens           texts that become other tokens
    tokens_of        such texts, at most ten
    image_features   largest difference of unit features of the same pixels
    text_features    the same of the same tokens
    logits           largest difference of logits of the same pixels and tokens
    image_features_own_pixels   of images that each of the two has transformed itself
    """

    runtime: str
    num_images: int
    num_texts: int
    pixels: float
    pixels_of: list[str]
    tokens: int
    tokens_of: list[str]
    image_features: float
    text_features: float
    logits: float
    image_features_own_pixels: float
    bound: float = BOUND

    @property
    def holds(self) -> bool:
        """Whether features of equal inputs are equal up to the bound."""
        return max(self.image_features, self.text_features) <= self.bound

    def as_dict(self) -> dict[str, object]:
        """As it is written to ``certificate.json``."""
        return asdict(self)


def compare(
    own: Encoder, other: Encoder, runtime: str, images: dict[str, Image.Image], texts: Sequence[str]
) -> Certificate:
    """Runs both encoders on the images by name and on the texts, in fp32."""
    first, second = (
        torch.stack([encoder.preprocess_val(image) for image in images.values()])
        for encoder in (own, other)
    )
    if first.shape != second.shape:
        raise ValueError(
            f"the export's image processor gives pixels of shape {tuple(second.shape[1:])}, the "
            f"model takes {tuple(first.shape[1:])}"
        )
    std = _shades(own)
    moved = ((first - second).abs() * std).amax(dim=(1, 2, 3)) * _SHADES
    tokens = own.tokenizer([*texts])
    differing = [
        text
        for text, a, b in zip(texts, tokens, other.tokenizer([*texts]), strict=True)
        if _words(a) != _words(b)
    ]
    rows = [_features(encoder, first, tokens) for encoder in (own, other)]
    itself = _features(other, second, tokens[:1])[0]
    scales = (own.logit_scale, other.logit_scale)
    logits = [
        scale * pictures @ words.T for scale, (pictures, words) in zip(scales, rows, strict=True)
    ]
    return Certificate(
        runtime=runtime,
        num_images=len(images),
        num_texts=len(texts),
        pixels=round(float(moved.max()), 3),
        pixels_of=[n for n, m in zip(images, moved, strict=True) if m >= _NOTED][:_NAMES],
        tokens=len(differing),
        tokens_of=[text[:80] for text in differing[:_NAMES]],
        image_features=_largest(rows[0][0], rows[1][0]),
        text_features=_largest(rows[0][1], rows[1][1]),
        logits=_largest(*logits),
        image_features_own_pixels=_largest(rows[0][0], itself),
    )


def _shades(encoder: Encoder) -> Tensor:
    """[3, 1, 1]: how much one unit of each channel is in intensity, between 0 and 1."""
    dark, light = (
        encoder.preprocess_val(Image.new("RGB", (64, 64), (shade,) * 3)) for shade in (0, 255)
    )
    return 1.0 / (light - dark).mean(dim=(1, 2), keepdim=True)


def _words(tokens: Tensor) -> list[int]:
    """The tokens up to the end of the text, whatever fills the rest."""
    end = int(tokens.argmax())
    return [int(token) for token in tokens[: end + 1]]


def _features(encoder: Encoder, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    images, texts = (
        [encode(rows[start : start + _BATCH]).cpu() for start in range(0, len(rows), _BATCH)]
        for encode, rows in ((encoder.encode_image, pixels), (encoder.encode_text, tokens))
    )
    return torch.cat(images), torch.cat(texts)


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def read_images(folder: Path, most: int, max_image_pixels: int) -> dict[str, Image.Image]:
    """Up to ``most`` pictures below a folder, by name, spread over it.

    Raises FileNotFoundError where there are none and ValueError for one that cannot be decoded.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise FileNotFoundError(f"no pictures below {folder}: give a folder of .jpg or .png files")
    found = {}
    for path in paths[:: -(-len(paths) // most)]:
        try:
            image = decode(path.read_bytes(), max_image_pixels, reads_arrays=False)
        except DecodeError as error:
            raise ValueError(f"image {path} cannot be decoded ({error}): take it out") from None
        assert isinstance(image, Image.Image)
        found[str(path.relative_to(folder))] = image
    return found


def drawn_images() -> dict[str, Image.Image]:
    """Smooth pictures, noise and sharp edges in several shapes, the same on every machine."""
    random = np.random.default_rng(0)
    found = {}
    for height, width in ((224, 224), (300, 500), (640, 480), (50, 40), (1000, 333)):
        y, x = np.mgrid[0:height, 0:width]
        smooth = np.stack([x / width, y / height, (x + y) / (width + height)], axis=-1)
        edges = np.stack([(x // 7 + y // 5) % 2, (x // 16) % 2, (y // 3) % 2], axis=-1)
        noise = random.random((height, width, 3))
        for name, values in (("smooth", smooth), ("edges", edges), ("noise", noise)):
            pixels = (255 * values).astype(np.uint8)
            found[f"{name} {height}x{width}"] = Image.fromarray(pixels)
    return found
