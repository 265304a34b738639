"""A CLIP or SigLIP model in the layout of Hugging Face transformers, for evaluation.

Models may come from strangers: only configurations of these two kinds are read, only safetensors,
only tokenizers that are data, and no code that comes with a model is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from mclclip import files
from mclclip.models import config_check, config_limits
from mclclip.models.hub import fetched, one_line, quiet
from mclclip.models.image_model import unit
from mclclip.options import shown

PREFIX = "hf:"
"""Begins the name of such a model: ``hf:FOLDER`` or ``hf:ORG/NAME`` on the hub."""

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
_FILES = ("*.json", "*.txt", "*.model", "*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True)
class _Kind:
    """The classes of transformers for one ``model_type``."""

    model: str
    images: str
    tokenizers: tuple[str, ...] = ()  # those that are data without being fast ones


KINDS = {
    "clip": _Kind("CLIPModel", "CLIPImageProcessor"),
    "siglip": _Kind("SiglipModel", "SiglipImageProcessor", ("SiglipTokenizer",)),
}


@dataclass(frozen=True)
class _Pixels:
    """Image -> [3, H, W], by the model's own image processor."""

    processor: Any

    def __call__(self, image: Any) -> Tensor:
        if not isinstance(image, Image.Image):
            raise ValueError("a model of transformers takes pictures, and this is an array")
        found = self.processor(images=image.convert("RGB"), return_tensors="pt")
        pixels: Tensor = found["pixel_values"][0]
        return pixels


@dataclass(frozen=True)
class _Tokens:
    """List of N strings -> int64 [N, context], padded as the model was trained."""

    tokenizer: Any
    context_length: int

    def __call__(self, texts: str | list[str]) -> Tensor:
        texts = [texts] if isinstance(texts, str) else list(texts)
        found = self.tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=self.context_length,
            return_tensors="pt",
        )
        tokens: Tensor = found["input_ids"]
        return tokens


class TransformersEncoder(nn.Module):
    """A model of transformers as an ``Encoder``, frozen and in eval mode.

    CLIP's texts need no attention mask beside their causal one, since features are read at the end
    of the text; SigLIP was trained without one.
    """

    def __init__(self, model: Any, processor: Any, tokenizer: Any) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        text = model.config.text_config
        self.embed_dim = int(
            getattr(model.config, "projection_dim", None)
            or getattr(text, "projection_size", None)
            or text.hidden_size
        )
        self.logit_scale = model.logit_scale.exp().item()
        self.tokenizer = _Tokens(tokenizer, int(text.max_position_embeddings))
        self.preprocess_val = _Pixels(processor)
        self.eval()

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.parameters()).device

    @torch.no_grad()
    def encode_image(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> unit [B, E]."""
        return unit(_rows(self.model.get_image_features(pixel_values=images.to(self.device))))

    @torch.no_grad()
    def encode_pooled(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> unit [B, width], features before the projection (SigLIP has none)."""
        return unit(self.model.vision_model(pixel_values=images.to(self.device)).pooler_output)

    @torch.no_grad()
    def encode_text(self, tokens: Tensor) -> Tensor:
        """[B, context] int64 -> unit [B, E]."""
        return unit(_rows(self.model.get_text_features(input_ids=tokens.to(self.device))))


def _rows(found: Any) -> Tensor:
    """Features [B, E]: transformers 4 returns them, transformers 5 an output that holds them."""
    rows: Tensor = found if isinstance(found, Tensor) else found.pooler_output
    return rows


def load(name: str) -> TransformersEncoder:
    """Loads ``hf:FOLDER`` or, from the hub or its cache, ``hf:ORG/NAME``, on the CPU in fp32.

    Raises FileNotFoundError where there are no files of a model, and ValueError where
    configuration, weights or tokenizer are not of a CLIP or SigLIP model, or not data alone.
    """
    directory = find(name)
    config = files.read_model_json(directory / CONFIG)
    kind = _check_config(config, directory)
    if not any(directory.glob("*.safetensors")):
        raise ValueError(
            f"{directory} has no *.safetensors: save the model with transformers' save_pretrained, "
            "since files of other kinds could run code"
        )
    transformers = config_check.library()
    model = _read(f"the model in {directory}", lambda: _model(transformers, kind, directory))
    _check_preprocessor(directory / PREPROCESSOR)
    images = _class(transformers, kind.images)
    processor = _read(f"{directory / PREPROCESSOR}", lambda: images.from_pretrained(str(directory)))
    return TransformersEncoder(model, processor, _tokenizer(transformers, kind, directory))


def find(name: str) -> Path:
    """The folder of a model; a name of the hub is downloaded, or found in the cache."""
    where = name.removeprefix(PREFIX)
    directory = Path(where)
    if not directory.is_dir():
        if where.count("/") != 1 or where.startswith((".", "/", "~")):
            raise FileNotFoundError(
                f"no folder {where}: give hf:FOLDER, or hf:ORG/NAME of a model on the hub"
            )
        from huggingface_hub import snapshot_download

        what = f"the files of {where!r}"
        directory = Path(fetched(what, lambda: snapshot_download(where, allow_patterns=[*_FILES])))
    for file in (CONFIG, PREPROCESSOR):
        if not (directory / file).is_file():
            raise FileNotFoundError(
                f"{directory} has no {file}: a model of transformers has one, an export of "
                f"mclclip or open_clip is named without {PREFIX}"
            )
    return directory


def _check_config(config: object, directory: Path) -> _Kind:
    where = str(directory / CONFIG)
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} is no mapping: it is no model of transformers")
    if config.get("model_type") not in KINDS:
        raise ValueError(
            f"model_type in {where} is {shown(config.get('model_type'))}, wanted one of "
            f"{', '.join(KINDS)}: other models need an export of their own"
        )
    parts = {}
    for name in ("vision_config", "text_config"):
        part = config.get(name)
        if not isinstance(part, Mapping):
            raise ValueError(f"{where} has no {name}: save the model of both towers")
        for key, value in part.items():
            config_limits.check_numbers(value, str(key), f"{name} of {where}")
        parts[name] = part
    if "auto_map" in config:
        raise ValueError(f"{where} has auto_map, which names Python that mclclip never runs")
    vision, text = parts["vision_config"], parts["text_config"]
    config_limits.check_memory({"vision_cfg": _sizes(vision), "text_cfg": _sizes(text)})
    return KINDS[str(config["model_type"])]


def _check_preprocessor(path: Path) -> None:
    record = files.read_model_json(path)
    if not isinstance(record, Mapping):
        raise ValueError(f"{path} is no mapping: it is no image processor of transformers")
    for name in ("size", "crop_size"):
        value = record.get(name, {})
        for side in value.values() if isinstance(value, Mapping) else [value]:
            config_limits.check_numbers(side, "image_size", f"{name} of {path}")


def _sizes(part: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a tower under open_clip's names; those left out have transformers' defaults,
    which are not above open_clip's."""
    names = {"width": "hidden_size", "layers": "num_hidden_layers", "vocab_size": "vocab_size"}
    return {own: part[other] for own, other in names.items() if isinstance(part.get(other), int)}


def _model(transformers: Any, kind: _Kind, directory: Path) -> Any:
    model, found = getattr(transformers, kind.model).from_pretrained(
        str(directory),
        use_safetensors=True,
        output_loading_info=True,
        torch_dtype=torch.float32,
        local_files_only=True,
    )
    # transformers only warns of these, and fills them at random.
    missing = sorted(name for name in found["missing_keys"] if "position_ids" not in name)
    if missing:
        raise ValueError(f"the weights have no {missing[0]} and {len(missing) - 1} others")
    return model


def _tokenizer(transformers: Any, kind: _Kind, directory: Path) -> Any:
    path = directory / config_check.TOKENIZER_CONFIG
    record = files.read_model_json(path) if path.is_file() else {}
    name = record.get("tokenizer_class") if isinstance(record, Mapping) else None
    if name in kind.tokenizers and "auto_map" not in record:
        load = _class(transformers, str(name)).from_pretrained
    else:
        config_check.check_tokenizer_files(directory)
        load = transformers.AutoTokenizer.from_pretrained
    # With an empty configuration, transformers does not look in config.json for other classes.
    options = {} if name in kind.tokenizers else {"config": transformers.PretrainedConfig()}
    return _read(f"the tokenizer in {directory}", lambda: load(str(directory), **options))


def _class(transformers: Any, name: str) -> Any:
    """A class of transformers; image processors are taken on Pillow, as the models were trained,
    where transformers has two of them."""
    return getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)


def _read(what: str, load: Any) -> Any:
    try:
        with quiet():
            return load()
    except Exception as error:  # of any kind: the files are the cause
        raise ValueError(f"transformers cannot load {what} ({one_line(error)})") from error
