"""Tiny models of every kind that exports are made of, as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mclclip.models.encoder import save_concat
from mclclip.models.loading import load_towers
from tests import tiny

CONFIGS = tiny.ROOT / "tests" / "configs"


def the_certificate(out: Path, runtime: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "certificate.json").read_text())
    return dict(content["runtimes"][runtime])


def described() -> dict[str, Any]:
    """The configuration of a tiny ViT."""
    tree: dict[str, Any] = json.loads((CONFIGS / "tiny_vit.json").read_text())
    return tree


def save_moved(config: dict[str, Any], folder: Path, seed: int = 0) -> Path:
    """A model with random weights in every tensor."""
    model = load_towers(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.exported.named_parameters():
            if not name.startswith("logit"):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save(folder)
    return folder


def exported(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A tiny ViT; ``changes`` of vision_cfg, text_cfg, preprocess_cfg and others."""
    config, settings = described(), changes.pop("preprocess_cfg", None)
    for part in ("vision_cfg", "text_cfg"):
        config[part] |= changes.pop(part, {})
    config |= changes
    if settings:
        config = {"model_cfg": config, "preprocess_cfg": settings}
    return save_moved(config, folder, seed)


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


def joined(folder: Path, variant: Any = "raw", *, trunk: int = 2, text: bool = False) -> Path:
    """A concat of three tiny stages; with `text` each has a text tower of its own."""
    paths = stages(folder, trunk=trunk)
    if text:
        model = load_towers(paths[2])
        with torch.no_grad():
            model.exported.ln_final.bias += 0.3
        model.save(paths[2])
    save_concat(paths, variant, folder / "concat")
    return folder / "concat"


def timm_tower(folder: Path, name: str, **vision: Any) -> Path:
    """A tiny tower of timm beside a tiny text tower."""
    config = described()
    config["vision_cfg"] = {"timm_model_name": name, "timm_model_pretrained": False} | vision
    load_towers(config).save(folder)
    return folder


def siglip(folder: Path, text: dict[str, object] | None = None, **changes: object) -> Path:
    """SigLIP's architecture, of which the fixture `narrow_siglip` makes a tiny one, beside a text
    tower of its kind. ``text`` and ``changes`` are changes of text_cfg and of other parts; None:
    without it."""
    config, settings = described(), changes.pop("preprocess_cfg", None)
    config |= {
        "init_logit_bias": -10.0, "custom_text": True,
        "vision_cfg": {
            "timm_model_name": "vit_base_patch16_siglip_224", "timm_model_pretrained": False,
            "timm_pool": "map", "timm_proj": "none", "image_size": 224,
        },
        "text_cfg": config["text_cfg"]
        | {
            "no_causal_mask": True, "proj_bias": True, "pool_type": "last",
            "norm_kwargs": {"eps": 1e-6}, "act_kwargs": {"approximate": "tanh"},
        }
        | (text or {}),
    }  # fmt: skip
    kept = {key: value for key, value in (config | changes).items() if value is not None}
    if settings:
        kept = {"model_cfg": kept, "preprocess_cfg": settings}
    return save_moved(kept, folder)


def source_of(kind: str, folder: Path) -> Path:
    """A model by the name of its kind; `concat_VARIANT` joins stages that share two blocks and the
    text tower, `apart_VARIANT` some that share neither."""
    if kind == "vit":
        return exported(folder / kind)
    if kind == "one_block":
        return save_moved(tiny.ONE_BLOCK, folder / kind)
    if kind == "quick_gelu":
        return exported(folder / kind, quick_gelu=True)
    if kind == "long":
        exported(folder / "shorter", text_cfg={"context_length": 30})
        load_towers(folder / "shorter", long_context=True).save(folder / kind)
        return folder / kind
    if kind.startswith("sized_"):  # at another image size than its weights'
        load_towers(source_of(kind.removeprefix("sized_"), folder), image_size=96).save(
            folder / kind
        )
        return folder / kind
    if kind == "resnet":
        load_towers(CONFIGS / "tiny_resnet.json").save(folder / kind)
        return folder / kind
    if kind == "image_encoder":
        load_towers(CONFIGS / "tiny_vit.json", text=False).save(folder / kind)
        return folder / kind
    if kind.startswith(("concat", "apart")):
        shape, _, variant = kind.partition("_")
        apart = shape == "apart"
        return joined(folder, variant, trunk=0 if apart else 2, text=apart)
    if kind == "siglip":
        return siglip(folder / kind)
    if kind == "siglip_flat":  # the tensors of the text tower lie in the model itself
        return siglip(folder / kind, custom_text=None)
    pool, proj = ("avg", "") if kind == "test_resnet" else ("", "linear")
    return timm_tower(folder / kind, kind, timm_pool=pool, timm_proj=proj, image_size=160)
