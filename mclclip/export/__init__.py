"""Exports models: writes exported models, model cards, and the layouts of other libraries."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mclclip.models import weights
from mclclip.run.artifacts import Artifact
from mclclip.run.recorder import not_finite
from mclclip.run.steps import Made, Step
from mclclip.util import files

log = logging.getLogger("mclclip")


Writing = tuple[Mapping[str, str], Callable[[Path], dict[str, Any]]]
"""How a model is written: digests of its inputs by name, and a function that fills its directory
and returns counts for the manifest."""


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
