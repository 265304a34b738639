"""What the joined encoder costs: time, FLOPs and parameters beside one encoder and beside several.

Stages are made as training makes them: one model whose unlocked image blocks, norm and projection
are moved a little, exported, joined by ``save_concat``, loaded by ``load_model``.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mclclip.models.encoder import Encoder, join_image_features, load_model, save_concat
from mclclip.models.loading import load_towers
from tests.benchmarks import timing
from tests.unit.models.stages import save_stages

# The text tower takes no part: a small one keeps memory and files small.
SMALL_TEXT = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "ViT-B-32": {
        "embed_dim": 512,
        "vision_cfg": {"image_size": 224, "layers": 12, "width": 768, "patch_size": 32},
        "text_cfg": SMALL_TEXT,
    },
    "ViT-L-14": {
        "embed_dim": 768,
        "vision_cfg": {"image_size": 224, "layers": 24, "width": 1024, "patch_size": 14},
        "text_cfg": SMALL_TEXT,
    },
}
UNLOCKED = 6


def encode_separately(encoders: Sequence[Encoder], images: Tensor) -> Tensor:
    """What a user does without the shared trunk: every stage's encoder, then joined."""
    return join_image_features([encoder.encode_image(images) for encoder in encoders], "stage_norm")


def gflops(encode: Callable[[], object]) -> float:
    """Counted by torch, 2 per multiply and add; GFLOP of one call."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused attention is not counted
    try:
        with FlopCounterMode(display=False) as counter:
            encode()
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return float(counter.get_total_flops()) / 1e9


def num_parameters(modules: Sequence[torch.nn.Module]) -> int:
    """Parameters of image towers, shared ones counted once."""
    parameters = {id(p): p.numel() for module in modules for p in module.parameters()}
    return sum(parameters.values())


def image_towers(encoder: Encoder) -> list[torch.nn.Module]:
    """The image towers of all stages."""
    return [stage.get_submodule("clip.visual") for stage in encoder.stages]


def measure(shape: str, stage_counts: Sequence[int], batch: int, rounds: int) -> None:
    """Prints the table of one model shape."""
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        model = load_towers(SHAPES[shape])
        num_blocks = model.num_blocks
        exports = save_stages(model, Path(folder), max(stage_counts), image_blocks=UNLOCKED)
        del model
        separate: list[Encoder] = [load_model(path) for path in exports]
        joined = {}
        for count in stage_counts:
            target = Path(folder) / f"concat_{count}"
            save_concat(exports[:count], "stage_norm", target)
            joined[count] = load_model(target)
    variants: dict[str, Callable[[], object]] = {
        "one encoder": lambda: separate[0].encode_image(images)
    }
    work, parameters = {"one encoder": 1.0}, {"one encoder": 1}
    for count, encoder in joined.items():
        assert encoder.num_trunk_blocks == num_blocks - UNLOCKED
        some = separate[:count]
        torch.testing.assert_close(
            encoder.encode_image(images), encode_separately(some, images), atol=1e-5, rtol=0
        )
        shared, apart = f"concat of {count}", f"{count} separate"
        variants[shared] = lambda encoder=encoder: encoder.encode_image(images)  # type: ignore[misc]
        variants[apart] = lambda some=some: encode_separately(some, images)  # type: ignore[misc]
        work[shared] = 1 + (count - 1) * UNLOCKED / num_blocks
        work[apart] = float(count)
        one = num_parameters(image_towers(encoder)[:1])
        parameters["one encoder"] = one
        parameters[shared], parameters[apart] = num_parameters(image_towers(encoder)), count * one
    _print(shape, num_blocks, batch, variants, work, parameters, rounds)


def _print(
    shape: str,
    num_blocks: int,
    batch: int,
    variants: dict[str, Callable[[], object]],
    work: dict[str, float],
    parameters: dict[str, int],
    rounds: int,
) -> None:
    title = f"{shape}, {num_blocks} blocks, last {UNLOCKED} unlocked"
    first = "one encoder"
    # Counting runs every variant once: it is the warm-up.
    counted = {name: gflops(encode) / batch for name, encode in variants.items()}
    timings = timing.interleave(variants, rounds, warm_ups=0)
    timing.print_table(
        f"{title}: batch {batch}, fp32, median of {rounds} rounds",
        timing.headers("image tower", "images"),
        timings.rows(first, batch),
    )
    timing.print_table(
        f"{title}: counted",
        ["image tower", "blocks", "GFLOP per image", "ratio", "M parameters", "ratio"],
        [
            [
                name,
                f"{work[name]:.3f}",
                f"{counted[name]:.2f}",
                f"{counted[name] / counted[first]:.3f}",
                f"{parameters[name] / 1e6:.1f}",
                f"{parameters[name] / parameters[first]:.3f}",
            ]
            for name in variants
        ],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Both shapes, or one."""
    parser = timing.parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), help="one shape only")
    options = timing.parse(parser, arguments, shape="ViT-B-32")
    torch.set_num_threads(1)
    logging.getLogger("mclclip").setLevel(logging.ERROR)
    counts, batch = ((2,), 1) if options.short else ((2, 3, 4), 4)
    if options.shape in (None, "ViT-B-32"):
        measure("ViT-B-32", counts, batch, options.rounds)
    if options.shape in (None, "ViT-L-14"):
        measure("ViT-L-14", (4,), 1, options.rounds)


if __name__ == "__main__":
    main()
