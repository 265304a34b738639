"""ONNX graphs: their weights, their size, and what is refused."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

import mclclip
from mclclip.export import convert
from mclclip.export.targets import Source
from mclclip.export.targets import onnx as target
from mclclip.util.remake import Remake
from tests.unit.export.models import exported, joined, source_of, the_certificate

needs_onnx = pytest.mark.skipif(
    not (util.find_spec("onnx") and util.find_spec("onnxruntime")),
    reason="onnx and onnxruntime are not installed: pip install 'mclclip[export]'",
)


@needs_onnx
def test_half_the_bytes_and_the_difference_is_measured(tmp_path: Path) -> None:
    source = exported(tmp_path / "own")
    out = convert.run("onnx", source, tmp_path / "half", precision="fp16")
    size = sum(path.stat().st_size for path in out.glob("*.onnx"))
    assert size < 0.6 * (source / "open_clip_model.safetensors").stat().st_size
    proof = the_certificate(out)
    assert proof["bound"] == 0.02 and proof["logit_scale"] <= 1e-7 and "fp16" in proof["runtime"]
    assert 1e-6 < proof["image_features"] < 5e-3 and 1e-6 < proof["text_features"] < 5e-3
    with pytest.raises(ValueError, match="--precision fp16 is of --to onnx, and this is --to hf"):
        convert.run("hf", source, tmp_path / "out", precision="fp16")


@needs_onnx
@pytest.mark.parametrize("kind", ["vit", "resnet", "concat_raw"])
def test_a_graph_names_the_width_of_its_features(tmp_path: Path, kind: str) -> None:
    """Runtimes and vector stores ask the graph for it; the batch alone is of any size."""
    onnxruntime = pytest.importorskip("onnxruntime")
    source = source_of(kind, tmp_path)
    out, width = convert.run("onnx", source, tmp_path / "out"), mclclip.load_model(source).embed_dim
    for name in ("image.onnx", "text.onnx"):
        (output,) = onnxruntime.InferenceSession(str(out / name)).get_outputs()
        assert output.shape == ["batch", width]


@needs_onnx
def test_a_graph_of_other_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left, and what was there before stays."""
    source, out = exported(tmp_path / "own"), tmp_path / "onnx"
    convert.run("onnx", source, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    export = torch.onnx.export

    def wrong(graph: torch.nn.Module, *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            for parameter in graph.parameters():
                parameter += 0.1
            try:
                return export(graph, *args, **options)
            finally:
                for parameter in graph.parameters():
                    parameter -= 0.1

    monkeypatch.setattr(torch.onnx, "export", wrong)
    with pytest.raises(ValueError, match="is not converted: features in onnxruntime .* differ by"):
        convert.run("onnx", source, out, force=Remake.ALL)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(ValueError, match="is not converted"):
        convert.run("onnx", source, tmp_path / "other", precision="fp16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["onnx", "own"]


def test_without_the_package_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    source = exported(tmp_path / "own")
    with pytest.raises(ValueError, match=r"--to onnx needs the package onnx.*mclclip\[export\]"):
        convert.run("onnx", source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_onnx
def test_a_graph_is_bounded_and_not_the_sum_of_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = exported(tmp_path / "own")
    both = (source / "open_clip_model.safetensors").stat().st_size
    monkeypatch.setattr(target, "MOST_BYTES", both - 9000)
    assert (convert.run("onnx", source, tmp_path / "out") / "image.onnx").is_file()
    monkeypatch.setattr(target, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="a graph in one file holds at most 1,000"):
        convert.run("onnx", source, tmp_path / "other")


def test_only_the_tower_of_a_graph_is_counted(tmp_path: Path) -> None:
    """Both towers are in the model, and the trunk of a concat is in memory once."""
    source = Source(exported(tmp_path / "own"))
    clip = source.encoder.stages[0].exported
    images = 4 * sum(p.numel() for p in clip.visual.parameters())
    texts = 4 * sum(p.numel() for p in clip.parameters()) - images
    assert target.num_bytes(target.ImageGraph(source.encoder), of_images=True) == images
    assert target.num_bytes(target.TextGraph(source.encoder), of_images=False) == texts
    of_stages = target.ImageGraph(Source(joined(tmp_path / "stages")).encoder)
    assert images < target.num_bytes(of_stages, of_images=True) < 3 * images
