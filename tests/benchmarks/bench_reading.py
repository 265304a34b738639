"""How fast samples are read: TarDataset's random access beside webdataset's sequential reading.

Both decode the same files with the same open_clip training transform and tokenizer in this
process; then both fetch bytes only, from warm and from dropped file caches. Then a whole loader
with one worker stands beside that of open_clip's own training code, each in a process of its own,
on one core (``make peers`` fetches what it needs). Real photographs are measured
where the small real data sets are present. First come the ways to make pixels (``data.pixels``),
from bytes to a training crop, beside open_clip's own transform (``--only pixels``: these alone).
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip
import torch
import webdataset
from open_clip.transform import PreprocessCfg, image_transform_v2

from mclclip.config import from_tree
from mclclip.data.batches import TrainingBatches
from mclclip.data.groups import group_samples
from mclclip.data.options import DataConfig
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import Sample, TarDataset
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import index, make_dataset, pack
from tests.batches import training_batches
from tests.benchmarks import peers, pixels, timing

BATCH = 32
MAX_PIXELS = 100_000_000


class Reading:
    """One set of shards and the ways to read all of it once."""

    def __init__(self, shards: Sequence[Path], image_size: int, work: Path) -> None:
        tree = {"sources": {"bench": {"shards": [str(path) for path in shards]}}}
        config = from_tree({"run_dir": str(work), "data": tree | {"index_workers": 1}})
        self.index: SampleIndex = index.run(config, SINGLE)
        self.shards = [str(path) for path in shards]
        self.size = len(self.index) // BATCH * BATCH
        self.transform = image_transform_v2(PreprocessCfg(size=image_size), is_train=True)
        self.tokenizer = open_clip.get_tokenizer("ViT-B-32")
        options = DataConfig(max_image_pixels=MAX_PIXELS)
        self.dataset = TarDataset(self.index, options, self.transform, tokenizer=self.tokenizer)
        self.batches = self._training_batches()
        self.image_size, self.index_folder = image_size, Path(config.run_dir) / "index"
        self.ids = np.random.default_rng(0).permutation(len(self.index))[: self.size].tolist()

    def _training_batches(self) -> TrainingBatches:
        return training_batches(
            index=self.index,
            grouped=group_samples(np.zeros(len(self.index), np.int64), ()),
            transform=self.transform,
            tokenizer=self.tokenizer,
            global_batch=BATCH,
            policy="backoff",
            order="proportional",
            seed=0,
            stage=0,
        )

    def cuts(self) -> list[list[int]]:
        """The random ids in batches."""
        return [self.ids[first : first + BATCH] for first in range(0, self.size, BATCH)]

    def one_by_one(self, ids: Sequence[int]) -> None:
        """Each sample by itself."""
        assert all(isinstance(self.dataset[number], Sample) for number in ids)

    def batched(self) -> None:
        """Batches of random samples, read by offset within the batch."""
        for ids in self.cuts():
            assert all(isinstance(s, Sample) for s in self.dataset.__getitems__(ids))

    def training(self) -> None:
        """As training reads: planned, with keyed augmentation, stacked."""
        for step in range(self.size // BATCH):
            assert len(self.batches[step]) == BATCH

    def sequential(self) -> None:
        """webdataset, shard after shard."""
        samples = webdataset.WebDataset(self.shards, shardshuffle=False).decode("pilrgb")
        pairs = samples.to_tuple("jpg", "txt").map_tuple(self.transform, self._tokens)
        assert sum(1 for _, pair in zip(range(self.size), pairs, strict=False)) == self.size

    def _tokens(self, caption: str) -> torch.Tensor:
        tokens: torch.Tensor = self.tokenizer([caption])[0]
        return tokens

    # --- bytes only ---

    def bytes_one_by_one(self) -> None:
        """Image and caption bytes of each random sample by itself."""
        for number in self.ids:
            self.dataset.read_many([number])

    def bytes_batched(self) -> None:
        """The same in batches."""
        for ids in self.cuts():
            self.dataset.read_many(ids)

    def bytes_sequential(self) -> None:
        """webdataset's undecoded samples (their json too)."""
        samples = iter(webdataset.WebDataset(self.shards, shardshuffle=False))
        for _ in range(self.size):
            next(samples)

    def cold(self, read: Callable[[], None]) -> timing.Spent:
        """``read`` after the system was asked to drop the shards from its cache."""
        for path in self.shards:
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        read()
        return timing.Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)

    def epoch(self, whose: str) -> timing.Spent:
        """One epoch of a loader with one worker on one core: ``loader_epoch``."""
        given = {
            "index": str(self.index_folder),
            "shards": self.shards,
            "image_size": self.image_size,
            "batch": BATCH,
            "samples": self.size,
        }
        words = ["-m", "tests.benchmarks.loader_epoch", whose, json.dumps(given)]
        done = peers.run(words, peers=whose == "open_clip")
        if done.returncode:
            raise RuntimeError(f"the loader of {whose} failed:\n{done.stderr[-2000:]}")
        return timing.Spent(json.loads(done.stdout.splitlines()[-1]), math.nan)

    def megabytes(self) -> float:
        """Of all images read."""
        return float(self.index.image_size[self.ids].sum()) / 1e6

    def title(self, name: str) -> str:
        """The name of the samples, with how many and how large they are."""
        kilobytes = 1000 * self.megabytes() / self.size
        shards = f"{len(self.shards)} shard(s)"
        return f"{name}: {self.size} samples, {shards}, {kilobytes:.1f} kB per image"


def report(title: str, reading: Reading, rounds: int, cold: bool, only: str | None = None) -> None:
    """Prints the tables of one set of shards; ``only`` those of whole loaders."""
    title = reading.title(title)
    if only is None:
        report_decoded(title, reading, rounds)
        report_bytes(title, reading, rounds, cold)
    report_loaders(title, reading, rounds, ["fast"] if only == "fast" else ["exact", "fast"])


def report_decoded(title: str, reading: Reading, rounds: int) -> None:
    """The way to the model: decoded, transformed, tokenized."""
    ordered = sorted(reading.ids)
    reference = "webdataset, in sequence"
    decoded: dict[str, Callable[[], object]] = {
        reference: reading.sequential,
        "TarDataset, each by offset": lambda: reading.one_by_one(ordered),
        "TarDataset, each at random": lambda: reading.one_by_one(reading.ids),
        f"TarDataset, random batches of {BATCH}": reading.batched,
        f"TrainingBatches of {BATCH}": reading.training,
    }
    timing.print_table(
        f"{title}; decoded and transformed",
        timing.headers("reading", "samples"),
        timing.interleave(decoded, rounds).rows(reference, reading.size),
    )


def report_bytes(title: str, reading: Reading, rounds: int, cold: bool) -> None:
    """Reading alone, without decoding."""
    fetched: dict[str, Callable[[], None]] = {
        "webdataset": reading.bytes_sequential,
        "TarDataset, each at random": reading.bytes_one_by_one,
        f"TarDataset, random batches of {BATCH}": reading.bytes_batched,
    }
    variants: dict[str, Any] = {f"{name}, warm": read for name, read in fetched.items()}
    if cold:
        for name, read in fetched.items():
            variants[f"{name}, cold"] = lambda read=read: reading.cold(read)
    timings = timing.interleave(variants, rounds)
    rows = timings.rows("webdataset, warm", reading.size)
    speeds = [timing.number(reading.size / timings.wall_s(name)) for name in variants]
    timing.print_table(
        f"{title}; bytes only",
        [*timing.headers("reading", "samples"), "samples per wall s"],
        [[*row, speed] for row, speed in zip(rows, speeds, strict=True)],
    )


def report_loaders(title: str, reading: Reading, rounds: int, ways: Sequence[str]) -> None:
    """Our loader beside open_clip's, or alone where open_clip_train cannot run."""
    variants: dict[str, Callable[[], object]] = {
        f"mclclip, {way}": partial(reading.epoch, way) for way in ways
    }
    if peers.can_run(reads_shards=True):
        variants["open_clip"] = partial(reading.epoch, "open_clip")
    reference = list(variants)[-1]
    timings = timing.interleave(variants, rounds, warm_ups=0)
    rows = []
    for name in variants:
        low, high = timings.spread(name, reference)
        ratio = f"{timings.ratio(name, reference):.3f} ({low:.3f} to {high:.3f})"
        rows.append([name, timing.number(reading.size / timings.wall_s(name)), ratio])
    timing.print_table(
        f"{title}; an epoch of the training loader, one worker, one core",
        ["loader", "samples/s", "time, ratio (quartiles)"],
        rows,
    )
    if "open_clip" not in variants:
        print(f"\n{peers.MISSING}")


def rendered(folder: Path, num_samples: int) -> list[Path]:
    """Shards of the built-in pictures, 32 px."""
    make_dataset.run(
        "patterns", folder, num_samples=num_samples, num_pairs=1, samples_per_shard=128, seed=0
    )
    return sorted((folder / "shards").glob("*.tar"))


def photographs(folder: Path, every: int = 7, samples_per_shard: int = 40) -> list[Path]:
    """Every seventh captioned photograph of ucm_captions, packed."""
    source = timing.SHARED_DATA / "ucm_captions"
    with open(source / "captions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    chosen = set(sorted({row["filepath"] for row in rows})[::every])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "captions.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["filepath", "title"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row for row in rows if row["filepath"] in chosen)
    out = folder / "shards"
    images = _images(source, rows[0])
    pack.pack(images, out, captions=folder / "captions.csv", samples_per_shard=samples_per_shard)
    return sorted(out.glob("*.tar"))


def repeated(shards: Sequence[Path], folder: Path, times: int) -> list[Path]:
    """So many copies of shards, under other keys, so that an epoch has more than a batch."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(times):
        for shard in shards:
            path = folder / f"{number:02d}_{shard.name}"
            with tarfile.open(shard) as source, tarfile.open(path, "w") as target:
                for member in source:
                    member.name = f"{number:02d}{Path(member.name).name}"
                    target.addfile(member, source.extractfile(member))
    return sorted(folder.glob("*.tar"))


def packed(images: Sequence[bytes], folder: Path, num_samples: int) -> list[Path]:
    """Shards of JPEGs, with the captions of the CC12M shard, both in turn."""
    captions = itertools.cycle(text.decode() for text in pixels.cc12m("txt"))
    pairs = zip(range(num_samples), itertools.cycle(images), captions, strict=False)
    samples = (PackedSample(f"{number:05d}", data, "jpg", [text]) for number, data, text in pairs)
    return write_shards(samples, folder, samples_per_shard=64)


def _images(source: Path, row: dict[str, str]) -> Path:
    """The folder that the table's paths are relative to."""
    return source if (source / row["filepath"]).exists() else source / "images"


def main(arguments: Sequence[str] | None = None) -> None:
    """Pixels of single images; rendered shards, then real ones where they are."""
    parser = timing.parser(__doc__)
    only = ["pixels", "loaders", "fast"]
    parser.add_argument("--only", choices=only, help="measure these alone; fast: loaders of it")
    options = timing.parse(parser, arguments)
    rounds = options.rounds
    torch.set_num_threads(1)
    if options.only in (None, "pixels"):
        pixels.report(rounds, count=4 if options.short else 32)
    if options.only == "pixels":
        return
    tables = partial(report, only=options.only)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shards = rendered(folder / "rendered", 256 if options.short else 1024)
        reading = Reading(shards, 32, folder / "rendered_run")
        tables("rendered pictures, 32 px", reading, rounds, cold=True)
        if options.short:
            return
        if not timing.SHARED_DATA.is_dir():
            print(f"\nno real data at {timing.SHARED_DATA}: set MCLCLIP_SHARED_DATA")
            return
        shards = photographs(folder / "ucm")
        reading = Reading(shards, 224, folder / "ucm_run")
        tables("ucm_captions, to 224 px", reading, rounds, cold=True)
        shards = sorted((timing.SHARED_DATA / "cc12m_sample").glob("*.tar"))
        shards = repeated(shards, folder / "cc_shards", 8)
        reading = Reading(shards, 224, folder / "cc")
        tables("cc12m_sample eight times, to 224 px", reading, rounds, cold=False)
        shards = packed(pixels.caltech(), folder / "caltech", 480)
        reading = Reading(shards, 224, folder / "caltech_run")
        tables("caltech101, to 224 px", reading, rounds, cold=False)
        shards = packed(pixels.squares(pixels.cc12m(), 32), folder / "squares", 192)
        reading = Reading(shards, 224, folder / "squares_run")
        tables("four of cc12m_sample in a square, to 224 px", reading, rounds, cold=False)


if __name__ == "__main__":
    main()
