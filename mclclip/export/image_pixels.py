"""The own image processor of exports for transformers, written beside weights and read again."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from mclclip import files
from mclclip.models import transformers_encoder

PROCESSOR = "image_processing_open_clip"
"""Module of the own image processor, here and in exports."""


def add_processor(out: Path) -> None:
    """Copies the own image processor beside a stock one, whose settings name it as remote code.

    Without `trust_remote_code`, transformers' AutoImageProcessor then takes the stock one.
    """
    path = out / transformers_encoder.PREPROCESSOR
    record: dict[str, Any] = files.read_json(path)
    record["auto_map"] = {"AutoImageProcessor": f"{PROCESSOR}.OpenClipImageProcessor"}
    files.write_json(path, record)
    own = Path(__file__).with_name(f"{PROCESSOR}.py")
    files.write_bytes(out / own.name, own.read_bytes())


def own_processor(out: Path) -> Any:
    """The own image processor with the settings of a folder: the class of this package, never the
    file in the folder."""
    cls = import_module(f"mclclip.export.{PROCESSOR}").OpenClipImageProcessor
    return cls.from_pretrained(str(out))
