"""An encoder as a folder that Hugging Face transformers loads.

open_clip's plain ViT becomes a `CLIPModel`, open_clip's SigLIP a `SiglipModel`, both without code
of ours. A joined encoder becomes a `StagesModel` (`models/transformers_stages.py`, which is copied
beside its weights). Every folder has a stock image processor and one whose pixels are open_clip's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from mclclip import files
from mclclip.export import certificate, layouts, processors
from mclclip.export.certificate import Certificate, Probes
from mclclip.export.targets import Source
from mclclip.models import config_check, transformers_encoder, weights
from mclclip.models.encoder import Encoder, load_model

CARD = {"library_name": "transformers", "pipeline_tag": "zero-shot-image-classification"}
IS_MODEL = True


def write(source: Source, out: Path) -> None:
    """Writes the folder; see the module. Raises ValueError for a model that none of the three
    holds."""
    config_check.library()
    model, kind = source.encoder.stages[0], "CLIPImageProcessor"
    if source.is_concat:
        config, tensors = layouts.stages(source.encoder)
    elif layouts.is_siglip(source.single("transformers' CLIPModel")):
        (config, tensors), kind = layouts.siglip(model), "SiglipImageProcessor"
    else:
        config, tensors = layouts.clip(model)
    if config["model_type"] == "siglip":
        processors.write_cleaning_tokenizer(source.directory, model, out)
    else:
        length = config["text_config"]["max_position_embeddings"]
        processors.write_clips_tokenizer(model.tokenizer, length, out)
    write_model(source, out, config, tensors, kind)


def write_model(
    source: Source,
    out: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kind: str = "CLIPImageProcessor",
) -> None:
    """Writes configuration, weights and image processors, the stock one of the class `kind`; of a
    joined encoder the code of its model too."""
    if source.is_concat:
        code = Path(transformers_encoder.__file__).with_name(f"{layouts.STAGES}.py")
        files.write_bytes(out / code.name, code.read_bytes())
    files.write_bytes(out / transformers_encoder.CONFIG, json.dumps(config, indent=2).encode())
    settings = source.encoder.stages[0].config["preprocess_cfg"]
    processors.write_image_processors(out, settings, kind)
    weights.write_tensors(out / "model.safetensors", tensors)


def load_stages(out: Path) -> Any:
    """The joined model or tower in a folder, by this package's own classes, never by the code in
    the folder. Raises ValueError where the weights lack a tensor."""
    import_module(f"mclclip.models.{layouts.STAGES}")
    return load(config_check.library().AutoModel, out, trust_remote_code=False)


def load(cls: Any, out: Path, **options: Any) -> Any:
    """A model of a class of transformers. Raises ValueError where the weights lack a tensor, which
    transformers would fill at random, with a warning only."""
    with transformers_encoder.silent(config_check.library()):
        model, found = cls.from_pretrained(
            str(out), output_loading_info=True, local_files_only=True, **options
        )
    missing = sorted(name for name in found["missing_keys"] if "position_ids" not in name)
    if missing:
        raise ValueError(f"the weights in {out} have no {missing[0]}")
    return model.eval()


def certify(source: Source, out: Path, probes: Probes) -> list[Certificate]:
    """transformers with its stock image processor and, in a second entry, with the own one; of a
    joined encoder with the own one alone."""
    transformers, own = config_check.library(), processors.own_processor(out)
    runtime = f"transformers {transformers.__version__}"
    if source.is_concat:
        tokenizer = transformers.CLIPTokenizer.from_pretrained(str(out))
        model = transformers_encoder.TransformersModel(load_stages(out), own, tokenizer)
        runtime = f"{runtime}, StagesModel, OpenClipImageProcessor"
        return [certificate.compare(source.encoder, Encoder([model]), runtime, probes)]
    other = load_model(f"{transformers_encoder.PREFIX}{out}")
    stock = f"{runtime}, its own image processor"
    proofs = [certificate.compare(source.encoder, other, stock, probes)]
    other.preprocess_val = transformers_encoder.ProcessedPixels(own)
    runtime = f"{runtime}, OpenClipImageProcessor"
    return [*proofs, certificate.compare(source.encoder, other, runtime, probes)]
