"""Random configurations and export directories: one line says no, or a model is built.

`make test` has a slice of the trials, `make soak` all of them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mclclip.models import weights
from mclclip.models.encoder import load_model, save_concat
from mclclip.models.loading import load_towers
from mclclip.models.weights import CONCAT_WEIGHTS, digest_tensors
from mclclip.run.artifacts import Artifact
from mclclip.util import files
from tests import fuzzing, tiny
from tests.matrix import fuller_in_soak, kept
from tests.unit.models.stages import save_stages

SEED = 21
TINY: dict[str, Any] = {
    "embed_dim": 8,
    "vision_cfg": tiny.MODEL["vision_cfg"] | {"layers": 2, "mlp_ratio": 2.0},
    "text_cfg": tiny.MODEL["text_cfg"] | {"vocab_size": 49408, "width": 8},
    "quick_gelu": False,
}
NAMED: dict[str, Any] = {
    "embed_dim": 8,
    "vision_cfg": {"timm_model_name": "test_vit", "image_size": 160, "timm_pool": "avg"},
    "text_cfg": TINY["text_cfg"] | {"tokenizer_kwargs": {"clean": "lower"}},
}
BACKBONE: dict[str, Any] = {
    "vision_cfg": {
        "backbone": "mclclip:small_conv", "channels": 3, "image_size": 16,
        "options": {"widths": [4, 4], "strides": [1, 2]},
    }
}  # fmt: skip


@fuller_in_soak
@pytest.mark.parametrize("whole", kept([False, True], 0))
@pytest.mark.parametrize("start", [TINY, NAMED, BACKBONE], ids=["own", "timm", "backbone"])
def test_a_configuration_is_built_or_refused_in_one_line(
    start: dict[str, Any], whole: bool
) -> None:
    """`whole`: as in the file of an export, with `model_cfg` and `preprocess_cfg`."""
    rng = random.Random(f"{SEED} {whole} {sorted(start['vision_cfg'])}")
    if whole:
        start = {"model_cfg": start, "preprocess_cfg": {"size": 32, "std": [0.5, 0.5, 0.5]}}
    refused = 0
    for number in range(trials := fuzzing.count(8, 350)):
        config = fuzzing.damaged_json(start, rng)
        what = f"trial {number}: {json.dumps(config)[:500]}"
        built = fuzzing.ends_well(partial(_built, config), what)
        refused += built is None
    assert refused > trials / 4


def _built(config: Any) -> nn.Module:
    if not isinstance(config, dict):
        raise ValueError("read_json gives no mapping")
    return load_towers(config)


# --- directories -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export, an image encoder and a concat, each without a manifest, as strangers send them."""
    root = tmp_path_factory.mktemp("exports")
    load_towers(TINY, seed=1).save(root / "export")
    load_towers(BACKBONE, seed=1, text=False).save(root / "encoder")
    save_concat(save_stages(load_towers(TINY, seed=1), root / "stages", 2), "raw", root / "concat")
    shutil.rmtree(root / "stages")
    return root


def _damage(directory: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(p for p in directory.iterdir() if p.name != "manifest.json"))
    content = path.read_bytes()
    if path.suffix == ".json" and rng.random() < 0.7:
        path.write_text(json.dumps(fuzzing.damaged_json(json.loads(content), rng)))
    elif rng.random() < 0.1:
        path.unlink()
    else:
        path.write_bytes(fuzzing.damaged_bytes(content, rng))
    return path.name


@fuller_in_soak
@pytest.mark.parametrize("kind", ["export", "encoder", "concat"])
def test_a_directory_is_loaded_or_refused_in_one_line(
    exports: Path, tmp_path: Path, kind: str
) -> None:
    directory, kept = tmp_path / "it", exports / kind
    rng, load = random.Random(f"{SEED} {kind}"), _loader(directory)
    for number in range(fuzzing.count(4, 490)):
        shutil.copytree(kept, directory)
        name = _damage(directory, rng)
        fuzzing.ends_well(load, f"trial {number}, {name}")
        shutil.rmtree(directory)


def _loader(directory: Path) -> Callable[[], str]:
    def load() -> str:
        model: Any = load_model(directory)
        return digest_tensors(model.state_dict())

    return load


# --- what the trials found, one by one -----------------------------------------------------------


PREPROCESS: list[tuple[Any, str]] = [
    ({"std": [0, 0, 0]}, "std in preprocess_cfg .* above 0"),
    ({"mean": [0.5]}, "mean in preprocess_cfg .* wanted 3"),
    ({"mode": "L"}, "mode in preprocess_cfg"),
    ({"resize_mode": "odd"}, "resize_mode in preprocess_cfg"),
    ([], "preprocess_cfg .* is list"),
]
JOINED: list[tuple[Any, str]] = [
    ({"stages": "many"}, "names no stages"),
    ({"stages": ["stage_0"]}, "names 1 stages, its weights hold more"),
    ({"variant": ["raw"]}, "variant"),
]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [("export", *each) for each in PREPROCESS] + [("concat", *each) for each in JOINED],
)
def test_odd_fields_are_refused(
    exports: Path, tmp_path: Path, kind: str, change: Any, message: str
) -> None:
    """Of a preprocessing, and of a joined encoder."""
    directory = shutil.copytree(exports / kind, tmp_path / "it")
    path = directory / (weights.CONFIG if kind == "export" else weights.CONCAT)
    record = json.loads(path.read_text())
    part = record["preprocess_cfg"] if kind == "export" else record
    changed = part | change if isinstance(change, dict) else change
    path.write_text(json.dumps(record | {"preprocess_cfg": changed} if part != record else changed))
    with pytest.raises(ValueError, match=message):
        load_model(directory)


@pytest.mark.parametrize(
    ("kind", "file"), [("export", weights.WEIGHTS), ("concat", CONCAT_WEIGHTS)]
)
def test_weights_that_are_not_finite_are_refused(
    exports: Path, tmp_path: Path, kind: str, file: str
) -> None:
    directory = shutil.copytree(exports / kind, tmp_path / "it")
    tensors = weights.read_tensors(directory / file)
    name = next(name for name in tensors if tensors[name].ndim > 1)
    weights.write_tensors(directory / file, tensors | {name: tensors[name] * torch.nan})
    with pytest.raises(ValueError, match="not finite"):
        load_model(directory)


def test_a_recorded_concat_is_loaded_as_it_was_written(exports: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(exports / "concat", tmp_path / "it")
    records = files.records_of(directory, *weights.files_of(directory))
    Artifact(directory, kind="concat", config={}, inputs={}).compare(write=True).finish(
        {}, records=records
    )
    load_model(directory)
    path = directory / weights.CONCAT
    path.write_text(json.dumps(json.loads(path.read_text()) | {"variant": "stage_norm"}))
    with pytest.raises(RuntimeError, match=r"concat.json is damaged.*export --force"):
        load_model(directory)
