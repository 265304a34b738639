"""Verb ``make-pairs``: captioned shards that no training reads -> minimal pairs, a benchmark.

An item is a picture, one of its captions, and a false caption. A rule of ``caption_rules`` edits
the caption so that no other caption of the picture makes it true. With blind spots (``confused``),
there are also items whose false caption belongs to a picture that an encoder confuses with this
one. The folder has SugarCrepe's layout with one file per rule, and is evaluated as the layout
``pairs``:

    OUT/data/RULE.json   {id: {filename, caption, negative_caption, key}}
    OUT/data/confused.json   the same, and "unit", which both pictures of a confused pair share
    OUT/images/          the pictures, byte for byte, so an evaluation notices trained ones
    OUT/gallery.html     all items; a person marks bad ones there, and saves their names in
    OUT/struck.txt       one name per line: evaluation leaves these out
    OUT/suite.yaml       the benchmark, for ``mclclip eval --suite``
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from mclclip.data.decode import MAX_IMAGE_PIXELS, DecodeError, decode_image
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_writer import image_extension
from mclclip.eval.captions import read_captions_of_shards
from mclclip.eval.items import CONFUSED
from mclclip.report import environment
from mclclip.run.artifacts import Artifact, Manifest, RunPaths, find_run_dir, refuse_foreign
from mclclip.run.runlog import progress
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util import files
from mclclip.util.caption_rules import RULES, check_rules, false_edits, spoken
from mclclip.util.randomness import mix, permute
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")
PAIRS = "pairs.jsonl"  # in the folder of the blind spots
_RULE, _CAPTION = 1, 2  # what a random number draws: the order of pictures, or a caption
Items = dict[int, tuple[str, str, int]]
"""By row of a picture: a caption, a false caption, and the row whose picture names the unit."""


class NoItems(ValueError):
    """No rule fits any caption."""


def run(
    shards: Path,
    out: Path,
    *,
    captions: str = "txt",
    rules: Sequence[str] = (),
    confused: Path | None = None,
    per_rule: int = 200,
    seed: int = 0,
    force: Remake = Remake.NOTHING,
) -> Manifest:
    """Writes minimal pairs of the pictures of ``shards/*.tar``; returns the manifest.

    ``captions``: 'txt', 'lines' or 'json:FIELD'. ``rules``: some of ``caption_rules.RULES``
    (default: all). ``confused``: a folder that ``mclclip blindspots`` has written for a run whose
    only data source is these shards; its pairs become items of the rule 'confused'. ``per_rule``:
    most items of a rule, each of another picture. ``seed`` draws pictures, captions and edits. A
    finished ``out`` of the same shards and settings is skipped.

    Raises ValueError for wrong values, NoItems if there is no item, and errors of unreadable shards
    or blind spots.
    """
    rule_names = check_rules(rules or [*RULES])
    refuse_foreign(out, "--out")
    read = read_captions_of_shards(shards, captions)
    images, texts = read.images, [list[str]() for _ in read.images]
    for row, text in zip(read.caption_image, read.captions, strict=True):
        texts[row].append(text)
    spots = None
    if confused is not None:
        spots = _read_spots(confused, [image.size for image in images])
    pictures = CaptionedPictures(shards, images, texts, spots)
    return make_artifact(MinimalPairs(tuple(rule_names), per_rule, seed), out, pictures, force)


class CaptionedPictures(NamedTuple):
    """Pictures, the captions of each, and the blind spots that `_read_spots` returns."""

    shards: Path
    images: Sequence[Any]
    texts: Sequence[Sequence[str]]
    spots: tuple[Manifest, list[list[int]]] | None


@dataclass(frozen=True)
class MinimalPairs(Step[CaptionedPictures]):
    """Minimal pairs of pictures, with their gallery and suite."""

    kind = "pairs"
    rules: tuple[str, ...]
    per_rule: int
    seed: int

    def reads(self, how: CaptionedPictures) -> dict[str, str]:
        """Returns digests of the inputs: of keys and sizes of the pictures and their captions, and
        of the blind spots if there are any."""
        sizes, keys = [[getattr(i, name) for i in how.images] for name in ("size", "key")]
        pictures = {"sizes": sizes, "keys": keys, "captions": how.texts}
        inputs = {"shards": files.digest_json(pictures)}
        return inputs if how.spots is None else inputs | {"confused": how.spots[0].digest}

    def make(self, out: Artifact, how: CaptionedPictures) -> Made:
        """Writes the items. Raises NoItems, before it writes, if no rule fits a caption."""
        drawn = how.images, how.texts, self.per_rule, self.seed
        items = {rule: _items(rule, *drawn) for rule in self.rules}
        if how.spots is not None:
            items[CONFUSED] = _confused_items(how.spots[1], *drawn)
        fitting = {rule: of_rule for rule, of_rule in items.items() if of_rule}
        if not fitting:
            raise NoItems(
                f"no rule of {', '.join(self.rules)} fits any of the "
                f"{sum(map(len, how.texts)):,} captions in {how.shards}: the rules are for English "
                "sentences, give other --rules or --shards"
            )
        counts = {rule: len(of_rule) for rule, of_rule in items.items()}
        records = _write(out.begin(), fitting, how.images)
        listed = ", ".join(f"{rule} {count}" for rule, count in counts.items())
        log.info("make-pairs: %s; mark what is wrong in %s", listed, out.directory / "gallery.html")
        return Made({"images": len(how.images), "items": counts}, records)


def _items(
    rule: str, images: Sequence[Any], texts: Sequence[Sequence[str]], per_rule: int, seed: int
) -> Items:
    """Draws at most ``per_rule`` pictures, and for each a caption and an edit of it by ``rule``."""
    key = mix(seed, [*RULES].index(rule))
    items: Items = {}
    order = permute(np.arange(len(images)), len(images), mix(int(key), _RULE)).tolist()
    for row in progress(order, total=len(order), description=rule):
        if len(items) == per_rule:
            break
        fitting = [
            (n, edits)
            for n in range(len(texts[row]))
            if (edits := false_edits(rule, texts[row], n))
        ]
        if not fitting or not _is_picture(images[row]):
            continue
        draw = int(mix(int(key), _CAPTION, row))
        number, edits = fitting[draw % len(fitting)]
        items[row] = (texts[row][number], edits[(draw >> 32) % len(edits)].text, row)
    return dict(sorted(items.items()))


def _is_picture(image: Any) -> bool:
    """Returns True if the image can be decoded and is no array of numbers (.npy)."""
    try:
        decode_image(image.read_bytes(), MAX_IMAGE_PIXELS)
    except DecodeError:
        return False
    return True


def _read_spots(folder: Path, sizes: Sequence[int]) -> tuple[Manifest, list[list[int]]]:
    """Reads the manifest of blind spots, and for each pair the rows of its two pictures.

    ``sizes`` are the bytes of the pictures in the shards. Raises ValueError if the blind spots are
    of other pictures, and RuntimeError if they are damaged or of another index than their run's.
    """
    run_dir = find_run_dir(folder / PAIRS)
    if run_dir is None:
        raise ValueError(f"--confused: {folder} is no folder that 'mclclip blindspots' has written")
    index = SampleIndex.open(RunPaths(run_dir).index)
    manifest = index.manifest_of(folder, "blindspots")
    if index.image_size.tolist() != [*sizes]:
        raise ValueError(
            f"--confused: {folder} is of the {len(index):,} pictures of {run_dir}, and not of the "
            f"{len(sizes):,} in --shards: wanted the blind spots of a run whose only data source "
            "is --shards"
        )
    manifest.check(folder, PAIRS)
    lines = (folder / PAIRS).read_bytes().splitlines()
    return manifest, [files.parse_json(line, PAIRS)["sample_ids"] for line in lines]


def _confused_items(
    spots: Sequence[Sequence[int]],
    images: Sequence[Any],
    texts: Sequence[Sequence[str]],
    per_rule: int,
    seed: int,
) -> Items:
    """Makes two items of each pair of confused pictures: each gets the other's caption as the false
    one. Pairs keep their order; a pair is skipped if a caption is true of both pictures."""
    said = [{*map(spoken, captions)} for captions in texts]
    items: Items = {}
    for pair in spots:
        first, second = sorted(pair)
        if len(items) + 2 > per_rule:
            break
        if first in items or second in items:
            continue
        a, b = (
            texts[row][int(mix(seed, _CAPTION, row)) % len(texts[row])] for row in (first, second)
        )
        told_apart = spoken(b) not in said[first] and spoken(a) not in said[second]
        if told_apart and _is_picture(images[first]) and _is_picture(images[second]):
            items |= {first: (a, b, first), second: (b, a, first)}
    return dict(sorted(items.items()))


def _write(out: Path, items: dict[str, Items], images: Sequence[Any]) -> dict[str, files.Record]:
    """Writes pictures, items, suite and gallery; returns the records of the files."""
    for name in ("data", "images"):
        (out / name).mkdir(exist_ok=True)
    names: dict[int, str] = {}
    for row in sorted({row for of_rule in items.values() for row in of_rule}):
        data = images[row].read_bytes()
        names[row] = f"{row:06}.{image_extension(data) or 'img'}"
        files.write_bytes(out / "images" / names[row], data)
    records = {
        rule: {
            str(row): {
                "filename": names[row],
                "caption": caption,
                "negative_caption": false,
                "key": images[row].key,
            }
            | ({"unit": names[unit]} if rule == CONFUSED else {})
            for row, (caption, false, unit) in of_rule.items()
        }
        for rule, of_rule in items.items()
    }
    for rule, of_rule in records.items():
        files.write_json(out / "data" / f"{rule}.json", of_rule)
    suite = {"kind": "compositional", "path": "${folder}", "options": {"layout": "pairs"}}
    text = yaml.safe_dump({"name": "pairs", "benchmarks": {"pairs": suite}}, sort_keys=False)
    files.write_bytes(out / "suite.yaml", text.encode())
    files.write_bytes(out / "gallery.html", _gallery(records).encode())
    pictures = [f"images/{name}" for name in names.values()]
    tables = (f"data/{rule}.json" for rule in records)
    return files.records_of(out, *pictures, *tables, "suite.yaml", "gallery.html")


def _gallery(records: dict[str, dict[str, dict[str, str]]]) -> str:
    """Renders the page of all items. Its content policy allows only its own script."""
    template = environment().get_template("make_pairs.html")
    page = template.render(rules=records, policy="")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return template.render(rules=records, policy=f"'sha256-{digest}'")
