"""What the objectives with class centers learn: linear probe and kNN after equal compute.

For each data set and seed an untrained encoder (random weights) embeds the train images, k-means
makes their labels of that, and every variant trains the same encoder from the same weights on the
same labels, with the same number of steps, batch size, order of samples and learning rate. Class
names play no part in the labels. ``untrained`` is the encoder that the labels are from. Seeds
differ in weights, clusters, order, crops and negatives; the images stay the same.

With the settings' scale and margin (the package's own) the loss after so few steps is still far
from zero, where every row pulls with full force and MLC and MLCD of equal l have the same gradient.
``--set scale=32 margin_size=0`` leads to where the objectives differ.

``--set teacher_steps=1500`` takes the labels from a briefly trained encoder: ``teacher``, a CLIP of
class names on images of its own. The other encoders start from random weights all the same, as the
paper's do; class names reach them through clusters only.

Everything lies below ``--out``: a run directory for each training, and ``rows.jsonl`` with a row
for each encoder measured. The same command goes on where it was interrupted. CIFAR-10 and
Caltech-101 come from the shared data; where they are absent, rendered shapes stand in.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from tests.benchmarks import timing

# isort: split
import torch

from mclclip.config import Config
from mclclip.eval import results
from mclclip.run.artifacts import RunPaths
from mclclip.util.files import digest_json
from mclclip.verbs import eval as evaluation
from tests.benchmarks.class_learning import (
    CONTEXT,
    MAKERS,
    PROBES,
    REFERENCE,
    SETTINGS,
    TEACHER,
    UNTRAINED,
    VARIANTS,
    Setting,
    learn,
    make_labels,
    options_of,
    prepare,
    purity,
)

PER_CLASS_SHORT = {"cifar10": (40, 20, 40), "caltech101": (3, 2, 0), "rendered": (40, 20, 40)}
SHORT = ("clusters=20", "steps=15", "batch=64")
PER_CLASS = {"cifar10": (500, 400, 1500), "caltech101": (10, 5, 0), "rendered": (300, 100, 300)}


def measure(options: Config, name: str, model: Path) -> dict[str, Any]:
    """Accuracy in percent on each benchmark, and the number of test images."""
    evaluation.evaluate(options, CONTEXT, {name: model})
    rows = [row for row in results.read(RunPaths.of(options).results) if row.metric == "accuracy"]
    return {row.benchmark: row.value for row in rows if row.model == name} | {
        "train_images": rows[0].protocol["num_train"],  # type: ignore[index]
        "test_images": rows[0].count,
    }


def one_seed(
    name: str,
    how: Setting,
    variants: Sequence[str],
    seed: int,
    out: Path,
    rows: list[dict[str, Any]],
) -> None:
    """All variants of one seed; adds what is missing to ``rows`` and to rows.jsonl."""
    source = out / name
    # Labels do not depend on how one trains on them.
    labels = source / f"labels_{how.image_size}px_k{how.clusters}_{how.teacher_steps}_seed_{seed}"
    root = source / f"{digest_json(asdict(how))[:8]}_seed_{seed}"
    for variant in (TEACHER if how.teacher_steps else UNTRAINED, *variants):
        key = {"data": name, "seed": seed, "variant": variant, "setting": asdict(how)}
        if any(key.items() <= row.items() for row in rows):
            continue
        started, cpu = time.perf_counter(), time.process_time()
        if variant in (UNTRAINED, TEACHER):
            options = make_labels(source, labels, seed, how)
            first, *_, last = purity(source, labels)
            print(f"{name} seed {seed}: {first:.1%} of an image's nearest cluster are of its class")
            print(f"{name} seed {seed}: {last:.1%} of the farthest that is stored")
            model = RunPaths.of(options).export(0)
        else:
            run_dir = root / variant.replace(", ", "_").replace(" = ", "")
            options = options_of(source, run_dir, seed, variant, how)
            model = learn(source, labels, run_dir, seed, variant, how)
        spent = {
            "wall_s": time.perf_counter() - started,
            "cpu_s": time.process_time() - cpu,
        }
        row = key | spent | measure(options, variant, model)
        rows.append(row)
        with open(out / "rows.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = "  ".join(f"{metric} {row[metric]:.1f} %" for metric in PROBES)
        print(f"{name} seed {seed} {variant}: {shown}  ({row['wall_s']:.0f} s)", flush=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What earlier runs have measured; a half-written last line counts as not measured."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def report(name: str, how: Setting, rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> None:
    """One table of a data set: mean and standard deviation over the seeds that are there."""
    own = [
        row
        for row in rows
        if row["data"] == name and row["setting"] == asdict(how) and row["seed"] in seeds
    ]
    by_variant = {
        variant: {row["seed"]: row for row in own if row["variant"] == variant}
        for variant in (UNTRAINED, TEACHER, *VARIANTS)
    }
    beside = f"- {REFERENCE}"
    timing.print_table(
        f"{name}: {own[0]['train_images']:,} train and {own[0]['test_images']:,} test images, "
        f"k = {how.clusters}, r = {how.sample_rate:g}, {how.steps} steps of {how.batch}, "
        f"{how.image_size} px, scale {how.scale:g}, arc margin {how.margin_size:g}; accuracy, "
        "mean ± standard deviation over seeds, and the difference within a seed",
        ["variant", "probe %", beside, "kNN %", beside, "wall s", "CPU s", "seeds"],
        [_line(v, found, by_variant[REFERENCE]) for v, found in by_variant.items() if found],
    )


def _line(
    variant: str, found: Mapping[int, dict[str, Any]], reference: Mapping[int, dict[str, Any]]
) -> list[str]:
    """A variant's cells; ``found`` and ``reference`` are rows by seed."""
    cells = [variant]
    for metric in PROBES:
        cells.append(_spread([row[metric] for row in found.values()]))
        pairs = [row[metric] - reference[s][metric] for s, row in found.items() if s in reference]
        cells.append("" if variant == REFERENCE else _spread(pairs, "+"))
    for unit in ("wall_s", "cpu_s"):
        spent = statistics.median(row[unit] for row in found.values())
        cells.append("" if variant in (UNTRAINED, TEACHER) else timing.number(spent))
    return [*cells, str(len(found))]


def _spread(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.1f}{deviation}"


def with_values(how: Setting, words: Sequence[str]) -> Setting:
    """The setting with ``name=value`` replaced."""
    kinds = {field.name: type(getattr(how, field.name)) for field in fields(how)}
    pairs = [word.partition("=")[::2] for word in words]
    if unknown := [name for name, _ in pairs if name not in kinds]:
        raise ValueError(f"no setting {unknown[0]!r}: there are {', '.join(kinds)}")
    return replace(how, **{name: kinds[name](value) for name, value in pairs})


def data_sets(wanted: Sequence[str]) -> list[str]:
    """The data sets that are there, or the stand-in."""
    there = [n for n in wanted if n == "rendered" or (timing.SHARED_DATA / n).is_dir()]
    return there or ["rendered"]


def main(arguments: Sequence[str] | None = None) -> None:
    """All data sets and seeds, or a choice of them."""
    parser = timing.parser(__doc__)
    parser.add_argument(
        "--data", nargs="+", choices=list(MAKERS), default=["cifar10", "caltech101"]
    )
    parser.set_defaults(rounds=3)  # seeds
    parser.add_argument("--seeds", nargs="+", type=int, help="these instead of 0, 1, ...")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path, help="goes on there (default: a folder of this call)")
    parser.add_argument("--per-class", nargs=3, type=int, metavar=("TRAIN", "TEST", "TEACHER"))
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="of Setting")
    short = {"data": ["cifar10"], "variants": ["single_label", "mlcd, l = 8"]}
    options = timing.parse(parser, arguments, **short)
    seeds = options.seeds or list(range(options.rounds))
    if options.short:
        options.set = [*SHORT, *options.set]
    torch.set_num_threads(1)
    logging.getLogger("mclclip").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Unused augmentation cfg items")  # they are used
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        for name in data_sets(options.data):
            how = with_values(SETTINGS[name], options.set)
            per_class = options.per_class or (PER_CLASS_SHORT if options.short else PER_CLASS)[name]
            if how.teacher_steps and not per_class[2]:
                print(f"{name}: left out, as no images are left for a teacher")
                continue
            prepare(name, tuple(per_class), out / name)
            rows = read_rows(out / "rows.jsonl")
            for seed in seeds:
                one_seed(name, how, options.variants, seed, out, rows)
            report(name, how, rows, seeds)


if __name__ == "__main__":
    main()
