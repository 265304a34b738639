"""A stage or soup as plain open_clip's directory, for a hub or another machine.

An export is such a directory already; this one has a certificate and a card too, and what belongs
to the run is left behind. open_clip loads it as `local-dir:FOLDER`, and from a hub as
`hf-hub:ORG/NAME`.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from mclclip.export import certificate
from mclclip.export.certificate import Certificate
from mclclip.export.target import Material, Source
from mclclip.models import weights
from mclclip.models.encoder import load_model


def write(source: Source, out: Path) -> None:
    """Writes configuration, weights and the tokenizer's files. Raises ValueError for a joined
    encoder and for an image encoder, which plain open_clip cannot load."""
    source.single("plain open_clip").save(out, weights.base_digest(source.directory))


def certify(source: Source, out: Path, material: Material) -> list[Certificate]:
    """The towers in the folder, their image transform and tokenizer, as open_clip builds them."""
    other, runtime = load_model(out), f"open_clip {version('open_clip_torch')}"
    return [certificate.compare(source.encoder, other, runtime, material.images, material.texts)]
