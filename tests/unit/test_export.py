"""The export verb: checkpoints and given encoders to open_clip directories, once."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip
import pytest
import torch
from torch import nn

from mclclip import config
from mclclip.checkpoint import CheckpointConfig
from mclclip.checkpoint.checkpoints import Checkpoints
from mclclip.checkpoint.step_files import load_model_state
from mclclip.config import Config
from mclclip.engines.engine import Engine
from mclclip.models import weights
from mclclip.models.encoder import Encoder, load_model
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer
from mclclip.ranks.process_group import SINGLE
from mclclip.run import artifacts
from mclclip.run.artifacts import Artifact, RunPaths
from mclclip.util import files
from mclclip.verbs import export
from tests.unit.models.stages import vary

TINY = Path(__file__).parents[1] / "configs" / "tiny_vit.json"


class Trained(nn.Module):
    """What a training saves: the model somewhere inside."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model


def make_config(run_dir: Path, **fields: Any) -> Config:
    tree = {"run_dir": str(run_dir), "num_stages": 2, "model": {"name": str(TINY)}}
    return config.from_tree(tree | fields)


def finish_training(directory: Path, base: Model, seed: int) -> Model:
    """A finished training that moved the last block and the scale."""
    model = base
    model.lock(1, image_norm=True, image_projection=True, text=False, logit_scale=True)
    vary(model, seed)
    engine = Engine(Trained(model), partial(build_optimizer, weight_decay=0.1), SINGLE)
    artifact = Artifact(directory, kind="train", config={"seed": seed}, inputs={}).compare(
        write=True
    )
    identity = {"digest": artifact.identity}
    checkpoints = Checkpoints(directory / "checkpoints", CheckpointConfig(), identity=identity)
    for step in (5, 10):
        checkpoints.save(step, engine)
    artifact.finish({"steps": 10})
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose stages 1 and 2 are trained and exported; tests copy it."""
    options = make_config(tmp_path_factory.mktemp("exported") / "run")
    layout = RunPaths.of(options)
    export.stage(options, SINGLE, stage=0)
    for stage in (1, 2):
        finish_training(layout.train(stage), load_towers(layout.export(0)), seed=stage)
        export.stage(options, SINGLE, stage=stage)
    return layout.run_dir


@pytest.fixture
def options(exported: Path, tmp_path: Path) -> Config:
    return make_config(Path(shutil.copytree(exported, tmp_path / "run")))


def test_given_encoder_is_stage_zero(tmp_path: Path) -> None:
    options = make_config(tmp_path, seed=4)
    directory = export.stage(options, SINGLE, stage=0)
    assert directory == tmp_path / "stage_0" / "export"
    expected = load_towers(TINY, seed=4).state_dict()
    for name, tensor in load_towers(directory).state_dict().items():
        assert weights.same_bits(tensor, expected[name])
    assert artifacts.read_manifest(directory, "export").counts["parameters"] > 0


def test_last_checkpoint_is_exported(options: Config) -> None:
    layout = RunPaths.of(options)
    state = load_model_state(layout.train(2) / "checkpoints", 10)
    plain, _, _ = open_clip.create_model_and_transforms(f"local-dir:{layout.export(2)}")
    for name, tensor in plain.state_dict().items():
        saved = state[f"model.clip.{name}"].reshape(tensor.shape)
        assert torch.equal(tensor, saved)
    assert weights.base_digest(layout.export(2)) == weights.base_digest(layout.export(0))


def test_stage_zero_trained_from_scratch_is_its_own_base(tmp_path: Path) -> None:
    options = make_config(tmp_path, base={"steps": 10})
    layout = RunPaths.of(options)
    with pytest.raises(FileNotFoundError, match="no finished train"):
        export.stage(options, SINGLE, stage=0)
    assert not layout.export(0).exists()
    model = finish_training(layout.train(0), load_towers(TINY), seed=1)
    export.stage(options, SINGLE, stage=0)
    found = load_towers(layout.export(0)).state_dict()
    for name, tensor in model.state_dict().items():
        assert weights.same_bits(tensor, found[name])


def test_changed_config_file_is_another_encoder(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(TINY.read_text())
    options = make_config(tmp_path / "run", model={"name": str(file)})
    export.stage(options, SINGLE, stage=0)
    export.stage(options, SINGLE, stage=0)
    file.write_text(TINY.read_text().replace('"layers": 3', '"layers": 2'))
    with pytest.raises(ValueError, match="name was '.*, now '.*--force"):
        export.stage(options, SINGLE, stage=0)


def test_join_writes_what_is_configured(options: Config) -> None:
    joined = export.join(options, SINGLE)
    assert list(joined) == ["concat_raw", "concat_stage_norm", "soup_uniform"]
    concat = load_model(joined["concat_raw"])
    assert isinstance(concat, Encoder)
    assert (len(concat.stages), concat.num_trunk_blocks, concat.variant) == (3, 2, "raw")
    other = load_model(joined["concat_stage_norm"])
    assert isinstance(other, Encoder)
    assert other.variant == "stage_norm"
    assert load_model(joined["soup_uniform"]).embed_dim == 32
    fewer = make_config(Path(options.run_dir), export={"concat": ["raw"], "soup": False})
    assert list(export.join(fewer, SINGLE)) == ["concat_raw"]


def test_join_takes_at_least_two_encoders_and_waits_for_all(tmp_path: Path) -> None:
    options = make_config(tmp_path)
    export.stage(options, SINGLE, stage=0)
    with pytest.raises(FileNotFoundError, match="no finished export at .*stage_1"):
        export.join(options, SINGLE)
    with pytest.raises(ValueError, match="num_stages=0 .* takes at least two") as error:
        export.join(make_config(tmp_path, num_stages=0), SINGLE)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "exports").exists()


def test_weights_that_are_not_finite_are_refused(
    options: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an earlier version, or a damaged memory, may have saved."""
    layout, load = RunPaths.of(options), load_model_state
    files.move_aside(layout.export(1))

    def spoiled(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        state = load(*args, **kwargs)
        state["model.clip.visual.proj"][3, 1] = float("nan")
        return state

    with monkeypatch.context() as patch:
        patch.setattr("mclclip.checkpoint.step_files.load_model_state", spoiled)
        with pytest.raises(RuntimeError, match=r"not exported: 1 of \d+ tensors .* visual\.proj"):
            export.stage(options, SINGLE, stage=1)
    assert not layout.export(1).exists()
    assert artifacts.is_finished(export.stage(options, SINGLE, stage=1))


def test_what_is_made_of_such_weights_is_refused(options: Config) -> None:
    layout = RunPaths.of(options)
    path = layout.export(2) / weights.WEIGHTS
    tensors = weights.read_tensors(path)
    tensors["logit_scale"].fill_(float("inf"))
    weights.write_tensors(path, tensors)
    fewer = make_config(Path(options.run_dir), export={"concat": ["raw"], "soup": False})
    with pytest.raises(RuntimeError, match=r"1 of \d+ tensors .* such as .*logit_scale"):
        export.join(fewer, SINGLE)
    assert not layout.joined("concat_raw").exists()
