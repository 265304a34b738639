"""The tokenizers of exports read texts as open_clip does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mclclip.export import processors
from mclclip.models.loading import load_towers
from tests.unit.export.models import exported, siglip

pytestmark = pytest.mark.usefixtures("narrow_siglip")
TEXTS = ["a photo of a dog!", "wow! a cat!", "!", "a ! b", "?!?", "", "<|endoftext|> z", "a " * 99]


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_no_word_is_a_special_token_and_no_padding_is_masked(tmp_path: Path, kind: str) -> None:
    """SigLIP reads the padding too, so it is open_clip's; CLIP ignores what follows the end."""
    transformers = pytest.importorskip("transformers")
    source = (exported if kind == "clip" else siglip)(tmp_path / "own")
    model: Any = load_towers(source)
    (tmp_path / "out").mkdir()
    processors.write_tokenizer(source, model, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer(TEXTS, **processors.TEXTS)
    assert {*inputs} == {"input_ids"}
    for ids, wanted in zip(inputs["input_ids"], model.tokenizer(TEXTS), strict=True):
        length = len(wanted) if kind == "siglip" else int(wanted.argmax()) + 1
        assert torch.equal(ids[:length], wanted[:length])
