"""Names of encoders, such as ``ViT-L-14@openai`` or a folder: what they stand for, whether that can
be loaded, and what identifies it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mclclip.data.text_rows import width_of
from mclclip.models import clip, transformers_folder, weights
from mclclip.models.loading import has_texts, model_config, model_tokenizer, refuse_without_weights
from mclclip.models.options import ModelConfig
from mclclip.models.row_projection import WIDTH
from mclclip.util import files, shipped
from mclclip.util.options import prefix_errors

READS_ROWS = (
    "it reads rows of text embeddings, and a teacher's rows are not known here: set between=images"
)
RANDOM = "random"
"""In NAME@random, where a tag of weights would stand: random weights."""


def identify_encoder(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields of ``model`` that determine an encoder which is not trained here; files
    are represented by their digests."""
    fields: dict[str, Any] = {
        "name": model.name,
        "pretrained": model.pretrained,
        **model.tower_arguments,
    }
    if isinstance(model.name, str):
        path = Path(model.name.removeprefix("local-dir:"))
        if model.name.startswith(transformers_folder.PREFIX):
            fields["name"] = transformers_folder.digest(model.name)
        elif (path / weights.CONCAT).is_file():
            joined = (weights.CONCAT, weights.CONCAT_WEIGHTS)
            fields["name"] = files.digest_json([files.digest_file(path / name) for name in joined])
        elif path.is_dir():
            config = weights.read_config(path)
            parts = [config.get(name) for name in ("model_cfg", "preprocess_cfg")]
            digest = files.digest_file(weights.find_weights(path))
            fields["name"] = files.digest_json([*parts, digest])
        elif path.is_file():
            fields["name"] = files.digest_json(files.read_json(path))
    if model.pretrained is not None and Path(model.pretrained).is_file():
        fields["pretrained"] = files.digest_file(Path(model.pretrained))
    fields["text_rows"] = width_of(model.text_rows) if model.text_rows else None
    if model.image_weights is not None:
        with prefix_errors("image_weights"):
            weights.check_header(Path(model.image_weights))
            fields["image_weights"] = files.digest_file(Path(model.image_weights))
    return fields


def digests_of_files(model: ModelConfig) -> dict[str, str]:
    """Returns the digests of the files that ``name``, ``pretrained`` and ``image_weights`` stand
    for, by these names; none for what open_clip names."""
    fields, names = identify_encoder(model), ("name", "pretrained", "image_weights")
    return {n: fields[n] for n in names if fields.get(n) not in (None, getattr(model, n))}


@dataclass(frozen=True)
class EncoderName:
    """Says what the name of an encoder stands for.

    where       a name of open_clip's or of a hub, a model config, or a folder
    pretrained  the tag or file of its weights; None: they lie in the folder, or are random
    concat      the folder, if it is a concat's
    """

    where: str | Path
    pretrained: str | None
    concat: Path | None


def resolve_name(name: str | Path, pretrained: str | None = None) -> EncoderName:
    """Returns what the name of an encoder stands for: a folder, or NAME@PRETRAINED, unless
    ``pretrained`` is given. Raises ValueError for an architecture without weights, and for a concat
    with others."""
    where, tag = (name, pretrained) if pretrained is not None else split_name(name)
    path = Path(str(where).removeprefix("local-dir:"))
    if (path / weights.CONCAT).is_file():
        clip.refuse_pretrained(str(where), tag)
        return EncoderName(where, None, path)
    if tag is None:
        refuse_without_weights(where)
    is_random = tag == RANDOM and clip.is_without_weights(where)
    return EncoderName(where, None if is_random else tag, None)


def check_encoder(name: str, *, text: bool) -> None:
    """Raises ValueError or FileNotFoundError for an encoder that `load_model` does not load, and
    for one without a text tower if it is to read texts (``text``). No weights are read."""
    encoder = resolve_name(name)
    if encoder.concat is None:
        model_cfg = model_config(encoder.where, encoder.pretrained)
        if text and WIDTH in model_cfg.get("text_cfg", {}):
            raise ValueError(READS_ROWS)
    if text and not has_texts(encoder.where):
        raise ValueError("it has no text tower: set between=images, or take another teacher")
    if text and encoder.concat is None:
        model_tokenizer(encoder.where)


def split_name(where: str | Path) -> tuple[str, str | None]:
    """Splits ``NAME@PRETRAINED`` into name and tag; the tag is None if nothing follows the @.

    An existing path is a name, even with an @ in it, and an existing file is a tag. The name of a
    model config that is shipped beside the recipes, such as ``tiny_clip``, becomes its path.
    """
    path = str(where).removeprefix(transformers_folder.PREFIX).removeprefix("local-dir:")
    name, tag = where, None
    if "@" in path and not Path(path).exists():
        parts = str(where).split("@")
        splits = [("@".join(parts[:n]), "@".join(parts[n:])) for n in range(1, len(parts))]
        name, tag = next((split for split in splits if Path(split[1]).is_file()), splits[-1])
    return shipped.model_config(str(name)), tag or None
