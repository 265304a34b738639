"""Chooses the settings of ``finetune``: a whole configuration, with a reason for every line.

Choices follow from the number of pictures, the base, and the memory of the device. Memory is
measured as in ``config --plan``, so settings that need too much are replaced before anything runs.
Learning rates and lengths are rules of thumb, as the reasons say; overrides replace any choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip import config as configuration
from mclclip.config import Config
from mclclip.data.epoch_plan import check_samples
from mclclip.models.clip import check_tag
from mclclip.models.encoder_names import RANDOM, split_name
from mclclip.models.loading import load_towers, model_config, refuse_without_weights
from mclclip.models.memory import load_shapes
from mclclip.models.options import ModelConfig, num_blocks
from mclclip.plan import memory
from mclclip.plan.machine import GIB, Machine
from mclclip.util.options import all_shards

PAIRS = "pairs"
"""Name of the benchmark of minimal pairs (a caption and a false edit of it), and of its folder."""
FEWEST = 100
"""The fewest pictures to train on; groups of fewer would be smaller than batches."""
_USABLE = 0.9  # share of a device's memory that the plan may fill
_SMALLEST_BATCH, _LARGEST_BATCH, _MOST_CLUSTERS = 16, 1024, 25

Choice = tuple[str, Any, str]
"""An option, its value and the reason, for example ("train.lr", 2e-5, "low, or ...")."""


@dataclass(frozen=True)
class Situation:
    """The facts that the choices follow from.

    base          NAME@TAG, a folder, or NAME@random
    samples       number of pictures to train on
    data          folder with the folders of shards ``train``, ``choose`` and ``report``
    machine       number of ranks, and the memory of each GPU; ``memory_gib`` None: a CPU
    cores         processor cores of each rank
    half          the 16-bit format that the GPU computes in, "bf16" or "fp16"
    pairs         folder of minimal pairs made of the captions in ``report``; None: there are none
    """

    base: str
    samples: int
    data: Path
    run_dir: Path
    machine: Machine
    cores: int
    half: str = "bf16"
    seed: int = 0
    pairs: Path | None = None


def choose(at: Situation, overrides: Sequence[str] = ()) -> tuple[Config, str]:
    """Returns the chosen configuration, and the same as a YAML text with the reasons as comments.

    ``overrides`` (``key.path=value``) replace choices. Raises ValueError for too few pictures (to
    train on, or for the batch of an override), for a base that names no weights, not even
    ``random``, and if nothing fits the memory.
    """
    if at.samples < FEWEST:
        raise ValueError(
            f"too few pictures to train on: {at.samples} without the shares that are held out "
            f"(held_out), and at least {FEWEST} are needed, since batches are drawn from groups"
        )
    choices = [*_choices(at)]
    for name in ("base", "train"):
        choices += _fit_memory(at, name, choices, overrides)
    config = configuration.from_tree(_build_tree(choices), overrides)  # raises for wrong overrides
    most = max(config.clusters, default=1)
    for name, training in config.trainings.items():
        draws = training.plan.samples_per_epoch
        check_samples(name, training.global_batch, training.plan.policy, most, at.samples, 0, draws)
    return config, _write_yaml(choices, config, overrides)


# --- what follows from the data and the base --------------------------------------------------


def _choices(at: Situation) -> Iterator[Choice]:
    name, tag = architecture(at.base)
    is_new, on_gpu = tag == RANDOM, at.machine.memory_gib is not None
    batch = _batch(at)
    stages, clusters = _clusters(at.samples, batch)
    yield "run_dir", str(at.run_dir), "everything of this run is written there"
    yield "seed", at.seed, "of weights, data order and clusters"
    if on_gpu:
        yield "device", "cuda", f"a GPU of {at.machine.memory_gib:.3g} GiB"
    else:
        yield "device", "cpu", "no GPU was found or named"
    yield "data.sources.mine.shards", all_shards(at.data / "train"), "what is not held out"
    yield "data.sources.mine.captions", "json:captions", "all captions; an epoch draws one of them"
    yield "data.max_bad_fraction", 0.05, "this share may be damaged, and is left out"
    yield "data.num_workers", max(min(at.cores, 8), 1), f"{at.cores} cores for each process"
    yield "model.name", name, "--base"
    if is_new:
        yield "model.augmentation.scale", [0.3, 1.0], "random weights: crops vary more than usual"
    else:
        yield "model.pretrained", tag, "--base"
    groups = clusters**stages
    yield (
        "num_stages",
        stages,
        f"their clusters make {groups} groups of {at.samples:,} pictures",
    )
    yield (
        "cluster.num_clusters", clusters,
        f"of each stage; a group has {at.samples // groups:,} pictures, more than a batch",
    )  # fmt: skip
    yield "controls", ["ungrouped"], "the same training without groups: what grouping itself adds"
    precision = at.half if on_gpu else "fp32"
    reason = "half the memory and twice the speed of fp32" if on_gpu else "what CPUs are fast in"
    yield "embed.precision", "bf16" if precision == "bf16" else "fp32", reason
    yield from _trainings(at, name, tag, batch, precision, reason)
    shares = {
        "choose": "by it the best encoder is chosen",
        "report": "on it the result is reported, and nothing is chosen",
    }
    for share, what in shares.items():
        yield f"eval.suite.{share}.kind", "retrieval", what
        yield f"eval.suite.{share}.path", str(at.data), "pictures held out by a hash of their bytes"
        yield f"eval.suite.{share}.options.captions", share, "the folder of its shards"
        yield f"eval.suite.{share}.options.shard_captions", "json:captions", "all captions"
    if at.pairs is not None:
        reason = "minimal pairs of the share report: a caption beside an edit that is false"
        yield f"eval.suite.{PAIRS}.kind", "compositional", reason
        yield f"eval.suite.{PAIRS}.path", str(at.pairs), "gallery.html there shows them"
        yield f"eval.suite.{PAIRS}.options.layout", "pairs", "what make-pairs has written"


def _trainings(
    at: Situation, name: str, tag: str | None, batch: int, precision: str, reason: str
) -> Iterator[Choice]:
    is_new = tag == RANDOM
    epochs = 10 * (1000 / at.samples) ** 0.3  # 10 of 1,000 pictures, 5 of 10,000
    if is_new:
        yield "base.global_batch", 2 * batch, "stage 0 is not drawn from groups"
        yield "base.epochs", _round(8 * epochs), "from random weights, eight times as long"
        yield "base.lr", 1e-3, "usual from random weights"
        yield "base.weight_decay", 0.1, "few pictures"
        yield "base.precision", precision, reason
        yield "base.checkpoint.every", 100, "what a kill can cost, in steps"
    yield (
        "train.global_batch",
        batch,
        f"a power of two: a sixteenth of the pictures, {_SMALLEST_BATCH} at least",
    )
    yield "train.epochs", _round(epochs), "few pictures are seen more often than many"
    weights = tag if tag is not None and not is_new and Path(tag).is_file() else None
    if model_config(name, weights).get("init_logit_bias") is not None:
        yield "train.objective.kind", "sigmoid", "the base was trained by it"
    blocks = num_blocks(ModelConfig(name=name))
    trained: int | str = "all" if blocks is None else math.ceil(blocks / 2)
    half = f"the upper half of {blocks} blocks, as MCL trains"
    yield "train.lock.image_blocks", trained, half if blocks else "how many there are is not known"
    norms = (isinstance(m, _BatchNorm) for m in load_shapes(name, text=False).modules())
    if not is_new and any(norms):
        yield (
            "train.lock.image_norm", False,
            "batch norms keep the base's statistics: groups are no fair sample of all pictures",
        )  # fmt: skip
    yield "train.lock.text", False, "frozen as in MCL: captions are embedded once"
    yield "train.lock.logit_scale", False, "frozen with the text tower"
    lr = 5e-4 if is_new else 2e-5 * math.sqrt(batch / 256)
    yield (
        "train.lr", _round(lr),
        "half of stage 0's" if is_new else "low, or the base forgets; grows with the batch's root",
    )  # fmt: skip
    yield "train.weight_decay", 0.1, "few pictures"
    yield "train.precision", precision, reason
    yield "train.checkpoint.every", 100, "what a kill can cost, in steps"


def architecture(base: str) -> tuple[str, str | None]:
    """Splits a base into the name or path of its architecture and its tag of weights, or None.

    Raises ValueError if it has no weights, or an unknown tag.
    """
    where, tag = split_name(base)
    name = str(where)
    if tag is None:
        refuse_without_weights(name)
    elif tag != RANDOM:
        model_config(name)
        check_tag(name, tag)
    return name, tag


def check_base(base: str, *, fetch: bool) -> None:
    """Loads the weights of a base, to raise the errors of ``load_towers`` before hours of packing.

    With ``fetch`` False only files on this disk are loaded, and nothing is downloaded.
    """
    name, tag = architecture(base)
    here = Path(tag or name.removeprefix("hf:").removeprefix("local-dir:")).exists()
    if tag != RANDOM and (fetch or here):
        load_towers(name, tag)


def _batch(at: Situation) -> int:
    """Returns the largest power of two that is at most a sixteenth of the pictures, or the smallest
    batch, rounded up to what the ranks can divide."""
    most = _LARGEST_BATCH if at.machine.memory_gib is not None else 256
    batch = min(max(1 << int(math.log2(at.samples / 16)), _SMALLEST_BATCH), most)
    return math.ceil(batch / at.machine.ranks) * at.machine.ranks


def _clusters(samples: int, batch: int) -> tuple[int, int]:
    """Returns the number of stages, and of the clusters of each: as many that a group still has a
    quarter more pictures than a batch."""
    most = samples / (1.25 * batch)
    stages = 2 if most >= 4 else 1
    return stages, min(max(int(most ** (1 / stages)), 2), _MOST_CLUSTERS)


def _round(number: float) -> float:
    """Rounds to two significant digits."""
    return float(f"{number:.2g}")


# --- what fits the memory ----------------------------------------------------------------------


def _fit_memory(
    at: Situation, name: str, choices: Sequence[Choice], overrides: Sequence[str]
) -> list[Choice]:
    """Returns the choices by which a training fits the memory: those of the quickest way that does.

    ``name`` is "base" or "train". Raises ValueError if no way fits.
    """
    if at.machine.memory_gib is None or not any(key.startswith(f"{name}.") for key, *_ in choices):
        return []
    least = 0.0
    for extra in _ways(name, choices):
        config = configuration.from_tree(_build_tree([*choices, *extra]), overrides)
        try:
            measured = memory.measure(config, name, config.trainings[name], at.machine)
        except ValueError:  # trained batch norms exclude gradient caching
            continue
        need = measured["sum"] / GIB
        if need <= _USABLE * at.machine.memory_gib:
            fits = f"{need:.1f} of {at.machine.memory_gib:g} GiB"
            return [(key, value, f"{reason}: {fits}") for key, value, reason in extra]
        least = min(least or need, need)
    raise ValueError(
        f"{name} needs at least {least:.1f} GiB of each GPU, of which there are "
        f"{at.machine.memory_gib:g}: take a smaller base, or more memory"
    )


def _ways(name: str, choices: Sequence[Choice]) -> Iterator[list[Choice]]:
    """Yields choices by which a training needs less memory, the quickest first."""
    batch = next(value for key, value, _ in choices if key == f"{name}.global_batch")
    recompute = (f"{name}.engine.grad_checkpointing", True, "activations are computed twice")
    few = f"{name}.engine.micro_batch", "gradient caching, the same gradient in parts"
    parts = [2**power for power in range(int(math.log2(batch)), 2, -1)]
    engine: list[list[Choice]] = [[(few[0], None, "the whole batch at once")], [recompute]]
    engine += [[(few[0], part, few[1])] for part in parts]
    engine += [[(few[0], part, few[1]), recompute] for part in (64, 8) if part < batch]
    adapters = (f"{name}.lora.rank", 8, "small adapters in the place of whole layers")
    rate = (f"{name}.lr", 2e-4, "usual of adapters")
    for lora in ([], [adapters, rate]) if name == "train" else ([],):
        yield from (lora + each for each in engine)


# --- YAML ----------------------------------------------------------------------------------------


def _build_tree(choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns the choices as nested mappings; if an option occurs twice, the last one counts."""
    tree: dict[str, Any] = {}
    for key, value, _ in choices:
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _write_yaml(choices: Sequence[Choice], config: Config, overrides: Sequence[str]) -> str:
    """Returns the choices and overrides as YAML, each with its reason as a comment."""
    reasons = {key: reason for key, _, reason in choices}
    tree, plain = _build_tree(choices), TypeAdapter(Config).dump_python(config, mode="json")
    for names in (override.partition("=")[0].split(".") for override in overrides):
        node, value = tree, plain
        for depth, name in enumerate(names, start=1):
            if name not in value:  # as eval.suite.pairs=null, which drops a benchmark
                node.pop(name, None)
                break
            if depth == len(names) or isinstance(value[name], list):  # a list is written whole
                node[name], reasons[".".join(names[:depth])] = value[name], "given"
                break
            node, value = node.setdefault(name, {}), value[name]
    return "".join(_lines(tree, reasons))


def _lines(tree: Mapping[str, Any], reasons: Mapping[str, str], path: str = "") -> Iterator[str]:
    indent = "  " * path.count(".")
    for key, value in tree.items():
        if isinstance(value, dict) and f"{path}{key}" not in reasons:
            yield f"{indent}{key}:\n"
            yield from _lines(value, reasons, f"{path}{key}.")
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
            text = text.removesuffix("\n").removesuffix("\n...")
            yield f"{indent}{key}: {text}  # {reasons[f'{path}{key}']}\n"
