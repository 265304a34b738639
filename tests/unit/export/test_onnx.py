"""ONNX graphs: their weights, their size, and what is refused."""

from __future__ import annotations

import importlib
import json
import sys
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.export import certificate, convert
from mclclip.export.targets import Precision
from mclclip.export.targets import onnx as target
from mclclip.models.loading import load_towers
from mclclip.run import artifacts
from tests.matrix import in_soak
from tests.unit.export.models import exported, source_of, the_certificate

needs_onnx = pytest.mark.skipif(
    not all(map(util.find_spec, ("onnx", "onnxruntime", "onnxscript"))),
    reason="onnx, onnxruntime or onnxscript is not installed: pip install 'mclclip[export]'",
)


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize(("precision", "share"), [("fp16", 0.6), ("int8", 0.35)])
def test_rounded_weights_are_smaller_and_the_difference_is_measured(
    tmp_path: Path, precision: Precision, share: float
) -> None:
    source = exported(tmp_path / "own")
    out = convert.run("onnx", source, tmp_path / "out", precision=precision)
    size = sum(path.stat().st_size for path in out.glob("*.onnx"))
    assert size < share * (source / "open_clip_model.safetensors").stat().st_size
    assert json.loads((out / "encoder.json").read_text())["weights"] == precision
    proof = the_certificate(out)
    assert proof["bound"] == certificate.BOUNDS[precision] and precision in proof["runtime"]
    assert proof["logit_scale"] <= 1e-7 and proof["notes"] == []
    largest = 0.25 * proof["bound"]
    assert 1e-6 < proof["image_features"] < largest and 1e-6 < proof["text_features"] < largest
    assert certificate.LEAST_COSINE < proof["cosine"] < 1.0 - 1e-8
    with pytest.raises(ValueError, match=f"--precision {precision} .* --to onnx, .* --to hf"):
        convert.run("hf", source, tmp_path / "hf", precision=precision)


@in_soak
@needs_onnx
def test_int8_says_what_stays_fp32(tmp_path: Path) -> None:
    """A ResNet's convolutions."""
    source = source_of("test_resnet", tmp_path)
    out = convert.run("onnx", source, tmp_path / "out", precision="int8")
    (note,) = the_certificate(out)["notes"]
    assert "image.onnx" in note and note in (out / "README.md").read_text()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An image encoder, and its graph; read only."""
    folder = tmp_path_factory.mktemp("images")
    look = {"size": [32, 32], "resize_mode": "longest", "fill_color": 128}
    clip, source = exported(folder / "clip", preprocess_cfg=look), folder / "images"
    load_towers(clip, text=False).save(source)
    return source, convert.run("onnx", source, folder / "onnx")


@pytest.mark.slow
@needs_onnx
def test_an_image_encoder_has_one_graph(images: tuple[Path, Path]) -> None:
    _, out = images
    described = json.loads((out / "encoder.json").read_text())
    assert not (out / "text.onnx").exists() and "logit_scale" not in described
    assert described["preprocess"]["fill_color"] == 128
    proof = the_certificate(out)
    assert proof["pixels"] is None and proof["runtime"].startswith("onnxruntime ")
    session = importlib.import_module("onnxruntime").InferenceSession(str(out / "image.onnx"))
    (found,) = session.run(None, {"pixels": np.ones((5, 3, 32, 32), np.float32)})
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)


@pytest.mark.slow
@needs_onnx
def test_weights_above_the_limit_lie_in_a_second_file(
    images: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's own weights count, not those of the other graph or of a trunk for each stage."""
    source, whole = images
    size = (whole / "image.onnx").stat().st_size
    assert {path.name for path in whole.glob("*.onnx*")} == {"image.onnx"}
    monkeypatch.setattr(target, "MOST_BYTES", size // 2)
    out = convert.run("onnx", source, tmp_path / "out")
    assert (out / "image.onnx").stat().st_size < 0.5 * size
    assert (out / "image.onnx.data").stat().st_size > 0.5 * size
    assert the_certificate(out) == the_certificate(whole)
    assert {"image.onnx", "image.onnx.data"} <= {*artifacts.read_manifest(out, "converted").records}


@needs_onnx
def test_what_torch_cannot_export_and_a_missing_package_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the cause of torch's error, whose own message is a page of advice."""

    def fail(*args: Any, **options: Any) -> Any:
        try:
            raise KeyError("no function for aten::bessel_j0")
        except KeyError as error:
            raise RuntimeError("Failed.\nNext steps:\n- modify the model") from error

    monkeypatch.setattr(torch.onnx, "export", fail)
    source = source_of("image_encoder", tmp_path)
    with pytest.raises(ValueError, match=r"image\.onnx of this model .*aten::bessel_j0") as error:
        convert.run("onnx", source, tmp_path / "out")
    assert "\n" not in str(error.value)
    for package in ("onnx", "onnxruntime"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            with pytest.raises(ValueError, match=rf"needs the package {package},.*mclclip\[export"):
                convert.run("onnx", source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
