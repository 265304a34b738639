"""A CLIP or SigLIP model in the layout of Hugging Face transformers, for evaluation.

Models may come from strangers: only configurations of these two kinds are read, only safetensors,
only tokenizers that are data, and no code that comes with a model is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from mclclip import files
from mclclip.models import config_check, weights
from mclclip.models.tokenizer import PROBES, prove, tokens_of
from mclclip.models.weights import fetched, one_line, quiet
from mclclip.options import brief

PREFIX = "hf:"
"""Begins the name of such a model: ``hf:FOLDER`` or ``hf:ORG/NAME`` on the hub."""

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
# Keys by which transformers takes kernels, quantizers or Python from elsewhere.
_BRINGS_CODE = {
    "auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "quantization_config", "per_layer_config", "kernel_config",
}  # fmt: skip
_FILES = ("*.json", "*.txt", "*.model", "*.safetensors", "*.safetensors.index.json")


# By model_type, transformers' classes of the model, of its image processor, and of the tokenizers
# that are data without being fast ones.
_KINDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "clip": ("CLIPModel", "CLIPImageProcessor", ()),
    "siglip": ("SiglipModel", "SiglipImageProcessor", ("SiglipTokenizer",)),
}


@dataclass(frozen=True)
class ProcessedPixels:
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
    vocabulary: int
    lower: bool = False

    def __call__(self, texts: str | list[str]) -> Tensor:
        texts = [texts] if isinstance(texts, str) else list(texts)
        texts = [text.lower() for text in texts] if self.lower else texts
        length, where = self.context_length, f"in {self.tokenizer.name_or_path}"
        options = {"padding": "max_length", "truncation": True, "max_length": length}

        def own() -> Any:
            return self.tokenizer(texts, return_tensors="pt", **options)["input_ids"]

        tokens: Tensor = tokens_of(own, len(texts), length, self.vocabulary, where)
        return tokens


class TransformersModel(nn.Module):
    """A model of transformers, as an `Encoder` runs its stages: features are raw.

    CLIP's texts need no attention mask beside their causal one, since features are read at the end
    of the text; SigLIP was trained without one. ``lower``: texts are tokenised in lower case.
    """

    def __init__(self, model: Any, processor: Any, tokenizer: Any, lower: bool = False) -> None:
        super().__init__()
        self.model = model
        text = model.config.text_config
        self.embed_dim = int(
            getattr(model.config, "projection_dim", None)
            or getattr(text, "projection_size", None)
            or text.hidden_size
        )
        length, vocabulary = int(text.max_position_embeddings), int(text.vocab_size)
        self.tokenizer = _Tokens(tokenizer, length, vocabulary, lower)
        self.preprocess_val = ProcessedPixels(processor)

    def logit_scale(self) -> Tensor:
        """The multiplier of cosines, 0-dimensional or [1]."""
        scale: Tensor = self.model.logit_scale.exp()
        return scale

    def encode_image(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, E]."""
        return _rows(self.model.get_image_features(pixel_values=images))

    def encode_pooled(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, width], features before the projection (SigLIP has none)."""
        return _rows(self.model.vision_model(pixel_values=images))

    def encode_text(self, tokens: Tensor) -> Tensor:
        """[B, context] int64 -> [B, E]."""
        return _rows(self.model.get_text_features(input_ids=tokens))


def _rows(output: Any) -> Tensor:
    """Features [B, E]: transformers 4 returns them, transformers 5 an output that holds them."""
    return output if isinstance(output, Tensor) else output.pooler_output


def load(name: str) -> TransformersModel:
    """Loads ``hf:FOLDER`` or, from the hub or its cache, ``hf:ORG/NAME``, on the CPU in fp32.

    Raises FileNotFoundError where there are no files of a model, and ValueError where
    configuration, weights or tokenizer are not of a CLIP or SigLIP model, or not data alone.
    """
    directory = find(name)
    model_type = _check_config(files.read_model_json(directory / CONFIG), directory)
    model_class, image_class, tokenizer_classes = _KINDS[model_type]
    _check_weights(directory)
    preprocessor = directory / PREPROCESSOR
    record = files.read_model_json(preprocessor)
    if not isinstance(record, Mapping):
        raise ValueError(f"{preprocessor} is no mapping: it is no image processor of transformers")
    for field in ("size", "crop_size"):
        value = record.get(field, {})
        for side in value.values() if isinstance(value, Mapping) else [value]:
            config_check.check_numbers(side, "image_size", f"{field} of {preprocessor}")
    transformers = config_check.library()
    # Image processors are taken on Pillow, as the models were trained, where there are two.
    images = getattr(transformers, f"{image_class}Pil", None) or getattr(transformers, image_class)
    with silent(transformers):
        made = getattr(transformers, model_class)
        model = _read(f"the model in {directory}", lambda: _model(made, directory))
        processor = _read(str(preprocessor), lambda: images.from_pretrained(str(directory)))
        length = int(model.config.text_config.max_position_embeddings)
        tokenizer, lower = _tokenizer(transformers, tokenizer_classes, directory, length)
    weights.refuse_not_finite(model, str(directory))
    loaded = TransformersModel(model, processor, tokenizer, lower)
    _check_fit(loaded, directory)
    return loaded


def _check_fit(loaded: TransformersModel, directory: Path) -> None:
    """Raises ValueError where pixels or tokens are not what the model takes."""
    side = int(loaded.model.config.vision_config.image_size)
    wanted = (3, side, side)
    for size in ((40, 60), (90, 50)):
        pixels = tuple(loaded.preprocess_val(Image.new("RGB", size)).shape)
        if pixels != wanted:
            raise ValueError(
                f"{directory / PREPROCESSOR} makes pixels of shape {pixels}, the model takes "
                f"{wanted}: correct its size and crop_size"
            )
    words, known = len(loaded.tokenizer.tokenizer), loaded.model.config.text_config.vocab_size
    if words > known:
        raise ValueError(
            f"the tokenizer in {directory} has {words:,} tokens, the model {known:,}: it is of "
            "another model"
        )
    loaded.tokenizer([*PROBES])


@contextmanager
def silent(transformers: Any) -> Iterator[None]:
    """Keeps the library's reports and progress bars from the terminal."""
    library = transformers.utils.logging
    verbosity, with_bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity(library.CRITICAL)
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if with_bars:
            library.enable_progress_bar()


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


def files_of(directory: Path) -> list[Path]:
    """The files that decide what a model in ``directory`` answers, by name."""
    return sorted({path for pattern in _FILES for path in directory.glob(pattern)})


def _check_config(config: object, directory: Path) -> str:
    """The `model_type`. Raises ValueError for another one, what can bring code, and sizes."""
    where = str(directory / CONFIG)
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} is no mapping: it is no model of transformers")
    if config.get("model_type") not in _KINDS:
        raise ValueError(
            f"model_type in {where} is {brief(config.get('model_type'))}, wanted one of "
            f"{', '.join(_KINDS)}: other models need an export of their own"
        )
    for name in ("vision_config", "text_config"):
        if not isinstance(config.get(name), Mapping):
            raise ValueError(f"{where} has no {name}: save the model of both towers")
    for name, part in (("", config), *((n, config[n]) for n in ("vision_config", "text_config"))):
        what = f"{name} of {where}" if name else where
        if brought := sorted(_BRINGS_CODE & {*map(str, part)}):
            raise ValueError(
                f"{what} has {brought[0]}, which can bring code of others: take it out if the "
                "model works without"
            )
        for key, value in part.items():
            if not isinstance(value, Mapping):
                config_check.check_numbers(value, str(key), what)
    # Under open_clip's names; sizes left out have transformers' defaults, which are not above its.
    names = {"width": "hidden_size", "layers": "num_hidden_layers", "vocab_size": "vocab_size"}
    sizes = {
        own: {
            n: config[theirs][k] for n, k in names.items() if isinstance(config[theirs].get(k), int)
        }
        for own, theirs in (("vision_cfg", "vision_config"), ("text_cfg", "text_config"))
    }
    config_check.check_memory(sizes)
    return str(config["model_type"])


def _check_weights(directory: Path) -> None:
    """Raises ValueError for weights that are no safetensors in this folder, or an adapter's."""
    found = [*directory.glob("*.safetensors")]
    for path in found:
        weights.check_header(path)
    if not found:
        raise ValueError(
            f"{directory} has no *.safetensors: save the model with transformers' save_pretrained, "
            "since files of other kinds could run code"
        )
    if (directory / "adapter_config.json").exists():
        raise ValueError(f"{directory} holds an adapter: merge it into its model, and save that")
    index = directory / "model.safetensors.index.json"
    if index.exists():
        record = files.read_model_json(index)
        names = record.get("weight_map") if isinstance(record, Mapping) else None
        inside = {path.name for path in found}
        if not isinstance(names, Mapping) or not {*map(str, names.values())} <= inside:
            raise ValueError(f"{index} names files outside of its folder: save the model again")


def _model(made: Any, directory: Path) -> Any:
    with torch.device("meta"):  # its size, before memory is taken for what files do not hold
        described = made(made.config_class.from_pretrained(str(directory), local_files_only=True))
    wanted, held = sum(parameter.numel() for parameter in described.parameters()), 0
    for path in directory.glob("*.safetensors"):
        with weights.open_tensors(path) as file:
            held += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    if wanted > held:
        raise ValueError(
            f"the configuration describes {wanted:,} parameters, and the weights hold {held:,}"
        )
    model, report = made.from_pretrained(
        str(directory),
        use_safetensors=True,
        output_loading_info=True,
        torch_dtype=torch.float32,
        local_files_only=True,
        attn_implementation="eager",
    )
    # transformers only warns of these, and fills them at random.
    missing = sorted(name for name in report["missing_keys"] if "position_ids" not in name)
    if missing:
        raise ValueError(f"the weights have no {missing[0]} and {len(missing) - 1} others")
    return model


def _tokenizer(
    transformers: Any, classes: tuple[str, ...], directory: Path, context_length: int
) -> tuple[Any, bool]:
    """The tokenizer, and whether texts must be made lower case first: SigLIP 2 was trained on lower
    case, but its tokenizer (Gemma's) leaves texts as they are."""
    path = directory / config_check.TOKENIZER_CONFIG
    record = files.read_model_json(path) if path.is_file() else {}
    name = record.get("tokenizer_class") if isinstance(record, Mapping) else None
    own = name in classes and "auto_map" not in record
    if not own:
        config_check.check_tokenizer_files(directory)
    loader = str(name) if own else "AutoTokenizer"
    prove(directory, context_length, loader)
    load = getattr(transformers, loader).from_pretrained
    # With an empty configuration, transformers does not look in config.json for other classes.
    options = {} if own else {"config": transformers.PretrainedConfig()}
    found = _read(f"the tokenizer in {directory}", lambda: load(str(directory), **options))
    return found, str(name).startswith("Gemma")


def _read(what: str, load: Any) -> Any:
    try:
        with quiet():
            return load()
    except Exception as error:  # of any kind: the files are the cause
        raise ValueError(f"transformers cannot load {what} ({one_line(error)})") from error
