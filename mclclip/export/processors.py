"""Writes image processors and tokenizers of exports, as files that transformers reads.

An export has two image processors: transformers' own, and one that returns open_clip's pixels. Its
tokenizer is CLIP's own, or the model's.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mclclip.models import config_check, tokenizer, transformers_folder, weights
from mclclip.models.model import Model
from mclclip.util import files

_PROCESSOR = "image_processing_open_clip"  # module of `OpenClipImageProcessor`, copied into exports
EXACT = "exact_processor"
"""The folder of an export that holds the image processor with open_clip's pixels."""
_START, _END = "<|startoftext|>", "<|endoftext|>"
_REPAIRS = {
    "[\u02bc\u2018-\u201b]": "'", "[\u201c-\u201f]": '"',
    "\ufb00": "ff", "\ufb01": "fi", "\ufb02": "fl", "\ufb03": "ffi", "\ufb04": "ffl",
}  # fmt: skip
"""What ftfy, by which open_clip cleans texts, makes of curly quotes and of ligatures."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

# --- images ------------------------------------------------------------------------------------


def write_image_processors(out: Path, settings: Mapping[str, Any], kind: str) -> None:
    """Writes transformers' own image processor, and in the folder `EXACT` the one with open_clip's
    pixels, whose code lies beside it and runs only if a user trusts it.

    `settings` are open_clip's options of the validation transform; `kind` is ``CLIP`` or
    ``Siglip``, as transformers names its classes. Raises ValueError for a way of resizing that
    transformers does not have.
    """
    resize, size = settings.get("resize_mode") or "shortest", settings["size"]
    height, width = size if isinstance(size, list | tuple) else (size, size)
    sides = {"height": height, "width": width}
    if resize == "longest" or (resize == "shortest" and height != width):
        raise ValueError(
            f"images of {height} x {width} pixels resized by their {resize} side have no image "
            "processor in transformers"
        )
    methods = {"bicubic": 3, "bilinear": 2, "nearest": 0}
    record = {
        # In transformers 4, SigLIP's class distorts pictures and cannot crop.
        "image_processor_type": f"{'CLIP' if resize == 'shortest' else kind}ImageProcessor",
        "processor_class": f"{kind}Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": height} if resize == "shortest" else sides,
        "resample": methods[settings.get("interpolation") or "bicubic"],
        "do_center_crop": resize == "shortest",
        "crop_size": sides,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(settings["mean"]),
        "image_std": list(settings["std"]),
    }
    files.write_json(out / transformers_folder.PREPROCESSOR, record)
    exact, code = out / EXACT, Path(__file__).with_name(f"{_PROCESSOR}.py")
    exact.mkdir()
    files.write_bytes(exact / code.name, code.read_bytes())
    record["auto_map"] = {"AutoImageProcessor": f"{_PROCESSOR}.OpenClipImageProcessor"}
    record["image_processor_type"] = "OpenClipImageProcessor"
    del record["processor_class"]
    files.write_json(exact / transformers_folder.PREPROCESSOR, record)


def load_processor(out: Path | str) -> Any:
    """Loads the image processor with open_clip's pixels from an export.

    Only the settings are read from the export; the class is this package's, never the file there.
    """
    cls = import_module(f"mclclip.export.{_PROCESSOR}").OpenClipImageProcessor
    return cls.from_pretrained(str(Path(out) / EXACT))


# --- texts -------------------------------------------------------------------------------------

TEXTS: dict[str, Any] = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
"""Arguments with which an export's tokenizer or processor reads texts as open_clip does."""


def write_clips_tokenizer(tokenizer: Any, context_length: int, out: Path, pad: str = _END) -> None:
    """Writes CLIP's own tokenizer as the files of transformers' ``CLIPTokenizer``.

    ``pad`` is the token that fills the space after a text: open_clip takes id 0, which is ``!``,
    and transformers' CLIP repeats the end token. It matters only to models that read behind the
    end. Words of a text are never special tokens, and the padding is not masked, as in open_clip.
    Raises ValueError for another tokenizer.
    """
    words, merges = getattr(tokenizer, "encoder", None), getattr(tokenizer, "bpe_ranks", None)
    if not isinstance(words, dict) or not isinstance(merges, dict):
        raise ValueError("the model's tokenizer is not CLIP's own, as transformers' CLIPModel has")
    last = len(words) - 1
    names = {number: word for word, number in words.items()} | {last - 1: _START, last: _END}
    vocabulary = {names[number]: number for number in range(len(names))}
    lines = ["#version: 0.2", *(" ".join(pair) for pair in sorted(merges, key=merges.__getitem__))]
    special = {"bos_token": _START, "eos_token": _END, "unk_token": _END, "pad_token": pad}
    described = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": context_length,
        "do_lower_case": True,
        "errors": "replace",
        "split_special_tokens": True,
        "model_input_names": ["input_ids"],
    }
    for name, content in {
        "vocab.json": json.dumps(vocabulary, ensure_ascii=False),
        "merges.txt": "\n".join(lines) + "\n",
        "special_tokens_map.json": json.dumps(special, indent=2),
        "tokenizer_config.json": json.dumps(described | special, indent=2),
    }.items():
        files.write_bytes(out / name, content.encode())


def write_tokenizer(source: Path, model: Model, out: Path) -> None:
    """Writes the tokenizer of the model in ``source`` so that it reads texts as open_clip does.

    It cleans texts first. SigLIP, for example, was trained on texts in lower case without
    punctuation (`clean: canonicalize`), which the published files of its tokenizer do not do. The
    format cannot express the repair of broken Unicode and of HTML entities, and full-width letters
    are left as they are; the certificate counts texts whose tokens differ. Its output has no mask,
    since open_clip masks no padding: SigLIP reads the feature there.

    CLIP's own tokenizer is written as files, with open_clip's padding where the model reads it. The
    files of another one come from ``source``, or from the hub or its cache. Raises
    FileNotFoundError if they are nowhere.
    """
    try:
        text_tokenizer = tokenizer.fetch_tokenizer(model.tokenizer)
    except FileNotFoundError as error:
        lacks = f"{source} has no files of its tokenizer: put {config_check.TOKENIZER_CONFIG} and"
        raise FileNotFoundError(f"{lacks} tokenizer.json into it: {error}") from None
    text_cfg = model.config["model_cfg"]["text_cfg"]
    if hasattr(text_tokenizer, "bpe_ranks"):
        reads_on = text_cfg.get("no_causal_mask") or text_cfg.get("embed_cls")
        reads_on = reads_on or text_cfg.get("pool_type", "argmax") != "argmax"
        length = int(text_tokenizer(["a"]).shape[1])
        write_clips_tokenizer(text_tokenizer, length, out, pad="!" if reads_on else _END)
        return
    inner: Any = getattr(text_tokenizer, "tokenizer", None)
    if getattr(inner, "backend_tokenizer", None) is None:  # no fast tokenizer
        weights.copy_tokenizer(source, out)
        if not (out / config_check.TOKENIZER_CONFIG).is_file():
            text_tokenizer.save_pretrained(str(out))
        return
    from tokenizers import Regex, Tokenizer, normalizers

    transformers = config_check.library()
    options = text_cfg.get("tokenizer_kwargs") or {}
    clean = options.get("clean", "whitespace")
    # The steps of open_clip's function for `clean`:
    steps: list[Any] = [normalizers.Replace(Regex(a), b) for a, b in _REPAIRS.items()]
    steps.append(normalizers.NFC())
    if clean == "canonicalize":
        marks = "".join(f"\\{mark}" for mark in string.punctuation if mark != "_")
        steps += [normalizers.Replace("_", " "), normalizers.Replace(Regex(f"[{marks}]"), "")]
    if clean != "whitespace":
        steps.append(normalizers.Lowercase())
    steps += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    whole = Tokenizer.from_str(inner.backend_tokenizer.to_str())
    whole.no_padding()
    whole.no_truncation()
    whole.normalizer = normalizers.Sequence([*steps, *filter(None, [whole.normalizer])])
    tokens = {name: getattr(inner, name, None) for name in _SPECIAL}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole,
        padding_side=inner.padding_side,
        model_max_length=text_tokenizer.context_length,
        model_input_names=["input_ids"],
        **{name: str(token) for name, token in tokens.items() if token is not None},
    ).save_pretrained(str(out))
    path = out / config_check.TOKENIZER_CONFIG
    record = files.read_json(path) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    files.write_json(path, record)  # version 4 of transformers knows the class by this name
