"""Exports to hf in the clients that people have: pipelines, auto classes, sentence-transformers.

They run in processes of their own, which have nothing of mclclip: a question about code that an
export would ask ends them. ``MCLCLIP_CLIENT_PYTHONS`` names further Pythons, with colons between
them, such as one with transformers 4.57 and one with sentence-transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mclclip.util.torchvision_fix
from mclclip.export import convert
from tests.unit.export.models import exported, joined, siglip

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("narrow_siglip"), pytest.mark.slow]

PYTHONS = [sys.executable, *filter(None, os.environ.get("MCLCLIP_CLIENT_PYTHONS", "").split(":"))]

# The module is read by its path: without it this machine's torchvision may not be importable.
CLIENT = """
import importlib.util as u, json, sys
spec = u.spec_from_file_location("fix", sys.argv[3])
fix = u.module_from_spec(spec)
spec.loader.exec_module(fix)
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoProcessor, AutoTokenizer, pipeline
folder, trust = sys.argv[1], {"trust_remote_code": True} if sys.argv[2] == "concat" else {}
image, texts, out = Image.new("RGB", (50, 60), (200, 20, 20)), ["a dog", "a cat"], {}
answer = pipeline("zero-shot-image-classification", model=folder, **trust)(
    image, candidate_labels=texts
)
out["pipeline"] = sorted(row["label"] for row in answer)
out["processors"] = [
    type(AutoImageProcessor.from_pretrained(folder, use_fast=fast)).__name__
    for fast in (False, True)
]
AutoTokenizer.from_pretrained(folder)
processor = AutoProcessor.from_pretrained(folder, **trust)
inputs = processor(text=texts, images=image, return_tensors="pt", padding="max_length")
output = AutoModel.from_pretrained(folder, **trust)(**inputs)
out["kind"] = type(output).__name__
out["logits"] = [*output.logits_per_image.shape, *output.logits_per_text.shape]
if sys.argv[2] != "concat" and u.find_spec("sentence_transformers"):
    from sentence_transformers import SentenceTransformer
    model = SentenceTransformer(folder)
    out["sentence"] = [*model.encode(texts).shape, *model.encode([image]).shape]
print(json.dumps(out))
"""


@pytest.mark.parametrize("python", PYTHONS, ids=range(len(PYTHONS)))
@pytest.mark.parametrize("kind", ["clip", "siglip", "concat"])
def test_every_client_loads_an_export_without_a_question(
    tmp_path: Path, kind: str, python: str
) -> None:
    """A concat, whose code lies beside its weights, where the user says that it may run."""
    if kind == "siglip":  # the pipeline pads SigLIP's texts to 64 tokens, as all published have
        look = {"size": [224, 224], "resize_mode": "squash"}
        source = siglip(tmp_path / "own", {"context_length": 64}, preprocess_cfg=look)
    else:
        source = joined(tmp_path) if kind == "concat" else exported(tmp_path / "own")
    out = convert.run("hf", source, tmp_path / "hf")
    paths = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    fix = str(Path(str(mclclip.util.torchvision_fix.__file__)))
    ended = subprocess.run(
        [python, "-c", CLIENT, str(out), kind, fix],
        env={**paths, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,  # where transformers would ask whether code may run
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["pipeline"] == ["a cat", "a dog"] and found["logits"] == [1, 2, 2, 1]
    assert found["kind"] == {"siglip": "SiglipOutput"}.get(kind, "CLIPOutput")
    assert len({*found["processors"]}) == 2  # one on Pillow, one on torchvision
    if "sentence" in found:
        assert found["sentence"][0] == 2 and found["sentence"][2] == 1
