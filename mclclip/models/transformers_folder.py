"""Reads a folder of a CLIP or SigLIP model of Hugging Face transformers as an open_clip model.

It reads weights, tokenizer and preprocessing, and so reverses ``export --to hf``: such a model is
evaluated, fine-tuned and exported like any other. Folders of transformers 4
(``preprocessor_config.json``) and 5 (``processor_config.json``) are read.

Models may come from strangers: only configurations of these two kinds are read, only safetensors,
only fast tokenizers, which are data, and no code that comes with a model is run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import timm

from mclclip.models import config_check, state_dicts, transformers_layout, weights
from mclclip.util import files
from mclclip.util.options import brief

log = logging.getLogger("mclclip")

PREFIX = "hf:"
"""Begins the name of a transformers model: ``hf:FOLDER``, or ``hf:ORG/NAME`` on the hub."""

CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
# Keys that make transformers load kernels, quantizers or Python from elsewhere.
_BRINGS_CODE = {
    "auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "quantization_config", "per_layer_config", "kernel_config",
}  # fmt: skip
_FILES = ("*.json", "*.txt", "*.model", "*.safetensors", "*.safetensors.index.json")
# transformers' defaults for fields that a configuration leaves out.
_BLOCKS = {"num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_OF_CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_OF_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_IMAGE = _BLOCKS | {"hidden_size": 768, "image_size": 224, "num_channels": 3}
_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "clip": {
        "vision_config": _IMAGE | _OF_CLIP | {"patch_size": 32},
        "text_config": _OF_CLIP
        | {
            "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
            "num_attention_heads": 8, "vocab_size": 49_408, "max_position_embeddings": 77,
            "eos_token_id": 49_407,
        },
    },
    "siglip": {
        "vision_config": _IMAGE | _OF_SIGLIP | {"patch_size": 16},
        "text_config": _BLOCKS
        | _OF_SIGLIP
        | {"hidden_size": 768, "vocab_size": 32_000, "max_position_embeddings": 64},
    },
}  # fmt: skip
_INTERPOLATIONS = {0: "nearest", 2: "bilinear", 3: "bicubic"}
_CLIPS_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIPS_STD = (0.26862954, 0.26130258, 0.27577711)


def find(name: str, *, fetch: bool = True) -> Path:
    """Returns the folder of a model; one on the hub is downloaded, if ``fetch``, unless it is in
    the cache.

    Raises FileNotFoundError if there is no such folder, or it has no config.json, and ValueError
    for an adapter.
    """
    where = name.removeprefix(PREFIX)
    directory = Path(where)
    if where and directory.is_file():
        raise FileNotFoundError(f"{where} is a file: give its folder, {PREFIX}{directory.parent}")
    if not where or not directory.is_dir():
        if where.count("/") != 1 or where.startswith((".", "/", "~")):
            raise FileNotFoundError(
                f"no folder {where or 'is named'}: give hf:FOLDER, or hf:ORG/NAME of a model on "
                "the hub"
            )
        from huggingface_hub import snapshot_download

        what = f"the files of {where!r}"
        options: dict[str, Any] = {"allow_patterns": [*_FILES], "local_files_only": not fetch}
        directory = Path(weights.fetch_quietly(what, lambda: snapshot_download(where, **options)))
    weights.refuse_adapter(directory)
    if not (directory / CONFIG).is_file():
        if inner := sorted(directory.glob(f"*/{CONFIG}")):  # as sentence-transformers saves it
            raise FileNotFoundError(
                f"{directory} has no {CONFIG}, but {inner[0]} is there: give "
                f"{PREFIX}{inner[0].parent}"
            )
        raise FileNotFoundError(
            f"{directory} has no {CONFIG}: a model of transformers has one, an export of mclclip "
            f"or open_clip is named without {PREFIX}"
        )
    return directory


def digest(name: str) -> str:
    """Returns a digest of all files that a model's features depend on; may download them."""
    directory = find(name)
    paths = sorted({path for pattern in _FILES for path in directory.glob(pattern)})
    return files.digest_json([(path.name, files.digest_file(path)) for path in paths])


# --- its configuration as open_clip's ------------------------------------------------------------


def read_config(directory: Path, clips_tokenizer: Any) -> dict[str, Any]:
    """Returns open_clip's configuration of the model in a folder: `model_cfg`, `preprocess_cfg`.

    ``clips_tokenizer`` is CLIP's own tokenizer in open_clip: a model with the same words uses it,
    and any other the files of its folder. Raises FileNotFoundError if a file is missing, and
    ValueError for another architecture, for what can bring code, for sizes that cannot be, and for
    settings that open_clip does not have.
    """
    config = files.read_model_json(directory / CONFIG)
    kind = _check_config(config, directory)
    vision, text = (_part(config, kind, name) for name in ("vision_config", "text_config"))
    where = directory / CONFIG
    text_cfg = _blocks(text, where) | {
        "heads": text["num_attention_heads"],
        "context_length": text["max_position_embeddings"],
        "vocab_size": text["vocab_size"],
    }
    tokenizer_cfg = _tokenizer_cfg(directory, clips_tokenizer, text)
    model_cfg: dict[str, Any]
    if kind == "siglip":
        free = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
        model_cfg = {
            "embed_dim": text.get("projection_size") or text["hidden_size"],
            "init_logit_bias": -10.0,
            "custom_text": True,
            "vision_cfg": _timm_tower(vision, where),
            "text_cfg": text_cfg | free | tokenizer_cfg,
        }
    else:
        if (vision["hidden_act"] == "quick_gelu") != (text["hidden_act"] == "quick_gelu"):
            raise ValueError(f"{where} has quick_gelu in one tower alone, which open_clip has not")
        # open_clip takes the largest id for the end of a text, as in CLIP, unless it is told which
        # id ends a text. (eos_token_id 2 is an error in old files of CLIP.)
        end = (
            {}
            if not tokenizer_cfg or text["eos_token_id"] == 2
            else {"pool_type": "eos", "eos_id": text["eos_token_id"]}
        )
        model_cfg = {
            "embed_dim": config.get("projection_dim", 512),
            "quick_gelu": vision["hidden_act"] == "quick_gelu",
            "vision_cfg": _blocks(vision, where)
            | {
                "image_size": vision["image_size"],
                "patch_size": vision["patch_size"],
                "head_width": vision["hidden_size"] // vision["num_attention_heads"],
            },
            "text_cfg": text_cfg | tokenizer_cfg | end,
        }
    preprocess = _preprocessing(directory, int(vision["image_size"]))
    return {"model_cfg": model_cfg, "preprocess_cfg": preprocess}


def _check_config(config: object, directory: Path) -> str:
    """Returns the `model_type` of a folder's configuration, "clip" or "siglip".

    Raises ValueError for another type, keys that can bring code, and numbers that cannot be.
    """
    where = str(directory / CONFIG)
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or kind not in _DEFAULTS:
        advice = "transformers' models of other architectures are not read"
        if kind == transformers_layout.JOINED_MODEL_TYPE:
            advice = (
                "a joined encoder is not read back, give the folder that it was exported from, "
                "such as RUN/exports/concat_raw"
            )
        raise ValueError(
            f"model_type in {where} is {brief(kind)}, wanted one of {', '.join(_DEFAULTS)}: "
            f"{advice}"
        )
    for name in ("vision_config", "text_config"):
        if not isinstance(config.get(name), Mapping):
            raise ValueError(f"{where} has no {name}: save the model of both towers")
    for name, part in (
        ("", config),
        *((n, v) for n, v in config.items() if isinstance(v, Mapping)),
    ):
        what = f"{name} of {where}" if name else where
        if brought := sorted(_BRINGS_CODE & {*map(str, part)}):
            raise ValueError(
                f"{what} has {brought[0]}, which can bring code of others: take it out if the "
                "model works without"
            )
        for key, value in part.items():
            if not isinstance(value, Mapping):
                config_check.check_numbers(value, str(key), what)
    return str(kind)


def _part(config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    """Returns a tower's configuration, with transformers' defaults for what it leaves out.

    `name` is "vision_config" or "text_config". Older versions of transformers wrote another part,
    for example "vision_config_dict", whose values come first. Raises ValueError for values of
    another type than the defaults.
    """
    older = config.get(f"{name}_dict")
    settings = {**config[name], **(older if isinstance(older, Mapping) else {})}
    part = _DEFAULTS[kind][name] | {
        key: value for key, value in settings.items() if value is not None
    }
    for key, default in _DEFAULTS[kind][name].items():
        wrong = isinstance(part[key], bool) or not isinstance(part[key], type(default))
        if wrong or (isinstance(default, int | float) and part[key] <= 0):
            raise ValueError(f"{key} in {name} is {brief(part[key])}, wanted one such as {default}")
    return part


def _blocks(part: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Returns open_clip's fields of a tower's blocks, which both towers have.

    Raises ValueError for an activation that open_clip does not have.
    """
    width, hidden = part["hidden_size"], part["intermediate_size"]
    # The half keeps open_clip, which rounds width times ratio down, from losing one.
    ratio = hidden / width if hidden % width == 0 else (hidden + 0.5) / width
    fields = {"width": width, "layers": part["num_hidden_layers"], "mlp_ratio": ratio}
    activation, eps = part["hidden_act"], part["layer_norm_eps"]
    if activation not in ("quick_gelu", "gelu", "gelu_pytorch_tanh", "gelu_new"):
        raise ValueError(f"hidden_act in {where} is {brief(activation)}, which open_clip has not")
    if activation in ("gelu_pytorch_tanh", "gelu_new"):
        fields["act_kwargs"] = {"approximate": "tanh"}
    return fields | ({} if eps == 1e-5 else {"norm_kwargs": {"eps": eps}})


def _timm_tower(vision: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Returns the `vision_cfg` of timm's SigLIP tower with these sizes.

    Of several, one with the same activation is preferred. Raises ValueError if there is none.
    """
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "patch_size")  # fmt: skip
    patches = f"vit_*_patch{vision['patch_size']}_siglip_"
    # Every tower of timm can be set to another image size; one that is built for it comes first.
    names = timm.list_models(f"{patches}{vision['image_size']}") or timm.list_models(f"{patches}*")
    fitting = {}
    for name in names:
        with torch.device("meta"):
            tower = transformers_layout.describe_siglip_tower(timm.create_model(name))
        if all(tower[size] == vision[size] for size in sizes):
            fitting[name] = tower["hidden_act"]
    if not fitting:
        described = ", ".join(f"{size} {vision[size]}" for size in sizes)
        raise ValueError(
            f"{where} describes an image tower of {described}, which none of timm's SigLIP towers "
            "has, by which open_clip reads such a model"
        )
    name = min(fitting, key=lambda name: (fitting[name] != vision["hidden_act"], name))
    if fitting[name] != vision["hidden_act"]:
        log.warning(
            "%s: the image tower has %s, and timm's %s has %s, as in open_clip: features differ a "
            "little", where, vision["hidden_act"], name, fitting[name],
        )  # fmt: skip
    return {
        "timm_model_name": name,
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
        "image_size": vision["image_size"],
    }


def _preprocessing(directory: Path, image_size: int) -> dict[str, Any]:
    """Translates the settings of a folder's image processor to open_clip's.

    Raises FileNotFoundError if there is none, and ValueError if it treats pictures in a way that
    open_clip cannot.
    """
    path, record = directory / PROCESSOR, None  # transformers 5 saves all processors in one
    if path.is_file():
        whole = files.read_model_json(path)
        record = whole.get("image_processor") if isinstance(whole, Mapping) else None
    if record is None and (path := directory / PREPROCESSOR).is_file():
        record = files.read_model_json(path)
    if not isinstance(record, Mapping):
        raise FileNotFoundError(
            f"neither {PREPROCESSOR} nor {PROCESSOR} in {directory} describes an image processor, "
            "which says how pictures are resized and scaled: save it there (save_pretrained)"
        )
    size, crop = _sides(record, "size", path), _sides(record, "crop_size", path)
    is_shortest = "shortest_edge" in size
    cuts = record.get("do_center_crop", is_shortest)
    sides = [side for key, side in size.items()] + ([*crop.values()] if cuts else [])
    problems = {
        f"makes pictures of {sorted(set(sides))} pixels, the model takes {image_size}": any(
            side != image_size for side in sides
        )
        or not sides,
        "does not resize pictures": not record.get("do_resize", True),
        "keeps the shape of pictures without a crop": is_shortest and not cuts,
        "does not scale pixels by 1/255": not record.get("do_rescale", True)
        or not math.isclose(record.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-3),
        f"has resample {brief(record.get('resample'))}": record.get("resample", 3)
        not in _INTERPOLATIONS,
    }
    if wrong := [problem for problem, holds in problems.items() if holds]:
        raise ValueError(f"the image processor of {path} {wrong[0]}, which open_clip has not")
    colours = {"mean": [0.0] * 3, "std": [1.0] * 3}
    if record.get("do_normalize", True):
        means = record.get("image_mean"), record.get("image_std")
        colours = {"mean": means[0] or [*_CLIPS_MEAN], "std": means[1] or [*_CLIPS_STD]}
    return colours | {
        "size": [image_size, image_size],
        "mode": "RGB",
        "interpolation": _INTERPOLATIONS[record.get("resample", 3)],
        "resize_mode": "shortest" if is_shortest else "squash",
        "fill_color": 0,
    }


def _sides(record: Mapping[str, Any], field: str, path: Path) -> dict[str, int]:
    """Reads the sides in the field "size" or "crop_size", such as {"height": 224, "width": 224}.

    Older versions wrote a plain number: in "size" it is the shortest edge after resizing, and in
    "crop_size" both sides. Raises ValueError for sides that are no positive whole numbers.
    """
    value = record.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        value = {"shortest_edge": value} if field == "size" else {"height": value, "width": value}
    for side in value.values():
        if isinstance(side, bool) or not isinstance(side, int):
            raise ValueError(f"{field} of {path} is {brief(side)}, wanted a number of pixels")
        config_check.check_numbers(side, "image_size", f"{field} of {path}")
    return {str(key): side for key, side in value.items()}


# --- its tokenizer -------------------------------------------------------------------------------


def _tokenizer_cfg(directory: Path, clips: Any, text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `text_cfg` about the tokenizer; none if its words are CLIP's (`clips`).

    Raises ValueError if the folder has neither a fast tokenizer nor CLIP's words.
    """
    path = directory / "tokenizer.json"
    words: Any = None
    merges: Any = None
    if path.is_file():
        model = files.read_model_json(path)
        model = model.get("model") if isinstance(model, Mapping) else None
        if isinstance(model, Mapping):
            words, merges = model.get("vocab"), model.get("merges")
    elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        words = files.read_model_json(directory / "vocab.json")
        lines = files.read_bounded(directory / "merges.txt", 1 << 26).decode(errors="replace")
        merges = [line for line in lines.splitlines() if line and not line.startswith("#version")]
    if isinstance(words, Mapping) and _has_words_of_clip(words, merges, clips):
        return {}
    if not path.is_file():
        raise ValueError(
            f"{directory} has no tokenizer.json, and no vocab.json and merges.txt with CLIP's "
            "words: save the model's fast tokenizer there (save_pretrained)"
        )
    record = (
        files.read_model_json(directory / config_check.TOKENIZER_CONFIG)
        if (directory / config_check.TOKENIZER_CONFIG).is_file()
        else {}
    )
    kind = str(record.get("tokenizer_class")) if isinstance(record, Mapping) else ""
    # transformers' slow tokenizer of SigLIP cleans texts as its authors did. SigLIP 2 was trained
    # on lower case, which Gemma's tokenizer leaves to the caller.
    clean = "whitespace"
    if kind.startswith("SiglipTokenizer"):
        clean = "canonicalize"
    elif kind.startswith(("Gemma", "Siglip2")):
        clean = "lower"
    # open_clip reads a tokenizer's files beside a model only if a name on the hub is given.
    name = "timm/ViT-B-16-SigLIP2" if text["vocab_size"] == 256_000 else "timm/ViT-B-16-SigLIP"
    return {"hf_tokenizer_name": name, "tokenizer_kwargs": {"clean": clean}}


def _has_words_of_clip(words: Mapping[str, Any], merges: object, clips: Any) -> bool:
    """Returns True if a vocabulary equals that of CLIP's own tokenizer `clips`.

    The two last words, which begin and end a text, may have other names.
    """
    if not isinstance(merges, list) or len(words) != len(clips.encoder):
        return False
    pairs = [" ".join(merge) if isinstance(merge, list) else str(merge) for merge in merges]
    last = len(clips.encoder) - 2
    ranks = sorted(clips.bpe_ranks, key=clips.bpe_ranks.__getitem__)
    same = all(words.get(word) == number for word, number in clips.encoder.items() if number < last)
    return same and pairs == [" ".join(pair) for pair in ranks]


# --- its weights ---------------------------------------------------------------------------------


def _find_weights(directory: Path) -> list[Path]:
    """Returns a folder's file of weights, or the parts that its index names if there is no single
    one, as transformers does. Raises ValueError if one is not in the folder."""
    index, names = directory / "model.safetensors.index.json", ["model.safetensors"]
    there = {path.name for path in directory.iterdir()}
    if not index.is_file() and names[0] not in there:
        alone = [name for name in there if name.endswith(".safetensors")]
        names = alone if len(alone) == 1 else names
    if index.is_file() and names[0] not in there:
        record = files.read_model_json(index)
        parts = record.get("weight_map") if isinstance(record, Mapping) else None
        names = sorted({*map(str, parts.values())}) if isinstance(parts, Mapping) else []
    if not names or {*names} - there:
        missing = min({*names} - there, default="weights in its index")
        raise ValueError(
            f"{directory} has no {files.printable(missing)}: save the model with transformers' "
            "save_pretrained, since files of other kinds could run code"
        )
    return [directory / name for name in names]


def fill(clip: Any, directory: Path) -> None:
    """Loads the weights of a folder into the module that open_clip built of its configuration.

    Raises ValueError if they do not fit or are not finite.
    """
    theirs: dict[str, Tensor] = {}
    for path in _find_weights(directory):
        theirs |= {name: tensor.float() for name, tensor in weights.read_tensors(path).items()}
    state, table, prefix = clip.state_dict(), transformers_layout.CLIP, ""
    if hasattr(clip, "text"):  # SigLIP
        theirs = transformers_layout.split_pool(theirs)
        table, prefix = transformers_layout.SIGLIP, "text."
    full_names = {name.removeprefix(prefix): name for name in state}
    ours = {name: state[full] for name, full in full_names.items()}
    tensors = transformers_layout.rename_back(ours, theirs, table)
    tensors = {full_names[name]: tensor for name, tensor in tensors.items()}
    state_dicts.fill(clip, tensors, f"in {directory}")
