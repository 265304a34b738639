"""A joined encoder in the layout of Hugging Face transformers: `config.json` and tensors of the
`StagesModel` of `export/transformers_stages.py`. Layouts of a single model are in
`models/transformers_layout.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mclclip.models.encoder import Encoder
from mclclip.models.transformers_layout import (
    JOINED_MODEL_TYPE,
    OPEN_CLIP,
    Table,
    blocks,
    clip,
    renamed,
    state,
    transposed,
)
from mclclip.options import with_prefix

STAGES = "transformers_stages"
"""Module of a joined encoder: `mclclip.export.transformers_stages`, and a copy beside weights."""

_STAGES = ("ln_1", "ln_2", "in_proj", "out_proj", "c_fc", "c_proj")
_STAGE_TEXT: Table = {
    "token_embedding.weight": "token_embedding.weight",
    "positional_embedding": "positional_embedding",
    "ln_final": "ln_final",
    "attn_mask": None,
    "text_projection": transposed("proj.weight"),
    **blocks("transformer.resblocks", OPEN_CLIP, "blocks", _STAGES),
}
_STAGE_VISION: Table = {
    "visual.class_embedding": "trunk.class_embedding",
    "visual.conv1.weight": "trunk.conv1.weight",
    "visual.positional_embedding": "trunk.positional_embedding",
    "visual.ln_pre": "trunk.ln_pre",
    "visual.ln_post": "ln_post",
    "visual.proj": transposed("proj.weight"),
    **blocks("visual.transformer.resblocks", OPEN_CLIP, "blocks", _STAGES),
}


def stages(encoder: Encoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors of a joined encoder as a `StagesModel`; those of the trunk
    once. Raises ValueError for other towers than open_clip's plain ViT."""
    models = encoder.stages
    whole, _ = clip(models[0])
    vision = {k: v for k, v in whole["vision_config"].items() if k != "model_type"}
    text = {k: v for k, v in whole["text_config"].items() if not k.endswith("token_id")}
    num_towers = 1 if encoder.shared_text else len(models)
    config = {
        "architectures": ["StagesModel"],
        "model_type": JOINED_MODEL_TYPE,
        "auto_map": _auto_map("StagesConfig", "StagesModel")
        | {"AutoModelForZeroShotImageClassification": f"{STAGES}.StagesModel"},
        "torch_dtype": "float32",
        "logit_scale_init_value": math.log(encoder.logit_scale),
        "vision_config": vision
        | {
            "model_type": "mclclip_stages_vision",
            "num_stages": len(models),
            "width": vision["hidden_size"],
            "num_trunk_blocks": encoder.num_trunk_blocks,
            "variant": encoder.variant,
        },
        "text_config": text | {"model_type": "mclclip_stages_text", "num_towers": num_towers},
    }
    tensors = {"logit_scale": torch.tensor(encoder.logit_scale).log()}
    for number, model in enumerate(models):
        own = state(model)
        visual = {name: tensor for name, tensor in own.items() if name.startswith("visual.")}
        for name, tensor in renamed(visual, _STAGE_VISION, "StagesModel", "").items():
            inside = _in_trunk_or_tail(name, encoder.num_trunk_blocks)
            is_shared = inside.startswith("trunk.") and encoder.num_trunk_blocks > 0
            owner = "vision_model" if is_shared else f"vision_model.stages.{number}"
            tensors[f"{owner}.{inside}"] = tensor
        if number < num_towers:
            rest = {n: t for n, t in own.items() if not n.startswith(("visual.", "logit_"))}
            for name, tensor in renamed(rest, _STAGE_TEXT, "StagesModel", "").items():
                tensors[f"text_towers.{number}.{name}"] = tensor
    # Copies: equal tensors of the stages share their memory, which safetensors does not write.
    return config, {name: tensor.clone() for name, tensor in tensors.items()}


def _in_trunk_or_tail(name: str, num_trunk_blocks: int) -> str:
    """A tensor's name in the trunk, or in the tail, whose blocks are counted from its own first.
    Without shared blocks the trunk of each stage has all of them."""
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if block is None:
        return name
    number = int(block[1])
    if num_trunk_blocks == 0 or number < num_trunk_blocks:
        return f"trunk.{name}"
    return f"blocks.{number - num_trunk_blocks}.{block[2]}"


def stages_tower(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The image tower of what `stages` returned, as a `StagesVisionModel`."""
    return config["vision_config"] | {
        "architectures": ["StagesVisionModel"],
        "auto_map": _auto_map("StagesVisionConfig", "StagesVisionModel"),
        "torch_dtype": "float32",
    }, with_prefix(tensors, "vision_model.")


def _auto_map(config: str, model: str) -> dict[str, str]:
    return {"AutoConfig": f"{STAGES}.{config}", "AutoModel": f"{STAGES}.{model}"}
