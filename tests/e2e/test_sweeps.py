"""Every recipe and every line of every sweep trains, exports and evaluates: two steps a stage on
made-up pictures.

A line is run on the recipes of the paper's size that its sweep names, and on the first one that it
names for small machines, as its head says it, with the paths of the recipe. Behind its options
stand those that make it small: towers, steps, batch, clusters where they are more than the
pictures, models that would be fetched. Everything else is the line's and the recipe's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import timm
from safetensors.torch import save_file

from mclclip import config
from mclclip.checkpoint import step_files
from mclclip.config import Config
from mclclip.data import patterns
from mclclip.data.datasets.sources import array_sample, png_sample
from mclclip.data.shard_writer import write_shards
from mclclip.eval import results
from mclclip.util import shipped
from mclclip.verbs import make_dataset
from tests import tiny
from tests.e2e.conftest import Shell, rows_of
from tests.matrix import kept
from tests.unit.data.datasets import fakes
from tests.unit.test_sweep import SWEEPS, commands, sweep

STEPS = 2
BATCH = 8
FILES = {file.stem: file for file in SWEEPS}
# Lines, by number, that a head gives to its recipe for small machines, and to the other one, where
# these are not all.
ON_SMALL = {"simlap_fig7": range(1, 13), "simlap_fig8": range(1, 9), "simlap_table2": range(1, 3)}
ON_LARGE = {"simlap_fig7": range(13, 25), "simlap_fig8": (1, 2, 5, 6, 9, 10, 11, 12)}
# Of as many, a sample rate of 0.01 draws two, and one of 0.1 four.
CLUSTERS = {"mlcd_table6": 200, "mlcd_table7b": 40}
CLIP = dict(tiny.MODEL, vision_cfg=dict(tiny.MODEL["vision_cfg"], layers=12))
CLIP_RESNET = {"image_size": 32, "layers": [2, 2, 2, 2], "width": 16, "patch_size": None}
RESNET = {"backbone": "timm:resnet18", "image_size": 32, "stem": "cifar"}
SMALL_RESNET = {"channels": [4, 8, 8, 12], "layers": [1, 1, 1, 1]}
SMALL_VIT = {"depth": 1, "embed_dim": 24, "num_heads": 3}


Command = tuple[Path, list[str], list[str]]  # a recipe, options before and behind those of a line


@cache
def is_small(recipe: Path) -> bool:
    """Says whether a recipe is made for CPUs."""
    return "device" in yaml.safe_load(recipe.read_text())


def recipes_of(stem: str, number: int) -> dict[str, Command]:
    """The recipes that a line runs on here: all of the paper's size, and the first small one."""
    found: dict[str, Command] = {}
    has_small = False
    for each in commands(FILES[stem]):
        small = is_small(each[0])
        some = (ON_SMALL if small else ON_LARGE).get(stem)
        if (some is None or number in some) and not (small and has_small):
            found.setdefault(each[0].stem, each)
            has_small |= small
    return found


def lines() -> list[tuple[str, int, str, str]]:
    """Sweep, number, name and recipe of every run."""
    found = []
    for stem, file in FILES.items():
        words = [line.split() for line in file.read_text().splitlines()]
        names = [each[0] for each in words if each and not each[0].startswith("#")]
        found += [
            (stem, number, name, recipe)
            for number, name in enumerate(names, start=1)
            for recipe in recipes_of(stem, number)
        ]
    return found


LINES = lines()
SHORT = LINES.index(("ifm_fig6", 5, "ifm-tau_0.2", "trifeature"))
RECIPES = shipped.recipe_names()
# A ResNet without its attention pool, and labels in two levels with adapters to another tower.
SHORT_RECIPES = [RECIPES.index(name) for name in ("cc12m_rn50_paper", "mlcd_laion_vitl14")]


# --- made-up data, where the recipes look for it --------------------------------------------------


@dataclass(frozen=True)
class Pictures:
    """Shards of ``splits`` (numbers of pictures), each picture with the values of attributes.

    ``attributes`` gives their numbers of values; ``shards`` are those of the first split.
    """

    size: int
    attributes: Mapping[str, int]
    splits: Mapping[str, int]
    channels: int = 3
    shards: int = 2

    def write(self, root: Path) -> None:
        random = np.random.default_rng(0)
        for split, number in self.splits.items():
            samples = []
            for n in range(number):
                pixels = random.integers(0, 256, (self.size, self.size, self.channels), np.uint8)
                values = {name: f"v{n % count}" for name, count in self.attributes.items()}
                make = array_sample if self.channels == 4 else png_sample
                samples.append(make(n, pixels, values))
            write_shards(samples, root / split, -(-number // self.shards))


TWO = {"train": 60, "test": 30}
PICTURES = {
    "cifar_mnist": Pictures(32, {"cifar": 10, "mnist": 3}, TWO, channels=4, shards=6),
    "trifeature_32": Pictures(32, {"shape": 10, "texture": 3, "colour": 2}, TWO),
    "trifeature": Pictures(128, {"shape": 10, "texture": 3, "colour": 2}, TWO),
    "attributed_patterns": Pictures(32, dict.fromkeys(patterns.ATTRIBUTES, 3), TWO),
    "celeba": Pictures(128, {"black_hair": 2, "smiling": 3, "male": 2}, TWO),
    "stl_digits": Pictures(96, {"stl10": 10, "mnist": 3}, TWO),
    "cifar_pairs": Pictures(64, {"pair": 10}, TWO, shards=6),
    "cifar10": Pictures(32, {"class": 10}, TWO, shards=6),
    "stl10": Pictures(96, {"class": 10}, {**TWO, "unlabeled": 10}),
    "imagenet100": Pictures(64, {"class": 10}, TWO),
    "imagenet_shards": Pictures(64, {"class": 26}, {"train": 78}),
    "in25": Pictures(64, {"class": 26}, {"train": 78}),
}
CLASSES = ("n01440764", "n01443537")  # of ImageNet, whose names a recipe takes by these ids
FOLDERS = (
    "cars", "cifar10_folders", "cifar100", "flowers", "food101", "imagenet", "pets",
    "stl10_folders",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the root of a checkout, with the data of all recipes."""
    root = tmp_path_factory.mktemp("checkout")
    data = root / "data"
    for name, pictures in PICTURES.items():
        pictures.write(data / name)
    classes = root / "classes"
    for number in range(24):
        split, name = ("train", "test")[number % 2], CLASSES[number // 2 % 2]
        fakes.image_file(classes / split / name / f"{number}.png", fakes.pixels(number, 32, 32, 3))
    for name in FOLDERS:
        (data / name).symlink_to(classes)
    made = tiny.make_data(root / "patterns", num_samples=240)
    for name in ("cc12m", "laion400m"):
        (data / name).symlink_to(made / "shards")
    (data / "MMVP_VLM").symlink_to(made / "pairs")
    tower = root / "data/mobilenetv2/mobilenetv2_100.safetensors"  # timm's, with random weights
    tower.parent.mkdir()
    save_file(timm.create_model("mobilenetv2_100").state_dict(), tower)
    (data / "flickr8k").mkdir()
    (data / "flickr8k/train").symlink_to(made / "shards")
    for name in ("runs/demo/data_0", "runs/ucm/data"):
        (root / name).parent.mkdir(parents=True)
        (root / name).symlink_to(made)
    (root / "runs/cifar_pairs").mkdir()
    (root / "runs/cifar_pairs/data").symlink_to(data / "cifar_pairs")
    bars = root / "runs/shortcut/bar"
    make_dataset.run("shortcut", bars, source=[f"shards={made / 'shards'}"])
    return root


# --- a line as a small run ------------------------------------------------------------------------


def smaller(settled: Config) -> list[str]:
    """The options that make a run small."""
    found = ["device=cpu", "num_threads=1", "data.num_workers=0", "data.index_workers=1"]
    for name in settled.trainings:
        found += [f"{name}.global_batch={BATCH}", f"{name}.steps={STEPS}", f"{name}.log_every=1"]
    found += _models(settled)
    if settled.num_stages and max(settled.clusters) > 50:
        fewest = 40 if settled.cluster.labels_per_sample > 12 else 12
        number = CLUSTERS.get(Path(settled.run_dir).parent.name, fewest)
        found.append(f"cluster.num_clusters={number}")
    suite = {}
    for name, benchmark in settled.eval.suite.items():
        # COCO's annotations, and the lists of captions and labels of `ucm`, are not made here.
        if benchmark.kind != "retrieval" and "labels" not in benchmark.options:
            suite[name] = asdict(benchmark)
    return [*found, f"eval.suite={json.dumps(suite)}"]


def _models(settled: Config) -> list[str]:
    """Towers of a few channels; those that would be fetched are replaced."""
    found = []
    for name in ("model", "trained_model"):
        model = getattr(settled, name)
        if model is None:
            continue
        tower = model.name
        known = not isinstance(tower, str)
        vision = tower.get("model_cfg", tower)["vision_cfg"] if known else {}
        backbone = vision.get("backbone", "")
        if not known or backbone.startswith("torchvision:"):
            own = {"vision_cfg": RESNET} if known else CLIP
            if not known and tower.startswith("RN"):
                own = CLIP | {"vision_cfg": CLIP_RESNET}
            found += [f"{name}.name={json.dumps(own)}", f"{name}.pretrained=null"]
        if "resnet" in backbone:
            found.append(f"{name}.name.vision_cfg.options={json.dumps(SMALL_RESNET)}")
        elif "vit" in backbone:
            found += [f"{name}.name.vision_cfg.options.{k}={v}" for k, v in SMALL_VIT.items()]
    return found


@dataclass(frozen=True)
class Into:
    """The command runs in a folder, as if that were the root of the checkout."""

    folder: Path

    def __call__(self) -> None:
        os.chdir(self.folder)


def run_line(stem: str, number: int, name: str, checkout: Path, go: Callable[..., Any]) -> Config:
    """Runs a line on a recipe; its resolved configuration, with ``run_dir`` as it was typed."""
    recipe, before, behind = recipes_of(stem, number)[name]
    line = sweep(FILES[stem], number, RUNS=f"runs/{name}/{stem}").stdout.split()
    options = [*before, *line, *behind]
    settled = config.load(recipe, options)
    options += smaller(settled)
    settled = config.load(recipe, options)
    num_classes = 10 if recipe.stem == "simlap_cifar10" else 26
    means = np.random.default_rng(0).normal(size=(num_classes, 6))
    np.save(checkout / "data/class_means.npy", means)
    for stages in [1, 2, settled.num_stages] if stem == "mcl_fig5" else [settled.num_stages]:
        force = ["--force"] if stem == "mcl_fig5" else []
        go("run", "--config", recipe, *force, *options, f"num_stages={stages}")
    return settled


@pytest.mark.slow
@pytest.mark.parametrize(("stem", "number", "name", "recipe"), kept(LINES, SHORT))
def test_a_line_runs(
    shell: Shell, checkout: Path, stem: str, number: int, name: str, recipe: str
) -> None:
    settled = run_line(stem, number, recipe, checkout, partial(shell.ok, inside=Into(checkout)))
    assert Path(settled.run_dir).name == name
    check(settled, checkout)


@pytest.mark.slow
@pytest.mark.parametrize("name", kept(RECIPES, *SHORT_RECIPES))
def test_a_recipe_runs(shell: Shell, checkout: Path, name: str) -> None:
    options = [f"run_dir=runs/recipes/{name}"]
    options += smaller(config.load(name, options))
    shell.ok("run", "--config", name, *options, inside=Into(checkout))
    check(config.load(name, options), checkout)


def check(settled: Config, checkout: Path) -> None:
    """Every stage was trained for two steps, exported and evaluated, and no figure is NaN."""
    run = checkout / settled.run_dir
    rows = results.read(run / "results.jsonl")
    assert bool(rows) == bool(settled.eval.suite) and all(np.isfinite(row.value) for row in rows)
    stages = range(settled.num_stages + 1)
    assert not rows or {f"stage_{stage}" for stage in stages} <= {row.model for row in rows}
    for stage in stages if settled.base is not None else stages[1:]:
        directory = run / f"stage_{stage}/train"
        assert step_files.steps(directory / "checkpoints")[-1] == STEPS
        losses = [row["loss"] for row in rows_of(directory)]
        assert len(losses) == STEPS and np.isfinite(losses).all()
