"""Figures of the embedding pass: the image tower as the verb runs it, and the verb's whole pass."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mclclip.config import Config, from_tree
from mclclip.data.loader import run_ahead
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import TarDataset
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.models.loading import load_towers
from mclclip.models.memory import StepMeter
from mclclip.models.model import Model, unit
from mclclip.models.transforms import defer_normalization
from mclclip.ranks.process_group import Context
from mclclip.verbs import index
from mclclip.verbs.embed_passes import forward, image_passes
from tests import tiny
from tests.gpu.checks import Where
from tests.gpu.figures import PEAKS, Row, figure, in_turn

PICTURES = 256  # different ones, which shards repeat


def options(where: Where, shards: Path, precision: str, compiled: str) -> Config:
    """The options of a pass; every core but one decodes pictures."""
    workers = where.size(max((os.cpu_count() or 2) - 1, 1), 1)
    tree = {
        "run_dir": str(where.folder / "run"),
        "device": where.device.type,
        "data": {"sources": {"bench": {"shards": f"{shards}/*.tar"}}, "num_workers": workers},
        "model": {"name": "ViT-L-14" if where.on_gpu else tiny.MODEL, "pretrained": None},
        "embed": {
            "batch_size": where.size(512, 8), "precision": precision, "compile": compiled,
        },
    }  # fmt: skip
    return from_tree(tree)


def write_pictures(folder: Path, count: int) -> None:
    """Writes ``count`` JPEGs of 320 x 256 smooth pixels in shards of 2,048."""
    random, pictures = np.random.default_rng(0), []
    for _ in range(min(PICTURES, count)):
        coarse = Image.fromarray(random.integers(0, 256, (16, 20, 3), np.uint8))
        file = io.BytesIO()
        coarse.resize((320, 256)).save(file, format="JPEG", quality=90)
        pictures.append(file.getvalue())
    repeated = itertools.islice(itertools.cycle(pictures), count)
    samples = (PackedSample(f"{n:07d}", data, "jpg", []) for n, data in enumerate(repeated))
    write_shards(samples, folder, 2048)


@figure("embedding: images per second", limit_s=300.0)
def embedding(where: Where) -> Iterator[Row]:
    """Forward and unit length of pixels that lie in pinned memory as uint8, as a loader leaves
    them; and the pass from JPEGs in shards to rows in main memory. Compiling is not counted."""
    count, num_batches = where.size(24_576, 32), where.size(6, 3)
    write_pictures(where.folder / "shards", count)
    context = Context(device=where.device)
    name = torch.cuda.get_device_name(where.device) if where.on_gpu else ""
    promised = next((peak for key, peak in PEAKS.items() if key in name), None)
    first_s, flop = 0.0, 0
    for precision, compiled in (("bf16", "none"), ("bf16", "model"), ("fp32", "none")):
        config = options(where, where.folder / "shards", precision, compiled)
        samples = index.run(config, context)
        model = load_towers(config.model.name, seed=0).to(where.device).eval()
        if not flop:
            with torch.no_grad(), StepMeter() as meter:
                model.encode_image(torch.zeros(1, *model.image_shape, device=where.device))
            flop = meter.operations
        whole = _whole_pass(config, context, model, samples)
        pixels = partial(_pixels, config, context, model, num_batches)
        variants = {"pixels in pinned memory": (pixels, num_batches * config.embed.batch_size)}
        if precision == "bf16":
            variants["JPEGs in shards"] = whole, count
        for title, (work, images) in variants.items():
            took = in_turn({title: work}, where.device, where.size(2, 1))[title] / images
            first_s = first_s or took
            per_s = flop / took / 1e12
            share = f"MFU {per_s / promised:.1%} of {promised:.0f}, " if promised else ""
            how = f"{precision}, compiled" if compiled == "model" else precision
            yield Row(
                f"batch {config.embed.batch_size}, {how}: {title}", 1 / took, "images/s",
                took / first_s, f"{share}{per_s:.1f} TFLOP/s",
            )  # fmt: skip


def _encode(config: Config, context: Context, model: Model, images: Tensor) -> Tensor:
    return unit(forward(config, context, partial(model.encode_image, images)))


def _whole_pass(
    config: Config, context: Context, model: Model, samples: SampleIndex
) -> Callable[[], None]:
    source = TarDataset(samples, config.data, defer_normalization(model.preprocess_val))
    encode = partial(_encode, config, context, model)
    passes = image_passes(config, context, source, model, encode, lambda rows: None)

    def read_all() -> None:
        rows = sum(len(part) for shard in passes(samples.shards) for part, _ in shard)
        assert rows == len(samples)

    return read_all


def _pixels(config: Config, context: Context, model: Model, num_batches: int) -> None:
    transform = defer_normalization(model.preprocess_val)
    pixels = torch.zeros(config.embed.batch_size, *model.image_shape, dtype=torch.uint8)
    if context.device.type == "cuda":
        pixels = pixels.pin_memory()

    def compute(batch: Tensor) -> tuple[Tensor, None]:
        views = transform.to_floats(batch.to(context.device, non_blocking=True))
        return _encode(config, context, model, views), None

    for rows, _ in run_ahead(compute, itertools.repeat(pixels, num_batches)):
        assert len(rows) == len(pixels)
