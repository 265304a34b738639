"""Tables of tensors' names in open_clip and in transformers, one for CLIP and one for SigLIP.

Exports use them in one direction, and the reader of transformers' folders in the other. A plain ViT
becomes a `CLIPModel`, open_clip's SigLIP (timm's ViT with an attention pool) a `SiglipModel`. Names
are those of transformers' version 4, which version 5 reads and writes too: the image tower's begin
with ``vision_model.``, by which other libraries find them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mclclip.models.model import Model


@dataclass(frozen=True)
class Changed:
    """A tensor that has another form in the other library.

    to     its name in the other library
    there  open_clip's tensor -> the other library's
    back   the other library's tensor -> open_clip's
    """

    to: str
    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


JOINED_MODEL_TYPE = "mclclip_stages"
"""The ``model_type`` in the config.json of an exported joined encoder."""

Table = Mapping[str, str | Changed | None]
"""Maps names of open_clip to names of another library.

A name is that of a tensor, or of a module that has a weight and a bias. N stands for the number of
a block, and `QKV` for q, k and v, three tensors that each have a third of the rows. None leaves
out a constant.
"""


def transpose(to: str) -> Changed:
    """Returns the entry of a projection [A, B], which the other library stores as [B, A]."""
    return Changed(to, _turn, _turn)


def _turn(tensor: Tensor) -> Tensor:
    return tensor.T.contiguous()


def _reshape(to: str, *shape: int) -> Changed:
    """Returns the entry of a single number that has this shape in the other library."""
    return Changed(to, lambda tensor: tensor.reshape(shape), lambda tensor: tensor)


# The parts of a transformer's block, in one order, by the names of each library.
OPEN_CLIP = ("ln_1", "ln_2", "attn.in_proj", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
TIMM = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
_HF = tuple("layer_norm1 layer_norm2 self_attn.QKV_proj self_attn.out_proj mlp.fc1 mlp.fc2".split())


def blocks(ours: str, parts: Sequence[str], to: str, others: Sequence[str]) -> dict[str, str]:
    """Returns a table's entries for blocks that lie below `ours` here and below `to` there.

    `parts` are the names of a block's parts here, and `others` those there, in the same order.
    """
    pairs = zip(parts, others, strict=True)
    return {f"{ours}.N.{part}": f"{to}.N.{other}" for part, other in pairs}


_TEXT: Table = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "attn_mask": None,  # a constant
    **blocks("transformer.resblocks", OPEN_CLIP, "text_model.encoder.layers", _HF),
}
CLIP: Table = {
    **_TEXT,
    "text_projection": transpose("text_projection.weight"),
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.proj": transpose("visual_projection.weight"),
    "logit_scale": _reshape("logit_scale"),
    **blocks("visual.transformer.resblocks", OPEN_CLIP, "vision_model.encoder.layers", _HF),
}
_POSITIONS = "text_model.embeddings.position_embedding.weight"
_POOL = "vision_model.head.attention.in_proj"
SIGLIP: Table = {
    **_TEXT,
    "text_projection.weight": "text_model.head.weight",
    "text_projection.bias": "text_model.head.bias",
    "visual.trunk.patch_embed.proj": "vision_model.embeddings.patch_embedding",
    "visual.trunk.pos_embed": Changed(
        "vision_model.embeddings.position_embedding.weight",
        lambda tensor: tensor[0].contiguous(),
        lambda tensor: tensor[None],
    ),
    "visual.trunk.norm": "vision_model.post_layernorm",
    "visual.trunk.attn_pool.latent": "vision_model.head.probe",
    "visual.trunk.attn_pool.q": f"{_POOL}.q",
    "visual.trunk.attn_pool.kv": f"{_POOL}.kv",
    "visual.trunk.attn_pool.proj": "vision_model.head.attention.out_proj",
    "visual.trunk.attn_pool.norm": "vision_model.head.layernorm",
    "visual.trunk.attn_pool.mlp.fc1": "vision_model.head.mlp.fc1",
    "visual.trunk.attn_pool.mlp.fc2": "vision_model.head.mlp.fc2",
    "logit_scale": _reshape("logit_scale", 1),
    "logit_bias": _reshape("logit_bias", 1),
    **blocks("visual.trunk.blocks", TIMM, "vision_model.encoder.layers", _HF),
}


def rename_tensors(
    ours: Mapping[str, Tensor], table: Table, what: str, advice: str
) -> dict[str, Tensor]:
    """Returns the tensors `ours` of a model under the names that `table` gives them.

    Raises ValueError for a tensor that is not in the table, and if the model lacks a tensor of the
    table outside of blocks. The message names the other model `what`, for example "transformers'
    CLIPModel", and ends with `advice`.
    """
    tensors: dict[str, Tensor] = {}
    lacking = {key: entry for key, entry in table.items() if entry and ".N." not in key}
    for name, tensor in ours.items():
        try:
            key, entry, places = _find_places(name, table)
        except KeyError:
            raise ValueError(f"the model's tensor {name} has no place in {what}{advice}") from None
        lacking.pop(key, None)
        changed = entry.there(tensor) if isinstance(entry, Changed) else tensor
        parts = changed.chunk(3) if len(places) == 3 else (changed,) * len(places)
        tensors |= {
            place: part.contiguous() if len(places) == 3 else part
            for place, part in zip(places, parts, strict=True)
        }
    if lacking:
        to = min(e.to if isinstance(e, Changed) else e for e in lacking.values())
        raise ValueError(f"the model has nothing for {to} of {what}")
    return tensors


def rename_back(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], table: Table
) -> dict[str, Tensor]:
    """Reverses `rename_tensors`: returns the other library's tensors under a model's names.

    `ours` has the model's tensors: only their names are read, and the constants, which the other
    library lacks. Raises ValueError if `theirs` lack a tensor or have more than the model.
    """
    tensors, rest = {}, {name for name in theirs if not name.endswith("position_ids")}
    for name, tensor in ours.items():
        _, entry, places = _find_places(name, table)
        if missing := [place for place in places if place not in theirs]:
            raise ValueError(f"the weights have no {missing[0]}, which the configuration describes")
        rest -= {*places}
        if not places:
            tensors[name] = tensor
            continue
        parts = [theirs[place] for place in places]
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        tensors[name] = entry.back(joined) if isinstance(entry, Changed) else joined
    if rest:
        raise ValueError(
            f"the weights have {min(rest)} and {len(rest) - 1} others, which the configuration "
            "does not describe"
        )
    return tensors


def _find_places(name: str, table: Table) -> tuple[str, str | Changed | None, list[str]]:
    """Finds a model's tensor in a table; returns the table's key and entry, and the names there.

    These are none for a constant, and three for queries, keys and values in one tensor. Raises
    KeyError for a tensor that is not in the table.
    """
    key, ending = re.sub(r"(?<=\.)\d+(?=\.)", "N", name), ""
    if key not in table and (module := re.fullmatch(r"(.+)[._](weight|bias)", key)):
        key, ending = module[1], f".{module[2]}"
    entry = table[key]
    if entry is None:
        return key, entry, []
    to = entry.to if isinstance(entry, Changed) else entry
    if number := re.search(r"\.(\d+)\.", name):
        to = to.replace(".N.", f".{number[1]}.")
    letters = "qkv" if "QKV" in to else "_"
    return key, entry, [to.replace("QKV", letter) + ending for letter in letters]


def state(model: Any) -> dict[str, Tensor]:
    """Returns the tensors that an export of the model holds, in fp32."""
    return {name: t.detach().float() for name, t in model.exported.state_dict().items()}


# --- one model ---------------------------------------------------------------------------------


def clip(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Converts a plain ViT with its text tower to a `CLIPModel`: its `config.json`, its tensors.

    Raises ValueError for a model that `CLIPModel` cannot hold, such as timm's towers and ResNets.
    """
    tensors_here, what = state(model), "transformers' CLIPModel"
    if "logit_bias" in tensors_here:
        raise ValueError(
            "the model has a logit bias, which transformers' CLIPModel has no place for: leave "
            "init_logit_bias out of the model's configuration, and the objective trains a bias of "
            "its own; --to onnx holds the model as it is"
        )
    only = "open_clip's plain ViT alone: no tower of timm, no ResNet, no attention pool"
    tensors = rename_tensors(
        tensors_here, CLIP, what, f", which holds {only}: --to onnx holds any model"
    )
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
    """Returns True if a model is built like SigLIP: its image tower is timm's, with an attention
    pool."""
    vision = model.config["model_cfg"]["vision_cfg"]
    return bool(vision.get("timm_model_name")) and vision.get("timm_pool") == "map"


def siglip(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Converts a model built like SigLIP to a `SiglipModel`: its `config.json`, its tensors.

    Raises ValueError, which says what to set, for a model that differs in some part.
    """
    what, text_cfg = "transformers' SiglipModel", model.config["model_cfg"]["text_cfg"]
    expected = {"no_causal_mask": True, "pool_type": "last", "proj_bias": True}
    other = [name for name, value in expected.items() if text_cfg.get(name) != value]
    if other and not text_cfg.get("hf_model_name"):
        settings = ", ".join(f"{name}: {json.dumps(expected[name])}" for name in other)
        raise ValueError(
            f"the text tower is not built as SigLIP's, which {what} holds: set {settings} in "
            "text_cfg of the model's configuration, and train it so; --to onnx holds it as it is"
        )
    # Without custom_text, names of the text tower have no prefix.
    tensors_here = {name.removeprefix("text."): tensor for name, tensor in state(model).items()}
    if "logit_bias" not in tensors_here:
        raise ValueError(
            f"the model has no logit bias, as {what} has: set init_logit_bias: -10 in the model's "
            "configuration, and train it so; --to onnx holds it as it is"
        )
    only = "a plain ViT with an attention pool and a text tower whose projection has a bias"
    tensors = rename_tensors(tensors_here, SIGLIP, what, f", which holds {only}")
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


def describe_siglip_tower(trunk: Any) -> dict[str, Any]:
    """Returns the fields of a `SiglipVisionConfig` for timm's tower, which may be on "meta"."""
    patch = trunk.patch_embed
    sizes = {"image_size": patch.img_size[0], "patch_size": patch.patch_size[0]}
    return _tower("siglip_vision_model", trunk.blocks) | sizes


def split_pool(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Splits the attention pool in a `SiglipModel`'s tensors into the parts that `SIGLIP` names."""
    parts = dict(tensors)
    for kind in ("weight", "bias"):
        if (joined := parts.pop(f"{_POOL}_{kind}", None)) is not None and len(joined) % 3 == 0:
            query, key, value = joined.chunk(3)
            parts[f"{_POOL}.q.{kind}"], parts[f"{_POOL}.kv.{kind}"] = query, torch.cat([key, value])
    return parts


def _tower(kind: str, blocks: Any) -> dict[str, Any]:
    """Returns the configuration of a tower with these blocks, which are open_clip's or timm's."""
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
    """Returns sizes of pictures and patches. Raises ValueError if the patches form no square."""
    patch = tensors["vision_model.embeddings.patch_embedding.weight"]
    side = round(num_patches**0.5)
    if side * side != num_patches:
        raise ValueError(f"the model has {num_patches} patches; {what} wants a square")
    return {
        "image_size": side * patch.shape[2],
        "patch_size": patch.shape[2],
        "num_channels": patch.shape[1],
    }
