"""The image processors of exports for transformers: a stock one, and one of open_clip's pixels."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mclclip import files
from mclclip.models import transformers_encoder

PROCESSOR = "image_processing_open_clip"
"""Module of the own image processor, here and in exports."""


def write_processors(out: Path, settings: Mapping[str, Any], kind: str) -> None:
    """Writes a stock image processor of the class `kind`, whose file names the own one as remote
    code, and the own one's code. Without `trust_remote_code`, transformers' AutoImageProcessor
    takes the stock one.

    `settings` are open_clip's options of the validation transform. Raises ValueError for a way to
    resize that transformers has not.
    """
    resize, size = settings.get("resize_mode") or "shortest", settings["size"]
    height, width = size if isinstance(size, list | tuple) else (size, size)
    sides = {"height": height, "width": width}
    if resize == "longest" or (resize == "shortest" and height != width):
        raise ValueError(
            f"images of {height} x {width} pixels resized by their {resize} side have no image "
            "processor in transformers"
        )
    methods = {"bicubic": 3, "bilinear": 2, "nearest": 0}
    record = {
        "image_processor_type": kind,
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": height} if resize == "shortest" else sides,
        "resample": methods[settings.get("interpolation") or "bicubic"],
        "do_center_crop": resize == "shortest",
        "crop_size": sides,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(settings["mean"]),
        "image_std": list(settings["std"]),
        "auto_map": {"AutoImageProcessor": f"{PROCESSOR}.OpenClipImageProcessor"},
    }
    files.write_json(out / transformers_encoder.PREPROCESSOR, record)
    own = Path(__file__).with_name(f"{PROCESSOR}.py")
    files.write_bytes(out / own.name, own.read_bytes())


def own_processor(out: Path) -> Any:
    """The own image processor with the settings of a folder: the class of this package, never the
    file in the folder."""
    cls = import_module(f"mclclip.export.{PROCESSOR}").OpenClipImageProcessor
    return cls.from_pretrained(str(out))
