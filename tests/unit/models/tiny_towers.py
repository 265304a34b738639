"""Small models with the kinds of image towers that open_clip has, and takes from timm."""

from __future__ import annotations

import copy
import functools
from functools import partial
from typing import Any

import torch
from torch import nn

from mclclip.models.loading import load_towers
from mclclip.models.model import Model

# isort: split
from timm.models import build_model_with_cfg, register_model
from timm.models.eva import Eva
from timm.models.fastvit import FastVit, RepConditionalPosEnc
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import HybridEmbed
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from timm.models.vitamin import GeGluMlp, MbConvStages, VitCfg, VitConvCfg

_PATCHES = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}


def _build(kind: type, name: str, **options: Any) -> Any:
    options.pop("pretrained", None)
    return build_model_with_cfg(kind, name, False, **options)


@register_model
def tiny_eva(**options: Any) -> Any:
    """Like EVA02-CLIP: rotary positions, gated MLPs, separate query, key and value."""
    gated = {"qkv_fused": False, "mlp_ratio": 2, "swiglu_mlp": True, "scale_mlp": True}
    rotary = {"use_rot_pos_emb": True, "ref_feat_shape": (4, 4), "scale_attn_inner": True}
    return _build(Eva, "tiny_eva", **{**_PATCHES, **gated, **rotary, **options})


@register_model
def tiny_pe(**options: Any) -> Any:
    """Like PE-Core: rotary positions and pooling by attention."""
    pool = {"attn_pool_num_heads": 2, "attn_pool_mlp_ratio": 2.0, "attn_type": "rope"}
    rotary = {"use_rot_pos_emb": True, "ref_feat_shape": (4, 4), "use_pre_transformer_norm": True}
    return _build(Eva, "tiny_pe", **{**_PATCHES, **pool, **rotary, "global_pool": "map", **options})


@register_model
def tiny_siglip(**options: Any) -> Any:
    """Like SigLIP: no class token, pooling by attention."""
    own = {"class_token": False, "global_pool": "map"}
    return _build(VisionTransformer, "tiny_siglip", **{**_PATCHES, **own, **options})


@register_model
def tiny_relpos(**options: Any) -> Any:
    """Relative positions, shared by the blocks."""
    own = {"class_token": True, "shared_rel_pos": True, "global_pool": "avg"}
    return _build(VisionTransformerRelPos, "tiny_relpos", **{**_PATCHES, **own, **options})


@register_model
def tiny_vitamin(**options: Any) -> Any:
    """Like ViTamin: stages of convolutions below a transformer."""
    convolutions = VitConvCfg(norm_layer="layernorm2d", norm_eps=1e-6)
    stages = VitCfg((8, 16, 32), (1, 1, 1), 8, convolutions, "1d")
    own = {
        "embed_layer": partial(HybridEmbed, backbone=MbConvStages(stages), proj=False),
        "class_token": False,
        "global_pool": "avg",
        "mlp_layer": GeGluMlp,
        "patch_size": 1,
    }
    return _build(VisionTransformer, "tiny_vitamin", **{**_PATCHES, **own, **options})


@register_model
def tiny_fastvit(**options: Any) -> Any:
    """Like MobileCLIP: mixed convolutions, attention in the last stage."""
    position = partial(RepConditionalPosEnc, spatial_shape=(7, 7))
    own = {
        "layers": (1, 2, 1, 2),
        "embed_dims": (8, 8, 16, 32),
        "mlp_ratios": (2, 2, 2, 2),
        "se_downsamples": (False, False, True, True),
        "pos_embs": (None, None, None, position),
        "token_mixers": ("repmixer", "repmixer", "repmixer", "attention"),
        "lkc_use_act": True,
    }
    return _build(FastVit, "tiny_fastvit", **{**own, **options})


@register_model
def tiny_swin(**options: Any) -> Any:
    """Windows of two sizes of patches."""
    own = {"img_size": 32, "patch_size": 4, "window_size": 2, "embed_dim": 16}
    depth = {"depths": (2, 2), "num_heads": (2, 2)}
    return _build(SwinTransformer, "tiny_swin", **{**own, **depth, **options})


_VIT = {"layers": 3, "width": 64, "head_width": 32, "patch_size": 8}
TOWERS: dict[str, dict[str, Any]] = {
    "vit": _VIT | {"qk_norm": True},
    "vit_mean": _VIT | {"pool_type": "avg", "final_ln_after_pool": True, "no_ln_pre": True},
    "rn": {"layers": [2, 1, 1, 3], "width": 16, "head_width": 32},
    "token": {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": None},
    "mean": {"timm_model_name": "test_vit", "timm_pool": "avg", "timm_proj": "linear"},
    "attention": {"timm_model_name": "tiny_siglip", "timm_pool": "map", "timm_proj": "none"},
    "pe": {"timm_model_name": "tiny_pe", "timm_pool": "map", "timm_proj": None},
    "eva": {"timm_model_name": "tiny_eva", "timm_pool": "token", "timm_proj": None},
    "relpos": {"timm_model_name": "tiny_relpos", "timm_pool": "", "timm_proj": "linear"},
    "vitamin": {"timm_model_name": "tiny_vitamin", "timm_pool": "", "timm_proj": "linear"},
    "convnext": {"timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "mlp"},
    "fastvit": {"timm_model_name": "tiny_fastvit", "timm_pool": "avg", "timm_proj": None},
    "swin": {"timm_model_name": "tiny_swin", "timm_pool": "", "timm_proj": "linear"},
    "resnet": {"timm_model_name": "test_resnet", "timm_pool": "avg", "timm_proj": "linear"},
}
"""A small model per kind: its image tower's part of `vision_cfg`."""

BLOCKS = {"vit": 3, "vit_mean": 3, "rn": 8, "token": 6, "mean": 6, "attention": 3, "pe": 3}
BLOCKS |= {"eva": 3, "relpos": 3, "vitamin": 3}
BLOCKS |= {"convnext": 9, "fastvit": 6, "swin": 4, "resnet": 4}


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """A model config with this kind of image tower and a text tower of 64 words."""
    return {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 32, **TOWERS[kind]},
        "text_cfg": {"context_length": 6, "vocab_size": 64, "width": 16, "heads": 2, "layers": 3},
        **changes,
    }


def make(kind: str, **changes: Any) -> Model:
    """A model of this kind whose every parameter matters: features differ from image to image."""
    model = load_towers(config_of(kind, **changes), seed=1)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.visual.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5, generator=generator)
        elif parameter.abs().max() < 0.1:  # biases, and what scales a block by almost nothing
            nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


_made = functools.cache(make)


def fresh(kind: str) -> Model:
    """A copy of `make(kind)`; much is built once."""
    model = _made(kind)
    kept = (model.tokenizer, model.preprocess_train, model.preprocess_val)
    return copy.deepcopy(model, {id(part): part for part in kept})
