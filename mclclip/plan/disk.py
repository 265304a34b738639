"""Estimates the bytes that a run will write, and checks that its disk has room for them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.config import Config, TrainConfig
from mclclip.files import existing
from mclclip.plan.machine import GIB, Machine


def count(config: Config, counted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Bytes by kind (None: unknown without a number of samples), their sum, and what is free.

    Indices, pseudo labels and logs are not counted: they are small beside these.
    """
    samples, trainings = counted["samples"], []
    for of in counted["trainings"]:
        each = measured[of["option"]]["checkpoint"]
        number = _number_kept(config.trainings[of["option"]], of["steps"])
        kept = {"each": each, "number": number, "kept": number * each}
        trainings.append({"stage": of["stage"], "variant": of["variant"], **kept})
    # A new checkpoint is whole before the oldest goes.
    spare = max(training["each"] for training in trainings)
    *_, last = measured.values()
    embeddings, clusters = _of_samples(config, samples, last)
    sizes: dict[str, int | None] = {
        "checkpoints": sum(training["kept"] for training in trainings) + spare,
        "exports": _exports(config, last),
        "embeddings": embeddings,
        "clusters": clusters,
    }
    elsewhere: dict[str, int | None] = {}  # on other disks than the run directory's
    if config.reshard.enabled:
        each_stage = samples["size_bytes"]
        copies = None if each_stage is None else each_stage * config.num_stages
        if config.reshard.folder is None:
            sizes["copies"] = copies
        else:
            elsewhere["copies, in reshard.folder"] = copies
    if config.trunk_cache.enabled:
        values = last["operations"]["trunk"]["values"]
        each_row = values * np.dtype(config.trunk_cache.dtype).itemsize
        rows = None if samples["number"] is None else samples["number"] * each_row
        if config.trunk_cache.folder is None:
            sizes["trunk cache"] = rows
        else:
            elsewhere["trunk cache, in trunk_cache.folder"] = rows
    run_dir = Path(config.run_dir)
    return {
        "trainings": trainings,
        **sizes,
        **elsewhere,
        "sum": sum(size or 0 for size in sizes.values()),
        "present": sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file()),
        "free": shutil.disk_usage(existing(run_dir)).free,
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


def _number_kept(options: TrainConfig, steps: tuple[int, int] | None) -> int:
    """The newest ones, and those kept for good; the last step is saved whatever it is."""
    saved = options.checkpoint
    if steps is None:
        return saved.keep
    written = [*range(saved.every, steps[1], saved.every), steps[1]]
    newest, older = written[-saved.keep :], written[: -saved.keep]
    for_good = [s for s in older if saved.keep_every and s % saved.keep_every == 0]
    return len(newest) + len(for_good)


def _of_samples(
    config: Config, samples: dict[str, Any], measured: dict[str, Any]
) -> tuple[int, int] | tuple[None, None]:
    """Embeddings: images once per clustered stage, captions once where the text tower is locked.
    Clusters, of each stage: labels int32 and similarities float16 [N, L], centroids [K, D]."""
    number, stages = samples["number"], config.num_stages
    if number is None:
        return None, None
    dim = measured["embed_dim"]
    if config.embed.feature == "pooled":
        dim = measured["width"] or dim
    captions = samples["captions"] if config.needs_text_embeddings else 0
    values = number * stages * dim + captions * measured["embed_dim"]
    labels = number * stages * config.cluster.labels_per_sample * (4 + 2)
    item = np.dtype(config.embed.dtype).itemsize
    return int(item * values), int(labels + sum(config.clusters) * dim * 4)


def _exports(config: Config, measured: dict[str, Any]) -> int:
    """One model per stage; joined ones hold what all stages share once."""
    joined = measured["export"] if config.export.soup else 0
    concat = measured["export"] + config.num_stages * measured["trained"]
    joined += concat * len(config.export.concat)
    variants = 1 + len(config.controls) if config.has_stages else 0  # one encoder joins nothing
    return int(measured["export"] * (1 + config.num_stages * variants) + joined * variants)
