"""Loading by name, directory and config; exporting; the errors."""

import logging
import pickle
from pathlib import Path
from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from mclclip.models import weights
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.towers import arrange
from tests.unit.models.conftest import CONFIGS

TINY = CONFIGS / "tiny_vit.json"


def tensors_of(model: Model) -> dict[str, Tensor]:
    return dict(model.state_dict())


def equal(a: Model, b: Model) -> bool:
    return all(weights.same_bits(t, tensors_of(b)[n]) for n, t in tensors_of(a).items())


def test_random_weights_follow_the_seed_and_leave_the_caller_alone() -> None:
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


def test_loading_leaves_the_root_logger_alone() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), list(root.filters))
    load_towers(TINY)
    assert (root.handlers, root.filters) == before


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_export_loads_in_plain_open_clip(
    kind: str, request: pytest.FixtureRequest, images: Tensor, tokens: Tensor, tmp_path: Path
) -> None:
    model: Model = request.getfixturevalue(kind)
    model.save(tmp_path)
    plain, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    plain.eval()
    assert plain.logit_scale.shape == ()
    assert plain.logit_scale.item() == model.clip.logit_scale.item()
    with torch.no_grad():
        same = arrange(images, model.memory_format)
        assert torch.equal(plain.encode_image(same), model.encode_image(images))
        assert torch.equal(plain.encode_text(tokens), model.encode_text(tokens))
    picture = Image.fromarray(np.arange(40 * 50 * 3, dtype=np.uint8).reshape(40, 50, 3))
    assert torch.equal(preprocess(picture), model.preprocess_val(picture))
    assert equal(model, load_towers(f"local-dir:{tmp_path}"))
    assert equal(model, load_towers(tmp_path))


def test_equal_models_give_equal_files(vit: Model, tmp_path: Path) -> None:
    vit.save(tmp_path / "a")
    load_towers(tmp_path / "a").save(tmp_path / "b")
    for name in (weights.CONFIG, weights.WEIGHTS):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_export_records_its_base(vit: Model, tmp_path: Path) -> None:
    vit.save(tmp_path / "base")
    base = weights.base_digest(tmp_path / "base")
    with torch.no_grad():
        vit.clip.visual.proj += 1
    vit.save(tmp_path / "tuned", base)
    assert weights.base_digest(tmp_path / "tuned") == base
    vit.save(tmp_path / "other")
    assert weights.base_digest(tmp_path / "other") != base


def test_train_transform_takes_open_clips_augmentation() -> None:
    crop = load_towers(TINY).preprocess_train.transforms[0]  # type: ignore[attr-defined]
    assert crop.scale == (0.9, 1.0)
    model = load_towers(TINY, augmentation={"scale": [0.4, 0.6]})
    crop = model.preprocess_train.transforms[0]  # type: ignore[attr-defined]
    assert tuple(crop.scale) == (0.4, 0.6)
    with pytest.raises(ValueError, match="augmentation"):
        load_towers(TINY, augmentation={"zoom": 2})


def test_tokenizer_and_transforms_reach_spawned_workers(vit: Model) -> None:
    image = Image.fromarray(np.arange(48 * 40 * 3, dtype=np.uint8).reshape(48, 40, 3))
    parts = (vit.tokenizer, "a dog"), (vit.preprocess_train, image), (vit.preprocess_val, image)
    for part, value in parts:
        results = []
        for own in (part, pickle.loads(pickle.dumps(part))):
            torch.manual_seed(0)
            results.append(own(value))
        assert torch.equal(*results)


def test_open_clip_name_with_a_weights_file(tmp_path: Path) -> None:
    """A name's own architecture is too large here; a JSON config takes the same path."""
    source = load_towers(TINY, seed=5)
    state = {n: t.contiguous() for n, t in source.clip.state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        assert equal(source, load_towers(TINY, str(tmp_path / name)))


def test_weights_of_another_model_are_refused(resnet: Model, tmp_path: Path) -> None:
    resnet.save(tmp_path)
    with pytest.raises(ValueError, match="do not load"):
        load_towers(TINY, str(tmp_path / weights.WEIGHTS))


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


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "runs/mcl/export"])
def test_a_path_without_a_model_is_not_taken_for_a_name(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no model at {name}: give an exported directory"):
        load_towers(name)


def test_missing_files(vit: Model, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no model directory"):
        load_towers(f"local-dir:{tmp_path}/absent")
    with pytest.raises(FileNotFoundError, match="hf:FOLDER"):
        load_towers("hf:")
    with pytest.raises(FileNotFoundError, match="no open_clip_config.json.*an export wrote$"):
        load_towers(f"local-dir:{tmp_path}")
    with pytest.raises(FileNotFoundError, match="no model config"):
        load_towers(f"{tmp_path}/absent.json")
    vit.save(tmp_path)
    with pytest.raises(ValueError, match="brings its own weights"):
        load_towers(tmp_path, "openai")
    (tmp_path / weights.WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        load_towers(tmp_path)
