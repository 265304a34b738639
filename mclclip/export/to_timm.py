"""An encoder's image tower as a folder that timm loads: `config.json` and `model.safetensors`.

    timm.create_model("local-dir:FOLDER", pretrained=True)

The projection to the width of CLIP's features is the model's classifier, so its output is the raw
feature [B, E]. A tower of timm keeps its name there; open_clip's plain ViT becomes timm's
`vit_base_patch32_clip_224`, or its variant with QuickGELU, of another size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mclclip.torchvision_fix  # noqa: F401

# isort: split
import timm

from mclclip import files
from mclclip.export import certificate
from mclclip.export.certificate import Certificate
from mclclip.export.target import Material, Source
from mclclip.models import weights
from mclclip.models.hub import one_line
from mclclip.models.model import Model, unit
from mclclip.models.towers import VisionTransformerLayout

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_VIT = ("vit_base_patch32_clip_224", "vit_base_patch32_clip_quickgelu_224")
_VIT_NAMES = {
    "class_embedding": "cls_token",
    "positional_embedding": "pos_embed",
    "conv1.weight": "patch_embed.proj.weight",
    "ln_pre": "norm_pre",
    "ln_post": "norm",
}
_VIT_BLOCK = {
    "ln_1": "norm1",
    "ln_2": "norm2",
    "attn.in_proj": "attn.qkv",
    "attn.out_proj": "attn.proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def write(source: Source, out: Path) -> None:
    """Writes the tower. Raises ValueError for a concat, for open_clip's ResNets, and for towers
    whose projection is not linear."""
    if source.is_concat:
        raise ValueError(
            f"{source.directory} is a joined encoder, which timm cannot hold: convert the soup or "
            "a stage"
        )
    model = source.stages[0]
    vision = model.config["model_cfg"]["vision_cfg"]
    if vision.get("timm_model_name"):
        name, arguments, tensors = _of_timm(model.visual, vision)
    elif isinstance(model.layout, VisionTransformerLayout):
        name, arguments, tensors = _of_vit(model, vision)
    else:
        raise ValueError(
            f"the image tower of {source.directory} is a {type(model.visual).__name__}, which timm "
            "has not: convert a plain ViT or a tower of timm"
        )
    files.write_json(
        out / CONFIG,
        {
            "architecture": name,
            "num_classes": arguments["num_classes"],
            "num_features": model.embed_dim,
            "model_args": arguments,
            "pretrained_cfg": _look(model) | {"num_classes": arguments["num_classes"]},
        },
    )
    weights.write_tensors(out / WEIGHTS, {n: t.detach().float() for n, t in tensors.items()})


def _look(model: Model) -> dict[str, Any]:
    """timm's options of the image transform."""
    look, size = model.config["preprocess_cfg"], model.image_size
    modes = {"squash": "squash", "longest": "border"}
    return {
        "input_size": [model.num_channels, *([size, size] if isinstance(size, int) else size)],
        "mean": list(look["mean"]),
        "std": list(look["std"]),
        "interpolation": look.get("interpolation") or "bicubic",
        "crop_pct": 1.0,
        "crop_mode": modes.get(str(look.get("resize_mode")), "center"),
    }


def _of_timm(
    visual: Any, vision: Mapping[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Name, arguments and tensors of a tower of timm, as open_clip wraps it."""
    trunk, head = visual.trunk, dict(visual.head.named_children())
    tensors = trunk.state_dict()
    width = trunk.num_classes
    if linear := head.pop("proj", None):
        width, classifier = linear.out_features, trunk.pretrained_cfg["classifier"]
        bias = torch.zeros(width) if linear.bias is None else linear.bias
        tensors |= {f"{classifier}.weight": linear.weight, f"{classifier}.bias": bias}
    if any(True for module in head.values() for _ in module.parameters()):
        raise ValueError(
            f"the projection of the tower {vision['timm_model_name']} is no linear layer "
            f"({', '.join(head)}), and timm's classifier is one: it cannot hold this tower"
        )
    arguments: dict[str, Any] = {"num_classes": width}
    if vision.get("timm_pool"):
        arguments["global_pool"] = vision["timm_pool"]
    if (size := getattr(getattr(trunk, "patch_embed", None), "img_size", None)) is not None:
        arguments["img_size"] = list(size)
    return str(vision["timm_model_name"]), arguments, tensors


def _of_vit(
    model: Model, vision: Mapping[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """The same of open_clip's plain ViT."""
    own = model.visual.state_dict()
    tensors = dict(_placed(name, tensor) for name, tensor in own.items())
    patches, hidden = tensors["patch_embed.proj.weight"], tensors["blocks.0.mlp.fc1.weight"]
    width = patches.shape[0]
    arguments = {
        "img_size": model.image_size,
        "patch_size": patches.shape[2],
        "in_chans": patches.shape[1],
        "embed_dim": width,
        "depth": model.num_blocks,
        "num_heads": width // vision.get("head_width", 64),
        "mlp_ratio": len(hidden) / width,
        "num_classes": model.embed_dim,
    }
    tensors["head.bias"] = torch.zeros(model.embed_dim)
    return _VIT[bool(model.config["model_cfg"].get("quick_gelu"))], arguments, tensors


def _placed(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A tensor of open_clip's ViT as timm names and shapes it."""
    module, _, kind = name.rpartition(".")
    if name == "proj":
        return "head.weight", tensor.T.contiguous()
    if name == "class_embedding":
        return _VIT_NAMES[name], tensor.reshape(1, 1, -1)
    if name == "positional_embedding":
        return _VIT_NAMES[name], tensor[None]
    if name in _VIT_NAMES:
        return _VIT_NAMES[name], tensor
    if module in _VIT_NAMES:
        return f"{_VIT_NAMES[module]}.{kind}", tensor
    block = re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+?)[._](weight|bias)", name)
    if block and block[2] in _VIT_BLOCK:
        return f"blocks.{block[1]}.{_VIT_BLOCK[block[2]]}.{block[3]}", tensor
    raise ValueError(
        f"the model's tensor visual.{name} has no place in timm's ViT: convert a plain ViT or a "
        "tower of timm"
    )


class _Loaded:
    """A model of timm, whose output is the raw feature."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def encode_image(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> unit [B, E]."""
        return unit(self.model(images))


def certify(source: Source, out: Path, material: Material) -> list[Certificate]:
    """The tower as timm loads it from the folder."""
    try:
        model = timm.create_model(f"local-dir:{out}", pretrained=True)
    except Exception as error:  # of any kind: the tower does not fit timm's model of its name
        raise ValueError(f"timm cannot load what was written ({one_line(error)})") from error
    pixels = {n: source.encoder.preprocess_val(image) for n, image in material.images.items()}
    runtime = f"timm {timm.__version__}"
    return [certificate.compare_images(source.encoder, _Loaded(model), runtime, pixels)]
