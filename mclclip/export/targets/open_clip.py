"""A stage or soup as plain open_clip's directory, for a hub or another machine.

An export is such a directory already; this copy adds a certificate and a card, and leaves out the
files of the run. open_clip loads it as `local-dir:FOLDER`, or after `hf upload` from a hub as
`hf-hub:ORG/NAME`.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from mclclip.export import certificate
from mclclip.export.certificate import Certificate, Probes
from mclclip.export.targets import ExportTarget, Source
from mclclip.models import weights
from mclclip.models.encoder import load_model


def write(source: Source, out: Path) -> None:
    """Writes configuration, weights and the tokenizer's files. Raises ValueError for a joined
    encoder and for an image encoder, which plain open_clip cannot load."""
    source.single("plain open_clip").save(out, weights.base_digest(source.directory))


def certify(source: Source, out: Path, probes: Probes) -> list[Certificate]:
    """The towers in the folder, their image transform and tokenizer, as open_clip builds them."""
    runtime = f"open_clip {version('open_clip_torch')}"
    return [certificate.compare(source.encoder, load_model(out), runtime, probes)]


TARGET = ExportTarget(write, certify)
