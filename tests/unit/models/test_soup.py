"""Soups: averages of weights with equal shares and with others."""

import json
import shutil
from pathlib import Path

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import pytest
import torch
from torch import Tensor

from mclclip.models import weights
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.soup import (
    check_ingredients,
    combine,
    differing_norms,
    load_soup,
    mean_tensor,
    save_uniform_soup,
)
from tests.unit.models.conftest import RunsWhenOpened, tiny_config
from tests.unit.models.stages import save_stages, vary


def test_soup_is_the_mean_and_keeps_frozen_bits(stages: list[Path], tmp_path: Path) -> None:
    save_uniform_soup(stages, tmp_path / "soup")
    found = weights.read_tensors(tmp_path / "soup" / weights.WEIGHTS)
    ingredients = [weights.read_tensors(path / weights.WEIGHTS) for path in stages]
    for name, tensor in found.items():
        own = [each[name] for each in ingredients]
        if weights.same_bits(*own):
            assert weights.same_bits(tensor, own[0])
        else:
            mean = torch.stack([t.double() for t in own]).mean(dim=0)
            torch.testing.assert_close(tensor.double(), mean, atol=1e-7, rtol=1e-7)
    assert weights.base_digest(tmp_path / "soup") == weights.base_digest(stages[0])
    kept = [n for n in found if n.startswith("transformer.") or "resblocks.0" in n]
    assert all(weights.same_bits(found[n], ingredients[2][n]) for n in kept)


def test_models_that_do_not_fit_are_refused(stages: list[Path], vit: Model, tmp_path: Path) -> None:
    vary(vit, 9)
    vit.save(tmp_path / "other")
    load_towers(tiny_config(quick_gelu=True)).save(tmp_path / "quick")
    strange = shutil.copytree(stages[1], tmp_path / "strange")
    held = weights.read_tensors(strange / weights.WEIGHTS)
    weights.write_tensors(strange / weights.WEIGHTS, held | {"strange": torch.ones(1)})
    for name, message in (
        ("other", "descends from another base"),
        ("quick", "has another open_clip_config.json"),
        ("strange", "only .* has strange"),
    ):
        with pytest.raises(ValueError, match=message):
            save_uniform_soup([stages[0], tmp_path / name], tmp_path / "soup")
        assert not (tmp_path / "soup" / weights.WEIGHTS).exists()
    save_uniform_soup([stages[0], tmp_path / "other"], tmp_path / "soup", force=True)
    assert (tmp_path / "soup" / weights.WEIGHTS).exists()


def test_mean_of_a_tensor() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])
    assert torch.equal(mean_tensor("x", [a, b]), torch.tensor([2.0, 0.0]))
    assert mean_tensor("x", [a.bfloat16(), b.bfloat16()]).dtype == torch.bfloat16
    count = torch.tensor(3)
    assert mean_tensor("x", [count, count.clone()]) is count
    assert mean_tensor("bn.num_batches_tracked", [count, torch.tensor(4)]) is count
    large = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    assert mean_tensor("x", large).item() == pytest.approx(1 / 3)  # in fp32 the 1 would be lost
    with pytest.raises(ValueError, match="integer tensor x differs"):
        mean_tensor("x", [count, torch.tensor(4)])
    with pytest.raises(ValueError, match="x has different shapes"):
        mean_tensor("x", [a, b[None]])


# --- batch norms -----------------------------------------------------------------------------


def pictures() -> list[Tensor]:
    return [torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]


def test_statistics_of_batch_norms_are_estimated_on_images(resnet: Model, tmp_path: Path) -> None:
    """Also where trainings were equally long, whose batch counts do not differ."""
    paths = save_stages(resnet, tmp_path, 3, image_blocks=5)
    assert not differing_norms(paths)  # nobody ran them
    base, images = weights.base_digest(paths[0]), pictures()
    resnet.train()
    for path, batch in zip(paths[1:], images, strict=True):
        resnet.clip.visual.bn1.reset_running_stats()
        resnet.encode_image(batch)
        for module in resnet.modules():
            if hasattr(module, "num_batches_tracked"):
                module.num_batches_tracked.fill_(1)
        resnet.save(path, base)
    assert "visual.bn1" in differing_norms(paths[1:]) and not differing_norms(paths[1:2] * 2)
    with pytest.raises(ValueError, match="give training images"):
        load_soup(paths[1:], [1.0, 1.0])
    model, tensors, count = load_soup(paths[1:], [1.0, 1.0], lambda _: images)
    norm = model.exported.visual.bn1
    assert count == 16 and not model.training and not norm.training and norm.momentum == 0.1
    with torch.no_grad():
        outputs = [model.exported.visual.conv1(batch) for batch in images]
    mean = torch.stack([output.mean(dim=(0, 2, 3)) for output in outputs]).mean(dim=0)
    torch.testing.assert_close(norm.running_mean, mean, atol=1e-5, rtol=1e-4)
    assert torch.equal(tensors["visual.bn1.running_mean"], norm.running_mean)
    averaged, _ = combine(paths[1:])
    assert not torch.allclose(averaged["visual.bn1.running_var"], norm.running_var, rtol=1e-3)
    _, alone, count = load_soup(paths[1:], [0.0, 1.0])  # one model keeps its own
    own = weights.read_tensors(paths[2] / weights.WEIGHTS)
    assert count == 0 and all(weights.same_bits(alone[n], own[n]) for n in own)


def test_batch_norms_that_were_frozen_keep_their_statistics(resnet: Model, tmp_path: Path) -> None:
    paths = save_stages(resnet, tmp_path, 2, image_blocks=5)
    norm = resnet.exported.visual.layer4[0].bn1
    for number, path in enumerate(paths):
        norm.running_mean.fill_(number)
        resnet.save(path, weights.base_digest(path))
    assert differing_norms(paths) == {"visual.layer4.0.bn1"}
    before = weights.read_tensors(paths[0] / weights.WEIGHTS)
    model, tensors, _ = load_soup(paths, [1.0] * 2, lambda _: pictures())
    changed = {n for n, t in before.items() if not weights.same_bits(t, tensors[n])}
    parts = ("running_mean", "running_var", "num_batches_tracked")
    assert changed == {f"visual.layer4.0.bn1.{name}" for name in parts}
    held = model.exported.visual.bn1.running_mean
    assert weights.same_bits(held, before["visual.bn1.running_mean"])


# --- shares ----------------------------------------------------------------------------------


def test_shares_weigh_the_models(stages: list[Path]) -> None:
    name = "visual.proj"
    own = [weights.read_tensors(path / weights.WEIGHTS)[name].double() for path in stages]
    found, averaged = combine(stages, [0.75, 0.0, 0.25])
    expected = (0.75 * own[0] + 0.25 * own[2]).float()
    torch.testing.assert_close(found[name], expected, atol=1e-7, rtol=1e-6)
    assert averaged == sum(
        not weights.same_bits(found[n], weights.read_tensors(stages[0] / weights.WEIGHTS)[n])
        for n in found
    )
    same, _ = combine(stages, [3.0, 0.0, 1.0])
    assert all(weights.same_bits(same[n], found[n]) for n in found)


# --- models of others ------------------------------------------------------------------------


def as_of_others(source: Path, target: Path, **preprocessing: object) -> Path:
    """The same model as a stranger's directory: another file name, less said, no base."""
    config = json.loads((source / weights.CONFIG).read_text())
    look = config["preprocess_cfg"]
    said = {"mean": look["mean"], "std": look["std"]} | preprocessing
    target.mkdir()
    written = {"model_cfg": config["model_cfg"], "preprocess_cfg": said, "version": 3}
    (target / weights.CONFIG).write_text(json.dumps(written))
    (target / "model.safetensors").write_bytes((source / weights.WEIGHTS).read_bytes())
    return target


def test_equal_preprocessing_in_other_words_is_equal_and_other_pixels_are_told(
    stages: list[Path], tmp_path: Path
) -> None:
    other = as_of_others(stages[2], tmp_path / "other")
    with pytest.raises(ValueError, match="one base only, so there"):
        check_ingredients([stages[0], other], advice=", so there")
    config = check_ingredients([stages[1], other], any_base=True)
    assert "base_digest" not in config
    model, tensors, count = load_soup([stages[1], other], [1.0, 1.0])
    expected, _ = combine([stages[1], stages[2]])
    assert count == 0 and all(weights.same_bits(tensors[n], expected[n]) for n in expected)
    loaded = dict(model.exported.state_dict())
    assert all(torch.equal(loaded[n].reshape(tensors[n].shape), tensors[n]) for n in tensors)
    blurred = as_of_others(stages[2], tmp_path / "blurred", interpolation="bilinear")
    with pytest.raises(ValueError, match="preprocess_cfg.interpolation is 'bicubic' and not 'bil"):
        check_ingredients([stages[0], blurred], any_base=True)


def test_pickles_are_not_opened(stages: list[Path], tmp_path: Path) -> None:
    other = as_of_others(stages[1], tmp_path / "other")
    (other / "model.safetensors").unlink()
    torch.save({"x": RunsWhenOpened(tmp_path / "ran")}, other / "open_clip_pytorch_model.bin")
    for ingredients in ([stages[0], other], [other, stages[0]]):
        with pytest.raises(ValueError, match="open_clip_pytorch_model.bin, a pickle") as error:
            check_ingredients(ingredients, any_base=True)
        with pytest.raises(ValueError, match="a pickle"):
            combine(ingredients)
        assert "\n" not in str(error.value)
    (other / "open_clip_pytorch_model.bin").rename(other / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors is not a readable safetensors file"):
        combine([stages[0], other])
    assert not (tmp_path / "ran").exists()
