"""Stretched positions: against a loop, short texts unchanged, long ones no longer cut."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip
import pytest
import torch
from torch import Tensor

from mclclip.config import Config
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.towers import stretch_positions
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import read_manifest
from mclclip.verbs import cluster, embed, export, index, train
from tests import tiny

SHORT = ["a photo of a dog", "", "two red cups on a table, seen from above, with a spoon"]
LONG = ["word " * 100, "word " * 100 + "dog", "word " * 99 + "cat"]


def described(text: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A tiny model with CLIP's context of 77 tokens."""
    own = tiny.MODEL["text_cfg"] | {"context_length": 77, "layers": 2} | (text or {})
    return {**tiny.MODEL, "text_cfg": own, **changes}


def moved(tree: dict[str, Any], folder: Path) -> str:
    """Such a model with positions that matter, as a directory."""
    model = load_towers(tree)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        positions = model.text_tower.positional_embedding
        positions += 0.5 * torch.randn(positions.shape, generator=generator)
    model.save(folder)
    return f"local-dir:{folder}"


@torch.no_grad()
def features(model: Model, texts: list[str]) -> Tensor:
    return model.encode_text(model.tokenizer(texts), normalize=True)


@pytest.mark.parametrize("length", [21, 30])
def test_positions_equal_a_loop(length: int) -> None:
    p = torch.randn(length, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = [p[i] for i in range(20)]
    for i in range(length - 21):
        wanted += [(1 - j / 4) * p[20 + i] + j / 4 * p[21 + i] for j in range(4)]
    wanted += [p[-1] + j / 4 * (p[-1] - p[-2]) for j in range(4)]
    found = stretch_positions(p)
    assert found.shape == (20 + 4 * (length - 20), 5)
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-14, rtol=0)
    assert torch.equal(found[20::4], p[20:])


@pytest.mark.parametrize("custom", [False, True])
def test_short_texts_keep_their_features_and_long_ones_are_read(
    custom: bool, tmp_path: Path
) -> None:
    """Also from an export, of whose configuration open_clip builds mask and lengths anew."""
    name = moved(described(custom_text=custom), tmp_path / "base")
    before, after = load_towers(name), load_towers(name, long_context=True)
    assert before.tokenizer(SHORT)[2, 20:].eq(0).all()  # it ends within 20 tokens
    torch.testing.assert_close(features(after, SHORT), features(before, SHORT), atol=1e-6, rtol=0)
    assert features(before, LONG).diff(dim=0).abs().max() < 1e-6  # cut at 77, all the same
    assert features(after, LONG).diff(dim=0).abs().amax(dim=1).min() > 1e-3
    assert after.tokenizer(LONG).shape == (3, 248)
    assert after.config["model_cfg"]["text_cfg"]["context_length"] == 248
    changed = {n for n, t in after.state_dict().items() if t.shape != before.state_dict()[n].shape}
    assert {n.rpartition(".")[2] for n in changed} == {"positional_embedding"}
    after.save(tmp_path / "longer")
    wanted = features(after, LONG + SHORT)
    assert torch.equal(features(load_towers(tmp_path / "longer"), LONG + SHORT), wanted)
    plain, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'longer'}")
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'longer'}")(LONG + SHORT)
    with torch.no_grad():
        found = plain.eval().encode_text(tokens, normalize=True)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    own, other = vars(after.clip), vars(plain)
    assert own["context_length"] == other["context_length"] == 248


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_cfg": {"context_length": 20}}, "has a context of 20 tokens, wanted more than 20"),
        ({"text_cfg": {"context_length": 248}}, "248 tokens would become 932, wanted 248 at most"),
        ({"text_cfg": {"hf_model_name": "roberta-base"}}, "is roberta-base of Hugging Face"),
        ({"text_cfg": {"embed_cls": True}}, "has a class token after the text"),
        ({"text_cfg": None}, "the model has no text tower"),
    ],
)
def test_towers_that_cannot_be_stretched_are_refused_when_options_are_read(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = described(change["text_cfg"]) if change["text_cfg"] else dict(described())
    if change["text_cfg"] is None:
        del model["text_cfg"]
    tree = tiny.tree(tmp_path / "run", tmp_path)
    tree["model"] = {"name": model, "long_context": True}
    with pytest.raises(ValueError, match=message) as error:
        tiny.config.from_tree(tree, ())
    assert "model.long_context=true" in str(error.value) and "\n" not in str(error.value)


def given(run_dir: Path, name: str, data: Path, *overrides: str) -> Config:
    """A run that starts from an encoder."""
    own = ("base=null", f"model.name={name}", "num_stages=1", "model.long_context=true")
    return tiny.make_config(run_dir, data, *own, *overrides)


def test_a_later_stage_is_not_stretched_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tiny.make_data(tmp_path / "data", num_samples=48)
    run = given(tmp_path / "run", moved(described(), tmp_path / "base"), data, "train.steps=1")
    index.run(run, SINGLE)
    with caplog.at_level(logging.INFO):
        export.stage(run, SINGLE, stage=0)
    assert "stage 0: texts have up to 248 tokens" in caplog.messages
    embed.run(run, SINGLE, stage=0)
    cluster.run(run, SINGLE, stage=0)
    made = read_manifest(train.run(run, SINGLE, stage=1), "train")
    assert made.config["model"]["long_context"] is True
    assert load_towers(export.stage(run, SINGLE, stage=1)).tokenizer.context_length == 248


def test_a_tower_without_a_causal_mask_has_other_features_and_says_how_far(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = described({"no_causal_mask": True, "pool_type": "last"}, custom_text=True)
    name = moved(tree, tmp_path / "base")
    before, after = load_towers(name), load_towers(name, long_context=True)
    assert after.text_tower.attn_mask is None
    assert features(after, LONG).diff(dim=0).abs().amax(dim=1).min() > 1e-5
    assert features(before, LONG).diff(dim=0).abs().max() == 0.0
    run = given(tmp_path / "run", name, tmp_path)
    export.stage(run, SINGLE, stage=0)
    (line,) = [m for m in caplog.messages if "no causal mask" in m]
    texts = ["a photo of a dog", "two red cups on a table, seen from above"]
    pair = [features(model, texts) for model in (before, after)]
    assert (pair[0] - pair[1]).abs().max() > 1e-3
    assert f"are {(pair[0] * pair[1]).sum(dim=1).min():.4f} and above" in line
