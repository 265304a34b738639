"""Loading by name, directory and config; exporting; bits, digests and files of weights."""

import logging
from pathlib import Path
from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from torch import Tensor

from mclclip.models import weights
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.soup import combine
from tests.unit.models.conftest import CONFIGS

TINY = CONFIGS / "tiny_vit.json"


def tensors_of(model: Model) -> dict[str, Tensor]:
    return dict(model.state_dict())


def equal(a: Model, b: Model) -> bool:
    return all(weights.same_bits(t, tensors_of(b)[n]) for n, t in tensors_of(a).items())


def test_random_weights_follow_the_seed_and_leave_the_caller_alone() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), list(root.filters))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = load_towers(TINY, seed=3)
    assert not any(module.training for module in first.modules())
    assert first.clip.logit_scale.shape == (1,)
    assert first.logit_scale().item() == pytest.approx(1 / 0.07)
    assert torch.equal(torch.rand(3), expected)
    assert equal(first, load_towers(TINY, seed=3))
    assert not equal(first, load_towers(TINY, seed=4))
    assert (root.handlers, root.filters) == before


def test_export_loads_in_plain_open_clip(
    vit: Model, images: Tensor, tokens: Tensor, tmp_path: Path
) -> None:
    vit.save(tmp_path / "a")
    plain, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'a'}")
    plain.eval()
    assert plain.logit_scale.shape == ()
    assert plain.logit_scale.item() == vit.clip.logit_scale.item()
    with torch.no_grad():
        assert torch.equal(plain.encode_image(images), vit.encode_image(images))
        assert torch.equal(plain.encode_text(tokens), vit.encode_text(tokens))
    picture = Image.fromarray(np.arange(40 * 50 * 3, dtype=np.uint8).reshape(40, 50, 3))
    assert torch.equal(preprocess(picture), vit.preprocess_val(picture))
    assert equal(vit, load_towers(f"local-dir:{tmp_path / 'a'}"))
    load_towers(tmp_path / "a").save(tmp_path / "b")
    for name in (weights.CONFIG, weights.WEIGHTS):  # equal models give equal files
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_train_transform_takes_open_clips_augmentation() -> None:
    crop = load_towers(TINY).preprocess_train.transforms[0]  # type: ignore[attr-defined]
    assert crop.scale == (0.9, 1.0)
    model = load_towers(TINY, augmentation={"scale": [0.4, 0.6]})
    crop = model.preprocess_train.transforms[0]  # type: ignore[attr-defined]
    assert tuple(crop.scale) == (0.4, 0.6)
    with pytest.raises(ValueError, match="augmentation"):
        load_towers(TINY, augmentation={"zoom": 2})


def test_unavailable_tag_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="neither cached nor reachable") as raised:
        load_towers("ViT-B-32", "laion2b_s34b_b79k")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "pretrained", "message"),
    [
        ("ViT-B-33", None, "nearest: ViT-B-32"),
        ("ViT-B-32", "openai", "use the model 'ViT-B-32-quickgelu'"),
        ("ViT-B-32", "no_such_tag", "neither a file nor a tag"),
        ("coca_ViT-B-32", None, "CoCa"),
        ({"text_cfg": {}}, None, "lacks embed_dim, vision_cfg"),
    ],
)
def test_user_mistakes(name: Any, pretrained: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_towers(name, pretrained)


def test_missing_files(vit: Model, tmp_path: Path) -> None:
    """A path without a model is not taken for a name."""
    for name, message in (
        ("runs/mcl/export", "no model at runs/mcl/export: give an exported directory"),
        (f"local-dir:{tmp_path}/absent", "no model directory"),
        ("hf:", "hf:FOLDER"),
        (f"local-dir:{tmp_path}", "no open_clip_config.json.*an export wrote$"),
        (f"{tmp_path}/absent.json", "no model config"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            load_towers(name)
    vit.save(tmp_path)
    with pytest.raises(ValueError, match="brings its own weights"):
        load_towers(tmp_path, "openai")
    (tmp_path / weights.WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        load_towers(tmp_path)


def test_same_bits() -> None:
    a = torch.tensor([1.0, float("nan"), 0.0])
    assert weights.same_bits(a)
    assert weights.same_bits(a, a.clone(), a.clone())
    assert not weights.same_bits(a, torch.tensor([1.0, float("nan"), -0.0]))
    assert not weights.same_bits(a, a.double())
    assert not weights.same_bits(a, a[None])
    assert weights.same_bits(torch.tensor(3), torch.tensor(3))
    assert weights.same_bits(a.bfloat16(), a.bfloat16())
    assert weights.same_bits(torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T)


def test_digest_sees_names_shapes_and_values_but_not_order() -> None:
    a, b = torch.ones(2, 3), torch.zeros(2)
    digest = weights.digest_tensors({"a": a, "b": b})
    assert weights.digest_tensors({"b": b.clone(), "a": a.clone()}) == digest
    for other in ({"a": a, "c": b}, {"a": a.T, "b": b}, {"a": a, "b": b + 1}, {"a": a}):
        assert weights.digest_tensors(other) != digest


def test_tensors_round_trip_and_leave_no_temporary_file(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2, 3).T, "b": torch.tensor(4), "c": torch.randn(2).bfloat16()}
    weights.write_tensors(tmp_path / "sub" / "w.safetensors", tensors)
    found = weights.read_tensors(tmp_path / "sub" / "w.safetensors")
    assert all(weights.same_bits(tensors[name], found[name]) for name in tensors)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["w.safetensors"]


def long_header(path: Path) -> None:
    """Writes safetensors with a header of many bytes."""
    header = b"{" + b" " * (1 << 24) + b"}"
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_a_header_that_is_too_long_is_not_read(vit: Model, tmp_path: Path) -> None:
    vit.save(tmp_path)
    path = tmp_path / weights.WEIGHTS
    long_header(path)
    for load in (
        lambda: weights.read_tensors(path),
        lambda: load_towers(tmp_path),
        lambda: combine([tmp_path]),
    ):
        with pytest.raises(ValueError, match="its header has .* bytes, wanted at most 16,777,216"):
            load()


def test_unreadable_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="w.safetensors"):
        weights.read_tensors(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        weights.read_tensors(tmp_path / "w.safetensors")


def test_weights_are_as_readable_as_their_folder_s_other_files(tmp_path: Path) -> None:
    weights.write_tensors(tmp_path / "w.safetensors", {"a": torch.ones(1)})
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_tensors_that_cannot_be_copied_are_one_line(vit: Model, tmp_path: Path, kind: str) -> None:
    state = {name: tensor.clone() for name, tensor in vit.exported.state_dict().items()}
    for name in ("logit_scale", "visual.proj"):
        odd = state[name].to_sparse() if kind == "sparse" else state[name].to("meta")
        torch.save(state | {name: odd}, tmp_path / "w.pt")
        with pytest.raises(ValueError, match="w.pt") as raised:
            load_towers(vit.config["model_cfg"], str(tmp_path / "w.pt"))
        assert "\n" not in str(raised.value)
