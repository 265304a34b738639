"""Makes small pictures as data URIs, and the sections that show them: minimal pairs and queries
that one encoder gets right and another does not, nearest neighbours, blind spots, and filters."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mclclip.data.bytes import BadSample
from mclclip.data.decode import DecodeError, as_picture, decode, is_array
from mclclip.data.locations import PICTURE
from mclclip.data.options import DataConfig
from mclclip.data.training_images import Readable, path_of
from mclclip.eval.captions import read_captions_of_shards
from mclclip.eval.images import image_items
from mclclip.eval.items import read_items
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.protocols.mmvp import read_pairs
from mclclip.eval.results import REPORT, Result, short_name
from mclclip.figures.nearest import nearest_samples
from mclclip.report import charts
from mclclip.report.scores import MINIMAL_PAIRS
from mclclip.run.artifacts import MANIFEST
from mclclip.run.opened import Run
from mclclip.util import files
from mclclip.verbs import compare
from mclclip.verbs.compare import BASE, TWIN

SIDE = 96
"""The longer side of a picture on the page, in pixels."""

_SMALL = 64  # pictures whose sides are at most so long are not made smaller
BUDGET_BYTES = 3_000_000
"""The pictures of a page take at most so many bytes of it."""

BEYOND = "beyond the size of the page"

LONGEST = 400
"""At most so many characters of a caption or statement are shown."""

EXAMPLES = 4
"""So many of the items won are shown, and as many of those lost."""

FEATURE_ROWS = 20_000
"""Embeddings are read of at most so many samples."""

ENCODED = 512
"""At most so many samples are encoded for the page."""

ANCHORS, NEIGHBOURS = 5, 6

PAIRS = 8
"""So many blind spots of two encoders are shown, those with the largest difference."""


@dataclass(frozen=True)
class Picture:
    """A picture of the page, its name and its caption or statement ``text``. If it cannot be shown,
    ``uri`` is empty, and ``reason`` says why."""

    uri: str
    reason: str = ""
    small: bool = False
    name: str = ""
    text: str = ""


class Thumbnails:
    """Makes the pictures of a run's page, each once, and counts those that cannot be shown."""

    def __init__(self, run: Run, budget_bytes: int = BUDGET_BYTES) -> None:
        data = DataConfig() if run.config is None else run.config.data
        self.run, self.max_image_pixels, self.left_bytes = run, data.max_image_pixels, budget_bytes
        self._pictures: dict[Hashable, Picture] = {}
        self._captions: dict[int, str] = {}
        self._beyond = 0

    def of_sample(self, sample_id: int) -> Picture:
        """The picture of a sample. Its text is its caption; its name has the file that it was
        packed from, if that is known."""

        def stored() -> bytes:
            (raw,) = self.run.samples.read([sample_id], [PICTURE])
            if isinstance(raw, BadSample):
                raise DecodeError(raw.reason, "it cannot be read")
            return raw.image

        name = self.run.index.names([sample_id])[0]
        return self._picture(sample_id, name, self.caption(sample_id), stored)

    def of_image(self, image: Readable, text: str) -> Picture:
        """The picture in an image file or in a shard, with this text."""
        name = getattr(image, "name", path_of(image).name)
        return self._picture(str(image), name, text, image.read_bytes)

    def caption(self, sample_id: int) -> str:
        """The first caption of a sample; empty if there is none, or if it cannot be read."""
        if sample_id not in self._captions:
            self._captions[sample_id] = ""
            with suppress(OSError, RuntimeError):
                [captions] = self.run.captions([sample_id])
                self._captions[sample_id] = next(iter(captions), "")
        return self._captions[sample_id]

    def lost(self) -> dict[str, int]:
        """The number of pictures that cannot be shown, by reason. A picture that would make the
        page too large (``BEYOND``) counts as often as it was asked for."""
        lost = Counter(picture.reason for picture in self._pictures.values() if picture.reason)
        return dict(lost) | ({BEYOND: self._beyond} if self._beyond else {})

    def _picture(self, key: Hashable, name: str, text: str, read: Callable[[], bytes]) -> Picture:
        if key not in self._pictures:
            self._pictures[key] = self._of_bytes(read)
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        picture = replace(self._pictures[key], name=name, text=text)
        if len(picture.uri) > self.left_bytes:
            self._beyond += 1
            return replace(picture, uri="", reason=BEYOND)
        self.left_bytes -= len(picture.uri)
        return picture

    def _of_bytes(self, read: Callable[[], bytes]) -> Picture:
        try:
            image = decode(read(), self.max_image_pixels, reads_arrays=True)
        except DecodeError as error:
            return Picture("", error.reason)
        except FileNotFoundError:
            return Picture("", "missing file")
        except (OSError, ValueError, RuntimeError):
            return Picture("", "unreadable")
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
        return Picture(f"data:image/{kind};base64,{data}", small=small)


# --- minimal pairs -------------------------------------------------------------------------------


Shown = tuple[str, list[tuple[Readable, str]]]
"""How an item is shown: its kind, such as a Type or a rule, and its images, each with a text."""


def exchanges(run: Run, thumbnails: Thumbnails, model: str | None) -> list[dict[str, Any]]:
    """Describes, by benchmark and metric, the minimal pairs and queries that an encoder wins and
    loses against stage 0 and against its ungrouped control.

    title           the benchmark and the metric
    model, against  the two encoders
    types           for each kind of item (kind, won, lost, items, the first two as bars)
    axis            the axis of the bars
    won, lost       examples
    missing         why there are no examples, or empty

    Raises FileNotFoundError and ValueError if outcomes are missing or damaged.
    """
    exchanged, read = [], compare.Reader()
    cells = {(r.benchmark, r.metric, r.model): (r, p) for r, p in compare.rows_of(run)}
    for benchmark, metric in dict.fromkeys(cell[:2] for cell in cells):
        row = cells.get((benchmark, metric, model or ""))
        if row is None or not _has_items(row[0]):
            continue
        items, missing = _read_items(run, row[0])
        for against in (BASE, f"{TWIN}{model}"):
            if other := cells.get((benchmark, metric, against)):
                outcomes = read(*row), read(*other)
                if outcomes[0].items != outcomes[1].items:
                    raise ValueError(
                        f"{model} and {against} were not measured on the same pairs of {benchmark}"
                    )
                title = f"{benchmark}, {short_name(metric)}"
                names = {"title": title, "model": model, "against": against, "missing": missing}
                exchanged.append(names | _compare(*outcomes, items, thumbnails))
    return exchanged


def _has_items(row: Result) -> bool:
    """Returns True if the items of a row are shown: minimal pairs, and queries of the benchmark
    'report' of ``mclclip finetune``, which lies in shards."""
    main = {MINIMAL_PAIRS: "average", "pairs": "pooled"}.get(str(row.protocol.get("name")))
    in_shards = "shard_captions" in row.protocol.get("settings", {})
    is_query = row.benchmark == REPORT and row.protocol.get("level") == "headline" and in_shards
    return is_query or row.metric == main


def _read_items(run: Run, row: Result) -> tuple[dict[str, Shown], str]:
    """Reads the items of a row's benchmark by name, and why their pictures cannot be shown, or
    ''."""
    benchmark = None if run.config is None else run.config.eval.suite.get(row.benchmark)
    if benchmark is None:
        return {}, "The configuration does not say where the pictures of this benchmark lie."
    path, name = Path(benchmark.path), row.protocol.get("name")
    try:
        if name == MINIMAL_PAIRS:
            pairs = read_pairs(path)
            return {o.name: (o.kind, [*zip(o.images, o.texts, strict=True)]) for o in pairs}, ""
        if name == "pairs":
            items = read_items(path, "pairs").items
            return {o.name: (o.part, [(o.images[0], " / not: ".join(o.texts))]) for o in items}, ""
        return _queries(path, dict(benchmark.options)), ""
    except (OSError, ValueError) as error:
        return {}, f"Their pictures are not there any more: {error}."


def _queries(root: Path, options: Mapping[str, Any]) -> dict[str, Shown]:
    """Reads the queries of both directions of a retrieval from shards, by name."""
    data = read_captions_of_shards(root / options["captions"], options["shard_captions"])
    names, queries = image_items(data.images, root), dict[str, Shown]()
    for number, (text, row) in enumerate(zip(data.captions, data.caption_image, strict=True)):
        queries.setdefault(names[row], ("pictures", [(data.images[row], text)]))
        queries[f"{names[row]}#{number}"] = ("captions", [(data.images[row], text)])
    return queries


def _compare(
    model: Outcomes, other: Outcomes, items: Mapping[str, Shown], thumbnails: Thumbnails
) -> dict[str, Any]:
    """Compares two encoders item by item: ``types``, ``axis``, ``won`` and ``lost`` of
    ``exchanges``."""
    parts, gained = model.strata or ["all"] * len(model), model.values - other.values
    kinds = [items.get(i, (part,))[0] for i, part in zip(model.items, parts, strict=True)]
    rows = {"won": np.flatnonzero(gained > 0).tolist(), "lost": np.flatnonzero(gained < 0).tolist()}
    won, lost = (Counter(kinds[n] for n in each) for each in rows.values())
    largest = max([*won.values(), *lost.values(), 1])
    most = math.ceil(charts.round_ends(-largest, largest)[1])
    types = [
        (kind, won[kind], lost[kind], count, charts.balance(won[kind], lost[kind], most))
        for kind, count in Counter(kinds).items()
    ]
    groups = [f"{kind} {of}" for kind, of in zip(kinds, model.resampling_group, strict=True)]
    examples: dict[str, list[dict[str, Any]]] = {"won": [], "lost": []}
    for name, each in rows.items():
        turns = one_of_each(one_of_each(each, groups), kinds)
        shown = [model.items[n] for n in turns if model.items[n] in items]
        for item in shown[:EXAMPLES]:
            kind, pictures = items[item]
            figures = [thumbnails.of_image(*picture) for picture in pictures]
            examples[name].append({"type": kind, "name": item, "pictures": figures})
    return {"types": types, "axis": charts.strip_axis((-most, most), whole=True), **examples}


def one_of_each(rows: Sequence[int], kinds: Sequence[str]) -> list[int]:
    """Reorders rows: first one of each kind, then a second of each kind, and so on."""
    groups: dict[str, list[int]] = {}
    for row in rows:
        groups.setdefault(kinds[row], []).append(row)
    turns = chain.from_iterable(zip_longest(*groups.values()))
    return [row for row in turns if row is not None]


# --- samples -------------------------------------------------------------------------------------


def anchors(run: Run, thumbnails: Thumbnails, tuned: str | None) -> list[dict[str, Any]]:
    """Draws some samples, and shows their nearest samples for stage 0 and the encoder ``tuned``
    (None: the last stage that was exported).

    picture   the drawn sample
    among     the number of samples among which neighbours were searched
    encoders  encoder -> the nearest samples, nearest first

    Embeddings are read from the run. If ``tuned`` has none, its export encodes ``ENCODED`` samples;
    without an export it is left out. The list is empty if there are too few
    samples or no embeddings of stage 0. Raises RuntimeError if embeddings are damaged.
    """
    embedded = {stage.name: stage for stage in run.stages if stage.has("embeddings")}
    exports = run.exports()
    tuned = tuned or next((s.name for s in reversed(run.stages) if s.name in exports), BASE)
    export = None if tuned in embedded else exports.get(tuned)
    if BASE not in embedded:
        return []
    ids = run.spread_ids(FEATURE_ROWS if export is None else ENCODED)
    names = [name for name in dict.fromkeys((BASE, tuned)) if name in embedded]
    features = {name: embedded[name].embeddings_of(ids) for name in names}
    usable = np.logical_and.reduce([(rows != 0).any(axis=1) for rows in features.values()])
    ids, features = ids[usable], {name: rows[usable] for name, rows in features.items()}
    if len(ids) <= NEIGHBOURS:
        return []
    if export is not None and (encoded := _encoded(run, export, ids)) is not None:
        features[tuned] = encoded
    drawn = np.random.default_rng([run.seed, 5]).permutation(len(ids))[:ANCHORS]
    near = {name: nearest_samples(rows, drawn, NEIGHBOURS)[1] for name, rows in features.items()}
    return [
        {
            "picture": thumbnails.of_sample(int(ids[anchor])),
            "among": len(ids),
            "encoders": {
                name: [thumbnails.of_sample(int(ids[row])) for row in rows[number]]
                for name, rows in near.items()
            },
        }
        for number, anchor in enumerate(drawn)
    ]


def _encoded(run: Run, export: Path, ids: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """Encodes samples by an exported encoder; returns None if some are arrays, not pictures."""
    from mclclip.models.encoder import load_model

    stored = run.stored_images(ids)
    return None if any(map(is_array, stored)) else load_model(export).encode_image(stored)


def blindspots(run: Run, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """Describes each artifact of ``mclclip blindspots``: its ``options``, its ``counts``, and the
    first of its ``pairs``, each as (two pictures, their cosine for the encoder that confuses them,
    their cosine for the other encoder).

    Raises RuntimeError if an artifact is of another index or damaged.
    """
    sections = []
    for directory in run.finished("blindspots").values():
        manifest = run.index.manifest_of(directory, "blindspots")
        manifest.check(directory, "pairs.jsonl")
        path, again = directory / "pairs.jsonl", "run 'mclclip blindspots --force' to make it again"
        with files.damaged_if_unreadable(path, again), open(path, "rb") as lines:
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
    """Describes the filters of a run: ``name``, options as ``flags`` of the command, the number of
    ``samples``, and ``reasons``: the number of samples for each reason, of which the first is
    'kept'.

    Raises RuntimeError if a filter is of another index, or its manifest is damaged.
    """
    rows = []
    for name, directory in run.finished("filters").items():
        manifest = run.index.manifest_of(directory, "filter")
        with files.damaged_if_unreadable(
            directory / MANIFEST, "run 'mclclip filter --force' to make it again"
        ):
            options = manifest.config["filters"] | {"stage": manifest.config["stage"]}
            flags = [
                f"--{option.replace('_', '-')} {' '.join(map(str, value))}"
                for option, setting in options.items()
                if (value := setting if isinstance(setting, list) else [setting])
                not in ([], [None])
            ]
            row = {"name": name, "flags": " ".join(flags), "samples": manifest.counts["samples"]}
            rows.append(row | {"reasons": manifest.counts["reasons"]})
    return rows
