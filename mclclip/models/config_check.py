"""Checks a model's configuration, and a tokenizer's files, before anything of them is used.

Models may come from strangers: as a directory, from the hub, as a JSON file. open_clip passes parts
of their configuration to transformers and timm. transformers runs Python files beside a tokenizer
if `trust_remote_code` is true, and asks at the terminal if the option is not set. So these are
refused before open_clip sees the configuration:

- `trust_remote_code`, and every other option of tokenizers that no configuration of open_clip's own
  sets;
- tokenizers and text towers that no configuration of open_clip's own names, and local folders of
  the same name, which transformers would read instead of the hub;
- image towers that timm does not list itself, such as `hf-hub:...`;
- tokenizer files in a model directory that name code, or a class that is no fast tokenizer (fast
  tokenizers consist of data alone);
- fields that open_clip's dataclasses do not have, values of other types than theirs, numbers that
  are not finite, and sizes that are not above 0.

Every mistake is a ValueError of one line. In all functions `where` says in messages whose
configuration it is, for example "the model config" or a path.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import timm

from mclclip.models.row_projection import WIDTH
from mclclip.util import files
from mclclip.util.options import brief, first_problem, nearest

TOKENIZER_CONFIG = "tokenizer_config.json"
FAST = "PreTrainedTokenizerFast"
"""The class of transformers that reads any tokenizer.json, which is data alone."""
_SLOW_BESIDE_FAST = ("SiglipTokenizer",)  # slow, but published with a tokenizer.json beside it
BACKBONE = "backbone"
"""The field of a `vision_cfg` that names a tower of `backbones`."""

# Fields whose numbers have to be above 0.
_POSITIVE = (
    "embed_dim", "layers", "width", "head_width", "heads", "mlp_ratio", "patch_size", "image_size",
    "context_length", "vocab_size", "attn_pooler_queries", "attn_pooler_heads", "size", "std",
    "channels", "hidden_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
_TOP: dict[str, Any] = {
    "embed_dim": int, "quick_gelu": bool, "custom_text": bool, "init_logit_bias": float,
    "init_logit_scale": float, "nonscalar_logit_scale": bool, "output_dict": bool,
    "multimodal_cfg": dict,
}  # fmt: skip
_PARTS = ("vision_cfg", "text_cfg", "preprocess_cfg")
# Strict: true is no number, and neither is a text of digits.
_STRICTLY = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_MODES: dict[str, tuple[str, ...]] = {
    "mode": ("RGB",),
    "interpolation": ("bicubic", "bilinear", "nearest", "random"),
    "resize_mode": ("shortest", "longest", "squash"),
}
_LOADED = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir",
           "weights", "file")  # fmt: skip


def check(
    config: Mapping[str, Any],
    published: Sequence[Mapping[str, Any]],
    kinds: tuple[type, type, type],
    where: str,
) -> None:
    """Raises ValueError if a configuration could bring code, or is wrong.

    `config` has a `model_cfg` and perhaps a `preprocess_cfg`. `published` are open_clip's own model
    configs, `kinds` its dataclasses of the image tower, the text tower and the preprocessing. The
    `vision_cfg` of a backbone is checked by `backbones` instead.
    """
    model = _mapping(config["model_cfg"], f"model_cfg of {where}")
    vision = _mapping(model.get("vision_cfg"), f"vision_cfg of {where}")
    text = _mapping(model.get("text_cfg", {}), f"text_cfg of {where}")
    if WIDTH in text:
        if {*text} != {WIDTH} or type(text[WIDTH]) is not int or text[WIDTH] < 1:
            raise ValueError(
                f"text_cfg of {where} is {brief(dict(text))}: wanted the width of text rows alone, "
                f"such as {{{WIDTH}: 768}}"
            )
        model = {name: value for name, value in model.items() if name != "text_cfg"}
        config, text = {**config, "model_cfg": model}, {}
    name = vision.get("timm_model_name")
    # timm would also load `hf-hub:` and `local-dir:`.
    listed = isinstance(name, str) and timm.is_model(name) and not set(name) & set(":/\\")
    if name and not listed:
        raise ValueError(
            f"vision_cfg.timm_model_name of {where} is {brief(name)}, which timm does not list: "
            "use one of timm.list_models()"
        )
    texts = [other["text_cfg"] for other in published]
    for key in ("hf_tokenizer_name", "hf_model_name"):
        allowed = {other[key] for other in texts if other.get(key)}
        if text.get(key) and not (isinstance(text[key], str) and text[key] in allowed):
            near = nearest(str(text[key]), allowed)
            raise ValueError(
                f"text_cfg.{key} of {where} is {brief(text[key])}, which no model of open_clip's "
                f"own has (nearest: {', '.join(near)}): use one of theirs, any other could bring "
                "code"
            )
        if text.get(key) and Path(text[key]).exists():
            raise ValueError(
                f"{text[key]!r} is meant to come from the hub, but {Path(text[key]).resolve()} "
                "would be read instead: start from another directory"
            )
    allowed_options = {option for other in texts for option in other.get("tokenizer_kwargs") or {}}
    _check_tokenizer_options(text.get("tokenizer_kwargs") or {}, allowed_options, where)
    if BACKBONE not in vision:
        _check_fields(config, kinds, where)


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {type(value).__name__}, wanted a mapping: export it again")
    return value


def _check_tokenizer_options(options: object, allowed: set[str], where: str) -> None:
    """Raises ValueError for tokenizer options that no configuration of open_clip's own sets."""
    mapping = _mapping(options, f"text_cfg.tokenizer_kwargs of {where}")
    if strange := sorted(set(map(str, mapping)) - allowed):
        is_code = "trust_remote_code" in strange
        hint = "trust_remote_code, which runs Python that comes with the model" * is_code
        raise ValueError(
            f"text_cfg.tokenizer_kwargs of {where} has {hint or ', '.join(strange)[:200]}, wanted "
            f"only {', '.join(sorted(allowed))}: take the others out"
        )


# --- types and numbers --------------------------------------------------------------------------


def _check_fields(config: Mapping[str, Any], kinds: tuple[type, type, type], where: str) -> None:
    """Raises ValueError if a configuration has fields that open_clip does not know, values of other
    types, or numbers that cannot be. Strange fields of `preprocess_cfg` are ignored, as in
    open_clip."""
    model = config["model_cfg"]
    preprocessing = _mapping(config.get("preprocess_cfg", {}), f"preprocess_cfg of {where}")
    field_names = {item.name for item in fields(kinds[2])}
    preprocessing = {name: value for name, value in preprocessing.items() if name in field_names}
    for name, modes in _MODES.items():  # open_clip's own assertion would have no message
        if (mode := preprocessing.get(name)) is not None and mode not in modes:
            raise ValueError(
                f"{name} in preprocess_cfg of {where} is {brief(mode)}, wanted one of {modes}"
            )
    # For null open_clip takes its default, or the field does not apply (patch_size of ResNets).
    parts = {
        name: {option: value for option, value in part.items() if value is not None}
        for name in _PARTS
        if (part := (model | {"preprocess_cfg": preprocessing}).get(name)) is not None
    }
    types = _TOP | dict(zip(_PARTS, kinds, strict=True))
    optional: dict[str, Any] = {name: (kind, None) for name, kind in types.items()}
    read = create_model("Config", __config__=_STRICTLY, **optional)
    try:
        read.model_validate_json(json.dumps({**model, **parts}))
    except ValidationError as error:
        option, problem = first_problem(error)
        raise ValueError(f"{option} in {where}: {problem[:200]}") from None
    for name, part in {"": model, **parts}.items():
        for option, value in part.items():
            if option not in _PARTS:
                check_numbers(value, option, f"{name} of {where}" if name else where)
    vision, preprocessing = parts["vision_cfg"], parts["preprocess_cfg"]
    size, patch = vision.get("image_size", 224), vision.get("patch_size", 1)
    if "patch_size" in vision and min(_items(size)) < max(_items(patch)):
        raise ValueError(
            f"image_size in vision_cfg of {where} is {brief(size)}, below patch_size "
            f"{brief(patch)}: wanted pictures of one patch at least"
        )
    for name in ("mean", "std"):
        if name in preprocessing and len(_items(preprocessing[name])) != 3:
            raise ValueError(
                f"{name} in preprocess_cfg of {where} is {brief(preprocessing[name])}, wanted 3 "
                "numbers"
            )


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for options of a library's model that load files, and numbers that are not
    finite."""
    for name, value in options.items():
        if name in _LOADED:
            raise ValueError(f"{where} has {name}, which loads a file: take it out")
        texts = [item for item in _items(value) if isinstance(item, str)]
        if any(len(text) > 100 or set(text) & set("/\\:") or ".." in text for text in texts):
            raise ValueError(f"{name} in {where} is {texts[0][:100]!r}, wanted no path and no url")
        check_numbers(value, name, where)


def check_numbers(value: object, name: str, where: str) -> None:
    """Raises ValueError for numbers in `value` that are not finite, and, if the field `name` is a
    size, for numbers that are not above 0."""
    for item in _items(value):
        if isinstance(item, bool) or not isinstance(item, int | float):
            continue
        is_finite = isinstance(item, int) or math.isfinite(item)
        if not is_finite or (name in _POSITIVE and item <= 0):
            least = "a number above 0" if name in _POSITIVE else "a finite number"
            raise ValueError(f"{name} in {where} is {brief(item)}, wanted {least}")


def _items(value: object) -> list[Any]:
    """Returns the items of a list or a mapping, or the value itself; no type goes deeper."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


# --- tokenizers --------------------------------------------------------------------------------


def tokenizer_class(directory: Path) -> str:
    """Returns the class of transformers that reads the tokenizer in a model directory.

    It is "AutoTokenizer" if the files name a fast tokenizer, and `FAST` if they name a slow one
    that has a tokenizer.json too. Raises ValueError if the tokenizer is more than data, and
    FileNotFoundError if there is none.
    """
    path = Path(directory) / TOKENIZER_CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} has no {TOKENIZER_CONFIG}, but its model has a tokenizer of its own: "
            "save the tokenizer there (save_pretrained)"
        )
    record = _mapping(files.read_model_json(path), str(path))
    if "auto_map" in record:
        raise ValueError(
            f"{path} has auto_map, which names Python that comes with the model: mclclip never "
            "runs it, save the tokenizer without code of its own"
        )
    # A tokenizer's files may name the slow class; transformers then loads the fast one.
    name, transformers = record.get("tokenizer_class"), library()
    kinds = [getattr(transformers, f"{name}{suffix}", None) for suffix in ("", "Fast")]
    fast = getattr(transformers, FAST)
    if any(inspect.isclass(kind) and issubclass(kind, fast) for kind in kinds):
        return "AutoTokenizer"
    if name in _SLOW_BESIDE_FAST and (directory / "tokenizer.json").is_file():
        return FAST
    raise ValueError(
        f"tokenizer_class in {path} is {brief(name)}, wanted a fast tokenizer of transformers "
        f"(such as {FAST}): save the tokenizer as one"
    )


def library() -> Any:
    """Returns the module transformers. Raises ValueError if it is not installed."""
    return files.needed("transformers", "the model's tokenizer", "pip install transformers")
