"""Refuses model configurations that could load Python code of their own.

Models may come from strangers: as a directory, from the hub, as a JSON file. open_clip passes parts
of their configuration to transformers and timm. transformers runs Python files beside a tokenizer
if `trust_remote_code` is true, and asks at the terminal if the option is not set. So the following
is refused before open_clip sees the configuration:

- `trust_remote_code`, and every other option of tokenizers that open_clip's own configurations do
  not set;
- tokenizers and text towers that none of open_clip's own configurations names, and folders of the
  same name, which transformers would read instead of the hub;
- image towers that timm does not list itself, such as `hf-hub:...`;
- tokenizer files in a model directory that name code, or a class that is no fast tokenizer: fast
  tokenizers consist of data alone.

Every mistake is a ValueError of one line.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from typing import Any

import mclclip.torchvision_fix  # noqa: F401

# isort: split
import timm

from mclclip import files
from mclclip.options import nearest, shown

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class Allowed:
    """Names in open_clip's own configurations: tokenizers and text towers of the hub, and the
    options of tokenizers that they set."""

    tokenizers: frozenset[str]
    text_towers: frozenset[str]
    options: frozenset[str]


def names_in(configs: Iterable[Mapping[str, Any]]) -> Allowed:
    """Collects what open_clip model configs (`embed_dim`, `vision_cfg`, `text_cfg`) name."""
    texts = [config["text_cfg"] for config in configs]
    return Allowed(
        frozenset(text["hf_tokenizer_name"] for text in texts if text.get("hf_tokenizer_name")),
        frozenset(text["hf_model_name"] for text in texts if text.get("hf_model_name")),
        frozenset(name for text in texts for name in text.get("tokenizer_kwargs") or {}),
    )


def check(model_cfg: object, allowed: Allowed, where: str) -> None:
    """Raises ValueError where a model config may bring code; `where` says whose config it is."""
    config = _mapping(model_cfg, f"model_cfg of {where}")
    vision, text = (
        _mapping(config.get(key), f"{key} of {where}") for key in ("vision_cfg", "text_cfg")
    )
    _check_image_tower(vision.get("timm_model_name"), where)
    for key, names in (
        ("hf_tokenizer_name", allowed.tokenizers),
        ("hf_model_name", allowed.text_towers),
    ):
        if text.get(key):
            _check_name(text[key], names, key, where)
    if text.get("hf_model_name"):
        check_hub_name(text["hf_model_name"])
    _check_options(text.get("tokenizer_kwargs") or {}, allowed.options, where)


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {type(value).__name__}, wanted a mapping: export it again")
    return value


def _check_image_tower(name: object, where: str) -> None:
    """Refuses names that timm does not list: it would also load `hf-hub:` and `local-dir:`."""
    listed = isinstance(name, str) and timm.is_model(name) and not set(name) & set(":/\\")
    if name and not listed:
        raise ValueError(
            f"vision_cfg.timm_model_name of {where} is {shown(name)}, which timm does not list: "
            "use one of timm.list_models()"
        )


def _check_name(name: object, allowed: frozenset[str], key: str, where: str) -> None:
    if isinstance(name, str) and name in allowed:
        return
    near = nearest(str(name), allowed)
    raise ValueError(
        f"text_cfg.{key} of {where} is {shown(name)}, which no model of open_clip's own has "
        f"(nearest: {', '.join(near)}): use one of theirs, any other could bring code"
    )


def _check_options(options: object, allowed: frozenset[str], where: str) -> None:
    found = _mapping(options, f"text_cfg.tokenizer_kwargs of {where}")
    if found.get("trust_remote_code"):
        raise ValueError(
            f"text_cfg.tokenizer_kwargs of {where} has trust_remote_code, which runs Python that "
            "comes with the model: mclclip never does, take it out if the model works without"
        )
    if strange := sorted(set(map(str, found)) - allowed):
        raise ValueError(
            f"text_cfg.tokenizer_kwargs of {where} has {', '.join(strange)[:200]}, wanted only "
            f"{', '.join(sorted(allowed))}: take the others out"
        )


def check_hub_name(name: str) -> None:
    """Raises ValueError where transformers would read a folder instead of the hub's `name`."""
    if Path(name).exists():
        raise ValueError(
            f"{name!r} is meant to come from the hub, but {Path(name).resolve()} would be read "
            "instead: start from another directory"
        )


def check_tokenizer_files(directory: Path) -> None:
    """Raises ValueError where the tokenizer in a model directory is more than data.

    Raises FileNotFoundError where there is none.
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
    name = record.get("tokenizer_class")
    if not isinstance(name, str) or not _is_fast(name):
        raise ValueError(
            f"tokenizer_class in {path} is {shown(name)}, wanted a fast tokenizer of transformers "
            "(such as PreTrainedTokenizerFast): save the tokenizer as one"
        )


def _is_fast(name: str) -> bool:
    """Whether transformers has a fast tokenizer of this name, or of this name with "Fast" added.

    A tokenizer's files may name the slow class; transformers then loads the fast one.
    """
    transformers = library()
    known = (getattr(transformers, name + suffix, None) for suffix in ("", "Fast"))
    fast = transformers.PreTrainedTokenizerFast
    return any(inspect.isclass(found) and issubclass(found, fast) for found in known)


def library() -> Any:
    """The transformers module. Raises ValueError where it is not installed."""
    if util.find_spec("transformers") is None:
        raise ValueError("the model's tokenizer needs transformers: pip install transformers")
    return import_module("transformers")
