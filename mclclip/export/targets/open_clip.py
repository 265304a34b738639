"""Writes a stage or soup as a directory of plain open_clip, for a hub or another machine.

An export is such a directory already; this copy has a certificate and a card in addition, and none
of the run's files. open_clip loads it as `local-dir:FOLDER`, or, after `hf upload`, as
`hf-hub:ORG/NAME`.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from mclclip.export import certificate
from mclclip.export.certificate import Certificate, Probes
from mclclip.export.targets import Source
from mclclip.models import weights
from mclclip.models.encoder import load_model

CARD: dict[str, str] = {}
IS_MODEL = True


def write(source: Source, out: Path) -> None:
    """Writes configuration, weights and the tokenizer's files.

    Raises ValueError for a joined encoder or an image encoder, which open_clip cannot load.
    """
    source.single("plain open_clip").save(out, weights.base_digest(source.directory))


def certify(source: Source, out: Path, probes: Probes) -> list[Certificate]:
    """Compares the model in the folder, with its image transform and tokenizer, in open_clip."""
    runtime = f"open_clip {version('open_clip_torch')}"
    return [certificate.compare(source.encoder, load_model(out), runtime, probes)]
