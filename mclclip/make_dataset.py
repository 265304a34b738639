"""Verb: a built-in data set, rendered -> shards and a benchmark, read like any other."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from mclclip import files
from mclclip.data import patterns
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.run import runlog
from mclclip.run.artifacts import Artifact

log = logging.getLogger("mclclip")

NUM_SAMPLES = 12_000
NUM_PAIRS = 200
SAMPLES_PER_SHARD = 2_000


def run(
    name: str,
    out: Path,
    *,
    seed: int = 0,
    num_samples: int = NUM_SAMPLES,
    num_pairs: int = NUM_PAIRS,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    full_captions: bool = False,
) -> Path:
    """Renders the data set ``name`` below ``out`` (skips what is finished) and returns ``out``.

    ``out/shards/*.tar`` holds the training pictures in img2dataset's layout, ``out/pairs`` the
    minimal pairs in MMVP-VLM's layout, ``num_pairs`` of each attribute. With ``full_captions``
    every caption names every attribute; otherwise each is named as often as ``MENTION_RATES`` says.
    The pictures are the same.
    """
    if name != "patterns":
        raise ValueError(f"no built-in data set {name!r}: there is 'patterns'")
    out = Path(out)
    rates = patterns.FULL_RATES if full_captions else patterns.MENTION_RATES
    config = {
        "name": name,
        "seed": seed,
        "num_samples": num_samples,
        "num_pairs": num_pairs,
        "samples_per_shard": samples_per_shard,
        "mention_rates": dict(rates),
    }
    artifact = Artifact.open(out, kind="dataset", config=config, inputs={})
    if artifact.finished:
        log.info("%s is finished: skipped", out)
        return out
    log.info("render %d pictures and %d pairs per attribute", num_samples, num_pairs)
    shards = write_shards(_samples(num_samples, seed, rates), out / "shards", samples_per_shard)
    questions = _write_pairs(out / "pairs", num_pairs, seed)
    artifact.finish({"samples": num_samples, "shards": len(shards), "questions": questions})
    return out


def _samples(
    count: int, seed: int, rates: Mapping[str, float] = patterns.MENTION_RATES
) -> Iterator[PackedSample]:
    numbered = enumerate(patterns.patterns(count, seed, rates))
    for number, pattern in runlog.progress(numbered, total=count, description="render"):
        image, about = _jpeg(pattern.image), dict(pattern.values)
        yield PackedSample(f"{number:09d}", image, "jpg", [pattern.caption], about)


def _write_pairs(root: Path, num_pairs: int, seed: int) -> int:
    """Writes Questions.csv and the pictures; returns the number of questions."""
    rows: list[tuple[int, str, str]] = []
    for attribute in patterns.ATTRIBUTES:
        folder = root / "MLLM_VLM Images" / attribute
        folder.mkdir(parents=True, exist_ok=True)
        for pair in patterns.minimal_pairs(attribute, num_pairs, seed):
            for pattern in pair:
                question_id = len(rows) + 1
                (folder / f"{question_id}.jpg").write_bytes(_jpeg(pattern.image))
                rows.append((question_id, attribute, pattern.caption))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("Question ID", "Type", "Statement"))
    writer.writerows(rows)
    files.write_bytes(root / "Questions.csv", text.getvalue().encode())
    return len(rows)


def _jpeg(image: np.ndarray) -> bytes:
    """JPEG without chroma subsampling: at 32 pixels it would blur the colours."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()
