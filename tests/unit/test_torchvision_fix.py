"""The torchvision fix, each case in a process of its own: operators cannot be taken back."""

import subprocess
import sys

from tests.matrix import in_soak


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torchvision_and_open_clip_import_after_the_fix() -> None:
    out = run(
        "from mclclip.torchvision_fix import status; print(status())\n"
        "import torchvision.transforms, torchvision.models, open_clip"
    )
    assert out.startswith(("applied", "not needed"))


@in_soak
def test_does_nothing_where_the_extension_loads() -> None:
    out = run(
        "import torch; torch.ops.load_library = lambda path: None\n"
        "from mclclip.torchvision_fix import status, _libraries\n"
        "print(status(), len(_libraries), hasattr(torch.ops.torchvision, 'nms'))"
    )
    assert out == "not needed: torchvision's extension loads 0 False"


@in_soak
def test_leaves_operators_that_exist() -> None:
    out = run(
        "import torch; mine = torch.library.Library('torchvision', 'DEF')\n"
        "mine.define('nms(Tensor dets) -> Tensor')\n"
        "from mclclip.torchvision_fix import status, _libraries\n"
        "print(status(), len(_libraries))"
    )
    assert out == "not needed: the operators exist already 0"
