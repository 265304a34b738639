"""A pretrained image tower beside a new text tower, and batch norms that were folded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mclclip import method
from mclclip.config import Config
from mclclip.models.loading import load_towers
from mclclip.models.options import ModelConfig
from mclclip.models.preparing import refuse_folded_norms
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import read_manifest
from mclclip.verbs import cluster, embed, export, index, train
from tests import tiny
from tests.unit.models.conftest import RunsWhenOpened

# isort: split
import timm

NAME = "test_resnet"  # timm's smallest: batch norms, and a classifier `fc`
TOWER: dict[str, Any] = {
    "embed_dim": 12,
    "vision_cfg": {"timm_model_name": NAME, "timm_proj": "linear", "image_size": 32},
    "text_cfg": {"context_length": 20, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


def given_state(fold: bool = False) -> dict[str, Tensor]:
    """What somebody trained: timm's own model with its classifier, with other batch norms than new
    ones, or with folded ones."""
    torch.manual_seed(3)
    trained = timm.create_model(NAME)
    for module in trained.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)
            if not fold:
                assert module.running_mean is not None and module.running_var is not None
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2)
    return {name: tensor.contiguous() for name, tensor in trained.state_dict().items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file as a hub has it: half precision, a classifier, no counters of batches."""
    path = tmp_path_factory.mktemp("given") / "tower.safetensors"
    state = {n: t.half() for n, t in given_state().items() if "num_batches" not in n}
    save_file(state, path)
    return str(path)


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("folded") / "tower.safetensors"
    save_file(given_state(fold=True), path)
    return str(path)


# --- names ---------------------------------------------------------------------------------------


def test_timms_names_fill_the_tower_and_the_rest_is_drawn_by_the_seed(file: str) -> None:
    model, drawn = load_towers(TOWER, image_weights=file, seed=5), load_towers(TOWER, seed=5)
    trained = timm.create_model(NAME)
    trained.load_state_dict({n: t.half().float() for n, t in given_state().items()})
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted = trained.eval().forward_head(trained.forward_features(images), pre_logits=True)
        torch.testing.assert_close(model.encode_pooled(images), wanted, rtol=1e-5, atol=1e-5)
    for name, tensor in drawn.state_dict().items():
        if not name.startswith("clip.visual.trunk."):
            assert torch.equal(model.state_dict()[name], tensor), name


def test_names_of_a_whole_clip_and_of_its_image_tower_do_too(file: str, tmp_path: Path) -> None:
    """The projection is among them, and the text tower is passed over."""
    source = load_towers(TOWER, image_weights=file, seed=5)
    state = {n: t.contiguous() for n, t in source.clip.state_dict().items()}
    image = {n.removeprefix("visual."): t for n, t in state.items() if n.startswith("visual.")}
    for number, tensors in enumerate((state, image)):
        save_file(tensors, tmp_path / f"{number}.safetensors")
        model = load_towers(TOWER, image_weights=str(tmp_path / f"{number}.safetensors"), seed=6)
        for name, tensor in source.visual.state_dict().items():
            assert torch.equal(model.visual.state_dict()[name], tensor), name
        embeddings = (each.clip.token_embedding.weight for each in (model, source))
        assert not torch.equal(*embeddings)
    del state["visual.head.proj.weight"]
    save_file(state, tmp_path / "lacks.safetensors")
    with pytest.raises(ValueError, match="lacks 1 of .* head.proj.weight"):
        load_towers(TOWER, image_weights=str(tmp_path / "lacks.safetensors"))


# --- what does not fit is one line ---------------------------------------------------------------


def _without(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in state.items() if not n.startswith("layer4.")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without, "it lacks .* trunk.layer4.0"),
        (
            lambda s: s | {"extra.weight": torch.ones(2)},
            "1 that the model has not: trunk.extra",
        ),
        (lambda s: s | {"conv1.0.weight": torch.ones(2)}, "1 have another shape .* trunk.conv1.0"),
        (
            lambda s: s | {"conv1.0.weight": s["conv1.0.weight"].to(torch.int8)},
            "1 are no floating-point numbers: trunk.conv1.0",
        ),
        (lambda s: {f"model.{n}": t for n, t in s.items()}, "by the names of timm, torchvision or"),
        (
            lambda s: s | {"conv1.0.weight": s["conv1.0.weight"] * torch.nan},
            "not finite, such as trunk.conv1.0.weight",
        ),
    ],
)
def test_weights_of_another_tower(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tower.safetensors"
    save_file(change(given_state()), path)
    with pytest.raises(ValueError, match=message) as raised:
        load_towers(TOWER, image_weights=str(path))
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_other_files_and_a_second_one_are_refused(file: str, tmp_path: Path) -> None:
    torch.save({"state_dict": RunsWhenOpened(tmp_path / "ran")}, tmp_path / "pickled.safetensors")
    (tmp_path / "long").write_bytes((1 << 30).to_bytes(8, "little") + b"{}")
    for name in ("pickled.safetensors", "long"):
        with pytest.raises(ValueError, match="not a readable safetensors file") as raised:
            load_towers(TOWER, image_weights=str(tmp_path / name))
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(FileNotFoundError, match="image_weights: .*missing"):
        load_towers(TOWER, image_weights=str(tmp_path / "missing"))
    load_towers(TOWER).save(tmp_path / "export")
    with pytest.raises(ValueError, match="image_weights: .* brings its own weights, leave it out"):
        load_towers(tmp_path / "export", image_weights=file)
    with pytest.raises(ValueError, match="both bring the image tower's weights"):
        ModelConfig(pretrained="openai", image_weights=file)


# --- folded batch norms --------------------------------------------------------------------------


def test_folded_norms_are_refused_where_they_would_be_trained(folded: str, file: str) -> None:
    model = load_towers(TOWER, image_weights=folded)
    model.lock("all", image_norm=True)
    with pytest.raises(ValueError, match=r"batch norms that it trains, such as trunk\.") as raised:
        refuse_folded_norms(model.train())
    assert "Set lock.image_norm=false" in str(raised.value) and "\n" not in str(raised.value)
    images = torch.randn(4, 3, 32, 32)
    before = model.eval().encode_image(images).detach()
    model.lock("all", image_norm=False)
    refuse_folded_norms(model.train())
    assert torch.equal(model.encode_image(images).detach(), before)  # they stay in evaluation mode
    model.lock(0, image_norm=True)
    refuse_folded_norms(model.train())
    for other in (load_towers(TOWER), load_towers(TOWER, image_weights=file)):
        other.lock("all", image_norm=True)  # new ones, and those with statistics, are trained
        refuse_folded_norms(other.train())


# --- a run ---------------------------------------------------------------------------------------


def lit(run_dir: Path, data: Path, file: str, *options: str) -> Config:
    """Stage 0 trains the text tower beside a frozen image tower, with one stage after it."""
    words = [
        f"model.name={json.dumps(TOWER)}", f"model.image_weights={file}", "num_stages=1",
        "base.lock.image_blocks=0", "base.lock.image_norm=false", "base.steps=1",
        "train.lock.image_norm=false", "train.steps=1",
    ]  # fmt: skip
    return tiny.make_config(run_dir, data, *words, *options)


def test_stage_0_trains_the_text_tower_alone(data: Path, file: str, tmp_path: Path) -> None:
    run = lit(tmp_path / "run", data, file)
    index.run(run, SINGLE)
    train.run(run, SINGLE, stage=0)
    base = load_towers(export.stage(run, SINGLE, stage=0))
    given = load_towers(TOWER, image_weights=file)
    for name, tensor in given.clip.state_dict().items():
        if name.startswith("visual.trunk."):
            assert torch.equal(base.clip.state_dict()[name], tensor), name
    assert not torch.equal(base.clip.text_projection, given.clip.text_projection)
    # The content counts, not the path, and in later stages the base stands for it.
    made = read_manifest(tmp_path / "run/stage_0/train", "train")
    copied = tmp_path / "copy.safetensors"
    copied.write_bytes(Path(file).read_bytes())
    again = lit(tmp_path / "run", data, str(copied))
    assert train.run(again, SINGLE, stage=0) == tmp_path / "run/stage_0/train"
    assert len(made.inputs["model.image_weights"]) == 64
    embed.run(run, SINGLE, stage=0)
    cluster.run(run, SINGLE, stage=0)
    later = read_manifest(train.run(run, SINGLE, stage=1), "train")
    assert "model.image_weights" not in later.inputs and file not in str((made, later))
    other = given_state()
    other["conv1.0.weight"] += 1
    save_file(other, copied)
    with pytest.raises(ValueError, match="model.image_weights"):
        train.run(again, SINGLE, stage=0)


def test_a_given_tower_is_exported_as_stage_0(data: Path, file: str, tmp_path: Path) -> None:
    directory = export.stage(lit(tmp_path / "run", data, file, "base=null"), SINGLE, stage=0)
    weight = load_towers(directory).visual.trunk.conv1[0].weight
    assert torch.equal(weight, given_state()["conv1.0.weight"].half().float())
    assert len(read_manifest(directory, "export").config["model"]["image_weights"]) == 64
    tower = {"vision_cfg": TOWER["vision_cfg"], "embed_dim": 12}
    alone = lit(tmp_path / "alone", data, file, "base=null", f"model.name={json.dumps(tower)}")
    assert not load_towers(export.stage(alone, SINGLE, stage=0)).reads_texts


def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    data: Path, file: str, folded: str, tmp_path: Path
) -> None:
    """Norms that are folded, in the base and in later stages, and a tower that does not fit."""
    for given, message, *options in (
        (
            folded,
            "lock.image_norm is true",
            "base.lock.image_norm=true",
            "base.lock.image_blocks=all",
        ),
        (
            folded,
            "lock.image_norm is true",
            "train.lock.image_norm=true",
            "train.lock.image_blocks=all",
        ),
        (file, "does not fit the image tower", f"model.name={json.dumps(tiny.RESNET)}"),
    ):
        with pytest.raises(ValueError, match=message):
            method.run(lit(tmp_path / "run", data, given, *options), SINGLE)
        assert not (tmp_path / "run").exists()
