"""Compares an export for another library with the encoder that it was made from.

A slightly wrong conversion works slightly worse, and nobody notices. So every export is run beside
its source on the same pictures and texts, and the differences are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mclclip.data.decode import MAX_IMAGE_PIXELS, DecodeError, decode
from mclclip.eval.images import SUFFIXES

BOUND = 1e-5
"""Largest difference of unit features of equal inputs that an export may have, in fp32; and the
largest relative one of logit scales, of which every number format keeps the bits of fp32."""

HALF_BOUND = 0.02
"""The same of features where weights are stored in fp16, which moves those of sound models by less
than 0.005: what is beyond it is damage, and not rounding."""

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
    "word " * 300,
)
"""Texts on which tokenizers are compared unless others are given."""


@dataclass(frozen=True)
class Certificate:
    """Differences between an encoder and its export in one runtime, as ``compare`` measures them.

    Fields that do not apply to a runtime are None: texts for an image tower, pixels if the runtime
    brings no transform.

    runtime          the library and its version, and what of it ran
    pixels           largest difference of the two image transforms in shades of 255
    pixels_of        images that differ by two shades and more, at most ten of them
    tokens           texts that become other tokens
    tokens_of        such texts, at most ten
    image_features   largest difference of unit features of the same pixels
    text_features    the same of the same tokens
    logit_scale      relative difference of the logit scales
    logits           largest difference of logits of the same pixels and tokens
    image_features_own_pixels   of images that each of the two has transformed itself
    bound            what features may differ by
    notes            what a user of the export has to know
    """

    runtime: str
    num_images: int
    num_texts: int = 0
    pixels: float | None = None
    pixels_of: list[str] = field(default_factory=list)
    tokens: int | None = None
    tokens_of: list[str] = field(default_factory=list)
    image_features: float = 0.0
    text_features: float | None = None
    logit_scale: float | None = None
    logits: float | None = None
    image_features_own_pixels: float | None = None
    bound: float = BOUND
    notes: list[str] = field(default_factory=list)

    @property
    def largest(self) -> float:
        """Largest difference of features of equal inputs."""
        # max() of a NaN and a number may be the number.
        largest = [self.image_features, self.text_features or 0.0]
        return max(largest) if all(value == value for value in largest) else float("inf")

    @property
    def holds(self) -> bool:
        """Returns True if features of equal inputs are equal up to the bound, and logit scales up
        to `BOUND`. NaN never is."""
        return self.largest <= self.bound and (self.logit_scale or 0.0) <= BOUND

    def difference(self) -> str:
        """Describes the largest differences and their bounds."""
        scales, bounds = "", f"{self.bound:g}"
        if self.logit_scale is not None:
            scales = f" (and logit scales by {self.logit_scale:.2g} of their value)"
            bounds += f" ({BOUND:g})"
        return (
            f"features in {self.runtime} differ by {self.largest:.2g}{scales}, wanted at most "
            f"{bounds}"
        )


@dataclass(frozen=True)
class Probes:
    """Pictures by name, and texts, on which an export is compared with its source."""

    images: Mapping[str, Image.Image]
    texts: Sequence[str]


def compare(
    source: Any,
    other: Any,
    runtime: str,
    probes: Probes,
    *,
    bound: float = BOUND,
    notes: Sequence[str] = (),
) -> Certificate:
    """Runs both encoders on the probes, in fp32.

    An encoder has `preprocess_val` and `encode_image` of `Encoder` (features may be a state of
    another shape), and unless it is an image tower alone `tokenizer`, `encode_text` and
    `logit_scale` too. Without any text, or with an image tower, image features of equal pixels are
    compared, and nothing else. Image transforms and tokenizers are compared unless `other` has
    taken over those of `source`. Raises ValueError for pixels of other shapes.
    """
    pixels = torch.stack([source.preprocess_val(image) for image in probes.images.values()])
    images = [_in_batches(encoder.encode_image, pixels) for encoder in (source, other)]
    values: dict[str, Any] = {"image_features": _largest(*images)}
    if probes.texts and all(hasattr(encoder, "encode_text") for encoder in (source, other)):
        tokens = source.tokenizer([*probes.texts])
        texts = [_in_batches(encoder.encode_text, tokens) for encoder in (source, other)]
        scales = (source.logit_scale, other.logit_scale)
        logits = [scale * a @ b.T for scale, a, b in zip(scales, images, texts, strict=True)]
        values |= {
            "num_texts": len(probes.texts),
            "text_features": _largest(*texts),
            "logit_scale": abs(scales[1] - scales[0]) / abs(scales[0]),
            "logits": _largest(*logits),
        }
        if other.preprocess_val is not source.preprocess_val:
            values |= _compare_pixels(source, other, probes.images, pixels)
            values |= _compare_tokens(source, other, probes.texts, tokens)
    return Certificate(runtime, len(pixels), bound=bound, notes=[*notes], **values)


def _compare_pixels(
    source: Any, other: Any, pictures: Mapping[str, Image.Image], first: Tensor
) -> dict[str, Any]:
    """The certificate's fields about image transforms; `first` are the pixels of `source`."""
    second = torch.stack([other.preprocess_val(image) for image in pictures.values()])
    if first.shape != second.shape:
        raise ValueError(
            f"the export's image processor gives pixels of shape {tuple(second.shape[1:])}, the "
            f"model takes {tuple(first.shape[1:])}"
        )
    dark, light = (
        source.preprocess_val(Image.new("RGB", (64, 64), (shade,) * 3)) for shade in (0, 255)
    )
    unit = (light - dark).mean(dim=(1, 2), keepdim=True)  # of each channel, from dark to light
    moved = ((first - second).abs() * (1.0 / unit)).amax(dim=(1, 2, 3)) * 255.0
    features = _in_batches(source.encode_image, first), _in_batches(other.encode_image, second)
    return {
        "pixels": round(float(moved.max()), 3),
        "pixels_of": [name for name, m in zip(pictures, moved, strict=True) if m >= 2.0][:10],
        "image_features_own_pixels": _largest(*features),
    }


def _compare_tokens(source: Any, other: Any, texts: Sequence[str], first: Tensor) -> dict[str, Any]:
    """The certificate's fields about tokenizers; `first` are the tokens of `source`."""
    reads_to_end = hasattr(source.tokenizer, "bpe_ranks")  # CLIP, whatever fills the rest
    differing = []
    for text, a, b in zip(texts, first, other.tokenizer([*texts]), strict=True):
        if reads_to_end:
            a, b = (ids[: int(ids.argmax()) + 1] for ids in (a, b))
        if not torch.equal(a, b):
            differing.append(text)
    return {"tokens": len(differing), "tokens_of": [text[:80] for text in differing[:10]]}


def _in_batches(encode: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Features of all rows. The last batch has one row: an export may not hold for one size only,
    as a graph does in which the number of rows became a constant."""
    cut = max(len(rows) - 1, 1)
    starts = [*range(0, cut, _BATCH), cut]
    parts = [rows[a:b] for a, b in zip(starts, [*starts[1:], len(rows)], strict=True)]
    return torch.cat([encode(part).cpu() for part in parts if len(part)])


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def read_probes(images: Path | None, texts: Path | None, num_images: int) -> Probes:
    """Up to ``num_images`` pictures below a folder, spread over it, and a text per line of a file;
    drawn pictures and ``TEXTS`` where these are None.

    Raises FileNotFoundError where there are none, and ValueError for a picture that cannot be
    decoded and for a file that is empty or no UTF-8.
    """
    lines: Sequence[str] = TEXTS
    if texts is not None:
        try:
            lines = texts.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{texts} is not UTF-8 text: {error}") from None
        if not lines:
            raise ValueError(f"{texts} is empty: give a text per line")
    if images is None:
        return Probes(draw_images(), lines)
    paths = sorted(path for path in images.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise FileNotFoundError(f"no pictures below {images}: give a folder of .jpg or .png files")
    pictures: dict[str, Any] = {}
    count = min(num_images, len(paths))
    for path in (paths[int(place)] for place in np.linspace(0, len(paths) - 1, count)):
        try:
            image = decode(path.read_bytes(), MAX_IMAGE_PIXELS, reads_arrays=False)
        except DecodeError as error:
            raise ValueError(f"image {path} cannot be decoded ({error}): take it out") from None
        pictures[str(path.relative_to(images))] = image
    return Probes(pictures, lines)


def draw_images() -> dict[str, Image.Image]:
    """Smooth pictures, noise and sharp edges in several shapes, the same on every machine."""
    random = np.random.default_rng(0)
    pictures = {}
    for height, width in ((224, 224), (300, 500), (640, 480), (50, 40), (1000, 333)):
        y, x = np.mgrid[0:height, 0:width]
        smooth = np.stack([x / width, y / height, (x + y) / (width + height)], axis=-1)
        edges = np.stack([(x // 7 + y // 5) % 2, (x // 16) % 2, (y // 3) % 2], axis=-1)
        noise = random.random((height, width, 3))
        for name, values in (("smooth", smooth), ("edges", edges), ("noise", noise)):
            pixels = (255 * values).astype(np.uint8)
            pictures[f"{name} {height}x{width}"] = Image.fromarray(pixels)
    return pictures
