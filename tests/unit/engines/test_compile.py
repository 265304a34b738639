"""What torch compiles: the option, or what the device, the model and its work allow."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from mclclip.engines import EngineConfig, build
from mclclip.models.loading import load_towers
from tests import tiny

LONG = 1e18  # operations
MOBILENET = tiny.MODEL | {
    "vision_cfg": {"timm_model_name": "mobilenetv2_050", "timm_proj": "linear", "image_size": 32}
}
TIMM_VIT = tiny.MODEL | {
    "vision_cfg": {
        "timm_model_name": "vit_tiny_patch16_224",
        "timm_proj": "linear",
        "image_size": 32,
    }
}


@pytest.mark.parametrize("option", ["none", "model", "step"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_asked_for_is_done(option: Any, device: str) -> None:
    how = EngineConfig(compile=option)
    found = build.choose_compile(how, torch.device(device), [], 0.0, compiler=False)
    assert found == option


@pytest.mark.parametrize(
    ("device", "model", "operations", "compiler", "wanted"),
    [
        ("cuda", tiny.MODEL, LONG, True, "model"),
        ("cuda", TIMM_VIT, LONG, True, "model"),
        ("cuda", tiny.MODEL, LONG, False, "none"),
        ("cuda", tiny.MODEL, 1e16, True, "none"),
        ("cuda", tiny.RESNET, LONG, True, "none"),
        ("cuda", MOBILENET, LONG, True, "none"),
        ("cpu", tiny.MODEL, LONG, True, "none"),
    ],
)
def test_auto_is_for_long_trainings_of_transformers_on_a_gpu(
    device: str, model: Any, operations: float, compiler: bool, wanted: str
) -> None:
    blocks = load_towers(model, seed=0).blocks()
    for how in (EngineConfig(), EngineConfig("fsdp"), EngineConfig("deepspeed", 2)):
        on = torch.device(device)
        assert build.choose_compile(how, on, blocks, operations, compiler) == wanted
    zero_3 = EngineConfig("deepspeed", 3)
    assert build.choose_compile(zero_3, torch.device(device), blocks, LONG, True) == "none"


def test_without_a_compiler_a_line_says_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    blocks = load_towers(tiny.MODEL, seed=0).blocks()
    for operations, said in ((1e16, False), (LONG, True)):
        build.choose_compile(EngineConfig(), torch.device("cuda"), blocks, operations, False)
        assert ("compile=auto" in caplog.text) == said


def test_a_model_without_known_blocks_is_not_compiled() -> None:
    assert build.choose_compile(EngineConfig(), torch.device("cuda"), [], LONG, True) == "none"


def test_a_compiler_is_needed_for_auto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton builds its launchers by it: CC, or what is on the path."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        pytest.skip("this Python has no headers")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert not build.can_compile(triton=True)
    for name, enough in (("cc", False), ("gcc", True)):  # which Triton looks for
        compiler = tmp_path / name
        compiler.write_text("#!/bin/sh\n")
        compiler.chmod(0o755)
        assert build.can_compile(triton=True) == enough
    assert not build.can_compile(triton=False)
    for name, enough in (("no-such-compiler", False), ("", False), ("cc", True)):
        monkeypatch.setenv("CC", name)
        assert build.can_compile(triton=True) == enough
