"""What a run will write, and whether its disk has room for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.config import Config, TrainConfig
from mclclip.plan.machine import GIB, Machine


def count(config: Config, counted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Bytes by kind (None: unknown without a number of samples), their sum, and what is free.

    Indices, pseudo labels and logs are not counted: they are small beside these.
    """
    trainings = [
        _training(config, training, measured[training["option"]])
        for training in counted["trainings"]
    ]
    *_, last = measured.values()
    embeddings = _embeddings(config, counted["samples"], last)
    clusters = _clusters(config, counted["samples"], last)
    exports = _exports(config, last)
    # A new checkpoint is whole before the oldest goes.
    spare = max(training["each"] for training in trainings)
    checkpoints = sum(training["kept"] for training in trainings) + spare
    return {
        "trainings": trainings,
        "checkpoints": checkpoints,
        "exports": exports,
        "embeddings": embeddings,
        "clusters": clusters,
        "sum": checkpoints + exports + (embeddings or 0) + (clusters or 0),
        "present": _present(Path(config.run_dir)),
        "free": shutil.disk_usage(_nearest(Path(config.run_dir))).free,
    }


def check(counted: dict[str, Any], config: Config, machine: Machine) -> str | None:
    """Raises ValueError where the disk of the run directory has too little room.

    For a machine elsewhere the disk here does not decide: what is missing comes back as a warning,
    None where nothing is.
    """
    missing = counted["sum"] - counted["present"]
    if missing <= counted["free"]:
        return None
    needs = f"{config.run_dir} needs about {missing / GIB:.1f} GiB more"
    free = f"{counted['free'] / GIB:.1f} GiB free"
    if machine.elsewhere:
        return f"{needs}, the disk here has {free}: check that the machines planned for have room"
    raise ValueError(
        f"{needs}, its disk has {free}: give another run_dir, make room, or keep fewer checkpoints "
        "(checkpoint.keep, checkpoint.keep_every); for machines elsewhere give --nodes and "
        "--gpus-per-node"
    )


def _training(config: Config, training: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    options = config.base if training["option"] == "base" else config.train
    assert options is not None
    number = _number_kept(options, training["steps"])
    return {
        "stage": training["stage"],
        "variant": training["variant"],
        "each": measured["checkpoint"],
        "number": number,
        "kept": number * measured["checkpoint"],
    }


def _number_kept(options: TrainConfig, steps: tuple[int, int] | None) -> int:
    """The newest ones, and those kept for good; the last step is saved whatever it is."""
    saved = options.checkpoint
    if steps is None:
        return saved.keep
    written = [*range(saved.every, steps[1], saved.every), steps[1]]
    newest, older = written[-saved.keep :], written[: -saved.keep]
    for_good = [s for s in older if saved.keep_every and s % saved.keep_every == 0]
    return len(newest) + len(for_good)


def _embeddings(config: Config, samples: dict[str, Any], measured: dict[str, Any]) -> int | None:
    """Images once per clustered stage; captions once, where the text tower is locked."""
    if samples["number"] is None:
        return None
    item = np.dtype(config.embed.dtype).itemsize
    rows = samples["number"] * _dim(config, measured)
    texts = 0
    if config.needs_text_embeddings:
        texts = samples["captions"] * measured["embed_dim"]
    return int(item * (rows * config.num_stages + texts))


def _clusters(config: Config, samples: dict[str, Any], measured: dict[str, Any]) -> int | None:
    """Of each clustered stage labels int32 and similarities float16 [N, L], centroids [K, D]."""
    if samples["number"] is None:
        return None
    per_sample = config.cluster.labels_per_sample * (4 + 2)
    centroids = sum(config.cluster.clusters_of(stage) for stage in range(config.num_stages))
    nearest = config.num_stages * samples["number"] * per_sample
    return int(nearest + centroids * _dim(config, measured) * 4)


def _dim(config: Config, measured: dict[str, Any]) -> int:
    """The width of an embedding."""
    pooled = config.embed.feature == "pooled" and measured["width"]
    return int(measured["width"] if pooled else measured["embed_dim"])


def _exports(config: Config, measured: dict[str, Any]) -> int:
    """One model per stage; joined ones hold what all stages share once."""
    joined = measured["export"] if config.export.soup else 0
    concat = measured["export"] + config.num_stages * measured["trained"]
    joined += concat * len(config.export.concat)
    variants = 1 + len(config.controls) if config.num_stages else 0  # one encoder joins nothing
    return int(measured["export"] * (1 + config.num_stages * variants) + joined * variants)


def _nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _present(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())
