"""Rules that edit captions: each by a table of what it makes and of what it leaves alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mclclip.util.caption_rules import RULES, all_edits, draw, false_edits, spoken

# Rule, caption, some of its edits.
RIGHT: list[tuple[str, str, Sequence[str]]] = [
    ("colour", "A man in a red shirt .", ["A man in a green shirt .", "A man in a blue shirt ."]),
    ("colour", "A red hat", ["A blue hat"]),
    ("colour", "An orange ball and a red one", ["A blue ball and a red one"]),
    ("colour", "Blue bike", ["Orange bike", "White bike"]),
    ("colour", "the brown dog", ["the black dog", "the grey dog"]),
    ("colour", "a yellow jacket", ["a black jacket"]),
    ("number", "Two dogs run .", ["Three dogs run .", "Five dogs run ."]),
    ("number", "a man with four sheep", ["a man with two sheep", "a man with seven sheep"]),
    ("number", "near two trees", ["near three trees"]),
    ("size", "A large dog", ["A small dog", "A tiny dog"]),
    ("size", "a woman with long hair", ["a woman with short hair"]),
    ("size", "next to a tall man", ["next to a short man"]),
    ("material", "a wooden bench", ["a metal bench", "a plastic bench"]),
    ("material", "An iron gate", ["A wooden gate"]),
    ("material", "in a leather jacket", ["in a denim jacket"]),
    ("spatial", "a dog in front of a house", ["a dog behind a house"]),
    ("spatial", "a boy jumps into the pool", ["a boy jumps out of the pool"]),
    ("spatial", "Children play outside .", ["Children play inside ."]),
    ("spatial", "a bird above the water", ["a bird below the water"]),
    ("action", "A man sits on a bench", ["A man stands on a bench", "A man sleeps on a bench"]),
    ("action", "Two dogs run through snow", ["Two dogs walk through snow"]),
    ("action", "a boy throwing a red ball", ["a boy kicking a red ball"]),
    ("action", "Jumping into the lake", ["Walking into the lake"]),
    ("swap", "a red car and a blue bus", ["a blue car and a red bus"]),
    ("swap", "An orange cup on a black table", ["A black cup on an orange table"]),
    ("swap", "a large dog with a small ball", ["a small dog with a large ball"]),
    ("swap", "a wooden door in a brick wall", ["a brick door in a wooden wall"]),
    ("negation", "A dog is running .", ["A dog is not running ."]),
    ("negation", "a man wearing a hat", ["a man not wearing a hat"]),
    ("negation", "A dog with a ball", ["A dog without a ball"]),
]
# Rule, caption that it has nothing for.
REFUSED: list[tuple[str, str]] = [
    ("colour", "a boy eats an orange"),
    ("colour", "a black man"),
    ("colour", "a black and white photograph of a red car"),
    ("colour", "white water rafting"),
    ("colour", "a red or orange kite"),
    ("number", "a two person tent"),
    ("number", "the player wears number two on his shirt"),
    ("number", "two men , one in red"),
    ("number", "both of the two dogs"),
    ("size", "a little girl"),
    ("size", "a big dog and a little dog , a tiny dog , a small dog"),
    ("size", "a large group of people"),
    ("size", "a little bit"),
    ("material", "a glass of water"),
    ("material", "a metal detector"),
    ("material", "a house made of brick"),
    ("spatial", "the one left behind"),
    ("spatial", "a man looks into the camera"),
    ("spatial", "she is under construction"),
    ("spatial", "a person in front of the camera"),
    ("action", "a long jump"),
    ("action", "a swimming pool"),
    ("action", "a dog jumps in the air"),
    ("action", "a dog stands on his hind legs"),
    ("action", "a dog carries a stick in its mouth"),
    ("action", "the walk in the park"),
    ("swap", "a black dog and a brown dog"),
    ("swap", "a black and white dog with red eyes"),
    ("swap", "a red car and a blue one"),
    ("swap", "a young boy and an old man"),
    ("negation", "a man who is not running is sitting"),
    ("negation", "a field covered with a sheet"),
    ("negation", "There is a man"),
]


@pytest.mark.parametrize(("rule", "caption", "wanted"), RIGHT)
def test_a_rule_changes_what_it_is_for(rule: str, caption: str, wanted: Sequence[str]) -> None:
    found = [edit.text for edit in all_edits(rule, caption)]
    assert {*wanted} <= {*found}
    assert caption not in found and len({*found}) == len(found)


@pytest.mark.parametrize(("rule", "caption"), REFUSED)
def test_a_rule_leaves_alone_what_it_is_not_sure_of(rule: str, caption: str) -> None:
    assert [edit.text for edit in all_edits(rule, caption)] == []


def test_what_is_no_english_has_no_edit() -> None:
    for text in ("", " .", "два щенка", "两只狗", "\x00", "a" * 10_000, "1 2 3", "🐕 &amp;"):
        for rule in RULES:
            assert all_edits(rule, text) == []


def test_the_key_alone_decides() -> None:
    caption = "Two men in red shirts run through a park with a large dog"
    for rule in ("colour", "number", "size", "action"):
        drawn = {draw([rule], [caption], 0, key, 1)[0].text for key in range(64)}
        assert drawn == {edit.text for edit in all_edits(rule, caption)}
        again = [draw([rule], [caption], 0, 2**63 + 5, 1) for _ in range(2)]
        assert again[0] == again[1]
    assert draw(["material"], [caption], 0, 1, 1) == []


def test_an_edit_that_another_caption_speaks_for_is_dropped() -> None:
    captions = ["A brown dog runs .", "a dark dog with GREY spots", "a  black dog runs"]
    found = {edit.text for edit in false_edits("colour", captions, 0)}
    assert found == set(), "black and grey are said, and white is too near to brown"
    assert {e.text for e in false_edits("colour", captions[:2], 0)} == {"A black dog runs ."}
    swapped = ["a red car and a blue bus", "the bus is large and red"]
    assert len(false_edits("swap", swapped, 0)) == 1
    assert false_edits("swap", [*swapped, "a RED bus, parked"], 0) == []
    assert spoken("A&amp;B  Dog .") == " a b dog "


def test_a_draw_takes_from_every_rule_before_a_second_of_one() -> None:
    captions = ["Two men in red shirts sit on a wooden bench"]
    fitting = [rule for rule in RULES if false_edits(rule, captions, 0)]
    assert fitting == ["colour", "number", "material", "action"]
    first: set[str] = set()
    for key in range(40):
        edits = draw([*RULES], captions, 0, key, len(fitting))
        assert sorted(edit.rule for edit in edits) == sorted(fitting)
        assert [e.text for e in edits] == [e.text for e in draw([*RULES], captions, 0, key, 4)]
        first.add(edits[0].rule)
        assert draw([*RULES], captions, 0, key, 1) == edits[:1]
    assert first == {*fitting}
    every = draw([*RULES], captions, 0, 7, 1000)
    assert len({edit.text for edit in every}) == len(every) < 100
    assert draw(["size"], captions, 0, 3, 2) == []
