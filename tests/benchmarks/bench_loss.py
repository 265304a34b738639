"""The contrastive loss alone: the whole similarity matrix beside the product's tiles.

Both compute forward and backward of one process's global batch, in both directions, in fp32, with
the group mask. Peak memory is measured in a fresh process for each: the largest resident set
during one forward and backward, above what was resident when the features lay ready; it includes
the features' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.info_nce import InfoNCE
from tests.benchmarks import memory, timing

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], dict[str, Tensor]]
SIZES = (256, 1024, 4096, 8192)
DIM = 512
WHOLE = "whole matrix"


def whole_matrix(
    image: Tensor, text: Tensor, scale: Tensor, labels: Tensor, sample_id: Tensor
) -> dict[str, Tensor]:
    """The same loss, plainly."""
    groups, rows = labels[:, 0], torch.arange(len(image))
    keep = (groups[:, None] == groups) & (sample_id[:, None] != sample_id)
    keep[rows, rows] = True

    def direction(logits: Tensor) -> Tensor:
        denominator = logits.masked_fill(~keep, float("-inf")).logsumexp(dim=1)
        return (denominator - logits.diagonal()).mean()

    loss = direction(scale * image @ text.T) + direction(scale * text @ image.T)
    return {"loss": loss / 2, "rows_without_negatives": (keep.sum(dim=1) == 1).sum()}


def inputs(size: int, dim: int) -> list[Tensor]:
    """Unit features with gradient, logit scale, one group, and a sample that appears twice."""
    rng = torch.Generator().manual_seed(0)
    image, text = (functional.normalize(torch.randn(size, dim, generator=rng)) for _ in "it")
    scale, sample_id = torch.tensor(20.0), torch.arange(size)
    sample_id[-1] = 0
    trained = [tensor.requires_grad_() for tensor in (image, text, scale)]
    return [*trained, torch.zeros(size, 1, dtype=torch.int64), sample_id]


def step(loss: Loss, given: Sequence[Tensor]) -> list[Tensor]:
    """Forward and backward; the loss and its gradients."""
    output = loss(*given)
    return [output["loss"].detach(), *torch.autograd.grad(output["loss"], given[:3])]


def in_tiles(
    tile: int, image: Tensor, text: Tensor, scale: Tensor, labels: Tensor, sample_id: Tensor
) -> dict[str, Tensor]:
    """The product's loss."""
    parts: dict[str, Tensor] = InfoNCE(tile=tile)(
        image_features=image,
        text_features=text,
        logit_scale=scale,
        labels=labels,
        sample_id=sample_id,
    )
    return parts


def ways(tiles: Sequence[int]) -> dict[str, Loss]:
    """What is compared."""
    found: dict[str, Loss] = {WHOLE: whole_matrix}
    return found | {f"tiles of {tile:,}": partial(in_tiles, tile) for tile in tiles}


def deviation(loss: Loss, given: Sequence[Tensor]) -> float:
    """Largest difference from the whole matrix of the loss and gradients, of their norm."""
    pairs = zip(step(loss, given), step(whole_matrix, given), strict=True)
    return max(float((mine - theirs).norm() / theirs.norm()) for mine, theirs in pairs)


# --- memory ----------------------------------------------------------------------------------


def peak_here(name: str, tiles: Sequence[int], size: int, dim: int) -> float:
    """MiB of one step, in this process, which should be a fresh one."""
    torch.set_num_threads(1)
    loss = ways(tiles)[name]
    given = inputs(size, dim)
    step(loss, inputs(32, dim))  # libraries and their buffers are loaded at first use
    return memory.peak_mib(lambda: step(loss, given))


# --- the table -------------------------------------------------------------------------------


def measure(size: int, dim: int, tiles: Sequence[int], rounds: int) -> None:
    """The table of one global batch."""
    given = inputs(size, dim)
    compared = ways(tiles)
    timings = timing.interleave(
        {name: partial(step, loss, given) for name, loss in compared.items()}, rounds
    )
    rows = [
        [
            *row,
            timing.number(memory.in_fresh_process(peak_here, row[0], tiles, size, dim)),
            f"{deviation(compared[row[0]], given):.1e}",
        ]
        for row in timings.rows(WHOLE, size)
    ]
    timing.print_table(
        f"loss of {size:,} x {dim} features, forward and backward",
        [*timing.headers("way", "samples"), "peak MiB", "deviation"],
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Small to full size."""
    parser = timing.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="SAMPLES")
    parser.add_argument("--tiles", type=int, nargs="+", default=[InfoNCE().tile])
    parser.add_argument("--dim", type=int, default=DIM)
    options = timing.parse(parser, arguments, sizes=[256])
    torch.set_num_threads(1)
    for size in options.sizes:
        measure(size, options.dim, options.tiles, options.rounds)


if __name__ == "__main__":
    main()
