"""Models whose features are cut to their first numbers, and their exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mclclip
from mclclip.export import certificate, convert
from mclclip.models.loading import load_towers
from mclclip.models.narrow import narrow, narrow_encoder
from mclclip.run import artifacts
from tests.matrix import kept
from tests.unit.export.models import siglip, source_of
from tests.unit.export.test_targets import by_onnxruntime, by_open_clip, by_transformers

pytestmark = pytest.mark.usefixtures("narrow_siglip")
KINDS = ["vit", "resnet", "concat_stage_norm", "test_vit", "test_resnet", "apart_raw", "quick_gelu"]
WIDTH = 5


def pixels_of(encoder: Any, number: int = 3) -> torch.Tensor:
    shape = encoder.preprocess_val(certificate.draw_images()["noise 50x40"]).shape
    return torch.randn(number, *shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("kind", kept(KINDS, 0, 1, 2, 3))
def test_a_narrow_model_has_the_first_numbers_of_the_features(tmp_path: Path, kind: str) -> None:
    whole = mclclip.load_model(source_of(kind, tmp_path))
    cut, narrowed = whole.cut(WIDTH), narrow_encoder(whole, WIDTH)
    num = len(whole.stages)
    pixels, tokens = pixels_of(whole), whole.tokenizer(["a dog", "two cups", "a"])
    for encode, stage_features in (
        (lambda e: e.encode_image(pixels), whole.stage_features(pixels)),
        (lambda e: e.encode_text(tokens), whole.stage_text_features(tokens)),
    ):
        found = encode(cut)
        assert found.shape == (3, WIDTH * num) and cut.embed_dim == WIDTH * num
        torch.testing.assert_close(found, encode(narrowed), atol=1e-5, rtol=0)
        if num == 1:
            wanted = torch.nn.functional.normalize(stage_features[0][:, :WIDTH], dim=1)
            torch.testing.assert_close(found, wanted)


@torch.no_grad()
@pytest.mark.parametrize(
    ("to", "load"),
    kept([("open_clip", by_open_clip), ("onnx", by_onnxruntime), ("hf", by_transformers)], 0, 2),
)
def test_every_library_reads_a_width(tmp_path: Path, to: str, load: Any) -> None:
    pytest.importorskip("transformers" if to == "hf" else "open_clip")
    source = source_of("vit", tmp_path)
    out = convert.run(to, source, tmp_path / "out", width=WIDTH)
    whole = mclclip.load_model(source)
    pixels = pixels_of(whole)
    found = torch.nn.functional.normalize(load(out)[0](pixels), dim=-1)
    torch.testing.assert_close(found, whole.cut(WIDTH).encode_image(pixels), atol=1e-5, rtol=0)
    assert artifacts.read_manifest(out, "converted").config["width"] == WIDTH
    with pytest.raises(ValueError, match="width"):  # another width is another artifact
        convert.run(to, source, out, width=WIDTH + 1)


@pytest.mark.parametrize("width", [0, -1, 10_000])
def test_a_width_that_the_features_do_not_have_is_refused(tmp_path: Path, width: int) -> None:
    encoder = mclclip.load_model(source_of("vit", tmp_path))
    for refuse in (encoder.cut, lambda w: narrow_encoder(encoder, w)):
        with pytest.raises(ValueError, match=f"width={width} is of features of"):
            refuse(width)


def test_towers_without_a_projection_are_refused(tmp_path: Path) -> None:
    """Before anything is written."""
    for source in (siglip(tmp_path / "siglip"), source_of("image_encoder", tmp_path)):
        with pytest.raises(ValueError, match="cannot be cut to width=5"):
            narrow(load_towers(source), WIDTH)
        with pytest.raises(ValueError, match="cannot be cut to width=5"):
            convert.run("onnx", source, tmp_path / "out", width=WIDTH)
        assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="--width"):
        convert.run("clip_retrieval", tmp_path / "siglip", tmp_path / "out", width=WIDTH)
