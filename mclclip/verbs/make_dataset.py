"""Verb ``make-dataset``: a built-in or published data set -> shards."""

from __future__ import annotations

import csv
import importlib
import inspect
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mclclip.data import datasets, patterns
from mclclip.data.datasets.sources import Sources
from mclclip.data.shard_writer import PackedSample, check_foreign, write_shards
from mclclip.run import runlog
from mclclip.run.artifacts import Artifact
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util import files
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")

NUM_SAMPLES = 12_000
NUM_PAIRS = 200
SAMPLES_PER_SHARD = 2_000
SPLITS = ("train", "test", "unlabeled")


def run(
    name: str, out: Path, *, seed: int = 0, force: Remake = Remake.NOTHING, **options: Any
) -> Path:
    """Writes the data set ``name`` into ``out``, unless it is finished; returns ``out``.

    ``name`` is 'patterns', whose options are the fields of ``Patterns``, or one of
    ``data.datasets.NAMES``, whose options are ``source`` (entries ``NAME=FOLDER``), ``download``,
    ``samples_per_shard``, and the keyword arguments of ``build`` in the module of that name. None
    stands for the default. ``force`` moves shards of other settings aside. Raises ValueError for an
    unknown name or option and for wrong values or files, and FileNotFoundError for missing files.
    """
    options = {option: value for option, value in options.items() if value is not None}
    if name == "patterns":
        _check_options(name, options, {f.name for f in fields(Patterns)} - {"name", "seed"})
        check_foreign(out, "make-dataset", "shards")
        make_artifact(Patterns(seed=seed, **options), out, None, force)
        return out
    if name not in datasets.NAMES:
        raise ValueError(
            f"no built-in data set {name!r}: there is 'patterns', {', '.join(datasets.NAMES)}"
        )
    build = importlib.import_module(f"mclclip.data.datasets.{name}").build
    parameters = inspect.signature(build).parameters.values()
    settings = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    _check_options(name, options, {*settings, "source", "download", "samples_per_shard"})
    folders, download = _split_sources(options.pop("source", ())), options.pop("download", False)
    per_shard = options.pop("samples_per_shard", SAMPLES_PER_SHARD)
    check_foreign(out, "make-dataset", *SPLITS)
    places = {key: str(folder.absolute()) for key, folder in folders.items()}
    splits = Splits(name, seed, per_shard, places, settings | options)
    make_artifact(splits, out, (build, Sources(folders, download)), force)
    return out


def _check_options(name: str, options: Mapping[str, Any], allowed: Set[str]) -> None:
    if unknown := sorted(options.keys() - allowed):
        raise ValueError(
            f"the data set {name} has no option {unknown[0]}: it has {', '.join(sorted(allowed))}"
        )


# --- data sets with a train and a test split ---------------------------------------------------


def _split_sources(source: Sequence[str]) -> dict[str, Path]:
    """Splits entries ``NAME=FOLDER``."""
    folders: dict[str, Path] = {}
    for entry in source:
        key, equals, folder = entry.partition("=")
        if not key or not equals or not folder or key in folders:
            raise ValueError(f"--source {entry}: wanted NAME=FOLDER, each name once")
        folders[key] = Path(folder)
    return folders


Build = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True)
class Splits(Step[tuple[Build, Sources]]):
    """Shards ``SPLIT/*.tar`` of a data set; each sample's ``.json`` has its attributes."""

    kind = "dataset"
    name: str
    seed: int
    samples_per_shard: int
    sources: Mapping[str, str]
    options: Mapping[str, Any]

    def make(self, out: Artifact, how: tuple[Build, Sources]) -> Made:
        """Writes the splits, and counts their samples. An empty split gets no shard."""
        counts: dict[str, Any] = {"samples": {}, "shards": {}}
        records: dict[str, files.Record] = {}
        build, sources = how
        splits = build(sources, self.seed, **self.options)
        sources.check_used()
        folder = out.begin()
        for split, samples in splits.items():

            def count_samples(split: str = split, samples: Any = samples) -> Iterator[PackedSample]:
                shown = runlog.progress(samples, total=None, description=split)
                for number, sample in enumerate(shown, start=1):
                    counts["samples"][split] = number
                    yield sample

            of_split: dict[str, files.Record] = {}
            target, per_shard = folder / split, self.samples_per_shard
            if shards := write_shards(count_samples(), target, per_shard, of_split):
                counts["shards"][split] = len(shards)
            records |= {f"{split}/{name}": record for name, record in of_split.items()}
        samples_of = (f"{n:,} {split}" for split, n in counts["samples"].items())
        log.info("%s: %s", folder, ", ".join(samples_of))
        return Made(counts, records)


# --- patterns ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patterns(Step[None]):
    """The pictures of the demo: ``shards/*.tar`` for training, in img2dataset's layout, and in
    ``pairs`` ``num_pairs`` minimal pairs per attribute, in MMVP-VLM's layout."""

    kind = "dataset"
    name: str = "patterns"
    seed: int = 0
    num_samples: int = NUM_SAMPLES
    num_pairs: int = NUM_PAIRS
    samples_per_shard: int = SAMPLES_PER_SHARD

    def make(self, out: Artifact, how: None) -> Made:
        """Renders and writes all pictures."""
        count, folder = self.num_samples, out.begin()
        log.info("render %d pictures and %d pairs per attribute", count, self.num_pairs)
        samples, records = draw_samples(count, self.seed), dict[str, files.Record]()
        shards = write_shards(samples, folder / "shards", self.samples_per_shard, records)
        pictures = _write_pairs(folder / "pairs", self.num_pairs, self.seed)
        names = ("pairs/Questions.csv", *(f"pairs/{name}" for name in pictures))
        return Made(
            {"samples": count, "shards": len(shards), "questions": len(pictures)},
            {f"shards/{name}": record for name, record in records.items()}
            | files.records_of(folder, *names),
        )


def draw_samples(count: int, seed: int) -> Iterator[PackedSample]:
    """Yields the first ``count`` training pictures of a seed."""
    numbered = enumerate(patterns.patterns(count, seed))
    for number, pattern in runlog.progress(numbered, total=count, description="render"):
        image, about = encode_jpeg(pattern.image), dict(pattern.values)
        yield PackedSample(f"{number:09d}", image, "jpg", [pattern.caption], about)


def _write_pairs(root: Path, num_pairs: int, seed: int) -> list[str]:
    """Writes the pictures and Questions.csv; returns the pictures' paths below ``root``."""
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
    """Encodes as JPEG without chroma subsampling, which would blur colours at 32 pixels."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()
