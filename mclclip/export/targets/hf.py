"""Writes an encoder as a folder that Hugging Face transformers loads.

open_clip's plain ViT becomes a `CLIPModel`, open_clip's SigLIP a `SiglipModel`, both without code
of mclclip. A joined encoder becomes a `StagesModel` (`export/transformers_stages.py`, which is
copied beside its weights). Every folder names transformers' own image processor, so that pipelines
and auto classes load it without code, and has a folder with a processor of open_clip's pixels.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mclclip.export import certificate, processors
from mclclip.export.certificate import Certificate, Probes
from mclclip.export.targets import ExportTarget, Source
from mclclip.models import config_check, transformers_folder, transformers_layout, weights
from mclclip.models.encoder import Encoder
from mclclip.models.model import unit
from mclclip.models.transformers_layout import (
    JOINED_MODEL_TYPE,
    OPEN_CLIP,
    Table,
    blocks,
    clip,
    rename_tensors,
    state,
    transpose,
)
from mclclip.util import files
from mclclip.util.options import with_prefix

CARD = {"library_name": "transformers", "pipeline_tag": "zero-shot-image-classification"}

STAGES = "transformers_stages"
"""Name of the module `mclclip.export.transformers_stages`, and of its copy beside the weights."""

_STAGES = ("ln_1", "ln_2", "in_proj", "out_proj", "c_fc", "c_proj")
_STAGE_TEXT: Table = {
    "token_embedding.weight": "token_embedding.weight",
    "positional_embedding": "positional_embedding",
    "ln_final": "ln_final",
    "attn_mask": None,
    "text_projection": transpose("proj.weight"),
    **blocks("transformer.resblocks", OPEN_CLIP, "blocks", _STAGES),
}
_STAGE_VISION: Table = {
    "visual.class_embedding": "trunk.class_embedding",
    "visual.conv1.weight": "trunk.conv1.weight",
    "visual.positional_embedding": "trunk.positional_embedding",
    "visual.ln_pre": "trunk.ln_pre",
    "visual.ln_post": "ln_post",
    "visual.proj": transpose("proj.weight"),
    **blocks("visual.transformer.resblocks", OPEN_CLIP, "blocks", _STAGES),
}


def write(source: Source, out: Path) -> None:
    """Writes the folder. Raises ValueError for a model that none of the three classes can hold."""
    model, kind = source.encoder.stages[0], "CLIP"
    if source.is_concat:
        config, tensors = joined_layout(source.encoder)
    elif transformers_layout.is_siglip(source.single("transformers' CLIPModel")):
        (config, tensors), kind = transformers_layout.siglip(model), "Siglip"
    else:
        config, tensors = transformers_layout.clip(model)
    config_check.library()  # raises ValueError if transformers is missing
    if config["model_type"] == "siglip":
        processors.write_tokenizer(source.directory, model, out)
    else:
        length = config["text_config"]["max_position_embeddings"]
        processors.write_clips_tokenizer(model.tokenizer, length, out)
    write_model(source, out, config, tensors, kind)


def write_model(
    source: Source,
    out: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kind: str = "CLIP",
) -> None:
    """Writes configuration, weights and image processors; for a joined encoder also its code.

    `kind` is ``CLIP`` or ``Siglip``, as transformers names its classes.
    """
    if source.is_concat:
        code = Path(processors.__file__).with_name(f"{STAGES}.py")
        files.write_bytes(out / code.name, code.read_bytes())
    files.write_bytes(out / transformers_folder.CONFIG, json.dumps(config, indent=2).encode())
    settings = source.encoder.stages[0].config["preprocess_cfg"]
    processors.write_image_processors(out, settings, kind)
    weights.write_tensors(out / "model.safetensors", tensors)


def load_stages(out: Path) -> Any:
    """Loads the joined model or tower in a folder by this package's classes, never by the code
    there. Raises ValueError if the weights lack a tensor."""
    library = config_check.library()
    import mclclip.export.transformers_stages  # noqa: F401  # registers the classes

    return load(library.AutoModel, out, trust_remote_code=False)


def load(cls: Any, out: Path, **options: Any) -> Any:
    """Loads a model in a folder by a class `cls` of transformers.

    Raises ValueError if the weights lack a tensor: transformers would only warn, and draw it at
    random.
    """
    with silent(config_check.library()):
        model, report = cls.from_pretrained(
            str(out), output_loading_info=True, local_files_only=True, **options
        )
    missing = sorted(name for name in report["missing_keys"] if "position_ids" not in name)
    if missing:
        raise ValueError(f"the weights in {out} have no {missing[0]}")
    return model.eval()


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


class _Runtime:
    """Makes a model of transformers, its processor and an image processor look like an `Encoder`,
    for `certificate.compare`."""

    def __init__(self, model: Any, processor: Any, images: Any) -> None:
        self.model, self._processor, self._images = model, processor, images
        self.logit_scale = model.logit_scale.exp().item()

    def preprocess_val(self, image: Any) -> Tensor:
        """Picture -> [3, H, W]."""
        output = self._images(images=image.convert("RGB"), return_tensors="pt")
        pixels: Tensor = output["pixel_values"][0]
        return pixels

    def tokenizer(self, texts: list[str]) -> Tensor:
        """N strings -> int64 [N, context]."""
        tokens: Tensor = self._processor(text=texts, **processors.TEXTS)["input_ids"]
        return tokens

    @torch.no_grad()
    def encode_image(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> unit [B, E]."""
        return unit(_rows(self.model.get_image_features(pixel_values=images)))

    @torch.no_grad()
    def encode_text(self, texts: Tensor | list[str]) -> Tensor:
        """N strings, or tokens int64 [N, context] -> unit [N, E]. Strings take the calls that the
        card shows."""
        if isinstance(texts, Tensor):
            return unit(_rows(self.model.get_text_features(input_ids=texts)))
        inputs = self._processor(text=texts, images=Image.new("RGB", (32, 32)), **processors.TEXTS)
        return unit(self.model(**inputs).text_embeds)


def _rows(output: Any) -> Tensor:
    """Returns features [B, E]; transformers 5 returns an object that holds them."""
    return output if isinstance(output, Tensor) else output.pooler_output


def certify(source: Source, out: Path, probes: Probes) -> list[Certificate]:
    """Compares the model in transformers, with three image processors: the one of its
    AutoImageProcessor, on Pillow and on torchvision, and the one with open_clip's pixels."""
    transformers = config_check.library()
    model = load_stages(out) if source.is_concat else load(transformers.AutoModel, out)
    with silent(transformers):
        processor = transformers.AutoProcessor.from_pretrained(
            str(out), local_files_only=True, trust_remote_code=False
        )
        stock = transformers.AutoImageProcessor.from_pretrained
        processors_ = {
            "AutoImageProcessor on Pillow": stock(str(out), use_fast=False),
            "AutoImageProcessor on torchvision": stock(str(out), use_fast=True),
            "OpenClipImageProcessor": processors.load_processor(out),
        }
        name = f"transformers {transformers.__version__}, {type(model).__name__}"
        return [
            certificate.compare(
                source.encoder, _Runtime(model, processor, images), f"{name}, {what}", probes
            )
            for what, images in processors_.items()
        ]


def usage(source: Source) -> str:
    """Returns a text for the model card on how to load the export."""
    options = ", trust_remote_code=True" * source.is_concat
    code = "; the model's code lies beside its weights" * source.is_concat
    others, chances = "sentence-transformers loads the folder too.", "softmax(dim=-1)"
    if source.is_concat:
        others = "sentence-transformers does not know a joined encoder: export the soup or a stage."
    elif transformers_layout.is_siglip(source.encoder.stages[0]):
        chances = "sigmoid()"
        others = (
            'Texts need `padding="max_length"`, since the model reads their padding. '
            "sentence-transformers pads them less, and its embeddings of texts are wrong."
        )
    return f'''```python
from transformers import AutoModel, AutoProcessor, pipeline

classify = pipeline("zero-shot-image-classification", model="FOLDER"{options})
model = AutoModel.from_pretrained("FOLDER"{options})
processor = AutoProcessor.from_pretrained("FOLDER"{options})
inputs = processor(
    text=["a dog", "a cat"], images=picture, padding="max_length", truncation=True,
    return_tensors="pt",
)
chances = model(**inputs).logits_per_image.{chances}
```

Clean texts by `ftfy.fix_text(html.unescape(text))` first: curly quotes, ligatures, full-width
letters and HTML entities may become other tokens here than in the training.

FOLDER is this folder or repository{code}. The image processor is transformers' own, and the table
below says how far its pixels are from those of the training. {others} The exact one lies in
`{processors.EXACT}/` with its code:

```python
from transformers import AutoImageProcessor
processor = AutoImageProcessor.from_pretrained("FOLDER/{processors.EXACT}", trust_remote_code=True)
```'''


# --- the layout of a joined encoder --------------------------------------------------------------


def joined_layout(encoder: Encoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Converts a joined encoder to a `StagesModel`: its `config.json` and its tensors.

    Raises ValueError for other towers than open_clip's plain ViT.
    """
    models = encoder.stages
    whole, _ = clip(models[0])
    vision = {k: v for k, v in whole["vision_config"].items() if k != "model_type"}
    text = {k: v for k, v in whole["text_config"].items() if not k.endswith("token_id")}
    num_towers = 1 if encoder.shared_text else len(models)
    config = {
        "architectures": ["StagesModel"],
        "model_type": JOINED_MODEL_TYPE,
        "auto_map": _auto_map("StagesConfig", "StagesModel")
        | {"AutoModelForZeroShotImageClassification": f"{STAGES}.StagesModel"},
        "torch_dtype": "float32",
        "logit_scale_init_value": math.log(encoder.logit_scale),
        "vision_config": vision
        | {
            "model_type": "mclclip_stages_vision",
            "num_stages": len(models),
            "width": vision["hidden_size"],
            "num_trunk_blocks": encoder.num_trunk_blocks,
            "variant": encoder.variant,
        },
        "text_config": text | {"model_type": "mclclip_stages_text", "num_towers": num_towers},
    }
    tensors = {"logit_scale": torch.tensor(encoder.logit_scale).log()}
    for number, model in enumerate(models):
        of_stage = state(model)
        visual = {name: tensor for name, tensor in of_stage.items() if name.startswith("visual.")}
        for name, tensor in rename_tensors(visual, _STAGE_VISION, "StagesModel", "").items():
            inside = _in_trunk_or_tail(name, encoder.num_trunk_blocks)
            is_shared = inside.startswith("trunk.") and encoder.num_trunk_blocks > 0
            owner = "vision_model" if is_shared else f"vision_model.stages.{number}"
            tensors[f"{owner}.{inside}"] = tensor
        if number < num_towers:
            rest = {n: t for n, t in of_stage.items() if not n.startswith(("visual.", "logit_"))}
            for name, tensor in rename_tensors(rest, _STAGE_TEXT, "StagesModel", "").items():
                tensors[f"text_towers.{number}.{name}"] = tensor
    # Copies: equal tensors of the stages share their memory, which safetensors does not write.
    return config, {name: tensor.clone() for name, tensor in tensors.items()}


def _in_trunk_or_tail(name: str, num_trunk_blocks: int) -> str:
    """Renames a block's tensor to its place in the trunk or in the tail of a stage.

    In a tail, blocks are numbered from 0. Without shared blocks a stage's own trunk has them all.
    """
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if block is None:
        return name
    number = int(block[1])
    if num_trunk_blocks == 0 or number < num_trunk_blocks:
        return f"trunk.{name}"
    return f"blocks.{number - num_trunk_blocks}.{block[2]}"


def joined_tower_layout(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the image half of what `joined_layout` returned, as a `StagesVisionModel`."""
    return config["vision_config"] | {
        "architectures": ["StagesVisionModel"],
        "auto_map": _auto_map("StagesVisionConfig", "StagesVisionModel"),
        "torch_dtype": "float32",
    }, with_prefix(tensors, "vision_model.")


def _auto_map(config: str, model: str) -> dict[str, str]:
    return {"AutoConfig": f"{STAGES}.{config}", "AutoModel": f"{STAGES}.{model}"}


TARGET = ExportTarget(write, certify, CARD, usage=usage)
