"""Verb ``blindspots``: embeddings of two encoders -> image pairs that only the second tells apart.

The second encoder is another stage of the run, or one whose embeddings ``mclclip embed`` has
written for the same data sources in another run. Every sample is compared with every other, block
by block; not all embeddings are in memory at once.

Source: Tong et al., Eyes Wide Shut (CVPR 2024), section 2. They built MMVP from pairs whose cosine
is above 0.95 for CLIP and below 0.6 for DINOv2. Here any two encoders are compared, pairs are
sorted by the difference of their cosines, and each image is in a bounded number of pairs.

The verb writes, below ``blindspots/STAGE-NAME/``:

    pairs.jsonl, near_duplicates.jsonl   a line per pair
    weights.npy                          float32 [N] in index order
    gallery.png                          the first pairs as pictures
    benchmark/                           minimal pairs in MMVP-VLM's layout, without statements
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from mclclip.config import Config
from mclclip.curate import near
from mclclip.data.arrays import save_npy
from mclclip.data.row_store import RowStore
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_writer import image_extension
from mclclip.eval.protocols.mmvp import MMVP_COLUMNS, MMVP_FOLDERS
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import Artifact, read_manifest
from mclclip.run.opened import Run
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util import files
from mclclip.util.options import check_folder_name, split_named_path
from mclclip.util.remake import Remake
from mclclip.util.search import Integers, NearPairs

log = logging.getLogger("mclclip")

Cosines = NDArray[np.float64]

ABOVE, BELOW = 0.95, 0.6
"""The cosines of the paper: confused above the first, told apart below the second."""

PAIRS, DUPLICATES, WEIGHTS, GALLERY = (
    "pairs.jsonl", "near_duplicates.jsonl", "weights.npy", "gallery.png",
)  # fmt: skip
BENCHMARK = "benchmark"
TYPE = "blind spot"
"""The Type of all pairs in Questions.csv, until a person sorts them into types."""

BENCHMARK_PAIRS = 150
"""Most pairs of the benchmark, as many as MMVP has; an image is in at most one of them."""

GALLERY_PAIRS, COLUMNS = 24, 4
"""Pairs of the gallery, and pairs in a row of it."""

SIDE = 144
"""Pixels of the longer side of a picture; small ones are enlarged without smoothing."""

POOL = 1_000_000
"""Most pairs in memory, those of the largest differences; they take 2 x 40 bytes each."""

_GAP, _LINE, _MARGIN = 4, 15, 14
_LETTERS = 7  # pixels per letter, more than the font's mean width


def run(
    config: Config,
    context: Context,
    *,
    stage: int = 0,
    other: str | None = None,
    above: float = ABOVE,
    below: float = BELOW,
    per_image: int = 5,
    max_pairs: int = 1000,
    force: Remake = Remake.NOTHING,
) -> Path:
    """Finds the blind spots of ``stage`` that another encoder sees; returns their directory.

    ``other``: a stage's number (None: the last stage), or ``[NAME=]FOLDER`` of embeddings. A pair
    is a blind spot if its cosine is above ``above`` for the stage and below ``below`` for the other
    encoder. Those of the largest differences are kept: at most ``per_image`` with one image, and
    ``max_pairs`` together. near_duplicates.jsonl has the pairs that both encoders confuse. The
    statements of ``benchmark/`` are empty, for a person to fill in.

    Raises, before it writes, FileNotFoundError for missing embeddings, RuntimeError for damaged
    ones or those of another index, and ValueError for options that do not fit, and if there is no
    blind spot.
    """
    limits = {"above": above, "below": below, "per_image": per_image, "max_pairs": max_pairs}
    return collectives.on_main(partial(_make_blind_spots, config, stage, other, limits, force))


def _make_blind_spots(
    config: Config, stage: int, other: str | None, limits: dict[str, Any], force: Remake
) -> Path:
    above, below = limits["above"], limits["below"]
    if not -1.0 <= below < above or not 0.0 < above < 1.0:
        raise ValueError(
            f"--below is {below} and --above is {above}: wanted a cosine --above between 0 and 1, "
            f"such as {ABOVE}, and --below less than that, but not less than -1"
        )
    opened = Run.of(config)
    first = opened.stage(stage).embeddings
    second = _other_encoder(opened, config.num_stages, other)
    if first.manifest.digest == second.manifest.digest:
        raise ValueError(
            f"--other: {second.directory} holds the same embeddings as {first.name}, in which "
            "nothing is told apart that it confuses: name another encoder"
        )
    directory = opened.layout.run_dir / "blindspots" / f"{first.name}-{second.name}"
    step = BlindSpotPairs(first.name, second.name, **limits)
    make_artifact(step, directory, (opened, first, second), force)
    return directory


@dataclass(frozen=True)
class BlindSpotPairs(Step[tuple[Run, RowStore, RowStore]]):
    """Pairs of images that one encoder confuses and another tells apart."""

    kind = "blindspots"
    encoder: str
    other: str
    above: float
    below: float
    per_image: int
    max_pairs: int

    def reads(self, how: tuple[Run, RowStore, RowStore]) -> dict[str, str]:
        """Returns the digests of the index and of both embeddings."""
        run, first, second = how
        both = {"embeddings": first.manifest.digest, "other_embeddings": second.manifest.digest}
        return {"index": run.index.digest} | both

    def make(self, out: Artifact, how: tuple[Run, RowStore, RowStore]) -> Made:
        """Finds and writes the pairs. Raises ValueError, before it writes, if there is none."""
        run, first, second = how
        usable = np.ones(len(run.index), dtype=bool)
        usable[run.index.bad_ids()] = False
        for encoder in (first, second):
            usable[encoder.left_out()] = False
        pairs = near.near_pairs(first, usable, self.above, what="blindspots")
        caps = {"per_image": self.per_image, "max_pairs": self.max_pairs}
        blind_spots = find(pairs, second, above=self.above, below=self.below, **caps)
        if not blind_spots.spots.num_pairs:
            if (lowest := blind_spots.lowest) is None:
                why = (
                    f"{first.name} has no pair of images whose cosine is above {self.above}; lower "
                    "--above"
                )
            else:
                why = (
                    f"of {blind_spots.confused:,} pairs above {self.above} for {first.name} none "
                    f"is below {self.below} for {second.name}, whose lowest cosine among them is "
                    f"{lowest:.4f}; raise --below above it, lower --above, or name another encoder "
                    "with --other"
                )
            raise ValueError(f"no blind spot: {why}")
        out.begin()
        return _write(out, self, run, blind_spots, usable)


def _other_encoder(run: Run, num_stages: int, other: str | None) -> RowStore:
    if other is None or other.isdecimal():
        return run.stage(num_stages if other is None else int(other)).embeddings
    name, where = split_named_path(other)
    if name is not None:
        check_folder_name(name, "--other", "its encoder")
    folder = Path(where)
    manifest, index = read_manifest(folder, "embeddings"), run.index
    if manifest.inputs.get("index") != index.digest:
        raise RuntimeError(
            f"--other: embeddings at {folder} were made from another index than {index.directory} "
            f"({manifest.counts.get('samples')} rows, and {len(index)} here): index the same "
            "data.sources by the same names in both runs, then embed again"
        )
    return RowStore.open(folder, manifest, name or "other")


# --- pairs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptPairs:
    """The pairs that are kept, in order, and how many others there are.

    rows      [P, 2], the two samples of each pair, the lower one first
    cosines   [P, 2], of the first and of the second encoder
    num_pairs number of all pairs, kept or not
    left_out  numbers of pairs by reason. 'per_image': one of its images is in enough pairs;
              'total': there are enough pairs; 'pool': it did not fit into memory
    """

    rows: Integers
    cosines: Cosines
    num_pairs: int
    left_out: dict[str, int]


@dataclass(frozen=True)
class BlindSpots:
    """Blind spots and near-duplicates among N images, with their counts.

    spots       blind spots, the largest difference of cosines first
    duplicates  pairs that both encoders confuse, the largest sum of cosines first
    confused    number of pairs that the first encoder confuses
    lowest      lowest cosine of the second encoder among these pairs; None if there is no pair
    counts      [N], number of blind spots of each image, kept or not
    """

    spots: KeptPairs
    duplicates: KeptPairs
    confused: int
    lowest: float | None
    counts: NDArray[np.int32]


class _Pool:
    """Holds the ``size`` pairs with the largest scores; of equal scores those of lower rows."""

    def __init__(self, size: int) -> None:
        self.size, self.num_pairs, self.held = size, 0, 0
        self.parts: list[tuple[Integers, Cosines, Cosines]]
        self.parts = [(np.zeros((0, 2), np.int64), np.zeros((0, 2)), np.zeros(0))]

    def add(self, rows: Integers, cosines: Cosines, scores: Cosines) -> None:
        """Adds pairs [P, 2] with cosines [P, 2] and scores [P]."""
        if not len(rows):
            return
        self.parts.append((rows, cosines, scores))
        self.num_pairs += len(rows)
        self.held += len(rows)
        if self.held > 2 * self.size:
            self._sort()

    def _sort(self) -> None:
        """Sorts the pairs, the largest score first, and drops those beyond ``size``."""
        rows, cosines, scores = (np.concatenate(part) for part in zip(*self.parts, strict=True))
        order = np.lexsort((rows[:, 1], rows[:, 0], -scores))[: self.size]
        self.parts, self.held = [(rows[order], cosines[order], scores[order])], len(order)

    def keep_within(self, per_image: int, max_pairs: int) -> KeptPairs:
        """Returns the pairs within both caps, the largest score first."""
        self._sort()
        rows, cosines, _ = self.parts[0]
        numbers, beyond = within_caps(rows, per_image, max_pairs)
        left_out = {
            "per_image": beyond,
            "total": len(rows) - len(numbers) - beyond,
            "pool": self.num_pairs - len(rows),
        }
        return KeptPairs(rows[numbers], cosines[numbers], self.num_pairs, left_out)


def within_caps(rows: Integers, per_image: int, max_pairs: int) -> tuple[list[int], int]:
    """Goes through the pairs in order, and skips those with an image that is already in
    ``per_image`` chosen pairs; stops at ``max_pairs``. Returns the positions of the chosen pairs,
    and the number of skipped ones."""
    uses: Counter[int] = Counter()
    numbers: list[int] = []
    beyond = 0
    for number, (lower, higher) in enumerate(rows.tolist()):
        if len(numbers) == max_pairs:
            break
        if max(uses[lower], uses[higher]) >= per_image:
            beyond += 1
            continue
        uses.update((lower, higher))
        numbers.append(number)
    return numbers, beyond


def find(
    pairs: Iterable[NearPairs],
    second: near.Embeddings,
    *,
    above: float,
    below: float,
    per_image: int,
    max_pairs: int,
    pool: int = POOL,
) -> BlindSpots:
    """Finds the blind spots among ``pairs``, which the first encoder confuses.

    pairs      comes in pieces; both encoders have embedded the images of these pairs
    second     embeddings [N, D] of the second encoder, of any length
    above      the second encoder confuses a pair too if its cosine is above this
    below      the second encoder tells a pair apart if its cosine is below this
    per_image  most pairs with one image that are kept; ``max_pairs``: most pairs that are kept

    Pairs of the largest differences are kept. At most ``pool`` pairs of each kind are in memory;
    the caps choose among these. The result does not depend on how pairs are cut into pieces.
    """
    size = max(pool, max_pairs)
    spots, duplicates = _Pool(size), _Pool(size)
    counts = np.zeros(len(second), np.int32)
    confused, lowest = 0, np.inf
    for piece in pairs:
        rows, first = piece.rows, piece.cosines
        other = near.cosines_of(second, *rows.T)
        confused += len(rows)
        lowest = min(lowest, float(other.min()))
        values = np.column_stack([first, other])
        apart, same = other < below, other > above
        spots.add(rows[apart], values[apart], (first - other)[apart])
        duplicates.add(rows[same], values[same], (first + other)[same])
        np.add.at(counts, rows[apart].ravel(), 1)
    return BlindSpots(
        spots.keep_within(per_image, max_pairs),
        duplicates.keep_within(per_image, max_pairs),
        confused,
        lowest if confused else None,
        counts,
    )


# --- what is written ---------------------------------------------------------------------------


def _write(
    out: Artifact,
    step: BlindSpotPairs,
    run: Run,
    blind_spots: BlindSpots,
    usable: NDArray[np.bool_],
) -> Made:
    """Writes all files; logs and returns the counts."""
    directory = out.directory
    spots, duplicates = blind_spots.spots, blind_spots.duplicates
    # The weight of an image is 1, and 1 more for each of its blind spots up to the cap.
    times = 1 + np.minimum(blind_spots.counts, step.per_image)
    save_npy(directory / WEIGHTS, np.where(usable, times, 0).astype(np.float32))
    _write_pairs(directory / PAIRS, spots, run.index)
    _write_pairs(directory / DUPLICATES, duplicates, run.index)
    _write_gallery(directory / GALLERY, spots, step, run)
    apart, _ = within_caps(spots.rows, 1, BENCHMARK_PAIRS)
    pairs = spots.rows[apart].tolist()
    _write_benchmark(directory / BENCHMARK, pairs, run)
    counts: dict[str, Any] = {
        "samples": len(run.index),
        "left_out_samples": int((~usable).sum()),
        "confused": blind_spots.confused,
    }
    for name, of in (("blind_spots", spots), ("near_duplicates", duplicates)):
        counts[name] = {"found": of.num_pairs, "kept": len(of.rows), "left_out": of.left_out}
    counts |= {
        "samples_in_blind_spots": int((blind_spots.counts > 0).sum()),
        "lowest_cosine": blind_spots.lowest,
        "benchmark_pairs": len(pairs),
    }
    log.info(
        "%s confuses %d pairs, of which %s tells %d apart and confuses %d too: %d blind spots are "
        "kept at %s (beyond the cap per image: %d, of all: %d)",
        step.encoder, blind_spots.confused, step.other, spots.num_pairs,
        duplicates.num_pairs, len(spots.rows), directory, spots.left_out["per_image"],
        spots.left_out["total"] + spots.left_out["pool"],
    )  # fmt: skip
    # The benchmark has no records, since a person fills in its statements.
    records = files.records_of(directory, PAIRS, DUPLICATES, WEIGHTS, GALLERY)
    digest = files.digest_json([out.identity, files.digest_array(spots.rows)])
    return Made(counts, records, "float32", digest)


def _write_pairs(path: Path, pairs: KeptPairs, index: SampleIndex) -> None:
    """Writes a line of JSON per pair: sample_ids, keys, and the cosines of both encoders."""
    keys = index.keys(pairs.rows.ravel())
    lines = [
        {
            "sample_ids": ids,
            "keys": keys[2 * number : 2 * number + 2],
            "cosine": round(cosine, 6),
            "other_cosine": round(other, 6),
        }
        for number, (ids, (cosine, other)) in enumerate(
            zip(pairs.rows.tolist(), pairs.cosines.tolist(), strict=True)
        )
    ]
    files.write_bytes(path, "".join(f"{json.dumps(line)}\n" for line in lines).encode())


# --- gallery -------------------------------------------------------------------------------------


def _write_gallery(path: Path, spots: KeptPairs, step: BlindSpotPairs, run: Run) -> None:
    """Writes a PNG with the first pairs, each with its cosines below the two pictures."""
    first, second = step.encoder, step.other
    pairs, cosines = spots.rows[:GALLERY_PAIRS].tolist(), spots.cosines[:GALLERY_PAIRS].tolist()
    wide, high = 2 * SIDE + _GAP + _MARGIN, SIDE + 2 * _LINE + _MARGIN
    columns = min(COLUMNS, len(pairs))
    width = columns * wide + _MARGIN
    title = (
        f"{spots.num_pairs:,} pairs that {first} confuses (cosine above {step.above}) and "
        f"{second} tells apart (below {step.below}): the {len(pairs)} of the largest "
        "difference"
    )
    heading = wrap(title, max((width - 2 * _MARGIN) // _LETTERS, 20))
    top = 2 * _MARGIN + len(heading) * _LINE
    sheet = Image.new("RGB", (width, top + -(-len(pairs) // columns) * high), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for number, line in enumerate(heading):
        draw.text((_MARGIN, _MARGIN + number * _LINE), line, "black", font)
    for number, (pair, (cosine, other)) in enumerate(zip(pairs, cosines, strict=True)):
        x, y = _MARGIN + number % columns * wide, top + number // columns * high
        for column, picture in enumerate(map(Image.fromarray, run.pictures(pair))):
            small = max(picture.size) * 2 <= SIDE
            kind = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
            tile = ImageOps.pad(picture, (SIDE, SIDE), kind, color="lightgrey")
            sheet.paste(tile, (x + column * (SIDE + _GAP), y))
        draw.text((x, y + SIDE), f"{first} {cosine:.3f}", "black", font)
        draw.text((x, y + SIDE + _LINE), f"{second} {other:.3f}", "black", font)
    with files.whole_file(path) as file:
        sheet.save(file, "PNG")


# --- benchmark -----------------------------------------------------------------------------------


def _write_benchmark(directory: Path, pairs: list[list[int]], run: Run) -> None:
    """Writes minimal pairs in MMVP-VLM's layout, with empty statements. JPEGs and PNGs are copied
    byte for byte; images of other formats become PNGs."""
    lines = io.StringIO(newline="")
    table = csv.writer(lines, lineterminator="\n")
    table.writerow([*MMVP_COLUMNS, "Caption", "Key"])
    sample_ids = [sample_id for pair in pairs for sample_id in pair]
    for number, sample_id in enumerate(sample_ids, start=1):
        (stored,) = run.stored_images([sample_id])
        suffix = image_extension(stored)
        if suffix not in ("jpg", "png"):
            suffix, sink = "png", io.BytesIO()
            Image.fromarray(run.pictures([sample_id])[0]).save(sink, "PNG")
            stored = sink.getvalue()
        files.write_bytes(directory / MMVP_FOLDERS[0] / TYPE / f"{number}.{suffix}", stored)
        caption = (run.captions([sample_id])[0] or [""])[0]
        about = files.printable(caption), files.printable(run.index.keys([sample_id])[0])
        table.writerow([number, TYPE, "", *about])
    files.write_bytes(directory / "Questions.csv", lines.getvalue().encode())
