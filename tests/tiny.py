"""A small real run for tests: rendered shards, a tiny CLIP, every verb in seconds."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mclclip import config
from mclclip.config import Config
from mclclip.verbs import make_dataset

ROOT = Path(__file__).resolve().parents[1]
MODEL: dict[str, Any] = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 32, "layers": 3, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {
        "context_length": 20,
        "vocab_size": 49408,
        "width": 16,
        "heads": 2,
        "layers": 1,
    },
}
ONE_BLOCK: dict[str, Any] = MODEL | {"vision_cfg": MODEL["vision_cfg"] | {"layers": 1}}
RESNET = MODEL | {
    "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
}


def of_few_ids(model: dict[str, Any]) -> dict[str, Any]:
    """The same for texts that are drawn as ids below 400: the table of all ids is most of the
    weights, which tests of ranks gather, pickle and compare."""
    return model | {"text_cfg": model["text_cfg"] | {"vocab_size": 400}}


def make_data(root: Path, num_samples: int = 192, seed: int = 0) -> Path:
    """Shards of 48 samples and two minimal pairs per attribute below ``root``."""
    make_dataset.run(
        "patterns", root, seed=seed, num_samples=num_samples, num_pairs=2, samples_per_shard=48
    )
    return root


def tree(run_dir: Path, data: Path, *, locked_text: bool = False) -> dict[str, Any]:
    """The options of a run over ``make_data``: two MCL stages of a few steps, no controls."""
    train: dict[str, Any] = {
        "global_batch": 24,
        "steps": 6,
        "lr": 1e-3,
        "checkpoint": {"every": 2},
        "log_every": 2,
        "lock": {"image_blocks": 2, "text": not locked_text},
    }
    return {
        "run_dir": str(run_dir),
        "num_stages": 2,
        "device": "cpu",
        "num_threads": 1,
        "data": {
            "sources": {"patterns": {"shards": f"{data}/shards/*.tar"}},
            "num_workers": 0,
            "index_workers": 1,
        },
        "model": {"name": MODEL},
        "base": {**train, "lock": {}},
        "embed": {"batch_size": 20, "dtype": "float32"},
        "cluster": {"num_clusters": 3, "restarts": 1},
        "train": train,
        "eval": {"suite": {"pairs": {"kind": "mmvp", "path": f"{data}/pairs"}}},
    }


def make_config(run_dir: Path, data: Path, *overrides: str, locked_text: bool = False) -> Config:
    """The checked configuration of ``tree`` with ``key.path=value`` overrides."""
    return config.from_tree(tree(run_dir, data, locked_text=locked_text), overrides)


def write_config(path: Path, run_dir: Path, data: Path, *overrides: str) -> Path:
    """The same as a YAML file, for the command line."""
    path.write_text(config.dump(make_config(run_dir, data, *overrides)))
    return path


def mclclip(*arguments: str, ranks: int = 1, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own, under torchrun for more than one rank."""
    return subprocess.run(
        command(*arguments, ranks=ranks),
        capture_output=True,
        text=True,
        env=environment(),
        **{"timeout": 900, **options},
    )


def command(*arguments: str, ranks: int = 1) -> list[str]:
    """The command line of ``mclclip``; every torchrun has a rendezvous of its own."""
    if ranks == 1:
        return [sys.executable, "-m", "mclclip", *arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(ranks), "-m", "mclclip", *arguments]


def environment() -> dict[str, str]:
    """This process's environment with the checkout on the path and one thread per process."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, none where it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def flip(path: Path, at: int | None = None) -> None:
    """Changes a bit of the byte at a place, of the middle one without."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def digests(directory: Path, pattern: str = "**/*.safetensors") -> dict[str, str]:
    """Digest of every file below ``directory`` that matches, by its relative path."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.glob(pattern))
        if path.is_file()
    }
