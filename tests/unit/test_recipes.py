"""Every shipped recipe is a valid run: options, model, benchmarks, and no machine's own paths."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

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
def test_it_is_valid_and_says_what_to_type(recipe: Path) -> None:
    options = config.load(recipe)
    assert config.from_tree(yaml.safe_load(config.dump(options))) == options
    assert options.eval.suite
    evaluation.check_options(options.eval.suite)
    tree = yaml.safe_load(recipe.read_text())
    assert not [text for text in _values(tree) if text.startswith(("/", "~", ".."))]
    assert options.run_dir.startswith("runs/")
    comments = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    # The demo has a command of its own.
    assert recipe.stem == "demo" or any(f"launch/recipes/{recipe.name}" in c for c in comments)


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


def _model_config(name: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(name, dict):
        return name
    root = resources.files("open_clip") / "model_configs"
    found: dict[str, Any] = json.loads((root / f"{name}.json").read_text())
    return found


# --- recipes of MCL ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OPENAI, "cc12m_vitl14_dfn2b"])
def test_weights_fit_the_model(name: str) -> None:
    """The tag exists for the model, and both use the same activation."""
    from mclclip.models.clip import open_clip  # with the torchvision fix in place

    model = config.load(FOLDER / f"{name}.yaml").model
    tag = open_clip.get_pretrained_cfg(model.name, model.pretrained)
    assert tag
    assert bool(tag["quick_gelu"]) == bool(_model_config(model.name)["quick_gelu"])


# Which options are as a paper states them: setting them changes nothing.
PAPERS = {
    # MCL, in the order of section 5.5, Eq. 2, Algorithm 1 and Eq. 5
    "cc12m_vitl14_paper": """
        model.name=ViT-L-14-quickgelu model.pretrained=openai num_stages=3 base=null
        train.epochs=20 train.steps=null train.lock.text=false train.lock.image_blocks=6
        train.lock.image_norm=false train.lock.image_projection=false train.lock.logit_scale=false
        cluster.num_clusters=10 cluster.algorithm=euclidean cluster.label_mode=prefix
        train.global_batch=8192 train.warmup=0.1 train.plan.policy=mask train.plan.order=round_robin
        export.concat=[raw] export.soup=true""",
    # MCL: 3.2, 5.4, A.2, Table 5, Eq. 2, 3 and 5, Algorithm 1
    "trifeature_paper": """
        num_stages=2 train.epochs=200 train.steps=null cluster.num_clusters=5 base.start=base
        train.start=random train.objective.kind=nt_xent train.objective.temperature=0.5
        cluster.label_mode=prefix train.plan.policy=mask train.plan.order=round_robin
        export.concat=[raw]""",
    # SimLAP: Tables 1, 3d, 5a and 5b, and section 5.2
    "simlap_imagenet": """
        base.global_batch=1024 base.epochs=500 base.optimizer=lars base.lr=0.2 base.schedule=cosine
        base.weight_decay=1e-4 base.warmup=0.08 model.projector=[2048,256]
        cluster.num_clusters=1000 base.objective.kind=simlap base.objective.temperature=0.05
        base.objective.norm=layer base.objective.pairs=arbitrary base.objective.penalty_weight=0
        base.objective.gates=labels""",
    # MCL 5.4 and A.3; IFM 2.2, 4.1, 4.2 and Table 1
    "stl10": "num_stages=2 base.epochs=400 base.steps=null base.objective.kind=nt_xent",
    "simclr_imagenet": """
        num_stages=2 base.epochs=100 base.steps=null base.objective.kind=nt_xent
        train.global_batch=8192 train.start=random""",
    "imagenet100": "num_stages=0 base.epochs=200 base.steps=null base.objective.kind=moco",
    "stl_digits": "num_stages=0 base.epochs=200 base.steps=null base.objective.kind=nt_xent",
    # MLCD: section 4.1, Tables 6, 7b, 8 and 9, A.2; activation and augmentation are CLIP's
    **{
        name: f"""
        trained_model.name={trained}-quickgelu trained_model.pretrained=null train.epochs={epochs}
        model.name=ViT-L-14-quickgelu model.pretrained=openai train.optimizer=adamw train.lr=1e-3
        train.weight_decay=0.2 train.objective.weight_decay=0.2 train.objective.lr_scale=1.0
        train.global_batch=32800 train.objective.kind=mlcd train.objective.labels_per_sample=8
        train.objective.sample_rate=0.1 train.objective.margin=arc train.objective.margin_size=0.3
        cluster.num_clusters=1000000 cluster.algorithm=spherical"""
        for name, trained, epochs in (
            ("mlcd_laion_vitl14", "ViT-L-14", 32), ("mlcd_ablation_vitb32", "ViT-B-32", 5),
        )
    },
    "mlcd_imagenet_rn50": """
        train.epochs=100 cluster.num_clusters=4000 train.objective.kind=mlcd
        train.objective.labels_per_sample=8 train.objective.sample_rate=0.1 train.optimizer=adamw
        train.objective.margin=arc train.objective.margin_size=0.3 train.weight_decay=0.2
        train.objective.weight_decay=0.2""",
}  # fmt: skip


@pytest.mark.parametrize("name", PAPERS)
def test_options_are_as_the_paper_states_them(name: str) -> None:
    path = FOLDER / f"{name}.yaml"
    assert config.load(path, PAPERS[name].split()) == config.load(path)


@pytest.mark.parametrize(
    ("name", "samples", "steps"),
    [("mlcd_laion_vitl14", 400_000_000, 2000), ("mlcd_ablation_vitb32", 400_000_000, 2000),
     ("mlcd_imagenet_rn50", 1_281_167, 2000), ("mcl_release", 10_968_539, 600)],
)  # fmt: skip
def test_a_recipe_warms_up_for_the_papers_steps(name: str, samples: int, steps: int) -> None:
    train = config.load(FOLDER / f"{name}.yaml").train
    assert round(train.warmup * (samples // train.global_batch) * train.epochs) == steps


# What recipes change of others, beside their run directories; the last ones change other pictures
# and towers too.
DIFFERENCES = {
    # Norms of a ResNet lie in its blocks; AdamW's numbers are open_clip's for one.
    ("cc12m_vitl14_paper", "cc12m_rn50_paper"): """
        model.name=RN50-quickgelu train.epochs=10 train.lock.image_norm=true
        train.betas=[0.9,0.999] train.eps=1e-8""",
    ("cc12m_vitl14_paper", "cc12m_vitl14"): """
        data.pixels=fast cluster.algorithm=spherical train.plan.policy=backoff
        train.plan.order=proportional train.lock.image_norm=true train.lock.image_projection=true
        train.lock.logit_scale=true export=@""",
    ("cc12m_vitl14", "mcl_release"): """
        train.global_batch=8000 train.lock.image_blocks=5 train.plan.policy=drop
        train.plan.order=round_robin cluster=@ cluster.label_mode=last cluster.algorithm=euclidean
        train.warmup=@ data=@ export=@""",
    ("cc12m_vitl14", "cc12m_vitb32"): "model.name=ViT-B-32-quickgelu embed.batch_size=@",
    ("cc12m_vitl14", "cc12m_vitl14_dfn2b"): "model.pretrained=dfn2b embed.batch_size=@",
    ("trifeature_paper", "cifar_mnist_paper"): "data=@ model=@ eval.suite=@",
    ("trifeature_paper", "celeba"): "data=@ model=@ eval.suite=@",
}


@pytest.mark.parametrize(("base", "name"), DIFFERENCES)
def test_a_recipe_differs_from_another_where_it_says(base: str, name: str) -> None:
    """An option of ``@`` is what the recipe has."""
    recipe = config.load(FOLDER / f"{name}.yaml")
    options = {"run_dir": recipe.run_dir}
    for key, _, value in (word.partition("=") for word in DIFFERENCES[base, name].split()):
        options[key] = value
        if value == "@":
            own = functools.reduce(getattr, key.split("."), recipe)
            options[key] = json.dumps(TypeAdapter(type(own)).dump_python(own, mode="json"))
    words = [f"{key}={value}" for key, value in options.items()]
    assert config.load(FOLDER / f"{base}.yaml", words) == recipe


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


IN_FOUR_CHANNELS = {"channels": 4, "image_size": 32, "stem": "cifar"}
PLAIN_DIGIT = {"augmentation": {"kind": "simclr", "plain_channels": [3]}}


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
