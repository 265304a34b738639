"""Rules that edit an English caption so that it is no longer true of its picture.

A rule (see ``RULES``) lists all edits that it can make of a caption. Each edit changes one word or
phrase. The word lists are in ``caption_words.json``. A rule makes no edit where it is not sure that
the result is false.

colour    another colour; for animals, hair and rocks a colour that they can have in nature
number    another number, of two to eight
size      the opposite size
material  another material, before the thing that is made of it
spatial   the opposite place: "in front of" becomes "behind", "above" becomes "under", ...
action    another activity in the same form: "sits" becomes "stands", ...
swap      two things exchange their colours, sizes or materials
negation  "not" after is and are, "not wearing", or "without a"

The idea is that of SugarCrepe (Hsieh et al., 2023) and NegCLIP (Yuksekgonul et al., 2023). These
ask language models or parsers for the words; here no model is used, so an edit is the same on every
machine.
"""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from mclclip.util.files import read_json
from mclclip.util.options import STRICT, nearest
from mclclip.util.randomness import mix

_WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*|\d+")
_MOST_WORDS = 256  # only the first so many words of a caption are edited


@cache
def _lists(name: str) -> Any:
    return read_json(Path(__file__).with_name("caption_words.json"))[name]


@cache
def _table(name: str, key: str) -> dict[str, str]:
    """Maps a word to its family: ``_table("colour", "families")["crimson"]`` is "red"."""
    return {word: family for family, words in _lists(name)[key].items() for word in words}


@dataclass(frozen=True)
class Edit:
    """A changed caption.

    text     the changed caption
    phrases  lower-case words or phrases that make it false: the new word and words of equal meaning
    """

    text: str
    phrases: tuple[str, ...]


class _Words:
    """The lower-case words of a caption; an index out of range gives an empty word."""

    def __init__(self, caption: str) -> None:
        self.caption = caption
        self.matches = list(itertools.islice(_WORD.finditer(caption), _MOST_WORDS))
        self.words = [match[0].lower() for match in self.matches]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, number: int) -> str:
        return self.words[number] if 0 <= number < len(self) else ""

    @cached_property
    def present(self) -> frozenset[str]:
        return frozenset(self.words)

    def after(self, number: int) -> str:
        """The word after the ``number``-th one; empty if a punctuation mark stands between them."""
        if not 0 <= number < len(self) - 1:
            return ""
        between = self.caption[self.matches[number].end() : self.matches[number + 1].start()]
        return "" if between.strip() else self[number + 1]

    def content(self, number: int) -> str:
        """Like ``after``, but empty if the next word is a function word or a number."""
        word = self.after(number)
        return "" if word in _lists("functions") or word.isdigit() else word

    def replace(self, changes: Mapping[tuple[int, int], str]) -> str:
        """Returns the caption with the words of each range (first, stop) replaced.

        An empty range (n, n) inserts before word n. Capitals, and "a" or "an" before the new word,
        are adapted.
        """
        text, at = "", 0
        for (first, stop), new in sorted(changes.items()):
            start = self.matches[first].start()
            end = self.matches[stop - 1].end() if stop > first else start
            old = self.caption[start:end]
            if old[:1].isupper():
                new = new.upper() if old.isupper() and len(old) > 1 else new[:1].upper() + new[1:]
            before = text + self.caption[at:start]
            if stop > first:
                article = r"\1n\2" if new[0].lower() in "aeiou" else r"\1\2"
                before = re.sub(r"\b(a)n?(\s+)$", article, before, flags=re.IGNORECASE)
            text, at = before + new + (" " if stop == first else ""), end
        return text + self.caption[at:]


def _instead(
    words: _Words, first: int, stop: int, others: Mapping[str, Sequence[str]]
) -> Iterator[Edit]:
    """Yields one changed caption for each replacement of the words [first, stop).

    ``others`` maps a replacement to phrases that mean the same. A replacement is skipped if the
    caption already contains it or one of these phrases.
    """
    for other, phrases in others.items():
        if not {*other.split()} <= words.present and not words.present & {*phrases}:
            yield Edit(words.replace({(first, stop): other}), (other, *phrases))


def _also(*others: str) -> dict[str, Sequence[str]]:
    """Maps each replacement to the phrases that mean the same, as ``_instead`` takes them."""
    return {other: _lists("also").get(other, ()) for other in others}


# --- rules -------------------------------------------------------------------------------------


def _colour(words: _Words) -> Iterator[Edit]:
    lists, families = _lists("colour"), _table("colour", "families")
    present = {families[word] for word in words.words if word in families}
    if words.present & {*lists["not_in"]}:
        return
    for number, word in enumerate(words.words):
        if word in families and _is_colour(words, number):
            close = {w for pair in lists["close"] if families[word] in pair for w in pair}
            natural = _thing(words, number) in lists["of_natural_colour"]
            choices = lists["natural"] if natural else lists["families"]
            others = [c for c in choices if c not in close | present]
            meant = {other: lists["families"][other] for other in others}
            yield from _instead(words, number, number + 1, meant)


def _thing(words: _Words, number: int) -> str:
    """The thing that colour word ``number`` describes: 'car' in "a red shiny car"."""
    passed = {*_lists("colour")["passed"], *_table("colour", "families")}
    while (word := words.after(number)) in passed:
        number += 1
    return word


def _is_colour(words: _Words, number: int) -> bool:
    """Returns True if colour word ``number`` can be exchanged: not in "orange juice", nor in "a
    black man"."""
    before, after, thing = words[number - 1], words.after(number), _thing(words, number)
    lists = _lists("colour")
    if before in lists["not_after"] or {after, thing} & {*lists["not_before"]}:
        return False
    if words[number] == "orange" and not words.content(number):  # not the fruit
        return before in ("in", "and", "bright") or after in ("and", "colored")
    return thing not in _lists("people")  # not "a black man", but "a man in black"


def _number(words: _Words) -> Iterator[Edit]:
    lists = _lists("number")
    values = lists["values"]
    if words.present & {*lists["not_in"]}:
        return
    for number, word in enumerate(words.words):
        after = words.after(number)
        if word in values and after and words[number - 1] not in lists["not_after"]:
            if after not in lists["not_before"] and not after.isdigit():
                near = {w: [str(v)] for w, v in values.items() if 0 < abs(v - values[word]) <= 3}
                yield from _instead(words, number, number + 1, near)


def _size(words: _Words) -> Iterator[Edit]:
    lists, people = _lists("size"), {*_lists("people")}
    for number, word in enumerate(words.words):
        thing = words.content(number)
        if word in lists["pairs"] and thing and thing not in lists["not_before"]:
            of_people = people & {thing, words.content(number + 1)}  # "little" then means young
            others = lists["with_people" if of_people else "pairs"].get(word, [])
            yield from _instead(words, number, number + 1, _also(*others))


def _material(words: _Words) -> Iterator[Edit]:
    lists, families = _lists("material"), _table("material", "families")
    for number, word in enumerate(words.words):
        thing = words.content(number)
        if word in families and thing and words[number - 1] not in lists["not_after"]:
            if thing not in lists["not_before"] and thing not in families:
                others = lists["instead"][families[word]]
                meant = {other: lists["families"][other] for other in others}
                yield from _instead(words, number, number + 1, meant)


def _spatial(words: _Words) -> Iterator[Edit]:
    instead = _lists("spatial")["instead"]
    for first in range(len(words)):
        for stop in (first + 3, first + 2, first + 1):
            phrase = " ".join(words.words[first:stop])
            if stop <= len(words) and phrase in instead:
                if _is_place(words, first, stop, phrase):
                    yield from _instead(words, first, stop, _also(*instead[phrase]))
                break


def _is_place(words: _Words, first: int, stop: int, phrase: str) -> bool:
    """Returns True if the phrase says where a thing is, or is going, in relation to another."""
    lists, before, after = _lists("spatial"), words[first - 1], words.after(stop - 1)
    if {*words.words[stop : stop + 2]} & {*lists["not_with"].get(phrase, ())}:
        return False
    if not first or before in lists["never_after"]:
        return False
    if (needed := lists["needs_after"].get(phrase)) and before not in needed:
        return False
    if phrase in lists["adverbs"] and not after:
        return before not in _lists("functions")
    if after in _lists("determiners"):
        return True
    return bool(words.content(stop - 1)) and after not in lists["never_before"]


def _action(words: _Words) -> Iterator[Edit]:
    verbs = _lists("action")["forms"]
    forms = {form: (verb, n) for verb, words_of in verbs.items() for n, form in enumerate(words_of)}
    for number, word in enumerate(words.words):
        verb, form = forms.get(word, ("", 0))
        if not verb or sum(w in verbs[verb] for w in words.words) > 1:
            continue
        if _is_verb(words, number, form):
            for other in _activities(words, number, verb):
                if not words.present & {*verbs[other]}:
                    phrases = (*verbs[other], *_lists("also").get(other, ()))
                    yield Edit(words.replace({(number, number + 1): verbs[other][form]}), phrases)


def _is_verb(words: _Words, number: int, form: int) -> bool:
    """Returns True if the word is used as a verb here (a "walk" may be a noun).

    ``form``: 0 for the base (walk), 1 with s (walks), 2 with ing (walking).
    """
    lists, before = _lists("action"), words[number - 1]
    if form == 2:
        return before not in lists["not_after"] or before in ("and", "of")
    if before in lists["not_after"] or before in _lists("determiners") or not number:
        return False
    plural = before.endswith("s") and not before.endswith("ss")
    return form == 1 or before in lists["plurals"] or plural


def _activities(words: _Words, number: int, verb: str) -> Sequence[str]:
    """Verbs that can replace ``verb``, word ``number``, so that the sentence stays natural."""
    lists, after = _lists("action"), words.after(number)
    follows = {*words.words[number + 1 : number + 5]}
    if verb in lists["faces"] and after in ("", "and", "while", "as", "in", "on"):
        return lists["faces"][verb]  # type: ignore[no-any-return]
    if verb in lists["resting"] and not follows & {*lists["not_with"]["resting"]}:
        alone = after == "by" and words.after(number + 1) in ("", "and", "while", "as")
        if (after in lists["resting_before"] and not alone) or number == len(words) - 1:
            return lists["resting"][verb]  # type: ignore[no-any-return]
    if verb in lists["moving"] and after in lists["moving_before"] and "air" not in follows:
        if words.after(number + 1) in _lists("determiners") or words.content(number + 1):
            return lists["moving"][verb]  # type: ignore[no-any-return]
    handled = after in _lists("determiners") and follows & {*lists["handled"].get(verb, ())}
    if handled and not words.present & {*lists["not_with"]["handling"]}:
        return lists["handling"][verb]  # type: ignore[no-any-return]
    return ()


def _swap(words: _Words) -> Iterator[Edit]:
    colours, materials = _table("colour", "families"), _table("material", "families")
    sizes = {size: size for size in _lists("swap")["sizes"]}
    near = [{*pair} for pair in _lists("colour")["close"]]
    no_things = {*colours, *sizes, *materials, *_lists("swap")["not_before"]}
    for kind in (colours, sizes, materials):
        places = []
        for number, word in enumerate(words.words):
            thing = words.content(number)
            if word not in kind or not thing or thing in no_things | {*_lists("people")}:
                continue
            if words[number - 1] in ("and", "or") and words[number - 2] in kind:
                continue  # of "black and white"
            if kind is not colours or _is_colour(words, number):
                places.append((number, kind[word], thing))
        for (i, value, first), (j, other_value, second) in itertools.combinations(places, 2):
            alike = (
                value == other_value
                or {value, other_value} in near
                or first.rstrip("s") == second.rstrip("s")
            )
            if not alike:
                new = words.replace({(i, i + 1): words[j], (j, j + 1): words[i]})
                yield Edit(new, (f"{words[j]} {first}", f"{words[i]} {second}"))


def _negation(words: _Words) -> Iterator[Edit]:
    lists = _lists("negation")
    if words.present & {*lists["already"]} or "n't" in words.caption:
        return
    for number, word in enumerate(words.words[1:], 1):
        before, after = words[number - 1], words.after(number)
        if word in ("is", "are") and after.endswith("ing") and before != "there":
            yield Edit(words.replace({(number + 1, number + 1): "not"}), (f"not {after}",))
        if word == "wearing" and before not in ("is", "are"):
            yield Edit(words.replace({(number, number): "not"}), ("not wearing",))
        if word == "with" and after in ("a", "an") and before not in lists["without_not_after"]:
            held = words.after(number + 1)
            if held not in lists["without_not_before"] and not before.endswith("ed"):
                text = words.replace({(number, number + 1): "without"})
                yield Edit(text, (f"without {after} {held}",))


RULES: Mapping[str, Callable[[_Words], Iterator[Edit]]] = {
    "colour": _colour,
    "number": _number,
    "size": _size,
    "material": _material,
    "spatial": _spatial,
    "action": _action,
    "swap": _swap,
    "negation": _negation,
}


# --- edits of a picture's captions -------------------------------------------------------------


def check_rules(names: Sequence[str]) -> list[str]:
    """Returns the names of rules as a list; ValueError for an unknown, repeated or missing name."""
    for name in names:
        if name not in RULES:
            near = ", ".join(nearest(name, RULES))
            raise ValueError(f"there is no rule {name!r} for captions (nearest: {near})")
    if not names or len({*names}) < len(names):
        raise ValueError(f"rules are {[*names]}: wanted some of {', '.join(RULES)}, each once")
    return [*names]


def all_edits(rule: str, caption: str) -> list[Edit]:
    """Every edit that a rule makes of a caption, in the order of the words; maybe none."""
    return [*RULES[rule](_Words(caption))]


def spoken(text: str) -> str:
    """Normalizes a text for comparison by words: "A red, old car" gives " a red old car "."""
    return f" {' '.join(_Words(html.unescape(text)).words)} "


def false_edits(rule: str, captions: Sequence[str], number: int) -> list[Edit]:
    """The edits of caption ``number`` that are false according to the picture's other captions.

    An edit is dropped if another caption has the same words, or contains one of its ``phrases``.
    """
    others = [spoken(text) for n, text in enumerate(captions) if n != number]
    return [
        edit
        for edit in all_edits(rule, captions[number])
        if spoken(edit.text) not in others
        and not any(f" {phrase} " in other for phrase in edit.phrases for other in others)
    ]


def draw(
    rules: Sequence[str], captions: Sequence[str], number: int, key: int, count: int
) -> list[Edit]:
    """Draws up to ``count`` different ``false_edits`` of caption ``number``.

    ``key`` (64 random bits) puts the rules, and each rule's edits, into a random order. The first
    edit of every rule comes first, then the second of every rule, and so on.
    """
    order = sorted(rules, key=lambda rule: int(mix(key, [*RULES].index(rule))))
    queues = []
    for rule in order:
        edits = false_edits(rule, captions, number)
        start = int(mix(key, -1, [*RULES].index(rule))) % max(len(edits), 1)
        queues.append(edits[start:] + edits[:start])
    turns = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    by_text = {edit.text: edit for edit in turns if edit is not None}
    return [*by_text.values()][:count]


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class HardCaptions:
    """Hard captions: false captions that images are compared with, in addition to the true ones."""

    rules: list[str] | None = None
    """Rules that edit a sample's caption: some of colour, number, size, material, spatial, action,
    swap and negation, which are for English sentences (null: all)."""
    per_caption: Annotated[int, Field(ge=1, le=16)] = 1
    """Largest number of edits of a sample's caption; some captions allow fewer."""
    scope: Literal["own", "global"] = "own"
    """``own``: an image is compared with the edits of its own caption; ``global``: with those of
    all samples of its group in the global batch, as in NegCLIP."""
    field: str | None = None
    """Field of the samples' .json that holds false captions (a string or a list of strings), which
    are used instead of the rules."""

    def __post_init__(self) -> None:
        if self.field is not None and self.rules is not None:
            raise ValueError("rules and field are given: hard captions come from one of them")
        if self.field is not None and (not self.field or self.field.startswith("json:")):
            raise ValueError(f"field is {self.field!r}: wanted the name of the field alone")
        if self.rules is not None:
            check_rules(self.rules)

    @property
    def rule_names(self) -> tuple[str, ...]:
        """The names of the rules that are applied; none if ``field`` is set."""
        return () if self.field is not None else tuple(self.rules or RULES)

    @property
    def drawn_by(self) -> tuple[object, ...]:
        """The options that decide which edits are drawn. Trainings for which they are equal share
        stored text features."""
        return self.rule_names, self.per_caption, self.field
