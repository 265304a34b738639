"""Estimates hours and disk from the counted steps and the measured operations and bytes.

Time is operations divided by peak x share of a GPU, or, if the user gave a measured rate, samples
divided by that rate. Evaluation, k-means, checkpoints and waiting for data are not included.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.config import Config, TrainConfig
from mclclip.plan.machine import GIB, SHARE, SHARES, Machine, Speed
from mclclip.plan.memory import measure_encoder, measure_teacher
from mclclip.plan.steps import Range
from mclclip.util.files import nearest_existing

_PASS = ("name", "stage", "variant", "samples", "sample", "precision", "samples_per_s", "given")

# --- hours -------------------------------------------------------------------------------------


def hours(
    config: Config,
    counted: dict[str, Any],
    measured: dict[str, Any],
    machine: Machine,
    speed: Speed,
) -> dict[str, Any]:
    """Estimates the hours of a run; ``counted`` is from `steps.count`, ``measured`` from `memory`.

    passes             the trainings and embedding passes, in the order of a run
    hours, rank_hours  their sums; rank_hours count every GPU
    range              hours in all, [fewest, most]: if the user gave no share of the peak, those at
                       the largest and the smallest of ``SHARES``
    speed              rates and shares that were given or assumed

    A pass has ``name``, ``stage``, ``variant``, operations of a ``sample``, ``precision``, the
    GPU's ``samples_per_s``, True for ``given`` if the user gave that, and ``samples``, ``hours``
    and ``rank_hours`` as [fewest, most]. What is unknown is None.
    """
    share_is_given = speed.share is not None
    speed = speed.fill_defaults(config.device == "cpu")
    passes = [*_teachers(config, counted["samples"], speed)]
    for of in counted["trainings"]:
        if of["stage"] > 0 and of["variant"] == "mcl":
            passes += _embeddings(config, of["stage"] - 1, counted["samples"], measured, speed)
        passes.append(_training(config, of, measured[of["option"]], speed))
    for of in passes:
        seen, rate = of["samples"], of["samples_per_s"]
        is_known = seen is not None and rate is not None
        of["rank_hours"] = [number / rate / 3600 for number in seen] if is_known else None
        of["hours"] = [hours / machine.ranks for hours in of["rank_hours"]] if is_known else None
    total = in_range = None
    if all(of["hours"] for of in passes):
        total = [sum(of["hours"][end] for of in passes) for end in (0, 1)]
        ends = [1 if share_is_given else SHARE / share for share in reversed(SHARES)]
        in_range = [
            sum(of["hours"][end] * (1 if of["given"] else ends[end]) for of in passes)
            for end in (0, 1)
        ]
    return {
        "passes": passes,
        "hours": total,
        "rank_hours": total and [hours * machine.ranks for hours in total],
        "range": in_range,
        "speed": {name: value for name, value in vars(speed).items() if value is not None},
    }


def _training(
    config: Config, of: dict[str, Any], measured: dict[str, Any], speed: Speed
) -> dict[str, Any]:
    """Returns the pass of a training ``of``. A measured rate that the user gave counts for stages
    after stage 0, or for stage 0 if it is the only training."""
    name, operations, batch = of["option"], measured["operations"], measured["local_batch"]
    options, precision = config.trainings[name], config.trainings[name].precision
    sample = _operations_of_sample(options, of, operations)
    rate = speed.samples_per_s if name == "train" or len(config.trainings) == 1 else None
    is_given = rate is not None
    if rate is None and speed.peak_tflops is not None:
        step_s = speed.seconds(batch * sample, precision)
        rate = batch / (step_s + speed.seconds(operations["loss"], "fp32"))  # of class centers
    what = of["name"], of["stage"], of["variant"], of["samples_seen"], sample
    return dict(zip(_PASS, (*what, precision, rate, is_given), strict=True))


def _operations_of_sample(
    options: TrainConfig, of: dict[str, Any], operations: dict[str, Any]
) -> int:
    """Returns the operations of a sample, the mean over the steps where image sizes change."""
    if not options.image_size:
        return int(operations["sample"])
    total = of["steps"][1] if of["steps"] else 1_000_000  # unknown: epochs are shares of any number
    per_epoch = of["steps_per_epoch"][1] if of["steps_per_epoch"] else round(total / options.epochs)
    starts = options.image_sizes(total, per_epoch)
    ends = [*(start for start, _ in starts[1:]), total]
    of_size: dict[int | None, int] = operations["sizes"]
    work = zip(starts, ends, strict=True)
    return sum((end - start) * of_size[size] for (start, size), end in work) // total


def _embeddings(
    config: Config, stage: int, samples: dict[str, Any], measured: dict[str, Any], speed: Speed
) -> Iterator[dict[str, Any]]:
    """Yields the embedding passes of a stage: over images; at stage 0 also over captions.

    If outputs of the trunk (the image tower's frozen blocks) are stored, the trunk's pass is
    separate, and the passes over images start from them.
    """
    option = "train" if stage or "base" not in measured else "base"
    encoder: dict[str, Any] = measured[option]["operations"]
    if stage == 0 and config.model_of(option) is not config.model:  # stage 0 is another model
        encoder = measure_encoder(config.model)
    image, texts = encoder["image"], samples["captions"]
    work = {"images": image}
    if config.image_rows.enabled:
        trunk = measured["train"]["operations"]["trunk"]
        work = ({"trunk": trunk} if stage == 0 else {}) | {"images": image - trunk}
    if stage == 0 and config.stored_texts:
        work["captions"] = encoder["text"] or 0
        texts = texts and texts * _num_texts(config)
    for name, each in work.items():
        number = texts if name == "captions" else samples["number"]
        rate = None
        if name != "captions" and speed.images_per_s is not None:  # that of the whole encoder
            rate = speed.images_per_s * image / max(each, 1)
        yield _embedding(f"stage {stage}, embed {name}", stage, number, each, rate, config, speed)


def _teachers(config: Config, samples: dict[str, Any], speed: Speed) -> Iterator[dict[str, Any]]:
    """Yields the embedding passes of the encoders that trainings learn from."""
    for teacher, parts in config.teachers.items():
        each, title = measure_teacher(teacher), f"teacher {teacher}, embed"
        if "image_features" in parts:
            images = samples["number"], each["image"]
            yield _embedding(f"{title} images", 0, *images, None, config, speed)
        if "text_features" in parts:
            texts = samples["captions"], each["text"] or 0
            yield _embedding(f"{title} captions", 0, *texts, None, config, speed)


def _embedding(
    title: str, stage: int, number: int | None, operations: int, rate: float | None,
    config: Config, speed: Speed,
) -> dict[str, Any]:  # fmt: skip
    """Returns an embedding pass over ``number`` images or captions, at a ``rate`` that the user
    gave (None: an estimate)."""
    is_given, precision = rate is not None, config.embed.precision
    if rate is None and speed.peak_tflops is not None:
        rate = 1 / speed.seconds(max(operations, 1), precision)
    what = title, stage, "mcl", number and (number, number), operations
    return dict(zip(_PASS, (*what, precision, rate, is_given), strict=True))


def _num_texts(config: Config) -> int:
    """Returns the most texts that are embedded for each caption: itself and its stored edits."""
    return sum(1 if edits is None else edits.per_caption for edits in config.stored_texts)


# --- disk --------------------------------------------------------------------------------------


def disk(config: Config, counted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Returns bytes on disk by kind, their ``sum``, what is ``present`` and what is ``free``.

    A kind is None if the number of samples is unknown. ``trainings`` lists the checkpoints of each
    training. Indices, pseudo labels and logs are small and not counted.
    """
    samples, trainings, spare = counted["samples"], [], 0
    for of in counted["trainings"]:
        each, options = measured[of["option"]]["checkpoint"], config.trainings[of["option"]]
        number = count_checkpoints(options, of["steps"])
        sizes = {"each": each, "number": number, "kept": number * each}
        trainings.append({"name": f"checkpoints, {of['name']}", **sizes})
        # A running training keeps ``keep`` checkpoints, and deletes the oldest after a new one.
        spare = max(spare, each * options.checkpoint.keep)
    *_, last = measured.values()
    # One model per stage, and joined ones, which store once what all stages share.
    joined = last["export"] if config.export.soup else 0
    joined += (last["export"] + config.num_stages * last["trained"]) * len(config.export.concat)
    variants = 1 + len(config.controls) if config.has_stages else 0  # one encoder joins nothing
    sizes_of: dict[str, int | None] = {
        "checkpoints": sum(training["kept"] for training in trainings) + spare,
        "exports": last["export"] * (1 + config.num_stages * variants)
        + joined * variants
        + sum(measure_teacher(teacher)["size"] for teacher in config.teachers),
        **_of_samples(config, samples, last),
    }
    row = last["operations"].get("row_values", 0) * np.dtype(config.image_rows.dtype).itemsize
    if config.image_rows.enabled:
        sizes_of["image rows"] = samples["number"] and samples["number"] * row
    total = sum(size or 0 for size in sizes_of.values())
    if config.relocate.enabled:
        copies = samples["size_bytes"] and samples["size_bytes"] * config.num_stages
        elsewhere = config.relocate.folder is not None
        sizes_of["copies, in their own folder" if elsewhere else "copies"] = copies
        total += 0 if elsewhere else copies or 0
    run_dir = Path(config.run_dir)
    return {
        "trainings": trainings,
        **sizes_of,
        "sum": total,
        "present": sum(
            path.stat().st_size
            for path in run_dir.rglob("*")
            if path.is_file() and ".old-" not in str(path.relative_to(run_dir))  # moved aside
        ),
        "free": shutil.disk_usage(nearest_existing(run_dir)).free,
    }


def count_checkpoints(options: TrainConfig, steps: Range | None) -> int:
    """Returns the number of checkpoints that a finished training leaves: the last one, the best one
    if it is exported, and those of every ``checkpoint.keep_every`` steps."""
    saved, number = options.checkpoint, 1 + options.evaluate.best
    if steps is None or saved.keep_every is None:
        return number
    steps_saved = range(saved.every, steps[1], saved.every)
    return number + sum(step % saved.keep_every == 0 for step in steps_saved)


def _of_samples(
    config: Config, samples: dict[str, Any], measured: dict[str, Any]
) -> dict[str, int | None]:
    """Returns the bytes of embeddings and of clusters; None without a number of samples.

    Embeddings: of images once per clustered stage, of captions once if they are stored. Clusters,
    for each stage: labels int32 and similarities float16 [N, L], centroids float32 [K, D].
    """
    number, stages = samples["number"], config.num_stages
    if number is None:
        return {"embeddings": None, "clusters": None}
    dim = measured["embed_dim"]
    if config.embed.feature == "pooled":
        dim = measured["width"] or dim
    captions = (samples["captions"] or 0) * _num_texts(config)
    values = number * stages * dim + captions * measured["embed_dim"]
    for teacher, parts in config.teachers.items():
        rows = number * ("image_features" in parts)
        rows += (samples["captions"] or 0) * ("text_features" in parts)
        values += rows * measure_teacher(teacher)["width"]
    labels = number * stages * config.cluster.labels_per_sample * (4 + 2)
    item = np.dtype(config.embed.dtype).itemsize
    return {"embeddings": item * values, "clusters": labels + sum(config.clusters) * dim * 4}


def missing_disk(planned: dict[str, Any], config: Config, machine: Machine) -> str | None:
    """Describes how much room the disk of the run directory lacks; None if it has enough."""
    missing = planned["sum"] - planned["present"]
    if missing <= planned["free"]:
        return None
    advice = (
        "give another run_dir, make room, or keep fewer checkpoints (checkpoint.keep, "
        "checkpoint.keep_every); for machines elsewhere give --nodes and --gpus-per-node"
    )
    if machine.elsewhere:
        advice = "that of the machines planned for needs so much room"
    return (
        f"{config.run_dir} needs about {missing / GIB:.1f} GiB more, the disk here has "
        f"{planned['free'] / GIB:.1f} GiB free: {advice}"
    )
