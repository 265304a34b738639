"""A certificate compares the export's towers and transforms with the source's, one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mclclip.export import certificate, convert
from mclclip.export.certificate import Probes
from mclclip.models.encoder import Encoder
from mclclip.models.loading import load_towers
from tests.unit.export.models import CONFIGS, exported

PROBES = Probes(
    {"a": Image.new("RGB", (40, 32), (128, 99, 3)), "b": Image.new("RGB", (32, 32), (9, 9, 9))},
    ["a dog", "two cups", "a"],
)


def move(name: str) -> Callable[[Any], None]:
    """Moves one parameter of the model."""

    def change(encoder: Any) -> None:
        with torch.no_grad():
            parameter = encoder.stages[0].clip.get_parameter(name)
            parameter += 0.1 * torch.randn_like(parameter)

    return change


def other_tokens(encoder: Any) -> None:
    own = encoder.tokenizer
    encoder.tokenizer = lambda texts: own([text.replace("dog", "cat") for text in texts])


def other_pixels(encoder: Any) -> None:
    """As an image processor with another mean."""
    own, (_, deviation) = encoder.preprocess_val, encoder.stages[0].normalization
    encoder.preprocess_val = lambda image: own(image) + 10 / 255 / deviation


def masked_texts(encoder: Any) -> None:
    """As a library that masks the padding of the texts it reads, though their tokens are equal."""
    encode, tokenize = encoder.encode_text, encoder.tokenizer

    def read(texts: Any) -> Any:
        return encode(texts if isinstance(texts, torch.Tensor) else tokenize(texts).roll(1, 0))

    encoder.encode_text = read


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (lambda encoder: None, set()),
        (
            move("transformer.resblocks.0.mlp.c_fc.weight"),
            {"text_features", "text_features_own_tokens", "logits"},
        ),
        (
            move("visual.transformer.resblocks.0.mlp.c_fc.weight"),
            {"image_features", "image_features_own_pixels", "logits"},
        ),
        (other_tokens, {"tokens", "text_features_own_tokens"}),
        (masked_texts, {"text_features", "text_features_own_tokens"}),
        (other_pixels, {"pixels", "image_features_own_pixels"}),
    ],
)
def test_what_differs_is_found_where_it_is_and_nowhere_else(
    change: Callable[[Any], None], differing: set[str]
) -> None:
    own, other = (Encoder([load_towers(CONFIGS / "tiny_vit.json", seed=0)]) for _ in range(2))
    torch.manual_seed(0)
    change(other)
    found = certificate.compare(own, other, "x", PROBES)
    names = {"image_features", "text_features", "logits", "pixels", "tokens"}
    names |= {"image_features_own_pixels", "text_features_own_tokens"}
    assert {name for name in names if getattr(found, name) > 1e-4} == differing
    assert found.holds == (not differing & {"image_features", "text_features"})
    assert found.tokens_of == (["a dog"] if "tokens" in differing else [])
    assert found.pixels_of == (["a", "b"] if "pixels" in differing else [])
    if "pixels" in differing:
        assert found.pixels == pytest.approx(10, abs=0.01)  # of 255 shades


def test_another_logit_scale_is_not_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Encoder([load_towers(exported(tmp_path / "own"))])
    other = Encoder([load_towers(tmp_path / "own")])
    assert certificate.compare(own, other, "x", PROBES).holds
    for scale in (own.logit_scale * 1.001, float("nan")):
        other.logit_scale = scale
        found = certificate.compare(own, other, "x", PROBES)
        assert found.largest <= 1e-5 and not found.holds
    assert found.logit_scale is not None
    proof = certificate.Certificate("x", 1, text_features=float("nan"), bound=0.02)
    assert not proof.holds

    compare = certificate.compare
    monkeypatch.setattr(
        certificate, "compare", lambda *a, **b: replace(compare(*a, **b), logit_scale=1e-3)
    )
    with pytest.raises(ValueError, match="logit scales by 0.001 of their value"):
        convert.run("open_clip", tmp_path / "own", tmp_path / "out")
