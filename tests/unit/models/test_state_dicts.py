"""Files of weights that other programs saved: their keys, prefixes, positions and towers."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mclclip
import mclclip.util.torchvision_fix  # noqa: F401
from mclclip.models import transformers_layout, weights
from mclclip.models.loading import load_towers

CONFIG: dict[str, Any] = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "layers": 1, "width": 16, "head_width": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1},
}


def changed(vision: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    text = CONFIG["text_cfg"] | others.pop("text", {})
    return CONFIG | {"vision_cfg": CONFIG["vision_cfg"] | (vision or {}), "text_cfg": text} | others


def state(config: dict[str, Any] = CONFIG) -> dict[str, Tensor]:
    return load_towers(config, seed=3).clip.state_dict()


def saved(path: Path, value: Any) -> str:
    torch.save(value, path)
    return str(path)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"state_dict": {f"module.{n}": t for n, t in s.items()}, "epoch": 3},
        lambda s: {"model": {f"module._orig_mod.{n}": t for n, t in s.items()}},
        lambda s: {"ema": {n: t + 1 for n, t in s.items()}, "model": s},
        lambda s: {"ema_state_dict": s, "step": 3},
        lambda s: {f"module.{n}": t for n, t in s.items()} | {"n_averaged": torch.tensor(3)},
        lambda s: {f"net.clip.{n}": t for n, t in s.items()} | {"head.weight": torch.ones(2)},
        lambda s: {n.replace("visual.", "visual._orig_mod."): t for n, t in s.items()},
        lambda s: {n.replace("resblocks.0", "resblocks.0._fsdp_wrapped_module"): s[n] for n in s},
    ],
    ids=["ddp", "nested", "ema_and_model", "ema_alone", "averaged", "part_of_a_module",
         "compiled_tower", "fsdp"],
)  # fmt: skip
def test_weights_are_found_under_keys_and_prefixes(tmp_path: Path, wrap: Any) -> None:
    """Trained weights before their average, which is read where it is alone."""
    own = state()
    loaded = load_towers(CONFIG, saved(tmp_path / "a.pt", wrap(own))).clip.state_dict()
    assert all(torch.equal(loaded[name], own[name]) for name in own)


def test_the_message_names_what_the_file_has_and_what_the_model_lacks(tmp_path: Path) -> None:
    own = state()
    other = {f"a.{n}" if "visual" in n else f"b.{n}": t for n, t in own.items()}
    with pytest.raises(ValueError, match=r"b\.positional_embedding") as raised:
        load_towers(CONFIG, saved(tmp_path / "a.pt", other))
    assert " positional_embedding" in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="logit_scale"):
        lacking = {n: t for n, t in own.items() if n != "logit_scale"}
        load_towers(CONFIG, saved(tmp_path / "b.pt", lacking))
    with pytest.raises(ValueError, match=r"optimizer.*state_dict\(\)"):
        load_towers(CONFIG, saved(tmp_path / "c.pt", {"optimizer": {}, "step": 3}))
    two = {f"{model}.{n}": t for n, t in own.items() for model in ("student", "teacher")}
    with pytest.raises(ValueError, match=r"student, teacher") as raised:  # none is guessed
        load_towers(CONFIG, saved(tmp_path / "d.pt", {"state_dict": two}))
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"ViT-B-32@.*d\.pt"):  # how an architecture is given
        mclclip.load_model(tmp_path / "d.pt")


def test_a_file_that_is_no_plain_checkpoint_is_named_and_not_run(tmp_path: Path) -> None:
    for content in (b"", b"text\n"):
        (tmp_path / "a.pt").write_bytes(content)
        with pytest.raises(ValueError, match="neither safetensors nor a plain state dict"):
            load_towers(CONFIG, str(tmp_path / "a.pt"))
    checkpoint = {"state_dict": state(), "hyper_parameters": argparse.Namespace(lr=1.0)}
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    for path, message in (
        (saved(tmp_path / "a.pt", checkpoint), r"argparse.Namespace.*state_dict\(\)"),
        (str(tmp_path / "script.pt"), r"TorchScript.*state_dict\(\)"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            load_towers(CONFIG, path)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["MODEL.SAFETENSORS", "blob", "w@2.safetensors"])
def test_safetensors_are_known_by_what_they_hold(tmp_path: Path, name: str) -> None:
    own = state()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights.write_tensors(tmp_path / name, own)
    encoder = mclclip.load_model(f"{tmp_path / 'config.json'}@{tmp_path / name}")
    loaded = encoder.stages[0].clip.state_dict()
    assert all(torch.equal(loaded[name], own[name]) for name in own)


def test_the_weights_of_a_folder_are_open_clips_or_the_only_ones(tmp_path: Path) -> None:
    """Folders of the hub hold transformers' weights too; of two others none is guessed."""
    own = load_towers(CONFIG, seed=3)
    weights.write_config(tmp_path, own.config)
    torch.save(own.clip.state_dict(), tmp_path / "epoch_3.pt")
    found = load_towers(tmp_path).clip.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in state().items())
    torch.save({}, tmp_path / "epoch_10.pt")
    with pytest.raises(ValueError, match="epoch_10.pt"):
        load_towers(tmp_path)
    (tmp_path / "epoch_3.pt").rename(tmp_path / "open_clip_pytorch_model.bin")
    weights.write_tensors(tmp_path / "model.safetensors", {"text_model.x": torch.ones(1)})
    found = load_towers(tmp_path).clip.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in state().items())


def test_positions_of_a_causal_text_tower_alone_are_cut(tmp_path: Path, caplog: Any) -> None:
    """Texts that fit keep their features; interpolated positions would change all of them."""
    path = saved(tmp_path / "a.pt", state())
    with caplog.at_level(logging.INFO, "mclclip"):
        shorter = load_towers(changed(text={"context_length": 9}), path)
    whole = load_towers(CONFIG, path)
    features = [m.encode_text(m.tokenizer(["a dog"])) for m in (whole, shorter)]
    torch.testing.assert_close(features[0], features[1], atol=1e-6, rtol=0)
    assert sum("positions" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(ValueError, match="context_length: 16"):
        load_towers(changed(text={"context_length": 40}), path)
    free = {"no_causal_mask": True}  # whose positions are interpolated
    path = saved(tmp_path / "b.pt", state(changed(text=free)))
    longer = load_towers(changed(text=free | {"context_length": 32}), path)
    assert len(longer.clip.positional_embedding) == 32


@torch.no_grad()
@pytest.mark.parametrize("trained", [{}, {"init_logit_bias": -10.0, "custom_text": True}])
def test_names_of_weights_complete_the_configuration(
    tmp_path: Path, caplog: Any, trained: dict[str, Any]
) -> None:
    """As open_clip_train saves them with --force-custom-text and --siglip."""
    own = load_towers(CONFIG | trained, seed=3)
    path = saved(tmp_path / "a.pt", {"state_dict": own.clip.state_dict()})
    with caplog.at_level(logging.INFO, "mclclip"):
        model = load_towers(CONFIG, path)
    assert trained.items() <= model.config["model_cfg"].items()
    lines = sum("complete" in record.getMessage() for record in caplog.records)
    assert lines == (1 if trained else 0)
    texts = own.tokenizer(["a dog", "two"])
    torch.testing.assert_close(model.encode_text(texts), own.encode_text(texts))
    model.save(tmp_path / "export")
    again = mclclip.load_model(tmp_path / "export").stages[0]
    torch.testing.assert_close(again.encode_text(texts), own.encode_text(texts))


def test_the_activation_recorded_beside_a_file_counts(tmp_path: Path) -> None:
    quick = load_towers(CONFIG | {"quick_gelu": True})
    quick.save(tmp_path / "export")
    file = str(tmp_path / "export" / "open_clip_model.safetensors")
    with pytest.raises(ValueError, match="quick_gelu"):
        load_towers(CONFIG, file)
    load_towers(CONFIG | {"quick_gelu": True}, file)
    (tmp_path / "logs" / "checkpoints").mkdir(parents=True)
    (tmp_path / "logs" / "params.txt").write_text("force_quick_gelu: False\nmodel: ViT-B-32\n")
    file = saved(tmp_path / "logs" / "checkpoints" / "epoch_1.pt", {"state_dict": state()})
    load_towers(CONFIG, file)
    with pytest.raises(ValueError, match="quick_gelu"):
        load_towers(CONFIG | {"quick_gelu": True}, file)
    # Which activation open_clip took depends on its version.
    (tmp_path / "logs" / "params.txt").write_text("model: ViT-B-32\npretrained: openai\n")
    for each in (False, True):
        load_towers(CONFIG | {"quick_gelu": each}, file)
    # The advice about TorchScript makes a file of tensors, which have the activation of OpenAI.
    constants = ("input_resolution", "context_length", "vocab_size")
    file = saved(tmp_path / "weights.pt", state() | {name: torch.tensor(16) for name in constants})
    with pytest.raises(ValueError, match="quick_gelu"):
        load_towers(CONFIG, file)
    load_towers(CONFIG | {"quick_gelu": True}, file)


def test_weights_of_long_clip_bring_their_context(tmp_path: Path) -> None:
    """It reads the first 20 positions of one table and the others of a second."""
    own, config = state(), changed(text={"context_length": 77})
    first, second = torch.randn(2, 248, 8)
    long = {"positional_embedding": first, "positional_embedding_res": second}
    model = load_towers(config, saved(tmp_path / "long.pt", own | long))
    assert torch.equal(model.clip.positional_embedding, torch.cat([first[:20], second[20:]]))
    assert model.tokenizer(["a dog"]).shape == (1, 248)
    assert model.config["model_cfg"]["text_cfg"]["context_length"] == 248
    with pytest.raises(ValueError, match="stretched before"):
        load_towers(config, str(tmp_path / "long.pt"), long_context=True)


def test_names_of_other_libraries_name_the_twin() -> None:
    for name, twin in (
        ("openai/clip-vit-base-patch32", "ViT-B-32-quickgelu@openai"),
        ("google/siglip-base-patch16-224", "ViT-B-16-SigLIP@webli"),
        ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "ViT-H-14@laion2b_s32b_b79k"),
        ("vit-b-32@openai", "ViT-B-32"),
    ):
        with pytest.raises(ValueError, match="open_clip") as raised:
            mclclip.load_model(name)
        assert twin in str(raised.value)


def test_a_model_config_that_is_shipped_is_known_by_its_name(tmp_path: Path) -> None:
    """The small ViT is one that transformers can hold."""
    assert mclclip.load_model("tiny_clip@random").embed_dim == 64
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    assert mclclip.load_model(f"{tmp_path / 'tiny.json'}@random").embed_dim == 8
    model = mclclip.load_model("tiny_vit@random").stages[0]
    assert transformers_layout.clip(model)[0]["model_type"] == "clip"
