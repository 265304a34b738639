"""JPEGs of about 300, 500 and 1,000 pixels, and three ways from their bytes to a training crop.

Real photographs are taken as they are where they have about the wanted size. There are none of
1,000 pixels among the small real data sets, so four of about 500 are put together in a square and
stored again: their detail, which decides what decoding costs, stays that of a photograph. Without
the data sets smoothed noise is rendered.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from importlib import util
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
from open_clip.transform import PreprocessCfg, image_transform_v2

from mclclip.data.decode import decode_image, decode_pixels
from mclclip.models.transforms import fast_transform
from tests.benchmarks import timing

LIMIT = 100_000_000
SIZE = 224
QUALITY = 90
OPEN_CLIP, EXACT, FAST = "open_clip's transform (PIL)", "mclclip, exact", "mclclip, fast"
MISSING = "simplejpeg is not installed: data.pixels=fast is not measured"


def sets_of(count: int) -> dict[str, list[bytes]]:
    """Sets of JPEGs by what they are, ``count`` of each at most."""
    if not timing.SHARED_DATA.is_dir():
        return {f"rendered, {side} px": rendered(count, side) for side in (300, 500, 1000)}
    small, medium = caltech()[:count], cc12m()
    return {
        f"Caltech-101, {_side(small)} px": small,
        f"CC12M, {_side(medium)} px": medium[:count],
        f"CC12M, four in a square, {_side(squares(medium, count))} px": squares(medium, count),
    }


def caltech() -> list[bytes]:
    """The first image of each category of Caltech-101."""
    folders = (timing.SHARED_DATA / "caltech101" / "101_ObjectCategories").glob("*/image_0001.jpg")
    return [path.read_bytes() for path in sorted(folders)]


@functools.cache
def cc12m(member: str = "jpg") -> list[bytes]:
    """The images of the CC12M shard, or other members of its samples."""
    shards = sorted(map(str, (timing.SHARED_DATA / "cc12m_sample").glob("*.tar")))
    return [sample[member] for sample in webdataset.WebDataset(shards, shardshuffle=False)]


def squares(images: Sequence[bytes], count: int) -> list[bytes]:
    """Pictures of 1,024 x 1,024 pixels, each of the middles of four images."""
    found = []
    for first in range(min(count, len(images))):
        square = Image.new("RGB", (1024, 1024))
        for number in range(4):
            with Image.open(io.BytesIO(images[(first + number) % len(images)])) as image:
                left, top = ((side - 512) // 2 for side in image.size)
                part = image.convert("RGB").crop((left, top, left + 512, top + 512))
            square.paste(part, (512 * (number % 2), 512 * (number // 2)))
        found.append(_stored(square))
    return found


def rendered(count: int, side: int) -> list[bytes]:
    """Smoothed noise with the edges of a few rectangles."""
    found, rng = [], np.random.default_rng(side)
    for _ in range(count):
        coarse = rng.integers(0, 256, (side // 8, side // 6, 3), np.uint8)
        image = Image.fromarray(coarse).resize((side, side * 3 // 4))
        for _ in range(8):
            left, top = rng.integers(0, side // 2, 2).tolist()
            colour = tuple(rng.integers(0, 256, 3).tolist())
            image.paste(colour, (left, top, left + side // 8, top + side // 8))
        found.append(_stored(image))
    return found


def _stored(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=QUALITY)
    return stream.getvalue()


def _side(images: Sequence[bytes]) -> int:
    """Mean side of the square of as many pixels."""
    sizes = [Image.open(io.BytesIO(data)).size for data in images]
    return round(float(np.mean([np.sqrt(width * height) for width, height in sizes])))


def ways() -> dict[str, Callable[[bytes], torch.Tensor]]:
    """From the bytes of a JPEG to a crop that goes into a batch."""
    transform = image_transform_v2(PreprocessCfg(size=SIZE), is_train=True)

    def open_clips(data: bytes) -> torch.Tensor:
        with Image.open(io.BytesIO(data)) as image:
            return _tensor(transform(image.convert("RGB")))

    found = {OPEN_CLIP: open_clips, EXACT: lambda data: _tensor(transform(_picture(data)))}
    if util.find_spec("simplejpeg") is not None:
        fast = fast_transform(transform)
        found[FAST] = lambda data: fast(decode_pixels(data, LIMIT))
    return found


def _picture(data: bytes) -> Image.Image:
    return decode_image(data, LIMIT)


def _tensor(found: Any) -> torch.Tensor:
    assert isinstance(found, torch.Tensor)
    return found


def differences(images: Sequence[bytes], draws: int) -> torch.Tensor:
    """|fast - open_clip's| of every value of ``draws`` crops of each image, of 255: int16."""
    settings = PreprocessCfg(size=SIZE, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    exact = image_transform_v2(settings, is_train=True)
    fast, found = fast_transform(exact), []
    for number, data in enumerate(images):
        for draw in range(draws):
            torch.manual_seed(draws * number + draw)
            with Image.open(io.BytesIO(data)) as image:
                wanted = exact(image.convert("RGB")).mul(255).round().to(torch.int16)
            torch.manual_seed(draws * number + draw)
            found.append(
                (fast(decode_pixels(data, LIMIT)).to(torch.int16) - wanted).abs().flatten()
            )
    return torch.cat(found)


def report(rounds: int, count: int) -> None:
    """Prints speeds and differences for every set of images."""
    for title, images in sets_of(count).items():
        variants: dict[str, Callable[[], object]] = {
            name: functools.partial(_all, way, images) for name, way in ways().items()
        }
        timings = timing.interleave(variants, rounds)
        rows = timings.rows(OPEN_CLIP, len(images))
        faster = [f"{1 / timings.cpu_ratio(name, OPEN_CLIP):.2f}" for name in variants]
        kilobytes = sum(map(len, images)) / len(images) / 1000
        timing.print_table(
            f"{title}: {len(images)} JPEGs of {kilobytes:.0f} kB to {SIZE} px; bytes to a crop",
            [*timing.headers("pixels", "samples"), "times as fast (CPU)"],
            [[*row, ratio] for row, ratio in zip(rows, faster, strict=True)],
        )
        if FAST not in variants:
            print(f"\n{MISSING}")
            continue
        found = differences(images, draws=4)
        shares = ", ".join(f"{int(n)}: {float((found == n).float().mean()):.4%}" for n in range(4))
        print(
            f"\ndifference to open_clip's pixels, of 255: at most {int(found.max())}, median "
            f"{int(found.median())}; shares {shares}"
        )


def _all(way: Callable[[bytes], torch.Tensor], images: Sequence[bytes]) -> None:
    for data in images:
        way(data)
