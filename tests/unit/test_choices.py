"""The settings of ``finetune``: whole, explained, and within the memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mclclip import config
from mclclip.config import Config
from mclclip.models.loading import load_towers
from mclclip.plan import choices, memory
from mclclip.plan.choices import Situation
from mclclip.plan.machine import GIB, Machine
from tests import tiny
from tests.matrix import kept

BASES = (
    "ViT-B-32-quickgelu@openai",
    "ViT-L-14-quickgelu@openai",
    "ViT-B-16-SigLIP@webli",
    "RN50-quickgelu@openai",
)


def situation(base: str = BASES[0], samples: int = 10_000, **others: Any) -> Situation:
    given = {"machine": Machine(), "cores": 4} | others
    return Situation(base, samples, Path("data"), Path("run"), **given)


def chosen(at: Situation, *overrides: str, folder: Path) -> tuple[str, Config]:
    path = folder / "settings.yaml"
    path.write_text(text := choices.choose(at, overrides)[1])
    return text, config.load(path)


def test_every_line_has_its_reason(tmp_path: Path) -> None:
    text, settled = chosen(situation(), "train.lr=3e-6", "train.plan.policy=wrap", folder=tmp_path)
    values = [line for line in text.splitlines() if not line.endswith(":")]
    assert len(values) > 25 and all(line.partition("  # ")[2] for line in values)
    assert "lr: 3.0e-06  # given" in text and "policy: wrap  # given" in text
    assert settled.train.lr == 3e-6 and settled.train.plan.policy == "wrap"
    assert settled.controls == ["ungrouped"] and settled.base is None
    assert settled.model.pretrained == "openai" and not settled.train.lock.text


def test_an_override_of_a_list_is_written_whole_and_null_drops_a_benchmark(tmp_path: Path) -> None:
    given = ["train.objective=[{kind: info_nce}, {kind: preserve}]"]
    given += ["train.objective.0.temperature=0.5", "train.parameters=[{match: '*', lr_scale: 0.5}]"]
    text, settled = chosen(situation(), *given, folder=tmp_path)
    assert [term.kind for term in settled.train.objective] == ["info_nce", "preserve"]
    assert settled.train.objective[0].temperature == 0.5
    assert settled.train.parameters[0].lr_scale == 0.5
    assert text.count("objective: [") == 1
    text, settled = chosen(situation(), "eval.suite.report=null", folder=tmp_path)
    assert "choose" in settled.eval.suite and "report" not in settled.eval.suite


@pytest.mark.parametrize("ranks", [1, 3])
def test_groups_hold_a_batch_for_any_number_of_pictures(tmp_path: Path, ranks: int) -> None:
    for samples in (100, 333, 1_344, 20_000, 10**7):
        at = situation("tiny_clip@random", samples, machine=Machine(gpus_per_node=ranks))
        _, settled = chosen(at, folder=tmp_path)
        batch, stages = settled.train.global_batch, settled.num_stages
        assert batch % ranks == 0 and 1 <= stages <= 2
        assert samples / settled.cluster.clusters_of(0) ** stages >= batch, samples
        assert settled.base is not None and settled.base.global_batch <= samples


ROWS = re.findall(
    r"^\| `(\S+@\S+)` \| (\d+) \|.*\|$",
    (tiny.ROOT / "docs/pages/how-to/small-gpu.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gib", "base"), kept([(gib, base) for gib in (8.0, 80.0) for base in BASES], 6)
)
def test_what_is_chosen_fits_the_memory(tmp_path: Path, base: str, gib: float) -> None:
    machine = Machine(memory_gib=gib, elsewhere=True)
    text, settled = chosen(situation(base, 100_000, machine=machine), folder=tmp_path)
    measured = memory.measure(settled, "train", settled.train, machine)
    assert measured["sum"] <= 0.9 * gib * GIB
    assert f"of {gib:g} GiB" in text
    if base.startswith("RN"):  # batch norms: kept, since groups are no fair sample
        assert not settled.train.lock.image_norm
    assert settled.train.objective.kind == ("sigmoid" if "SigLIP" in base else "info_nce")


def test_the_bias_in_a_file_of_weights_chooses_the_loss(tmp_path: Path) -> None:
    """open_clip's --siglip names it in the checkpoint, not in the architecture."""
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(tiny.MODEL))
    for kind, bias in {"sigmoid": {"init_logit_bias": -10.0}, "info_nce": {}}.items():
        weights = tmp_path / f"{kind}.pt"
        torch.save(load_towers(tiny.MODEL | bias).clip.state_dict(), weights)
        _, settled = chosen(situation(f"{model}@{weights}"), folder=tmp_path)
        assert settled.train.objective.kind == kind


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pictures to train on: 99 .* at least 100"):
        choices.choose(situation(samples=99))
    with pytest.raises(ValueError, match="ViT-B-32 names no weights"):
        choices.choose(situation("ViT-B-32"))
    (tmp_path / "model.json").write_text(json.dumps(tiny.ONE_BLOCK))
    small = Machine(memory_gib=0.0001, elsewhere=True)
    with pytest.raises(ValueError, match="base needs at least .* GiB of each GPU"):
        choices.choose(situation(f"{tmp_path}/model.json@random", 100, machine=small))
    with pytest.raises(ValueError, match="train.lrr"):
        choices.choose(situation("tiny_clip@random"), ["train.lrr=1"])
