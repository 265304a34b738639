"""open_clip's models in the layouts of Hugging Face transformers: `config.json` and tensors.

A plain ViT becomes a `CLIPModel`, open_clip's SigLIP (timm's ViT with an attention pool) a
`SiglipModel`, and a joined encoder the `StagesModel` of `models/transformers_stages.py`. Names are
those of transformers' version 4, which version 5 reads too: the image tower's begin with
``vision_model.``, by which other libraries find them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mclclip.models.encoder import Encoder
from mclclip.models.model import Model
from mclclip.options import with_prefix

STAGES = "transformers_stages"
"""Module of a joined encoder: `mclclip.models.transformers_stages`, and a copy beside weights."""

Table = Mapping[str, str | tuple[str, Callable[[Tensor], Tensor]] | None]
"""Name of a tensor, or of the module of a weight and a bias -> its name in another library.

N stands for the number of a block, and `QKV` for three tensors, each a third of the rows. A
function beside the name changes the tensor; None leaves it out."""


def transposed(tensor: Tensor) -> Tensor:
    """[A, B] -> [B, A]: open_clip multiplies by its projections from the right."""
    return tensor.T.contiguous()


# Parts of a transformer's block, in one order, as every library calls them.
OPEN_CLIP = ("ln_1", "ln_2", "attn.in_proj", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
TIMM = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
_HF = tuple("layer_norm1 layer_norm2 self_attn.QKV_proj self_attn.out_proj mlp.fc1 mlp.fc2".split())
_STAGES = ("ln_1", "ln_2", "in_proj", "out_proj", "c_fc", "c_proj")


def blocks(own: str, parts: Sequence[str], to: str, others: Sequence[str]) -> dict[str, str]:
    """The entries of a table for the blocks below `own`, which lie below `to` there."""
    pairs = zip(parts, others, strict=True)
    return {f"{own}.N.{part}": f"{to}.N.{other}" for part, other in pairs}


_TEXT: Table = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "attn_mask": None,  # a constant
    **blocks("transformer.resblocks", OPEN_CLIP, "text_model.encoder.layers", _HF),
}
_CLIP: Table = {
    **_TEXT,
    "text_projection": ("text_projection.weight", transposed),
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.proj": ("visual_projection.weight", transposed),
    "logit_scale": ("logit_scale", lambda tensor: tensor.reshape(())),
    **blocks("visual.transformer.resblocks", OPEN_CLIP, "vision_model.encoder.layers", _HF),
}
_POSITIONS = "text_model.embeddings.position_embedding.weight"
_POOL = "vision_model.head.attention.in_proj"
_SIGLIP: Table = {
    **_TEXT,
    "text_projection.weight": "text_model.head.weight",
    "text_projection.bias": "text_model.head.bias",
    "visual.trunk.patch_embed.proj": "vision_model.embeddings.patch_embedding",
    "visual.trunk.pos_embed": (
        "vision_model.embeddings.position_embedding.weight",
        lambda tensor: tensor[0].contiguous(),
    ),
    "visual.trunk.norm": "vision_model.post_layernorm",
    "visual.trunk.attn_pool.latent": "vision_model.head.probe",
    "visual.trunk.attn_pool.q": f"{_POOL}.q",
    "visual.trunk.attn_pool.kv": f"{_POOL}.kv",
    "visual.trunk.attn_pool.proj": "vision_model.head.attention.out_proj",
    "visual.trunk.attn_pool.norm": "vision_model.head.layernorm",
    "visual.trunk.attn_pool.mlp.fc1": "vision_model.head.mlp.fc1",
    "visual.trunk.attn_pool.mlp.fc2": "vision_model.head.mlp.fc2",
    "logit_scale": ("logit_scale", lambda tensor: tensor.reshape(1)),
    "logit_bias": ("logit_bias", lambda tensor: tensor.reshape(1)),
    **blocks("visual.trunk.blocks", TIMM, "vision_model.encoder.layers", _HF),
}
_STAGE_TEXT: Table = {
    "token_embedding.weight": "token_embedding.weight",
    "positional_embedding": "positional_embedding",
    "ln_final": "ln_final",
    "attn_mask": None,
    "text_projection": ("proj.weight", transposed),
    **blocks("transformer.resblocks", OPEN_CLIP, "blocks", _STAGES),
}
_STAGE_VISION: Table = {
    "visual.class_embedding": "trunk.class_embedding",
    "visual.conv1.weight": "trunk.conv1.weight",
    "visual.positional_embedding": "trunk.positional_embedding",
    "visual.ln_pre": "trunk.ln_pre",
    "visual.ln_post": "ln_post",
    "visual.proj": ("proj.weight", transposed),
    **blocks("visual.transformer.resblocks", OPEN_CLIP, "blocks", _STAGES),
}


def renamed(own: Mapping[str, Tensor], table: Table, what: str, advice: str) -> dict[str, Tensor]:
    """The tensors `own` of a model under the names that `table` gives them.

    Raises ValueError, one line that names the model `what` and ends with `advice`, for a tensor
    that is not in the table, and where there is none for an entry that is of no block.
    """
    tensors: dict[str, Tensor] = {}
    lacking = {key: to for key, to in table.items() if to and ".N." not in key}
    for name, tensor in own.items():
        key = re.sub(r"(?<=\.)\d+(?=\.)", "N", name)
        ending = ""
        if key not in table and (module := re.fullmatch(r"(.+)[._](weight|bias)", key)):
            key, ending = module[1], f".{module[2]}"
        if key not in table:
            raise ValueError(f"the model's tensor {name} has no place in {what}{advice}")
        lacking.pop(key, None)
        entry = table[key]
        if entry is None:
            continue
        to, change = (entry, None) if isinstance(entry, str) else entry
        if number := re.search(r"\.(\d+)\.", name):
            to = to.replace(".N.", f".{number[1]}.")
        if "QKV" in to:
            for letter, third in zip("qkv", tensor.chunk(3), strict=True):
                tensors[to.replace("QKV", letter) + ending] = third.contiguous()
        else:
            tensors[to + ending] = change(tensor) if change else tensor
    if lacking:
        to = min(entry if isinstance(entry, str) else entry[0] for entry in lacking.values())
        raise ValueError(f"the model has nothing for {to} of {what}")
    return tensors


def _state(model: Any) -> dict[str, Tensor]:
    """The tensors of an export of the model, in fp32."""
    return {name: t.detach().float() for name, t in model.exported.state_dict().items()}


# --- one model ---------------------------------------------------------------------------------


def clip(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors of a plain ViT with its text tower as a `CLIPModel`.

    Raises ValueError for a model that it has no place for, as of timm's towers and ResNets.
    """
    own, what = _state(model), "transformers' CLIPModel"
    if "logit_bias" in own:
        raise ValueError(
            "the model has a logit bias, which transformers' CLIPModel has no place for: leave "
            "init_logit_bias out of the model's configuration, and the objective trains a bias of "
            "its own; --to onnx holds the model as it is"
        )
    only = "open_clip's plain ViT alone: no tower of timm, no ResNet, no attention pool"
    tensors = renamed(own, _CLIP, what, f", which holds {only}")
    width = {"projection_dim": model.embed_dim}
    words = len(tensors["text_model.embeddings.token_embedding.weight"])
    patches = len(tensors["vision_model.embeddings.position_embedding.weight"]) - 1
    config = {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "torch_dtype": "float32",
        **width,
        "logit_scale_init_value": float(tensors["logit_scale"]),
        "vision_config": _tower("clip_vision_model", model.visual.transformer.resblocks)
        | width
        | _picture_sizes(tensors, patches, what),
        "text_config": _tower("clip_text_model", model.text_tower.transformer.resblocks)
        | width
        | {
            "max_position_embeddings": len(tensors[_POSITIONS]),
            "vocab_size": words,
            "bos_token_id": words - 2,
            "eos_token_id": words - 1,
            "pad_token_id": words - 1,
        },
    }
    return config, tensors


def is_siglip(model: Model) -> bool:
    """Whether a model is of SigLIP's kind: a timm ViT with an attention pool."""
    vision = model.config["model_cfg"]["vision_cfg"]
    return bool(vision.get("timm_model_name")) and vision.get("timm_pool") == "map"


def siglip(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors of a model of SigLIP's kind as a `SiglipModel`.

    Raises ValueError, which says what to set, for one that is built otherwise.
    """
    what, text_cfg = "transformers' SiglipModel", model.config["model_cfg"]["text_cfg"]
    wanted = {"no_causal_mask": True, "pool_type": "last", "proj_bias": True}
    other = [name for name, value in wanted.items() if text_cfg.get(name) != value]
    if other and not text_cfg.get("hf_model_name"):
        settings = ", ".join(f"{name}: {json.dumps(wanted[name])}" for name in other)
        raise ValueError(
            f"the text tower is not built as SigLIP's, which {what} holds: set {settings} in "
            "text_cfg of the model's configuration, and train it so; --to onnx holds it as it is"
        )
    # Without custom_text the tensors of the text tower lie in the model itself.
    own = {name.removeprefix("text."): tensor for name, tensor in _state(model).items()}
    if "logit_bias" not in own:
        raise ValueError(
            f"the model has no logit bias, as {what} has: set init_logit_bias: -10 in the model's "
            "configuration, and train it so; --to onnx holds it as it is"
        )
    only = "a plain ViT with an attention pool and a text tower whose projection has a bias"
    tensors = renamed(own, _SIGLIP, what, f", which holds {only}")
    pool = {f"{_POOL}.{part}.{kind}" for part in ("q", "kv") for kind in ("weight", "bias")}
    if not pool <= tensors.keys():
        raise ValueError(f"the model has no attention pool with biases, as {what} has")
    for kind in ("weight", "bias"):
        parts = [tensors.pop(f"{_POOL}.{part}.{kind}") for part in ("q", "kv")]
        tensors[f"{_POOL}_{kind}"] = torch.cat(parts)
    patches = len(tensors["vision_model.embeddings.position_embedding.weight"])
    config = {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "torch_dtype": "float32",
        "vision_config": _tower("siglip_vision_model", model.visual.trunk.blocks)
        | _picture_sizes(tensors, patches, what),
        "text_config": _tower("siglip_text_model", model.text_tower.transformer.resblocks)
        | {
            "max_position_embeddings": len(tensors[_POSITIONS]),
            "vocab_size": len(tensors["text_model.embeddings.token_embedding.weight"]),
            "projection_size": len(tensors["text_model.head.bias"]),
        },
    }
    return config, tensors


def _tower(kind: str, blocks: Any) -> dict[str, Any]:
    """Fields of the configuration of a tower with these blocks, which are open_clip's or timm's."""
    block = blocks[0]
    if hasattr(block.mlp, "fc1"):
        hidden, activation, norm = block.mlp.fc1, block.mlp.act, block.norm1
    else:
        hidden, activation, norm = block.mlp.c_fc, block.mlp.gelu, block.ln_1
    name, kind_of_gelu = type(activation).__name__, "gelu"
    if name == "GELUTanh" or getattr(activation, "approximate", None) == "tanh":
        kind_of_gelu = "gelu_pytorch_tanh"
    elif name == "QuickGELU":
        kind_of_gelu = "quick_gelu"
    return {
        "model_type": kind,
        "hidden_size": len(norm.weight),
        "intermediate_size": hidden.out_features,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": block.attn.num_heads,
        "hidden_act": kind_of_gelu,
        "layer_norm_eps": norm.eps,
    }


def _picture_sizes(tensors: Mapping[str, Tensor], num_patches: int, what: str) -> dict[str, int]:
    """Sizes of pictures and patches. Raises ValueError where patches are no square."""
    patch = tensors["vision_model.embeddings.patch_embedding.weight"]
    side = round(num_patches**0.5)
    if side * side != num_patches:
        raise ValueError(f"the model has {num_patches} patches; {what} wants a square")
    return {
        "image_size": side * patch.shape[2],
        "patch_size": patch.shape[2],
        "num_channels": patch.shape[1],
    }


# --- joined stages -----------------------------------------------------------------------------


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
        "model_type": "mclclip_stages",
        "auto_map": _auto_map("StagesConfig", "StagesModel"),
        "torch_dtype": "float32",
        "logit_scale_init_value": math.log(encoder.logit_scale),
        "vision_config": vision
        | {
            "model_type": "mclclip_stages_vision",
            "num_stages": len(models),
            "width": vision["hidden_size"],
            "num_trunk_blocks": encoder.num_trunk_blocks,
            "variant": encoder.variant,
            "stage_weights": [*encoder.stage_weights] or None,
        },
        "text_config": text | {"model_type": "mclclip_stages_text", "num_towers": num_towers},
    }
    # The logit scale is that of the first stage, or the one learned with the stages' weights.
    tensors = {"logit_scale": torch.tensor(encoder.logit_scale).log()}
    for number, model in enumerate(models):
        own = _state(model)
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
