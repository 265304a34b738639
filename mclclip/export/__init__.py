"""Exports models: writes exported models, model cards, and the layouts of other libraries."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mclclip.models import transformers_folder, weights
from mclclip.models.encoder import Encoder
from mclclip.models.options import ModelConfig
from mclclip.run.artifacts import Artifact
from mclclip.run.recorder import not_finite
from mclclip.run.steps import Made, Step
from mclclip.util import files

log = logging.getLogger("mclclip")


Writing = tuple[Mapping[str, str], Callable[[Path], dict[str, Any]]]
"""How a model is written: digests of its inputs by name, and a function that fills its directory
and returns counts for the manifest."""


def counts_of(encoder: Encoder) -> dict[str, Any]:
    """Returns what an export's manifest says of its encoder: the number of ``parameters``, the
    ``width`` of its features, and its ``logit_scale``, None without a text tower."""
    return {
        "parameters": sum(p.numel() for p in encoder.parameters()),
        "width": encoder.embed_dim,
        "logit_scale": encoder.logit_scale if encoder.stages[0].reads_texts else None,
    }


class ExportStep(Step[Writing]):
    """An exported model."""

    def reads(self, how: Writing) -> Mapping[str, str]:
        """Returns the digests of the inputs."""
        return how[0]

    def make(self, out: Artifact, how: Writing) -> Made:
        """Writes the model. Raises RuntimeError, and removes the directory, if its weights are not
        finite."""
        directory = out.begin()
        files.remove_leftovers(directory)
        counts = how[1](directory)
        weight_files = sorted(directory.glob("*.safetensors"))
        tensors = {
            name: t for path in weight_files for name, t in weights.read_tensors(path).items()
        }
        if wrong := not_finite(tensors):
            shutil.rmtree(directory)
            raise RuntimeError(
                f"{directory} is not exported: {len(wrong)} of {len(tensors)} tensors of its "
                f"weights are not finite, such as {wrong[0]}. The encoder or training it comes "
                "from has diverged: train it again with a lower lr, in another run directory or "
                "with --force"
            )
        digests = {path.name: files.digest_file(path) for path in weight_files}
        if (joined := directory / weights.CONCAT).is_file():  # says how stages are joined
            digests[joined.name] = files.digest_file(joined)
        digest = files.digest_json([weights.read_config(directory), digests])
        log.info("wrote %s", directory)
        records = files.records_of(directory, *weights.files_of(directory))
        return Made(counts, records, digest=digest)


def identify_encoder(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields of ``model`` that determine an encoder which is not trained here; files
    are represented by their digests."""
    fields = {name: getattr(model, name) for name in ("name", "pretrained", "text", "long_context")}
    if isinstance(model.name, str):
        path = Path(model.name.removeprefix("local-dir:"))
        if model.name.startswith(transformers_folder.PREFIX):
            fields["name"] = transformers_folder.digest(model.name)
        elif (path / weights.CONCAT).is_file():
            joined = (weights.CONCAT, weights.CONCAT_WEIGHTS)
            fields["name"] = files.digest_json([files.digest_file(path / name) for name in joined])
        elif path.is_dir():
            fields["name"] = files.digest_file(weights.find_weights(path))
        elif path.is_file():
            fields["name"] = files.digest_json(files.read_json(path))
    if model.pretrained is not None and Path(model.pretrained).is_file():
        fields["pretrained"] = files.digest_file(Path(model.pretrained))
    if model.image_weights is not None:
        fields["image_weights"] = files.digest_file(
            weights.checked_image_weights(model.image_weights)
        )
    return fields
