"""What the objectives with class centers learn: linear probe and kNN after equal compute.

For each data set and seed an untrained encoder (random weights) embeds the train images, k-means
makes their labels of that, and every variant trains the same encoder from the same weights on the
same labels, with the same number of steps, batch size, order of samples and learning rate. Class
names play no part in the labels. ``untrained`` is the encoder that the labels are from. Seeds
differ in weights, clusters, order, crops and negatives; the images stay the same.

Everything lies below ``--out``: a run directory for each training, and ``rows.jsonl`` with a row
for each encoder measured. The same command goes on where it was interrupted. CIFAR-10 and
Caltech-101 come from the shared data; where they are absent, rendered shapes stand in.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks import class_folders, timing

# isort: split
import torch
from PIL import Image

from mclclip import cluster, config, embed, export, index, pack, train
from mclclip.artifacts import digest_json
from mclclip.config import Config
from mclclip.eval import results
from mclclip.eval import run as evaluation
from mclclip.layout import Layout
from mclclip.parallel.process_group import Context

UNTRAINED, REFERENCE = "untrained", "single_label"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    REFERENCE: {"kind": "single_label", "labels_per_sample": 1},
    "mlc, l = 8": {"kind": "mlc", "labels_per_sample": 8},
    "mlcd, l = 1": {"kind": "mlcd", "labels_per_sample": 1},
    "mlcd, l = 2": {"kind": "mlcd", "labels_per_sample": 2},
    "mlcd, l = 4": {"kind": "mlcd", "labels_per_sample": 4},
    "mlcd, l = 8": {"kind": "mlcd", "labels_per_sample": 8},
}
MOST_LABELS = 8
METRICS = ("linear_probe", "knn")
CONTEXT = Context(device=torch.device("cpu"))
# Data set -> a function of an empty folder, train images and test images per class.
MAKERS: Mapping[str, Callable[[Path, int, int], Path]] = {
    "cifar10": partial(class_folders.cifar10, timing.SHARED_DATA),
    "caltech101": partial(class_folders.caltech101, timing.SHARED_DATA),
    "rendered": partial(class_folders.rendered, attribute="shape"),
}
PER_CLASS = {"cifar10": (500, 200), "caltech101": (10, 5), "rendered": (300, 100)}


@dataclass(frozen=True)
class Setting:
    """What is the same for all variants of a data set."""

    clusters: int
    steps: int
    batch: int
    image_size: int
    lr: float
    sample_rate: float
    scale: float
    margin_size: float
    centers: str
    lr_scale: float
    crop: float
    strength: float
    width: int = 16
    color: float = 0.0

    def model(self) -> dict[str, Any]:
        """A small ViT with 16 patches and the smallest text tower, which nothing here uses."""
        return {
            "embed_dim": 64,
            "vision_cfg": {
                "image_size": self.image_size,
                "patch_size": None,
                "layers": [1, 1, 1, 1],
                "width": self.width,
                "head_width": 32,
            },
            "text_cfg": {
                "context_length": 8,
                "vocab_size": 49408,
                "width": 8,
                "heads": 1,
                "layers": 1,
            },
        }


def options_of(source: Path, run_dir: Path, seed: int, variant: str, how: Setting) -> Config:
    """The configuration of one training over the folders and shards in ``source``."""
    objective = {
        **VARIANTS.get(variant, VARIANTS[REFERENCE]),
        "sample_rate": how.sample_rate,
        "scale": how.scale,
        "margin": "arc" if how.margin_size else "none",
        "margin_size": how.margin_size,
        "centers": how.centers,
        "lr_scale": how.lr_scale,
    }
    probes: dict[str, dict[str, Any]] = {
        "linear_probe": {"strength": how.strength},
        "knn": {},
    }
    return config.from_tree(
        {
            "run_dir": str(run_dir),
            "seed": seed,
            "device": "cpu",
            "num_threads": 1,
            "num_stages": 1,
            "data": {
                "sources": {"images": {"shards": f"{source}/shards/*.tar"}},
                "num_workers": 0,
                "index_workers": 1,
            },
            "model": {"name": how.model(), "augmentation": {"scale": [how.crop, 1.0]} | ({"color_jitter": [0.4, 0.4, 0.4, 0.1], "color_jitter_prob": how.color, "gray_scale_prob": how.color / 4} if how.color else {})},
            "embed": {"dtype": "float32"},
            "cluster": {"num_clusters": how.clusters, "labels_per_sample": MOST_LABELS},
            "train": {
                "objective": objective,
                "global_batch": how.batch,
                "steps": how.steps,
                "lr": how.lr,
                "weight_decay": 0.05,
                "checkpoint": {"every": how.steps, "keep": 1},
            },
            "eval": {
                "suite": {
                    name: {"kind": name, "path": f"{source}/folders", "options": options}
                    for name, options in probes.items()
                }
            },
        }
    )


def prepare(name: str, per_class: tuple[int, int], where: Path) -> None:
    """Class folders and shards of a data set, once."""
    folders = where / "folders"
    if not folders.exists():
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=where) as scratch:
            made = MAKERS[name](Path(scratch) / "folders", *per_class)
            if name == "caltech101":
                shrink(made)
            made.rename(folders)
    pack.pack(folders / "train.csv", folders, where / "shards")


def shrink(folders: Path) -> None:
    """Stores photographs at the size they are used at: decoding would take most of the time."""
    for path in folders.glob("*/*/*.jpg"):
        with Image.open(path) as picture:
            picture.draft("RGB", (128, 128))
            small = picture.convert("RGB")
        small.thumbnail((96, 96), Image.Resampling.BICUBIC)
        small.save(path, quality=95)


def make_labels(source: Path, run_dir: Path, seed: int, how: Setting) -> Config:
    """Stage 0, the untrained encoder, and its clusters."""
    options = options_of(source, run_dir, seed, UNTRAINED, how)
    index.run(options, CONTEXT)
    export.stage(options, CONTEXT, stage=0)
    embed.run(options, CONTEXT, stage=0)
    cluster.run(options, CONTEXT, stage=0)
    return options


def learn(source: Path, labels: Path, run_dir: Path, seed: int, variant: str, how: Setting) -> Path:
    """Trains one variant on the labels of the run ``labels``; returns its export."""
    options = options_of(source, run_dir, seed, variant, how)
    run_dir.mkdir(parents=True, exist_ok=True)
    for shared in ("index", "stage_0"):
        if not (run_dir / shared).is_symlink():
            (run_dir / shared).symlink_to((labels / shared).resolve())
    train.run(options, CONTEXT, stage=1)
    return export.stage(options, CONTEXT, stage=1)


def measure(options: Config, name: str, model: Path) -> dict[str, Any]:
    """Accuracy in percent on each benchmark, and the number of test images."""
    evaluation.evaluate(options, CONTEXT, {name: model})
    rows = [row for row in results.read(Layout.of(options).results) if row.metric == "accuracy"]
    return {row.benchmark: row.value for row in rows if row.model == name} | {
        "train_images": rows[0].protocol["num_train"],  # type: ignore[index]
        "test_images": rows[0].count,
    }


def one_seed(
    name: str, how: Setting, variants: Sequence[str], seed: int, out: Path, rows: list[dict]
) -> None:
    """All variants of one seed; adds what is missing to ``rows`` and to rows.jsonl."""
    source = out / name
    # Labels do not depend on how one trains on them.
    labels = source / f"labels_{how.image_size}px_k{how.clusters}_seed_{seed}"
    root = source / f"{digest_json(asdict(how))[:8]}_seed_{seed}"
    for variant in (UNTRAINED, *variants):
        key = {"data": name, "seed": seed, "variant": variant, "setting": asdict(how)}
        if any(key.items() <= row.items() for row in rows):
            continue
        started, cpu = time.perf_counter(), time.process_time()
        if variant == UNTRAINED:
            options = make_labels(source, labels, seed, how)
            model = Layout.of(options).export(0)
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
        shown = "  ".join(f"{metric} {row[metric]:.1f} %" for metric in METRICS)
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
    own = [r for r in rows if r["data"] == name and r["setting"] == asdict(how)]
    own = [row for row in own if row["seed"] in seeds]
    by_variant = {
        v: {r["seed"]: r for r in own if r["variant"] == v} for v in (UNTRAINED, *VARIANTS)
    }
    first = own[0]
    reference = by_variant[REFERENCE]
    lines = []
    for variant, found in by_variant.items():
        if not found:
            continue
        cells = [_spread([row[metric] for row in found.values()]) for metric in METRICS]
        pairs = [
            _spread([row[m] - reference[s][m] for s, row in found.items() if s in reference], "+")
            for m in METRICS
        ]
        times = [statistics.median(r[unit] for r in found.values()) for unit in ("wall_s", "cpu_s")]
        spent = ["", ""] if variant == UNTRAINED else [f"{value:.0f}" for value in times]
        lines.append([variant, cells[0], pairs[0], cells[1], pairs[1], *spent, str(len(found))])
    beside = f"- {REFERENCE}"
    timing.print_table(
        f"{name}: {first['train_images']:,} train and {first['test_images']:,} test images, "
        f"k = {how.clusters}, r = {how.sample_rate:g}, {how.steps} steps of {how.batch}, "
        f"scale {how.scale:g}, arc margin {how.margin_size:g}; mean and standard deviation "
        "over seeds",
        ["variant", "probe %", beside, "kNN %", beside, "wall s", "CPU s", "seeds"],
        lines,
    )


def _spread(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.1f}{deviation}"


SETTINGS = {
    "cifar10": Setting(
        clusters=200, steps=200, batch=128, image_size=32, lr=1e-3, sample_rate=0.5, scale=16.0,
        margin_size=0.0, centers="centroids", lr_scale=5.0, crop=0.4, strength=1.0,
    ),
}  # fmt: skip
SETTINGS["rendered"] = SETTINGS["cifar10"]
SETTINGS["caltech101"] = replace(SETTINGS["cifar10"], clusters=100, image_size=48)


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data", nargs="+", choices=list(MAKERS), default=["cifar10", "caltech101"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path, help="goes on there (default: a folder of this call)")
    parser.add_argument("--per-class", nargs=2, type=int, metavar=("TRAIN", "TEST"))
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="of Setting")
    parser.add_argument("--quick", action="store_true", help="one seed, few images and steps")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.set = options.seeds[:1], ["steps=20", "clusters=20", *options.set]
    torch.set_num_threads(1)
    logging.getLogger("mclclip").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        for name in data_sets(options.data):
            how = with_values(SETTINGS[name], options.set)
            per_class = tuple(options.per_class or ((40, 20) if options.quick else PER_CLASS[name]))
            if name == "caltech101" and not options.per_class:
                per_class = PER_CLASS[name]
            prepare(name, per_class, out / name)
            rows = read_rows(out / "rows.jsonl")
            for seed in options.seeds:
                one_seed(name, how, options.variants, seed, out, rows)
            report(name, how, rows, options.seeds)


if __name__ == "__main__":
    main()
