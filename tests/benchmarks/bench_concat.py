"""What the joined encoder costs: time, FLOPs and parameters beside one encoder and beside several,
and its time in each runtime that an export is for, beside what its operations say.

Stages are made as training makes them: one model whose unlocked image blocks, norm and projection
are moved a little, exported, joined by ``save_concat``, loaded by ``load_model``.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mclclip.export import certificate, convert
from mclclip.export.targets import hf as hf_target
from mclclip.export.targets import onnx as onnx_target
from mclclip.models import transformers_encoder
from mclclip.models.encoder import Encoder, join_image_features, load_model, save_concat
from mclclip.models.loading import load_towers
from tests.benchmarks import timing
from tests.unit.models.stages import save_stages

# The text tower takes no part: a small one keeps memory and files small.
SMALL_TEXT = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "reduced": {
        "embed_dim": 192,
        "vision_cfg": {"image_size": 96, "layers": 12, "width": 192, "patch_size": 16},
        "text_cfg": SMALL_TEXT,
    },
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


# --- runtimes ----------------------------------------------------------------------------------


def in_runtimes(folder: Path, export: Path, images: Tensor) -> dict[str, Callable[[], object]]:
    """What encodes the images by an export, by the name of the runtime; certified beforehand."""
    import transformers

    pictures = folder / "pictures"  # a single one, to be done with certificates sooner
    pictures.mkdir(exist_ok=True)
    certificate.drawn_images()["smooth 300x500"].save(pictures / "a.png")
    onnx = convert.run("onnx", export, folder / f"{export.name}_onnx", images=pictures)
    hf = convert.run("hf", export, folder / f"{export.name}_hf", images=pictures)
    own, graph = load_model(export), onnx_target.OnnxEncoder(onnx, load_model(export))
    joined = own.variant is not None
    with transformers_encoder.silent(transformers):
        stock = None if joined else transformers.CLIPModel.from_pretrained(hf).eval()
    model: Any = hf_target.load_stages(hf) if stock is None else stock

    def by_transformers() -> object:
        with torch.no_grad():
            return model.get_image_features(pixel_values=images)

    return {
        "mclclip (open_clip's towers)": lambda: own.encode_image(images),
        f"transformers {transformers.__version__}": by_transformers,
        "onnxruntime": lambda: graph.encode_image(images),
    }


def measure_runtimes(shape: str, stage_counts: Sequence[int], batch: int, rounds: int) -> None:
    """Prints the time of a concat in each runtime, relative to one encoder in the same runtime."""
    size = SHAPES[shape]["vision_cfg"]["image_size"]
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
    variants: dict[str, Callable[[], object]] = {}
    counted: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = load_towers(SHAPES[shape])
        num_blocks = model.num_blocks
        exports = save_stages(model, folder, max(stage_counts), image_blocks=UNLOCKED)
        del model
        for count in (1, *stage_counts):
            export = folder / f"stages_{count}"
            if count == 1:
                exports[0].rename(export)
                exports[0] = export
            else:
                save_concat(exports[:count], "stage_norm", export)
            found = in_runtimes(folder, export, images)
            counted[count] = gflops(found["mclclip (open_clip's towers)"])
            variants |= {f"{runtime}: {count}": encode for runtime, encode in found.items()}
        timings = timing.interleave(variants, rounds)
    rows = []
    for variant in variants:
        runtime, _, number = variant.rpartition(": ")
        count, one = int(number), f"{runtime}: 1"
        low, high = timings.spread(variant, one)
        rows.append(
            [
                runtime,
                number,
                timing.number(1000 * timings.wall_s(variant) / batch),
                timing.number(1000 * timings.cpu_s(variant) / batch),
                f"{timings.ratio(variant, one):.3f} ({low:.3f} to {high:.3f})",
                f"{timings.cpu_ratio(variant, one):.3f}",
                f"{counted[count] / counted[1]:.3f}",
                f"{1 + (count - 1) * UNLOCKED / num_blocks:.3f}",
            ]
        )
    timing.print_table(
        f"{shape}, {num_blocks} blocks, last {UNLOCKED} unlocked, {size} pixels, by runtime: batch "
        f"{batch}, fp32, ms per image, median of {rounds} rounds",
        ["runtime", "stages", "wall ms", "CPU ms", "wall ratio (quartiles)", "CPU ratio", "FLOP",
         "blocks"],
        sorted(rows),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Both shapes, or one; then the runtimes."""
    parser = timing.parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), help="one shape only")
    parser.add_argument("--runtimes", action="store_true", help="the table of the runtimes only")
    options = timing.parse(parser, arguments, shape="ViT-B-32")
    torch.set_num_threads(1)
    logging.getLogger("mclclip").setLevel(logging.ERROR)
    counts, batch = ((2,), 1) if options.short else ((2, 3, 4), 4)
    if options.shape in (None, "ViT-B-32") and not options.runtimes:
        measure("ViT-B-32", counts, batch, options.rounds)
    if options.shape in (None, "ViT-L-14") and not options.runtimes:
        measure("ViT-L-14", (4,), 1, options.rounds)
    needed = ("onnx", "onnxruntime", "transformers")
    if missing := [name for name in needed if util.find_spec(name) is None]:
        print(f"no table of the runtimes: {missing[0]} is not installed ('mclclip[export]')")
        return
    shapes = ["reduced"] if options.short else ["reduced", "ViT-B-32"]  # of L a graph exceeds 2 GB
    for shape in shapes:
        if not options.short and options.shape not in (None, shape):
            continue
        measure_runtimes(
            shape, counts[-1:] if shape == "ViT-B-32" else counts, batch, options.rounds
        )


if __name__ == "__main__":
    main()
