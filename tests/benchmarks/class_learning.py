"""One training with class centers on a small labelled set, in process (``bench_class_learning``).

A data set lies in a folder as ``folders/`` (class folders) and ``shards/``; run directories lie
where the caller wants them.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks import class_folders, timing

# isort: split
import numpy as np
import torch
from PIL import Image

from mclclip import config
from mclclip.config import Config
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import RunPaths
from mclclip.verbs import cluster, embed, export, index, pack, train

UNTRAINED, TEACHER, REFERENCE = "untrained", "teacher", "single_label"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    REFERENCE: {"kind": "single_label", "labels_per_sample": 1},
    "mlc, l = 8": {"kind": "mlc", "labels_per_sample": 8},
    "mlcd, l = 1": {"kind": "mlcd", "labels_per_sample": 1},
    "mlcd, l = 2": {"kind": "mlcd", "labels_per_sample": 2},
    "mlcd, l = 4": {"kind": "mlcd", "labels_per_sample": 4},
    "mlcd, l = 8": {"kind": "mlcd", "labels_per_sample": 8},
}
MOST_LABELS = 8
# The probe chooses its L2 strength for each encoder: an untrained one needs a much weaker one.
PROBES: Mapping[str, Mapping[str, Any]] = {"linear_probe": {"max_iterations": 300}, "knn": {}}
CONTEXT = Context(device=torch.device("cpu"))
# Data set -> a function of an empty folder, and train, test and teacher's images per class.
MAKERS: Mapping[str, Callable[[Path, int, int, int], Path]] = {
    "cifar10": partial(class_folders.cifar10, timing.SHARED_DATA),
    "caltech101": partial(class_folders.caltech101, timing.SHARED_DATA),
    "rendered": partial(class_folders.rendered, attribute="shape"),
}


@dataclass(frozen=True)
class Setting:
    """What is the same for all variants of a data set.

    Found on CIFAR-10, seed 0, by trying ``single_label`` and ``mlcd, l = 1``; then fixed for all.
    Centers are drawn, as the centroids of an untrained encoder are nearly parallel (mean cosine
    above 0.99), which ``mlcd`` has to undo first: unlike a softmax it sees a shift of all scores.

    With ``teacher_steps`` the labels come from a teacher instead: the same image tower, trained so
    many steps as a CLIP whose captions are class names, on images of its own. The trainings start
    from random weights as before.
    """

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
    color: float
    width: int
    teacher_steps: int

    def augmentation(self) -> dict[str, Any]:
        """Crops, and colours as in SimCLR; open_clip's transforms have no flips."""
        return {
            "scale": [self.crop, 1.0],
            "color_jitter": [0.4, 0.4, 0.4, 0.1],
            "color_jitter_prob": self.color,
            "gray_scale_prob": self.color / 4,
        }

    def model(self, text_width: int = 8) -> dict[str, Any]:
        """A small ResNet, and a text tower that only a teacher uses."""
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
                "width": text_width,
                "heads": 1,
                "layers": 1,
            },
        }


SMALL = Setting(
    clusters=200,
    steps=200,
    batch=128,
    image_size=32,
    lr=2e-3,
    sample_rate=0.5,
    scale=64.0,
    margin_size=0.3,
    centers="normal",
    lr_scale=5.0,
    crop=0.4,
    color=0.8,
    width=16,
    teacher_steps=0,
)
SETTINGS = {
    "cifar10": SMALL,
    "caltech101": replace(SMALL, clusters=100, steps=150),
    "rendered": replace(SMALL, clusters=100),
}


def options_of(source: Path, run_dir: Path, seed: int, variant: str, how: Setting) -> Config:
    """The configuration of one training over the folders and shards in ``source``."""
    model: dict[str, Any] = {"name": how.model(), "augmentation": how.augmentation()}
    models: dict[str, Any] = {"model": model}
    if variant == TEACHER:
        models["model"] = model | {"name": how.model(text_width=32)}
        models["base"] = {"objective": {"kind": "info_nce"}, **_steps(how, how.teacher_steps)}
    elif how.teacher_steps:
        teacher = RunPaths(teacher_run(source, seed, how)).export(0)
        models = {"model": {"name": f"local-dir:{teacher}"}, "trained_model": model}
    objective = {
        **VARIANTS.get(variant, VARIANTS[REFERENCE]),
        "sample_rate": how.sample_rate,
        "scale": how.scale,
        "margin": "arc" if how.margin_size else "none",
        "margin_size": how.margin_size,
        "centers": how.centers,
        "lr_scale": how.lr_scale,
    }
    return config.from_tree(
        {
            "run_dir": str(run_dir),
            "seed": seed,
            "device": "cpu",
            "num_threads": 1,
            "num_stages": 1,
            "data": {
                "sources": {"images": {"shards": f"{source}/{_shards(variant)}/*.tar"}},
                "num_workers": 0,
                "index_workers": 1,
            },
            **models,
            "embed": {"dtype": "float32"},
            "cluster": {"num_clusters": how.clusters, "labels_per_sample": MOST_LABELS},
            "train": {"objective": objective, **_steps(how, how.steps)},
            "eval": {
                "suite": {
                    name: {"kind": name, "path": f"{source}/folders", "options": options}
                    for name, options in PROBES.items()
                }
            },
        }
    )


def _steps(how: Setting, steps: int) -> dict[str, Any]:
    return {
        "global_batch": how.batch,
        "steps": steps,
        "lr": how.lr,
        "weight_decay": 0.05,
        "checkpoint": {"every": steps, "keep": 1},
    }


def _shards(variant: str) -> str:
    return "teacher_shards" if variant == TEACHER else "shards"


def teacher_run(source: Path, seed: int, how: Setting) -> Path:
    """The teacher's run directory."""
    return source / f"teacher_{how.image_size}px_{how.teacher_steps}_seed_{seed}"


def prepare(name: str, per_class: tuple[int, int, int], where: Path) -> None:
    """Class folders and shards of a data set, once. ValueError where others are there already."""
    folders = where / "folders"
    if not folders.exists():
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=where) as scratch:
            made = MAKERS[name](Path(scratch) / "folders", *per_class)
            if name == "caltech101":
                shrink(made)
            made.rename(folders)
    for part, wanted in zip(("train", "test", "teacher"), per_class, strict=True):
        classes = list((folders / part).glob("*"))
        there = len(list(classes[0].iterdir())) if classes else 0
        if there != wanted:
            raise ValueError(
                f"{folders / part} has {there} images per class, wanted {wanted}: use another --out"
            )
    pack.pack(folders, where / _shards(REFERENCE), captions=folders / "train.csv")
    if per_class[2]:
        pack.pack(folders, where / _shards(TEACHER), captions=folders / "teacher.csv")


def shrink(folders: Path) -> None:
    """Makes photographs small: decoding them again and again would take most of the time."""
    for path in folders.glob("*/*/*.jpg"):
        with Image.open(path) as picture:
            picture.draft("RGB", (128, 128))
            small = picture.convert("RGB")
        small.thumbnail((80, 80), Image.Resampling.BICUBIC)
        small.save(path, quality=95)


def make_labels(source: Path, run_dir: Path, seed: int, how: Setting) -> Config:
    """Stage 0, the untrained encoder or the teacher, and its clusters."""
    if how.teacher_steps:
        teacher = options_of(source, teacher_run(source, seed, how), seed, TEACHER, how)
        index.run(teacher, CONTEXT)
        train.run(teacher, CONTEXT, stage=0)
        export.stage(teacher, CONTEXT, stage=0)
    options = options_of(source, run_dir, seed, UNTRAINED, how)
    index.run(options, CONTEXT)
    export.stage(options, CONTEXT, stage=0)
    embed.run(options, CONTEXT, stage=0)
    cluster.run(options, CONTEXT, stage=0)
    return options


def purity(source: Path, run_dir: Path) -> list[float]:
    """Of the members of an image's nearest, second nearest, ... cluster, the share of its class."""
    with open(source / "folders" / "train.csv", newline="", encoding="utf-8") as file:
        titles = [row["title"] for row in csv.DictReader(file)]  # the order of the shards
    _, classes = np.unique(titles, return_inverse=True)
    nearest = np.load(run_dir / "stage_0" / "clusters" / "cluster_labels.npy")
    members = np.zeros((nearest.max() + 1, classes.max() + 1))
    np.add.at(members, (nearest[:, 0], classes), 1.0)
    shares = members / np.maximum(members.sum(axis=1, keepdims=True), 1.0)
    return [float(shares[column, classes].mean()) for column in nearest.T]


def learn(source: Path, labels: Path, run_dir: Path, seed: int, variant: str, how: Setting) -> Path:
    """Trains one variant on the labels of the run ``labels``; returns its export."""
    options = options_of(source, run_dir, seed, variant, how)
    run_dir.mkdir(parents=True, exist_ok=True)
    for shared in ("index", "stage_0"):
        if not (run_dir / shared).is_symlink():
            (run_dir / shared).symlink_to((labels / shared).resolve())
    train.run(options, CONTEXT, stage=1)
    return export.stage(options, CONTEXT, stage=1)
