"""Configuration: what is written is checked, and a mistake is one line that helps."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter
from pydantic.dataclasses import is_pydantic_dataclass

import mclclip
from mclclip import config
from mclclip.config import Config, explaining, load
from mclclip.models.encoder_names import split_name
from mclclip.util.shipped import RECIPES, recipe_names


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def mistake(path: Path | None, *overrides: str) -> str:
    """The line that a wrong configuration is refused with."""
    with pytest.raises(ValueError) as caught:
        load(path, ["run_dir=x", *overrides])
    line = str(caught.value)
    assert "\n" not in line
    return line


# --- load, override, dump ----------------------------------------------------------------------


def test_only_the_run_directory_is_required() -> None:
    assert load(None, ["run_dir=runs/a"]).run_dir == "runs/a"
    with pytest.raises(ValueError, match="option 'run_dir' is required: set run_dir=VALUE"):
        load(None)


def test_a_file_and_overrides_of_it(tmp_path: Path) -> None:
    path = write(tmp_path, "run_dir: a\ntrain: {lr: 0.1, global_batch: 64}\n")
    read = load(
        path, ["train.lr= 1e-4 ", "base.lr=0.5", "num_stages=1", "num_stages=2", "run_dir=b"]
    )
    assert read.run_dir == "b" and read.num_stages == 2
    assert read.train.lr == 1e-4 and read.train.global_batch == 64  # its neighbour stays
    assert read.base is not None and read.base.lr == 0.5
    assert load(write(tmp_path, "# nothing\n"), ["run_dir=a"]).run_dir == "a"
    with pytest.raises(ValueError, match="is empty"):
        load(write(tmp_path, ""), ["run_dir=a"])
    typed = ["train.clip_grad_norm=null", "train.lock.image_blocks=all", "train.betas=[0.5, 0.25]"]
    read = load(None, ["run_dir='a #b'", "seed=0x10", "data.sources={x: {shards: y}}", *typed])
    assert read.train.clip_grad_norm is None and read.train.lock.image_blocks == "all"
    assert (read.run_dir, read.seed, read.train.betas) == ("a #b", 16, (0.5, 0.25))
    assert read.data.sources["x"].shards == "y"


def test_an_override_goes_into_a_list_by_number() -> None:
    two = "train.objective=[{kind: info_nce}, {kind: ifm, epsilon: 0.5}]"
    read = load(None, ["run_dir=a", two, "train.objective.0.temperature=0.5"])
    assert [term.temperature for term in read.train.objective] == [0.5, None]
    read = load(None, ["run_dir=a", two, "train.objective.1.kind=hcl"])
    assert [term.kind for term in read.train.objective] == ["info_nce", "hcl"]
    for name in ("train.objective.2.kind", "train.objective.kind"):
        with pytest.raises(ValueError, match=f"override '{name}=hcl': there is no '"):
            load(None, ["run_dir=a", two, f"{name}=hcl"])
    for number in (0, 1):
        with pytest.raises(ValueError, match=f"train.objective is no list.*objective.{number}$"):
            load(None, ["run_dir=a", f"train.objective.{number}.temperature=0.5"])


def test_an_override_changes_one_of_two_that_share_an_anchor(tmp_path: Path) -> None:
    """As recipes write their stages; the objective is one mapping of YAML's then."""
    path = write(
        tmp_path,
        "run_dir: x\n"
        "base: &training\n"
        "  objective: {kind: nt_xent, temperature: 0.25}\n"
        "train: {<<: *training}\n",
    )
    ifm = ["train.objective.kind=ifm", "train.objective.between=views"]
    changed = load(path, ifm)
    assert changed.base is not None and changed.base.objective == load(path).train.objective
    assert (changed.base.objective.kind, changed.train.objective.kind) == ("nt_xent", "ifm")


def test_shards_are_written_as_they_are_meant() -> None:
    for typed, expected in {
        "/d/{000..009}.tar": "/d/{000..009}.tar", "[a.tar, b.tar]": ["a.tar", "b.tar"],
        "/d/x=1.tar": "/d/x=1.tar", "'@list'": "@list",
    }.items():  # fmt: skip
        read = load(None, ["run_dir=a", f"data.sources.cc.shards={typed}"])
        assert read.data.sources["cc"].shards == expected


def test_a_dump_is_the_same_configuration(tmp_path: Path) -> None:
    source = ["data.sources.cc.shards=[a.tar]", "eval.suite.m={kind: mmvp, path: p}"]
    read = load(None, ["run_dir=a", "base.steps=5", "controls=[ungrouped]", *source])
    text = config.dump(read)
    assert load(write(tmp_path, text)) == read
    assert config.dump(load(write(tmp_path, text))) == text
    assert list(yaml.safe_load(text)) == [item.name for item in dataclasses.fields(Config)]


# --- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "unknown", "near"),
    [
        ("trian.lr=1", "trian", "train"),
        ("data.sources.cc.shard=a", "data.sources.cc.shard", "data.sources.cc.shards"),
        ("eval.suite.m.knd=mmvp", "eval.suite.m.knd", "eval.suite.m.kind"),
        ("base.learning_rate=1", "base.learning_rate", "base.lr"),
        ("eval.num_workers=1", "eval.num_workers", "data.num_workers"),
        ("eval.suite.m.num_workers=1", "eval.suite.m.num_workers", "data.num_workers"),
        ("train.seed=1", "train.seed", "seed"),
        ("data.train.lr=1", "data.train", "train"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest(
    override: str, unknown: str, near: str
) -> None:
    line = mistake(None, override)
    assert line.startswith(f"unknown option {unknown!r}: did you mean {near!r}?")
    assert "valid here: " in line


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.lr=fast", ["'train.lr'", "'fast'", "number"]),
        ("train.plan.policy=dorp", ["'train.plan.policy'", "'dorp'", "'drop', 'backoff'"]),
        ("train.lock.image_blocks=five", ["'train.lock.image_blocks'", "'five'", "integer"]),
        ("controls=[ungruped]", ["'controls.0'", "'ungruped'", "'ungrouped'"]),
        ("train=5", ["'train'", "5", "dictionary"]),
        ("eval.suite.m.kind=mmvp", ["'eval.suite.m.path' is required"]),
        ("controls=[ungrouped, ungrouped]", ["'controls'", "each of them once"]),
    ],
)
def test_a_wrong_value_is_named_with_its_path(override: str, parts: list[str]) -> None:
    line = mistake(None, override)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "got the override 'seed', expected key.path=value"),
        ("train.steps= ", "has no value"),
        ("run_dir.a=1", "there is no 'a' in 'a'"),
        ("train.lr=[1", "override 'train.lr=\\[1' is not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_read(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(None, ["run_dir=a", override])


def test_a_run_that_was_moved_from_a_name_with_brackets_reads_its_own_shards(
    tmp_path: Path,
) -> None:
    (tmp_path / "run_state.json").write_text("{}")
    sources = {"a": {"shards": "old [[]1]/train/*.tar"}, "b": {"shards": "old [1]/{0..3}.tar"}}
    tree = {"run_dir": "old [1]", "data": {"sources": sources}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    found = config.load(tmp_path / "config.yaml").data.sources
    assert found["a"].shards == f"{tmp_path}/train/*.tar"
    assert found["b"].shards == f"{tmp_path}/{{0..3}}.tar"


def test_a_missing_file_is_named_with_the_shipped_recipes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no configuration file at .*none\.yaml") as caught:
        load(tmp_path / "none.yaml")
    assert "'mclclip recipes' lists all" in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"nearest: cc12m_vitb32, "):
        load("cc12m_vit_b32.yaml")
    assert "demo" in recipe_names()


def test_a_recipe_is_found_by_name_and_a_file_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()  # a folder is no configuration
    assert load("demo") == load(RECIPES / "demo.yaml")
    assert load("demo", ["seed=7"]).seed == 7
    for name in ("demo.yaml", "recipes/demo", "../recipes/demo", "Demo", ""):
        with pytest.raises(FileNotFoundError, match="name of a shipped recipe"):
            load(name)
    Path("lit").write_text("run_dir: mine\n")
    assert load("lit").run_dir == "mine"


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    path = write(tmp_path, f"run_dir: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n")
    assert "config.yaml" in mistake(path) and "is not valid YAML" in mistake(path)
    assert not (tmp_path / "made").exists()
    assert "holds list, expected a mapping" in mistake(write(tmp_path, "- a\n- b\n"))


# --- every option ------------------------------------------------------------------------------


PACKAGE = Path(mclclip.__file__).parent


def modules() -> list[Path]:
    """Every file of the package; ``eval`` is a link, which a search does not follow."""
    return sorted(p for top in (PACKAGE, PACKAGE / "eval") for p in top.rglob("*.py"))


EVERY = list(explaining.options())


def test_every_option_of_a_configuration_is_explained() -> None:
    """Those of every kind of objective and benchmark too; a text has a verb or tells a quantity."""
    keys = {(option.key, option.kind) for option in EVERY}
    assert len(keys) == len(EVERY) > 500
    assert {("train.lr", ""), ("data.sources.NAME.shards", "")} <= keys
    assert {("train.objective.threshold", "mlcd"), ("eval.suite.NAME.options.k", "knn")} <= keys
    lacking = [(option.key, option.kind) for option in EVERY if len(option.text.split()) < 2]
    assert not lacking, (
        "an option's text is the docstring below it; that of a benchmark's is its row, or each "
        "sentence with ``NAME``, in the docstring of evaluate in eval/protocols/KIND.py"
    )
    assert not [option for option in EVERY if not option.type or "value" in option.type.split()]


def test_defaults_that_are_explained_are_those_of_a_configuration() -> None:
    tree = yaml.safe_load(config.dump(load(None, ["run_dir=x"])))
    compared = 0
    for option in EVERY:
        found: Any = tree
        for part in option.key.split("."):
            found = found.get(part, ...) if isinstance(found, dict) else ...
        if found is not ... and option.kind == "" and option.default not in ("required", ""):
            if option.default != "those below":
                assert yaml.safe_load(option.default) == found, option.key
                compared += 1
    assert compared > 100


def test_options_are_explained_by_the_beginning_or_a_part_of_their_keys() -> None:
    for key, keys in {
        "train.checkpoint.ke": ["train.checkpoint.keep", "train.checkpoint.keep_every"],
        "data.sources.cc12m.shards": ["data.sources.NAME.shards"],
        "betas": ["base.betas", "train.betas"],
        "accum_freq": ["base.engine.micro_batch", "train.engine.micro_batch"],  # of open_clip
    }.items():
        blocks = explaining.explain(key).split("\n\n")
        assert [block.split()[0] for block in blocks] == keys
        assert all(len(line) <= 80 for block in blocks for line in block.splitlines())


# --- values as they are typed, and bounds ------------------------------------------------------


@pytest.mark.parametrize("typed", ["runs/exp #2", "a: b", "*x", "!!int 5", "x "])
def test_a_text_is_taken_as_it_stands(typed: str) -> None:
    assert load(None, [f"run_dir={typed}"]).run_dir == typed


def test_a_shipped_model_is_named_as_an_encoder_is(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    name = load(None, ["run_dir=x", "model.name=tiny_clip"]).model.name
    assert (name, None) == split_name("tiny_clip") and Path(str(name)).is_file()
    dumped = config.dump(load(None, ["run_dir=x", "model.name=tiny_clip"]))
    assert "\n  name: tiny_clip\n" in dumped and str(name) not in dumped
    Path("tiny_clip").mkdir()
    assert load(None, ["run_dir=x", "model.name=tiny_clip"]).model.name == "tiny_clip"


def test_a_path_of_any_option_may_begin_at_home(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "run_dir: ~/run\ndata: {sources: {a: {shards: [~/a/*.tar, b.tar]}}}\n"
        "eval: {suite: {coco: {kind: retrieval, path: ~/coco}}}\n"
    )
    assert load(recipe, ["eval.suite.coco=null"]).eval.suite == {}
    loaded = load(recipe, ["model.image_weights=~/x.safetensors"])
    assert loaded.run_dir == f"{tmp_path}/run"
    assert loaded.eval.suite["coco"].path == f"{tmp_path}/coco"
    assert loaded.data.sources["a"].shards == [f"{tmp_path}/a/*.tar", "b.tar"]
    assert loaded.model.image_weights == f"{tmp_path}/x.safetensors"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run_dir=a\nb", "has a line break: write the value in one line"),
        ('run_dir="a" # b', "has '# b' behind its value: leave it out"),
        ("train.betas=[0.5, 0.25] # b", "has '# b' behind its value: leave it out"),
        ("seed=010", "has 010 in line 1, which YAML 1.1 reads as 8: write 8 if you mean it, or"),
        ("seed=1:30", "has 1:30 in line 1, which YAML 1.1 reads as 90"),
        ("export.soup=off", "which YAML 1.1 reads as false: write false if you mean it, or 'off'"),
        ("run_dir=2024", "option 'run_dir', got 2024: wanted a text: put it in quotes"),
        ("train.lock.image_blocks=true", "option 'train.lock.image_blocks', got True: wanted a nu"),
        ("train.betas=[0.5, false]", "option 'train.betas.1', got False: wanted a number"),
    ],
)
def test_a_value_that_may_mean_something_else_is_refused(override: str, message: str) -> None:
    assert message in mistake(None, override)


def option_types() -> dict[str, Any]:
    """Every checked class of options of the package, by its full name."""
    found = {}
    for path in modules():
        if "checked_dataclass" in path.read_text():
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            name = ".".join(("mclclip", *parts)).removesuffix(".__init__")
            module = importlib.import_module(name)
            found |= {
                f"{name}.{each.__name__}": each
                for each in vars(module).values()
                if is_pydantic_dataclass(each) and each.__module__ == name
            }
    return found


def numbers(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON schemas of all numbers that an option may be or contain, but for closed lists."""
    if schema.get("type") in ("number", "integer"):
        return [] if {"enum", "const"} & schema.keys() else [schema]
    parts = [part for key in ("anyOf", "oneOf", "prefixItems") for part in schema.get(key, [])]
    parts += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return [found for part in parts if isinstance(part, dict) for found in numbers(part)]


# Numbers that may be anything, and why.
UNBOUNDED = {
    "mclclip.models.backbones.Backbone.mean": "pixels may be centred anywhere",
    "mclclip.models.backbones.Backbone.options": "arguments of another library's",
}


def test_every_number_has_a_bound() -> None:
    without, types = [], option_types()
    assert len(types) == sum(path.read_text().count("@checked_dataclass") for path in modules())
    for name, options in types.items():
        for option, schema in TypeAdapter(options).json_schema()["properties"].items():
            bounds = [{"minimum", "exclusiveMinimum"} & each.keys() for each in numbers(schema)]
            if not all(bounds) and f"{name}.{option}" not in UNBOUNDED:
                without.append(f"{name}.{option}")
        config_ = options.__pydantic_config__
        assert config_.get("allow_inf_nan") is False and config_.get("extra") == "forbid", name
    assert not without


@pytest.mark.parametrize(
    "override",
    ["train.lr=0", "train.lr=.inf", "train.lr=.nan", "train.warmup=1.5", "train.eps=0",
     "seed=9223372036854775808", "train.parameters=[{match: a, layer_decay: 1.5}]"],
)  # fmt: skip
def test_a_number_out_of_its_bounds_is_refused(override: str) -> None:
    name = override.partition("=")[0]
    assert mistake(None, override).startswith(f"option '{name}")
