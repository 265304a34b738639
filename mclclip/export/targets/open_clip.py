"""Writes a stage or soup as a directory of plain open_clip, for a hub or another machine.

An export is such a directory already; this copy has a certificate and a card in addition, and none
of the run's files. open_clip loads it as `local-dir:FOLDER`, or, after `hf upload`, as
`hf-hub:ORG/NAME`.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from mclclip.export import certificate
from mclclip.export.certificate import Certificate, Probes
from mclclip.export.targets import ExportTarget, Source
from mclclip.models import weights
from mclclip.models.encoder import load_model


def write(source: Source, out: Path) -> None:
    """Writes configuration, weights and the tokenizer's files.

    Raises ValueError for a joined encoder or an image encoder, which open_clip cannot load.
    """
    source.single("plain open_clip").save(out, weights.base_digest(source.directory))


def certify(source: Source, out: Path, probes: Probes) -> list[Certificate]:
    """Compares the model in the folder, with its image transform and tokenizer, in open_clip, as
    mclclip loads it."""
    runtime = f"open_clip {version('open_clip_torch')}, loaded by mclclip"
    notes = _notes_on_size(source.encoder.stages[0])
    return [certificate.compare(source.encoder, load_model(out), runtime, probes, notes=notes)]


def _notes_on_size(model: Any) -> list[str]:
    """Says how plain open_clip loads a tower of timm at another size than timm's name stands for.

    open_clip builds the tower for that size, whose number of positions is another.
    """
    trunk, size = getattr(model.visual, "trunk", None), model.image_size
    native = (getattr(trunk, "default_cfg", None) or {}).get("input_size") or (size,)
    if getattr(trunk, "pos_embed", None) is None or native[-1] == size:
        return []
    return [
        f"The image tower takes pictures of {size} pixels, and timm's name stands for {native[-1]}:"
        f" plain open_clip loads it by create_model('local-dir:FOLDER', load_weights=False, "
        f"force_image_size={size}), then load_checkpoint(model, 'FOLDER/{weights.WEIGHTS}')."
    ]


TARGET = ExportTarget(write, certify)
