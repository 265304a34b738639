"""Exports as transformers 4.37.2 reads them, which LLaVA's own code pins, and LLaVA around them.

It runs in an environment of its own, which has the packages of this one and three older ones. They
come from the package index, or from the folder of wheels that PIP_FIND_LINKS names.

Version 4.37 differs from 5 in what its LLaVA can take:

- It does not follow the `auto_map` of a `vision_config`: the tower's own type is unknown to
  `LlavaConfig` until the code beside the tower has been loaded, in every process
  (`AutoConfig.from_pretrained(TOWER, trust_remote_code=True)`).
- It reads a single state: a list in `vision_feature_layer` is a TypeError. The state that all
  stages have joined is -2, and `hidden_size` says how many channels that has.

LLaVA's own code (`clip_encoder.py`) goes without transformers' LLaVA. It loads the tower by
`CLIPVisionModel`, takes `hidden_states[-2]` without the class token, and reads `hidden_size`,
`image_size` and `patch_size` in the tower's configuration. `CLIPVisionModel` fills a joined tower
at random with no more than a warning, so that this line has to name `AutoModel` there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import mclclip
from mclclip.export import convert
from mclclip.models.encoder import save_concat
from mclclip.models.loading import load_towers
from tests.unit.export import tiny_llava
from tests.unit.export.models import exported, stages

pytestmark = pytest.mark.slow
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
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


def answers(python: Path, folder: Path, program: str) -> dict[str, Any]:
    """What a program prints as JSON, in the older environment and without mclclip."""
    head = f"""
        import importlib.util, json, sys, torch, transformers
        assert transformers.__version__ == '4.37.2'
        folder = sys.argv[1]
        pixels = torch.load(f'{{folder}}/pixels.pt')
        spec = importlib.util.spec_from_file_location('tiny_llava', {tiny_llava.__file__!r})
        tiny_llava = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tiny_llava)

        def of_llavas_own_code(tower):
            # What its clip_encoder.py asks of a tower.
            tower.requires_grad_(False)
            read = tower(pixels.to(device=tower.device, dtype=tower.dtype),
                         output_hidden_states=True).hidden_states[-2][:, 1:].to(pixels.dtype)
            patches = (tower.config.image_size // tower.config.patch_size) ** 2
            assert read.shape[1:] == (patches, tower.config.hidden_size)
            return read

        def llavas(tower, path):
            # transformers' LLaVA around it, and the same after it was written and read.
            llava = tiny_llava.around(tower, -2)
            read, logits = tiny_llava.forward(llava, pixels)
            again = tiny_llava.forward(tiny_llava.reloaded(llava, path), pixels)
            return {{
                'by_its_own_code': of_llavas_own_code(tower).tolist(),
                'projected': read.tolist(),
                'logits': [*logits.shape, float(logits.std())],
                'same_again': torch.equal(again[0], read) and torch.equal(again[1], logits),
            }}
    """
    done = subprocess.run(
        [python, "-I", "-c", textwrap.dedent(head) + textwrap.dedent(program), folder],
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_llava(found: dict[str, Any], wanted: torch.Tensor) -> None:
    """Patches [B, patches, channels] that reach the projector are the wanted ones, by both ways."""
    for way in ("projected", "by_its_own_code"):
        torch.testing.assert_close(torch.tensor(found[way]), wanted, atol=1e-5, rtol=1e-5)
    *shape, spread = found["logits"]
    assert shape == [len(wanted), wanted.shape[1] + 3, 100] and spread > 1e-3
    assert found["same_again"]


def test_a_clip_and_llava_around_its_tower(python: Path, tmp_path: Path) -> None:
    folder, source = tmp_path, exported(tmp_path / "own")
    convert.run("hf", source, folder / "hf")
    convert.run("llava", source, folder / "llava")
    torch.save(PIXELS, folder / "pixels.pt")
    found = answers(
        python, folder, """
        model = transformers.CLIPModel.from_pretrained(f'{folder}/hf').eval()
        tower, info = transformers.CLIPVisionModel.from_pretrained(
            f'{folder}/llava', output_loading_info=True)
        tokens = transformers.CLIPTokenizer.from_pretrained(f'{folder}/hf')(
            ['a dog'], padding='max_length', max_length=16, return_tensors='pt')
        from PIL import Image
        processor = transformers.AutoImageProcessor.from_pretrained(
            f'{folder}/hf/exact_processor', trust_remote_code=True)
        image = Image.linear_gradient('L').resize((47, 32)).convert('RGB')
        with torch.no_grad():
            print(json.dumps({
                'missing': info['missing_keys'],
                'images': model.get_image_features(pixels).tolist(),
                'texts': model.get_text_features(**tokens).tolist(),
                'processor': type(processor).__name__,
                'pixels': processor(images=image, return_tensors='pt')['pixel_values'].tolist(),
                'llava': llavas(tower.eval(), f'{folder}/saved'),
            }))
        """,
    )  # fmt: skip
    own, model = mclclip.load_model(folder / "own"), load_towers(folder / "own").eval()
    assert found["missing"] == [] and found["processor"] == "OpenClipImageProcessor"
    with torch.no_grad():
        wanted = {
            "images": model.encode_image(PIXELS),
            "texts": model.encode_text(own.tokenizer(["a dog"])),
        }
    for name, value in wanted.items():
        torch.testing.assert_close(torch.tensor(found[name]), value, atol=1e-4, rtol=1e-4)
    from PIL import Image

    image = Image.linear_gradient("L").resize((47, 32)).convert("RGB")
    assert torch.equal(torch.tensor(found["pixels"])[0], own.preprocess_val(image))
    with torch.no_grad():
        check_llava(found["llava"], model.encode_trunk(PIXELS, 2)[:, 1:])


def test_a_joined_encoder_and_llava_around_the_tower_of_all_stages(
    python: Path, tmp_path: Path
) -> None:
    """By the code beside its weights; what version 4.37 cannot do is as the head of this file
    says."""
    folder = tmp_path
    save_concat(stages(folder, trunk=1), "raw", folder / "concat")
    for to in ("hf", "llava"):
        convert.run(to, folder / "concat", folder / to)  # type: ignore[arg-type]
    torch.save(PIXELS, folder / "pixels.pt")
    found = answers(
        python, folder, """
        described = json.load(open(f'{folder}/llava/config.json'))
        def refused(call, kind):
            try:
                call()
            except kind:
                return True
            return False
        unknown = refused(lambda: transformers.LlavaConfig(vision_config=described), KeyError)
        load = transformers.AutoModel.from_pretrained
        model = load(f'{folder}/hf', trust_remote_code=True).eval()
        tower = load(f'{folder}/llava', trust_remote_code=True, hidden_size=3 * 64).eval()
        _, info = transformers.CLIPVisionModel.from_pretrained(
            f'{folder}/llava', output_loading_info=True)
        each = tiny_llava.around(tower, [0, 1, 2])
        with torch.no_grad():
            states = tower(pixels, output_hidden_states=True).hidden_states
            print(json.dumps({
                'images': model.get_image_features(pixels).tolist(),
                'states': [state.tolist() for state in states[:3]],
                'unknown_before_its_code': unknown,
                'filled_by_CLIPVisionModel': len(info['missing_keys']),
                'no_list': refused(lambda: tiny_llava.forward(each, pixels), TypeError),
                'llava': llavas(tower, f'{folder}/saved'),
            }))
        """,
    )  # fmt: skip
    images, states = torch.tensor(found["images"]), torch.tensor(found["states"])
    own: Any = mclclip.load_model(folder / "concat")
    torch.testing.assert_close(images, own.encode_image(PIXELS), atol=1e-5, rtol=0)
    with torch.no_grad():  # the state [B, tokens, width] before the last block of every stage
        expected = [stage.encode_trunk(PIXELS, 2) for stage in own.stages]
    torch.testing.assert_close(states, torch.stack(expected), atol=1e-5, rtol=1e-5)
    check_llava(found["llava"], torch.cat(expected, dim=-1)[:, 1:])
    assert found["unknown_before_its_code"] and found["no_list"]
    assert found["filled_by_CLIPVisionModel"] > 40
    again = answers(
        python, folder, """
        transformers.AutoConfig.from_pretrained(f'{folder}/llava', trust_remote_code=True)
        llava = transformers.LlavaForConditionalGeneration.from_pretrained(f'{folder}/saved')
        read, _ = tiny_llava.forward(llava.eval(), pixels)
        print(json.dumps({'projected': read.tolist()}))
        """,
    )  # fmt: skip
    assert again["projected"] == found["llava"]["projected"]  # in a new process
