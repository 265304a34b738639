"""open_clip behind one small interface: models by name, directory or config.

This is the only file that imports open_clip. Models may come from strangers: weights load through
safetensors or `torch.load(weights_only=True)` alone, and `config_check` refuses configurations that
could bring code.
"""

import functools
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import mclclip.torchvision_fix  # noqa: F401

# isort: split
import open_clip
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.modified_resnet import ModifiedResNet
from open_clip.pretrained import download_pretrained_from_hf
from open_clip.timm_model import TimmModel
from open_clip.tokenizer import DEFAULT_CONTEXT_LENGTH, HFTokenizer, SimpleTokenizer
from open_clip.transform import PreprocessCfg, image_transform_v2
from open_clip.transformer import VisionTransformer

from mclclip.models import (
    backbones,
    config_check,
    config_limits,
    tokenizer_proof,
    towers,
    transforms,
    weights,
)
from mclclip.models.clip_model import ClipModel
from mclclip.models.hub import fetched, one_line, quiet
from mclclip.models.image_encoder import ImageEncoder
from mclclip.models.image_model import pair
from mclclip.models.interface import save_export
from mclclip.models.timm_towers import check_image_size, timm_layout
from mclclip.models.tokenizer import LazyTokenizer, with_words_kept
from mclclip.models.tokenizer import fetched as fetch
from mclclip.options import nearest

__all__ = ["ClipModel", "architecture", "load_clip", "load_image_encoder", "save_export"]

IMAGENET_NAMES: tuple[str, ...] = tuple(open_clip.IMAGENET_CLASSNAMES)
"""CLIP's names of ImageNet-1k's classes, in the order of their sorted WordNet ids."""
IMAGENET_TEMPLATES = tuple(str(fill("{}")) for fill in open_clip.OPENAI_IMAGENET_TEMPLATES)
"""CLIP's 80 prompts for ImageNet, with {} for the name of a class."""
RECOMMENDED_TEMPLATES = tuple(str(fill("{}")) for fill in open_clip.SIMPLE_IMAGENET_TEMPLATES)
"""Seven of these 80 prompts, which do best together according to CLIP's authors."""


def load_clip(
    name: str | Path | Mapping[str, Any],
    pretrained: str | None = None,
    *,
    seed: int = 0,
    augmentation: Mapping[str, Any] | None = None,
    image_size: int | None = None,
    context_length: int | None = None,
    quick_gelu: bool | None = None,
    patch_dropout: float | None = None,
    load_weights: bool = True,
) -> ClipModel:
    """Loads a CLIP model on the CPU in fp32, in eval mode, with nothing locked.

    Args:
        name: an open_clip name (`ViT-B-32`), a directory (`local-dir:PATH` or `PATH`), a model on
            the hub (`hf-hub:ORG/NAME`), or an open_clip model config: a JSON file or a mapping with
            `embed_dim`, `vision_cfg`, `text_cfg`.
        pretrained: open_clip's tag of the weights or a file; not with directories and hub models,
            which bring their own. Without weights the model has random ones drawn by `seed`; the
            global generators are neither used nor changed.
        load_weights: False leaves a directory's model random, for a caller that fills it.
        augmentation: fields of open_clip's `AugmentationCfg`, such as `{"scale": (0.4, 1.0)}`, or
            a `kind` of `transforms` with its options.
        image_size, context_length, quick_gelu, patch_dropout: replace the config's values.

    Raises:
        ValueError: unknown name or config, one that could bring code (`config_check`), weights that
            do not fit, an activation that is not the one the weights were trained with (unless
            `quick_gelu` says so).
        FileNotFoundError: a directory, its config, weights or tokenizer are missing, or the weights
            of a tag or a tokenizer of the hub are neither cached nor reachable.
    """
    config, file, directory = _resolve(name, pretrained, quick_gelu, load_weights)
    model_cfg = config["model_cfg"]
    _check_is_clip(name, model_cfg)
    _override(model_cfg, "vision_cfg", image_size=image_size, patch_dropout=patch_dropout)
    _override(model_cfg, "text_cfg", context_length=context_length)
    model_cfg |= {} if quick_gelu is None else {"quick_gelu": quick_gelu}
    clip = _build(config, seed, random_text=bool(file) or not load_weights)
    tokenizer = _tokenizer(model_cfg["text_cfg"], directory, _vocabulary(clip))
    if file:
        _load_weights(clip, file)
    full = {"model_cfg": model_cfg, "preprocess_cfg": dict(clip.visual.preprocess_cfg)}
    transforms = _transforms(clip.visual, augmentation)
    return ClipModel(clip, tokenizer, full, _layout(clip.visual), transforms).eval()


_SMALLEST_TEXT = {"context_length": 1, "vocab_size": 1, "width": 8, "heads": 1, "layers": 1}


def load_image_encoder(
    name: str | Path | Mapping[str, Any],
    pretrained: str | None = None,
    *,
    seed: int = 0,
    augmentation: Mapping[str, Any] | None = None,
    image_size: int | None = None,
    patch_dropout: float | None = None,
    projector: Sequence[int] = (),
    load_weights: bool = True,
) -> ImageEncoder:
    """Loads an image tower alone, on the CPU, in fp32 and eval mode, with nothing locked.

    Args:
        name, pretrained: what `load_clip` takes, of which only the image tower is kept, or the
            directory of an exported image encoder, or a config without `text_cfg`, whose
            `vision_cfg` may name a backbone of timm or torchvision (`backbones.Backbone`). Without
            weights no text tower is built, so nothing is fetched for one.
        projector: widths of the linear layers on top, which are trained and not exported; their
            weights are drawn by `seed`.
        seed, augmentation, image_size, patch_dropout, load_weights: see `load_clip`.

    Raises the errors of `load_clip`.
    """
    config, file, _ = _resolve(name, pretrained, None, load_weights)
    _override(config["model_cfg"], "vision_cfg", image_size=image_size, patch_dropout=patch_dropout)
    where = "the model config" if isinstance(name, Mapping) else str(name)
    visual: Any
    if backbones.KEY in config["model_cfg"]["vision_cfg"]:
        visual, full = _backbone(config["model_cfg"], file, seed, where)
        layout = backbones.layout_of(visual)
        transforms = visual.transforms(augmentation)
    else:
        visual, full = _image_tower(config, file, seed)
        layout, transforms = _layout(visual), _transforms(visual, augmentation)
    tower = nn.Module()
    tower.visual = visual
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return ImageEncoder(tower, full, layout, transforms, projector).eval()


def _image_tower(
    config: dict[str, Any], file: Path | None, seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    """The image tower that open_clip builds, and the configuration of its export."""
    model_cfg = config["model_cfg"]
    alone = "text_cfg" not in model_cfg
    kept = {
        key: model_cfg[key] for key in ("embed_dim", "vision_cfg", "quick_gelu") if key in model_cfg
    }
    if file is None or alone:
        config = config | {"model_cfg": kept | {"text_cfg": dict(_SMALLEST_TEXT)}}
    clip = _build(config, seed, random_text=True)
    if file is not None and alone:
        _load_image_tower(clip.visual, file)
    elif file is not None:
        _load_weights(clip, file)
    return clip.visual, {"model_cfg": kept, "preprocess_cfg": dict(clip.visual.preprocess_cfg)}


def _backbone(
    model_cfg: Mapping[str, Any], file: Path | None, seed: int, where: str
) -> tuple[backbones.BackboneTower, dict[str, Any]]:
    """A tower of timm or torchvision, and the configuration of its export."""
    chosen = backbones.parse(model_cfg["vision_cfg"], where)
    visual = backbones.build(chosen, seed, where)
    if model_cfg.get("embed_dim", visual.embed_dim) != visual.embed_dim:
        raise ValueError(
            f"embed_dim of {where} is {model_cfg['embed_dim']}, but {chosen.backbone} gives "
            f"{visual.embed_dim}: leave it out"
        )
    if file is not None:
        _load_image_tower(visual, file)
    model = {"embed_dim": visual.embed_dim, "vision_cfg": asdict(chosen)}
    return visual, {"model_cfg": model, "preprocess_cfg": visual.preprocess_cfg}


def _check_is_clip(name: str | Path | Mapping[str, Any], model_cfg: Mapping[str, Any]) -> None:
    where = "the model config" if isinstance(name, Mapping) else str(name)
    if "text_cfg" not in model_cfg:
        raise ValueError(f"{where} is an image encoder without texts: use mclclip.load_model")
    if "multimodal_cfg" in model_cfg:
        raise ValueError(f"{where} is a CoCa, which is not supported: use a CLIP model")


def _override(model_cfg: dict[str, Any], part: str, **fields: Any) -> None:
    model_cfg[part] |= {key: value for key, value in fields.items() if value is not None}


def architecture(name: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """open_clip's configuration of a model; that of an image encoder has no ``text_cfg``. Reads no
    weights. Raises the errors of ``load_clip``."""
    weights.refuse_joined(name)
    found: dict[str, Any] = _resolve(name, None, None, load_weights=False)[0]["model_cfg"]
    if "text_cfg" in found:
        _check_is_clip(name, found)
    return found


def _resolve(
    name: str | Path | Mapping[str, Any],
    pretrained: str | None,
    quick_gelu: bool | None,
    load_weights: bool,
) -> tuple[dict[str, Any], Path | None, Path | None]:
    """Returns the configuration, the weights file, and the directory of a tokenizer's files."""
    found = _find(name, pretrained, quick_gelu, load_weights)
    where = "the model config" if isinstance(name, Mapping) else str(name)
    model_cfg = found[0]["model_cfg"]
    # An image encoder has no text_cfg.
    whole = {"text_cfg": {}, **model_cfg} if isinstance(model_cfg, Mapping) else model_cfg
    config_check.check(whole, _allowed(), where)
    if backbones.KEY not in model_cfg["vision_cfg"]:
        config_limits.check(*found[:2], (CLIPVisionCfg, CLIPTextCfg, PreprocessCfg), where)
    return found


@functools.cache
def _allowed() -> config_check.Allowed:
    return config_check.names_in(map(open_clip.get_model_config, open_clip.list_models()))


def _find(
    name: str | Path | Mapping[str, Any],
    pretrained: str | None,
    quick_gelu: bool | None,
    load_weights: bool,
) -> tuple[dict[str, Any], Path | None, Path | None]:
    if isinstance(name, Mapping) or str(name).endswith(".json"):
        config = weights.read_model_config(name)
        return config, _weights_file(pretrained, str(name)) if pretrained else None, None
    label = str(name).removeprefix("local-dir:")
    if str(name).startswith("local-dir:") or os.path.isdir(label):
        _refuse_pretrained(str(name), pretrained)
        weights.check_recorded(Path(label), load_weights=load_weights)
        config = weights.read_config(Path(label))
        file = weights.find_weights(Path(label)) if load_weights else None
        return config, file, Path(label)
    if label.startswith("hf-hub:"):
        _refuse_pretrained(label, pretrained)
        return _find_on_hub(label)
    if not os.path.exists(label) and (label.startswith((".", "/", "~")) or label.count("/") > 1):
        raise FileNotFoundError(f"no model at {label}: give an exported directory or a name")
    label = label.replace("/", "-")
    if (model_cfg := open_clip.get_model_config(label)) is None:
        near = nearest(label, open_clip.list_models())
        raise ValueError(
            f"{str(name)!r} is neither a directory nor an open_clip model (nearest: "
            f"{', '.join(near)}): give one of these, local-dir:PATH or a JSON model config"
        )
    tag = open_clip.get_pretrained_cfg(label, pretrained) if pretrained else {}
    if not tag:
        file = _weights_file(pretrained, label) if pretrained else None
        return {"model_cfg": model_cfg}, file, None
    if quick_gelu is None:
        _check_activation(label, str(pretrained), tag, model_cfg)
    what = f"the weights {pretrained!r} of {label!r}"
    file = fetched(what, lambda: open_clip.download_pretrained(tag))
    return {"model_cfg": model_cfg, "preprocess_cfg": dict(tag)}, Path(file), None


def _find_on_hub(label: str) -> tuple[dict[str, Any], Path | None, Path | None]:
    identifier = label.removeprefix("hf-hub:")
    path = fetched(
        f"the config of {label!r}", lambda: download_pretrained_from_hf(identifier, weights.CONFIG)
    )
    file = fetched(f"the weights of {label!r}", lambda: download_pretrained_from_hf(identifier))
    return weights.read_config(Path(path).parent), Path(file), None


def _refuse_pretrained(name: str, pretrained: str | None) -> None:
    if pretrained:
        raise ValueError(
            f"pretrained is {pretrained!r}, but {name!r} brings its own weights: leave it out"
        )


def _weights_file(pretrained: str, name: str) -> Path:
    if not Path(pretrained).is_file():
        raise ValueError(
            f"pretrained is {pretrained!r}, which is neither a file nor a tag of {name!r} "
            f"(tags: {_tags(name)})"
        )
    return Path(pretrained)


def _tags(name: str) -> str:
    tags = open_clip.list_pretrained_tags_by_model(name.replace("/", "-"))
    return ", ".join(tags) or "none"


def is_without_weights(name: str | Path | Mapping[str, Any]) -> bool:
    """Whether a name is that of an architecture alone: open_clip's, or a model config."""
    if isinstance(name, Mapping) or str(name).endswith(".json"):
        return True
    return not os.path.isdir(name) and str(name).replace("/", "-") in open_clip.list_models()


def refuse_without_weights(name: str | Path) -> None:
    """Raises ValueError, which lists the tags, for the name of an architecture alone; before that,
    the errors of its configuration."""
    if is_without_weights(name):
        architecture(name)
        raise ValueError(
            f"{name} names no weights: give {name}@TAG with a tag of open_clip's (tags: "
            f"{_tags(str(name))}), {name}@FILE with a file of weights, or {name}@random"
        )


def _check_activation(
    label: str, pretrained: str, tag: Mapping[str, Any], model_cfg: Mapping[str, Any]
) -> None:
    """Raises ValueError for another activation than that of the weights.

    open_clip only warns here, and every feature would be slightly wrong.
    """
    wanted, got = bool(tag.get("quick_gelu")), bool(model_cfg.get("quick_gelu"))
    if wanted == got or model_cfg["vision_cfg"].get("timm_model_name"):
        return
    other = f"{label}-quickgelu" if wanted else label.removesuffix("-quickgelu")
    raise ValueError(
        f"the weights {pretrained!r} were trained with quick_gelu={wanted}, but {label!r} has "
        f"quick_gelu={got}: use the model {other!r}"
    )


class _ProvenTokenizer(HFTokenizer):  # type: ignore[misc]  # open_clip has no types
    """A tokenizer whose files lie beside a model, and whose tokens are checked (`tokens_of`)."""

    def __init__(self, directory: Path, vocabulary: int, **options: Any) -> None:
        self._vocabulary, self._where = vocabulary, f"in {directory}"
        # With an empty configuration, transformers does not look in config.json for other classes.
        config = config_check.library().PretrainedConfig()
        super().__init__(str(directory), config=config, **options)

    def __call__(self, texts: str | list[str], context_length: int | None = None) -> torch.Tensor:
        number = 1 if isinstance(texts, str) else len(texts)
        length = context_length or self.context_length
        own = functools.partial(super().__call__, texts, context_length)
        tokens = tokenizer_proof.tokens_of(own, number, length, self._vocabulary, self._where)
        return cast(torch.Tensor, tokens)


def _vocabulary(clip: Any) -> int:
    """How many tokens the text tower knows; one of transformers has them in its own table."""
    text = getattr(clip, "text", clip)
    table = getattr(text, "token_embedding", None) or text.transformer.get_input_embeddings()
    return int(table.num_embeddings)


def _tokenizer(text_cfg: Mapping[str, Any], directory: Path | None, vocabulary: int) -> Any:
    """The tokenizer that open_clip makes of a config, never with code that comes with it.

    As in open_clip, a Hugging Face tokenizer is read from the files in the model directory, or else
    by its name from the hub. From the hub it is fetched when a text is tokenised. This also holds
    for a directory without these files, which was written where the tokenizer could not be fetched.
    """
    length = text_cfg.get("context_length", DEFAULT_CONTEXT_LENGTH)
    options = {"context_length": length} | (text_cfg.get("tokenizer_kwargs") or {})
    name = text_cfg.get("hf_tokenizer_name")
    if not name:
        own = _made(functools.partial(SimpleTokenizer, **options))
        return with_words_kept(own, options.get("clean", "lower"))
    options |= {"tokenizer_mode": text_cfg.get("tokenizer_mode"), "trust_remote_code": False}
    config_check.check_hub_name(name)
    if directory is None or not (directory / config_check.TOKENIZER_CONFIG).is_file():
        return LazyTokenizer(functools.partial(_hub_tokenizer, name, options), length)
    config_check.library()
    config_check.check_tokenizer_files(directory)
    tokenizer_proof.prove(directory, length)
    proven = _made(functools.partial(_ProvenTokenizer, directory, vocabulary, **options))
    with torch.device("cpu"):  # a plan makes models on "meta", where ids have no values
        proven([*tokenizer_proof.PROBES])
    return proven


def check_tokenizer(name: str | Path | Mapping[str, Any]) -> None:
    """Raises FileNotFoundError or ValueError where a model's tokenizer cannot be had; reads no
    weights. Ids are checked where the model is loaded."""
    config, _, directory = _resolve(name, None, None, load_weights=False)
    text_cfg = config["model_cfg"].get("text_cfg") or {}
    if text_cfg.get("hf_tokenizer_name"):
        fetch(_tokenizer(text_cfg, directory, sys.maxsize))


def _hub_tokenizer(name: str, options: Mapping[str, Any]) -> Any:
    config_check.library()
    config_check.check_hub_name(name)
    return fetched(f"the tokenizer files of {name!r}", lambda: HFTokenizer(name, **options))


def _made(make: Callable[[], Any]) -> Any:
    try:
        with quiet():
            return make()
    except Exception as error:  # of any kind: the config or the files are the cause
        raise ValueError(f"open_clip cannot make the tokenizer ({one_line(error)})") from error


def _build(config: Mapping[str, Any], seed: int, random_text: bool) -> Any:
    config_limits.check_memory(config["model_cfg"])
    with tempfile.TemporaryDirectory() as folder, quiet(), torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed the devices, and those are not restored.
        torch.default_generator.manual_seed(seed)
        weights.write_config(Path(folder), config)
        try:
            clip = open_clip.create_model(
                f"local-dir:{folder}",
                load_weights=False,
                pretrained_text=not random_text,
                nonscalar_logit_scale=True,
            )
        except Exception as error:  # of any kind: the config is the cause
            raise ValueError(f"open_clip cannot build the model ({one_line(error)})") from error
    check_image_size(clip.visual)
    return clip


def _load_weights(clip: Any, file: Path) -> None:
    if file.suffix == ".safetensors":
        weights.check_header(file)
    try:
        with quiet():
            if file.suffix not in (".safetensors", ".npz", ".npy"):
                # open_clip would retry without weights_only after a TypeError; here it is refused.
                torch.load(file, map_location="meta", weights_only=True)
            open_clip.load_checkpoint(clip, str(file), strict=True, weights_only=True)
    except Exception as error:  # damaged file, pickled code, other model: torch raises many kinds
        cause = one_line(error)
        if isinstance(error, pickle.UnpicklingError):  # torch would advise to run the file's code
            cause = "it is neither safetensors nor a plain state dict saved by torch"
        raise ValueError(f"the weights {file} do not load ({cause})") from error
    weights.refuse_not_finite(clip, str(file))


def _load_image_tower(visual: nn.Module, file: Path) -> None:
    """Fills an image tower with an exported image encoder's weights; a backbone also with those of
    its library's own model, such as DINO's of timm."""
    found = weights.read_tensors(file)
    tensors = {name.removeprefix("visual."): tensor for name, tensor in found.items()}
    if isinstance(visual, backbones.BackboneTower):
        tensors = backbones.with_own_names(tensors)
    try:
        visual.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"the weights {file} do not load ({one_line(error)})") from error
    weights.refuse_not_finite(visual, str(file))


def _layout(visual: nn.Module) -> towers.ImageLayout | str:
    """Returns the layout of the image tower, or the reason why it cannot be split or locked."""
    try:
        if isinstance(visual, VisionTransformer):
            return towers.VisionTransformerLayout.of(visual)
        if isinstance(visual, ModifiedResNet):
            return towers.ResNetLayout.of(visual)
        if isinstance(visual, TimmModel):
            return timm_layout(visual)
    except ValueError as error:
        return str(error)
    return (
        f"the image tower is a {type(visual).__name__}, which cannot be split or locked: use "
        "another model"
    )


def _transforms(visual: Any, augmentation: Mapping[str, Any] | None) -> transforms.Pair:
    """The train and the validation transform of a tower: open_clip's own, or others by `kind`."""
    options = dict(augmentation or {})
    settings = PreprocessCfg(**visual.preprocess_cfg)
    plain = image_transform_v2(settings, is_train=False)
    if transforms.KIND in options:
        height, width = pair(settings.size)
        look = transforms.Look((height, width), settings.mean, settings.std)
        return transforms.training(look, options), plain
    try:
        with warnings.catch_warnings():
            # open_clip says so of the changes of colour, which it makes all the same.
            warnings.filterwarnings("ignore", r"Unused aug.*\(\[('(color_jit|gray_sc)\w*'(, )?)+\]")
            train = image_transform_v2(settings, is_train=True, aug_cfg=options)
    except TypeError as error:
        raise ValueError(
            f"the augmentation {options} is not one that open_clip knows ({error})"
        ) from error
    return train, plain
