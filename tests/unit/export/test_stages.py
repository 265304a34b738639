"""Joined encoders and towers in transformers: features, and the states that its LLaVA reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mclclip
import mclclip.torchvision_fix  # noqa: F401
from mclclip.data.decode import decode_image
from mclclip.export import certificate, convert, stages_layout, to_llava
from mclclip.export.image_pixels import own_processor
from mclclip.export.target import Source
from mclclip.models import weights
from mclclip.models.encoder import save_concat
from mclclip.models.loading import load_towers
from tests.matrix import kept
from tests.unit.export import tiny_llava
from tests.unit.export.test_convert import CONFIGS, exported, the_certificate
from tests.unit.export.test_onnx import concat_of, stages

transformers = pytest.importorskip("transformers")


def joined(folder: Path, variant: Any = "raw", *, trunk: int = 2, text: bool = False) -> Path:
    """A concat of three tiny stages; with `text` each has a text tower of its own."""
    paths = stages(folder, trunk=trunk)
    if text:
        model = load_towers(paths[2])
        with torch.no_grad():
            model.exported.ln_final.bias += 0.3
        model.save(paths[2])
    return concat_of(paths, variant, folder / "concat")


@pytest.mark.parametrize(
    ("variant", "trunk", "text"),
    kept([("raw", 2, False), ("weighted", 0, True), ("stage_norm", 0, True), ("raw", 3, True)], 1),
)
def test_a_joined_encoder_gives_the_same_features(
    tmp_path: Path, variant: str, trunk: int, text: bool
) -> None:
    source = joined(tmp_path, variant, trunk=trunk, text=text)
    out = convert.run("hf", source, tmp_path / "hf")
    proof = the_certificate(out)
    assert max(proof["image_features"], proof["text_features"]) <= 1e-5
    assert proof["pixels"] == 0.0 and proof["logits"] <= 1e-4
    own = mclclip.load_model(source)
    model = transformers.AutoModel.from_pretrained(out).eval()  # ours is registered
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(
            input_ids=own.tokenizer(["a dog", "two cups"]), pixel_values=pixels
        )  # fmt: skip
    wanted = own.encode_image(pixels)
    torch.testing.assert_close(found["image_embeds"], wanted, atol=1e-5, rtol=0)
    assert found["logits_per_image"].shape == (2, 2) and wanted.std() > 0.05
    held = sum(t.numel() for t in weights.read_tensors(out / "model.safetensors").values())
    assert held == sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModel.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(again.get_image_features(pixels), found["image_embeds"])


def test_the_code_in_an_export_is_not_run(tmp_path: Path) -> None:
    """What lies beside the weights is for others; certificates use the installed module."""
    out = convert.run("hf", joined(tmp_path), tmp_path / "hf")
    for path in out.glob("*.py"):
        path.write_text("raise SystemExit('it ran')")
    stages_layout.load(out)
    own_processor(out)
    clip = convert.run("hf", tmp_path / "stage_0", tmp_path / "clip")
    for path in clip.glob("*.py"):
        path.write_text("raise SystemExit('it ran')")
    mclclip.load_model(f"hf:{clip}")


def test_weights_of_stages_are_never_overlooked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A configuration that has lost them is refused, and a tower without features says so."""
    out = convert.run("hf", joined(tmp_path, "weighted"), tmp_path / "hf")
    described = json.loads((out / "config.json").read_text())
    assert described["vision_config"]["stage_weights"] == [0.5, 0.2, 0.3]
    for part in ({"stage_weights": None}, {"variant": "stage_norm"}):
        changed = described | {"vision_config": described["vision_config"] | part}
        (out / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="weighted, and it alone, has a weight for each"):
            stages_layout.load(out)
    with caplog.at_level("WARNING", logger="mclclip"):
        convert.run("llava", tmp_path / "concat", tmp_path / "llava")
    assert "the learned weights of the stages are of the features alone" in caplog.text


@pytest.mark.parametrize(
    ("layers", "channels"), [([0, 1, 2], 64), (-2, 3 * 64)], ids=["each", "joined"]
)
def test_llava_reads_all_stages_unpatched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layers: Any, channels: int
) -> None:
    source = joined(tmp_path, trunk=1)
    with caplog.at_level("WARNING", logger="mclclip"):
        out = convert.run("llava", source, tmp_path / "llava")
    assert "it sees 1 of the 2 trained blocks (of 3)" in caplog.text
    tower = transformers.AutoModel.from_pretrained(out, hidden_size=channels).eval()
    llava = tiny_llava.around(tower, layers)
    assert llava.model.multi_modal_projector.linear_1.in_features == 3 * 64
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    own = mclclip.load_model(source)
    states = [
        stage.encode_trunk(pixels, 2)[:, 1:] for stage in own.stages  # type: ignore[attr-defined]
    ]  # fmt: skip
    assert not torch.allclose(states[0], states[1], atol=1e-2)
    read, logits = tiny_llava.forward(llava, pixels)
    torch.testing.assert_close(read, torch.cat(states, dim=-1), atol=1e-5, rtol=1e-5)
    again = tiny_llava.reloaded(llava, tmp_path / "saved")
    assert torch.equal(tiny_llava.forward(again, pixels)[1], logits)


def test_the_state_of_all_stages_is_not_taken_for_that_of_one(tmp_path: Path) -> None:
    """LLaVA's usual -2 with the projector of a single stage fails, and reads no single stage."""
    out = convert.run("llava", joined(tmp_path, trunk=1), tmp_path / "llava")
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


def test_a_tower_without_a_trained_block_that_llava_sees_is_told(tmp_path: Path) -> None:
    source = Source(joined(tmp_path, trunk=2))
    assert "it sees none of the 1 trained blocks (of 3)" in to_llava._seen(source)
    same = Source(joined(tmp_path / "same", trunk=3))
    assert to_llava._seen(same).startswith("no block differs from the base's (of 3)")


def test_what_cannot_be_joined_there_is_one_line(tmp_path: Path) -> None:
    load_towers(CONFIGS / "tiny_resnet.json").save(tmp_path / "resnet")
    save_concat([tmp_path / "resnet"] * 2, "raw", tmp_path / "concat")
    for to in ("hf", "llava"):
        with pytest.raises(ValueError, match="has no place in transformers' CLIPModel"):
            convert.run(to, tmp_path / "concat", tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has one block, and LLaVA reads the state before"):
        one = exported(tmp_path / "one", vision_cfg={"layers": 1})
        convert.run("llava", one, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", kept(["shortest", "squash"], 0))
def test_the_own_image_processor_gives_open_clips_pixels(tmp_path: Path, mode: str) -> None:
    """Bit for bit, at every remainder of the crop; the stock one is a pixel off at some."""
    look = {"size": [32, 32], "resize_mode": mode}
    source = exported(tmp_path / "own", preprocess_cfg=look)
    out = convert.run("hf", source, tmp_path / "hf")
    own, processor = mclclip.load_model(source), own_processor(out)
    random, moved = np.random.default_rng(0), 0
    stock = transformers.CLIPImageProcessor.from_pretrained(out)
    for side in range(33, 45):
        for shape in ((32, side), (side, 32), (2 * side, 64)):
            image = Image.fromarray(random.integers(0, 256, (*shape, 3), dtype=np.uint8))
            wanted = own.preprocess_val(image)
            found = processor(images=image, return_tensors="pt")["pixel_values"][0]
            assert torch.equal(found, wanted)
            other = stock(images=image, return_tensors="pt")["pixel_values"][0]
            moved += int((other - wanted).abs().max() > 0.5)
    if mode == "squash":
        assert moved == 0  # nothing is cut off, so the stock one is equal too
    else:
        assert moved >= 6
    stock_proof, own_proof = the_certificate(out), the_certificate(out, 1)
    assert own_proof["pixels"] == 0.0 and own_proof["image_features_own_pixels"] <= 1e-5
    assert own_proof["runtime"].endswith("OpenClipImageProcessor")
    assert stock_proof["runtime"].endswith("its own image processor")


def test_the_own_image_processor_turns_pictures_upright(tmp_path: Path) -> None:
    """As mclclip's decoding does, whose pixels it gives of a file as Pillow opens it."""
    source = exported(tmp_path / "own")
    processor = own_processor(convert.run("hf", source, tmp_path / "hf"))
    pixels = np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.png"
    Image.fromarray(pixels).save(path, exif=exif)
    upright = decode_image(path.read_bytes(), 10_000)
    assert upright.size == (40, 64)
    wanted = mclclip.load_model(source).preprocess_val(upright)
    with Image.open(path) as image:
        found = processor(images=image, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(found, wanted)


def test_the_file_in_the_export_is_that_processor(tmp_path: Path) -> None:
    """For those who have no mclclip and trust the code; without trust, it is the stock one."""
    out = convert.run("hf", exported(tmp_path / "own"), tmp_path / "hf")
    shutil.copytree(out, tmp_path / "elsewhere")
    load = transformers.AutoImageProcessor.from_pretrained
    image = certificate.drawn_images()["edges 50x40"]
    trusted = load(tmp_path / "elsewhere", trust_remote_code=True)
    assert type(trusted).__name__ == "OpenClipImageProcessor"
    wanted = mclclip.load_model(tmp_path / "own").preprocess_val(image)
    found = trusted(images=image, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(found, wanted)
    assert type(load(tmp_path / "elsewhere")).__name__.startswith("CLIPImageProcessor")
