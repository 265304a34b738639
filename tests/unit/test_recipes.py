"""Every shipped recipe is a valid run: options, model, benchmarks, and no machine's own paths."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from mclclip import config
from mclclip.config import Config, TrainConfig
from mclclip.eval import run as evaluation
from tests import tiny

FOLDER = tiny.ROOT / "launch" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
OPENAI = ["cc12m_vitb32", "cc12m_vitl14", "mcl_release"]

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def _values(tree: Any) -> Iterator[str]:
    """Every string below a mapping."""
    if isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _values(value)
    elif isinstance(tree, str):
        yield tree


def _trainings(options: Config) -> list[TrainConfig]:
    return [options.train, *([options.base] if options.base else [])]


def test_these_recipes_are_shipped() -> None:
    names = {recipe.stem for recipe in RECIPES}
    assert names >= {"demo", "ucm", "lit", "mlcd_laion_vitl14", "mlcd_finetune_vitl14", *OPENAI}


@every_recipe
def test_it_is_valid_and_stays_so_resolved(recipe: Path) -> None:
    options = config.load(recipe)
    assert config.from_tree(yaml.safe_load(config.dump(options))) == options


@every_recipe
def test_it_names_every_option_once(recipe: Path) -> None:
    """YAML lets a repeated key pass, and the first one is lost."""

    def walk(node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"{recipe.name}: a key of {keys} stands twice"
            for _, value in node.value:
                walk(value)
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                walk(value)

    walk(yaml.compose(recipe.read_text()))


@every_recipe
def test_its_paths_are_relative(recipe: Path) -> None:
    options = yaml.safe_load(recipe.read_text())
    assert not [text for text in _values(options) if text.startswith(("/", "~", ".."))]
    assert options["run_dir"].startswith("runs/")


@every_recipe
def test_its_commands_name_it(recipe: Path) -> None:
    comments = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    assert comments, "a recipe begins with what it is and what to type"
    if recipe.stem != "demo":  # has a command of its own
        assert any(f"launch/recipes/{recipe.name}" in line for line in comments)


@every_recipe
def test_its_benchmarks_have_options_that_evaluators_know(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = config.load(recipe).eval.suite
    assert suite
    monkeypatch.chdir(tmp_path)
    for benchmark in suite.values():
        Path(benchmark.path).mkdir(parents=True, exist_ok=True)
    evaluation.check(suite)


@every_recipe
def test_it_unlocks_no_more_blocks_than_there_are(recipe: Path) -> None:
    options = config.load(recipe)
    if str(options.model.name).startswith("local-dir:"):
        pytest.skip("its model is an export of another run")
    layers = _model_config(options.model.name)["vision_cfg"]["layers"]
    available = len(layers) + 1 if isinstance(layers, list) else layers  # a ResNet: and its stem
    for training in _trainings(options):
        assert training.lock.image_blocks == "all" or training.lock.image_blocks <= available


def _model_config(name: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(name, dict):
        return name
    root = resources.files("open_clip") / "model_configs"
    found: dict[str, Any] = json.loads((root / f"{name}.json").read_text())
    return found


@every_recipe
def test_it_lies_in_the_package(recipe: Path) -> None:
    shipped = resources.files("mclclip") / "recipes" / recipe.name
    assert shipped.read_text() == recipe.read_text()


def test_the_package_reaches_the_recipes_by_a_relative_link() -> None:
    link = tiny.ROOT / "mclclip" / "recipes"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == FOLDER


# --- recipes of MCL on OpenAI's weights --------------------------------------------------------


@pytest.mark.parametrize("name", OPENAI)
def test_openai_weights_fit_the_model(name: str) -> None:
    """The tag exists for the model, and both use the same activation."""
    from mclclip.models.clip import open_clip  # with the torchvision fix in place

    model = config.load(FOLDER / f"{name}.yaml").model
    tag = open_clip.get_pretrained_cfg(model.name, model.pretrained)
    assert tag
    assert bool(tag["quick_gelu"]) == bool(_model_config(model.name)["quick_gelu"])


def test_the_paper_recipe_is_the_papers() -> None:
    options = config.load(FOLDER / "cc12m_vitl14.yaml")
    train, lock = options.train, options.train.lock
    assert (options.model.name, options.model.pretrained) == ("ViT-L-14-quickgelu", "openai")
    assert (options.num_stages, options.cluster.num_clusters, train.epochs) == (3, 10, 20)
    assert (options.cluster.label_mode, train.plan.policy) == ("prefix", "backoff")
    assert (train.global_batch, train.steps, options.base) == (8192, None, None)
    assert (train.lr, train.weight_decay, train.betas, train.eps) == (5e-4, 0.2, (0.9, 0.98), 1e-6)
    assert (train.schedule, train.warmup, train.precision) == ("constant", 0.1, "bf16")
    assert (lock.image_blocks, lock.image_norm, lock.image_projection) == (6, True, True)
    assert (lock.text, train.cached_text) == (False, True)


def test_the_small_recipe_differs_by_the_model_alone() -> None:
    large, small = (config.load(FOLDER / f"cc12m_{name}.yaml") for name in ("vitl14", "vitb32"))
    same = dataclasses.replace(
        large,
        run_dir=small.run_dir,
        model=dataclasses.replace(large.model, name="ViT-B-32-quickgelu"),
        embed=dataclasses.replace(large.embed, batch_size=small.embed.batch_size),
    )
    assert small == same


def test_the_released_recipe_differs_where_it_says() -> None:
    paper, released = (config.load(FOLDER / f"{n}.yaml") for n in ("cc12m_vitl14", "mcl_release"))
    train = released.train
    assert (train.global_batch, train.lock.image_blocks) == (8000, 5)
    assert (train.plan.policy, train.plan.order) == ("drop", "round_robin")
    assert (released.cluster.label_mode, released.cluster.algorithm) == ("last", "euclidean")
    steps = 10_968_539 * 20 // 8000
    assert abs(train.warmup * steps - 600) < 2
    assert train == dataclasses.replace(
        paper.train,
        global_batch=8000,
        warmup=train.warmup,
        plan=train.plan,
        lock=dataclasses.replace(paper.train.lock, image_blocks=5),
    )
