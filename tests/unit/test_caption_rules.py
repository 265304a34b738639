"""Rules that edit captions: each by a table of what it makes and of what it leaves alone."""

from __future__ import annotations

from collections.abc import Sequence

from mclclip.util.caption_rules import RULES, all_edits, draw, false_edits, spoken

# Rule, caption, some of its edits.
RIGHT: list[tuple[str, str, Sequence[str]]] = [
    ("colour", "A man in a red shirt .", ["A man in a green shirt .", "A man in a blue shirt ."]),
    ("colour", "An orange ball and a red one", ["A blue ball and a red one"]),
    ("number", "Two dogs run .", ["Three dogs run .", "Five dogs run ."]),
    ("number", "a man with four sheep", ["a man with two sheep", "a man with seven sheep"]),
    ("size", "A large dog", ["A small dog", "A tiny dog"]),
    ("size", "a woman with long hair", ["a woman with short hair"]),
    ("material", "a wooden bench", ["a metal bench", "a plastic bench"]),
    ("spatial", "a dog in front of a house", ["a dog behind a house"]),
    ("spatial", "a boy jumps into the pool", ["a boy jumps out of the pool"]),
    ("action", "A man sits on a bench", ["A man stands on a bench", "A man sleeps on a bench"]),
    ("action", "Two dogs run through snow", ["Two dogs walk through snow"]),
    ("action", "Jumping into the lake", ["Walking into the lake"]),
    ("swap", "a red car and a blue bus", ["a blue car and a red bus"]),
    ("swap", "a large dog with a small ball", ["a small dog with a large ball"]),
    ("negation", "A dog is running .", ["A dog is not running ."]),
    ("negation", "A dog with a ball", ["A dog without a ball"]),
]
# Rule, caption that it has nothing for.
REFUSED: list[tuple[str, str]] = [
    ("colour", "a boy eats an orange"),
    ("colour", "a black man"),
    ("colour", "a black and white photograph of a red car"),
    ("number", "a two person tent"),
    ("number", "the player wears number two on his shirt"),
    ("number", "two men , one in red"),
    ("size", "a little girl"),
    ("size", "a big dog and a little dog , a tiny dog , a small dog"),
    ("material", "a glass of water"),
    ("material", "a house made of brick"),
    ("spatial", "the one left behind"),
    ("spatial", "a man looks into the camera"),
    ("action", "a long jump"),
    ("action", "a dog jumps in the air"),
    ("swap", "a black dog and a brown dog"),
    ("swap", "a black and white dog with red eyes"),
    ("swap", "a red car and a blue one"),
    ("negation", "a man who is not running is sitting"),
    ("negation", "a field covered with a sheet"),
]


def test_a_rule_changes_what_it_is_for() -> None:
    for rule, caption, wanted in RIGHT:
        found = [edit.text for edit in all_edits(rule, caption)]
        assert {*wanted} <= {*found}, caption
        assert caption not in found and len({*found}) == len(found)


def test_a_rule_leaves_alone_what_it_is_not_sure_of() -> None:
    found = {(rule, caption): [*all_edits(rule, caption)] for rule, caption in REFUSED}
    assert not {case: edits for case, edits in found.items() if edits}


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
    rule_of = {e.text: rule for rule in fitting for e in false_edits(rule, captions, 0)}
    first: set[str] = set()
    for key in range(40):
        edits = draw([*RULES], captions, 0, key, len(fitting))
        assert sorted(rule_of[edit.text] for edit in edits) == sorted(fitting)
        assert [e.text for e in edits] == [e.text for e in draw([*RULES], captions, 0, key, 4)]
        first.add(rule_of[edits[0].text])
        assert draw([*RULES], captions, 0, key, 1) == edits[:1]
    assert first == {*fitting}
    every = draw([*RULES], captions, 0, 7, 1000)
    assert len({edit.text for edit in every}) == len(every) < 100
    assert draw(["size"], captions, 0, 3, 2) == []
