"""A small real run for tests of methods of images alone: four-channel pictures, a tiny ResNet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mclclip.data.datasets.sources import array_sample
from mclclip.data.shard_writer import write_shards

SIZES = {"train": 64, "test": 24}


def make_data(root: Path) -> Path:
    """``train`` and ``test`` shards: 16 pixels, four channels, attributes shape and colour."""
    random = np.random.default_rng(0)
    for split, number in SIZES.items():
        samples = []
        for n in range(number):
            shape, colour = n % 3, n // 3 % 2
            pixels = random.integers(0, 60, (16, 16, 4), np.uint8)
            pixels[4 * shape : 4 * shape + 4, :, colour] += 150
            about = {"shape": shape, "colour": ["red", "green"][colour]}
            samples.append(array_sample(n, pixels, about))
        write_shards(samples, root / split, 20)
    return root


def tree(
    run_dir: Path, pictures: Path, objective: dict[str, Any], steps: int, **changes: Any
) -> dict[str, Any]:
    """The options of a run over ``make_data``: stage 0 and one more from scratch, no controls."""
    training: dict[str, Any] = {
        "global_batch": 16,
        "steps": steps,
        "lr": 1e-3,
        "objective": objective,
        "checkpoint": {"every": 2},
        "log_every": 1,
    }
    vision = {
        "backbone": "timm:resnet18",
        "channels": 4,
        "image_size": 16,
        "stem": "cifar",
        "options": {"channels": [4, 8, 8, 12], "layers": [1, 1, 1, 1]},
    }
    attributes = ["shape", "colour"]
    features = {"kind": "attributes", "path": str(pictures), "options": {"attributes": attributes}}
    return {
        "run_dir": str(run_dir),
        "device": "cpu",
        "num_threads": 1,
        "num_stages": 1,
        "data": {
            "sources": {"p": {"shards": f"{pictures}/train/*.tar", "attributes": attributes}},
            "num_workers": 0,
            "index_workers": 1,
        },
        "model": {"name": {"vision_cfg": vision}, "projector": [12, 6]},
        "base": training,
        "cluster": {"num_clusters": 2, "restarts": 1},
        "train": training | {"start": "random"},
        "export": {"soup": False},
        "eval": {"suite": {"features": features}},
    } | changes
