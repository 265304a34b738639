"""Writes exported models: their folders, model cards, and the layouts of other libraries."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mclclip.models import weights
from mclclip.run.artifacts import Artifact, Force
from mclclip.run.recorder import not_finite
from mclclip.util import files

log = logging.getLogger("mclclip")


def write_export(
    directory: Path,
    kind: str,
    fields: dict[str, Any],
    inputs: dict[str, str],
    force: Force,
    write: Callable[[Path], dict[str, Any]],
) -> Path:
    """Writes an exported model unless it is finished, and returns its directory.

    ``write`` fills the directory and returns counts for the manifest. Raises RuntimeError, and
    removes the directory, where the weights are not finite.
    """
    artifact = Artifact.open(directory, kind=kind, config=fields, inputs=inputs, force=force)
    if artifact.finished:
        log.info("%s is finished: skipped", directory)
        return directory
    files.remove_leftovers(directory)
    counts = write(directory)
    weight_files = sorted(directory.glob("*.safetensors"))
    tensors = {name: t for path in weight_files for name, t in weights.read_tensors(path).items()}
    if wrong := not_finite(tensors):
        shutil.rmtree(directory)
        raise RuntimeError(
            f"{directory} is not exported: {len(wrong)} of {len(tensors)} tensors of its weights "
            f"are not finite, such as {wrong[0]}. The encoder or training it comes from has "
            "diverged: train it again with a lower lr, in another run directory or with --force"
        )
    digests = {path.name: files.digest_file(path) for path in weight_files}
    if (joined := directory / weights.CONCAT).is_file():  # how stages are joined, and their weights
        digests[joined.name] = files.digest_file(joined)
    config = weights.read_config(directory)
    artifact.finish(
        counts,
        content_digest=files.digest_json([config, digests]),
        records=files.records_of(directory, *weights.files_of(directory)),
    )
    log.info("wrote %s", directory)
    return directory
