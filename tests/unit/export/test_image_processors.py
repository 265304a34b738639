"""The own image processor of exports for transformers, and the code that lies beside weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mclclip
from mclclip.data.decode import decode_image, upright_rgb
from mclclip.export import certificate, convert
from mclclip.export.processors import EXACT, load_processor
from mclclip.export.targets import hf
from tests.unit.export.models import exported, the_certificate

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its conversion; read only."""
    folder = tmp_path_factory.mktemp("made")
    source = exported(folder / "own")
    return source, convert.run("hf", source, folder / "hf")


def test_the_code_in_an_export_is_not_run(
    made: tuple[Path, Path], joined_hf: tuple[Path, Path], tmp_path: Path
) -> None:
    """What lies beside the weights is for others; certificates use the installed module."""
    out = shutil.copytree(joined_hf[1], tmp_path / "joined")
    clip = shutil.copytree(made[1], tmp_path / "clip")
    for folder in (out, clip):
        code = [*folder.rglob("*.py")]
        assert code
        for path in code:
            path.write_text("raise SystemExit('it ran')")
    hf.load_stages(out)
    load_processor(out)
    mclclip.load_model(f"hf:{clip}")


@pytest.mark.parametrize("mode", ["shortest", "squash"])
def test_the_own_image_processor_gives_open_clips_pixels(tmp_path: Path, mode: str) -> None:
    """Bit for bit, at every remainder of the crop; the stock one is a pixel off at some."""
    look = {"size": [32, 32], "resize_mode": mode}
    source = exported(tmp_path / "own", preprocess_cfg=look)
    out = convert.run("hf", source, tmp_path / "hf")
    own, processor = mclclip.load_model(source), load_processor(out)
    random, moved = np.random.default_rng(0), 0
    stock = transformers.CLIPImageProcessor.from_pretrained(out)
    for side in range(33, 45) if mode == "shortest" else (33, 40):
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
    layered = Image.fromarray(random.integers(0, 256, (40, 50, 4), dtype=np.uint8))
    found = processor(images=layered, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(found, own.preprocess_val(upright_rgb(layered)))  # on white
    exif = Image.Exif()
    exif[0x0112] = 6  # turned upright, as mclclip's decoding does
    layered.convert("RGB").save(tmp_path / "turned.png", exif=exif)
    upright = decode_image((tmp_path / "turned.png").read_bytes(), 10_000)
    assert upright.size == (40, 50)
    with Image.open(tmp_path / "turned.png") as image:
        found = processor(images=image, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(found, own.preprocess_val(upright))
    grey = Image.fromarray(random.integers(0, 1 << 16, (40, 50), dtype=np.uint16))
    found = processor(images=grey, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(found, own.preprocess_val(grey))  # of 16 bits
    exact = the_certificate(out, 2)
    assert exact["pixels"] == 0.0 and exact["image_features_own_pixels"] <= 1e-5
    assert exact["runtime"].endswith("OpenClipImageProcessor")


@pytest.mark.parametrize(("number", "slow"), [(0, True), (1, False)], ids=["Pillow", "torchvision"])
def test_the_certificate_measures_the_processor_that_users_get(
    made: tuple[Path, Path], number: int, slow: bool
) -> None:
    source, out = made
    own, proof = mclclip.load_model(source), the_certificate(out, number)
    load = transformers.AutoImageProcessor.from_pretrained
    stock, pictures = load(out, use_fast=not slow), certificate.draw_images()
    shades = 255 * torch.tensor(own.stages[0].config["preprocess_cfg"]["std"])[:, None, None]
    moved = [
        (stock(images=image, return_tensors="pt")["pixel_values"][0] - own.preprocess_val(image))
        for image in pictures.values()
    ]
    largest = max(float((difference.abs() * shades).max()) for difference in moved)
    assert proof["pixels"] == pytest.approx(largest, abs=0.01)
    assert slow or largest > 0.5  # torchvision rounds otherwise than Pillow
    assert proof["num_images"] == len(pictures)


def test_as_many_pictures_are_compared_as_were_asked_for(tmp_path: Path) -> None:
    for number in range(9):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    assert len(certificate.read_probes(tmp_path, None, 8).images) == 8
    assert len(certificate.read_probes(tmp_path, None, 20).images) == 9


def test_the_folder_of_the_exact_processor_is_for_those_who_trust_its_code(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    """For those who have no mclclip; the export itself names the stock one, and asks nothing."""
    source, out = made
    shutil.copytree(out, tmp_path / "elsewhere")
    load = transformers.AutoImageProcessor.from_pretrained
    image = certificate.draw_images()["edges 50x40"]
    trusted = load(tmp_path / "elsewhere" / EXACT, trust_remote_code=True)
    assert type(trusted).__name__ == "OpenClipImageProcessor"
    wanted = mclclip.load_model(source).preprocess_val(image)
    found = trusted(images=image, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(found, wanted)
    stock = load(tmp_path / "elsewhere", trust_remote_code=True)
    assert type(stock).__name__.startswith("CLIPImageProcessor")
    assert "auto_map" not in (out / "preprocessor_config.json").read_text()
    assert "auto_map" not in (out / "config.json").read_text()
