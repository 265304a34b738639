"""Hours and GPU-hours of every training and every embedding pass, what a cache would save, and the
messages of a step.

Time is operations by peak x share of a GPU, or samples by the samples per second that were
measured. Evaluation, k-means, checkpoints and waiting for data are not part of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mclclip.config import Config, TrainConfig
from mclclip.engines.engine import HALF
from mclclip.objectives.class_centers.cost import NETWORK_BYTES_PER_S
from mclclip.plan.machine import Machine, Speed
from mclclip.plan.memory import operations_of_named
from mclclip.plan.steps import Range


def count(
    config: Config,
    counted: dict[str, Any],
    measured: dict[str, Any],
    machine: Machine,
    speed: Speed,
) -> dict[str, Any]:
    """Returns ``passes`` in the order of a run, ``hours`` and ``gpu_hours``, which are their sums,
    ``trunk_cache`` by training, and ``speed``, what was given or assumed.

    A pass: ``name`` (``training``, ``trunk``, ``images``, ``captions``), stage, variant, ``option``
    (``base`` or ``train``, of a training), ``samples`` as [fewest, most], operations of a
    ``sample``, ``precision``, ``samples_per_s`` of a GPU, whether that was ``given``, and ``hours``
    and ``gpu_hours``, [fewest, most]. Samples, rates and hours are None where they are unknown.
    """
    speed = speed.settled(config.device == "cpu")
    trainings = [_training(config, of, measured, machine, speed) for of in counted["trainings"]]
    first = [of for of in trainings if of["stage"] == 0]
    later = [of for of in trainings if of["stage"] > 0 and of["variant"] == "mcl"]
    controls = [of for of in trainings if of["variant"] != "mcl"]
    passes = [*first]
    for stage, training in enumerate(later):
        passes += [*_embeddings(config, stage, counted["samples"], measured, machine, speed)]
        passes += [training]
    passes += controls
    sums = {name: _sum([of[name] for of in passes]) for name in ("hours", "gpu_hours")}
    caches = {
        name: _cache(config, name, counted, measured[name], passes)
        for name in config.trainings
        if measured[name]["operations"]["trunk"]
    }
    assumed = {name: value for name, value in vars(speed).items() if value is not None}
    return {"passes": passes, **sums, "trunk_cache": caches, "speed": assumed}


def _training(
    config: Config, of: dict[str, Any], measured: dict[str, Any], machine: Machine, speed: Speed
) -> dict[str, Any]:
    """A training; the rate that was given is that of stages after stage 0 where there are any."""
    name, kind = of["option"], measured[of["option"]]
    options = config.trainings[name]
    sample = kind["operations"]["sample"]
    if name == "train" and config.trunk_cache.enabled:
        sample = kind["operations"]["trunk"]["sample_cached"]
    rate = given = speed.samples_per_s if name == "train" or len(config.trainings) == 1 else None
    step_s = speed.seconds(kind["local_batch"] * sample, options.precision)
    if given is None and step_s is not None:
        # The products of class centers have an estimate of their own.
        step_s += sum(kind["objective"].get("seconds", {}).values())
        rate = kind["local_batch"] / step_s
    what = {"name": "training", "option": name} | {key: of[key] for key in ("stage", "variant")}
    timed = _timed(of["samples_seen"], rate, machine)
    return what | _kind(sample, options.precision, given) | {"samples_per_s": rate} | timed


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
    if config.trunk_cache.enabled:  # the rate that was given is that of the whole encoder
        trunk = measured["train"]["operations"]["trunk"]["image"]
        images = {"trunk": trunk} if stage == 0 else {}
        images["images"] = image - trunk
    rate = speed.images_per_s
    passes = [
        (name, samples["number"], each, None if rate is None else rate * image / max(each, 1))
        for name, each in images.items()
    ]
    if stage == 0 and config.needs_text_embeddings:
        passes.append(("captions", samples["captions"], encoder["text"] or 0, None))
    found = []
    for name, number, each, given in passes:
        each_s = speed.seconds(max(each, 1), precision)
        rate = given if given is not None or each_s is None else 1 / each_s
        seen = None if number is None else (number, number)
        what = {"name": name, "stage": stage, "variant": "mcl"}
        timed = _timed(seen, rate, machine)
        found.append(what | _kind(each, precision, given) | {"samples_per_s": rate} | timed)
    return found


def _kind(sample: int, precision: str, given: float | None) -> dict[str, Any]:
    return {"sample": sample, "precision": precision, "given": given is not None}


def _timed(seen: Range | None, rate: float | None, machine: Machine) -> dict[str, Any]:
    """``rate``: samples per second of one GPU; None: unknown."""
    gpu_hours = None
    if seen is not None and rate is not None:
        gpu_hours = tuple(number / rate / 3600 for number in seen)
    hours = None if gpu_hours is None else tuple(number / machine.ranks for number in gpu_hours)
    return {"samples": seen, "hours": hours, "gpu_hours": gpu_hours}


def _sum(values: list[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Sums of both ends; None where one is unknown."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(low for low, _ in known), sum(high for _, high in known)


def _cache(
    config: Config,
    name: str,
    counted: dict[str, Any],
    measured: dict[str, Any],
    passes: list[dict[str, Any]],
) -> dict[str, Any]:
    """Returns the trunk's fields of ``operations``, and what a cache of its output would be.

    ``bytes_each`` of a sample, ``bytes_per_crop`` of one crop of all (None: their number is
    unknown), ``faster``: how many times a step could be so at most, and ``bytes_per_s`` that each
    GPU would then read.
    """
    found = measured["operations"]
    trunk: dict[str, Any] = found["trunk"]
    each = trunk["values"] * np.dtype(config.trunk_cache.dtype).itemsize
    number = counted["samples"]["usable"]
    faster = found["sample"] / trunk["sample_cached"]
    rates = [of["samples_per_s"] for of in passes if of.get("option") == name]
    return trunk | {
        "sample": found["sample"],
        "bytes_each": each,
        "bytes_per_crop": None if number is None else number * each,
        "faster": faster,
        "bytes_per_s": rates[0] and rates[0] * each * (1 if config.trunk_cache.enabled else faster),
    }


# --- messages of a step ---------------------------------------------------------------------------


def messages(options: TrainConfig, measured: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """``collectives``, bytes of what all ranks together exchange by name, and ``seconds`` for them
    where nothing overlaps with the computation.

    Of n ranks each sends (n - 1) / n of an all-gather or a reduce-scatter, and twice that of an
    all-reduce. Objectives with class centers list the messages of the loss themselves. Both are
    empty or 0 for one rank.
    """
    if machine.ranks == 1:
        return {"collectives": {}, "seconds": 0.0}
    found = _of_engine(options, measured)
    if not measured["objective"]:
        batch, counted = measured["global_batch"], measured["operations"]
        found["all-gather of features"] = batch * counted["features"]
        found["reduce-scatter of their gradients"] = batch * counted["features_trained"]
    share = (machine.ranks - 1) / machine.ranks
    sent = sum(size * (2 if "all-reduce" in name else 1) for name, size in found.items())
    return {"collectives": found, "seconds": share * sent / NETWORK_BYTES_PER_S}


def _of_engine(options: TrainConfig, measured: dict[str, Any]) -> dict[str, int]:
    """Parameters are gathered for each forward and each backward pass, at most: those of frozen
    blocks have no backward pass."""
    how, trained, whole = options.engine, measured["trained"], measured["export"]
    if how.name == "ddp":
        return {"all-reduce of gradients": trained}
    if how.name == "deepspeed" and how.zero_stage < 3:
        return {"reduce-scatter of gradients": trained, "all-gather of parameters": trained}
    micro = measured["micro_batches"]
    passes = 2 if micro == 1 else 3 * micro
    half = how.name == "fsdp" and options.precision in HALF
    gathered = passes * whole // (2 if half else 1)
    return {"reduce-scatter of gradients": trained, "all-gather of parameters": gathered}
