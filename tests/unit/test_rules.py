"""Every row of the table of rules is broken once and kept once."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest

from mclclip import config
from mclclip.cli import entry, process
from mclclip.config import Config, rules
from tests import tiny

MLCD = "train.objective={kind: mlcd, labels_per_sample: 1, sample_rate: 1.0}"
VIEWS = "train.objective={kind: nt_xent}"
HELD = "train.objective={kind: preserve}"
HELD_EXACTLY = "train.objective={kind: preserve, exact: true}"
TAUGHT = "train.objective={kind: distill}"
TAUGHT_EXACTLY = "train.objective={kind: distill, exact: true}"
OTHER = f"trained_model={{name: {json.dumps(tiny.MODEL)}}}"
TRUNK = "image_rows.enabled=true | train.lock.image_blocks=1"
WHOLE = (
    "image_rows.enabled=true | "
    "train.lock={image_blocks: 0, image_norm: false, image_projection: false}"
)
RESNET = f"model.name={json.dumps(tiny.RESNET)}"
ALONE = "model.name={vision_cfg: {backbone: 'mclclip:small_conv', image_size: 16}}"
WIDER = f"trained_model={{name: {json.dumps(tiny.MODEL | {'embed_dim': 12})}}}"
ROWS = "model.text_rows=[rows.parquet] | train.cached_text=false"
LONG = "model.long_context=true"
ZERO = "train.engine.name=deepspeed"
PROBE = "eval.suite.x={kind: linear_probe, path: y, options: {feature: pooled}}"
PAIRS = "eval.suite.x={kind: mmvp, path: y}"
EVERY = "train.evaluate.every=1"


class Case(NamedTuple):
    """Overrides that break a rule, and others with which it is kept; the option that is named."""

    option: str
    broken: Sequence[str]
    kept: Sequence[str]
    ranks: int = 1


def case(option: str, broken: str, *, then: str = "", ranks: int = 1) -> Case:
    """``broken`` are overrides, divided by a bar; ``then`` come after them and keep the rule."""
    words = [each.strip() for each in broken.split("|")]
    return Case(option, words, [*words, *filter(None, map(str.strip, then.split("|")))], ranks)


BASE = "base.objective={kind: info_nce}"
CASES = [
    case("base.start", f"{BASE} | base.start=random", then="base.start=base"),
    case("train.start", f"{MLCD} | {OTHER} | export.soup=false | train.start=random",
         then="train.start=base"),
    case("export.soup", "train.start=random", then="export.soup=false"),
    case("trained_model", f"{OTHER} | train.lock.text=false", then="train.cached_text=false"),
    case("train.objective", f"{HELD} | {OTHER}", then=TAUGHT),
    case("train.objective", f"{TAUGHT_EXACTLY} | {TRUNK}", then=HELD_EXACTLY),
    case("trained_model", f"{MLCD} | {WIDER} | train.objective.centers=normal",
         then="export.soup=false | export.concat=[]"),
    case("base.objective.kind", "base.objective={kind: mlcd, labels_per_sample: 1}",
         then=BASE),
    case("base.objective.kind", "base.objective={kind: preserve}", then=BASE),
    case("train.objective.labels_per_sample", f"{MLCD} | train.objective.labels_per_sample=2",
         then="cluster.labels_per_sample=2"),
    case("train.objective.kind", f"{ALONE} | export.concat=[]", then=VIEWS),
    case("train.objective.centers", f"{MLCD} | {WIDER} | export.soup=false | export.concat=[]",
         then="train.objective.centers=normal"),
    case("train.sentences", f"{VIEWS} | train.sentences={{}}", then="train.sentences=null"),
    case("train.sentences", "train.lock.text=false | train.sentences={}",
         then="train.cached_text=false"),
    case("train.start", f"{HELD} | train.start=previous", then="train.start=base"),
    case("model.projector", f"{HELD} | model.projector=[4]", then="model.projector=[]"),
    case("train.objective.widths", "train.objective={kind: info_nce, widths: [4096]}",
         then="train.objective.widths=[4]"),
    case("model.projector", f"{VIEWS} | train.objective.widths=[4] | model.projector=[8]",
         then="model.projector=[]"),
    case("embed.feature", f"{HELD} | embed.feature=pooled", then=HELD_EXACTLY),
    case("train.sentences", f"{HELD} | train.sentences={{}}", then=HELD_EXACTLY),
    case("train.lock.image_blocks", "train.lock.image_blocks=4", then="train.lock.image_blocks=3"),
    case("base.lock.image_blocks", f"{BASE} | base.lock.image_blocks=4",
         then="base.lock.image_blocks=0"),
    case("train.patch_dropout", f"{RESNET} | train.patch_dropout=0.5",
         then="train.patch_dropout=0"),
    case("train.patch_dropout", "train.lock.image_blocks=2 | train.patch_dropout=0.5",
         then="train.lock.image_blocks=3"),
    case("train: LoRA", "train.lora={} | train.lock.image_blocks=0",
         then="train.lock.image_blocks=1"),
    case("train: parameters.match='text.*'", f"{VIEWS} | model.text=false | export.concat=[] | "
         "train.parameters=[{match: text.*, lr_scale: 0.1}]",
         then="train.parameters=[{match: image.*, lr_scale: 0.1}]"),
    case("train: engine.micro_batch", f"{RESNET} | train.engine.micro_batch=4",
         then="train.lock.image_norm=false"),
    case("data.pixels", "data.pixels=fast | model.augmentation={use_timm: true}",
         then="data.pixels=exact"),
    case("train.objective.kind", f"{TRUNK} | {VIEWS}", then="train.objective={kind: info_nce}"),
    case("train.lock.image_blocks", f"{TRUNK} | train.lock.image_blocks=3",
         then="train.lock.image_blocks=2"),
    case("train.start", f"{TRUNK} | export.soup=false | train.start=random",
         then="train.start=base"),
    case("trained_model", f"{TRUNK} | {MLCD} | {OTHER}", then="trained_model=null"),
    case("model.augmentation", f"{TRUNK} | model.augmentation={{scale: [0.4, 1.0]}}",
         then="model.augmentation={kind: none}"),
    case("embed.feature", f"{WHOLE} | embed.feature=pooled", then="embed.feature=projected"),
    case("model.projector", f"{WHOLE} | model.projector=[8]", then="model.projector=[]"),
    case("relocate.enabled", f"{TRUNK} | relocate.enabled=true", then="relocate.enabled=false"),
    case("train.image_size", "train.image_size=[{size: 16}, {size: 24}]",
         then="train.image_size=[{size: 16, epochs: 1}, {size: 24}]"),
    case("train.image_size", "train.image_size=[{size: 16, epochs: 20}, {size: 24}]",
         then="train.image_size=[{size: 16, epochs: 20}]"),
    case("train: image_size", "train.image_size=[{size: 20}]",
         then="train.image_size=[{size: 24}]"),
    case("image_rows.enabled", f"{TRUNK} | train.image_size=[{{size: 16}}]",
         then="train.image_size=[]"),
    case("model.image_size", "model.image_size=36", then="model.image_size=40"),
    case("trained_model.image_size", f"{MLCD} | {OTHER} | export.soup=false | export.concat=[] | "
         "trained_model.image_size=36", then="trained_model.image_size=40"),
    case("model.long_context", f"{LONG} | model.name=roberta-ViT-B-32", then="model.name=ViT-B-32"),
    case("model.text", f"{LONG} | {VIEWS} | model.name=ViT-B-32 | model.text=false",
         then="model.text=true"),
    case("trained_model.long_context", f"{MLCD} | train.objective.centers=normal | "
         "export.soup=false | export.concat=[] | trained_model={name: roberta-ViT-B-32} | "
         "trained_model.long_context=true", then="trained_model.long_context=false"),
    case("trained_model.text", f"{MLCD} | train.objective.centers=normal | export.soup=false | "
         "export.concat=[] | trained_model={name: ViT-B-32, long_context: true, text: false}",
         then="trained_model.text=true"),
    case("trained_model.text_rows",
         f"model.text_rows=[a.npy] | {OTHER} | trained_model.text_rows=[b.npy]",
         then="trained_model.text_rows=[a.npy]"),
    case("eval.text_rows", "eval.text_rows=[a.npy]", then="model.text_rows=[b.npy]"),
    case("train.sentences", f"{ROWS} | train.sentences={{number: 1}}",
         then="train.sentences=null"),
    case("cluster.num_clusters", "cluster.num_clusters=[3, 3]", then="num_stages=2"),
    case("controls", f"{MLCD} | controls=[ungrouped]", then="controls=[]"),
    case("eval.encoders", "eval.encoders=[stage_9]", then="eval.encoders=[stage_1]"),
    case("eval.suite.x.options.feature", PROBE, then="export.concat=[]"),
    case("eval.suite.x", f"{ALONE} | {VIEWS} | {PAIRS}", then="eval.suite.x=null"),
    case("train.checkpoint.mirror", "run_dir=runs/a | train.checkpoint.mirror=runs/b/../a/mirror",
         then="train.checkpoint.mirror=runs/b"),
    case("train.evaluate.every", EVERY, then=PAIRS),
    case("train.evaluate.suite", f"{EVERY} | {PAIRS} | train.evaluate.suite=[y]",
         then="train.evaluate.suite=[x]"),
    case("controls", f"controls=[ungrouped] | {EVERY} | {PAIRS} | train.evaluate.metric=x/average |"
         " train.evaluate.patience=1", then="train.evaluate.patience=null"),
    case("relocate.url", "relocate.enabled=true | relocate.url=s3://copies",
         then="relocate.url=null"),
    case("train.global_batch", "train.global_batch=10", then="train.global_batch=9", ranks=3),
    case("train.engine.shard_ranks", "train.engine={name: fsdp, shard_ranks: 3}",
         then="train.engine.shard_ranks=2", ranks=4),
    case("train.optimizer", f"{ZERO} | train.optimizer=lars", then="train.optimizer=lion", ranks=2),
    case("train.precision", f"{ZERO} | train.precision=float64", then="train.precision=fp32",
         ranks=2),
    case("train.global_batch", "train.objective={kind: moco, queue_size: 100} | "
         "train.global_batch=128", then="train.objective.queue_size=128"),
    case("train.engine.zero_stage", "train.objective={kind: moco} | train.global_batch=64 | "
         "train.engine={name: deepspeed, zero_stage: 3}", then="train.engine.zero_stage=2"),
    case("train.engine.zero_stage", "train.objective={kind: simlap, momentum: 0.9} | "
         "train.engine={name: deepspeed, zero_stage: 3}", then="train.objective.momentum=null"),
    case("cluster.num_clusters", f"{MLCD} | train.objective.sample_rate=0.05",
         then="train.objective.sample_rate=0.051"),
    case("train.engine.micro_batch", "train.objective={kind: feature_dropout} | "
         "train.precision=fp16 | train.engine.micro_batch=4", then="train.precision=bf16"),
]  # fmt: skip
IDS = [f"{number}-{each.option}" for number, each in enumerate(CASES)]
TREE = {"run_dir": "x", "model": {"name": tiny.MODEL}, "train": {"global_batch": 120}}


def unchecked(overrides: Sequence[str]) -> Config:
    """The configuration, of which only single options are checked."""
    tree: dict[str, Any] = json.loads(json.dumps(TREE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "check", lambda _: None)
        return config.from_tree(tree, overrides)


def lines(rule: rules.Rule, made: Config, ranks: int) -> list[str]:
    """The lines of a rule that a configuration breaks."""
    found = [rule.line(rules.Subject(made, name, ranks)) for name in made.trainings]
    return [str(line) for line in found if line]


@cache
def broken(number: int) -> Config:
    return unchecked(CASES[number].broken)


@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS.__getitem__)
def test_a_broken_rule_is_a_line_that_names_the_option(number: int) -> None:
    """One that is kept is silent."""
    each, made = CASES[number], broken(number)
    with pytest.raises(ValueError) as caught:
        rules.check(made, num_ranks=each.ranks, run=True)
    assert process.exit_code(caught.value) == 2
    line = str(caught.value)
    assert each.option in line and "\n" not in line and not hasattr(caught.value, "__notes__")
    rules.check(unchecked(each.kept), num_ranks=each.ranks, run=True)


def test_every_row_has_a_case() -> None:
    made = [(broken(number), each.ranks) for number, each in enumerate(CASES)]
    without = [
        rule.option
        for rule in rules.RULES
        if not any(lines(rule, config_, ranks) for config_, ranks in made)
    ]
    assert not without


def test_all_broken_rules_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["train.start=random", "eval.encoders=[stage_9]", "train.patch_dropout=0.5"]
    assert entry.main(["config", "run_dir=x", *overrides, "train.lock.image_blocks=3"]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mclclip: ")]
    assert [re.findall(r"train.start|eval.encoders|patch_dropout", line)[0] for line in told] == [
        "train.start", "patch_dropout", "eval.encoders",
    ]  # fmt: skip


def test_rules_look_at_all_objectives_of_a_list() -> None:
    overrides = ["train.objective=[{kind: nt_xent}, {kind: moco, queue_size: 100}]"]
    with pytest.raises(ValueError, match=r"train.global_batch=120.*queue_size"):
        rules.check(unchecked(overrides))


def test_a_training_alone_is_held_against_its_ranks() -> None:
    made = unchecked([BASE, "base.global_batch=10", "train.global_batch=9"])
    rules.check(made, num_ranks=3, training="train")
    with pytest.raises(ValueError, match=r"base.global_batch=10.* 3 ranks"):
        rules.check(made, num_ranks=3, training="base")
