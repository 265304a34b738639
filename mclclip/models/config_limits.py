"""Types and bounds of what a model's configuration says, checked before anything is built.

The fields and their types are those of open_clip's own dataclasses, which the caller passes in;
bounds are several times those of the largest published model. So a mistake, or a file of a stranger
that asks for 20,000 layers or an image of a million pixels' side, ends in one line at once instead
of in an error of torch after minutes, or in a machine without memory.

Every mistake is a ValueError of one line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mclclip.options import first_problem, shown

# The largest value of a number by its name; others are at most _MOST.
_MOST = 65_536
_LIMITS = {
    "layers": 512, "width": 16_384, "head_width": 1_024, "heads": 512, "mlp_ratio": 64,
    "patch_size": 1_024, "image_size": 4_096, "size": 4_096, "attn_pooler_queries": 4_096,
    "attn_pooler_heads": 512, "context_length": 8_192, "vocab_size": 4_000_000,
    "pad_id": 4_000_000, "eos_id": 4_000_000, "fill_color": 255, "std": 1_000, "mean": 1_000,
    "channels": 64, "num_hidden_layers": 512, "hidden_size": 16_384, "bos_token_id": 4_000_000,
    "eos_token_id": 4_000_000, "pad_token_id": 4_000_000,
}  # fmt: skip
# Names whose numbers have to be above 0.
_POSITIVE = (
    "embed_dim", "layers", "width", "head_width", "heads", "mlp_ratio", "patch_size", "image_size",
    "context_length", "vocab_size", "attn_pooler_queries", "attn_pooler_heads", "size", "std",
    "channels", "hidden_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
_TOP = {
    "embed_dim": int, "quick_gelu": bool, "custom_text": bool, "init_logit_bias": float,
    "init_logit_scale": float, "nonscalar_logit_scale": bool, "output_dict": bool,
}  # fmt: skip
_PARTS = ("vision_cfg", "text_cfg", "multimodal_cfg")
_MODES = {
    "interpolation": ("bicubic", "bilinear", "nearest", "random"),
    "resize_mode": ("shortest", "longest", "squash"),
}
_MOST_PARAMETERS = 20_000_000_000
_LOADED = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir",
           "weights", "file")  # fmt: skip


def check(
    config: Mapping[str, Any], file: Path | None, kinds: tuple[type, type, type], where: str
) -> None:
    """Raises ValueError where a model's whole configuration is wrong or does not fit the `file` of
    its weights. `kinds` are open_clip's dataclasses of the image tower, the text tower and the
    preprocessing; see `check_model`, `check_preprocessing` and `check_weights`."""
    check_model(config["model_cfg"], *kinds[:2], where)
    if "preprocess_cfg" in config:
        check_preprocessing(config["preprocess_cfg"], kinds[2], where)
    if file is not None:
        check_weights(config["model_cfg"], file)


def check_model(config: Mapping[str, Any], vision: type, text: type, where: str) -> None:
    """Raises ValueError for a model config (`embed_dim`, `vision_cfg`, `text_cfg`) that open_clip
    does not know or that is out of bounds.

    `vision` and `text` are open_clip's dataclasses of the two parts; the `vision_cfg` of a backbone
    is left to `backbones`.
    """
    for name, value in config.items():
        if name in _PARTS:
            continue
        if name not in _TOP:
            what = shown(name)
            raise ValueError(f"{where} has {what}, which open_clip does not know: take it out")
        _check_type(_TOP[name], value, name, where)
        check_numbers(value, name, where)
    if "embed_dim" not in config:
        raise ValueError(f"{where} has no embed_dim, the width of its features: export it again")
    for name, kind in (("vision_cfg", vision), ("text_cfg", text)):
        if config.get(name):
            _check_part(config[name], kind, f"{name} of {where}")
    if (number := num_parameters(config)) > _MOST_PARAMETERS:
        raise ValueError(
            f"{where} describes {number / 1e9:,.0f} billion parameters, wanted at most "
            f"{_MOST_PARAMETERS / 1e9:,.0f} billion"
        )


def _check_part(part: Mapping[str, Any], kind: type, where: str) -> None:
    known = [item.name for item in fields(kind)]
    if strange := sorted(set(map(str, part)) - set(known)):
        what = shown(strange[0])
        raise ValueError(f"{where} has {what}, which open_clip does not know: take it out")
    # Without a value open_clip takes its own, or has none (patch_size of ResNets).
    given = {name: value for name, value in part.items() if value is not None}
    _check_type(kind, given, "", where)
    for name, value in given.items():
        check_numbers(value, name, where)


def check_preprocessing(config: object, kind: type, where: str) -> None:
    """Raises ValueError for a `preprocess_cfg` that cannot be applied; `kind` is open_clip's
    dataclass. Other fields than its own are ignored, as open_clip ignores them."""
    what = f"preprocess_cfg of {where}"
    if not isinstance(config, Mapping):
        raise ValueError(f"{what} is {type(config).__name__}, wanted a mapping: export it again")
    known = [item.name for item in fields(kind)]
    given = {n: value for n, value in config.items() if n in known and value is not None}
    if given.get("mode", "RGB") != "RGB":
        raise ValueError(f"mode in {what} is {shown(given['mode'])}, wanted 'RGB'")
    for name, modes in _MODES.items():
        if given.get(name, modes[0]) not in modes:
            raise ValueError(f"{name} in {what} is {shown(given[name])}, wanted one of {modes}")
    _check_type(kind, given, "", what)
    for name, value in given.items():
        check_numbers(value, name, what)
        if name in ("mean", "std") and len(value) != 3:
            raise ValueError(f"{name} in {what} has {len(value)} values, wanted 3")


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for options of a library's model that load files or are out of bounds."""
    for name, value in options.items():
        if name in _LOADED:
            raise ValueError(f"{where} has {name}, which loads a file: take it out")
        texts = [item for item in _items(value) if isinstance(item, str)]
        if any(len(text) > 100 or set(text) & set("/\\:") or ".." in text for text in texts):
            raise ValueError(f"{name} in {where} is {texts[0][:100]!r}, wanted no path and no url")
        check_numbers(value, name, where)


def check_numbers(value: object, name: str, where: str) -> None:
    """Raises ValueError for numbers in `value` that are not finite, too large or too small."""
    most, items = _LIMITS.get(name, _MOST), _items(value)
    if len(items) > 64:
        raise ValueError(f"{name} in {where} has {len(items):,} values, wanted at most 64")
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | float):
            continue
        # In this order: a long whole number is no float.
        if abs(item) > most or not math.isfinite(item) or (name in _POSITIVE and item <= 0):
            least = "above 0 and " if name in _POSITIVE else ""
            long = isinstance(item, int) and abs(item) > 10**300
            got = "a number of hundreds of digits" if long else f"{item:.6g}"
            raise ValueError(f"{name} in {where} is {got}, wanted {least}at most {most:,}")


def _items(value: object) -> list[Any]:
    """The plain values in a value, a list or a mapping of them; deeper ones are refused by type."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _check_type(kind: Any, value: object, name: str, where: str) -> None:
    if isinstance(value, str | bool) and kind in (int, float):
        raise ValueError(f"{name} of {where} is {shown(value)}, wanted a number")
    for inner in value.items() if isinstance(value, Mapping) and is_dataclass(kind) else ():
        # pydantic would take true for 1, and a number in text for the number.
        if isinstance(inner[1], str | bool) and _is_number(kind, inner[0]):
            raise ValueError(f"{inner[0]} in {where} is {shown(inner[1])}, wanted a number")
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        option, problem = first_problem(error)
        raise ValueError(f"{option or name} in {where}: {problem[:200]}") from None


def _is_number(kind: Any, name: str) -> bool:
    """Whether the field of a dataclass takes numbers alone."""
    types = {item.name: str(item.type) for item in fields(kind)}
    return "int" in (found := types.get(name, "")) or "float" in found


def num_parameters(config: Mapping[str, Any]) -> int:
    """Parameters of the towers, at least: their blocks and tables, without towers by name."""
    vision, text = config.get("vision_cfg") or {}, config.get("text_cfg") or {}
    total = 0.0
    if not vision.get("timm_model_name") and "backbone" not in vision:
        width, layers = vision.get("width") or 768, vision.get("layers") or 12
        if isinstance(layers, int):
            total += layers * width**2 * (4 + 2 * (vision.get("mlp_ratio") or 4))
        else:
            total += sum(n * 17 * (width * 2**i) ** 2 for i, n in enumerate(layers))
    if text and not text.get("hf_model_name"):
        width, layers = text.get("width") or 512, text.get("layers") or 12
        total += layers * width**2 * (4 + 2 * (text.get("mlp_ratio") or 4))
        total += (text.get("vocab_size") or 49_408) * width
    return int(total)


def check_memory(config: Mapping[str, Any]) -> None:
    """Raises ValueError where the parameters alone do not fit into this machine's memory."""
    needed, there = 4 * num_parameters(config), _memory_bytes()
    if needed > there:
        raise ValueError(
            f"the model needs at least {needed / 2**30:,.0f} GiB for its parameters, this machine "
            f"has {there / 2**30:,.0f} GiB of memory: take a smaller model or a larger machine"
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_weights(config: Mapping[str, Any], file: Path) -> None:
    """Raises ValueError where a file of weights is too small for the model that is described."""
    number, size_bytes = num_parameters(config), file.stat().st_size
    if number > 2 * size_bytes:
        raise ValueError(
            f"the weights {file} do not load (they have {size_bytes:,} bytes, the model "
            f"{number:,} parameters): they are damaged, or of another model"
        )
