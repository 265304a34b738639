"""Make torchvision importable beside a torch that its compiled extension does not fit.

The wheels of torchvision on PyPI are linked against CUDA. Beside a CPU-only torch the extension
does not load, the operators it would declare are missing, and `import torchvision` (so open_clip
and timm) fails with `operator torchvision::nms does not exist`. Declaring the schemas of the two
operators that torchvision's import refers to is enough for transforms, models and data sets.
`ops.nms` and `io.decode_jpeg` stay unavailable.

Import this module before torchvision, open_clip or timm, in every process:

    import mclclip.torchvision_fix  # noqa: F401

It does nothing where the extension loads, and nothing a second time.
"""

import importlib.machinery
import importlib.util
from pathlib import Path

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# Kept alive: when a Library is garbage-collected, its operators disappear.
_libraries: list[torch.library.Library] = []


def status() -> str:
    """Returns one phrase for `mclclip doctor`: whether the fix was applied, and why."""
    return _STATUS


def _extension_path() -> Path | None:
    """Returns the file of torchvision's extension, by the rule torchvision itself uses.

    torchvision is not imported for it, because a failed import would leave half a package behind.
    """
    package = importlib.util.find_spec("torchvision")
    if package is None or not package.submodule_search_locations:
        return None
    finder = importlib.machinery.FileFinder(
        package.submodule_search_locations[0],
        (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
    )
    extension = finder.find_spec("_C")
    return Path(extension.origin) if extension and extension.origin else None


def _extension_loads() -> bool:
    path = _extension_path()
    if path is None:
        return False
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except (ImportError, OSError):
        return False  # linked against libraries that this torch does not bring
    return True


def _apply() -> str:
    """Declares the missing schemas; returns the status."""
    if importlib.util.find_spec("torchvision") is None:
        return "not needed: torchvision is not installed"
    if hasattr(torch.ops.torchvision, "nms"):
        return "not needed: the operators exist already"
    if _extension_loads():
        return "not needed: torchvision's extension loads"
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)  # type: ignore[no-untyped-call]
    _libraries.append(library)
    return "applied: torchvision's extension does not load beside this torch"


_STATUS = _apply()
