"""Trifeature: its counts, its independence, its masks."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mclclip.data.datasets import trifeature
from mclclip.data.datasets.sources import Sources
from mclclip.data.datasets.trifeature import COLOURS, SHAPES, TEXTURES, render

NAMES = ("shape", "texture", "colour")


def facts(monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, list[tuple[str, ...]]]:
    """The combination of every picture of both splits; nothing is drawn."""
    nothing = np.zeros((1, 1, 3), np.uint8)
    monkeypatch.setattr(trifeature, "render", lambda *_: nothing)
    splits = trifeature.build(Sources(), **{"seed": 0, "size": 1, **options})
    return {
        split: [tuple(sample.metadata[name] for name in NAMES) for sample in samples]
        for split, samples in splits.items()
    }


def test_every_combination_is_in_one_split_as_often_as_asked(monkeypatch: Any) -> None:
    found = facts(monkeypatch, images_per_combination=2)
    train, test = (Counter(found[split]) for split in ("train", "test"))
    assert set(train.values()) == set(test.values()) == {2}
    assert (len(train), len(test)) == (800, 200) and not train.keys() & test.keys()
    assert {*train, *test} == {*itertools.product(SHAPES, TEXTURES, COLOURS)}
    again, other = (facts(monkeypatch, seed=s, images_per_combination=1)["test"] for s in (0, 1))
    assert set(again) == set(test) != set(other)
    monkeypatch.undo()

    def first() -> list[bytes]:
        samples = trifeature.build(Sources(), 3, size=32, images_per_combination=1)["test"]
        return [sample.image for sample in itertools.islice(samples, 3)]

    images = first()  # the same in every run, and stored small
    assert images == first() and len({*images}) == 3
    assert Image.open(io.BytesIO(images[0])).size == (32, 32)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_any_two_attributes_are_independent_in_both_splits(monkeypatch: Any, share: float) -> None:
    found = facts(monkeypatch, images_per_combination=1, test_share=share)
    for split, wanted in (("train", 10 - 10 * share), ("test", 10 * share)):
        for a, b in itertools.combinations(range(3), 2):
            pairs = Counter((row[a], row[b]) for row in found[split])
            assert len(pairs) == 100 and set(pairs.values()) == {wanted}


def drawn(shape: str, texture: str, colour: str = "white", number: int = 0) -> np.ndarray:
    return render(shape, texture, colour, np.random.default_rng(number))


def test_a_solid_square_has_its_colour_and_area_and_lies_inside() -> None:
    for number, (name, colour) in enumerate(COLOURS.items()):
        picture = drawn("square", "solid", name, number)
        grey = (picture == 128).all(axis=2)
        assert abs(int((~grey).sum()) - 128**2) < 300  # turned, and cut into pixels
        np.testing.assert_array_equal(picture[~grey][0], np.rint(np.array(colour) * 255))
        assert grey[[0, -1]].mean() > 0.9 and grey[:, [0, -1]].mean() > 0.9


def test_shapes_and_textures_differ() -> None:
    """The share of the object's pixels that are drawn tells most of them apart."""
    areas = {shape: int((drawn(shape, "solid") != 128).any(axis=2).sum()) for shape in SHAPES}
    expected = {"square": 4, "triangle": 2, "circle": np.pi, "plus": 20 / 9, "fivesquare": 20 / 9}
    expected |= {"rhombus": 1.2, "trapezoid": 2.25, "tee": 20 / 9}
    for shape, area in expected.items():
        assert areas[shape] / 64**2 == pytest.approx(area, rel=0.03), shape
    masks = [(drawn("square", texture) != 128).any(axis=2) for texture in TEXTURES]
    for one, two in itertools.combinations(masks, 2):
        assert (one != two).sum() > 2_000
    assert all(0.15 < mask.sum() / 128**2 < 0.8 for mask in masks[1:])
