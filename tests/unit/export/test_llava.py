"""Vision towers in transformers' LLaVA: the states that it reads of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mclclip
from mclclip.export import convert
from mclclip.export.targets import Source
from mclclip.export.targets.llava import trained_blocks_seen
from mclclip.models import weights
from mclclip.models.loading import load_towers
from tests.unit.export import tiny_llava
from tests.unit.export.models import exported, joined, the_certificate

transformers = pytest.importorskip("transformers")


def test_llava_reads_all_stages_unpatched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One by one, or joined; the joined state is not taken for that of one stage."""
    source = joined(tmp_path, trunk=1)
    with caplog.at_level("WARNING", logger="mclclip"):
        out = convert.run("llava", source, tmp_path / "llava")
    assert "it sees 1 of the 2 trained blocks (of 3)" in caplog.text
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    own: Any = mclclip.load_model(source)
    states = [stage.encode_trunk(pixels, 2)[:, 1:] for stage in own.stages]
    assert not torch.allclose(states[0], states[1], atol=1e-2)
    layers: Any
    for layers, channels in (([0, 1, 2], 64), (-2, 3 * 64)):
        tower = transformers.AutoModel.from_pretrained(out, hidden_size=channels).eval()
        llava = tiny_llava.around(tower, layers)
        assert llava.model.multi_modal_projector.linear_1.in_features == 3 * 64
        read, logits = tiny_llava.forward(llava, pixels)
        torch.testing.assert_close(read, torch.cat(states, dim=-1), atol=1e-5, rtol=1e-5)
    again = tiny_llava.reloaded(llava, tmp_path / "saved")
    assert torch.equal(tiny_llava.forward(again, pixels)[1], logits)
    tower = transformers.AutoModel.from_pretrained(out).eval()
    assert (tower.config.width, tower.config.hidden_size) == (64, 64)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        tiny_llava.forward(tiny_llava.around(tower, -2), torch.zeros(1, 3, 32, 32))
    with pytest.raises(ValueError, match="hidden_size is 128, wanted 64, or 192 where the states"):
        transformers.AutoModel.from_pretrained(out, hidden_size=128)


def test_llava_reads_a_plain_tower(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = exported(tmp_path / "own", quick_gelu=True)
    out = convert.run("llava", source, tmp_path / "llava")
    assert "Loading weights" not in capfd.readouterr().err  # bars of transformers
    assert json.loads((out / "config.json").read_text())["model_type"] == "clip_vision_model"
    tensors = weights.read_tensors(out / "model.safetensors")
    assert all(name.startswith("vision_model.") for name in tensors)  # as version 4 wants them
    tower = transformers.CLIPVisionModel.from_pretrained(out).eval()
    model: Any = load_towers(source).eval()
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = tower(pixels, output_hidden_states=True).hidden_states[-2]
        torch.testing.assert_close(found, model.encode_trunk(pixels, 2), atol=1e-4, rtol=1e-4)
    proof = the_certificate(out)
    assert proof["image_features"] <= 1e-5 and "is not known" in proof["notes"][0]


def test_a_tower_without_a_trained_block_that_llava_sees_is_told(
    joined_hf: tuple[Path, Path], tmp_path: Path
) -> None:
    source = Source(joined_hf[0])  # of whose three blocks the stages share two
    assert "it sees none of the 1 trained blocks (of 3)" in trained_blocks_seen(source)
    same = Source(joined(tmp_path / "same", trunk=3))
    assert trained_blocks_seen(same).startswith("no block differs from the base's (of 3)")
