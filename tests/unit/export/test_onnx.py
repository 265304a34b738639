"""ONNX graphs of every kind of model, run by onnxruntime beside our own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mclclip
import mclclip.torchvision_fix  # noqa: F401
from mclclip.export import convert, libraries, to_onnx
from mclclip.export.target import Source
from mclclip.models.encoder import save_concat
from mclclip.models.loading import load_towers
from mclclip.models.stage_weights import StageWeights
from tests.matrix import kept
from tests.unit.export.test_convert import CONFIGS, exported, the_certificate

needs_onnx = pytest.mark.skipif(
    not (libraries.is_installed("onnx") and libraries.is_installed("onnxruntime")),
    reason="onnx and onnxruntime are not installed: pip install 'mclclip[export]'",
)


def stages(folder: Path, *, trunk: int = 2) -> list[Path]:
    """Three stages of a tiny ViT whose first `trunk` blocks of three are equal."""
    paths = [exported(folder / "stage_0")]
    for number in (1, 2):
        model = load_towers(paths[0])
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, parameter in model.exported.visual.named_parameters():
                own = name.startswith(tuple(f"transformer.resblocks.{i}." for i in range(trunk, 3)))
                if own or name.startswith(("ln_post", "proj")):
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        model.save(folder / f"stage_{number}")
        paths.append(folder / f"stage_{number}")
    return paths


def timm_tower(folder: Path, name: str, **vision: Any) -> Path:
    """A tiny tower of timm beside a tiny text tower."""
    described = json.loads((CONFIGS / "tiny_vit.json").read_text())
    described["vision_cfg"] = {"timm_model_name": name, "timm_model_pretrained": False} | vision
    load_towers(described).save(folder)
    return folder


LEARNED = StageWeights((0.5, 0.2, 0.3), 21.0, loss=1.0, equal_loss=1.1, pairs=64)


def concat_of(paths: list[Path], variant: Any, folder: Path) -> Path:
    """A concat of three stages; `weighted` has other weights for each."""
    save_concat(paths, variant, folder, learned=LEARNED if variant == "weighted" else None)
    return folder


def source_of(kind: str, folder: Path) -> Path:
    if kind == "vit":
        return exported(folder / "vit")
    if kind == "resnet":
        load_towers(CONFIGS / "tiny_resnet.json").save(folder / "resnet")
        return folder / "resnet"
    if kind == "image_encoder":
        load_towers(CONFIGS / "tiny_vit.json", text=False).save(folder / "images")
        return folder / "images"
    if kind.startswith("concat"):
        return concat_of(stages(folder), kind.removeprefix("concat_"), folder / "concat")
    return timm_tower(folder / kind, kind, timm_pool="", timm_proj="linear", image_size=160)


KINDS = ["vit", "resnet", "image_encoder", "concat_weighted", "concat_raw", "concat_stage_norm"]
KINDS += ["test_convnext", "test_vit"]  # timm's models for tests


@needs_onnx
@pytest.mark.parametrize("kind", kept(KINDS, 0, 1, 3))
def test_features_are_equal_at_every_batch_size(tmp_path: Path, kind: str) -> None:
    import onnxruntime

    source = source_of(kind, tmp_path)
    out = convert.run("onnx", source, tmp_path / "onnx")
    own = mclclip.load_model(source)
    described = json.loads((out / "encoder.json").read_text())
    shape = described["image"]["shape"][1:]
    for batch in (1, 3):
        pixels = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))
        session = onnxruntime.InferenceSession(str(out / "image.onnx"))
        (found,) = session.run(None, {"pixels": pixels.numpy()})
        np.testing.assert_allclose(found, own.encode_image(pixels).numpy(), atol=1e-5, rtol=0)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    assert described["features"]["width"] == own.embed_dim == found.shape[1]
    if kind == "image_encoder":
        assert not (out / "text.onnx").exists() and "logit_scale" not in described
        return
    tokens = own.tokenizer(["a dog", "two cups", "a"])
    session = onnxruntime.InferenceSession(str(out / "text.onnx"))
    (found,) = session.run(None, {"tokens": tokens.numpy()})
    np.testing.assert_allclose(found, own.encode_text(tokens).numpy(), atol=1e-5, rtol=0)
    proof = the_certificate(out)
    assert max(proof["image_features"], proof["text_features"]) <= 1e-5
    assert proof["pixels"] is None and proof["runtime"].startswith("onnxruntime ")
    if kind.startswith("concat"):  # two shared blocks, and one of each stage
        graph = pytest.importorskip("onnx").load(str(out / "image.onnx")).graph
        assert [node.op_type for node in graph.node].count("Softmax") == 2 + 3
    assert described["logit_scale"] == pytest.approx(own.logit_scale)


@needs_onnx
def test_half_the_bytes_and_the_difference_is_measured(tmp_path: Path) -> None:
    source = exported(tmp_path / "own")
    out = convert.run("onnx", source, tmp_path / "half", precision="fp16")
    size = sum(path.stat().st_size for path in out.glob("*.onnx"))
    assert size < 0.6 * (source / "open_clip_model.safetensors").stat().st_size
    proof = the_certificate(out)
    assert proof["bound"] == 0.02 and proof["logit_scale"] <= 1e-7 and "fp16" in proof["runtime"]
    assert 1e-6 < proof["image_features"] < 5e-3 and 1e-6 < proof["text_features"] < 5e-3


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
        convert.run("onnx", source, out, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    for precision in (None, "fp16"):
        with pytest.raises(ValueError, match="is not converted"):
            convert.run("onnx", source, tmp_path / "other", precision=precision)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["onnx", "own"]


def test_without_the_package_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = libraries.util.find_spec
    monkeypatch.setattr(
        libraries.util, "find_spec", lambda name: None if name == "onnx" else find(name)
    )
    source = exported(tmp_path / "own")
    with pytest.raises(ValueError, match=r"--to onnx needs the package onnx.*mclclip\[export\]"):
        convert.run("onnx", source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_onnx
def test_a_graph_that_one_file_cannot_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_onnx, "_MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="a graph in one file holds at most 1,000"):
        convert.run("onnx", exported(tmp_path / "own"), tmp_path / "out")


def test_only_the_tower_of_a_graph_is_counted(tmp_path: Path) -> None:
    """Both towers are in the model, and the trunk of a concat is in memory once."""
    model = load_towers(exported(tmp_path / "own"))
    clip = model.exported
    images = 4 * sum(p.numel() for p in clip.visual.parameters())
    texts = 4 * sum(p.numel() for p in clip.parameters()) - images
    graphs = to_onnx._ImageGraph([model], None), to_onnx._TextGraph([model])
    assert to_onnx._num_bytes(graphs[0], of_images=True) == images
    assert to_onnx._num_bytes(graphs[1], of_images=False) == texts
    source = Source(concat_of(stages(tmp_path / "stages"), "raw", tmp_path / "concat"))
    joined = to_onnx._ImageGraph(source.stages, None)
    assert images < to_onnx._num_bytes(joined, of_images=True) < 3 * images


@needs_onnx
def test_graphs_that_fit_are_not_refused_for_their_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = exported(tmp_path / "own")
    monkeypatch.setattr(
        to_onnx, "_MOST_BYTES", (source / "open_clip_model.safetensors").stat().st_size - 9000
    )
    assert (convert.run("onnx", source, tmp_path / "out") / "image.onnx").is_file()


def test_fp16_is_of_onnx_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--precision fp16 is of --to onnx, and this is --to hf"):
        convert.run("hf", exported(tmp_path / "own"), tmp_path / "out", precision="fp16")
