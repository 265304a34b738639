"""Holds an export for another library against the encoder that it was made from.

A conversion that is a little wrong works a little worse, and nobody sees it. So every export is run
beside its source on given pictures and texts, and what differs is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mclclip.data.decode import DecodeError, decode
from mclclip.eval.images import SUFFIXES
from mclclip.models.encoder import Encoder

BOUND = 1e-5
"""Largest difference of unit features of equal inputs that an export may have, in fp32; and the
largest relative one of logit scales, of which every number format keeps the bits of fp32."""

HALF_BOUND = 0.02
"""The same of features where weights are stored in fp16, which moves those of sound models by less
than 0.005: what is beyond it is damage, and not rounding."""

_SHADES = 255.0
_NOTED = 2.0  # shades from which on an image is named
_NAMES = 10
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
    """Differences between an encoder and its export in one runtime, as ``compare`` measures them.

    What a runtime does not have is None: texts of an image tower, pixels where it brings no
    transform of its own.

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
        found = [self.image_features, self.text_features or 0.0]
        return max(found) if all(value == value for value in found) else float("inf")

    @property
    def holds(self) -> bool:
        """Whether features of equal inputs are equal up to the bound, and logit scales up to
        `BOUND`. NaN never is."""
        scale = 0.0 if self.logit_scale is None else self.logit_scale
        return self.largest <= self.bound and scale <= BOUND

    def as_dict(self) -> dict[str, object]:
        """As it is written to ``certificate.json``."""
        return asdict(self)


class Half(Protocol):
    """An encoder's image half, which is all that some exports have."""

    def encode_image(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> unit [B, E], or a state of other shape."""


class Runtime(Half, Protocol):
    """An encoder as a runtime of another library has it; see `Encoder`."""

    logit_scale: float
    tokenizer: Any
    preprocess_val: Any

    def encode_text(self, tokens: Tensor) -> Tensor:
        """[B, context] int64 -> unit [B, E]."""


def compare_images(
    own: Half,
    other: Half,
    runtime: str,
    pixels: dict[str, Tensor],
    bound: float = BOUND,
    notes: Sequence[str] = (),
) -> Certificate:
    """Runs two image halves on the same pixels [3, H, W] by name, in fp32; nothing else."""
    rows = torch.stack([*pixels.values()])
    found = _largest(*(_in_batches(half.encode_image, rows) for half in (own, other)))
    return Certificate(runtime, len(pixels), image_features=found, bound=bound, notes=[*notes])


def compare(
    own: Encoder,
    other: Runtime,
    runtime: str,
    images: dict[str, Image.Image],
    texts: Sequence[str],
    bound: float = BOUND,
    own_transforms: bool = True,
    notes: Sequence[str] = (),
) -> Certificate:
    """Runs both encoders on the images by name and on the texts, in fp32.

    ``own_transforms``: whether ``other`` brings an image transform and a tokenizer of its own,
    which are compared too. Without any text the image halves are compared alone. Raises ValueError
    for pixels of other shapes.
    """
    first = torch.stack([own.preprocess_val(image) for image in images.values()])
    if not texts:
        named = dict(zip(images, first, strict=True))
        return compare_images(own, other, runtime, named, bound, notes)
    tokens = own.tokenizer([*texts])
    rows = [_features(encoder, first, tokens) for encoder in (own, other)]
    scales = (own.logit_scale, other.logit_scale)
    logits = [
        scale * pictures @ words.T for scale, (pictures, words) in zip(scales, rows, strict=True)
    ]
    transforms = _transforms(own, other, images, texts, first, tokens) if own_transforms else {}
    return Certificate(
        runtime=runtime,
        num_images=len(images),
        num_texts=len(texts),
        image_features=_largest(rows[0][0], rows[1][0]),
        text_features=_largest(rows[0][1], rows[1][1]),
        logit_scale=abs(scales[1] - scales[0]) / abs(scales[0]),
        logits=_largest(*logits),
        bound=bound,
        notes=[*notes],
        **transforms,
    )


def _transforms(
    own: Encoder,
    other: Runtime,
    images: dict[str, Image.Image],
    texts: Sequence[str],
    first: Tensor,
    tokens: Tensor,
) -> dict[str, Any]:
    """The fields of a certificate that are about the transforms of ``other``."""
    second = torch.stack([other.preprocess_val(image) for image in images.values()])
    if first.shape != second.shape:
        raise ValueError(
            f"the export's image processor gives pixels of shape {tuple(second.shape[1:])}, the "
            f"model takes {tuple(first.shape[1:])}"
        )
    moved = ((first - second).abs() * _shades(own)).amax(dim=(1, 2, 3)) * _SHADES
    padded_otherwise = hasattr(own.tokenizer, "bpe_ranks")  # CLIP reads a text up to its end
    differing = [
        text
        for text, a, b in zip(texts, tokens, other.tokenizer([*texts]), strict=True)
        if not torch.equal(a, b) and not (padded_otherwise and _words(a) == _words(b))
    ]
    features = [
        _in_batches(encoder.encode_image, pixels)
        for encoder, pixels in ((own, first), (other, second))
    ]
    return {
        "pixels": round(float(moved.max()), 3),
        "pixels_of": [n for n, m in zip(images, moved, strict=True) if m >= _NOTED][:_NAMES],
        "tokens": len(differing),
        "tokens_of": [text[:80] for text in differing[:_NAMES]],
        "image_features_own_pixels": _largest(*features),
    }


def _shades(encoder: Encoder) -> Tensor:
    """[3, 1, 1]: how much one unit of each channel is in intensity, between 0 and 1."""
    dark, light = (
        encoder.preprocess_val(Image.new("RGB", (64, 64), (shade,) * 3)) for shade in (0, 255)
    )
    return 1.0 / (light - dark).mean(dim=(1, 2), keepdim=True)


def _words(tokens: Tensor) -> list[int]:
    """CLIP's tokens up to the end of the text, whatever fills the rest."""
    end = int(tokens.argmax())
    return [int(token) for token in tokens[: end + 1]]


def _features(encoder: Runtime, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return _in_batches(encoder.encode_image, pixels), _in_batches(encoder.encode_text, tokens)


def _in_batches(encode: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Features of all rows. The last batch has one row: an export may not hold for one size only,
    as a graph does in which the number of rows became a constant."""
    cut = max(len(rows) - 1, 1)
    starts = [*range(0, cut, _BATCH), cut]
    parts = [rows[a:b] for a, b in zip(starts, [*starts[1:], len(rows)], strict=True)]
    return torch.cat([encode(part).cpu() for part in parts if len(part)])


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def read_images(folder: Path, most: int, max_image_pixels: int) -> dict[str, Image.Image]:
    """Up to ``most`` pictures below a folder, by name, spread over it.

    Raises FileNotFoundError where there are none and ValueError for one that cannot be decoded.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
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
