"""Small pictures as data URIs, and the sections that are made of them: minimal pairs that one
encoder gets right and another does not, nearest neighbours, blind spots, and filters."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mclclip import compare, files
from mclclip.data.decode import DecodeError, as_picture, decode
from mclclip.data.options import DataConfig
from mclclip.data.samples import BadSample
from mclclip.data.training_images import path_of
from mclclip.eval.items import Item
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.protocols.mmvp import read_pairs
from mclclip.figures.nearest import nearest_samples
from mclclip.opened_run import Run
from mclclip.report import charts
from mclclip.report.scores import MINIMAL_PAIRS, best_of
from mclclip.run.artifacts import MANIFEST

SIDE = 96
"""Pixels of the longer side."""

_SMALL = 64  # pictures of at most this side keep every pixel
BUDGET_BYTES = 3_000_000
"""Bytes of all pictures of a page, as they stand in it."""

BEYOND = "beyond the size of the page"

LONGEST = 400
"""Characters of a caption or statement that are shown."""

_MAX_FILE_BYTES = 1 << 26

EXAMPLES = 4
"""Minimal pairs shown of those won, and as many of those lost."""

FEATURE_ROWS = 20_000
"""Rows at most of which the embeddings are read."""

ANCHORS, NEIGHBOURS = 5, 6

PAIRS = 8
"""Blind spots shown of two encoders, those of the largest difference."""


@dataclass(frozen=True)
class Picture:
    """A picture of the page: ``uri`` is empty where it cannot be shown, for ``reason``."""

    uri: str
    text: str
    reason: str = ""
    small: bool = False


class Thumbnails:
    """Makes the pictures of the page of a run; counts those that cannot be shown, by reason."""

    def __init__(self, run: Run, budget_bytes: int = BUDGET_BYTES) -> None:
        data = DataConfig() if run.config is None else run.config.data
        self.run, self.max_image_pixels, self.left_bytes = run, data.max_image_pixels, budget_bytes
        self._made: dict[Hashable, Picture] = {}
        self._captions: dict[int, str] = {}
        self._beyond = 0

    def of_sample(self, sample_id: int) -> Picture:
        """The picture of a sample, with its caption as its text."""

        def stored() -> bytes:
            (raw,) = self.run.dataset.read_many([sample_id])
            if isinstance(raw, BadSample):
                raise DecodeError(raw.reason, "it cannot be read")
            return raw.image

        return self._picture(sample_id, self.caption(sample_id), stored)

    def of_file(self, path: Path, text: str) -> Picture:
        """The picture in a file."""
        return self._picture(path, text, lambda: files.read_bounded(path, _MAX_FILE_BYTES))

    def caption(self, sample_id: int) -> str:
        """The first caption; empty where there is none, or it cannot be read any more."""
        if sample_id not in self._captions:
            try:
                captions = self.run.dataset.captions_of([sample_id])[0]
            except (OSError, RuntimeError):
                captions = []
            self._captions[sample_id] = captions[0] if captions else ""
        return self._captions[sample_id]

    def lost(self) -> dict[str, int]:
        """Number of pictures that cannot be shown, by reason; ``BEYOND`` counts every place."""
        lost = Counter(picture.reason for picture in self._made.values() if picture.reason)
        return dict(lost) | ({BEYOND: self._beyond} if self._beyond else {})

    def _picture(self, name: Hashable, text: str, read: Callable[[], bytes]) -> Picture:
        text = shortened(text)
        if name not in self._made:
            self._made[name] = self._of_bytes(read, text)
        picture = self._made[name]
        if len(picture.uri) > self.left_bytes:
            self._beyond += 1
            return Picture("", text, BEYOND)
        self.left_bytes -= len(picture.uri)
        return picture

    def _of_bytes(self, read: Callable[[], bytes], text: str) -> Picture:
        try:
            image = decode(read(), self.max_image_pixels, reads_arrays=True)
        except DecodeError as error:
            return Picture("", text, error.reason)
        except FileNotFoundError:
            return Picture("", text, "missing file")
        except (OSError, ValueError, RuntimeError):
            return Picture("", text, "unreadable")
        if isinstance(image, np.ndarray):
            image = Image.fromarray(np.ascontiguousarray(as_picture(image)))
        small = max(image.size) <= _SMALL
        sink = io.BytesIO()
        if small:
            image.save(sink, "PNG", optimize=True)
        else:
            image.thumbnail((SIDE, SIDE))
            image.save(sink, "JPEG", quality=80, optimize=True)
        kind, data = "png" if small else "jpeg", base64.b64encode(sink.getvalue()).decode()
        return Picture(f"data:image/{kind};base64,{data}", text, small=small)


def shortened(text: str) -> str:
    """The first ``LONGEST`` characters, with three dots for the others."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


# --- minimal pairs -------------------------------------------------------------------------------


def exchanges(run: Run, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """The pairs won and lost against stage 0 and against the ungrouped control, by benchmark.

    benchmark, model, against  what was measured, and the two encoders
    types      (Type, pairs won, pairs lost, pairs, the two as bars)
    won, lost  examples; ``missing`` says why there are none where pairs were won or lost

    Raises FileNotFoundError and ValueError where outcomes are missing or damaged.
    """
    exchanged, read = [], compare.Reader()
    rows = [
        (row, path)
        for row, path in compare.rows_of(run)
        if row.metric == "average" and row.protocol.get("name") == MINIMAL_PAIRS
    ]
    for benchmark in dict.fromkeys(row.benchmark for row, _ in rows):
        own = {row.model: (row, path) for row, path in rows if row.benchmark == benchmark}
        model = best_of(run, [*own])
        if model is None:
            continue
        pairs, missing = _pictured(run, benchmark)
        for against in ("stage_0", f"control_ungrouped_{model}"):
            if against in own:
                outcomes = read(*own[model]), read(*own[against])
                if outcomes[0].items != outcomes[1].items:
                    raise ValueError(
                        f"{model} and {against} were not measured on the same pairs of {benchmark}"
                    )
                names = {"benchmark": benchmark, "model": model, "against": against}
                exchanged.append(
                    names | {"missing": missing} | _exchanged(*outcomes, pairs, thumbnails)
                )
    return exchanged


def _pictured(run: Run, benchmark: str) -> tuple[dict[str, Item], str]:
    """The pairs of a benchmark by name, or the reason why their pictures cannot be shown."""
    known = None if run.config is None else run.config.eval.suite.get(benchmark)
    if known is None:
        return {}, "The configuration does not say where the pictures of this benchmark lie."
    try:
        pairs = read_pairs(Path(known.path))
    except (OSError, ValueError) as error:
        return {}, f"Their pictures are not there any more: {error}."
    return {pair.name: pair for pair in pairs}, ""


def _exchanged(
    own: Outcomes, other: Outcomes, pairs: Mapping[str, Item], thumbnails: Thumbnails
) -> dict[str, Any]:
    """The ``types`` of the pairs with what was won and lost of them, and examples of both."""
    kinds, gained = list(own.strata or [""] * len(own)), own.values - other.values
    rows = {"won": np.flatnonzero(gained > 0).tolist(), "lost": np.flatnonzero(gained < 0).tolist()}
    won, lost = (Counter(kinds[n] for n in each) for each in rows.values())
    most = max([*won.values(), *lost.values()], default=0)
    types = [
        (kind, won[kind], lost[kind], count, charts.balance(won[kind], lost[kind], most))
        for kind, count in Counter(kinds).items()
    ]
    examples: dict[str, list[dict[str, Any]]] = {"won": [], "lost": []}
    for name, each in rows.items():
        items = [own.items[n] for n in one_of_each(each, kinds) if own.items[n] in pairs]
        for pair in (pairs[item] for item in items[:EXAMPLES]):
            pictures = [
                (thumbnails.of_file(path_of(image), statement), shortened(statement))
                for image, statement in zip(pair.images, pair.texts, strict=True)
            ]
            examples[name].append({"type": pair.kind, "name": pair.name, "pictures": pictures})
    return {"types": types, **examples}


def one_of_each(rows: Sequence[int], kinds: Sequence[str]) -> list[int]:
    """The rows in another order: first one of each kind, then a second of each, and so on."""
    groups: dict[str, list[int]] = {}
    for row in rows:
        groups.setdefault(kinds[row], []).append(row)
    turns = chain.from_iterable(zip_longest(*groups.values()))
    return [row for row in turns if row is not None]


# --- samples -------------------------------------------------------------------------------------


def anchors(run: Run, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """Samples drawn by the seed, each with its ``picture``; and by stage its nearest samples among
    the rows that are read, nearest first.

    Empty where there are no embeddings, or too few. Raises RuntimeError where they are damaged.
    """
    ids = run.spread_ids(FEATURE_ROWS)
    features = {
        stage.name: stage.embeddings_of(ids) for stage in run.stages if stage.has("embeddings")
    }
    if not features:
        return []
    usable = np.logical_and.reduce([(rows != 0).any(axis=1) for rows in features.values()])
    ids = ids[usable]
    if len(ids) <= NEIGHBOURS:
        return []
    drawn = np.random.default_rng([run.seed, 5]).permutation(len(ids))[:ANCHORS]
    near = {
        name: nearest_samples(rows[usable], drawn, NEIGHBOURS)[1] for name, rows in features.items()
    }
    return [
        {
            "picture": thumbnails.of_sample(int(ids[anchor])),
            "stages": {
                name: [thumbnails.of_sample(int(ids[row])) for row in rows[number]]
                for name, rows in near.items()
            },
        }
        for number, anchor in enumerate(drawn)
    ]


def blindspots(run: Run, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """Options and counts of each artifact of ``mclclip blindspots``, and the first of its pairs:
    two pictures, their cosine for the encoder that confuses them, and that for the other.

    Raises RuntimeError where one is of another index, or damaged.
    """
    sections = []
    for directory in run.finished("blindspots").values():
        manifest = run.index.manifest_of(directory, "blindspots")
        manifest.check(directory, "pairs.jsonl")
        path, again = directory / "pairs.jsonl", "run 'mclclip blindspots --force' to make it again"
        with files.own(path, again), open(path, "rb") as lines:
            rows = [files.parse_json(line, str(path)) for line in islice(lines, PAIRS)]
            pairs = [
                (
                    [thumbnails.of_sample(int(sample_id)) for sample_id in row["sample_ids"]],
                    float(row["cosine"]),
                    float(row["other_cosine"]),
                )
                for row in rows
            ]
        sections.append({"options": manifest.config, "counts": manifest.counts, "pairs": pairs})
    return sections


def filters(run: Run) -> list[dict[str, Any]]:
    """The filters of a run: ``name``, options as ``flags``, and numbers of ``samples``: of all, and
    by reason, the first of which is ``kept``.

    Raises RuntimeError where one is of another index, or its manifest is damaged.
    """
    rows = []
    for name, directory in run.finished("filters").items():
        manifest = run.index.manifest_of(directory, "filter")
        with files.own(directory / MANIFEST, "run 'mclclip filter --force' to make it again"):
            flags = [
                f"--{option.replace('_', '-')} {' '.join(map(str, value))}"
                for option, given in manifest.config.items()
                if (value := given if isinstance(given, list) else [given]) not in ([], [None])
            ]
            reasons = {str(reason): int(n) for reason, n in manifest.counts["reasons"].items()}
            row = {"name": name, "flags": " ".join(flags), "reasons": reasons}
            rows.append(row | {"samples": int(manifest.counts["samples"])})
    return rows
