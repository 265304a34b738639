"""An encoder's image tower as a folder that timm loads: `config.json` and `model.safetensors`.

    timm.create_model("local-dir:FOLDER", pretrained=True)

The projection to the width of CLIP's features is the model's classifier, so its output is the raw
feature [B, E]. A tower of timm keeps its name there; open_clip's plain ViT becomes timm's
`vit_base_patch32_clip_224`, or its variant with QuickGELU, of another size.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import mclclip.torchvision_fix  # noqa: F401

# isort: split
import timm

from mclclip import files
from mclclip.export import certificate
from mclclip.export.certificate import Certificate, Probes
from mclclip.export.targets import Source
from mclclip.models import weights
from mclclip.models.model import Model, unit
from mclclip.models.transformers_layout import (
    OPEN_CLIP,
    TIMM,
    Changed,
    Table,
    blocks,
    renamed,
    transposed,
)
from mclclip.models.weights import one_line

CARD = {"library_name": "timm"}
IS_MODEL = True
_VIT: Table = {
    "visual.class_embedding": Changed(
        "cls_token", lambda tensor: tensor.reshape(1, 1, -1), lambda tensor: tensor.reshape(-1)
    ),
    "visual.positional_embedding": Changed(
        "pos_embed", lambda tensor: tensor[None], lambda tensor: tensor[0]
    ),
    "visual.conv1.weight": "patch_embed.proj.weight",
    "visual.ln_pre": "norm_pre",
    "visual.ln_post": "norm",
    "visual.proj": transposed("head.weight"),
    **blocks("visual.transformer.resblocks", OPEN_CLIP, "blocks", TIMM),
}


def write(source: Source, out: Path) -> None:
    """Writes the tower. Raises ValueError for a concat, for open_clip's ResNets, and for towers
    whose projection is not linear."""
    model = source.single("timm", text=False)
    if model.config["model_cfg"]["vision_cfg"].get("timm_model_name"):
        name, arguments, tensors = _of_timm(model)
    elif type(model.visual).__name__ == "VisionTransformer":
        name, arguments, tensors = _of_vit(model)
    else:
        raise ValueError(
            f"the image tower of {source.directory} is a {type(model.visual).__name__}, which timm "
            "has not: convert a plain ViT or a tower of timm"
        )
    settings, size = model.config["preprocess_cfg"], model.image_size
    modes = {"squash": "squash", "longest": "border"}
    config = {
        "architecture": name,
        "num_classes": arguments["num_classes"],
        "num_features": model.embed_dim,
        "model_args": arguments,
        "pretrained_cfg": {  # of the image transform
            "input_size": [model.num_channels, *([size, size] if isinstance(size, int) else size)],
            "mean": list(settings["mean"]),
            "std": list(settings["std"]),
            "interpolation": settings.get("interpolation") or "bicubic",
            "crop_pct": 1.0,
            "crop_mode": modes.get(str(settings.get("resize_mode")), "center"),
            "num_classes": arguments["num_classes"],
        },
    }
    files.write_json(out / "config.json", config)
    plain = {name: tensor.detach().float() for name, tensor in tensors.items()}
    weights.write_tensors(out / "model.safetensors", plain)


def _of_timm(model: Model) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Name, arguments and tensors of a tower of timm, as open_clip wraps it."""
    vision = model.config["model_cfg"]["vision_cfg"]
    trunk, head = model.visual.trunk, dict(model.visual.head.named_children())
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


def _of_vit(model: Model) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """The same of open_clip's plain ViT."""
    own = {f"visual.{name}": tensor for name, tensor in model.visual.state_dict().items()}
    advice = ": convert a plain ViT or a tower of timm"
    tensors = renamed(own, _VIT, "timm's ViT", advice)
    patches, hidden = tensors["patch_embed.proj.weight"], tensors["blocks.0.mlp.fc1.weight"]
    width = patches.shape[0]
    arguments = {
        "img_size": model.image_size,
        "patch_size": patches.shape[2],
        "in_chans": patches.shape[1],
        "embed_dim": width,
        "depth": model.num_blocks,
        "num_heads": width // model.config["model_cfg"]["vision_cfg"].get("head_width", 64),
        "mlp_ratio": len(hidden) / width,
        "num_classes": model.embed_dim,
    }
    tensors["head.bias"] = torch.zeros(model.embed_dim)
    activation = "quickgelu_" if model.config["model_cfg"].get("quick_gelu") else ""
    return f"vit_base_patch32_clip_{activation}224", arguments, tensors


def certify(source: Source, out: Path, probes: Probes) -> list[Certificate]:
    """The tower as timm loads it from the folder."""
    try:
        model: Any = timm.create_model(f"local-dir:{out}", pretrained=True)
    except Exception as error:  # of any kind: the tower does not fit timm's model of its name
        raise ValueError(f"timm cannot load what was written ({one_line(error)})") from error
    model.eval().requires_grad_(False)
    tower = SimpleNamespace(
        encode_image=lambda images: unit(model(images)),
        preprocess_val=source.encoder.preprocess_val,
    )
    return [certificate.compare(source.encoder, tower, f"timm {timm.__version__}", probes)]
