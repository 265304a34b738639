"""An encoder as a folder that Hugging Face transformers loads.

open_clip's plain ViT becomes a `CLIPModel`, open_clip's SigLIP a `SiglipModel`, both without code
of ours. A joined encoder becomes a `StagesModel` (`models/transformers_stages.py`, which is copied
beside its weights). Every folder has a stock image processor and one whose pixels are open_clip's.
"""

from __future__ import annotations

from pathlib import Path

from mclclip.export import certificate, siglip_layout, stages_layout, transformers_layout
from mclclip.export.certificate import Certificate
from mclclip.export.image_pixels import add_processor, own_processor
from mclclip.export.target import Material, Source
from mclclip.models import config_check, transformers_encoder
from mclclip.models.encoder import load_model


def write(source: Source, out: Path) -> None:
    """Writes the folder; see the module. Raises ValueError for a model that none of the three
    holds."""
    config_check.library()
    if source.is_concat:
        stages_layout.write(source, out)
    else:
        model = source.single("transformers' CLIPModel")
        if siglip_layout.is_siglip(model.config):
            siglip_layout.convert(source, model).write(out)
            siglip_layout.write_tokenizer(source, model, out)
        else:
            layout = transformers_layout.convert(source.directory, model.config, model.tokenizer)
            layout.write(out)
    add_processor(out)


def certify(source: Source, out: Path, material: Material) -> list[Certificate]:
    """transformers with its stock image processor and, in a second entry, with the own one."""
    transformers = config_check.library()
    if source.is_concat:
        return stages_layout.certify(source, out, material)
    runtime = f"transformers {transformers.__version__}"
    other = load_model(f"{transformers_encoder.PREFIX}{out}")
    found = [
        certificate.compare(
            source.encoder, other, f"{runtime}, its own image processor",
            material.images, material.texts,
        )
    ]  # fmt: skip
    other.preprocess_val = transformers_encoder.Pixels(own_processor(out))
    found.append(
        certificate.compare(
            source.encoder, other, f"{runtime}, OpenClipImageProcessor",
            material.images, material.texts,
        )
    )  # fmt: skip
    return found
