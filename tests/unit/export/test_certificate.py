"""A certificate compares the export's towers and transforms with the source's, one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image

from mclclip.export import certificate
from mclclip.models.encoder import Encoder
from mclclip.models.loading import load_towers
from tests import tiny

IMAGES = {"a": Image.new("RGB", (40, 32), (128, 99, 3)), "b": Image.new("RGB", (32, 32), (9, 9, 9))}
TEXTS = ["a dog", "two cups", "a"]


def move(name: str) -> Callable[[Any], None]:
    """Moves one parameter of the model."""

    def change(encoder: Any) -> None:
        with torch.no_grad():
            parameter = encoder.models[0].clip.get_parameter(name)
            parameter += 0.1 * torch.randn_like(parameter)

    return change


def other_tokens(encoder: Any) -> None:
    own = encoder.tokenizer
    encoder.tokenizer = lambda texts: own([text.replace("dog", "cat") for text in texts])


def other_pixels(encoder: Any) -> None:
    own = encoder.preprocess_val
    encoder.preprocess_val = lambda image: own(image) + 0.5


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (lambda encoder: None, set()),
        (move("transformer.resblocks.0.mlp.c_fc.weight"), {"text_features", "logits"}),
        (
            move("visual.transformer.resblocks.0.mlp.c_fc.weight"),
            {"image_features", "image_features_own_pixels", "logits"},
        ),
        (other_tokens, {"tokens"}),
        (other_pixels, {"pixels", "image_features_own_pixels"}),
    ],
)
def test_what_differs_is_found_where_it_is_and_nowhere_else(
    change: Callable[[Any], None], differing: set[str]
) -> None:
    torch.manual_seed(0)
    own = Encoder([load_towers(tiny.ROOT / "tests" / "configs" / "tiny_vit.json")])
    other = copy.deepcopy(own)
    change(other)
    found = certificate.compare(own, other, "x", IMAGES, TEXTS)
    names = {"image_features", "text_features", "logits", "pixels", "tokens"}
    names |= {"image_features_own_pixels"}
    assert {name for name in names if getattr(found, name) > 1e-4} == differing
    assert found.holds == (not differing & {"image_features", "text_features"})
    assert found.tokens_of == (["a dog"] if "tokens" in differing else [])
