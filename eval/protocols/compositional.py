"""Compositional benchmarks: which of several similar texts are true of which of several similar
images.

Sources, with the rule of the published code. "Strict" means that a tie counts as wrong:

- SugarCrepe (Hsieh et al., NeurIPS 2023): the image prefers its caption to a false one. Strict.
- Pairs that ``mclclip make-pairs`` has written: the same, with a part per rule; the main figure is
  that of all items together.
- SugarCrepe++ (Dumpala et al., NeurIPS 2024): the image prefers each of two true captions to a
  false one (ITT); and, without the image, the two true captions are more similar to each other than
  each is to the false one (TOT). Strict.
- Winoground (Thrush et al., CVPR 2022) and NaturalBench-Retrieval (Li et al., NeurIPS 2024): of two
  images and two captions, each image picks its caption (text), each caption picks its image
  (image), or both (group). Strict.
- ARO (Yuksekgonul et al., ICLR 2023): the part of an image around two things prefers its caption to
  one with the relation or the attributes exchanged. The figure is the mean over relations that are
  not symmetric, or over pairs of attributes with at least 25 items. The code takes the argmax with
  the false caption first, so it is strict. COCO-Order and Flickr30k-Order: a caption against four
  with its words in another order. The argmax has the true caption first, so ties are right.
- What'sUp (Kamath et al., EMNLP 2023): a caption against those with other prepositions. Photographs
  of two things also form pairs (left and right) and sets (all four), which are right if every
  photograph is. The argmax has the true caption first, so ties are right. In the published data
  two photographs are exchanged (pillow and chair, left and right).

Here a tie between a right and a wrong answer always counts as wrong, so an encoder that returns a
constant scores 0. If ties are right by the published rule, a second figure, ``NAME_official``,
follows it. clip-benchmark takes the argmax with the true caption first for SugarCrepe, so ties are
right in its figures.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import comb, prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mclclip.eval.features import Extractor, Features
from mclclip.eval.items import LAYOUTS, Item, LayoutName, read_items
from mclclip.eval.metrics import BoolArray, FloatArray, item_similarities, match_margins
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.protocols import Evaluator
from mclclip.eval.results import Level, Measurement, figure
from mclclip.ranks.collectives import raise_on_every_rank

log = logging.getLogger("mclclip")

Side = Literal["text", "image", "group", "texts"]
"""Which decisions of an item count: images pick texts ('text'), texts pick images ('image'), both
('group'), or texts pick texts ('texts')."""

CHUNK_NUMBERS = 1 << 23
"""Items are compared in chunks whose features have at most so many numbers."""

SMALLEST_KIND = 25
"""ARO's mean is over pairs of attributes with at least so many items."""

PAIRS = (("left", "right"), ("on", "under"), ("in-front", "behind"))
"""Relations of What'sUp's photographs that form a pair."""

SYMMETRIC = """
adjusting; attached to; between; bigger than; biting; boarding; brushing; chewing; cleaning;
climbing; close to; coming from; coming out of; contain; crossing; dragging; draped over;
drinking; drinking from; driving; driving down; driving on; eating from; eating in; enclosing;
exiting; facing; filled with; floating in; floating on; flying; flying above; flying in; flying
over; flying through; full of; going down; going into; going through; grazing in; growing in;
growing on; guiding; hanging from; hanging in; hanging off; hanging over; higher than; holding
onto; hugging; in between; jumping off; jumping on; jumping over; kept in; larger than; leading;
leaning over; leaving; licking; longer than; looking in; looking into; looking out; looking
over; looking through; lying next to; lying on top of; making; mixed with; mounted on; moving;
on the back of; on the edge of; on the front of; on the other side of; opening; painted on;
parked at; parked beside; parked by; parked in; parked in front of; parked near; parked next to;
perched on; petting; piled on; playing; playing in; playing on; playing with; pouring; reaching
for; reading; reflected on; riding on; running in; running on; running through; seen through;
sitting behind; sitting beside; sitting by; sitting in front of; sitting near; sitting next to;
sitting under; skiing down; skiing on; sleeping in; sleeping on; smiling at; sniffing;
splashing; sprinkled on; stacked on; standing against; standing around; standing behind;
standing beside; standing in front of; standing near; standing next to; staring at; stuck in;
surrounding; swimming in; swinging; talking to; topped with; touching; traveling down; traveling
on; tying; typing on; underneath; wading in; waiting for; walking across; walking by; walking
down; walking next to; walking through; working in; working on; worn on; wrapped around; wrapped
in; by; of; near; next to; with; beside; on the side of; around
"""
"""Relations of Visual Genome that ARO's authors leave out of their mean (their notebook): most are
symmetric, or have few items."""


# --- decisions ---------------------------------------------------------------------------------


def item_margins(
    extractor: Extractor, items: Sequence[Item], sides: Sequence[Side], prompt: str = ""
) -> dict[Side, list[FloatArray]]:
    """Computes, for each side, the margins [decisions] of every item (``match_margins``): a
    decision is right if its margin is above 0, and tied if it is 0.

    ``prompt`` is put before every text. Images and texts that occur several times are encoded once.
    The margins do not depend on the number of ranks.
    """
    images = list(dict.fromkeys(image for item in items for image in item.images))
    texts = list(dict.fromkeys(text for item in items for text in item.texts))
    image_row = {image: row for row, image in enumerate(images)}
    text_row = {text: row for row, text in enumerate(texts)}
    image_features = extractor.images(images)
    text_features = extractor.texts([prompt + text for text in texts])
    margins: dict[Side, list[FloatArray]] = {side: [np.empty(0)] * len(items) for side in sides}
    alike: dict[tuple[tuple[bool, ...], ...], list[int]] = {}
    for number, item in enumerate(items):
        alike.setdefault(item.truth, []).append(number)
    for truth, numbers in alike.items():
        per_item = (len(truth) + len(truth[0])) * text_features.shape[1]
        size = max(1, CHUNK_NUMBERS // per_item)
        for start in range(0, len(numbers), size):
            some = numbers[start : start + size]
            own_images = [[image_row[image] for image in items[n].images] for n in some]
            own_texts = [[text_row[text] for text in items[n].texts] for n in some]
            left, right = image_features[own_images], text_features[own_texts]
            for side, margins_of_side in margins.items():
                for number, decisions in zip(
                    some, _margins(side, np.array(truth), left, right), strict=True
                ):
                    margins_of_side[number] = decisions
    return margins


def _margins(side: Side, truth: BoolArray, images: Features, texts: Features) -> FloatArray:
    """Margins [N, decisions] of N items with the same ``truth`` [I, T], from features [N, I, E] of
    their I images and [N, T, E] of their T texts."""
    if side == "texts":
        (right,) = truth
        others = ~np.eye(len(right), dtype=bool)[right]
        similarity = item_similarities(texts[:, right], texts)
        return match_margins(similarity, others & right, others & ~right)
    similarity = item_similarities(images, texts)
    by_image = match_margins(similarity, truth)
    by_text = match_margins(similarity.swapaxes(1, 2), truth.T)
    return {"text": by_image, "image": by_text}.get(side, np.hstack([by_image, by_text]))


@cache
def chance_of(side: Side, truth: tuple[tuple[bool, ...], ...]) -> float:
    """The probability that all decisions of an item are right if similarities are in random order.

    A query with c candidates, r of them true, is right in one of comb(c, r) cases; the queries of a
    side are independent. 'texts': one of the three similarities between three texts must be the
    highest. 'group': two of the four similarities must be the highest two.
    """
    true = np.array(truth)
    if side == "texts":
        return 1 / 3
    if side == "group":
        return 1 / comb(true.size, int(true.sum()))
    rows = true if side == "text" else true.T
    return float(np.prod([1 / comb(len(row), int(row.sum())) for row in rows]))


# --- figures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Figures:
    """Makes the figures of a benchmark from the margins of its items (``item_margins``).

    With ``official``, ties are right by the published rule, and each figure is followed by a second
    one by that rule.
    """

    items: Sequence[Item]
    margins: Mapping[Side, Sequence[FloatArray]]
    protocol: Mapping[str, Any]
    official: bool = False

    def of(
        self,
        metric: str,
        side: Side,
        groups: Sequence[Sequence[int]],
        level: Level = "table",
        strata: Callable[[Item], str] | None = None,
        trials: str = "items",
    ) -> list[Measurement]:
        """The figure of a metric: the share of ``groups`` in which every item is right, or the mean
        of this share over ``strata``.

        A group is a list of numbers of items; ``strata`` gives the stratum of a group's first item.
        """
        margins = [np.concatenate([self.margins[side][row] for row in group]) for group in groups]
        items = [[self.items[row] for row in group] for group in groups]
        chance = np.array([prod(chance_of(side, item.truth) for item in group) for group in items])
        units = [group[0].unit for group in items]
        outcomes = partial(
            Outcomes,
            ["+".join(item.name for item in group) for group in items],
            strata=[strata(group[0]) for group in items] if strata else None,
            units=units if len(set(units)) < len(units) else None,
        )
        settings = dict(self.protocol) | {
            "trials": trials,
            "chance": round(100 * outcomes(chance).value(), 2),
            "tied_items": sum(bool((decisions == 0).any()) for decisions in margins),
            "items_with_equal_texts": sum(any(map(_has_equal_texts, group)) for group in items),
        }
        lowest = np.array([decisions.min() for decisions in margins])
        strict = settings | {"ties": "against the model"}
        figures = [figure(metric, outcomes(lowest > 0), strict, level=level)]
        if self.official:
            published, name = settings | {"ties": "for the model"}, f"{metric}_official"
            figures.append(figure(name, outcomes(lowest >= 0), published, level="detail"))
        return figures

    def rows(self, keep: Callable[[Item], bool] = lambda item: True) -> list[list[int]]:
        """The numbers of the items for which ``keep`` is True, each as a group of one."""
        return [[row] for row, item in enumerate(self.items) if keep(item)]

    def by_part(
        self, prefix: str, side: Side, of_part: Level = "table", average: Level = "headline"
    ) -> list[Measurement]:
        """A figure for each part, with the level ``of_part``, and their mean, with the level
        ``average``."""
        figures = []
        for part in dict.fromkeys(item.part for item in self.items):
            rows = self.rows(lambda item, part=part: item.part == part)  # type: ignore[misc]
            figures += self.of(f"{prefix}{part}", side, rows, of_part)
        every = self.rows()
        return figures + self.of(f"{prefix}average", side, every, average, lambda item: item.part)

    def by_kind(self, keep: Callable[[Item], bool]) -> list[Measurement]:
        """The mean over kinds of the items for which ``keep`` is True, and the share of all."""
        if not (rows := self.rows(keep)):
            raise ValueError(
                f"{self.protocol['name']} has no item whose kind counts in its mean: no relation "
                f"that is not symmetric, or no pair of attributes with {SMALLEST_KIND} items"
            )
        mean = self.of("average", "text", rows, "headline", lambda item: item.kind)
        return mean + self.of("pooled", "text", self.rows())


def _has_equal_texts(item: Item) -> bool:
    """Returns True if a true text of an image equals a false one: no encoder can be right."""
    return any(
        {t for t, right in zip(item.texts, row, strict=True) if right}
        & {t for t, right in zip(item.texts, row, strict=True) if not right}
        for row in item.truth
    )


def _of_whatsup(figures: _Figures) -> list[Measurement]:
    measurements = figures.by_part("", "text")
    for part in dict.fromkeys(item.part for item in figures.items if item.kind):
        sets: dict[str, dict[str, int]] = {}
        for row, item in enumerate(figures.items):
            if item.part == part:
                sets.setdefault(item.unit, {})[item.kind] = row
        pairs = [
            [rows[name] for name in pair]
            for rows in sets.values()
            for pair in PAIRS
            if rows.keys() >= set(pair)
        ]
        whole = [[*rows.values()] for rows in sets.values() if len(rows) == 4]
        for metric, groups in (("pair", pairs), ("set", whole)):
            if groups:
                measurements += figures.of(f"{part}/{metric}", "text", groups, trials=f"{metric}s")
            else:
                log.warning("no %s of %s is whole, so that it has no figure", metric, part)
    return measurements


def _figures(layout: LayoutName, figures: _Figures) -> list[Measurement]:
    """The figures of a layout, which ``evaluate`` lists."""
    every = figures.rows()
    if layout == "pairs":
        pooled = figures.of("pooled", "text", every, "headline")
        return pooled + figures.by_part("", "text", average="table")
    if layout == "sugarcrepe":
        return figures.by_part("", "text")
    if layout == "sugarcrepe_pp":
        image_text = figures.by_part("ITT/", "text")
        return image_text + figures.by_part("TOT/", "texts", "detail", "table")
    if layout in ("winoground", "naturalbench"):
        sides = figures.of("text", "text", every) + figures.of("image", "image", every)
        return sides + figures.of("group", "group", every, "headline")
    if layout == "aro_relation":
        symmetric = set(" ".join(SYMMETRIC.split()).split("; "))
        return figures.by_kind(lambda item: item.kind not in symmetric)
    if layout == "aro_attribute":
        counts = Counter(item.kind for item in figures.items)
        return figures.by_kind(lambda item: counts[item.kind] >= SMALLEST_KIND)
    if layout == "aro_order":
        return figures.of("accuracy", "text", every, "headline")
    return _of_whatsup(figures)


_SIDES: Mapping[str, Sequence[Side]] = {
    "sugarcrepe_pp": ("text", "texts"),
    "winoground": ("text", "image", "group"),
    "naturalbench": ("text", "image", "group"),
}
"""The sides of which a layout has figures; other layouts have 'text' only."""
_TIES_FOR_THE_MODEL = ("aro_order", "whatsup")
"""Layouts whose published rule counts ties as right."""


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    layout: LayoutName,
    captions: str | None = None,
    images: str | None = None,
    parts: Sequence[str] | None = None,
    prompt: str = "",
    missing: Literal["refuse", "leave_out"] = "refuse",
) -> list[Measurement]:
    """The figures, in percent, of a compositional benchmark in a published ``layout``.

    They are, with chance in parentheses:
      - sugarcrepe: a metric per part and their mean ``average`` (50).
      - pairs: the same (50); the headline is ``pooled``, the share of all items, since rules have
        unequal numbers of items.
      - sugarcrepe_pp: a metric per part and ``average``, each for ``ITT/`` and ``TOT/`` (33.3).
      - winoground, naturalbench: ``text``, ``image`` (25) and ``group`` (16.7).
      - aro_relation, aro_attribute: ``average`` over kinds and ``pooled`` over items (50).
      - aro_order: ``accuracy`` (20).
      - whatsup: a metric per part and ``average`` (25 for photographs, otherwise 50); for
        photographs ``PART/pair`` (6.25) and ``PART/set`` (0.4).

    ``read_items`` explains ``captions``, ``images`` and ``parts``, and raises its errors.
    ``missing`` says whether items without their images are refused, or left out and counted in the
    protocol. ``prompt`` is put before every caption.
    """
    folders = {"captions": captions, "images": images}
    leave_out = missing == "leave_out"
    data = raise_on_every_rank(
        lambda: read_items(root, layout, parts=parts, leave_out=leave_out, **folders)
    )
    published = {part: LAYOUTS[layout].sizes.get(part) for part in data.read}
    other = {part: n for part, n in data.read.items() if published[part] not in (n, None)}
    if extractor.context.is_main:
        for part, count in other.items():
            log.warning(
                "%s: %s has %s items, the published file has %s: published figures are of others",
                *(root, part, count, published[part]),
            )
        if data.left_out:
            log.warning(
                "%s: %s images are missing, and %s of %s items are left out",
                *(root, data.missing_images, data.left_out, sum(data.read.values())),
            )
    protocol = {
        "name": layout,
        "prompt": prompt,
        "precision": extractor.precision,
        "num_items": len(data.items),
        "left_out_items": data.left_out,
        **({"struck_items": data.struck} if LAYOUTS[layout].made else {}),
        "missing_images": data.missing_images,
        "as_published": published == dict(data.read) == dict(LAYOUTS[layout].sizes)
        and not data.left_out,
    }
    margins = item_margins(extractor, data.items, _SIDES.get(layout, ("text",)), prompt)
    official = layout in _TIES_FOR_THE_MODEL
    return _figures(layout, _Figures(data.items, margins, protocol, official))


def check(
    root: Path, *, layout: LayoutName, missing: str = "refuse", prompt: str = "", **options: Any
) -> None:
    """Raises the errors of ``read_items``."""
    read_items(root, layout, leave_out=missing == "leave_out", **options)


EVALUATOR = Evaluator(
    evaluate, needs=lambda layout, **_: LAYOUTS[layout].source, reads_text=True, check=check
)
