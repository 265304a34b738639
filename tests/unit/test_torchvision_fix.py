"""The torchvision fix; other cases have processes of their own: operators cannot be taken back."""

import subprocess
import sys

import pytest

from mclclip.torchvision_fix import status

# A package of torchvision's name, whose loader finds its extension by a rule of its own.
# The loader runs twice; as a shared library does, it declares its operators once.
LOADS = """
import torch
if not hasattr(torch.ops.torchvision, "nms"):
    torch.library_of_test = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        torch.library_of_test.define(name + "(Tensor dets) -> Tensor")
"""


def test_torchvision_and_open_clip_import_after_the_fix() -> None:
    """In this process, where every test that imports them imports the fix before."""
    import open_clip
    import torchvision.transforms

    assert status().startswith(("applied", "not needed"))
    assert callable(open_clip.create_model) and callable(torchvision.transforms.Compose)


@pytest.mark.slow
def test_leaves_operators_that_exist() -> None:
    code = "from mclclip.torchvision_fix import status; print(status())"
    done = subprocess.run(
        [sys.executable, "-c", LOADS + code], capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not needed: the operators exist already")
