"""Makes torchvision importable beside a torch that its compiled extension does not fit.

The wheels of torchvision on PyPI are linked against CUDA. Beside a CPU-only torch the extension
does not load, the operators it would declare are missing, and `import torchvision` (so open_clip
and timm) fails with `operator torchvision::nms does not exist`. Declaring the schemas of the two
operators that torchvision's import refers to is enough for transforms, models and data sets.
`ops.nms` and `io.decode_jpeg` stay unavailable.

Import this module before torchvision, open_clip or timm, in every process:

    import mclclip.util.torchvision_fix  # noqa: F401

It does nothing if the operators exist after torchvision's own loader has run. If torchvision's
loader is not found, nothing is declared either: if the real operator were loaded later, a second
declaration of it would end the process.
"""

import importlib
import importlib.util
import sys
import types

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# This list keeps the libraries alive: the operators of a garbage-collected Library disappear.
_libraries: list[torch.library.Library] = []


def status() -> str:
    """Returns one phrase for `mclclip doctor`: whether the fix was applied, and why."""
    return _STATUS


def _operators_exist() -> bool:
    return hasattr(torch.ops.torchvision, "nms")


def _load_extension(folders: list[str]) -> None:
    """Runs torchvision's own module that loads its extension, without the rest of the package.

    That module knows which file the extension is; this differs from release to release. Importing
    all of torchvision instead would leave half of it behind in ``sys.modules`` if it fails.
    """
    package = types.ModuleType("torchvision")
    package.__path__ = folders
    sys.modules["torchvision"] = package
    try:
        importlib.import_module("torchvision.extension")
    except RuntimeError:  # built for another CUDA than torch: `import torchvision` will say so
        return
    finally:
        for name in [*sys.modules]:
            if name.partition(".")[0] == "torchvision":
                del sys.modules[name]


def _apply() -> str:
    """Declares the missing schemas; returns the status."""
    package = importlib.util.find_spec("torchvision")
    if package is None:
        return "not needed: torchvision is not installed"
    if _operators_exist():
        return "not needed: the operators exist already"
    try:
        _load_extension([*(package.submodule_search_locations or [])])
    except ModuleNotFoundError as error:
        return f"not applied: this torchvision has no {error.name}"
    if _operators_exist():
        return "not needed: torchvision's extension loads"
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)  # type: ignore[no-untyped-call]
    _libraries.append(library)
    return "applied: torchvision's extension does not load beside this torch"


_STATUS = _apply()
