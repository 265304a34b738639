"""A joined encoder in the layout of `models/transformers_stages.py`, from its stages' tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mclclip import files
from mclclip.export import certificate, transformers_layout
from mclclip.export.certificate import Certificate
from mclclip.export.image_pixels import own_processor
from mclclip.export.target import Material, Source
from mclclip.models import config_check, transformers_encoder, weights
from mclclip.models.encoder import Encoder

MODULE = "transformers_stages"
"""Module of the model: `mclclip.models.transformers_stages`, and a copy beside the weights."""

_BLOCK = {
    "attn.in_proj_weight": "in_proj.weight",
    "attn.in_proj_bias": "in_proj.bias",
    "attn.out_proj.weight": "out_proj.weight",
    "attn.out_proj.bias": "out_proj.bias",
    **{f"mlp.{part}.{kind}": f"{part}.{kind}" for part in ("c_fc", "c_proj") for kind in
       ("weight", "bias")},
    **{f"ln_{n}.{kind}": f"ln_{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")},
}  # fmt: skip
_BLOCKS = "transformer.resblocks."
_EMBEDDING = ("conv1.", "class_embedding", "positional_embedding", "ln_pre.")


def joined(source: Source) -> Encoder:
    """The source's encoder, which is a joined one."""
    assert source.encoder.variant is not None
    return source.encoder


def configuration(source: Source) -> dict[str, Any]:
    """`config.json` of a `StagesModel`. Raises ValueError for other towers than open_clip's plain
    ViT."""
    encoder, stages = joined(source), source.stages
    own = stages[0].exported.state_dict()
    plain = transformers_layout.tensors(own)
    whole = transformers_layout.config(stages[0].config["model_cfg"], plain)
    vision = {k: v for k, v in whole["vision_config"].items() if k != "model_type"}
    text = {k: v for k, v in whole["text_config"].items() if not k.endswith("token_id")}
    return {
        "architectures": ["StagesModel"],
        "model_type": "mclclip_stages",
        "auto_map": _auto_map("StagesConfig", "StagesModel"),
        "torch_dtype": "float32",
        "logit_scale_init_value": math.log(encoder.logit_scale),
        "vision_config": vision
        | {
            "model_type": "mclclip_stages_vision",
            "num_stages": len(stages),
            "width": vision["hidden_size"],
            "num_trunk_blocks": encoder.num_trunk_blocks,
            "variant": encoder.variant,
            "stage_weights": [*encoder.stage_weights] or None,
        },
        "text_config": text
        | {
            "model_type": "mclclip_stages_text",
            "num_towers": 1 if encoder.shared_text else len(stages),
        },
    }


def _auto_map(config: str, model: str) -> dict[str, str]:
    return {"AutoConfig": f"{MODULE}.{config}", "AutoModel": f"{MODULE}.{model}"}


def vision_configuration(source: Source) -> dict[str, Any]:
    """`config.json` of a `StagesVisionModel` alone."""
    vision: dict[str, Any] = configuration(source)["vision_config"]
    return vision | {
        "architectures": ["StagesVisionModel"],
        "auto_map": _auto_map("StagesVisionConfig", "StagesVisionModel"),
        "torch_dtype": "float32",
    }


def vision_tensors(source: Source) -> dict[str, Tensor]:
    """The tensors of a `StagesVisionModel`, by name; those of the trunk once."""
    shared, found = joined(source).num_trunk_blocks, {}
    for number, stage in enumerate(source.stages):
        for name, tensor in stage.exported.state_dict().items():
            if name.startswith("visual."):
                place, value = _vision(name.removeprefix("visual."), tensor, shared)
                if place.startswith("trunk.") and shared:
                    found[place] = value
                else:
                    found[f"stages.{number}.{place}"] = value
    return found


def _vision(name: str, tensor: Tensor, shared: int) -> tuple[str, Tensor]:
    """A tensor's name in the trunk or in its stage's tail, and its values."""
    if name == "proj":
        return "proj.weight", tensor.T.contiguous()
    if name.startswith(_EMBEDDING):
        return f"trunk.{name}", tensor
    if name.startswith(_BLOCKS):
        number, _, part = name.removeprefix(_BLOCKS).partition(".")
        block = int(number)
        if shared == 0 or block < shared:
            return f"trunk.blocks.{block}.{_BLOCK[part]}", tensor
        return f"blocks.{block - shared}.{_BLOCK[part]}", tensor
    return name, tensor  # the final norm


def _text_tensors(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in own.items():
        if name.startswith(("visual.", "logit_")) or name == "attn_mask":
            continue
        if name == "text_projection":
            found["proj.weight"] = tensor.T.contiguous()
        elif name.startswith(_BLOCKS):
            number, _, part = name.removeprefix(_BLOCKS).partition(".")
            found[f"blocks.{number}.{_BLOCK[part]}"] = tensor
        else:
            found[name] = tensor
    return found


def write(source: Source, out: Path) -> None:
    """Writes configuration, code, weights, tokenizer and a stock image processor."""
    encoder, stages = joined(source), source.stages
    described = configuration(source)
    tensors = {f"vision_model.{n}": t for n, t in vision_tensors(source).items()}
    for number, stage in enumerate(stages[: described["text_config"]["num_towers"]]):
        own = _text_tensors(stage.exported.state_dict())
        tensors |= {f"text_towers.{number}.{name}": tensor for name, tensor in own.items()}
    # That of the first stage, or the one that was learned with the weights of the stages.
    tensors["logit_scale"] = torch.tensor(encoder.logit_scale).log()
    length = described["text_config"]["max_position_embeddings"]
    for name, content in transformers_layout.tokenizer_files(encoder.tokenizer, length).items():
        files.write_bytes(out / name, content)
    write_folder(source, out, described, tensors)


def write_folder(
    source: Source, out: Path, described: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Writes a folder of this layout: configuration, image processor, code, and weights."""
    look = transformers_layout.preprocessor(source.stages[0].config["preprocess_cfg"])
    for name, tree in ((transformers_encoder.CONFIG, described),
                       (transformers_encoder.PREPROCESSOR, look)):  # fmt: skip
        files.write_bytes(out / name, json.dumps(tree, indent=2).encode())
    code = Path(transformers_encoder.__file__).with_name(f"{MODULE}.py")
    files.write_bytes(out / code.name, code.read_bytes())
    # Copies: equal tensors of the stages share their memory, which safetensors does not write.
    whole = {name: tensor.detach().float().clone() for name, tensor in tensors.items()}
    weights.write_tensors(out / transformers_layout.WEIGHTS, whole)


def load(out: Path) -> Any:
    """The model in a folder of this layout, by this package's own classes, never by the code in the
    folder. Raises ValueError where the weights lack a tensor."""
    transformers = config_check.library()
    import_module(f"mclclip.models.{MODULE}")
    with transformers_encoder.silent(transformers):
        model, found = transformers.AutoModel.from_pretrained(
            str(out), trust_remote_code=False, output_loading_info=True, local_files_only=True
        )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"the weights in {out} have no {missing[0]}")
    return model.eval()


def certify(source: Source, out: Path, material: Material) -> list[Certificate]:
    """The model in transformers, with the own image processor."""
    transformers = config_check.library()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(str(out))
    model = transformers_encoder.TransformersModel(load(out), own_processor(out), tokenizer)
    name = f"transformers {transformers.__version__}, StagesModel, OpenClipImageProcessor"
    other = Encoder([model])
    return [certificate.compare(joined(source), other, name, material.images, material.texts)]
