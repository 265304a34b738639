"""Finds and builds open_clip's models by name, directory or config; the only importer of open_clip.

Models may come from strangers: weights load through safetensors or `torch.load(weights_only=True)`
alone, and `config_check` refuses configurations that could bring code.
"""

import copy
import functools
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip
from open_clip.convert import convert_state_dict
from open_clip.model import CLIPTextCfg, CLIPVisionCfg, convert_to_custom_text_state_dict
from open_clip.modified_resnet import ModifiedResNet
from open_clip.pretrained import download_pretrained_from_hf
from open_clip.timm_model import TimmModel
from open_clip.tokenizer import DEFAULT_CONTEXT_LENGTH, HFTokenizer, SimpleTokenizer, get_clean_fn
from open_clip.transform import PreprocessCfg, image_transform_v2
from open_clip.transformer import VisionTransformer

from mclclip.models import (
    backbones,
    config_check,
    state_dicts,
    tokenizer,
    towers,
    transformers_folder,
    transforms,
    weights,
)
from mclclip.models.image_size import set_image_size
from mclclip.models.row_projection import WIDTH
from mclclip.models.weights import fetch_quietly, one_line, quiet
from mclclip.util import files
from mclclip.util.options import first_few, nearest

_KINDS = (CLIPVisionCfg, CLIPTextCfg, PreprocessCfg)
_BIG_VISION = (".npz", ".npy")  # weights of SigLIP's authors, which open_clip reads
# Texts on which a stranger's tokenizer is tried: an empty one, and one longer than any context.
_PROBES = ("", "A photo of 2 dogs: the quick brown fox jumps over the lazy dog. " * 200)

IMAGENET_NAMES: tuple[str, ...] = tuple(open_clip.IMAGENET_CLASSNAMES)
"""CLIP's names of ImageNet-1k's classes, in the order of their sorted WordNet ids."""
IMAGENET_TEMPLATES = tuple(str(prompt("{}")) for prompt in open_clip.OPENAI_IMAGENET_TEMPLATES)
"""CLIP's 80 prompts for ImageNet, with {} for the name of a class."""
RECOMMENDED_TEMPLATES = tuple(str(prompt("{}")) for prompt in open_clip.SIMPLE_IMAGENET_TEMPLATES)
"""Seven of these 80 prompts, which do best together according to CLIP's authors."""


def clean_caption(text: str) -> str:
    """Cleans a text as CLIP's tokenizer does: repairs it by ftfy, resolves HTML entities, joins its
    words by single spaces, and turns it into lower case."""
    return str(get_clean_fn("lower")(text))


def find(
    name: str | Path | Mapping[str, Any],
    pretrained: str | None = None,
    load_weights: bool = True,
) -> tuple[dict[str, Any], Path | None, Path | None]:
    """Finds a model; returns its checked configuration, its weights, and its directory.

    The configuration has `model_cfg` and perhaps `preprocess_cfg`. The weights are a file, the
    folder of a transformers model, or None. The directory holds the files of the model's tokenizer;
    it is None for a model that has no directory. Raises the errors of `loading.load_towers` about
    these.
    """
    whose, directory = "the model config" if isinstance(name, Mapping) else str(name), None
    label = whose.removeprefix("local-dir:")
    if whose.startswith(transformers_folder.PREFIX):
        refuse_pretrained(whose, pretrained)
        directory = transformers_folder.find(whose)
        words = _simple_tokenizer(context_length=DEFAULT_CONTEXT_LENGTH)
        config = transformers_folder.read_config(directory, words)
        file = directory if load_weights else None
    elif isinstance(name, Mapping) or whose.endswith(".json"):
        config, file = weights.read_model_config(name), _weights_file(pretrained, whose)
        config = _completed(config, whose, file)
    elif whose.startswith("local-dir:") or os.path.isdir(label):
        refuse_pretrained(whose, pretrained)
        directory = Path(label)
        weights.check_recorded(directory, load_weights=load_weights)
        config = weights.read_config(directory)
        file = weights.find_weights(directory) if load_weights else None
    elif label.startswith("hf-hub:"):
        refuse_pretrained(label, pretrained)
        where, fetch = label.removeprefix("hf-hub:"), download_pretrained_from_hf
        path = fetch_quietly(f"the config of {label!r}", lambda: fetch(where, weights.CONFIG))
        file = Path(fetch_quietly(f"the weights of {label!r}", lambda: fetch(where)))
        config = weights.read_config(Path(path).parent)
    elif not os.path.exists(label) and (label.startswith((".", "/", "~")) or label.count("/") > 1):
        raise FileNotFoundError(f"no model at {label}: give an exported directory or a name")
    else:
        config, file = _of_open_clip(label.replace("/", "-"), whose, pretrained)
    config_check.check(config, _published(), _KINDS, whose)
    return config, file, directory


@functools.cache
def _published() -> list[dict[str, Any]]:
    """Returns the model configs that open_clip ships."""
    return [open_clip.get_model_config(name) for name in open_clip.list_models()]


def _of_open_clip(
    label: str, name: str, pretrained: str | None
) -> tuple[dict[str, Any], Path | None]:
    """Returns the config and the weights file (None without weights) of open_clip's model `label`;
    `name` is what the user typed, for messages."""
    if (model_cfg := open_clip.get_model_config(label)) is None:
        twin, near = _twin(name), ", ".join(nearest(label, open_clip.list_models()))
        hint = f"open_clip calls this model {twin}: give that" if twin else f"nearest: {near}"
        if os.path.isfile(name):
            hint = f"weights are given with their architecture, such as ViT-B-32@{name}"
        raise ValueError(
            f"{name!r} is neither a directory nor an open_clip model ({hint}): give a name of "
            "open_clip, local-dir:PATH or a JSON model config"
        )
    tag = open_clip.get_pretrained_cfg(label, pretrained) if pretrained else {}
    if not tag:
        file = _weights_file(pretrained, label)
        return _completed({"model_cfg": model_cfg}, label, file), file
    _check_gelu(model_cfg, label, bool(tag.get("quick_gelu")), f"the weights {pretrained!r}")
    what = f"the weights {pretrained!r} of {label!r}"
    file = fetch_quietly(what, lambda: open_clip.download_pretrained(tag))
    return {"model_cfg": model_cfg, "preprocess_cfg": dict(tag)}, Path(file)


def _check_gelu(model_cfg: Mapping[str, Any], label: str, quick_gelu: bool, whose: str) -> None:
    """Raises ValueError if weights were trained with another activation than the model has.

    open_clip only warns of this, and every feature would be slightly wrong.
    """
    got = bool(model_cfg.get("quick_gelu"))
    if quick_gelu == got or model_cfg["vision_cfg"].get("timm_model_name"):
        return
    other = f"{label}-quickgelu" if quick_gelu else label.removesuffix("-quickgelu")
    listed = other in open_clip.list_models()
    advice = f"use the model {other!r}" if listed else f"set quick_gelu: {str(quick_gelu).lower()}"
    raise ValueError(
        f"{whose} were trained with quick_gelu={quick_gelu}, but {label!r} has quick_gelu={got}: "
        f"{advice}"
    )


def _completed(config: dict[str, Any], label: str, file: Path | None) -> dict[str, Any]:
    """Returns the configuration with the fields that the weights' tensors show (see
    `state_dicts.complete_config`). Raises ValueError if the weights, or files beside them, say that
    they were trained with another activation."""
    model_cfg = config["model_cfg"]
    text_cfg = model_cfg.get("text_cfg")
    is_clip = "vision_cfg" in model_cfg and isinstance(text_cfg, Mapping) and WIDTH not in text_cfg
    if file is None or not is_clip or file.suffix in _BIG_VISION:
        return config
    with _loading(file):
        tensors = state_dicts.read(file, "meta")
    recorded = state_dicts.recorded_quick_gelu(file, tensors)
    if recorded is not None:
        _check_gelu(model_cfg, label, recorded, f"the weights {file}")
    return {**config, "model_cfg": state_dicts.complete_config(model_cfg, tensors, file)}


_TWINS = re.compile(
    r"(?:.*/)?(clip-vit|siglip2?)-(base|large|huge|so400m|giant-opt)-patch(\d+)(?:-(\d+))?",
    re.IGNORECASE,
)
_SIZES = {"base": "B", "large": "L", "huge": "H", "so400m": "SO400M", "giant-opt": "gopt"}


def _twin(name: str) -> str | None:
    """Returns open_clip's name of a model that others call ``name``; None if there is none.

    ``name`` may be a name of transformers (``openai/clip-vit-base-patch32`` gives
    ``ViT-B-32-quickgelu@openai``), a repository on the hub, or a name in upper or lower case.
    """
    models: dict[str, str] = {model.lower(): model for model in open_clip.list_models()}
    if same := models.get(name.replace("/", "-").lower()):
        return same
    if parts := _TWINS.fullmatch(name):
        kind, size, patch, side = parts.groups()
        side = "" if side in (None, "224") else f"-{side}"
        kinds = {"clip-vit": "", "siglip": "-SigLIP", "siglip2": "-SigLIP2"}
        model = f"ViT-{_SIZES[size.lower()]}-{patch}{kinds[kind.lower()]}{side}"
        if kind.lower() == "clip-vit":
            model += "-quickgelu"
        tags = open_clip.list_pretrained_tags_by_model(model)
        return f"{model}@{tags[0]}" if tags else None
    for model, tag in open_clip.list_pretrained():
        repository = open_clip.get_pretrained_cfg(model, tag).get("hf_hub") or ""
        if repository.rstrip("/").lower() == name.lower():
            return f"{model}@{tag}"
    return None


def refuse_pretrained(name: str, pretrained: str | None) -> None:
    """Raises ValueError if ``pretrained`` names weights for a model that brings its own."""
    if pretrained:
        raise ValueError(
            f"pretrained is {pretrained!r}, but {name!r} brings its own weights: leave it out"
        )


def check_tag(name: str, tag: str) -> None:
    """Raises ValueError unless ``tag`` is a file, or a tag of open_clip's weights for the model
    ``name`` that were trained with the model's activation."""
    label = name.replace("/", "-")
    if cfg := open_clip.get_pretrained_cfg(label, tag):
        model_cfg, quick = open_clip.get_model_config(label), bool(cfg.get("quick_gelu"))
        _check_gelu(model_cfg, label, quick, f"the weights {tag!r}")
    else:
        _weights_file(tag, name)


def _weights_file(pretrained: str | None, name: str) -> Path | None:
    if not pretrained:
        return None
    if not Path(pretrained).is_file():
        raise ValueError(
            f"pretrained is {pretrained!r}, which is neither a file nor a tag of {name!r} "
            f"(tags: {tags(name)})"
        )
    return Path(pretrained)


def tags(name: str) -> str:
    """Lists open_clip's tags of weights for an architecture, for messages.

    For example ``openai, laion400m_e31 and 9 more``: at most eight are named. ``none`` if there are
    none.
    """
    tags = open_clip.list_pretrained_tags_by_model(name.replace("/", "-"))
    return first_few(tags, 8) or "none"


def is_without_weights(name: str | Path | Mapping[str, Any]) -> bool:
    """Returns True if a name stands for an architecture without weights: a name of open_clip's
    without a tag, or a model config."""
    if isinstance(name, Mapping) or str(name).endswith(".json"):
        return True
    return not os.path.isdir(name) and str(name).replace("/", "-") in open_clip.list_models()


class _CheckedTokenizer(HFTokenizer):  # type: ignore[misc]  # open_clip has no types
    """A tokenizer from the files beside a model, which may come from a stranger."""

    def __init__(self, directory: Path, vocabulary: int, kind: str, **options: Any) -> None:
        self._vocabulary, self._name = vocabulary, f"the tokenizer in {directory}"
        library = config_check.library()
        if kind == config_check.FAST:  # open_clip's AutoTokenizer would load the slow one
            self.tokenizer_mode, self.strip_sep_token = "", False
            self.context_length = options["context_length"]
            self.clean_fn = get_clean_fn(options.get("clean", "whitespace"))
            self.tokenizer = getattr(library, kind).from_pretrained(str(directory))
            return
        # With an empty configuration, transformers does not look in config.json for other classes.
        config = library.PretrainedConfig()
        super().__init__(str(directory), config=config, **options)

    def __call__(self, texts: str | list[str], context_length: int | None = None) -> torch.Tensor:
        """N strings -> int64 [N, context]. Raises ValueError, one line, if the tokenizer fails, or
        makes tokens of another shape, or ids that the text tower does not know, which would end in
        an index error."""
        shape = [1 if isinstance(texts, str) else len(texts), context_length or self.context_length]
        try:
            tokens = super().__call__(texts, context_length)
        except BaseException as error:
            # A panic of the library, which is written in Rust, is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{self._name} fails on a text ({one_line(error)})") from error
        problem = ""
        if [*tokens.shape] != shape:
            problem = f"tokens of shape {[*tokens.shape]}, wanted {shape}"
        elif tokens.numel() and not 0 <= tokens.min() <= tokens.max() < self._vocabulary:
            ids = f"ids from {int(tokens.min()):,} to {int(tokens.max()):,}"
            problem = f"{ids}, the text tower knows those below {self._vocabulary:,}"
        if problem:
            raise ValueError(f"{self._name} makes {problem}: it is of another model")
        return cast(torch.Tensor, tokens)


def vocabulary(clip: Any) -> int:
    """Returns the number of token ids that the text tower of a CLIP module has embeddings for."""
    text = getattr(clip, "text", clip)
    table = getattr(text, "token_embedding", None) or text.transformer.get_input_embeddings()
    return int(table.num_embeddings)


def tokenizer_of(text_cfg: Mapping[str, Any], directory: Path | None, vocabulary: int) -> Any:
    """Makes the tokenizer that a `text_cfg` describes, never with code that comes with it.

    As in open_clip, a Hugging Face tokenizer is read from the files in the model's `directory`, or,
    if these are missing, from the hub by its name; from the hub it is fetched when the first text
    is tokenised. `vocabulary` is the number of ids that the text tower knows.
    """
    length = text_cfg.get("context_length", DEFAULT_CONTEXT_LENGTH)
    options = {"context_length": length} | (text_cfg.get("tokenizer_kwargs") or {})
    name = text_cfg.get("hf_tokenizer_name")
    if not name:
        simple = copy.copy(_make_tokenizer(functools.partial(_simple_tokenizer, **options)))
        tokenizer.WordEncoder(simple, options.get("clean", "lower"))
        return simple
    options |= {"tokenizer_mode": text_cfg.get("tokenizer_mode"), "trust_remote_code": False}
    if directory is None or not (directory / config_check.TOKENIZER_CONFIG).is_file():
        return tokenizer.LazyTokenizer(functools.partial(_hub_tokenizer, name, options), length)
    config_check.library()
    kind = config_check.tokenizer_class(directory)
    checked = _make_tokenizer(
        functools.partial(_CheckedTokenizer, directory, vocabulary, kind, **options)
    )
    with torch.device("cpu"):  # a plan makes models on "meta", where ids have no values
        checked([*_PROBES])
    return checked


@functools.lru_cache(maxsize=4)
def _simple_tokenizer(**options: Any) -> Any:
    """Returns CLIP's own tokenizer; cached, since reading its table takes longer than building a
    small model."""
    return SimpleTokenizer(**options)


def _hub_tokenizer(name: str, options: Mapping[str, Any]) -> Any:
    config_check.library()
    return fetch_quietly(f"the tokenizer files of {name!r}", lambda: HFTokenizer(name, **options))


def _make_tokenizer(make: Callable[[], Any]) -> Any:
    try:
        with quiet():
            return make()
    except Exception as error:  # the libraries raise any kind for a wrong config or wrong files
        raise ValueError(f"open_clip cannot make the tokenizer ({one_line(error)})") from error


def build(config: Mapping[str, Any], seed: int, random_text: bool) -> Any:
    """Builds open_clip's module of a configuration, with random weights drawn by `seed`.

    `random_text=False` fetches the weights of a text tower that lies on the hub, as open_clip does.
    Raises ValueError if open_clip cannot build the module.
    """
    with tempfile.TemporaryDirectory() as folder, quiet(), torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed the GPUs, which fork_rng does not restore here.
        torch.default_generator.manual_seed(seed)
        weights.write_config(Path(folder), config)
        try:
            clip = open_clip.create_model(
                f"local-dir:{folder}",
                load_weights=False,
                pretrained_text=not random_text,
                nonscalar_logit_scale=True,
            )
        except Exception as error:  # open_clip raises any kind for a wrong config
            raise ValueError(f"open_clip cannot build the model ({one_line(error)})") from error
    with torch.random.fork_rng(devices=[]):  # timm draws tables of relative positions
        set_image_size(clip.visual)
    return clip.float()  # whatever torch's default dtype is


def fill(clip: Any, file: Path) -> None:
    """Loads a file of weights into a whole model.

    Raises ValueError for a file that holds code, is damaged, or belongs to another model.
    """
    with _loading(file), quiet():
        if file.is_dir():
            transformers_folder.fill(clip, file)
            return
        if file.suffix in _BIG_VISION:
            open_clip.load_checkpoint(clip, str(file))
            weights.refuse_not_finite(clip, str(file))
            return
        tensors = convert_state_dict(clip, state_dicts.read(file))
        if not hasattr(clip, "positional_embedding"):
            tensors = convert_to_custom_text_state_dict(tensors)
    state_dicts.fill(clip, tensors, str(file))


@contextmanager
def _loading(file: Path) -> Iterator[None]:
    """Turns every error inside the block into a ValueError of one line about the weights ``file``.

    torch raises many kinds of errors for a file that is damaged, holds code, or does not fit.
    """
    try:
        yield
    except Exception as error:
        cause = files.message_of(error, 900) if type(error) is ValueError else one_line(error)
        raise ValueError(f"the weights {file} do not load ({cause})") from error


def layout_of(visual: nn.Module) -> towers.ImageLayout | str:
    """Returns the layout of an image tower, or why it cannot be split or locked."""
    for kind, make in (
        (VisionTransformer, towers.vision_transformer_layout),
        (ModifiedResNet, towers.resnet_layout),
        (TimmModel, backbones.timm_layout),
        (backbones.BackboneTower, backbones.backbone_layout),
    ):
        if isinstance(visual, kind):
            return towers.layout_or_reason(visual, make)
    return (
        f"the image tower is a {type(visual).__name__}, which cannot be split or locked: use "
        "another model"
    )


def transforms_of(
    visual: Any, augmentation: Mapping[str, Any] | None, image_size: int | None = None
) -> transforms.Pair:
    """Returns the transforms of training and of validation of an image tower.

    Those of open_clip's towers are its own, unless `augmentation` has a `kind`, which names one of
    `transforms`. ``image_size``: for pictures of another size than the tower's.
    """
    if isinstance(visual, backbones.BackboneTower):
        return visual.transforms(augmentation, image_size)
    options = dict(augmentation or {})
    settings = PreprocessCfg(**visual.preprocess_cfg)
    if image_size is not None:
        settings = replace(settings, size=(image_size, image_size))
    plain = image_transform_v2(settings, is_train=False)
    if transforms.KIND in options:
        height, width = towers.pair(settings.size)
        pixels = transforms.PixelFormat((height, width), settings.mean, settings.std)
        return transforms.training(pixels, options), plain
    try:
        with warnings.catch_warnings():
            # open_clip warns that changes of colour are unused, and makes them all the same.
            warnings.filterwarnings("ignore", r"Unused aug.*\(\[('(color_jit|gray_sc)\w*'(, )?)+\]")
            train = image_transform_v2(settings, is_train=True, aug_cfg=options)
    except TypeError as error:
        raise ValueError(
            f"the augmentation {options} is not one that open_clip knows ({error})"
        ) from error
    return train, plain
