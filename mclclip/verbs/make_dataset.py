"""Verb: writes a built-in or published data set as shards."""

from __future__ import annotations

import csv
import importlib
import inspect
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mclclip.data import datasets, patterns
from mclclip.data.datasets.sources import Sources
from mclclip.data.shard_writer import PackedSample, check_foreign, write_shards
from mclclip.run import runlog
from mclclip.run.artifacts import Artifact
from mclclip.util import files

log = logging.getLogger("mclclip")

NUM_SAMPLES = 12_000
NUM_PAIRS = 200
SAMPLES_PER_SHARD = 2_000
SPLITS = ("train", "test", "unlabeled")


def run(name: str, out: Path, *, seed: int = 0, force: bool = False, **options: Any) -> Path:
    """Writes the data set ``name`` below ``out`` (skips what is finished) and returns ``out``.

    ``patterns`` takes the options of ``write_patterns``. The others are those of
    ``data.datasets.NAMES``: they take the options of ``write_splits`` and of the data set. Options
    that are None are left at their defaults. ``force`` moves shards of other settings aside. Raises
    ValueError for an unknown name or option and for wrong values or files, FileNotFoundError for
    missing files.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}: wanted 0 or more")
    given = {option: value for option, value in options.items() if value is not None}
    if name == "patterns":
        _check_options(name, given, _options_of(write_patterns))
        return write_patterns(Path(out), seed=seed, force=force, **given)
    if name not in datasets.NAMES:
        raise ValueError(
            f"no built-in data set {name!r}: there is 'patterns', {', '.join(datasets.NAMES)}"
        )
    build = importlib.import_module(f"mclclip.data.datasets.{name}").build
    own, shared = _options_of(build), _options_of(write_splits)
    _check_options(name, given, {**own, **shared})
    settings = own | {option: given.pop(option) for option in own if option in given}
    return write_splits(Path(out), name, build, settings, seed=seed, force=force, **given)


def _options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword options of a function with their defaults, but for ``seed`` and ``force``."""
    parameters = inspect.signature(function).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {name: keywords[name] for name in keywords if name not in ("seed", "force")}


def _check_options(name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    if unknown := sorted(given.keys() - known.keys()):
        raise ValueError(
            f"the data set {name} has no option {unknown[0]}: it has {', '.join(sorted(known))}"
        )


# --- data sets with a train and a test split ---------------------------------------------------


def write_splits(
    out: Path,
    name: str,
    build: Callable[..., Mapping[str, Any]],
    settings: Mapping[str, Any],
    *,
    seed: int,
    force: bool,
    source: Sequence[str] = (),
    download: bool = False,
    samples_per_shard: int = SAMPLES_PER_SHARD,
) -> Path:
    """Writes ``out/SPLIT/*.tar`` for every split that ``build`` makes of ``settings``.

    ``source`` has entries ``NAME=FOLDER``. A sample's ``.json`` holds its attributes; the manifest
    counts the samples of each split. A split without samples is left out.
    """
    folders = {}
    for entry in source:
        key, equals, folder = entry.partition("=")
        if not key or not equals or not folder or key in folders:
            raise ValueError(f"--source {entry}: wanted NAME=FOLDER, each name once")
        folders[key] = Path(folder)
    places = {key: str(folder.absolute()) for key, folder in folders.items()}
    config = {"name": name, "seed": seed, "samples_per_shard": samples_per_shard}
    # What came later than others counts where it is given: older data sets stay finished.
    options = {name: value for name, value in settings.items() if (name, value) != ("digits", None)}
    config |= {"sources": places, "options": options}
    check_foreign(out, "make-dataset", *SPLITS)
    artifact = Artifact.open(out, kind="dataset", config=config, inputs={}, force=force)
    if artifact.finished:
        log.info("%s is finished: skipped", out)
        return out
    counts: dict[str, Any] = {"samples": {}, "shards": {}}
    records: dict[str, files.Record] = {}
    sources = Sources(folders, download)
    splits = build(sources, seed, **settings)
    sources.check_asked()
    for split, samples in splits.items():

        def counted(split: str = split, samples: Any = samples) -> Iterator[PackedSample]:
            shown = runlog.progress(samples, total=None, description=split)
            for number, sample in enumerate(shown, start=1):
                counts["samples"][split] = number
                yield sample

        written: dict[str, files.Record] = {}
        if shards := write_shards(counted(), out / split, samples_per_shard, written):
            counts["shards"][split] = len(shards)
        records |= {f"{split}/{name}": record for name, record in written.items()}
    log.info("%s: %s", out, ", ".join(f"{n:,} {split}" for split, n in counts["samples"].items()))
    artifact.finish(counts, records=records)
    return out


# --- patterns ----------------------------------------------------------------------------------


def write_patterns(
    out: Path,
    *,
    seed: int = 0,
    force: bool = False,
    num_samples: int = NUM_SAMPLES,
    num_pairs: int = NUM_PAIRS,
    samples_per_shard: int = SAMPLES_PER_SHARD,
) -> Path:
    """Renders the demo's pictures below ``out`` (skips what is finished) and returns ``out``.

    ``out/shards/*.tar`` holds the training pictures in img2dataset's layout, ``out/pairs`` the
    minimal pairs in MMVP-VLM's layout, ``num_pairs`` of each attribute.
    """
    config = {
        "name": "patterns",
        "seed": seed,
        "num_samples": num_samples,
        "num_pairs": num_pairs,
        "samples_per_shard": samples_per_shard,
        "mention_rates": dict(patterns.MENTION_RATES),
    }
    check_foreign(out, "make-dataset", "shards")
    artifact = Artifact.open(out, kind="dataset", config=config, inputs={}, force=force)
    if artifact.finished:
        log.info("%s is finished: skipped", out)
        return out
    log.info("render %d pictures and %d pairs per attribute", num_samples, num_pairs)
    samples, written = draw_samples(num_samples, seed), dict[str, files.Record]()
    shards = write_shards(samples, out / "shards", samples_per_shard, written)
    pictures = _write_pairs(out / "pairs", num_pairs, seed)
    artifact.finish(
        {"samples": num_samples, "shards": len(shards), "questions": len(pictures)},
        records={f"shards/{name}": record for name, record in written.items()}
        | files.records_of(out, "pairs/Questions.csv", *(f"pairs/{name}" for name in pictures)),
    )
    return out


def draw_samples(count: int, seed: int) -> Iterator[PackedSample]:
    numbered = enumerate(patterns.patterns(count, seed))
    for number, pattern in runlog.progress(numbered, total=count, description="render"):
        image, about = encode_jpeg(pattern.image), dict(pattern.values)
        yield PackedSample(f"{number:09d}", image, "jpg", [pattern.caption], about)


def _write_pairs(root: Path, num_pairs: int, seed: int) -> list[str]:
    """Writes the questions, and their pictures, whose names below ``root`` it returns."""
    rows: list[tuple[int, str, str]] = []
    for attribute in patterns.ATTRIBUTES:
        folder = root / "MLLM_VLM Images" / attribute
        folder.mkdir(parents=True, exist_ok=True)
        for pair in patterns.minimal_pairs(attribute, num_pairs, seed):
            for pattern in pair:
                question_id = len(rows) + 1
                (folder / f"{question_id}.jpg").write_bytes(encode_jpeg(pattern.image))
                rows.append((question_id, attribute, pattern.caption))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("Question ID", "Type", "Statement"))
    writer.writerows(rows)
    files.write_bytes(root / "Questions.csv", text.getvalue().encode())
    return [f"MLLM_VLM Images/{attribute}/{number}.jpg" for number, attribute, _ in rows]


def encode_jpeg(image: np.ndarray) -> bytes:
    """The image as JPEG without chroma subsampling, which would blur colours at 32 pixels."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()
