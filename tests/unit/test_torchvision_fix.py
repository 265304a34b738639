"""The torchvision fix; other cases have processes of their own: operators cannot be taken back.

These are forked from one that has imported torch, which takes seconds.
"""

import os
import sys

import pytest

from mclclip.util.torchvision_fix import status
from tests.forks import python

# A package of torchvision's name, whose loader finds its extension by a rule of its own.
# The loader runs twice; as a shared library does, it declares its operators once.
LOADS = """
import torch
if not hasattr(torch.ops.torchvision, "nms"):
    torch.library_of_test = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        torch.library_of_test.define(name + "(Tensor dets) -> Tensor")
"""
ASK = """
import os, sys, torch
for folder in sys.argv[1:]:
    if not (child := os.fork()):
        sys.path.insert(0, folder)
        from mclclip.util.torchvision_fix import status
        ahead = [name for name in sys.modules if name.startswith("torchvision")]
        import torchvision
        found = (ahead, hasattr(torch.ops.torchvision, "nms"), torchvision.whole)
        print(status(), "|", *found, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, folder
"""
LOADERS = {"loads": LOADS, "loads none": "loaded = False\n", "has no loader": None}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process prints whose torchvision has each of the loaders."""
    folders = []
    for loader in LOADERS.values():
        folders.append(tmp_path_factory.mktemp("other"))
        package = folders[-1] / "torchvision"
        package.mkdir()
        imports = "" if loader is None else "from . import extension\n"
        (package / "__init__.py").write_text(imports + "whole = True\n")
        if loader is not None:
            (package / "extension.py").write_text(loader)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = python(ASK, *folders, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(zip(LOADERS, done.stdout.splitlines(), strict=True))


def test_torchvision_and_open_clip_import_after_the_fix() -> None:
    """In this process, where every test that imports them imports the fix before."""
    import open_clip
    import torchvision.transforms

    assert status().startswith(("applied", "not needed"))
    assert callable(open_clip.create_model) and callable(torchvision.transforms.Compose)


def test_operators_are_declared_where_torchvision_does_not_load_them(told: dict[str, str]) -> None:
    """Whatever the extension's file is called: an operator that is declared here and then loaded
    for real ends the process. Nothing is declared where the loader is not found."""
    for loader, state, end in (
        ("loads", "not needed", "| [] True True"), ("loads none", "applied", "| [] True True"),
        ("has no loader", "not applied", "| [] False True"),
    ):  # fmt: skip
        assert told[loader].startswith(state) and told[loader].endswith(end)


@pytest.mark.slow
def test_leaves_operators_that_exist() -> None:
    code = "from mclclip.util.torchvision_fix import status; print(status())"
    done = python(LOADS + code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not needed: the operators exist already")
