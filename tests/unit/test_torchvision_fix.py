"""The torchvision fix; other cases have processes of their own: operators cannot be taken back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mclclip.util.torchvision_fix import status

# A package of torchvision's name, whose loader finds its extension by a rule of its own.
# The loader runs twice; as a shared library does, it declares its operators once.
LOADS = """
import torch
if not hasattr(torch.ops.torchvision, "nms"):
    torch.library_of_test = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        torch.library_of_test.define(name + "(Tensor dets) -> Tensor")
"""
ASK = (
    "from mclclip.util.torchvision_fix import status\n"
    "import sys, torch\n"
    "ahead = [name for name in sys.modules if name.startswith('torchvision')]\n"
    "import torchvision\n"
    "print(status(), '|', ahead, hasattr(torch.ops.torchvision, 'nms'), torchvision.whole)"
)


def ask(folder: Path, loader: str | None) -> str:
    """Returns what a process prints whose torchvision lies in ``folder`` and has this loader."""
    package = folder / "torchvision"
    package.mkdir()
    imports = "" if loader is None else "from . import extension\n"
    (package / "__init__.py").write_text(imports + "whole = True\n")
    if loader is not None:
        (package / "extension.py").write_text(loader)
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torchvision_and_open_clip_import_after_the_fix() -> None:
    """In this process, where every test that imports them imports the fix before."""
    import open_clip
    import torchvision.transforms

    assert status().startswith(("applied", "not needed"))
    assert callable(open_clip.create_model) and callable(torchvision.transforms.Compose)


def test_operators_that_torchvision_loads_are_not_declared(tmp_path: Path) -> None:
    """Whatever the extension's file is called: an operator that is declared here and then loaded
    for real ends the process."""
    out = ask(tmp_path, LOADS)
    assert out.startswith("not needed") and out.endswith("| [] True True")


def test_operators_that_torchvision_does_not_load_are_declared(tmp_path: Path) -> None:
    out = ask(tmp_path, "loaded = False\n")
    assert out.startswith("applied") and out.endswith("| [] True True")


def test_nothing_is_declared_where_the_loader_is_not_found(tmp_path: Path) -> None:
    out = ask(tmp_path, None)
    assert out.startswith("not applied") and out.endswith("| [] False True")


@pytest.mark.slow
def test_leaves_operators_that_exist() -> None:
    code = "from mclclip.util.torchvision_fix import status; print(status())"
    done = subprocess.run(
        [sys.executable, "-c", LOADS + code], capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not needed: the operators exist already")
