"""Compares a model that was converted for another library with its source.

A slightly wrong conversion works slightly worse, and nobody notices. So every converted model is
run beside its source on the same pictures and texts, and the differences are recorded.
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
from mclclip.data.text_rows import TextRows
from mclclip.eval.images import SUFFIXES

BOUND = 1e-5
"""In fp32, the largest allowed difference of unit features of equal inputs. In every format, the
largest allowed relative difference of logit scales, which are always stored in fp32."""

BOUNDS = {"fp32": BOUND, "fp16": 0.02, "int8": 0.32}
"""The largest allowed difference of features by the number format in which weights are stored.
Rounding to fp16 changes features of sound models by less than 0.005, so more than 0.02 is damage.
The bound of int8 follows from `LEAST_COSINE`, which is what limits it."""

LEAST_COSINE = 0.95
"""The smallest allowed cosine of a feature with that of the source, in every number format. Weights
in int8 gave 0.998 and more with ViT-B-32 and MobileNetV2."""

_BATCH = 32

TEXTS = (
    "a photo of a dog",
    "two red cups on a table, seen from above",
    "A PHOTO OF A CAT!",
    "un café à côté de l'église",
    "it's 12:30 -- 50% off (today)",
    "rock &amp; roll",
    "the \u201cbest\u201d dog\u2019s caf\u00e9",  # curly quotes
    "\ufb01ne \uff37\uff29\uff24\uff25 letters",  # a ligature, full-width letters
    "  spaces   and\ttabs ",
    "写真 🐈",
    "",
    "word " * 100,
    "word " * 300,
)
"""Texts on which encoders are compared if the user gives none."""


@dataclass(frozen=True)
class Certificate:
    """Differences between an encoder and its export in one runtime, as ``compare`` measures them.

    Fields that do not apply to a runtime are None: those of texts for an image tower, those of
    pixels if the runtime has no image transform.

    runtime          the library, its version, and which of its classes ran
    pixels           largest difference of the two image transforms in shades of 255
    pixels_of        names of at most ten images that differ by two shades or more
    tokens           number of texts that become other tokens
    tokens_of        at most ten of these texts
    image_features   largest difference of unit features, given the same pixels
    text_features    largest difference of unit features, given the same tokens, and also if each
                     encoder reads the texts itself and makes the same tokens of them
    text_features_own_tokens   largest difference of features if each encoder reads the texts itself
    logit_scale      relative difference of the logit scales
    logits           largest difference of logits, given the same pixels and tokens
    image_features_own_pixels   largest difference of features if each encoder transforms the images
                                itself
    cosine           smallest cosine of features of the source and of the export, given the same
                     pixels or tokens
    bound            largest allowed difference of `image_features` and `text_features`
    notes            sentences that a user of the export has to know
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
    text_features_own_tokens: float | None = None
    logit_scale: float | None = None
    logits: float | None = None
    image_features_own_pixels: float | None = None
    cosine: float = 1.0
    bound: float = BOUND
    notes: list[str] = field(default_factory=list)

    @property
    def largest(self) -> float:
        """Largest difference of features of equal inputs."""
        # max() may ignore a NaN.
        largest = [self.image_features, self.text_features or 0.0]
        return max(largest) if all(value == value for value in largest) else float("inf")

    @property
    def holds(self) -> bool:
        """True if features of equal inputs differ by at most the bound and have a cosine of at
        least `LEAST_COSINE`, and logit scales differ by at most `BOUND`. NaN never does."""
        near = self.largest <= self.bound and self.cosine >= LEAST_COSINE
        return near and (self.logit_scale or 0.0) <= BOUND

    def difference(self) -> str:
        """Describes the largest differences and their bounds, for messages."""
        scales, bounds = "", f"{self.bound:g}"
        if self.logit_scale is not None:
            scales = f" (and logit scales by {self.logit_scale:.2g} of their value)"
            bounds += f" ({BOUND:g})"
        low = ""
        if not self.cosine >= LEAST_COSINE:
            low = f"; the lowest cosine is {self.cosine:.3f}, wanted at least {LEAST_COSINE:g}"
        return (
            f"features in {self.runtime} differ by {self.largest:.2g}{scales}, wanted at most "
            f"{bounds}{low}"
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
    """Runs the encoders `source` and `other` on the probes, in fp32, and returns the differences.

    Both have `preprocess_val` and `encode_image` as `Encoder` does (features may have any shape)
    and, if they have a text tower, `tokenizer`, `encode_text` (of strings and of tokens) and
    `logit_scale`. If one has none, or there are no texts, only image features of equal pixels are
    compared. Image transforms and tokenizers are compared unless `other` uses those of `source`.
    """
    pixels = torch.stack([source.preprocess_val(image) for image in probes.images.values()])
    images = [_in_batches(encoder.encode_image, pixels) for encoder in (source, other)]
    values: dict[str, Any] = {"image_features": _largest(*images), "cosine": _cosine(*images)}
    if probes.texts and all(hasattr(encoder, "encode_text") for encoder in (source, other)):
        rows = source.tokenizer if isinstance(source.tokenizer, TextRows) else None
        if rows is not None:  # drawn rows stand for the texts: any row is as good
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randn(len(probes.texts), rows.width, generator=generator)
        else:
            tokens = source.tokenizer([*probes.texts])
        texts = [_in_batches(encoder.encode_text, tokens) for encoder in (source, other)]
        scales = (source.logit_scale, other.logit_scale)
        logits = [scale * a @ b.T for scale, a, b in zip(scales, images, texts, strict=True)]
        if rows is None and other.tokenizer is not source.tokenizer:
            differs = _other_tokens(source, other, probes.texts, tokens)
            read = [_in_batches(e.encode_text, [*probes.texts]) for e in (source, other)]
            texts = [torch.cat([a, b[~differs]]) for a, b in zip(texts, read, strict=True)]
            names = [text[:80] for text, d in zip(probes.texts, differs, strict=True) if d]
            values |= {"tokens": len(names), "tokens_of": names[:10]}
            values["text_features_own_tokens"] = _largest(*read)
        values |= {
            "num_texts": len(probes.texts),
            "text_features": _largest(*texts),
            "logit_scale": abs(scales[1] - scales[0]) / abs(scales[0]),
            "logits": _largest(*logits),
            "cosine": min(values["cosine"], _cosine(*texts)),
        }
        if other.preprocess_val is not source.preprocess_val:
            values |= _compare_pixels(source, other, probes.images, pixels)
    return Certificate(runtime, len(pixels), bound=bound, notes=[*notes], **values)


def _compare_pixels(
    source: Any, other: Any, pictures: Mapping[str, Image.Image], first: Tensor
) -> dict[str, Any]:
    """Returns a certificate's fields about image transforms; `first` are the pixels of `source`."""
    second = torch.stack([other.preprocess_val(image) for image in pictures.values()])
    dark, light = (
        source.preprocess_val(Image.new("RGB", (64, 64), (shade,) * 3)) for shade in (0, 255)
    )
    unit = (light - dark).mean(dim=(1, 2), keepdim=True)  # 255 shades, for each channel
    moved = ((first - second).abs() * (1.0 / unit)).amax(dim=(1, 2, 3)) * 255.0
    features = _in_batches(source.encode_image, first), _in_batches(other.encode_image, second)
    return {
        "pixels": round(float(moved.max()), 3),
        "pixels_of": [name for name, m in zip(pictures, moved, strict=True) if m >= 2.0][:10],
        "image_features_own_pixels": _largest(*features),
    }


def _other_tokens(source: Any, other: Any, texts: Sequence[str], first: Tensor) -> Tensor:
    """Returns which texts become other tokens, bool [N]; `first` are the tokens of `source`."""
    reads_to_end = hasattr(source.tokenizer, "bpe_ranks")  # CLIP ignores tokens after the end
    differs = []
    for a, b in zip(first, other.tokenizer([*texts]), strict=True):
        if reads_to_end:
            a, b = (ids[: int(ids.argmax()) + 1] for ids in (a, b))
        differs.append(not torch.equal(a, b))
    return torch.tensor(differs)


def _in_batches(encode: Callable[[Any], Any], rows: Any) -> Tensor:
    """Returns the features of all rows, or texts. The last batch has one row, since an export must
    work for several batch sizes; in a wrong graph the number of rows would be a constant."""
    cut = max(len(rows) - 1, 1)
    starts = [*range(0, cut, _BATCH), cut]
    parts = [rows[a:b] for a, b in zip(starts, [*starts[1:], len(rows)], strict=True)]
    return torch.cat([torch.as_tensor(encode(part)).cpu() for part in parts if len(part)])


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _cosine(a: Tensor, b: Tensor) -> float:
    """Returns the smallest cosine of two features in the same place."""
    return float(torch.cosine_similarity(a.double(), b.double(), dim=-1).min())


def read_probes(images: Path | None, texts: Path | None, num_images: int) -> Probes:
    """Reads up to ``num_images`` pictures, spread over a folder, and a text file's lines.

    Without a folder the pictures are those of ``draw_images``, and without a file the texts are
    ``TEXTS``. Raises FileNotFoundError if the folder has no pictures, and ValueError for a picture
    that cannot be decoded and for a file that is empty or no UTF-8.
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
    """Draws smooth pictures, noise and sharp edges in several sizes, the same on every machine."""
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
