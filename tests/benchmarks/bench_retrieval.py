"""Ranks of retrieval beside the bare product in float32, at the size of the whole of Flickr30k.

Ranks are exact (products in float64, ties counted), and a bare product in float32 does less: it is
the time that the matrix of similarities costs alone, block by block as in ``rank_queries``. Some
queries of each direction are ranked among all candidates. Features are random around their image,
which makes more near ties than a trained encoder does. Memory is the peak above the features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mclclip.eval.features import CHUNK_BYTES, rank_queries
from tests.benchmarks import memory, timing

Floats = npt.NDArray[np.float32]
DIM = 768


def features(num_images: int, num_texts: int) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Unit images and texts, and the image of each text."""
    rng = np.random.default_rng(0)
    images = unit(rng.standard_normal((num_images, DIM), dtype=np.float32))
    owners = np.arange(num_texts) % num_images
    texts = rng.standard_normal((num_texts, DIM), dtype=np.float32)
    texts += 2.2 * images[owners]
    return images, unit(texts), owners


def unit(rows: Floats) -> Floats:
    """The rows at length 1, in place."""
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def bare(queries: Floats, candidates: Floats) -> None:
    """All products in float32, block by block; nothing is kept."""
    step = max(1, CHUNK_BYTES // (4 * len(candidates)))
    left, right = torch.from_numpy(queries), torch.from_numpy(candidates)
    block = torch.empty(min(step, len(left)), len(right))
    for start in range(0, len(left), step):
        rows = left[start : start + step]
        torch.mm(rows, right.T, out=block[: len(rows)])


def sides(num_images: int, num_texts: int) -> dict[str, tuple[Any, Any, Any, Any]]:
    """The arguments of ``rank_queries`` for both directions."""
    images, texts, owners = features(num_images, num_texts)
    every = np.arange(num_images)
    return {
        "image to text": (images, every, texts, owners),
        "text to image": (texts, owners, images, every),
    }


def first(side: tuple[Any, Any, Any, Any], num_queries: int) -> tuple[Any, Any, Any, Any]:
    """A direction with its first queries only."""
    queries, asked, *others = side
    return (queries[:num_queries], asked[:num_queries], *others)


def peak(num_images: int, num_texts: int, direction: str, num_queries: int) -> float:
    """MiB above the features in one direction."""
    side = first(sides(num_images, num_texts)[direction], num_queries)
    return memory.peak_mib(lambda: rank_queries(*side))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table per direction."""
    parser = timing.parser(__doc__)
    parser.add_argument("--images", type=int, default=31_783)
    parser.add_argument("--texts", type=int, default=158_915)
    parser.add_argument("--queries", type=int, default=2000, help="ranked per direction")
    args = timing.parse(parser, arguments, images=300, texts=1500, queries=200)
    for direction, side in sides(args.images, args.texts).items():
        asked = first(side, args.queries)
        variants: dict[str, Callable[[], object]] = {
            "bare product": lambda asked=asked: bare(asked[0], asked[2]),  # type: ignore[misc]
            "ranks": lambda asked=asked: rank_queries(*asked),  # type: ignore[misc]
        }
        found = timing.interleave(variants, args.rounds)
        mib = memory.in_fresh_process(peak, args.images, args.texts, direction, args.queries)
        timing.print_table(
            f"{direction}: {len(asked[0]):,} queries, {len(asked[2]):,} candidates, width {DIM}; "
            f"ranks take {mib:,.0f} MiB above the features",
            timing.headers("variant", "queries"),
            found.rows("bare product", len(asked[0])),
        )


if __name__ == "__main__":
    main()
