"""A projection of rows takes the place of a text tower: loaded, locked, exported, joined."""

from __future__ import annotations

import copy
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import mclclip
from mclclip import config
from mclclip.config import rules
from mclclip.export import convert
from mclclip.models.loading import has_texts, load_towers
from mclclip.models.memory import load_shapes
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import texts
from tests import tiny

WIDTH = 5


@pytest.fixture
def file(tmp_path: Path) -> str:
    table = {"text": ["a dog", "a cat"], "embedding": [[1.0, 2, 3, 4, 5], [5.0, 4, 3, 2, 1]]}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    return str(tmp_path / "rows.parquet")


@pytest.fixture
def export(tmp_path: Path, file: str) -> Path:
    """An export in a run that has the rows."""
    options = {"run_dir": str(tmp_path / "run"), "model": {"text_rows": [file]}}
    texts.run(config.from_tree(options), SINGLE)
    load_towers(tiny.MODEL, seed=3, text_rows=[file]).save(tmp_path / "run/stage_0/export")
    return tmp_path / "run/stage_0/export"


def test_the_image_tower_is_that_of_the_model_and_the_projection_is_drawn(file: str) -> None:
    model, clip = load_towers(tiny.MODEL, seed=3, text_rows=[file]), load_towers(tiny.MODEL, seed=3)
    again = load_towers(tiny.MODEL, seed=3, text_rows=[file])
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(
        model.encode_image(pixels), clip.encode_image(pixels), rtol=0, atol=0
    )
    weight = model.text_tower.projection.weight
    assert weight.shape == (tiny.MODEL["embed_dim"], WIDTH) and weight.std() > 0.1
    assert torch.equal(weight, again.text_tower.projection.weight)
    rows = torch.randn(4, WIDTH)
    features = model(text=rows)["text_features"]
    expected = torch.stack([weight @ row / (weight @ row).norm() for row in rows])
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(model(text=9 * rows)["text_features"], features)


def test_locks_name_the_projection_and_the_tower_has_no_blocks(file: str) -> None:
    model = load_towers(tiny.MODEL, text_rows=[file])
    assert model.lock(text=True, logit_scale=True) == ["clip.logit_scale",
                                                       "clip.text.projection.weight"]  # fmt: skip
    assert model.lock(text=False) == []
    assert model.lock(text=True, text_blocks=0) == ["clip.text.projection.weight"]
    with pytest.raises(ValueError, match="text_blocks is 2, but the text tower has 0 blocks"):
        model.lock(text=True, text_blocks=2)
    assert model.layers_above("clip.text.projection.weight") == 0
    shapes = load_shapes(tiny.MODEL, text_rows=[file])
    assert shapes.empty_texts(3).shape == (3, WIDTH)
    copy.deepcopy(model)


def test_exports_find_their_rows_and_take_rows_without_them(export: Path, tmp_path: Path) -> None:
    encoder = mclclip.load_model(export)
    features = encoder.encode_text(["a cat", "a dog", "a cat"])
    row = torch.tensor([[5.0, 4, 3, 2, 1]])
    assert has_texts(export)
    assert features[0] == pytest.approx(encoder.encode_text(row)[0].numpy(), abs=1e-6)
    with pytest.raises(ValueError, match="a mouse"):
        encoder.encode_text("a mouse")
    alone = tmp_path / "elsewhere"
    load_towers(export).save(alone)
    copied = mclclip.load_model(alone)
    assert torch.equal(copied.encode_text(row), encoder.encode_text(row))
    with pytest.raises(ValueError, match="text_rows"):
        copied.encode_text("a cat")
    (alone / "text_rows").symlink_to(tmp_path / "run" / "text_rows")
    found = mclclip.load_model(alone).encode_text(["a cat"])
    assert found[0] == pytest.approx(features[0], abs=1e-6)


@pytest.mark.slow
def test_onnx_takes_rows_and_other_libraries_refuse(export: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    convert.run("onnx", export, tmp_path / "onnx")
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "text.onnx"))
    rows = torch.randn(3, WIDTH)
    found = session.run(None, {session.get_inputs()[0].name: rows.numpy()})[0]
    wanted = mclclip.load_model(export).encode_text(rows)
    torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-6, rtol=0)
    for to in ("open_clip", "hf"):
        with pytest.raises(ValueError, match="--to onnx"):
            convert.run(to, export, tmp_path / to)


def test_what_does_not_fit_rows_is_one_line(file: str) -> None:
    for text_cfg in ({"rows": 0}, {"rows": "5"}, {"rows": 5, "layers": 2}):
        with pytest.raises(ValueError, match="text_cfg.*rows"):
            load_towers(tiny.MODEL | {"text_cfg": text_cfg})
    with pytest.raises(ValueError, match="width 5, .* takes 7"):
        load_towers(tiny.MODEL | {"text_cfg": {"rows": 7}}, text_rows=[file])
    tree = {"run_dir": "x", "model": {"text_rows": ["rows.parquet"]}}
    for other in ("text=false", "long_context=true"):
        with pytest.raises(ValueError, match=other.split("=")[0]):
            rules.check(config.from_tree(tree, [f"model.{other}"]))
