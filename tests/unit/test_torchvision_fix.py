"""The torchvision fix; other cases have processes of their own: operators cannot be taken back."""

import subprocess
import sys

from mclclip.torchvision_fix import status
from tests.matrix import in_soak


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torchvision_and_open_clip_import_after_the_fix() -> None:
    """In this process, where every test that imports them imports the fix before."""
    import open_clip
    import torchvision.transforms

    assert status().startswith(("applied", "not needed"))
    assert callable(open_clip.create_model) and callable(torchvision.transforms.Compose)


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
