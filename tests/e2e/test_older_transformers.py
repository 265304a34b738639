"""Exports as transformers 4.37.2 reads them, which LLaVA's own code pins.

It runs in an environment of its own, which has the packages of this one and three older ones. They
come from the package index, or from the folder of wheels that PIP_FIND_LINKS names.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import mclclip
from mclclip.export import convert
from mclclip.models.clip import load_clip
from mclclip.models.concat import save_concat
from tests.unit.export.test_convert import exported
from tests.unit.export.test_onnx import stages

pytestmark = pytest.mark.slow
OLDER = ("transformers==4.37.2", "tokenizers==0.15.2", "huggingface_hub==0.25.2")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with transformers 4.37.2; skips where it cannot be had."""
    folder = tmp_path_factory.mktemp("older")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    found = folder / "bin" / "python"
    pip = [found, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", "--retries", "1", *OLDER], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"{', '.join(OLDER)} cannot be installed here: {done.stderr.strip()[-200:]}")
    of_it = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = subprocess.run([found, "-c", of_it], check=True, capture_output=True, text=True)
    path = Path(purelib.stdout.strip()) / "venv.pth"
    path.write_text("\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n")
    return found


def answers(python: Path, folder: Path, program: str) -> dict[str, object]:
    """What a program prints as JSON, in the older environment and without mclclip."""
    head = "import json, sys, torch, transformers\nassert transformers.__version__ == '4.37.2'\n"
    head += "folder = sys.argv[1]\npixels = torch.load(f'{folder}/pixels.pt')\n"
    done = subprocess.run(
        [python, "-I", "-c", head + textwrap.dedent(program), folder],
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_clip_and_its_tower(tmp_path: Path, python: Path) -> None:
    source = exported(tmp_path / "own")
    convert.run("hf", source, tmp_path / "hf")
    convert.run("llava", source, tmp_path / "llava")
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.save(pixels, tmp_path / "pixels.pt")
    found = answers(
        python, tmp_path, """
        model = transformers.CLIPModel.from_pretrained(f'{folder}/hf').eval()
        tower, info = transformers.CLIPVisionModel.from_pretrained(
            f'{folder}/llava', output_loading_info=True)
        tokens = transformers.CLIPTokenizer.from_pretrained(f'{folder}/hf')(
            ['a dog'], padding='max_length', max_length=16, return_tensors='pt')
        from PIL import Image
        processor = transformers.AutoImageProcessor.from_pretrained(
            f'{folder}/hf', trust_remote_code=True)
        image = Image.linear_gradient('L').resize((47, 32)).convert('RGB')
        with torch.no_grad():
            print(json.dumps({
                'missing': info['missing_keys'],
                'images': model.get_image_features(pixels).tolist(),
                'texts': model.get_text_features(**tokens).tolist(),
                'states': tower.eval()(
                    pixels, output_hidden_states=True).hidden_states[-2].tolist(),
                'processor': type(processor).__name__,
                'pixels': processor(images=image, return_tensors='pt')['pixel_values'].tolist(),
            }))
        """,
    )  # fmt: skip
    own, model = mclclip.load_model(source), load_clip(source).eval()
    assert found["missing"] == [] and found["processor"] == "OpenClipImageProcessor"
    with torch.no_grad():
        wanted = {
            "images": model.encode_image(pixels),
            "texts": model.encode_text(own.tokenizer(["a dog"])),
            "states": model.encode_trunk(pixels, 2),
        }
    for name, value in wanted.items():
        torch.testing.assert_close(torch.tensor(found[name]), value, atol=1e-4, rtol=1e-4)
    from PIL import Image

    image = Image.linear_gradient("L").resize((47, 32)).convert("RGB")
    assert torch.equal(torch.tensor(found["pixels"])[0], own.preprocess_val(image))


def test_a_joined_encoder_by_the_code_beside_it(tmp_path: Path, python: Path) -> None:
    save_concat(stages(tmp_path, trunk=1), "raw", tmp_path / "concat")
    for to in ("hf", "llava"):
        convert.run(to, tmp_path / "concat", tmp_path / to)  # type: ignore[arg-type]
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.save(pixels, tmp_path / "pixels.pt")
    found = answers(
        python, tmp_path, """
        load = transformers.AutoModel.from_pretrained
        model = load(f'{folder}/hf', trust_remote_code=True).eval()
        tower = load(f'{folder}/llava', trust_remote_code=True).eval()
        with torch.no_grad():
            states = tower(pixels, output_hidden_states=True).hidden_states
            print(json.dumps({
                'images': model.get_image_features(pixels).tolist(),
                'states': [state.tolist() for state in states],
            }))
        """,
    )  # fmt: skip
    own = mclclip.load_model(tmp_path / "concat")
    images, states = torch.tensor(found["images"]), torch.tensor(found["states"])
    torch.testing.assert_close(images, own.encode_image(pixels), atol=1e-5, rtol=0)
    wanted = [stage.encode_trunk(pixels, 2) for stage in own.stages]  # type: ignore[attr-defined]
    torch.testing.assert_close(states, torch.stack(wanted), atol=1e-4, rtol=1e-4)
