"""Exports for transformers, held against open_clip and against transformers itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mclclip
import mclclip.torchvision_fix  # noqa: F401
from mclclip import cli
from mclclip.export import certificate, convert, transformers_layout
from mclclip.export.target import Source
from mclclip.models import weights
from mclclip.models.encoder import Encoder
from mclclip.models.loading import load_towers
from tests import tiny

transformers = pytest.importorskip("transformers")
CONFIGS = tiny.ROOT / "tests" / "configs"


def exported(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A tiny ViT with random weights in every tensor; ``changes`` of vision_cfg and others."""
    tree = json.loads((CONFIGS / "tiny_vit.json").read_text())
    described = tree.get("model_cfg", tree)
    look = changes.pop("preprocess_cfg", None)
    for part in ("vision_cfg", "text_cfg"):
        described[part] |= changes.pop(part, {})
    described |= changes
    model = load_towers({"model_cfg": described, "preprocess_cfg": look} if look else described)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.exported.named_parameters():
            if name != "logit_scale":
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save(folder)
    return folder


def the_certificate(out: Path, runtime: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "certificate.json").read_text())
    return dict(content["runtimes"][runtime])


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_transformers_gives_the_same_features(tmp_path: Path, quick_gelu: bool) -> None:
    source = exported(tmp_path / "own", quick_gelu=quick_gelu)
    out = convert.run("hf", source, tmp_path / "hf")
    model = transformers.CLIPModel.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    own = mclclip.load_model(source)
    texts = ["a photo of a dog", "two red cups", "a"]
    length = model.config.text_config.max_position_embeddings
    tokens = tokenizer(
        texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(**tokens, pixel_values=pixels)
    images, words = own.encode_image(pixels), own.encode_text(own.tokenizer(texts))
    torch.testing.assert_close(found.image_embeds, images, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.text_embeds, words, atol=1e-5, rtol=0)
    wanted = own.logit_scale * images @ words.T
    torch.testing.assert_close(found.logits_per_image, wanted, atol=1e-4, rtol=1e-5)
    proof = the_certificate(out)
    assert proof["image_features"] <= 1e-5 and proof["text_features"] <= 1e-5
    assert proof["num_images"] == 15 and proof["runtime"].startswith("transformers ")
    assert images.std() > 0.05  # the towers do something


def test_special_tokens_of_the_configuration_are_the_tokenizers(tmp_path: Path) -> None:
    """transformers reads a text at its eos_token_id, and by a rule of older models where it is 2,
    which gives the same features."""
    out = convert.run("hf", exported(tmp_path / "own"), tmp_path / "hf")
    text = json.loads((out / "config.json").read_text())["text_config"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert text[name] == getattr(tokenizer, name)


def test_it_loads_again_as_an_encoder(tmp_path: Path) -> None:
    source = exported(tmp_path / "own")
    again = mclclip.load_model(f"hf:{convert.run('hf', source, tmp_path / 'hf')}")
    pixels = torch.randn(2, 3, 32, 32)
    wanted = mclclip.load_model(source).encode_image(pixels)
    torch.testing.assert_close(again.encode_image(pixels), wanted, atol=1e-5, rtol=0)


def test_images_and_texts_of_the_user(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(5):
        pixels = random.integers(0, 256, (40 + number, 60, 3), dtype=np.uint8)
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "texts.txt").write_text("a dog\n&lt;b&gt; a cat\n")
    out = convert.run(
        "hf", exported(tmp_path / "own"), tmp_path / "hf",
        images=tmp_path / "photos", texts=tmp_path / "texts.txt", num_images=3,
    )  # fmt: skip
    proof = the_certificate(out)
    assert proof["num_images"] == 3 and proof["num_texts"] == 2
    assert proof["tokens_of"] == ["&lt;b&gt; a cat"]  # transformers does not unescape HTML


def test_pixels_of_a_wrong_processor_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another mean than the model's moves every pixel: the certificate says by how much."""
    source = exported(tmp_path / "own")
    own, out = load_towers(source), tmp_path / "hf"
    convert.run("hf", source, out)
    path = out / "preprocessor_config.json"
    record = json.loads(path.read_text())
    record["image_mean"] = [value + 10 / 255 for value in record["image_mean"]]
    path.write_text(json.dumps(record))
    other = mclclip.load_model(f"hf:{out}")
    found = certificate.compare(
        Encoder([own]), other, "x", {"a": Image.new("RGB", (32, 32), (128, 99, 3))}, ["a"]
    )
    assert found.pixels == pytest.approx(10, abs=0.6) and found.pixels_of == ["a"]
    assert found.holds and found.image_features_own_pixels > 1e-4


def test_another_logit_scale_is_not_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Encoder([load_towers(exported(tmp_path / "own"))])
    other = Encoder([load_towers(tmp_path / "own")])
    images = {"a": Image.new("RGB", (32, 32), (128, 99, 3))}
    assert certificate.compare(own, other, "x", images, ["a"]).holds
    for scale in (own.logit_scale * 1.001, float("nan")):
        other.logit_scale = scale
        found = certificate.compare(own, other, "x", images, ["a"])
        assert found.largest <= 1e-5 and not found.holds
    assert found.logit_scale is not None
    proof = certificate.Certificate("x", 1, text_features=float("nan"), bound=0.02)
    assert not proof.holds

    compare = certificate.compare
    monkeypatch.setattr(
        certificate, "compare", lambda *a, **b: replace(compare(*a, **b), logit_scale=1e-3)
    )
    with pytest.raises(ValueError, match="logit scales by 0.001 of their value"):
        convert.run("hf", tmp_path / "own", tmp_path / "out")


@pytest.mark.parametrize(
    ("look", "size"),
    [
        ({"resize_mode": "shortest"}, {"shortest_edge": 32}),
        ({"resize_mode": "squash"}, {"height": 32, "width": 32}),
    ],
)
def test_modes_of_resizing(tmp_path: Path, look: dict[str, Any], size: dict[str, int]) -> None:
    source = exported(tmp_path / "own", preprocess_cfg={"size": [32, 32]} | look)
    out = convert.run("hf", source, tmp_path / "hf")
    assert json.loads((out / "preprocessor_config.json").read_text())["size"] == size
    assert the_certificate(out)["pixels"] <= 1.1


def test_a_part_that_the_other_library_lacks_is_found_by_the_certificate(tmp_path: Path) -> None:
    """Averaging patches instead of the class token changes no tensor."""
    source = exported(tmp_path / "own", vision_cfg={"pool_type": "avg"})
    with pytest.raises(ValueError, match="is not converted: features in transformers .* differ by"):
        convert.run("hf", source, tmp_path / "hf")
    assert not (tmp_path / "hf" / transformers_layout.WEIGHTS).exists()
    assert not (tmp_path / "hf" / "manifest.json").exists()


def test_what_cannot_be_converted_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "hf"
    vit = exported(tmp_path / "vit")
    load_towers(CONFIGS / "tiny_resnet.json").save(tmp_path / "resnet")
    with pytest.raises(ValueError, match="has no place in transformers' CLIPModel"):
        convert.run("hf", tmp_path / "resnet", out)
    with pytest.raises(FileNotFoundError, match="no exported model at .*nothing"):
        convert.run("hf", tmp_path / "nothing", out)
    longest = exported(
        tmp_path / "longest", preprocess_cfg={"size": [32, 32], "resize_mode": "longest"}
    )
    with pytest.raises(ValueError, match="by their longest side have no image processor"):
        convert.run("hf", longest, out)
    with pytest.raises(FileNotFoundError, match="no pictures below"):
        convert.run("hf", vit, out, images=tmp_path / "resnet")
    assert not out.exists()


def test_a_finished_one_is_skipped_and_another_model_is_refused(tmp_path: Path) -> None:
    out = convert.run("hf", exported(tmp_path / "a"), tmp_path / "hf")
    before = (out / "manifest.json").read_bytes()
    convert.run("hf", tmp_path / "a", out)
    assert (out / "manifest.json").read_bytes() == before
    with pytest.raises(ValueError, match="was made with other settings"):
        convert.run("hf", exported(tmp_path / "b", seed=1), out)
    convert.run("hf", tmp_path / "b", out, force=True)
    assert (out / "manifest.json").read_bytes() != before
    tensors = weights.read_tensors(out / transformers_layout.WEIGHTS)
    own = weights.read_tensors(weights.find_weights(tmp_path / "b"))
    assert torch.equal(tensors["visual_projection.weight"], own["visual.proj"].T)


def test_other_pictures_texts_or_configurations_are_no_finished_conversion(tmp_path: Path) -> None:
    source, photos, lines = exported(tmp_path / "a"), tmp_path / "photos", tmp_path / "texts.txt"
    photos.mkdir()
    Image.new("RGB", (40, 50), (9, 8, 7)).save(photos / "a.png")
    lines.write_text("a dog\n")
    run = partial(convert.run, "hf", source, tmp_path / "hf")
    out = run()
    before = (out / "manifest.json").read_bytes()
    assert run(precision="fp32") == out  # which is the default
    assert (out / "manifest.json").read_bytes() == before
    with pytest.raises(
        ValueError, match="was made with other settings: config.images was None, now"
    ):
        run(images=photos)
    with pytest.raises(
        ValueError, match="was made with other settings: config.texts was None, now"
    ):
        run(texts=lines)
    run(images=photos, texts=lines, force=True)
    before = (out / "manifest.json").read_bytes()
    run(images=photos, texts=lines)
    assert (out / "manifest.json").read_bytes() == before
    Image.new("RGB", (40, 50), (9, 8, 6)).save(photos / "a.png")
    with pytest.raises(ValueError, match="was made with other settings: config.images was"):
        run(images=photos, texts=lines)
    digest, path = Source(source).digest, source / "open_clip_config.json"
    path.write_text(path.read_text().replace("{", "{ ", 1))
    assert Source(source).digest != digest


@pytest.mark.parametrize("force", [False, True])
def test_files_of_others_stay(tmp_path: Path, force: bool) -> None:
    source, out = exported(tmp_path / "own"), tmp_path / "mine"
    out.mkdir()
    (out / "README.md").write_text("my own")
    with pytest.raises(ValueError, match="mine holds files that mclclip did not write: give a new"):
        convert.run("hf", source, out, force=force)
    assert [path.name for path in out.iterdir()] == ["README.md"]
    assert (out / "README.md").read_text() == "my own"
    with pytest.raises(ValueError, match="README.md is a file: give a new folder"):
        convert.run("hf", source, out / "README.md", force=force)
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises(ValueError, match="is the model itself: give a new folder"):
        convert.run("hf", source, tmp_path / "mine" / ".." / "own", force=force)
    assert sorted(path.name for path in source.iterdir()) == before


def test_what_killed_conversions_left_is_removed(tmp_path: Path) -> None:
    source = exported(tmp_path / "own")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f".hf.{ended.pid}.tmp", f".hf.{os.getppid()}.tmp", f".other.{ended.pid}.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"part")
    convert.run("hf", source, tmp_path / "hf")
    left = sorted(path.name for path in tmp_path.glob(".*"))
    assert left == sorted([f".hf.{os.getppid()}.tmp", f".other.{ended.pid}.tmp"])


def test_the_working_folder_may_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = exported(tmp_path / "own")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    out = convert.run("hf", source, Path("."))
    assert (out / "config.json").is_file() and out.samefile(tmp_path / "here")
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_the_command_line_wants_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli._parse(["export", "--to", "hf", "--model", "x"])
    assert "export got --to --model: wanted --to, --model and --out" in capsys.readouterr().err
