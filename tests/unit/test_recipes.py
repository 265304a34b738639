"""Every shipped recipe is a valid run: options, model, benchmarks, and no machine's own paths."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from mclclip import config
from mclclip.cli import entry
from mclclip.plan import steps as planned
from mclclip.verbs import eval as evaluation
from tests import tiny

FOLDER = tiny.ROOT / "launch" / "recipes"
PAGES = tiny.ROOT / "docs" / "pages"
RECIPES = sorted(FOLDER.glob("*.yaml"))
SWEEPS = sorted(FOLDER.glob("*.sweep"))
PAPER = ["cc12m_vitl14_paper", "cc12m_rn50_paper"]
OPENAI = ["cc12m_vitb32", "cc12m_vitl14", "mcl_release", *PAPER]
MLCD = ["mlcd_laion_vitl14", "mlcd_ablation_vitb32"]

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def _values(tree: Any) -> Iterator[str]:
    """Every string below a mapping."""
    if isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _values(value)
    elif isinstance(tree, str):
        yield tree


@every_recipe
def test_it_is_valid_and_stays_so_resolved(recipe: Path) -> None:
    options = config.load(recipe)
    assert config.from_tree(yaml.safe_load(config.dump(options))) == options


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


def _commands(recipe: Path) -> list[list[str]]:
    """What follows ``mclclip`` in the command lines of the header, word by word.

    Lines that a shell would have to complete (``$options``) are left out.
    """
    lines = [line[1:] for line in recipe.read_text().splitlines() if line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    found = re.findall(r"^ {2,}(?:\S.*?)?(?:mclclip|mclclip\.sbatch) (\w.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found if "$" not in line]


@pytest.mark.parametrize("recipe", [*RECIPES, *SWEEPS], ids=lambda path: path.name)
def test_its_commands_are_valid(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line takes every word of them, and the options are those of the recipe."""
    monkeypatch.chdir(tiny.ROOT)
    for words in _commands(recipe):
        arguments = entry.parse_words(words)
        if words[0] in ("run", "config"):
            assert arguments.config == f"launch/recipes/{recipe.name}"
            config.load(arguments.config, arguments.overrides)


@every_recipe
def test_its_benchmarks_have_options_that_evaluators_know(recipe: Path) -> None:
    suite = config.load(recipe).eval.suite
    assert suite
    evaluation.check_options(suite)


def _model_config(name: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(name, dict):
        return name
    root = resources.files("open_clip") / "model_configs"
    found: dict[str, Any] = json.loads((root / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", ["launch", "slurm"])
def test_the_package_reaches_recipes_and_scripts_by_a_relative_link(name: str) -> None:
    link = tiny.ROOT / "mclclip" / name
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == tiny.ROOT / name


# --- recipes of MCL ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OPENAI, "cc12m_vitl14_dfn2b"])
def test_weights_fit_the_model(name: str) -> None:
    """The tag exists for the model, and both use the same activation."""
    from mclclip.models.clip import open_clip  # with the torchvision fix in place

    model = config.load(FOLDER / f"{name}.yaml").model
    tag = open_clip.get_pretrained_cfg(model.name, model.pretrained)
    assert tag
    assert bool(tag["quick_gelu"]) == bool(_model_config(model.name)["quick_gelu"])


def test_the_paper_recipe_is_the_papers() -> None:
    """Each line: what MCL states, in the order of section 5.5, Eq. 2, Algorithm 1 and Eq. 5."""
    options = config.load(FOLDER / "cc12m_vitl14_paper.yaml")
    train, lock = options.train, options.train.lock
    assert (options.model.name, options.model.pretrained) == ("ViT-L-14-quickgelu", "openai")
    assert (options.num_stages, options.base, train.epochs, train.steps) == (3, None, 20, None)
    assert (lock.text, lock.image_blocks, lock.image_norm) == (False, 6, False)
    assert (lock.image_projection, lock.logit_scale) == (False, False)
    assert (options.cluster.num_clusters, options.cluster.algorithm) == (10, "euclidean")
    assert (train.global_batch, train.warmup) == (8192, 0.1)
    assert options.cluster.label_mode == "prefix"
    assert (train.plan.policy, train.plan.order) == ("mask", "round_robin")
    assert (options.export.concat, options.export.soup) == (["raw"], True)


def test_the_papers_resnet_differs_by_tower_and_epochs() -> None:
    paper, resnet = (config.load(FOLDER / f"{name}.yaml") for name in PAPER)
    same = dataclasses.replace(
        paper,
        run_dir=resnet.run_dir,
        model=dataclasses.replace(paper.model, name="RN50-quickgelu"),
        train=dataclasses.replace(
            paper.train,
            epochs=10,
            # Norms of a ResNet lie in its blocks; AdamW's numbers are open_clip's for one.
            lock=dataclasses.replace(paper.train.lock, image_norm=True),
            betas=(0.9, 0.999),
            eps=1e-8,
        ),
    )
    assert resnet == same


def test_the_recommended_recipe_differs_where_it_says() -> None:
    ours, paper = (config.load(FOLDER / f"cc12m_{n}.yaml") for n in ("vitl14", "vitl14_paper"))
    train, lock = ours.train, ours.train.lock
    assert (train.plan.policy, train.plan.order) == ("backoff", "proportional")
    assert (lock.image_blocks, lock.image_norm, lock.image_projection) == (6, True, True)
    assert (ours.cluster.algorithm, lock.text, lock.logit_scale) == ("spherical", False, True)
    assert (train.lr, train.weight_decay, train.betas, train.eps) == (5e-4, 0.2, (0.9, 0.98), 1e-6)
    assert (train.schedule, train.precision, train.cached_text) == ("constant", "bf16", True)
    assert ours == dataclasses.replace(
        paper,
        run_dir=ours.run_dir,
        data=dataclasses.replace(paper.data, pixels="fast"),
        cluster=dataclasses.replace(paper.cluster, algorithm="spherical"),
        train=dataclasses.replace(paper.train, plan=train.plan, lock=lock),
        export=ours.export,
    )


def test_the_shares_in_headers_and_readme_are_those_of_the_plan() -> None:
    def rows(name: str) -> list[dict[str, Any]]:
        found = planned.count(config.load(FOLDER / f"{name}.yaml"), 10_968_539)["trainings"]
        return [row for training in found for row in training["coverage"]]

    def percent(share: float) -> str:
        return f"{100 * share:.1f}"

    def words(path: Path) -> str:
        return re.sub(r"[\s#]+", " ", path.read_text())

    ours, paper = rows("cc12m_vitl14"), rows("cc12m_vitl14_paper")
    equal, tailed = ([percent(row["full_label_share"]) for row in ours[n::2]] for n in (0, 1))
    header, readme = words(FOLDER / "cc12m_vitl14.yaml"), words(PAGES / "reference/recipes.md")
    for shares, groups in ((equal, "equal groups"), (tailed, "long-tailed ones")):
        assert re.search("{}, {} and {} %[^;]*{}".format(*shares, groups), header)
    for stage in range(3):
        assert f"{equal[stage]} / {tailed[stage]} % | 100 / 100 %" in readme
    assert all(row["full_label_share"] == 1 for row in paper)
    mixed = [percent(row["mixed_steps"] / row["steps"]) for row in paper[-2:]]
    negatives = [f"{row['negatives']:,.0f}" for row in paper[-2:]]
    assert f"0 / 0 % | {' / '.join(mixed)} %" in readme
    assert f"8,191 / 8,191 | {' / '.join(negatives)} |" in readme
    assert f"{negatives[0]} negatives on average" in words(FOLDER / "cc12m_vitl14_paper.yaml")
    left = {row["remainder"] for row in (*ours, *paper)}
    assert left == {7_643} and "7,643 (0.1 %) | 7,643 (0.1 %)" in readme


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("cc12m_vitb32", {"name": "ViT-B-32-quickgelu"}),
        ("cc12m_vitl14_dfn2b", {"pretrained": "dfn2b"}),
    ],
)
def test_recommended_recipes_differ_by_the_model_alone(name: str, changes: dict[str, str]) -> None:
    large, other = (config.load(FOLDER / f"{n}.yaml") for n in ("cc12m_vitl14", name))
    same = dataclasses.replace(
        large,
        run_dir=other.run_dir,
        model=dataclasses.replace(large.model, **changes),
        embed=dataclasses.replace(large.embed, batch_size=other.embed.batch_size),
    )
    assert other == same


def test_the_released_recipe_differs_where_it_says() -> None:
    ours, released = (config.load(FOLDER / f"{n}.yaml") for n in ("cc12m_vitl14", "mcl_release"))
    train = released.train
    assert (train.global_batch, train.lock.image_blocks) == (8000, 5)
    assert (train.plan.policy, train.plan.order) == ("drop", "round_robin")
    assert (released.cluster.label_mode, released.cluster.algorithm) == ("last", "euclidean")
    steps = 10_968_539 * 20 // 8000
    assert abs(train.warmup * steps - 600) < 2
    assert train == dataclasses.replace(
        ours.train,
        global_batch=8000,
        warmup=train.warmup,
        plan=train.plan,
        lock=dataclasses.replace(ours.train.lock, image_blocks=5),
    )


def test_the_unimodal_recipe_is_the_papers() -> None:
    """MCL: 3.2, 5.4, A.2, Table 5, Eq. 2, 3 and 5, Algorithm 1, in this order."""
    options = config.load(FOLDER / "trifeature_paper.yaml")
    base, train = options.base, options.train
    assert options.model.name == {"vision_cfg": {"backbone": "timm:resnet18", "image_size": 128}}
    assert base is not None and (options.num_stages, train.epochs, train.steps) == (2, 200, None)
    assert options.cluster.num_clusters == 5
    assert base == dataclasses.replace(train, start="base") and train.start == "random"
    assert (train.objective.kind, train.objective.temperature) == ("nt_xent", 0.5)
    assert (options.cluster.label_mode, train.plan.policy) == ("prefix", "mask")
    assert (train.plan.order, options.export.concat) == ("round_robin", ["raw"])


IN_FOUR_CHANNELS = {"channels": 4, "image_size": 32, "stem": "cifar"}
PLAIN_DIGIT = {"augmentation": {"kind": "simclr", "plain_channels": [3]}}


@pytest.mark.parametrize(
    ("name", "attributes", "vision", "model"),
    [
        ("cifar_mnist_paper", ["cifar", "mnist"], IN_FOUR_CHANNELS, PLAIN_DIGIT),
        ("celeba", ["black_hair", "smiling", "male"], {"image_size": 128}, {}),
    ],
)
def test_the_unimodal_recipes_differ_by_data_and_tower(
    name: str, attributes: list[str], vision: dict[str, Any], model: dict[str, Any]
) -> None:
    paper, other = (config.load(FOLDER / f"{n}.yaml") for n in ("trifeature_paper", name))
    data = f"data/{name.removesuffix('_paper')}"
    source = dataclasses.replace(
        paper.data.sources["pictures"], shards=f"{data}/train/*.tar", attributes=attributes
    )
    probe = dataclasses.replace(
        paper.eval.suite["features"], path=data, options={"attributes": attributes}
    )
    tower = {"vision_cfg": {"backbone": "timm:resnet18", **vision}}
    assert other == dataclasses.replace(
        paper,
        run_dir=other.run_dir,
        data=dataclasses.replace(paper.data, sources={"pictures": source}),
        model=dataclasses.replace(paper.model, name=tower, **model),
        eval=dataclasses.replace(paper.eval, suite={"features": probe}),
    )


def test_other_unimodal_recipes_have_the_epochs_and_towers_of_the_papers() -> None:
    """MCL 5.4 (STL-10) and A.3; IFM 2.2, 4.1, 4.2 and Table 1."""

    def said(name: str) -> tuple[Any, ...]:
        options = config.load(FOLDER / f"{name}.yaml")
        base, tower = options.base, options.model.name
        assert base is not None and isinstance(tower, dict) and base.steps is None
        backbone = tower["vision_cfg"]["backbone"].removeprefix("timm:")
        return backbone, options.num_stages, base.epochs, base.objective.kind

    assert said("stl10") == ("resnet50", 2, 400, "nt_xent")
    assert said("simclr_imagenet") == ("resnet34", 2, 100, "nt_xent")
    assert said("imagenet100") == ("resnet50", 0, 200, "moco")
    assert said("stl_digits") == ("resnet18", 0, 200, "nt_xent")
    imagenet = config.load(FOLDER / "simclr_imagenet.yaml").train
    assert (imagenet.global_batch, imagenet.start) == (8192, "random")


def test_simlap_is_the_papers() -> None:
    """Tables 1, 3d, 5a and 5b, and section 5.2."""
    options = config.load(FOLDER / "simlap_imagenet.yaml")
    base, objective = options.base, options.base and options.base.objective
    assert base is not None and objective is not None
    assert (base.global_batch, base.epochs, base.optimizer, base.lr) == (1024, 500, "lars", 0.2)
    assert (base.schedule, base.weight_decay, base.warmup * 500) == ("cosine", 1e-4, 40)
    assert options.model.projector == [2048, 256] and options.cluster.num_clusters == 1000
    assert (objective.kind, objective.temperature, objective.norm) == ("simlap", 0.05, "layer")
    assert (objective.pairs, objective.penalty_weight, objective.gates) == (
        "arbitrary",
        0,
        "labels",
    )
    assert len([b for b in options.eval.suite.values() if b.kind == "linear_probe"]) == 6


def test_flickr8k_trains_a_text_tower_beside_a_frozen_image_tower() -> None:
    options = config.load(FOLDER / "flickr8k.yaml")
    base, train = options.base, options.train
    assert base is not None and options.model.image_weights is not None
    assert isinstance(options.model.name, dict)
    model, pixels = (options.model.name[name] for name in ("model_cfg", "preprocess_cfg"))
    assert model["vision_cfg"]["timm_model_name"] == "mobilenetv2_100"
    assert (model["vision_cfg"]["image_size"], pixels["mean"], pixels["std"]) == (
        160, [0.5] * 3, [0.5] * 3,
    )  # fmt: skip
    text = model["text_cfg"]
    assert (text["layers"], text["width"], text["context_length"]) == (4, 256, 32)
    assert (base.lock.image_blocks, base.lock.text, base.global_batch) == (0, True, 256)
    assert (base.lr, base.epochs, options.controls) == (1e-3, 6, ["ungrouped"])
    assert base.lock.image_norm is train.lock.image_norm is False  # its batch norms are folded
    assert train.lock.image_blocks == 4 and options.image_rows.enabled


# --- recipes of MLCD -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "trained", "epochs"),
    [("mlcd_laion_vitl14", "ViT-L-14", 32), ("mlcd_ablation_vitb32", "ViT-B-32", 5)],
)
def test_mlcd_recipes_are_the_papers(name: str, trained: str, epochs: int) -> None:
    """Section 4.1, Tables 6, 8 and 9, A.2; activation and augmentation are CLIP's."""
    options = config.load(FOLDER / f"{name}.yaml")
    train, centers = options.train, options.train.objective
    assert options.trained_model is not None and centers is not None
    assert options.trained_model.name == f"{trained}-quickgelu"
    assert options.trained_model.pretrained is None and not options.trained_model.augmentation
    assert (options.model.name, options.model.pretrained) == ("ViT-L-14-quickgelu", "openai")
    assert (train.optimizer, train.lr, train.weight_decay) == ("adamw", 1e-3, 0.2)
    assert (centers.weight_decay, centers.lr_scale) == (0.2, 1.0)
    assert (train.global_batch, train.epochs) == (32_800, epochs)
    steps = 400_000_000 // train.global_batch * epochs
    assert round(train.warmup * steps) == 2000
    assert (centers.kind, centers.labels_per_sample, centers.sample_rate) == ("mlcd", 8, 0.1)
    assert (centers.margin, centers.margin_size) == ("arc", 0.3)
    assert options.cluster.num_clusters == 1_000_000
    assert options.cluster.algorithm == "spherical"
    (probe,) = options.eval.suite.values()
    assert (probe.kind, probe.options) == ("linear_probe", {"feature": "pooled"})


def test_the_resnet_of_mlcd_is_the_papers() -> None:
    """Table 7b and its text, 4.1, A.2 and Table 9."""
    options = config.load(FOLDER / "mlcd_imagenet_rn50.yaml")
    train, centers = options.train, options.train.objective
    assert options.trained_model is not None and isinstance(options.trained_model.name, dict)
    assert options.trained_model.name["vision_cfg"]["backbone"] == "torchvision:resnet50"
    assert (train.epochs, options.cluster.num_clusters) == (100, 4000)
    assert (centers.kind, centers.labels_per_sample, centers.sample_rate) == ("mlcd", 8, 0.1)
    assert (centers.margin, centers.margin_size, centers.weight_decay) == ("arc", 0.3, 0.2)
    assert (train.optimizer, train.weight_decay) == ("adamw", 0.2)
    assert round(train.warmup * (1_281_167 // train.global_batch) * 100) == 2000


def test_every_linear_probe_reads_pooled_features() -> None:
    """CLIP's protocol (A.3 of MLCD), whose features lie before the projection; fine-tuning on
    classes trains the projection too, and is judged behind it. SimCLR's tower exports no
    projection, and its joined encoder has projected features alone."""
    probes = {
        recipe.stem: benchmark.options
        for recipe in RECIPES
        for benchmark in config.load(recipe).eval.suite.values()
        if benchmark.kind == "linear_probe"
    }
    del probes["finetune_imagenet"], probes["simclr_imagenet"]
    imagenet = {"mlcd_imagenet_rn50", "simlap_imagenet"}
    assert set(probes) == {*MLCD, *imagenet, "mlcd_finetune_vitl14"}
    assert all(options.get("feature") == "pooled" for options in probes.values())


def test_the_text_tower_is_trained_as_the_image_tower() -> None:
    """MLCD, 4.1 and A.2: from scratch, that is on the export of the recipe from scratch."""
    lit, laion = (config.load(FOLDER / f"{name}.yaml") for name in ("lit", "mlcd_laion_vitl14"))
    assert lit.model.name == f"local-dir:{laion.run_dir}/stage_1/export"
    assert lit.model.name in (PAGES / "how-to/many-classes.md").read_text()
    text, image = lit.base, laion.train
    assert text is not None and (lit.num_stages, text.lock.text) == (0, True)
    assert (text.lock.image_blocks, text.lock.image_norm) == (0, False)
    assert text.lock.image_projection is False
    for name in ("global_batch", "epochs", "lr", "warmup", "weight_decay", "schedule", "betas"):
        assert getattr(text, name) == getattr(image, name), name
