"""Hours and disk, as they follow from the steps and from what was measured.

Time is operations by peak x share of a GPU, or samples by the samples per second that were
measured. Evaluation, k-means, checkpoints and waiting for data are not part of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.config import Config, TrainConfig
from mclclip.plan.machine import DECODED_PER_S, GIB, SHARE, SHARES, Machine, Speed
from mclclip.plan.memory import operations_of_named
from mclclip.plan.steps import Range
from mclclip.util.files import existing

# --- hours -------------------------------------------------------------------------------------


def hours(
    config: Config,
    counted: dict[str, Any],
    measured: dict[str, Any],
    machine: Machine,
    speed: Speed,
) -> dict[str, Any]:
    """Returns ``passes`` in the order of a run, ``hours`` and ``gpu_hours``, which are their sums,
    ``range``, and ``speed``, what was given or assumed.

    ``range``: hours in all, from those at the largest to those at the smallest of ``SHARES`` where
    a pass has an estimate at a share that nobody gave (None: unknown).

    A pass: ``name`` (``training``, ``trunk``, ``images``, ``captions``), stage, variant, ``option``
    (``base`` or ``train``, of a training), ``samples`` as [fewest, most], operations of a
    ``sample``, ``precision``, ``samples_per_s`` of a GPU, whether that was ``given``, and ``hours``
    and ``gpu_hours``, [fewest, most]. Samples, rates and hours are None where they are unknown.
    """
    assumes, speed = speed.share is None, speed.settled(config.device == "cpu")
    trainings = [_training(config, of, measured, machine, speed) for of in counted["trainings"]]
    passes = [of for of in trainings if of["stage"] == 0]
    for of in trainings:
        if of["stage"] > 0 and of["variant"] == "mcl":
            encoded = of["stage"] - 1
            passes += _embeddings(config, encoded, counted["samples"], measured, machine, speed)
            passes.append(of)
    passes += [of for of in trainings if of["variant"] != "mcl"]
    sums = {}
    for name in ("hours", "gpu_hours"):
        ranges = [of[name] for of in passes]
        sums[name] = None if None in ranges else tuple(map(sum, zip(*ranges, strict=True)))
    assumed = {name: value for name, value in vars(speed).items() if value is not None}
    estimated = _range(passes) if assumes else sums["hours"]
    return {"passes": passes, **sums, "range": estimated, "speed": assumed}


def _range(passes: list[dict[str, Any]]) -> tuple[float, float] | None:
    """The hours of the passes, of which those without a given rate have the shares ``SHARES``."""
    if any(of["hours"] is None for of in passes):
        return None
    smallest, largest = SHARES
    fewest = sum(of["hours"][0] * (1 if of["given"] else SHARE / largest) for of in passes)
    most = sum(of["hours"][1] * (1 if of["given"] else SHARE / smallest) for of in passes)
    return fewest, most


def decoding(config: Config, passes: list[dict[str, Any]], machine: Machine) -> dict[str, Any]:
    """``cores`` of all machines that decode as many pictures as the trainings are estimated to
    read (None: not known, or no training reads pictures), and those that they have, ``there``."""
    rates = [
        of["samples_per_s"]
        for of in passes
        if of["name"] == "training" and not of["given"] and of["samples_per_s"] is not None
        if of["option"] != "train" or not config.image_rows.enabled
    ]
    cores = round(max(rates) * machine.ranks / DECODED_PER_S) if rates else None
    return {"cores": cores, "there": machine.cores_per_gpu * machine.ranks}


def _training(
    config: Config, of: dict[str, Any], measured: dict[str, Any], machine: Machine, speed: Speed
) -> dict[str, Any]:
    """A training; the rate that was given is that of stages after stage 0 where there are any."""
    name, kind = of["option"], measured[of["option"]]
    precision = config.trainings[name].precision
    sample = kind["operations"]["sample"]
    rate = given = speed.samples_per_s if name == "train" or len(config.trainings) == 1 else None
    step_s = speed.seconds(kind["local_batch"] * sample, precision)
    if given is None and step_s is not None:
        loss_s = speed.seconds(kind["operations"]["loss"], "fp32") or 0.0  # of class centers
        rate = kind["local_batch"] / (step_s + loss_s)
    what = {"name": "training", "option": name} | {key: of[key] for key in ("stage", "variant")}
    what |= {"sample": sample, "precision": precision, "given": given is not None}
    return what | _timed(of["samples_seen"], rate, machine)


def _embeddings(
    config: Config,
    stage: int,
    samples: dict[str, Any],
    measured: dict[str, Any],
    machine: Machine,
    speed: Speed,
) -> list[dict[str, Any]]:
    """The pass over all images with the encoder of a stage; at stage 0 that over captions too, and
    that of the trunk alone where its output is kept."""
    option = "train" if stage or "base" not in measured else "base"
    encoder: dict[str, Any] = measured[option]["operations"]
    if stage == 0 and config.model_of(option) is not config.model:  # stage 0 is another model
        encoder = operations_of_named(config.model)
    precision, image = config.embed.precision, encoder["image"]
    images = {"images": image}
    if config.image_rows.enabled:  # the rate that was given is that of the whole encoder
        trunk = measured["train"]["operations"]["trunk"]
        images = {"trunk": trunk} if stage == 0 else {}
        images["images"] = image - trunk
    rate = speed.images_per_s
    kinds = [
        (name, samples["number"], each, None if rate is None else rate * image / max(each, 1))
        for name, each in images.items()
    ]
    if stage == 0 and config.needs_text_embeddings:
        texts = samples["captions"] and samples["captions"] * _num_texts(config)
        kinds.append(("captions", texts, encoder["text"] or 0, None))
    passes = []
    for name, number, each, given in kinds:
        each_s = speed.seconds(max(each, 1), precision)
        rate = given if given is not None or each_s is None else 1 / each_s
        what = {"name": name, "stage": stage, "variant": "mcl"}
        what |= {"sample": each, "precision": precision, "given": given is not None}
        passes.append(what | _timed(None if number is None else (number, number), rate, machine))
    return passes


def _num_texts(config: Config) -> int:
    """The most texts that are embedded of each caption: itself and its stored edits."""
    return sum(1 if edits is None else edits.per_caption for edits in config.stored_texts)


def _timed(seen: Range | None, rate: float | None, machine: Machine) -> dict[str, Any]:
    """Times of a pass over ``seen`` samples; ``rate``: samples per second of one GPU."""
    gpu_hours = hours = None
    if seen is not None and rate is not None:
        gpu_hours = tuple(number / rate / 3600 for number in seen)
        hours = tuple(number / machine.ranks for number in gpu_hours)
    return {"samples_per_s": rate, "samples": seen, "hours": hours, "gpu_hours": gpu_hours}


# --- disk --------------------------------------------------------------------------------------


def disk(config: Config, counted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Bytes by kind (None: unknown without a number of samples), their sum, and what is free.

    Indices, pseudo labels and logs are not counted: they are small beside these.
    """
    samples, trainings = counted["samples"], []
    spare = 0
    for of in counted["trainings"]:
        each, options = measured[of["option"]]["checkpoint"], config.trainings[of["option"]]
        number = number_kept(options, of["steps"])
        kept = {"each": each, "number": number, "kept": number * each}
        trainings.append({"stage": of["stage"], "variant": of["variant"], **kept})
        # While it runs, ``keep`` stay, and a new one is whole before the oldest goes.
        spare = max(spare, each * options.checkpoint.keep)
    *_, last = measured.values()
    embeddings, clusters = _of_samples(config, samples, last)
    # One model per stage; joined ones hold what all stages share once.
    joined = last["export"] if config.export.soup else 0
    joined += (last["export"] + config.num_stages * last["trained"]) * len(config.export.concat)
    variants = 1 + len(config.controls) if config.has_stages else 0  # one encoder joins nothing
    sizes: dict[str, int | None] = {
        "checkpoints": sum(training["kept"] for training in trainings) + spare,
        "exports": last["export"] * (1 + config.num_stages * variants) + joined * variants,
        "embeddings": embeddings,
        "clusters": clusters,
    }
    elsewhere: dict[str, int | None] = {}  # on other disks than the run directory's
    if config.relocate.enabled:
        shards, folder = samples["size_bytes"], config.relocate.folder
        name = "copies" if folder is None else "copies, in relocate.folder"
        copies = None if shards is None else shards * config.num_stages
        (sizes if folder is None else elsewhere)[name] = copies
    if config.image_rows.enabled:
        row = last["operations"]["row_values"] * np.dtype(config.image_rows.dtype).itemsize
        sizes["image rows"] = None if samples["number"] is None else samples["number"] * row
    run_dir = Path(config.run_dir)
    return {
        "trainings": trainings,
        **sizes,
        **elsewhere,
        "sum": sum(size or 0 for size in sizes.values()),
        "present": sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file()),
        "free": shutil.disk_usage(existing(run_dir)).free,
    }


def number_kept(options: TrainConfig, steps: Range | None) -> int:
    """Number of a finished training's checkpoints: the last one, the best one where it is exported,
    and those kept for good."""
    saved, number = options.checkpoint, 1 + options.evaluate.best
    if steps is None or saved.keep_every is None:
        return number
    written = range(saved.every, steps[1], saved.every)
    return number + sum(step % saved.keep_every == 0 for step in written)


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
    captions = (samples["captions"] or 0) * _num_texts(config)
    values = number * stages * dim + captions * measured["embed_dim"]
    labels = number * stages * config.cluster.labels_per_sample * (4 + 2)
    item = np.dtype(config.embed.dtype).itemsize
    return int(item * values), int(labels + sum(config.clusters) * dim * 4)


def check_disk(planned: dict[str, Any], config: Config, machine: Machine) -> str | None:
    """Raises ValueError where the disk of the run directory has too little room.

    For a machine elsewhere the disk here does not decide: what is missing comes back as a warning,
    None where nothing is.
    """
    missing = planned["sum"] - planned["present"]
    if missing <= planned["free"]:
        return None
    needs = f"{config.run_dir} needs about {missing / GIB:.1f} GiB more"
    free = f"{planned['free'] / GIB:.1f} GiB free"
    if machine.elsewhere:
        return f"{needs}, the disk here has {free}: check that the machines planned for have room"
    raise ValueError(
        f"{needs}, its disk has {free}: give another run_dir, make room, or keep fewer checkpoints "
        "(checkpoint.keep, checkpoint.keep_every); for machines elsewhere give --nodes and "
        "--gpus-per-node"
    )
