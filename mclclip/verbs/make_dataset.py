"""Verb ``make-dataset``: a built-in or published data set -> shards."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mclclip.data import datasets
from mclclip.data.datasets.sources import Files, Sources
from mclclip.data.shard_writer import check_foreign, write_shards
from mclclip.run import runlog
from mclclip.run.artifacts import Artifact
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util import files
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")
T = TypeVar("T")

SAMPLES_PER_SHARD = 2_000


def run(
    name: str, out: Path, *, seed: int = 0, force: Remake = Remake.NOTHING, **options: Any
) -> Path:
    """Writes the data set ``name`` into ``out``, unless it is finished; returns ``out``.

    ``name`` is one of ``data.datasets.NAMES``. Its options are ``source`` (entries
    ``NAME=FOLDER``), ``download``, ``samples_per_shard``, and the keyword arguments of ``build`` in
    the module of that name. None stands for the default. ``force`` moves shards of other settings
    aside. Raises ValueError for an unknown name or option and for wrong values or files, and
    FileNotFoundError for missing files.
    """
    options = {option: value for option, value in options.items() if value is not None}
    if name not in datasets.NAMES:
        raise ValueError(f"no built-in data set {name!r}: there is {', '.join(datasets.NAMES)}")
    build = importlib.import_module(f"mclclip.data.datasets.{name}").build
    parameters = inspect.signature(build).parameters.values()
    settings = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    allowed = {*settings, "source", "download", "samples_per_shard"}
    if unknown := sorted(options.keys() - allowed):
        raise ValueError(
            f"the data set {name} has no option {unknown[0]}: it has {', '.join(sorted(allowed))}"
        )
    folders, download = _split_sources(options.pop("source", ())), options.pop("download", False)
    per_shard = options.pop("samples_per_shard", SAMPLES_PER_SHARD)
    shards = folders.get("shards")
    if shards and out.resolve().is_relative_to(shards.expanduser().resolve()):
        raise ValueError(f"--out {out} lies in --shards {shards}: write outside of it")
    places = {key: str(folder.absolute()) for key, folder in folders.items()}
    splits = Splits(name, seed, per_shard, places, settings | options)
    make_artifact(splits, out, (build, Sources(folders, download)), force)
    return out


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
    """Shards ``SPLIT/*.tar`` of a data set, or files in ``SPLIT/`` where a split has no shards.

    Each sample's ``.json`` has its attributes."""

    kind = "dataset"
    name: str
    seed: int
    samples_per_shard: int
    sources: Mapping[str, str]
    options: Mapping[str, Any]

    def reads(self, how: tuple[Build, Sources]) -> Mapping[str, str]:
        """Returns digests of the files in the user's folders."""
        return how[1].inputs()

    def make(self, out: Artifact, how: tuple[Build, Sources]) -> Made:
        """Writes the splits, and counts their samples. An empty split gets no shard."""
        counts: dict[str, Any] = {"samples": {}, "shards": {}}
        records: dict[str, files.Record] = {}
        build, sources = how
        splits = build(sources, self.seed, **self.options)
        sources.check_used()
        check_foreign(out.directory, "make-dataset", *splits)
        folder = out.begin()
        for split, content in splits.items():
            target, of_split = folder / split, dict[str, files.Record]()
            if isinstance(content, Files):
                for name, data in _count(content.files, split, counts["samples"]):
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    (target / name).write_bytes(data)
                    of_split[name] = files.record_of(target / name)
            else:
                samples = _count(content, split, counts["samples"])
                if shards := write_shards(samples, target, self.samples_per_shard, of_split):
                    counts["shards"][split] = len(shards)
            records |= {f"{split}/{name}": record for name, record in of_split.items()}
        samples_of = (
            f"{n:,} {'files' if isinstance(splits[split], Files) else 'samples'} in {split}"
            for split, n in counts["samples"].items()
        )
        log.info("%s: %s", folder, ", ".join(samples_of))
        return Made(counts, records)


def _count(content: Iterable[T], split: str, counts: dict[str, int]) -> Iterator[T]:
    """Yields the content of a split, and counts it in ``counts``."""
    for number, item in enumerate(runlog.progress(content, total=None, description=split), start=1):
        counts[split] = number
        yield item
