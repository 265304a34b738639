"""Verb: embeddings of two encoders -> image pairs that only the second of them tells apart.

The recipe is that of MMVP (Tong et al., Eyes Wide Shut, CVPR 2024), on the samples of the run's own
index. The second encoder is another stage of the run, or any whose embeddings lie in a folder as
``mclclip embed`` writes them, such as those of another run directory with the same data sources.
Every sample is compared with every other, block by block; embeddings are never held whole.
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mclclip import files, search
from mclclip.analysis.blind_spots import ABOVE, BELOW, Found, Listed, find, sampling_weights
from mclclip.analysis.pair_sheet import pair_sheet
from mclclip.config import Config
from mclclip.data.arrays import save_npy
from mclclip.data.decode import DecodeError, as_picture, decode
from mclclip.data.embeddings import Embedded
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import BadSample, TarDataset
from mclclip.eval.datasets import MMVP_COLUMNS, MMVP_FOLDERS
from mclclip.options import named_path
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import runlog
from mclclip.run.artifacts import Artifact, Force, read_manifest
from mclclip.run.layout import Layout

log = logging.getLogger("mclclip")

PAIRS, DUPLICATES, WEIGHTS, GALLERY = (
    "pairs.jsonl", "near_duplicates.jsonl", "weights.npy", "gallery.png",
)  # fmt: skip
BENCHMARK = "benchmark"
TYPE = "blind spot"
"""The Type of all pairs of the benchmark, until somebody sorts them."""

SHOWN = 24
"""Pairs of the gallery."""

ASKED = 150
"""Pairs of the benchmark at most, as many as MMVP has; each image is in one of them."""

_SUFFIXES = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n\x1a\n": ".png"}


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
    force: Force = False,
) -> Path:
    """Finds the blind spots of ``stage`` that another encoder sees; returns their directory.

    ``other``: a stage's number (None: the last stage), or ``[NAME=]FOLDER`` of embeddings. A pair
    is a blind spot where its cosine is above ``above`` for the stage and below ``below`` for the
    other encoder; of an image at most ``per_image`` are kept, of all ``max_pairs``, the largest
    differences first. Writes ``blindspots/STAGE-NAME/``: the pairs (pairs.jsonl), those that both
    encoders confuse (near_duplicates.jsonl), weights.npy float32 [N] in index order, gallery.png,
    and ``benchmark/``, minimal pairs in MMVP-VLM's layout whose statements are left to fill in.

    Raises FileNotFoundError where embeddings are missing, RuntimeError where they are of another
    index or damaged, and ValueError for options that do not fit, and where no pair is found; then
    nothing is written.
    """
    wanted = {"above": above, "below": below, "per_image": per_image, "max_pairs": max_pairs}
    return collectives.on_main(partial(_run, config, stage, other, wanted, force))


def _run(
    config: Config, stage: int, other: str | None, wanted: dict[str, Any], force: Force
) -> Path:
    _check(wanted)
    layout = Layout.of(config)
    index = SampleIndex.open(layout.index)
    first = Embedded.of_stage(layout, stage, index)
    second = _of_other(config, layout, stage, other, index)
    if first.manifest.digest == second.manifest.digest:
        raise ValueError(
            f"--other: {second.directory} holds the same embeddings as {first.name}, in which "
            "nothing is told apart that it confuses: name another encoder"
        )
    open_artifact = partial(
        Artifact.open,
        layout.blindspots(f"{first.name}-{second.name}"),
        kind="blindspots",
        config={"encoder": first.name, "other": second.name, **wanted},
        inputs={
            "index": index.digest,
            "embeddings": first.manifest.digest,
            "other_embeddings": second.manifest.digest,
        },
        force=force,
    )
    if (artifact := open_artifact(write=False)).finished:
        log.info("%s is finished: skipped", artifact.directory)
        return artifact.directory
    usable = np.ones(len(index), dtype=bool)
    usable[index.bad_ids()] = False
    for encoder in (first, second):
        usable[encoder.left_out()] = False
    found = _search(first, second, usable, wanted)
    # Opened for writing only now: where there is nothing to write, nothing is left behind.
    artifact = open_artifact(write=True)
    _write(artifact, config, index, found, usable)
    return artifact.directory


# --- the two encoders --------------------------------------------------------------------------


def _check(wanted: dict[str, Any]) -> None:
    above, below = wanted["above"], wanted["below"]
    if not 0.0 < above < 1.0:
        raise ValueError(f"--above is {above}, wanted a cosine between 0 and 1, such as {ABOVE}")
    if not -1.0 <= below < above:
        raise ValueError(
            f"--below is {below} and --above is {above}: wanted --below less than --above (and not "
            "below -1), since a pair is confused above the one and told apart below the other"
        )
    for name in ("per_image", "max_pairs"):
        if wanted[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {wanted[name]}, wanted 1 or more")


def _of_other(
    config: Config, layout: Layout, stage: int, other: str | None, index: SampleIndex
) -> Embedded:
    if other is None or other.isdecimal():
        number = config.num_stages if other is None else int(other)
        if number == stage:
            raise ValueError(
                f"--other is stage {number}, and so is --stage: name another stage, or "
                "[NAME=]FOLDER of another encoder's embeddings"
            )
        return Embedded.of_stage(layout, number, index)
    name, folder = named_path(other, "--other", "its encoder")
    manifest = read_manifest(folder, "embeddings")
    if manifest.inputs.get("index") != index.digest:
        raise RuntimeError(
            f"--other: embeddings at {folder} were made from another index than {index.directory} "
            f"({manifest.counts.get('samples')} rows, and {len(index)} here): index the same "
            "data.sources by the same names in both runs, then embed again"
        )
    return Embedded.checked(name or "other", folder, manifest, index)


# --- the search --------------------------------------------------------------------------------


def _search(
    first: Embedded, second: Embedded, usable: NDArray[np.bool_], wanted: dict[str, Any]
) -> Found:
    """The blind spots; where there is none, ValueError with one line that says what there is."""
    above, below, rows = wanted["above"], wanted["below"], first.rows()
    blocks = runlog.progress(
        search.blocks(len(rows)),
        total=search.num_blocks(len(rows)),
        description="blindspots, blocks",
    )
    pieces = search.near_pairs(rows, above, blocks, what="blindspots")
    found = find(pieces, second.rows(), usable, **wanted)
    if found.spots.found:
        return found
    if found.lowest is None:
        raise ValueError(
            f"no blind spot: {first.name} has no pair of images whose cosine is above {above}; "
            "lower --above"
        )
    raise ValueError(
        f"no blind spot: of {found.confused:,} pairs above {above} for {first.name} none is below "
        f"{below} for {second.name}, whose lowest cosine among them is {found.lowest:.4f}; raise "
        "--below above it, lower --above, or name another encoder with --other"
    )


# --- what is written ---------------------------------------------------------------------------


def _write(
    artifact: Artifact,
    config: Config,
    index: SampleIndex,
    found: Found,
    usable: NDArray[np.bool_],
) -> None:
    directory, options = artifact.directory, artifact.config
    pictures = _Pictures(config, index)
    kept = found.spots
    weights = sampling_weights(found.counts, usable, options["per_image"])
    _write_pairs(directory / PAIRS, kept, index)
    _write_pairs(directory / DUPLICATES, found.duplicates, index)
    save_npy(directory / WEIGHTS, weights)
    _write_gallery(directory / GALLERY, kept, options, pictures)
    asked = _write_benchmark(directory / BENCHMARK, kept, pictures)
    counts = {
        "samples": len(index),
        "left_out_samples": int((~usable).sum()),
        "confused": found.confused,
        "blind_spots": {"found": kept.found, "kept": len(kept.rows), "left_out": kept.left_out},
        "near_duplicates": {
            "found": found.duplicates.found,
            "kept": len(found.duplicates.rows),
            "left_out": found.duplicates.left_out,
        },
        "samples_in_blind_spots": int((found.counts > 0).sum()),
        "lowest_cosine": found.lowest,
        "benchmark_pairs": asked,
    }
    log.info(
        "%s confuses %d pairs, of which %s tells %d apart and confuses %d too: %d blind spots are "
        "kept at %s (beyond the cap per image: %d, of all: %d)",
        options["encoder"], found.confused, options["other"], kept.found, found.duplicates.found,
        len(kept.rows), directory, kept.left_out["per_image"],
        kept.left_out["total"] + kept.left_out["pool"],
    )  # fmt: skip
    # The benchmark is left out of the records: its statements are filled in by hand.
    names = (PAIRS, DUPLICATES, WEIGHTS, GALLERY)
    artifact.finish(
        counts,
        dtype="float32",
        content_digest=files.digest_json([artifact.identity, files.digest_array(kept.rows)]),
        records=files.records_of(directory, *names),
    )


def _write_pairs(path: Path, listed: Listed, index: SampleIndex) -> None:
    """A line of JSON per pair: sample_ids, keys, the cosines of the first encoder and the other."""
    keys = index.keys(listed.rows.ravel())
    lines = [
        json.dumps(
            {
                "sample_ids": ids,
                "keys": keys[2 * place : 2 * place + 2],
                "cosine": round(float(own), 6),
                "other_cosine": round(float(other), 6),
            }
        )
        for place, (ids, (own, other)) in enumerate(
            zip(listed.rows.tolist(), listed.cosines, strict=True)
        )
    ]
    files.write_bytes(path, "".join(f"{line}\n" for line in lines).encode())


class _Pictures:
    """The stored images and captions of samples."""

    def __init__(self, config: Config, index: SampleIndex) -> None:
        data = config.data
        self.index, self.max_image_pixels = index, data.max_image_pixels
        self._dataset = TarDataset(
            index, transform=None, reads_captions=False,
            max_image_pixels=data.max_image_pixels, max_open_files=data.max_open_files,
            check_pixels=data.verify == "full", remote=data.remote,
        )  # fmt: skip

    def key(self, sample_id: int) -> str:
        """The key of a sample."""
        return self.index.keys([sample_id])[0]

    def caption(self, sample_id: int) -> str:
        """The first caption; empty where there is none."""
        return (self._dataset.captions(sample_id) or [""])[0]

    def stored(self, sample_id: int) -> bytes:
        """The bytes of an image. Raises RuntimeError where they are not those of the index."""
        (raw,) = self._dataset.read_many([sample_id])
        if isinstance(raw, BadSample):
            raise RuntimeError(
                f"sample {self.key(sample_id)} cannot be read ({raw.reason}): its shard has "
                "changed since it was indexed, put it back"
            )
        return raw.image

    def picture(self, sample_id: int) -> Image.Image:
        """An image as a picture. Raises RuntimeError where it cannot be decoded."""
        try:
            found = decode(self.stored(sample_id), self.max_image_pixels, reads_arrays=True)
        except DecodeError as error:
            raise RuntimeError(
                f"sample {self.key(sample_id)} cannot be decoded ({error}): its shard has changed "
                "since it was embedded, run 'mclclip embed --force'"
            ) from None
        if isinstance(found, Image.Image):
            return found
        return Image.fromarray(np.ascontiguousarray(as_picture(found)))

    def file(self, sample_id: int) -> tuple[str, bytes]:
        """Suffix and bytes of a file of an image: as it is stored where it is a JPEG or a PNG."""
        stored = self.stored(sample_id)
        for begin, suffix in _SUFFIXES.items():
            if stored.startswith(begin):
                return suffix, stored
        sink = io.BytesIO()
        self.picture(sample_id).save(sink, "PNG")
        return ".png", sink.getvalue()


def _write_gallery(
    path: Path, listed: Listed, options: dict[str, Any], pictures: _Pictures
) -> None:
    names = options["encoder"], options["other"]
    shown = [
        (
            pictures.picture(lower),
            pictures.picture(higher),
            [f"{name} {cosine:.3f}" for name, cosine in zip(names, own, strict=True)],
        )
        for (lower, higher), own in zip(
            listed.rows[:SHOWN].tolist(), listed.cosines[:SHOWN].tolist(), strict=True
        )
    ]
    title = (
        f"{listed.found:,} pairs that {names[0]} confuses (cosine above {options['above']}) and "
        f"{names[1]} tells apart (below {options['below']}): the {len(shown)} of the largest "
        "difference"
    )
    pair_sheet(path, title, shown)


def _write_benchmark(directory: Path, listed: Listed, pictures: _Pictures) -> int:
    """Writes minimal pairs in MMVP-VLM's layout without statements; returns their number."""
    columns = (*MMVP_COLUMNS, "Caption", "Key")
    sink = io.StringIO(newline="")
    table = csv.writer(sink, lineterminator="\n")
    table.writerow(columns)
    chosen = _disjoint(listed.rows.tolist())
    number = 0
    for sample_id in (sample_id for pair in chosen for sample_id in pair):
        number += 1
        suffix, data = pictures.file(sample_id)
        files.write_bytes(directory / MMVP_FOLDERS[0] / TYPE / f"{number}{suffix}", data)
        about = files.shown(pictures.caption(sample_id)), files.shown(pictures.key(sample_id))
        table.writerow([number, TYPE, "", *about])
    files.write_bytes(directory / "Questions.csv", sink.getvalue().encode())
    return len(chosen)


def _disjoint(pairs: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The first ``ASKED`` pairs that share no image with a pair before them."""
    seen: set[int] = set()
    chosen: list[Sequence[int]] = []
    for pair in pairs:
        if not seen & {*pair} and len(chosen) < ASKED:
            seen |= {*pair}
            chosen.append(pair)
    return chosen
