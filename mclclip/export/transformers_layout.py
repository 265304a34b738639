"""A CLIP model in the layout of Hugging Face transformers (``CLIPModel``), from its own tensors.

Files are written without transformers, under the names of its version 4, which version 5 reads too:
the image tower's begin with ``vision_model.``, by which other libraries find them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mclclip import files
from mclclip.models import config_check, tokenizer, weights

WEIGHTS = "model.safetensors"
_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_WHOLE = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "logit_scale": "logit_scale",
}
_TRANSPOSED = {
    "text_projection": "text_projection.weight",
    "visual.proj": "visual_projection.weight",
}
_START, _END = "<|startoftext|>", "<|endoftext|>"


def tensors(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an open_clip ViT and its text tower, under the names of transformers.

    Raises ValueError for one that ``CLIPModel`` has no place for, as of timm's towers and ResNets.
    """
    if "logit_bias" in own:
        raise ValueError(
            "the model has a logit bias, which transformers' CLIPModel has no place for: leave "
            "init_logit_bias out of the model's configuration, and the objective trains a bias of "
            "its own; --to onnx holds the model as it is"
        )
    found: dict[str, Tensor] = {}
    for name, tensor in own.items():
        if name in _WHOLE:
            found[_WHOLE[name]] = tensor.reshape(()) if name == "logit_scale" else tensor
        elif name in _TRANSPOSED:
            found[_TRANSPOSED[name]] = tensor.T.contiguous()
        elif name != "attn_mask":  # a constant of open_clip's text tower
            found |= _of_block(name, tensor)
    if missing := sorted({*_WHOLE.values(), *_TRANSPOSED.values()} - found.keys()):
        raise ValueError(f"the model has nothing for {missing[0]} of transformers' CLIPModel")
    return found


def _of_block(name: str, tensor: Tensor) -> dict[str, Tensor]:
    tower, between, rest = name.partition("transformer.resblocks.")
    towers = {"": "text_model", "visual.": "vision_model"}
    number, _, part = rest.partition(".")
    module, _, kind = part.rpartition(".")
    if between and tower in towers:
        to = f"{towers[tower]}.encoder.layers.{number}"
        if module in _BLOCK:
            return {f"{to}.{_BLOCK[module]}.{kind}": tensor}
        if part in ("attn.in_proj_weight", "attn.in_proj_bias"):
            kind = part.rpartition("_")[2]
            chunks = tensor.chunk(3)
            return {
                f"{to}.self_attn.{letter}_proj.{kind}": chunk.contiguous()
                for letter, chunk in zip("qkv", chunks, strict=True)
            }
    raise ValueError(
        f"the model's tensor {name} has no place in transformers' CLIPModel, which holds "
        "open_clip's plain ViT alone: no tower of timm, no ResNet, no attention pool"
    )


def tower_sizes(
    found: Mapping[str, Tensor], part: str, kind: str, width: int, heads: int, activation: str
) -> dict[str, Any]:
    """Fields of a tower's configuration that CLIP and SigLIP share; ``part`` begins its tensors."""
    layers = {name.split(".")[3] for name in found if name.startswith(f"{part}.encoder.")}
    return {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": len(found[f"{part}.encoder.layers.0.mlp.fc1.weight"]),
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads,
        "hidden_act": activation,
    }


def picture_sizes(found: Mapping[str, Tensor], places: int, what: str) -> dict[str, int]:
    """Sizes of pictures and patches, for an image tower with positions of ``places`` patches.

    Raises ValueError where they are no square, which ``what`` wants.
    """
    patches = found["vision_model.embeddings.patch_embedding.weight"]
    side = round(places**0.5)
    if side * side != places:
        raise ValueError(f"the model has {places} patches; {what} wants a square")
    return {
        "image_size": side * patches.shape[2],
        "patch_size": patches.shape[2],
        "num_channels": patches.shape[1],
    }


def config(model_cfg: Mapping[str, Any], found: Mapping[str, Tensor]) -> dict[str, Any]:
    """``config.json`` of transformers, from a model's configuration and its tensors there."""
    vision, text = model_cfg["vision_cfg"], model_cfg["text_cfg"]
    activation = "quick_gelu" if model_cfg.get("quick_gelu") else "gelu"

    def tower(part: str, own: Mapping[str, Any], width: int, heads: int) -> dict[str, Any]:
        sizes = tower_sizes(found, part, f"clip_{part}", width, heads, activation)
        eps = (own.get("norm_kwargs") or {}).get("eps", 1e-5)
        return sizes | {"layer_norm_eps": eps, "projection_dim": model_cfg["embed_dim"]}

    patches = found["vision_model.embeddings.patch_embedding.weight"]
    words = found["text_model.embeddings.token_embedding.weight"]
    positions = found["text_model.embeddings.position_embedding.weight"]
    places = len(found["vision_model.embeddings.position_embedding.weight"]) - 1
    of_image = tower(
        "vision_model", vision, len(patches), len(patches) // vision.get("head_width", 64)
    )
    of_text = tower("text_model", text, words.shape[1], text.get("heads", 8))
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "torch_dtype": "float32",
        "projection_dim": model_cfg["embed_dim"],
        "logit_scale_init_value": float(found["logit_scale"]),
        "vision_config": of_image | picture_sizes(found, places, "transformers' CLIPModel"),
        "text_config": of_text
        | {
            "max_position_embeddings": len(positions),
            "vocab_size": len(words),
            "bos_token_id": len(words) - 2,
            "eos_token_id": len(words) - 1,
            "pad_token_id": len(words) - 1,
        },
    }


def preprocessor(look: Mapping[str, Any]) -> dict[str, Any]:
    """``preprocessor_config.json``, from open_clip's options of the validation transform."""
    resize, size = look.get("resize_mode") or "shortest", look["size"]
    height, width = size if isinstance(size, list | tuple) else (size, size)
    sides = {"height": height, "width": width}
    if resize == "longest" or (resize == "shortest" and height != width):
        raise ValueError(
            f"images of {height} x {width} pixels resized by their {resize} side have no image "
            "processor in transformers"
        )
    methods = {"bicubic": 3, "bilinear": 2, "nearest": 0}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": height} if resize == "shortest" else sides,
        "resample": methods[look.get("interpolation") or "bicubic"],
        "do_center_crop": resize == "shortest",
        "crop_size": sides,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(look["mean"]),
        "image_std": list(look["std"]),
    }


def tokenizer_files(own: Any, context_length: int, pad: str = _END) -> dict[str, bytes]:
    """CLIP's own tokenizer as the files of transformers' ``CLIPTokenizer``, by name.

    ``pad`` is the token after the end of a text; open_clip's has the number 0, which is ``!``, and
    transformers' CLIP has the end itself. Only a model that reads what follows an end tells them
    apart. Raises ValueError for another one.
    """
    words, merges = getattr(own, "encoder", None), getattr(own, "bpe_ranks", None)
    if not isinstance(words, dict) or not isinstance(merges, dict):
        raise ValueError("the model's tokenizer is not CLIP's own, as transformers' CLIPModel has")
    last = len(words) - 1
    names = {number: word for word, number in words.items()} | {last - 1: _START, last: _END}
    vocabulary = {names[number]: number for number in range(len(names))}
    lines = ["#version: 0.2", *(" ".join(pair) for pair in sorted(merges, key=merges.__getitem__))]
    special = {"bos_token": _START, "eos_token": _END, "unk_token": _END, "pad_token": pad}
    described = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": context_length,
        "do_lower_case": True,
        "errors": "replace",
    }
    return {
        "vocab.json": json.dumps(vocabulary, ensure_ascii=False).encode(),
        "merges.txt": ("\n".join(lines) + "\n").encode(),
        "special_tokens_map.json": json.dumps(special, indent=2).encode(),
        "tokenizer_config.json": json.dumps(described | special, indent=2).encode(),
    }


def write_tokenizer(source: Path, own: Any, out: Path) -> None:
    """Writes the tokenizer ``own`` of the model in ``source``: CLIP's, padded as open_clip pads, or
    another one's files, from ``source`` or the hub's cache. Raises FileNotFoundError for one that
    is in neither."""
    if not hasattr(own, "bpe_ranks"):
        found = at_hand(source, own)
        weights.copy_tokenizer(source, out)
        if not (out / config_check.TOKENIZER_CONFIG).is_file():
            found.save_pretrained(str(out))
        return
    for name, content in tokenizer_files(own, int(own(["a"]).shape[1]), pad="!").items():
        files.write_bytes(out / name, content)


def at_hand(source: Path, own: Any) -> Any:
    """The tokenizer ``own`` itself, which its model fetches when it is used. Raises
    FileNotFoundError, which says what to do, where it is neither in ``source`` nor to be had."""
    try:
        return tokenizer.fetched(own)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{source} has no files of its tokenizer, without which it is not converted: {error}; "
            f"or put {config_check.TOKENIZER_CONFIG} and tokenizer.json into {source}"
        ) from error


@dataclass(frozen=True)
class Converted:
    """A model in the layout of transformers: files by name, and tensors by name."""

    files: dict[str, bytes]
    tensors: dict[str, Tensor]

    def write(self, directory: Path) -> None:
        """Writes all into ``directory``, the weights last."""
        for name, content in self.files.items():
            files.write_bytes(directory / name, content)
        weights.write_tensors(directory / WEIGHTS, self.tensors)


def convert(source: Path, described: Mapping[str, Any], tokenizer: Any) -> Converted:
    """The CLIP model that was exported to ``source``, in the layout of transformers.

    ``described`` is its whole configuration (``model_cfg``, ``preprocess_cfg``), ``tokenizer`` its
    own. Raises ValueError where transformers' ``CLIPModel`` cannot hold the model.
    """
    own = weights.read_tensors(weights.find_weights(source))
    found = {name: tensor.to(torch.float32) for name, tensor in tensors(own).items()}
    whole = config(described["model_cfg"], found)
    context_length = whole["text_config"]["max_position_embeddings"]
    documents = {
        "config.json": whole,
        "preprocessor_config.json": preprocessor(described["preprocess_cfg"]),
    }
    encoded = {name: json.dumps(tree, indent=2).encode() for name, tree in documents.items()}
    return Converted(encoded | tokenizer_files(tokenizer, context_length), found)
