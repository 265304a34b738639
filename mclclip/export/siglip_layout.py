"""open_clip's SigLIP (timm's ViT with an attention pool, and its text tower) as transformers'
`SiglipModel`, from its own tensors; its image processor too."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mclclip import files
from mclclip.export import transformers_layout
from mclclip.export.target import Source
from mclclip.export.transformers_layout import Converted
from mclclip.models import config_check
from mclclip.models.model import Model

_WHAT = "transformers' SiglipModel"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_VISION = {
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm": "post_layernorm",
    "attn_pool.proj": "head.attention.out_proj",
    "attn_pool.norm": "head.layernorm",
    "attn_pool.mlp.fc1": "head.mlp.fc1",
    "attn_pool.mlp.fc2": "head.mlp.fc2",
}
_VISION_BLOCK = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.proj": "self_attn.out_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_TEXT = {
    "token_embedding.weight": "embeddings.token_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final.weight": "final_layer_norm.weight",
    "ln_final.bias": "final_layer_norm.bias",
    "text_projection.weight": "head.weight",
    "text_projection.bias": "head.bias",
}
_TEXT_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def is_siglip(config: Mapping[str, Any]) -> bool:
    """Whether a model's configuration is of SigLIP's kind: a timm ViT with an attention pool."""
    vision = config["model_cfg"]["vision_cfg"]
    return bool(vision.get("timm_model_name")) and vision.get("timm_pool") == "map"


def tensors(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of transformers. Raises ValueError for one without a place."""
    found: dict[str, Tensor] = {}
    for name, tensor in own.items():
        if name in ("logit_scale", "logit_bias"):
            found[name] = tensor.reshape(1)
        elif name.startswith("visual.trunk."):
            found |= _of_vision(name.removeprefix("visual.trunk."), tensor)
        elif name.startswith("visual."):
            raise _no_place(name)
        elif (part := name.removeprefix("text.")) != "attn_mask":  # without custom_text no "text."
            found |= _of_text(part, tensor)
    if "logit_bias" not in found:
        raise ValueError(
            f"the model has no logit bias, as {_WHAT} has: set init_logit_bias: -10 in the model's "
            "configuration, and train it so; --to onnx holds it as it is"
        )
    pool = "vision_model.head.attention.in_proj"
    for kind in ("weight", "bias"):
        parts = [found.pop(f"{pool}.{part}.{kind}", None) for part in ("q", "kv")]
        if any(part is None for part in parts):
            raise ValueError(f"the model has no attention pool, as {_WHAT} has")
        found[f"{pool}_{kind}"] = torch.cat([part for part in parts if part is not None])
    return found


def _of_vision(name: str, tensor: Tensor) -> dict[str, Tensor]:
    tower = "vision_model"
    module, _, kind = name.rpartition(".")
    if name == "pos_embed":
        return {f"{tower}.embeddings.position_embedding.weight": tensor[0].contiguous()}
    if name == "attn_pool.latent":
        return {f"{tower}.head.probe": tensor}
    if module in ("attn_pool.q", "attn_pool.kv"):  # joined by the caller
        return {f"{tower}.head.attention.in_proj.{module.rpartition('.')[2]}.{kind}": tensor}
    if module in _VISION:
        return {f"{tower}.{_VISION[module]}.{kind}": tensor}
    if block := re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name):
        layer = f"{tower}.encoder.layers.{block[1]}"
        if block[2] == "attn.qkv":
            return _thirds(layer, kind, tensor)
        if block[2] in _VISION_BLOCK:
            return {f"{layer}.{_VISION_BLOCK[block[2]]}.{kind}": tensor}
    raise _no_place(f"visual.trunk.{name}")


def _of_text(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name in _TEXT:
        return {f"text_model.{_TEXT[name]}": tensor}
    block = re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+?)[._](weight|bias)", name)
    if block:
        layer = f"text_model.encoder.layers.{block[1]}"
        if block[2] == "attn.in_proj":
            return _thirds(layer, block[3], tensor)
        if block[2] in _TEXT_BLOCK:
            return {f"{layer}.{_TEXT_BLOCK[block[2]]}.{block[3]}": tensor}
    raise _no_place(name)


def _thirds(layer: str, kind: str, tensor: Tensor) -> dict[str, Tensor]:
    chunks = zip("qkv", tensor.chunk(3), strict=True)
    return {f"{layer}.self_attn.{c}_proj.{kind}": chunk.contiguous() for c, chunk in chunks}


def _no_place(name: str) -> ValueError:
    return ValueError(
        f"the model's tensor {name} has no place in {_WHAT}, which holds a plain ViT with an "
        "attention pool and a text tower whose projection has a bias"
    )


def _check_text(text_cfg: Mapping[str, Any]) -> None:
    """Raises ValueError, which says what to set, where the text tower is not built as SigLIP's."""
    wanted = {"no_causal_mask": True, "pool_type": "last", "proj_bias": True}
    other = [name for name, value in wanted.items() if text_cfg.get(name) != value]
    if other and not text_cfg.get("hf_model_name"):
        told = ", ".join(f"{name}: {json.dumps(wanted[name])}" for name in other)
        raise ValueError(
            f"the text tower is not built as SigLIP's, which {_WHAT} holds: set {told} in text_cfg "
            "of the model's configuration, and train it so; --to onnx holds it as it is"
        )


def config(model: Model, found: Mapping[str, Tensor]) -> dict[str, Any]:
    """``config.json`` of transformers, from the towers themselves and their tensors there."""
    trunk: Any = model.visual.trunk
    text: Any = model.text_tower
    patches = found["vision_model.embeddings.patch_embedding.weight"]
    words = found["text_model.embeddings.token_embedding.weight"]
    places = len(found["vision_model.embeddings.position_embedding.weight"])
    block = text.transformer.resblocks[0]

    def tower(part: str, width: int, heads: int, act: nn.Module, norm: Any) -> dict[str, Any]:
        kind, activation = f"siglip_{part}", _activation(act)
        sizes = transformers_layout.tower_sizes(found, part, kind, width, heads, activation)
        return sizes | {"layer_norm_eps": norm.eps}

    vision = trunk.blocks[0]
    return {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "torch_dtype": "float32",
        "vision_config": tower(
            "vision_model", len(patches), vision.attn.num_heads, vision.mlp.act, vision.norm1
        )
        | transformers_layout.picture_sizes(found, places, _WHAT),
        "text_config": tower(
            "text_model", words.shape[1], block.attn.num_heads, block.mlp.gelu, block.ln_1
        )
        | {
            "max_position_embeddings": len(
                found["text_model.embeddings.position_embedding.weight"]
            ),
            "vocab_size": len(words),
            "projection_size": len(found["text_model.head.bias"]),
        },
    }


def _activation(module: nn.Module) -> str:
    approximate = getattr(module, "approximate", None)
    tanh = approximate == "tanh" or type(module).__name__ == "GELUTanh"
    return "gelu_pytorch_tanh" if tanh else "gelu"


def convert(source: Source, model: Model) -> Converted:
    """The SigLIP model in ``source`` in the layout of transformers, without its tokenizer's files.

    Raises ValueError where transformers' ``SiglipModel`` cannot hold the model.
    """
    _check_text(model.config["model_cfg"]["text_cfg"])
    found = {n: t.detach().float() for n, t in tensors(model.exported.state_dict()).items()}
    look = transformers_layout.preprocessor(model.config["preprocess_cfg"])
    look["image_processor_type"] = "SiglipImageProcessor"
    documents = {"config.json": config(model, found), "preprocessor_config.json": look}
    encoded = {name: json.dumps(tree, indent=2).encode() for name, tree in documents.items()}
    return Converted(encoded, found)


def write_tokenizer(source: Source, model: Model, out: Path) -> None:
    """Writes the tokenizer, with what open_clip does to a text before it as its first normalizer.

    SigLIP was trained on texts in lower case without punctuation (`clean: canonicalize`), and the
    files of its tokenizer do not say so. What the format cannot express is the repair of broken
    Unicode and of HTML's entities; the certificate counts texts whose tokens differ. Raises
    FileNotFoundError where the tokenizer cannot be had.
    """
    own = transformers_layout.at_hand(source.directory, model.tokenizer)
    inner: Any = getattr(own, "tokenizer", None)
    if getattr(inner, "backend_tokenizer", None) is None:  # CLIP's, or one without this format
        transformers_layout.write_tokenizer(source.directory, own, out)
        return
    from tokenizers import Tokenizer, normalizers

    transformers = config_check.library()
    whole = Tokenizer.from_str(inner.backend_tokenizer.to_str())
    whole.no_padding()
    whole.no_truncation()
    options = model.config["model_cfg"]["text_cfg"].get("tokenizer_kwargs") or {}
    steps = _cleaning(options.get("clean", "whitespace"))
    whole.normalizer = normalizers.Sequence([*steps, *filter(None, [whole.normalizer])])
    named = {name: getattr(inner, name, None) for name in _SPECIAL}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole,
        padding_side=inner.padding_side,
        model_max_length=own.context_length,
        **{name: str(token) for name, token in named.items() if token is not None},
    ).save_pretrained(str(out))
    path = out / config_check.TOKENIZER_CONFIG
    record = files.read_json(path) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    files.write_json(path, record)  # under the name that version 4 of transformers knows too


def _cleaning(clean: str) -> list[Any]:
    """open_clip's function of this name as normalizers of the package tokenizers."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = [normalizers.NFC()]
    if clean == "canonicalize":
        marks = "".join(f"\\{mark}" for mark in string.punctuation if mark != "_")
        steps += [normalizers.Replace("_", " "), normalizers.Replace(Regex(f"[{marks}]"), "")]
    if clean != "whitespace":
        steps.append(normalizers.Lowercase())
    return [*steps, normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
